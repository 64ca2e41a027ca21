"""Charts of a report as SVG, which need no script to be seen: the timeline, and throughput. Memory and plans have files of their own.

The timeline and the memory over a step share an x axis, time from 0 to :data:`WHOLE` in an inner SVG. The page's script zooms by its
viewBox, and draws labels and ticks anew.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

from markupsafe import Markup

from graphpar.cost_models.timelines import StageEstimate
from graphpar.report.trace import COLLECTIVE, IDLE, TRANSFER, StepSpan, lanes, step_spans
from graphpar.schedules.action_table import KINDS
from graphpar.schedules.simulation import CLOSINGS, Timeline
from graphpar.text import bytes_text, rate_text, seconds_text

WHOLE = 100_000
"""The length of the step on the x axis of inner SVGs."""
WIDTH = 1060
"""The width of charts, in pixels."""
LINES = ("#2f78b7", "#c9701f", "#46875a", "#a05195", "#a8851a", "#6264c4", "#b0305c", "#6b7885")
"""Colors of lines, one after the other."""
_LETTER = 6.1
"""Width of a letter, in pixels."""


def legend(entries: Iterable[tuple[str, str]], kind: str = "") -> Markup:
    """Explain colors; ``kind``: of the marks, a class of the page's style."""
    return Markup(
        "".join(
            f'<span class="entry"><span class="key{kind}" style="background:{color}"></span>{escape(name)}</span>'
            for color, name in entries
        )
    )


def left_of(names: Sequence[str]) -> float:
    """Return where the x axis begins, right of the rows' names and of the sizes of the memory below, in pixels."""
    return round(10 + _LETTER * max(len("4.00 GiB"), *map(len, names)))


def zoomed(left: float, tall: int, content: str) -> str:
    """Put shapes whose x is time into an inner SVG that the page's script zooms."""
    return (
        f'<svg class="zoom" x="{left}" y="0" width="{WIDTH - left}" height="{tall}" viewBox="0 0 {WHOLE} {tall}" '
        f'preserveAspectRatio="none">{content}</svg>'
    )


