"""The report: what the compiler decided and what it costs, as plain data, as text for a terminal, or as a page.

    program, plan, stages ──report_data──► a dictionary (kept in plan.json) ──render──► the printed report
                          search (kept in search.json) ──┘                  ──html────► report.html
    plan ──plan_text──► the same without a program

Reading a report needs no torch.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphpar.report_data import compile_json, decisions, predicted_data, report_data, timeline_of
from graphpar.report_html import html
from graphpar.report_layout import layout_text, sharding_lines, sharding_sections
from graphpar.report_predicted import assumed_lines, communication_lines, predicted_lines, runners_up, stage_columns
from graphpar.report_text import (
    bytes_text,
    compressed,
    count_text,
    flops_text,
    indices_text,
    listed,
    place_text,
    plural,
)
from graphpar.simulation import draw
from graphpar.trace import chrome_trace

if TYPE_CHECKING:
    from graphpar.plans import Plan

__all__ = ["compile_json", "html", "plan_text", "render", "report_data", "timeline_of", "trace"]

WIDTH = 100
BAR = 12


def render(data: Mapping[str, Any], console: Console, out: str | None = None, seconds: float | None = None) -> None:
    """Print the report.

    Args:
        data: of :func:`report_data`; with ``search``, also what else was found.
        out: the emitted folder, for the commands to run next.
        seconds: that the search took.
    """
    width = min(console.width, WIDTH)
    closing = [*assumed_lines(data), *(("Warning", line) for line in data["warnings"])]
    closing += [("Next", line) for line in next_commands(out, data["mode"])] if out is not None else []
    sections = [
        [_header(data)],
        _fields([_plan_line(data), *predicted_lines(data, seconds)], width),
        _lines_of(_stage_table(data), width),
        _fields(_facts(data), width),
        *sharding_sections(data.get("sharding"), width),
        communication_lines(data),
        _fields(_notes(data), width),
        [f" {line}" for line in _timeline(data, width - 1)],
        runners_up(data, width),
        _fields(closing, width),
    ]
    console.out("\n\n".join("\n".join(lines) for lines in sections if lines), highlight=False)


def _timeline(data: Mapping[str, Any], width: int) -> list[str]:
    """The schedule, a line a pp rank."""
    lines = draw(timeline_of(data), width)
    if data["devices"] == data["mesh"]["pp"]:
        return lines
    return [re.sub("^rank", "pp  ", line) for line in lines]


def trace(data: Mapping[str, Any]) -> dict[str, Any]:
    """The simulated schedule as a Chrome trace, a row a pp rank; without a prediction its times are relative, from flops."""
    label = "rank" if data["devices"] == data["mesh"]["pp"] else "pp"
    names = [f"{label} {rank}" for rank in range(data["mesh"]["pp"])]
    return chrome_trace(timeline_of(data), names, 1e6 if data.get("predicted") else None)


def next_commands(out: str, mode: str) -> list[str]:
    verify = [f"graphpar verify {out}"] if mode == "train" else []
    return [f"graphpar run {out} --steps 3", *verify, f"graphpar report {out} --html report.html"]


def _header(data: Mapping[str, Any]) -> str:
    model = data["model"]
    return (
        f" graphpar   {model['name']} · {count_text(model['parameters'])} parameters · {data['dtype']} · "
        f"{data['mode']} · {place_text(data)}"
    )


def _plan_line(data: Mapping[str, Any]) -> tuple[str, str]:
    degrees = [f"{axis} {degree}" for axis, degree in data["mesh"].items() if degree > 1] or ["1 device"]
    count, size = data["microbatches"], data["microbatch_size"]
    microbatches = plural(count, "microbatch", "microbatches")
    schedule = f"{data['schedule']}, " if data["mesh"]["pp"] > 1 else ""  # without a pipeline it says nothing
    plan = f"{' · '.join(degrees)}   {schedule}{microbatches} of {size} (global batch {data['global_batch']})"
    return "Plan", plan


def _facts(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = []
    if data["mesh"]["pp"] > 1 and not data.get("predicted"):
        flops = [stage["flops"] for stage in data["stages"]]
        mean = sum(flops) / len(flops)
        largest = max(range(len(flops)), key=flops.__getitem__)
        ratio = f"{flops[largest] / mean if mean else 1:.2f}x the mean"
        simulated = (
            f"bubble {data['bubble_fraction']:.1%} · largest stage {largest}, {ratio} (from flops; transfers free)"
        )
        lines.append(("Simulated", simulated))
    if data["mesh"]["pp"] > 1:
        lines.append(("In flight", f"at most {_in_flight(data)}"))
        lines.append(("Traffic", _traffic(data)))
    if data.get("sharding"):
        lines += sharding_lines(data["sharding"], data["mode"])
    if "experts" in data:
        lines.append(("Experts", _experts(data["experts"])))
    if data["model"]["blocks"]:
        lines.append(("Blocks", " · ".join(f"{block['name']} x {block['count']}" for block in data["model"]["blocks"])))
    return lines


def _experts(experts: Mapping[str, int]) -> str:
    return (
        f"{count_text(experts['parameters'])} parameters, a rank has {bytes_text(experts['rank_bytes'])} · "
        f"{count_text(experts['other_parameters'])} others, a rank has {bytes_text(experts['other_rank_bytes'])}"
    )


def _in_flight(data: Mapping[str, Any]) -> str:
    peaks = data["in_flight"]
    if len(peaks) > 16:
        return f"{max(peaks)} activations of a stage on a rank, {min(peaks)} on the least loaded"
    ranks = "ranks" if data["devices"] == len(peaks) else "pp ranks"
    return f"{', '.join(map(str, peaks))} microbatches' activations on {ranks} 0 to {len(peaks) - 1}"


def _traffic(data: Mapping[str, Any]) -> str:
    forward = sum(value["bytes"] for stage in data["stages"] for value in stage["sends"]) * data["microbatches"]
    backward = (
        sum(value["bytes"] for stage in data["stages"] for value in stage["sends"] if value["requires_grad"])
        * data["microbatches"]
    )
    gradients = f" · gradients back {bytes_text(backward)}" if backward else ""
    return f"activations {bytes_text(forward)}{gradients} a step, over all boundaries"


def _stage_table(data: Mapping[str, Any]) -> Table:
    """A row a stage; with what is predicted its times and its rank's memory beside the device's, else its share of the flops."""
    stages, predicted = data["stages"], data.get("predicted")
    together = data["devices"] // data["mesh"]["pp"]  # ranks that hold a stage, each its pieces
    table = Table(box=None, padding=(0, 1))
    table.add_column("Stage", justify="right", no_wrap=True)
    table.add_column("rank" if together == 1 else "ranks", justify="right", no_wrap=True)
    table.add_column("modules", overflow="fold", ratio=1)
    if predicted is None and "flops" not in stages[0]:
        extra: list[list[str]] = [[] for _ in stages]
    elif predicted is None:
        extra = _flops_columns(table, stages)
    else:
        extra = _time_columns(table, stages, predicted)
    for stage, cells in zip(stages, extra):
        ranks = indices_text(range(stage["rank"] * together, (stage["rank"] + 1) * together))
        row = [str(stage["index"]), ranks, ", ".join(stage["modules"]), *cells]
        table.add_row(*(Text(cell) for cell in row))
    return table


def _flops_columns(table: Table, stages: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    table.add_column("params", justify="right", no_wrap=True)
    table.add_column("forward", justify="right", no_wrap=True)
    table.add_column("share", no_wrap=True)
    flops = [stage["flops"] for stage in stages]
    total, most = sum(flops) or 1.0, max(flops) or 1.0
    return [
        [count_text(stage["parameters"]), flops_text(own), f"{_bar(own / most)} {own / total:4.0%}"]
        for stage, own in zip(stages, flops)
    ]


def _time_columns(table: Table, stages: Sequence[Mapping[str, Any]], predicted: Mapping[str, Any]) -> list[list[str]]:
    columns = stage_columns(predicted)
    backward = any(column[1] for column in columns)
    for name in ("params", "fwd", *(["bwd"] if backward else [])):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("memory", no_wrap=True)
    rows = []
    for own, (forward, back, peak, share) in zip(predicted["stages"], columns):
        memory = f"{_bar(share)} {peak:>8}" if peak else ""
        rows.append([count_text(own["parameters"]), forward, *([back] if backward else []), memory])
    return rows


def _sent(value: Mapping[str, Any]) -> str:
    relayed = ", relayed" if value["relayed"] else ""
    gradient = "" if value["requires_grad"] else ", no gradient"
    return f"{value['name']} {value['shape']} {bytes_text(value['bytes'])}{relayed}{gradient}"


def _bar(share: float) -> str:
    eighths = round(max(0.0, min(1.0, share)) * BAR * 8)
    whole, part = divmod(eighths, 8)
    return ("█" * whole + (" ▏▎▍▌▋▊▉"[part] if part else "")).ljust(BAR)


def _notes(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What crosses, tied parameters, recomputed values and who reads the inputs."""
    lines: list[tuple[str, str]] = []
    sent: dict[str, list[int]] = {}
    for stage in data["stages"]:
        if stage["sends"]:
            sent.setdefault(" · ".join(_kept(_sent(value)) for value in stage["sends"]), []).append(stage["index"])
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


