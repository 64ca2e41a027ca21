"""The timeline of a step as SVG: a row for each pp group, every span of it, in time from left to right.

The spans lie in an inner SVG whose x axis is time, from 0 to :data:`WHOLE`; the page's script zooms by its viewBox, and draws labels and
ticks anew. Without script the whole step is there, with its labels and ticks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from graphpar.report.spans import COLLECTIVE, IDLE, TRANSFER, StepSpan, beside, step_spans
from graphpar.schedules.simulation import CLOSINGS, Timeline
from graphpar.schedules.table import KINDS
from graphpar.text import seconds_text

COLORS = {"F": "#2f78b7", "B": "#c9701f", "I": "#a8851a", "W": "#46875a", "UNSHARD": "#6264c4", "REDUCE_GRAD": "#a05195",
          "gradients": "#a05195", "optimizer": "#6b7885", "parameters": "#6264c4", COLLECTIVE: "#b0305c", TRANSFER: "#c9a9b4",
          IDLE: "#8a97a433"}  # fmt: skip
"""Colors of spans by kind, in the order of the key."""
WHOLE = 100_000
"""The length of the step on the x axis of inner SVGs."""
WIDTH = 1060
"""The width of the charts that share this axis, in pixels."""
LABELLED = 3000
"""With more spans than this, a row's spans of one kind are one shape, so that the page stays small."""
HEIGHT, BESIDE, GAP = 22, 5, 6
"""Of a row, of what runs beside it, and between rows, in pixels."""
_AXIS = 18
_LETTER = 6.1
"""Width of a letter, in pixels."""
_LONGEST_SIZE = len("4.00 GiB")
"""The y axis of the memory below a timeline shares its x axis; powers of two take at most so many letters."""


def left_of(names: Sequence[str]) -> float:
    """Return where the x axis begins, right of the rows' names and of the sizes of the memory below, in pixels."""
    return round(10 + _LETTER * max(_LONGEST_SIZE, *map(len, names)))


def timeline_svg(timeline: Timeline, names: Sequence[str], several: bool, seconds: bool) -> str:
    """Draw a row for each pp group with its name.

    Args:
        several: label actions with their stage.
        seconds: times are in seconds; draw an axis of them.
    """
    rows, hidden = step_spans(timeline), beside(timeline)
    lanes = BESIDE + 1 if any(hidden) else 0
    pitch = HEIGHT + lanes + GAP
    left, whole = left_of(names), timeline.length or 1.0
    shown = [[span for span in row if span.length > 0] for row in rows]
    few = sum(map(len, shown)) <= LABELLED
    draw = _boxes if few else _shapes
    inner, labels = [], []
    for number, row in enumerate(shown):
        top = number * pitch
        inner.append(f'<g class="row">{"".join(draw(row, top, HEIGHT, whole, several, seconds))}</g>')
        if few:
            labels += _labels(row, top, left, whole, several)
        if any(hidden):
            inner.append("".join(_boxes(hidden[number], top + HEIGHT + 1, BESIDE, whole, several, seconds)))
    tall = len(rows) * pitch
    named = "".join(
        f'<text class="axis" x="0" y="{n * pitch + HEIGHT - 7}">{name}</text>' for n, name in enumerate(names)
    )
    axis = f'<g class="ticks">{"".join(_ticks(timeline.length, left, tall))}</g>' if seconds and timeline.length else ""
    return (
        f'<svg class="timeline" viewBox="0 0 {WIDTH} {tall + _AXIS}" role="img" aria-label="Timeline of the step" '
        f'data-left="{left}" data-tall="{tall}" data-length="{timeline.length!r}" data-seconds="{int(seconds)}">{named}'
        f"{zoomed(left, tall, ''.join(inner))}"
        f'<g class="labels">{"".join(labels)}</g>{axis}</svg>'
    )


def zoomed(left: float, tall: int, content: str) -> str:
    """Put shapes whose x is time into an inner SVG that the page's script zooms."""
    return (
        f'<svg class="zoom" x="{left}" y="0" width="{WIDTH - left}" height="{tall}" viewBox="0 0 {WHOLE} {tall}" '
        f'preserveAspectRatio="none">{content}</svg>'
    )