def round_step(target: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least ``target``."""
    power = 10.0 ** math.floor(math.log10(target))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= target * (1 - 1e-9))


# ---- the timeline ----------------------------------------------------------------------------------------------

COLORS = {"F": "#2f78b7", "B": "#c9701f", "I": "#a8851a", "W": "#46875a", "UNSHARD": "#6264c4", "REDUCE_GRAD": "#a05195",
          "gradients": "#a05195", "optimizer": "#6b7885", "parameters": "#6264c4", "tp": "#b0305c", "cp": "#d4822a", "ep": "#1f8a8a",
          "dp_expert": "#7a9a01", "dp_shard": "#7d6bc9", "dp_replicate": "#a8447f", COLLECTIVE: "#8c6d31", TRANSFER: "#c9a9b4",
          IDLE: "#8a97a433"}  # fmt: skip
"""Colors of spans by kind, of collectives inside actions by axis, in the order of the legend."""
_WORDS = {kind: words for kind, (_, words) in (KINDS | CLOSINGS).items()} | {
    TRANSFER: "waits for a transfer",
    IDLE: "idle",
}
_LABELLED = 3000
"""With more spans than this, a row's spans of one kind are one shape, so that the page stays small."""
_HEIGHT, _LANE, _GAP, _AXIS = 22, 6, 6, 18
"""Of a row, of each of the lanes of collectives below it, between rows, and of the axis, in pixels."""
_BY_STATE = ("dp_shard", "dp_replicate")
"""The axes whose collectives have the lower lane; the upper one has those of axes that divide what a microbatch computes."""


def timeline_svg(timeline: Timeline, names: Sequence[str], data: Mapping[str, Any]) -> Markup:
    """Draw a row for each pp group with its name, and every span of it, in time from left to right; below it two lanes with all its
    collectives, those that computation hides, too. With a prediction times are in seconds, and have an axis."""
    rows, several, seconds = step_spans(timeline), len(data["stages"]) > data["mesh"]["pp"], bool(data.get("predicted"))
    below = _lanes(timeline, data)
    pitch = _HEIGHT + sum(_LANE + 1 for lane in below if any(lane)) + _GAP
    left, whole = left_of(names), timeline.length or 1.0
    shown = [[span for span in row if span.length > 0] for row in rows]
    few = sum(map(len, shown)) <= _LABELLED
    inner, labels = [], []
    for number, row in enumerate(shown):
        top = number * pitch
        sizes = partial(_sizes, data, number)
        shapes = _boxes(row, top, _HEIGHT, whole, several, sizes, seconds) if few else _shapes(row, top, _HEIGHT, whole)
        inner.append(f'<g class="row">{"".join(shapes)}</g>')
        labels += _labels(row, top, left, whole, several) if few else []
        top += _HEIGHT + 1
        for lane in (lane[number] for lane in below if any(lane)):
            shapes = _boxes(lane, top, _LANE, whole, False, sizes, seconds) if few else _shapes(lane, top, _LANE, whole)
            inner.append(f'<g class="lane">{"".join(shapes)}</g>')
            top += _LANE + 1
    tall = len(rows) * pitch
    named = "".join(
        f'<text class="axis" x="0" y="{n * pitch + _HEIGHT - 7}">{name}</text>' for n, name in enumerate(names)
    )
    axis = f'<g class="ticks">{"".join(_ticks(timeline.length, left, tall))}</g>' if seconds and timeline.length else ""
    return Markup(
        f'<svg class="timeline" viewBox="0 0 {WIDTH} {tall + _AXIS}" role="img" aria-label="Timeline of the step" '
        f'data-left="{left}" data-tall="{tall}" data-length="{timeline.length!r}" data-seconds="{int(seconds)}">{named}'
        f'{zoomed(left, tall, "".join(inner))}<g class="labels">{"".join(labels)}</g>{axis}</svg>'
    )


def _lanes(timeline: Timeline, data: Mapping[str, Any]) -> list[list[list[StepSpan]]]:
    """Return the spans of both lanes of each row."""
    if not data.get("predicted"):
        return []
    rows = lanes(timeline, [StageEstimate.from_json(stage) for stage in data["predicted"]["stages"]])
    return [[[span for span in row if (span.axis in _BY_STATE) == state] for row in rows] for state in (False, True)]


def timeline_key(timeline: Timeline, data: Mapping[str, Any]) -> Markup:
    """Explain the colors of the timeline."""
    rows = (*step_spans(timeline), *(row for lane in _lanes(timeline, data) for row in lane))
    kinds = {_kind(span) for row in rows for span in row if span.length > 0}
    return legend((COLORS[kind], _words(kind)) for kind in COLORS if kind in kinds)


def _kind(span: StepSpan) -> str:
    """Return the kind of a span, for a collective inside an action its axis."""
    return span.kind if span.kind != COLLECTIVE else span.axis if span.axis in COLORS else COLLECTIVE


def _words(kind: str) -> str:
    return _WORDS.get(kind) or ("other collectives" if kind == COLLECTIVE else f"{kind} collectives inside actions")


def _sizes(data: Mapping[str, Any], row: int, span: StepSpan) -> str:
    """Say how many bytes a span of a row sends, where that is known."""
    if span.kind in ("gradients", "parameters"):
        closing = data["predicted"]["closings"][row]
        nbytes, what = closing.get("reduced_bytes" if span.kind == "gradients" else "gathered_bytes", 0), "of"
    elif span.action is None or span.kind not in ("F", "B", "I", COLLECTIVE):
        return ""
    else:
        stages, number, forward, what = data["stages"], span.action.stage, span.action.kind == "F", "sends"
        if span.kind == COLLECTIVE:
            sent = stages[number].get("collectives", {}).get("forward" if forward else "backward", {})
            nbytes = sent.get(span.axis, 0)
        elif forward:
            nbytes = sum(value["bytes"] for value in stages[number]["sends"])
        else:
            nbytes = (
                sum(value["bytes"] for value in stages[number - 1]["sends"] if value["requires_grad"]) if number else 0
            )
    return f", {what} {bytes_text(nbytes)}" if nbytes else ""


def _boxes(
    row: Iterable[StepSpan],
    top: int,
    height: int,
    whole: float,
    several: bool,
    sizes: Callable[[StepSpan], str],
    seconds: bool,
) -> list[str]:
    """Draw each span as a box with what it is, how long it takes, from when, and what it sends."""
    scale, found = WHOLE / whole, []
    for span in row:
        takes = f"{span.length / whole:.2%} of the step"
        if seconds:
            takes = f"{seconds_text(span.length)}, from {seconds_text(span.start)}"
        found.append(
            f'<rect x="{span.start * scale:.1f}" y="{top}" width="{span.length * scale:.1f}" height="{height}" '
            f'fill="{COLORS[_kind(span)]}" data-n="{_label(span, several)}">'
            f"<title>{escape(f'{span.words}: {takes}{sizes(span)}')}</title></rect>"
        )
    return found


def _shapes(row: Iterable[StepSpan], top: int, height: int, whole: float) -> list[str]:
    """Draw one shape for each kind of span: lines as wide as the row."""
    scale, middle = WHOLE / whole, top + height / 2
    outlines: dict[str, list[str]] = {}
    for span in row:
        x, end = round(span.start * scale), round(span.end * scale)
        outlines.setdefault(_kind(span), []).append(f"M{x} {middle}h{max(1, end - x)}")
    return [
        f'<path stroke="{COLORS[kind]}" stroke-width="{height}" data-w="{_words(kind)}" d="{"".join(outlines[kind])}"/>'
        for kind in COLORS
        if kind in outlines
    ]


def _label(span: StepSpan, several: bool) -> str:
    """Return what is written on a span, where there is room."""
    if span.kind == COLLECTIVE:
        return span.axis
    if span.action is not None:
        return span.action.label(several)
    return CLOSINGS[span.kind][0] if span.kind in CLOSINGS else ""


def _labels(row: Sequence[StepSpan], top: int, left: float, whole: float, several: bool) -> list[str]:
    scale, found = (WIDTH - left) / whole, []
    for span in row:
        text = _label(span, several)
        if text and span.length * scale > _LETTER * len(text) + 3:
            middle = left + (span.start + span.end) / 2 * scale
            found.append(f'<text x="{middle:.1f}" y="{top + _HEIGHT - 7}">{text}</text>')
    return found


def _ticks(length: float, left: float, top: int) -> list[str]:
    """Draw ticks at about ten round times."""
    step, scale = round_step(length / 10), (WIDTH - left) / length
    times = [step * number for number in range(math.floor(length / step) + 1)]
    unit, name = next((unit, name) for unit, name in ((1.0, "s"), (1e-3, "ms"), (0.0, "us")) if length >= 10 * unit)
    return [
        f'<path d="M{left + time * scale:.1f} {top}v4"/>'
        f'<text class="axis" x="{left + time * scale:.1f}" y="{top + 14}">{time / (unit or 1e-6):.6g} {name}</text>'
        for time in times
        if left + time * scale < WIDTH - 14
    ]


# ---- throughput ------------------------------------------------------------------------------------------------


def throughput_svg(points: Sequence[tuple[str, int, float, str]], width: int = 700, height: int = 300) -> Markup:
    """Draw rows a second against devices, both from 0, as a line for each name, with its color below.

    ``points``: name of the line, devices, rows a second, cluster.
    """
    left, foot = 70, 24
    most, fastest = max(point[1] for point in points), max(point[2] for point in points)
    lines: dict[str, list[tuple[float, float, str]]] = {}
    for name, devices, rate, cluster in sorted(points, key=lambda point: point[1]):
        x, y = left + (width - left - 10) * devices / most, height - foot - (height - foot - 10) * rate / fastest
        tip = f"{name}, {cluster}: {rate_text(rate)} rows/s on {devices} devices"
        lines.setdefault(name, []).append((x, y, escape(tip)))
    shapes = [f'<path d="M{left} 10V{height - foot}H{width - 10}" fill="none" stroke="#98a5b2"/>']
    for devices in sorted({point[1] for point in points}):
        x = left + (width - left - 10) * devices / most
        shapes.append(f'<text class="axis" x="{x:.1f}" y="{height - 8}" text-anchor="middle">{devices}</text>')
    for share in (0.5, 1.0):
        y, text = height - foot - (height - foot - 10) * share, rate_text(fastest * share, 3)
        shapes.append(f'<text class="axis" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    colors = dict(zip(lines, itertools.cycle(LINES)))
    for name, line in lines.items():
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in line)
        shapes.append(f'<path d="M{path}" fill="none" stroke="{colors[name]}" stroke-width="2"/>')
        shapes += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colors[name]}"><title>{tip}</title></circle>'
            for x, y, tip in line
        ]
    svg = f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">{"".join(shapes)}</svg>'
    key = legend((color, name) for name, color in colors.items())
    return Markup(f'<div class="scroll">{svg}</div><div class="soft">{key}</div>')
