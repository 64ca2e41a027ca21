"""The report as one self-contained page: no other file, nothing from the network. Without script it shows the same, without tooltips
and zoom.

    data of a report ──templates/report.html──► report.html          tables ──templates/base.html──► pages of notebooks and of sweep
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from graphpar import text
from graphpar.passes.normalize.idioms import idiom_texts
from graphpar.report import charts, memory_chart, memory_table, phrases, search_chart
from graphpar.report.data import timeline_of
from graphpar.report.state import state_text
from graphpar.runtime.option_kinds import STEPS
from graphpar.text import count_text, flops_text, indices_text, share_text, spread_text

_CARRIED = {
    "pp": "results of stages, and their gradients",
    "dp_replicate": "sums of gradients",
    "dp_shard": "reduce-scatters of gradients, gathers of parameters",
    "cp": "keys and values of other parts of the sequence, sums of gradients, gathers of parameters",
    "dp_expert": "rows to their experts and back, sums of gradients",
    "ep": "rows to their experts and back",
    "tp": "activations and their gradients",
}
"""What is sent over each axis."""
_OUTCOMES = {
    "priced": "priced: the points above",
    "slower": "not priced: a lower bound of the step time is above the plans that were found",
    "too_large": "not priced: a lower bound of the memory is above a device's",
    "open": "not priced: the time limit was over",
    "no_faster": "left out: a larger tp that makes microbatches no faster",
    "impossible": "not possible: the model can't be sharded this way, or has fewer units than stages",
}
"""What becomes of a candidate, in the order of the table."""
_DECISIONS = {
    **{axis: axis for axis in ("pp", "dp_replicate", "dp_shard", "dp_expert", "cp", "ep", "tp")},
    "zero": "ZeRO", "reshard": "reshard", "schedule": "schedule", "stages_per_rank": "stages a rank", "microbatches": "microbatches",
    "microbatch_size": "rows of a microbatch", "overlap_tp": "tp overlapped with products",
}  # fmt: skip


@cache
def _templates() -> Environment:
    """The templates, which know the functions that write numbers, phrases and charts."""
    made = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for module in (text, phrases, charts, memory_chart, search_chart):
        made.globals |= {name: value for name, value in vars(module).items() if callable(value)}
    for name in ("page.css", "page.js"):
        source = Path(__file__).with_name(name).read_text(encoding="utf-8")
        made.globals[{"page.css": "style", "page.js": "script"}[name]] = Markup(source)
    return made


def html(data: Mapping[str, Any]) -> str:
    """Make the page of a report's data (:func:`graphpar.report.report.report_data`)."""
    timeline, predicted, sharding, search = (
        timeline_of(data),
        data.get("predicted"),
        data.get("sharding"),
        data.get("search"),
    )
    flops = [stage["flops"] for stage in data["stages"]]
    used = [name for name, _ in phrases.sharding_legend(sharding)] if sharding else []
    return _templates().get_template("report.html").render(
        title=data["model"]["name"], data=data, timeline=timeline, names=phrases.rank_names(data), br=Markup("<br>"),
        links=[
            *([("plans", "Plans"), ("searched", "What was tried")] if search else []),
            ("stages", "Stages"),
            ("timeline", "Timeline"),
            *([("memory", "Memory"), ("communication", "Communication")] if predicted else []),
            ("sharding", "Sharding"),
        ],
        pairs=_facts(data),
        flops=sum(flops) or 1.0, most_flops=max(flops) or 1.0, times=phrases.stage_columns(predicted) if predicted else [()] * len(flops),
        inside=any(span.collectives for row in timeline.spans for span in row),
        sharded=[f"{line}." if not line.endswith(".") else line for line in _sharded(data)],
        types=[phrases.TYPES[letter] for letter in "IRPSE" if letter in "IRPS" or phrases.TYPES[letter][0] in used],
        structure=_structure(data),
        carried=_CARRIED, outcomes=_OUTCOMES, decisions=_DECISIONS,
        **(_of_search(data, search) if search else {}),
        **(_of_prediction(data, timeline) if predicted else {}),
    )  # fmt: skip


def sheet(title: str, sections: Sequence[tuple[str, Markup]], pairs: Sequence[tuple[object, str]] = ()) -> str:
    """Make a page of figures, each with its meaning, and sections under headings."""
    return _templates().get_template("base.html").render(title=title, sections=sections, pairs=pairs)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Markup:
    """Make a table of a page."""
    made: Any = _templates().get_template("base.html").module
    return Markup(made.table(head, rows))


