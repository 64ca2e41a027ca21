"""The report as one self-contained page: no other file, nothing from the network. Without script it shows the same, without tooltips
and zoom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from graphpar.passes.normalize.idioms import idiom_texts
from graphpar.report.charts import axes_chart, memory_chart
from graphpar.report.data import timeline_of
from graphpar.report.layout import TYPES, gap_text, redistribution_text, sent_text, sharding_legend, transitions_text
from graphpar.report.memory_time import line_key, memory_over_time, memory_time_svg
from graphpar.report.overlap import overlap_text
from graphpar.report.predicted import (
    alone_text,
    assumed_lines,
    mesh_text,
    parts_text,
    peak_text,
    rank_names,
    stage_columns,
)
from graphpar.report.recomputation import recomputation_text
from graphpar.report.search_page import search_sections
from graphpar.report.state import state_text
from graphpar.report.timeline_chart import key, timeline_svg
from graphpar.runtime.modes import STEPS
from graphpar.schedules.simulation import Timeline
from graphpar.text import bytes_text, count_text, flops_text, indices_text, place_text, seconds_text, share_text

_STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
_SCRIPT = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
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


def html(data: Mapping[str, Any]) -> str:
    """Make the page of a report's data (:func:`graphpar.report.report.report_data`)."""
    name = escape(data["model"]["name"])
    timeline, sections = timeline_of(data), search_sections(data)
    links = [
        *([("plans", "Plans"), ("searched", "What was tried")] if sections else []),
        ("stages", "Stages"),
        ("timeline", "Timeline"),
        *([("memory", "Memory"), ("communication", "Communication")] if data.get("predicted") else []),
        ("sharding", "Sharding"),
    ]
    body = [
        f"<h1>{name}</h1>",
        f'<div class="soft">graphpar · {data["mode"]} · {data["dtype"]} · {escape(place_text(data))}</div>',
        "<nav>" + "".join(f'<a href="#{to}">{text}</a>' for to, text in links) + "</nav>",
        _facts(data),
        *(f'<div class="warning">{escape(line)}</div>' for line in data["warnings"]),
        *_predicted(data),
        *sections,
        '<h2 id="stages">Stages</h2>',
        _stages(data),
        *(
            [f'<p class="soft">Recomputed: {escape(recomputation_text(data["recomputation"]))}.</p>']
            if "recomputation" in data
            else []
        ),
        *([f'<p class="soft">Overlapped: {escape(overlap_text(data))}.</p>'] if "overlapped" in data else []),
        '<h2 id="timeline">Timeline of a step</h2>',
        _schedule(data, timeline),
        *_memory(data, timeline),
        *_communication(data),
        '<h2 id="sharding">How tensors are sharded</h2>',
        *_sharding(data),
        _notes(data),
    ]
    return page(data["model"]["name"], body, _SCRIPT)


def page(title: str, body: Sequence[str], script: str = "") -> str:
    """Join parts that are HTML already into a self-contained page."""
    run = f"<script>\n{script}</script>\n" if script else ""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)} · graphpar</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>\n{_STYLE}</style>\n</head>\n<body>\n" + "\n".join(body) + f"\n{run}</body>\n</html>\n"
    )


def facts(pairs: Sequence[tuple[object, str]]) -> str:
    """Show figures in a row, each with its meaning."""
    cells = "".join(
        f'<div class="fact"><b>{escape(str(value))}</b><span>{escape(what)}</span></div>' for value, what in pairs
    )
    return f'<div class="facts">{cells}</div>'


def _facts(data: Mapping[str, Any]) -> str:
    predicted = data.get("predicted")
    step = [] if predicted is None else [
        (seconds_text(predicted["step_time_s"]), STEPS[data["mode"]]),
        (share_text(predicted["mfu"]), "MFU"),
        (peak_text(predicted), f"peak, {predicted['cluster']}"),
    ]  # fmt: skip
    pairs = [
        *step,
        (count_text(data["model"]["parameters"]), "parameters"),
        (mesh_text(data["mesh"]), "mesh"),
        (data["schedule"], "schedule"),
        (f"{data['microbatches']} x {data['microbatch_size']}", "microbatches x rows"),
        (share_text(data["bubble_fraction"]), "bubble"),
        (flops_text(sum(stage["flops"] for stage in data["stages"])), "forward of a microbatch"),
    ]
    return facts(pairs)