def key(timeline: Timeline) -> str:
    """Explain the colors of the timeline."""
    rows = (*step_spans(timeline), *beside(timeline))
    kinds = {span.kind for row in rows for span in row if span.length > 0}
    words = {kind: name for kind, (_, name) in KINDS.items()} | {kind: name for kind, (_, name) in CLOSINGS.items()}
    axes = ", ".join(dict.fromkeys(span.axis for row in rows for span in row if span.kind == COLLECTIVE))
    words |= {COLLECTIVE: f"collectives inside of actions ({axes})", TRANSFER: "waits for a transfer", IDLE: "idle"}
    return "".join(
        f'<span class="entry"><span class="key" style="background:{COLORS[kind]}"></span>{words[kind]}</span>'
        for kind in COLORS
        if kind in kinds
    )


def said(span: StepSpan, whole: float, seconds: bool) -> str:
    """Describe a span: what it is, how long it takes, and from when."""
    if not seconds:
        return f"{span.words}: {span.length / whole:.2%} of the step"
    return f"{span.words}: {seconds_text(span.length)}, from {seconds_text(span.start)}"


def _boxes(row: Iterable[StepSpan], top: int, height: int, whole: float, several: bool, seconds: bool) -> list[str]:
    """Draw each span as a box with what it is."""
    scale = WHOLE / whole
    return [
        f'<rect x="{span.start * scale:.1f}" y="{top}" width="{span.length * scale:.1f}" height="{height}" '
        f'fill="{COLORS[span.kind]}" data-n="{label(span, several)}"><title>{escape(said(span, whole, seconds))}</title></rect>'
        for span in row
    ]


def _shapes(row: Sequence[StepSpan], top: int, height: int, whole: float, several: bool, seconds: bool) -> list[str]:
    """Draw one shape for each kind of span: lines as wide as the row."""
    scale, middle = WHOLE / whole, top + height / 2
    outlines: dict[str, list[str]] = {}
    for span in row:
        x, end = round(span.start * scale), round(span.end * scale)
        outlines.setdefault(span.kind, []).append(f"M{x} {middle}h{max(1, end - x)}")
    words = {kind: name for kind, (_, name) in (KINDS | CLOSINGS).items()} | {TRANSFER: "waits for a transfer"}
    return [
        f'<path stroke="{COLORS[kind]}" stroke-width="{height}" data-w="{words.get(kind, kind)}" d="{"".join(outlines[kind])}"/>'
        for kind in COLORS
        if kind in outlines
    ]


def label(span: StepSpan, several: bool) -> str:
    """Return what is written on a span, where there is room."""
    if span.kind == COLLECTIVE:
        return span.axis
    if span.action is not None:
        return span.action.label(several)
    return CLOSINGS[span.kind][0] if span.kind in CLOSINGS else ""


def _labels(row: Sequence[StepSpan], top: int, left: float, whole: float, several: bool) -> list[str]:
    scale = (WIDTH - left) / whole
    found = []
    for span in row:
        text = label(span, several)
        if text and span.length * scale > _LETTER * len(text) + 3:
            middle = left + (span.start + span.end) / 2 * scale
            found.append(f'<text x="{middle:.1f}" y="{top + HEIGHT - 7}">{text}</text>')
    return found


def _ticks(length: float, left: float, top: int) -> list[str]:
    """Draw ticks at about ten round times."""
    step = round_step(length / 10)
    scale = (WIDTH - left) / length
    times = [step * number for number in range(math.floor(length / step) + 1)]
    unit, name = next((unit, name) for unit, name in ((1.0, "s"), (1e-3, "ms"), (0.0, "us")) if length >= 10 * unit)
    unit = unit or 1e-6
    return [
        f'<path d="M{left + time * scale:.1f} {top}v4"/>'
        f'<text class="axis" x="{left + time * scale:.1f}" y="{top + 14}">{time / unit:.6g} {name}</text>'
        for time in times
        if left + time * scale < WIDTH - 14
    ]


def round_step(wanted: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least ``wanted``."""
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= wanted * (1 - 1e-9))