def _facts(data: Mapping[str, Any]) -> list[tuple[object, str]]:
    predicted = data.get("predicted")
    step = [] if predicted is None else [
        (spread_text(predicted["step_time_s"], predicted.get("spread_s", 0.0)), STEPS[data["mode"]]),
        (share_text(predicted["mfu"]), "MFU"),
        (phrases.peak_text(predicted), f"peak, {predicted['cluster']}"),
    ]  # fmt: skip
    return [
        *step,
        (count_text(data["model"]["parameters"]), "parameters"),
        (phrases.mesh_text(data["mesh"]), "mesh"),
        (data["schedule"], "schedule"),
        (f"{data['microbatches']} x {data['microbatch_size']}", "microbatches x rows"),
        (share_text(data["bubble_fraction"]), "bubble"),
        (flops_text(sum(stage["flops"] for stage in data["stages"])), "forward of a microbatch"),
    ]


def _of_search(data: Mapping[str, Any], search: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the template shows of a search: its plans, the chosen value of each decision, and the runners-up."""
    chosen = {**data["mesh"], **{name: data.get(name) for name in _DECISIONS if name in data}}
    chosen["stages_per_rank"] = len(data["stages"]) // data["mesh"]["pp"]
    step = data["predicted"]["step_time_s"]
    rows = []
    for other in search["alternatives"]:
        seconds = other["step_time_s"]
        took = spread_text(seconds, other.get("spread_s", 0.0))
        rows.append((*phrases.named(other), took, f"{seconds / step - 1:+.1%}", other["why_not"]))
    return {
        "plans": search_chart.plans_of(search),
        "bounded": search_chart.bounded_of(search),
        "chosen": chosen,
        "runners_up": rows,
    }


def _of_prediction(data: Mapping[str, Any], timeline: Any) -> dict[str, Any]:
    """Return what the template shows of a prediction: memory, and under which axis sums of gradients over several are counted."""
    predicted = data["predicted"]
    under = next((closing["axis"] for closing in predicted["closings"] if closing["axis"]), None)
    others = [axis for axis in ("dp_replicate", "dp_shard", "cp") if data["mesh"][axis] > 1 and axis != under]
    return {
        "moments": memory_table.MOMENTS,
        "kinds": memory_chart.KINDS,
        "levels": memory_chart.memory_over_time(data, timeline),
        "fullest": phrases.allocated_bytes(predicted)[phrases.fullest(predicted)],
        "longest": max(predicted["communication_s"].values(), default=0.0) or 1.0,
        "under": under,
        "together": others if under is not None and data["mode"] == "train" else [],
    }


def _sharded(data: Mapping[str, Any]) -> list[str]:
    """Say how the program is sharded, and its state."""
    sharding = data.get("sharding")
    lines = [
        "No tensor of the model is sharded over tp, cp or ep: each rank computes with unsharded tensors of its stages"
    ]
    if sharding is not None:
        lines = [phrases.transitions_text(data), f"The placement of tensors is {phrases.gap_text(sharding['gap'])}"]
        lines += sharding["notes"]
        for operator, rules in sharding["discovered"].items():
            lines.append(f"{operator} has no built-in rule: {'; '.join(rules) or 'it runs on unsharded tensors'}")
    return [*lines, *([f"State: {state_text(data['state'])}"] if "state" in data else [])]


def _structure(data: Mapping[str, Any]) -> list[str]:
    """List blocks, idioms, ties, recomputed values, and who reads the inputs."""
    items = [f"{block['name']} x {block['count']}: one class in blocks.py" for block in data["model"]["blocks"]]
    items += idiom_texts(data["model"].get("idioms", {}), written=True)
    for tie in data["ties"]:
        items.append(f"{' = '.join(tie['names'])}: one parameter, on stage {indices_text(tie['stages'])}")
    for stage in data["stages"]:
        if stage["recomputed"]:
            items.append(f"stage {stage['index']} recomputes: {', '.join(stage['recomputed'])}")
    for entry in data["inputs"]:
        readers = [stage["index"] for stage in data["stages"] if entry["name"] in stage["inputs"]]
        items.append(f"input {entry['name']}: {f'read by stage {indices_text(readers)}' if readers else 'unused'}")
    return items
