"""The report: the compiler's decisions and their cost, as plain data, as text for a terminal, or as a page.

    program, plan, stages ──report_data──► a dictionary (kept in report.json) ──render──► the printed report
                          search (kept in search.json) ──┘                  ──html────► report.html
    plan ──plan_text──► the same without a program

Reading a report needs no torch.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from graphpar.passes.normalize.idioms import idiom_texts
from graphpar.report.data import compile_json, decisions, predicted_data, report_data, timeline_of, with_alone
from graphpar.report.layout import layout_text, sharding_lines, sharding_sections
from graphpar.report.offload import offload_text
from graphpar.report.overlap import overlap_text
from graphpar.report.page import html
from graphpar.report.predicted import (
    assumed_lines,
    communication_lines,
    mesh_text,
    predicted_lines,
    rank_names,
    runners_up,
    timeline_legend,
)
from graphpar.report.recomputation import recomputation_text
from graphpar.report.stages import stage_table
from graphpar.report.state import state_text
from graphpar.report.trace import chrome_trace
from graphpar.runtime.modes import GENERATE, INFER
from graphpar.runtime.plan_record import REPORT, decisions_of
from graphpar.schedules.simulation import draw
from graphpar.text import bytes_text, compressed, count_text, indices_text, kept, listed, place_text, plural, wrapped

if TYPE_CHECKING:
    from rich.console import Console

    from graphpar.ir.plan import Plan

__all__ = [
    "compile_json",
    "html",
    "plan_text",
    "render",
    "report_data",
    "report_files",
    "timeline_of",
    "trace",
    "with_alone",
]

WIDTH = 100


def report_files(data: Mapping[str, Any], plan: Plan) -> dict[str, str]:
    """Make the report's files, by name: as data with the decisions that it is of, and as a page.

    ``search.json`` is there where the plan was searched, ``alone.json`` where one device was priced.
    """
    kept = {"decisions": decisions_of(plan.to_json()), "report": data}
    files = {REPORT: json.dumps(kept, indent=1) + "\n"}
    search = {} if plan.found is None else {"search": plan.found.to_json()}
    if search:
        files["search.json"] = _search_json(search["search"])
    alone = None if plan.alone is None else plan.alone.to_json()
    if alone is not None:
        files["alone.json"] = json.dumps(alone, indent=1) + "\n"
    files["report.html"] = html(with_alone(data, alone) | search)
    return files


def _search_json(search: Mapping[str, Any]) -> str:
    """Write a search as JSON, with each priced plan on a line of its own."""
    rows = ",\n".join(f"   {json.dumps(row)}" for row in search["points"]["rows"])
    without = {**search, "points": {**search["points"], "rows": []}}
    return json.dumps(without, indent=1).replace('"rows": []', f'"rows": [\n{rows}\n  ]', 1) + "\n"


def render(data: Mapping[str, Any], console: Console, out: str | None = None, seconds: float | None = None) -> None:
    """Print the report.

    Args:
        data: of :func:`report_data`; with ``search``, also the alternatives.
        out: the emitted folder, for the commands to run next.
        seconds: duration of the search.
    """
    width = min(console.width, WIDTH)
    closing = [*assumed_lines(data), *(("Warning", line) for line in data["warnings"])]
    closing += [("Next", kept(line)) for line in next_commands(out, data["mode"])] if out is not None else []
    sections = [
        wrapped(_header(data), width, " ", " " * 12),
        _fields([_plan_line(data), *predicted_lines(data, seconds)], width),
        stage_table(data, width),
        _fields(_facts(data), width),
        *sharding_sections(data.get("sharding"), width),
        communication_lines(data, width),
        _fields(_notes(data), width),
        timeline_lines(data, width),
        runners_up(data, width),
        _fields(closing, width),
    ]
    console.out("\n\n".join("\n".join(lines) for lines in sections if lines), highlight=False)


def timeline_lines(data: Mapping[str, Any], width: int) -> list[str]:
    """Draw the step in time, one line for each pp group, and a legend."""
    timeline = timeline_of(data)
    ranks = data["mesh"]["pp"]
    names = rank_names(data) if data["devices"] == ranks else [f"pp {rank}" for rank in range(ranks)]
    legend = wrapped(timeline_legend(data, timeline), width, " ", " ")
    return [f" {line}" for line in draw(timeline, width - 1, names)] + legend


def trace(data: Mapping[str, Any]) -> dict[str, Any]:
    """Make a Chrome trace of the simulated step, a row for each pp group; without a prediction times are relative, from flops."""
    return chrome_trace(timeline_of(data), rank_names(data), 1e6 if data.get("predicted") else None)


def next_commands(out: str, mode: str) -> list[str]:
    """List the commands to run next on an emitted folder."""
    folder = shlex.quote(out)
    verify = [f"graphpar verify {folder}"] if mode != INFER else []
    how = "--tokens 1,2,3 --max-new-tokens 8" if mode == GENERATE else "--steps 3"
    return [f"graphpar run {folder} {how}", *verify, f"graphpar report {folder} --html report.html"]


def _header(data: Mapping[str, Any]) -> str:
    model = data["model"]
    trained = model.get("trained")
    share = f", {count_text(trained)} trained ({trained / model['parameters']:.2%})" if trained is not None else ""
    return (
        f"graphpar   {model['name']} · {count_text(model['parameters'])} parameters{share} · {data['dtype']} · "
        f"{data['mode']} · {place_text(data)}"
    )


def _plan_line(data: Mapping[str, Any]) -> tuple[str, str]:
    count, size = data["microbatches"], data["microbatch_size"]
    microbatches = plural(count, "microbatch", "microbatches")
    schedule = f"{data['schedule']}, " if data["mesh"]["pp"] > 1 else ""  # meaningless without a pipeline
    made_for = f"; made for {data['made_for']}" if "made_for" in data else ""
    if (generation := data.get("generation")) is not None:
        groups = f"{count} groups of " if count > 1 else ""
        rows = plural(generation["sequences"], "sequence")
        replicas = data["global_batch"] // count
        each = f" on each of {replicas} replicas" if replicas > 1 else ""
        return (
            "Plan",
            f"{mesh_text(data['mesh'])}   {groups}{rows}{each}, up to {generation['length']:,} tokens{made_for}",
        )
    plan = f"{mesh_text(data['mesh'])}   {schedule}{microbatches} of {size} (global batch {data['global_batch']}){made_for}"
    return "Plan", plan


def _facts(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = []
    if data["mesh"]["pp"] > 1 and not data.get("predicted"):
        flops = [stage["flops"] for stage in data["stages"]]
        mean = sum(flops) / len(flops)
        largest = max(range(len(flops)), key=flops.__getitem__)
        ratio = f"{flops[largest] / mean if mean else 1:.2f}x the mean (from flops; transfers free)"
        lines.append(("Simulated", f"bubble {data['bubble_fraction']:.1%} · largest stage {largest}, {ratio}"))
    if data["mode"] == "train":
        own = "the mean of the replicas' own losses, as in DDP" if data.get("dp_mean") else "that of the global batch"
        lines.append(("Loss", f"{own}; gradients are of this loss"))
    if data["mesh"]["pp"] > 1:
        lines.append(("In flight", f"at most {_in_flight(data)}"))
        lines.append(("Traffic", _traffic(data)))
    if data.get("sharding"):
        lines += sharding_lines(data)
    if "state" in data:
        lines.append(("State", state_text(data["state"])))
    if "recomputation" in data:
        lines.append(("Recompute", recomputation_text(data["recomputation"])))
    if data.get("offload"):
        lines.append(("Offload", offload_text(data)))
    if "overlapped" in data:
        lines.append(("Overlap", overlap_text(data)))
    if data.get("zero"):
        lines += [("Gathers", text) for text in _gathers(data)]
    if "experts" in data:
        lines.append(("Experts", _experts(data["experts"])))
    if data["model"]["blocks"]:
        lines.append(("Blocks", " · ".join(f"{block['name']} x {block['count']}" for block in data["model"]["blocks"])))
    if data["model"].get("idioms"):
        lines.append(("Idioms", " · ".join(idiom_texts(data["model"]["idioms"]))))
    return lines


def _gathers(data: Mapping[str, Any]) -> list[str]:
    """Say when parameters are freed, where that was asked for, and gathered for the backward."""
    freed = {
        "default": [],
        "always": ["freed after each forward and each backward"],
        "never": ["kept from forward to backward"],
    }
    reshard = data.get("reshard", "default")
    parts = freed.get(
        reshard, [f"freed after each forward down to shards over {reshard} ranks, after each backward to all"]
    )
    if data["prefetch"] == "none":
        parts = [*parts, "a block is gathered for its backward when it is needed"]
    elif data["prefetch"] is not None:
        point = "before a block computes" if data["prefetch"] == "pre" else "when a block has computed"
        blocks = "block is" if data["prefetch_distance"] == 1 else f"{data['prefetch_distance']} blocks are"
        beside = f"{bytes_text(data['ahead_bytes'])} beside its own"
        parts = [*parts, f"in the backward the next {blocks} gathered {point}, {beside}"]
    return [" · ".join(parts)] if parts else []


def _experts(experts: Mapping[str, int]) -> str:
    return (
        f"{count_text(experts['parameters'])} parameters, a rank has {bytes_text(experts['rank_bytes'])} · "
        f"{count_text(experts['other_parameters'])} others, a rank has {bytes_text(experts['other_rank_bytes'])}"
    )


def _in_flight(data: Mapping[str, Any]) -> str:
    peaks = data["in_flight"]
    if len(peaks) > 16:
        return f"{max(peaks)} activations of a stage on a rank, {min(peaks)} on the least loaded"
    ranks = "ranks" if data["devices"] == len(peaks) else "pp groups"
    return f"{', '.join(map(str, peaks))} microbatches on {ranks} 0 to {len(peaks) - 1}, whose activations are kept"


def _traffic(data: Mapping[str, Any]) -> str:
    sends = [value for stage in data["stages"] for value in stage["sends"]]
    forward = sum(value["bytes"] for value in sends) * data["microbatches"]
    backward = sum(value["bytes"] for value in sends if value["requires_grad"]) * data["microbatches"]
    gradients = f" · gradients back {bytes_text(backward)}" if backward else ""
    return f"activations {bytes_text(forward)}{gradients} a step, over all boundaries"


def _sent(value: Mapping[str, Any]) -> str:
    relayed = ", relayed" if value["relayed"] else ""
    gradient = "" if value["requires_grad"] else ", no gradient"
    return f"{value['name']} {value['shape']} {bytes_text(value['bytes'])}{relayed}{gradient}"


def _notes(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List what stages send, tied parameters, recomputed values, and which stages read the inputs."""
    lines: list[tuple[str, str]] = []
    sent: dict[str, list[int]] = {}
    for stage in data["stages"]:
        if stage["sends"]:
            sent.setdefault(" · ".join(kept(_sent(value)) for value in stage["sends"]), []).append(stage["index"])
    lines += [("Sends", f"{_on('', stages)}, a microbatch:  {text}".strip()) for text, stages in sent.items()]
    for tie in data["ties"]:
        where = _on("on", tie["stages"])
        shared = "; one gradient, summed over them" if len(tie["stages"]) > 1 and data["mode"] == "train" else ""
        lines.append(("Tied", f"{' = '.join(tie['names'])}, {where}{shared}"))
    groups: dict[tuple[str, ...], list[int]] = {}
    for stage in data["stages"]:
        if stage["recomputed"]:
            groups.setdefault(tuple(stage["recomputed"]), []).append(stage["index"])
    for names, stages in groups.items():
        lines.append(("Recomputed", f"{listed(names, 8)} {_on('on', stages)} (cheaper than sending)"))
    for entry in data["inputs"]:
        readers = [stage["index"] for stage in data["stages"] if entry["name"] in stage["inputs"]]
        if len(data["stages"]) > 1:
            lines.append(("Input", f"{entry['name']} {_on('to', readers) if readers else 'unused'}"))
    last = data["stages"][-1]
    if len(data["stages"]) > 1:
        what = "Loss" if data["mode"] == "train" else "Outputs"
        together = data["devices"] // data["mesh"]["pp"]
        ranks = indices_text(range(last["rank"] * together, (last["rank"] + 1) * together))
        lines.append((what, f"on rank{'s' if together > 1 else ''} {ranks}, from stage {last['index']}"))
    return lines


