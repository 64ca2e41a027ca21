"""The report as one self-contained page: no script, no other file, nothing from the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from graphpar.report.charts import COLORS, memory_chart, timeline_svg
from graphpar.report.data import timeline_of
from graphpar.report.layout import gap_text, redistribution_text, sent_text, sharding_legend, transitions_text
from graphpar.report.predicted import (
    alone_text,
    assumed_lines,
    communication_text,
    mesh_text,
    named,
    parts_text,
    peak_text,
    rank_names,
    searched_text,
    stage_columns,
)
from graphpar.report.recomputation import recomputation_text
from graphpar.report.state import state_text
from graphpar.schedules.simulation import CLOSINGS, Timeline
from graphpar.schedules.table import KINDS
from graphpar.text import bytes_text, count_text, flops_text, indices_text, place_text, seconds_text, share_text

_STYLE = """
:root { --ink: #1c2733; --soft: #5d6b79; --line: #dfe4e9; --paper: #ffffff; --tint: #f5f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e9ee; --soft: #98a5b2; --line: #34404c; --paper: #161c22; --tint: #1e262e; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2.5rem auto;
       max-width: 72rem; padding: 0 1.5rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2.2rem 0 .6rem; }
.soft { color: var(--soft); } code, .mono { font-family: ui-monospace, monospace; font-size: .9em; }
.facts { display: flex; flex-wrap: wrap; gap: .8rem; margin-top: 1.2rem; }
.fact { background: var(--tint); border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .9rem; }
.fact b { display: block; font-size: 1.15rem; } .fact span { color: var(--soft); font-size: .85rem; }
table { border-collapse: collapse; width: 100%; } .scroll { overflow-x: auto; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: .85rem; }
th, td { padding: .4rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top; }
.right { text-align: right; white-space: nowrap; }
.bar { display: inline-block; height: .7rem; background: #3b82c4; border-radius: 2px; }
.warning { border-left: 3px solid #e08a3c; background: var(--tint); padding: .4rem .8rem; margin: .4rem 0; }
svg text { font: 10px ui-monospace, monospace; } .axis { fill: var(--soft); }
.key { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin: 0 .3rem 0 1rem;
       vertical-align: -1px; }
"""


def html(data: Mapping[str, Any]) -> str:
    """Make the page of a report's data (:func:`graphpar.report.report.report_data`)."""
    name = escape(data["model"]["name"])
    body = [
        f"<h1>{name}</h1>",
        f'<div class="soft">graphpar · {data["mode"]} · {data["dtype"]} · {escape(place_text(data))}</div>',
        _facts(data),
        *(f'<div class="warning">{escape(line)}</div>' for line in data["warnings"]),
        "<h2>Stages</h2>",
        _stages(data),
        *([f'<p class="soft">{escape(state_text(data["state"]))}.</p>'] if "state" in data else []),
        *(
            [f'<p class="soft">Recomputed: {escape(recomputation_text(data["recomputation"]))}.</p>']
            if "recomputation" in data
            else []
        ),
        *_runners_up(data),
        "<h2>Schedule</h2>",
        _schedule(data),
        *_predicted(data),
        *_sharding(data),
        _notes(data),
    ]
    return page(data["model"]["name"], body)


def page(title: str, body: Sequence[str]) -> str:
    """Join parts that are HTML already into a self-contained page."""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)} · graphpar</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
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
        (seconds_text(predicted["step_time_s"]), "a step" if data["mode"] == "train" else "a batch"),
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
        width = 110 * stage["flops"] / most
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
        '<tr><th class="right">Stage</th><th class="right">Pipeline rank</th><th>Modules</th><th class="right">Parameters</th>'
        f'<th class="right">Work</th><th>Share</th>{timed}<th>Sends, a microbatch</th></tr>'
    )
    return f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>'


def _sent(value: Mapping[str, Any]) -> str:
    notes = [bytes_text(value["bytes"]), *(["relayed"] if value["relayed"] else [])]
    if not value["requires_grad"]:
        notes.append("no gradient")
    shape = "x".join(map(str, value["shape"])) or "scalar"
    return f'<code>{escape(value["name"])}</code> {shape} {value["dtype"]} <span class="soft">{", ".join(notes)}</span>'


# ---- predictions, and alternatives ----------------------------------------------------------------