def _stages(data: Mapping[str, Any]) -> str:
    most = max(stage["flops"] for stage in data["stages"]) or 1.0
    total = sum(stage["flops"] for stage in data["stages"]) or 1.0
    rows = []
    names = rank_names(data)
    times = stage_columns(data["predicted"]) if data.get("predicted") else []
    for stage in data["stages"]:
        timed = "".join(f'<td class="right">{text}</td>' for text in times[stage["index"]][:3]) if times else ""
        width = 60 * stage["flops"] / most
        sends = "<br>".join(_sent(value) for value in stage["sends"]) or '<span class="soft">the result</span>'
        rows.append(
            f'<tr><td class="right">{stage["index"]}</td><td class="right">{names[stage["rank"]]}</td>'
            f'<td class="mono">{escape(", ".join(stage["modules"]))}</td>'
            f'<td class="right">{count_text(stage["parameters"])}<br>'
            f'<span class="soft">{bytes_text(stage["parameter_bytes"])}</span></td>'
            f'<td class="right">{flops_text(stage["flops"])}</td>'
            f'<td style="white-space:nowrap"><span class="bar" style="width:{width:.0f}px"></span> '
            f"{stage['flops'] / total:.0%}</td>{timed}<td>{sends}</td></tr>"
        )
    timed = "".join(f'<th class="right">{name}</th>' for name in ("Forward", "Backward", "Memory")) if times else ""
    head = (
        '<tr><th class="right">Stage</th><th class="right">Ranks</th><th>Modules</th><th class="right">Parameters</th>'
        f'<th class="right">Work</th><th>Share</th>{timed}<th>Sends, a microbatch</th></tr>'
    )
    return f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>'


def _sent(value: Mapping[str, Any]) -> str:
    notes = [bytes_text(value["bytes"]), *(["relayed"] if value["relayed"] else [])]
    if not value["requires_grad"]:
        notes.append("no gradient")
    shape = "x".join(map(str, value["shape"])) or "scalar"
    return f'<code>{escape(value["name"])}</code> {shape} {value["dtype"]} <span class="soft">{", ".join(notes)}</span>'


# ---- the prediction --------------------------------------------------------------------------------------------


def _predicted(data: Mapping[str, Any]) -> list[str]:
    predicted = data.get("predicted")
    if predicted is None:
        return []
    lines = [f"Step: {parts_text(predicted)}."]
    if "alone" in data:
        lines.append(f"One device: {alone_text(data)}.")
    lines += [f"{label}: {text}." for label, text in assumed_lines(data)]
    return [f'<p class="soft">{escape(line)}</p>' for line in lines]


def _memory(data: Mapping[str, Any], timeline: Timeline) -> list[str]:
    predicted = data.get("predicted")
    if predicted is None:
        return []
    names, capacity = rank_names(data), predicted["memory_bytes"]
    parts = ['<h2 id="memory">Memory</h2>']
    lines = memory_over_time(data, timeline)
    if lines is not None:
        near = capacity < 2 * max(level for line in lines for _, level in line)
        parts += [
            f'<h3>Over a step</h3><div class="chart">{memory_time_svg(lines, names, capacity, timeline.length)}</div>',
            f'<div class="soft">{line_key(names, near)}</div>',
            '<p class="soft">Of each rank, on the time axis of the timeline, with which it zooms. What a rank always holds is its '
            "parameters, gradients, optimizer state and buffers; on top are the activations of microbatches that wait for their "
            "backward, and, while an action runs, what the largest one of that rank needs.</p>",
        ]
    return [*parts, "<h3>At the peak</h3>", f'<div class="chart">{memory_chart(predicted, names)}']