def _on(word: str, stages: Sequence[int]) -> str:
    return f"{word} stage{'s' if len(stages) > 1 else ''} {indices_text(stages)}".strip()


def _fields(lines: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Print labels on the left and texts wrapped to their right; a label that repeats is printed once."""
    margin, previous = 12, ""
    printed: list[str] = []
    for label, text in lines:
        shown = "" if label == previous else f" {label}"
        printed += wrapped(text, width, f"{shown:<{margin}}", " " * margin)
        previous = label
    return printed


def plan_text(plan: Plan) -> str:
    """Print the plan alone, without sizes and transfers, which only the program knows."""
    modules = compressed([list(stage.modules) for stage in plan.stages])
    data = {
        **decisions(plan),
        "stages": [
            {"index": stage.index, "rank": stage.rank, "modules": names} for stage, names in zip(plan.stages, modules)
        ],
        **({} if plan.predicted is None else predicted_data(plan, plan.predicted)),
        **({} if plan.found is None else {"search": plan.found.to_json()}),
    }
    data["warnings"] = data.get("misfits", []) + list(plan.warnings)
    data = with_alone(data, None if plan.alone is None else plan.alone.to_json())
    sections = [
        wrapped(f"graphpar   {plan.model} · {plan.dtype} · {plan.mode} · {place_text(data)}", WIDTH, " ", " " * 12),
        _fields([_plan_line(data), *predicted_lines(data)], WIDTH),
        stage_table(data, WIDTH),
        _fields([*layout_text(plan), *([("Offload", offload_text(data))] if plan.offload else [])], WIDTH),
        communication_lines(data, WIDTH),
        runners_up(data, WIDTH),
        _fields([*assumed_lines(data), *(("Warning", line) for line in data["warnings"])], WIDTH),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)