def _predicted(data: Mapping[str, Any]) -> list[str]:
    predicted = data.get("predicted")
    if predicted is None:
        return []
    lines = [f"Step: {parts_text(predicted)}."]
    if "alone" in data:
        lines.append(f"One device: {alone_text(data)}.")
    if communication := communication_text(predicted):
        lines.append(f"Communication a step: {communication}.")
    lines += [f"{label}: {text}." for label, text in assumed_lines(data)]
    return [
        *(f'<p class="soft">{escape(line)}</p>' for line in lines),
        "<h2>Memory</h2>",
        memory_chart(predicted, rank_names(data)),
    ]


def _runners_up(data: Mapping[str, Any]) -> list[str]:
    search = data.get("search")
    if not search:
        return []
    step = data["predicted"]["step_time_s"]
    rows = []
    for other in search["alternatives"]:
        seconds = other["step_time_s"]
        texts = (*named(other), seconds_text(seconds), f"{seconds / step - 1:+.1%}", other["why_not"])
        rows.append(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in texts)}</tr>")
    head = "".join(f"<th>{name}</th>" for name in ("Mesh", "Schedule", "A step", "", "Why not"))
    table = f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>' if rows else ""
    return ["<h2>Runners-up</h2>", f'<p class="soft">{escape(searched_text(search))}.</p>', table]


# ---- sharded operators -----------------------------------------------------------------------------------------


def _sharding(data: Mapping[str, Any]) -> list[str]:
    """Make a table for each distinct block, and one for the operators outside of blocks."""
    sharding = data.get("sharding")
    if sharding is None:
        return []
    lines = [
        f"{transitions_text(data)}.",
        f"The placement of tensors is {gap_text(sharding['gap'])}.",
        *sharding["notes"],
        *(
            f"{operator} has no built-in rule: {'; '.join(rules) or 'it runs on whole tensors'}"
            for operator, rules in sharding["discovered"].items()
        ),
    ]
    legend = "; ".join(f"<code>{name}</code> {what}" for name, what in sharding_legend(sharding))
    tables = [_scope(scope, len(sharding["axes"]) > 1) for scope in sharding["scopes"] if scope["rows"]]
    said = [*map(escape, lines), f"{legend}."]
    return ["<h2>How tensors are sharded</h2>", *(f'<p class="soft">{line}</p>' for line in said), *tables]


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


def _schedule(data: Mapping[str, Any]) -> str:
    timeline, names, predicted = timeline_of(data), rank_names(data), data.get("predicted")
    drawn = timeline_svg(timeline, names, len(data["stages"]) > data["mesh"]["pp"], bool(predicted))
    inside = any(span.collectives for row in timeline.spans for span in row)
    held = " · ".join(f"{name}: {peak}" for name, peak in zip(names[:16], data["in_flight"]))
    more = " · …" if len(data["in_flight"]) > 16 else ""
    costs = f"Simulated with each stage's forward flops as cost, {data['backward_cost']:g} times as much backward, and free transfers."
    if predicted:
        costs = f"{seconds_text(timeline.length)}, simulated with the predicted seconds of stages and of transfers between them."
        costs += " The dark foot of an action is its share of collectives, which are spread over it." if inside else ""
    return (
        f'<div class="scroll">{drawn}</div><div class="soft">{_key(timeline, inside)}</div>'
        f'<p class="soft">{costs} Microbatch activations alive at once, at most: {held}{more}.</p>'
    )


def _key(timeline: Timeline, inside: bool) -> str:
    """Explain the colors of the timeline."""
    kinds: set[str] = {span.action.kind for row in timeline.spans for span in row if span.drawn} | {
        part.kind for row in timeline.closing for part in row
    }
    words = {kind: name for kind, (_, name) in KINDS.items()} | {kind: name for kind, (_, name) in CLOSINGS.items()}
    shown = [kind for kind in COLORS if kind in kinds or (inside and kind == "collectives")]
    return "".join(
        f'<span class="key" style="background:{COLORS[kind]}"></span>{words.get(kind, kind)}' for kind in shown
    )


def _notes(data: Mapping[str, Any]) -> str:
    items = [f"{block['name']} x {block['count']}: one class in blocks.py" for block in data["model"]["blocks"]]
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