def _communication(data: Mapping[str, Any]) -> list[str]:
    """Write a row for each axis over which something is sent: the busiest rank's seconds in a step, and how much is not hidden."""
    predicted = data.get("predicted")
    if predicted is None:
        return []
    head = '<h2 id="communication">Communication by mesh axis</h2>'
    if not predicted["communication_s"]:
        return [head, '<p class="soft">Ranks send nothing to each other.</p>']
    step, sharding = predicted["step_time_s"], data.get("sharding") or {"bytes": {}}
    rows = []
    for axis, seconds in predicted["communication_s"].items():
        exposed = predicted["exposed_s"].get(axis, 0.0)
        sent = sharding["bytes"].get(axis)
        cells = (
            f'<td class="mono">{axis}</td><td class="right">{data["mesh"].get(axis, "")}</td><td>{_CARRIED.get(axis, "")}</td>',
            f'<td class="right">{seconds_text(seconds)}</td><td class="right">{seconds_text(exposed)}</td>',
            f'<td class="right">{share_text(exposed / step)}</td><td class="right">{bytes_text(round(sent)) if sent else ""}</td>',
        )
        rows.append(f"<tr>{''.join(cells)}</tr>")
    names = ("Axis", "Degree", "Carries", "A step", "Exposed", "of the step", "Sent, a microbatch")
    right = {"Degree", "A step", "Exposed", "of the step", "Sent, a microbatch"}
    titles = "".join(f'<th class="right">{name}</th>' if name in right else f"<th>{name}</th>" for name in names)
    return [
        head,
        f'<div class="chart">{axes_chart(predicted)}',
        f'<div class="scroll"><table><tr>{titles}</tr>{"".join(rows)}</table></div>',
        '<p class="soft">Of the busiest rank. What is exposed takes time of the step; computation hides the rest. The last column is of '
        f"the redistributions of tensors below, and blank for other axes.{_together(data)}</p>",
    ]


def _together(data: Mapping[str, Any]) -> str:
    """Say under which axis sums of gradients over several are counted."""
    predicted = data["predicted"]
    under = next((closing["axis"] for closing in predicted["closings"] if closing["axis"]), None)
    others = [axis for axis in ("dp_replicate", "dp_shard", "cp") if data["mesh"][axis] > 1 and axis != under]
    if under is None or not others or data["mode"] != "train":
        return ""
    return f" Gradients are summed over {', '.join(others)} too: that is counted with {under}."


# ---- sharded operators -----------------------------------------------------------------------------------------


def _sharding(data: Mapping[str, Any]) -> list[str]:
    """Explain the types, and make a table for each distinct block, and one for the operators outside of blocks."""
    sharding = data.get("sharding")
    state = [f'<p class="soft">State: {escape(state_text(data["state"]))}.</p>'] if "state" in data else []
    used = [] if sharding is None else [name for name, _ in sharding_legend(sharding)]
    shown = [TYPES[letter] for letter in "IRPSE" if letter in "IRPS" or TYPES[letter][0] in used]
    legend = "".join(f"<dt>{name}</dt><dd>{escape(what)}</dd>" for name, what in shown)
    types = f'<h3>Types of a tensor on a mesh axis</h3><dl class="types">{legend}</dl>'
    if sharding is None:
        alone = (
            "No tensor of the model is sharded over tp, cp or ep: each rank computes with whole tensors of its stages."
        )
        return [f'<p class="soft">{alone}</p>', *state, types]
    lines = [
        f"{transitions_text(data)}.",
        f"The placement of tensors is {gap_text(sharding['gap'])}.",
        *sharding["notes"],
        *(
            f"{operator} has no built-in rule: {'; '.join(rules) or 'it runs on whole tensors'}"
            for operator, rules in sharding["discovered"].items()
        ),
    ]
    tables = [_scope(scope, len(sharding["axes"]) > 1) for scope in sharding["scopes"] if scope["rows"]]
    return [*(f'<p class="soft">{escape(line)}</p>' for line in lines), *state, types, *tables]