def _kept(text: str) -> str:
    """``text`` as one word, which no line break falls into."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def _fields(lines: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Labels on the left, texts wrapped beside them; a label that repeats is printed once."""
    margin, previous = 12, ""
    printed: list[str] = []
    for label, text in lines:
        shown = "" if label == previous else f" {label}"
        wrapped = textwrap.wrap(text, width - margin, break_long_words=False, break_on_hyphens=False) or [""]
        printed += [f"{start:<{margin}}{line}" for start, line in zip([shown] + [""] * len(wrapped), wrapped)]
        previous = label
    return [line.replace("\N{NO-BREAK SPACE}", " ").rstrip() for line in printed]


def _lines_of(table: Table, width: int) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None, highlight=False).print(table)
    return [line.rstrip() for line in stream.getvalue().rstrip().splitlines()]


def plan_text(plan: Plan) -> str:
    """The plan alone, without what only the program knows: sizes, and what crosses."""
    modules = compressed([list(stage.modules) for stage in plan.stages])
    data = {
        **decisions(plan),
        "stages": [{"index": stage.index, "rank": stage.rank, "modules": names} for stage, names in zip(plan.stages, modules)],
        **({} if plan.predicted is None else predicted_data(plan, plan.predicted)),
        **({} if plan.found is None else {"search": plan.found.to_json()}),
    }
    warnings = data.get("misfits", []) + list(plan.warnings)
    sections = [
        [f" graphpar   {plan.model} · {plan.dtype} · {plan.mode} · {place_text(data)}"],
        _fields([_plan_line(data), *predicted_lines(data)], WIDTH),
        _lines_of(_stage_table(data), WIDTH),
        _fields(layout_text(plan), WIDTH),
        communication_lines(data),
        runners_up(data, WIDTH),
        _fields([*assumed_lines(data), *(("Warning", line) for line in warnings)], WIDTH),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)