def _scope(scope: Mapping[str, Any], several: bool) -> str:
    title = f"{scope['name']} x {scope['count']}" if scope["name"] else "Outside of blocks"
    ends = " · ".join(f"{end} {scope[end]}" for end in ("in", "out") if scope[end])
    rows = []
    for row in scope["rows"]:
        cells = "".join(f"<td>{cell}</td>" for cell in (escape(row["label"]), escape(row["spec"]), "", "", "", ""))
        rows.append(f'<tr class="mono">{cells}</tr>')
        for entry in row["transitions"]:
            sent = [sent_text(entry, way) for way in ("forward", "backward")]
            price = "" if entry["seconds"] is None else seconds_text(entry["seconds"])
            texts = ("", "", f"{entry['name']} {redistribution_text(entry, several)}", *sent, price)
            rows.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in texts)}</tr>")
    head = "".join(f"<th>{name}</th>" for name in ("Module", "Weight", "Transition", "Forward", "Backward", "Priced"))
    note = f' <span class="soft">{escape(ends)}</span>' if ends else ""
    return f'<h3>{escape(title)}{note}</h3><div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


# ---- the timeline ----------------------------------------------------------------------------------------------


def _schedule(data: Mapping[str, Any], timeline: Timeline) -> str:
    names, predicted = rank_names(data), data.get("predicted")
    drawn = timeline_svg(timeline, names, len(data["stages"]) > data["mesh"]["pp"], bool(predicted))
    held = " · ".join(f"{name}: {peak}" for name, peak in zip(names[:16], data["in_flight"]))
    more = " · …" if len(data["in_flight"]) > 16 else ""
    costs = f"Simulated with each stage's forward flops as cost, {data['backward_cost']:g} times as much backward, and free transfers."
    if predicted:
        costs = f"All {seconds_text(timeline.length)} of a step: the spans of a row add up to it."
        if any(span.collectives for row in timeline.spans for span in row):
            costs += " Collectives inside of an action stand after its computation, though they are spread over it."
            costs += " Those that its computation hides are not drawn; the table of communication counts them."
        if any(timeline.beside):
            costs += " A thin bar below a row is communication that runs beside it and costs no time."
    rows = (
        ""
        if data["devices"] == data["mesh"]["pp"]
        else " A row is a pp group, the ranks that run the same stages; all do the same."
    )
    buttons = (("in", "+", "Zoom in"), ("out", "−", "Zoom out"), ("all", "whole step", "Show the whole step"), ("back", "◀", "Earlier"),
               ("on", "▶", "Later"))  # fmt: skip
    controls = "".join(f'<button data-do="{do}" aria-label="{what}">{text}</button>' for do, text, what in buttons)
    keys = "wheel, drag, or keys: + − zoom, 0 all, arrows go from span to span, Page Up and Down move; shift and drag moves"
    return (
        f'<div class="controls">{controls}<span class="zoomed">the whole step</span><span class="soft">{keys}</span></div>'
        '<div class="chart" tabindex="0" role="group" aria-label="Timeline: plus and minus zoom, arrow keys go from span to span">'
        f'{drawn}</div><div class="soft">{key(timeline)}</div>'
        f'<p class="soft">{costs}{rows} Microbatch activations alive at once, at most: {held}{more}.</p>'
    )


def _notes(data: Mapping[str, Any]) -> str:
    items = [f"{block['name']} x {block['count']}: one class in blocks.py" for block in data["model"]["blocks"]]
    items += idiom_texts(data["model"].get("idioms", {}), written=True)
    for tie in data["ties"]:
        items.append(f"{' = '.join(tie['names'])}: one parameter, on stage {indices_text(tie['stages'])}")
    for stage in data["stages"]:
        if stage["recomputed"]:
            items.append(f"stage {stage['index']} recomputes: {', '.join(stage['recomputed'])}")
    for entry in data["inputs"]:
        readers = [stage["index"] for stage in data["stages"] if entry["name"] in stage["inputs"]]
        where = f"read by stage {indices_text(readers)}" if readers else "unused"
        items.append(f"input {entry['name']}: {where}")
    lines = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<h2>Structure</h2><ul>{lines}</ul>" if items else ""
