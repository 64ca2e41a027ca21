"""The charts of the page: the schedule in time, and the memory of ranks at their peaks, as SVG without script."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from graphpar.schedules.simulation import CLOSINGS, Segment, Span, Timeline
from graphpar.schedules.table import KINDS, STATE
from graphpar.text import bytes_text, seconds_text

COLORS = {"F": "#3b82c4", "B": "#e08a3c", "I": "#c9a227", "W": "#5a9e6f", "UNSHARD": "#6b6ecf", "REDUCE_GRAD": "#a05195",
          "gradients": "#a05195", "optimizer": "#7f8c9a", "parameters": "#6b6ecf", "collectives": "#1c2733"}  # fmt: skip
"""Colors of actions by kind, of the end of the step, and of collectives inside of actions."""
PARTS = {
    "parameters": "#3b82c4",
    "gradients": "#e08a3c",
    "optimizer": "#5a9e6f",
    "main_copies": "#8fbf9f",
    "activations": "#a05195",
    "transient": "#d45087",
    "boundaries": "#c9a227",
    "buckets": "#7f8c9a",
    "buffers": "#6b6ecf",
    "inputs": "#9c9ede",
    "slack": "#b9c2cb",
}
"""Colors of the parts of a rank's memory, in the order in which they are drawn."""
LABELLED = 3000
"""With more actions than this, the timeline has no labels and tooltips, so that the page stays small."""
_AXIS, _STRIP = 18, 5
_LETTER = 6.1
"""Width of a letter of an axis, in pixels."""


def timeline_svg(
    timeline: Timeline, names: Sequence[str], several: bool, seconds: bool, height: int = 22, gap: int = 5
) -> str:
    """Draw a row for each pp rank with its name.

    ``several``: label actions with their stage; ``seconds``: draw an axis of time.
    """
    count = sum(len(row) for row in timeline.spans)
    longest = max(len(row) for row in timeline.spans)
    left = _left(names)
    width = max(900, min(longest * (26 if count <= LABELLED else 8), 6000))
    scale = (width - left - 4) / (timeline.length or 1.0)
    shapes = []
    for rank, row in enumerate(timeline.spans):
        top = rank * (height + gap)
        shapes.append(_name(names[rank], top + height - 7))
        if count <= LABELLED:
            shapes += [_box(span, left, top, scale, height, several) for span in row if span.drawn]
        else:
            shapes += _paths(row, left, top, scale, height)
        closing = timeline.closing[rank] if timeline.closing else ()
        shapes += [_closing(segment, left, top, scale, height) for segment in closing]
    tall = len(timeline.spans) * (height + gap)
    if seconds and timeline.length:
        shapes += _axis(timeline.length, left, scale, tall)
        tall += _AXIS
    return f'<svg viewBox="0 0 {width} {tall}" width="{width}" height="{tall}" role="img">{"".join(shapes)}</svg>'


def _left(names: Sequence[str]) -> float:
    return 10 + _LETTER * max(map(len, names), default=0)


def _name(name: str, y: float) -> str:
    return f'<text class="axis" x="0" y="{y}">{name}</text>'


def _axis(length: float, left: float, scale: float, top: int) -> list[str]:
    """Draw ticks at about ten round times."""
    step = _round_step(length / 10)
    times = [step * number for number in range(math.floor(length / step) + 1)]
    unit, name = next((unit, name) for unit, name in ((1.0, "s"), (1e-3, "ms"), (0.0, "us")) if length >= 10 * unit)
    unit = unit or 1e-6
    return [
        f'<path d="M{left + time * scale:.1f} {top}v4" stroke="#98a5b2"/>'
        f'<text class="axis" x="{left + time * scale:.1f}" y="{top + 14}" text-anchor="middle">{time / unit:.6g} {name}</text>'
        for time in times
    ]


def _round_step(wanted: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least ``wanted``."""
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= wanted * (1 - 1e-9))


def _box(span: Span, left: float, top: int, scale: float, height: int, several: bool) -> str:
    """Draw an action; the share of collectives is a strip below its end."""
    x, wide = left + span.start * scale, max((span.end - span.start) * scale - 1, 0.5)
    action = span.action
    label = action.label(several)
    text = ""
    if wide > 6.5 * len(label) + 2:
        text = f'<text x="{x + wide / 2:.1f}" y="{top + height - 7}" text-anchor="middle" fill="#fff">{label}</text>'
    tip = f"stage {action.stage}, {KINDS[action.kind][1]}"
    tip += "" if action.kind in STATE else f" of microbatch {action.microbatch}"
    strip = ""
    if span.collectives:
        tip += "".join(f"; {axis} collectives {seconds_text(taken)}" for axis, taken in span.collectives)
        long = min(wide, sum(taken for _, taken in span.collectives) * scale)
        strip = (
            f'<rect x="{x + wide - long:.1f}" y="{top + height - _STRIP}" width="{long:.1f}" height="{_STRIP}" '
            f'fill="{COLORS["collectives"]}"/>'
        )
    return (
        f'<g><title>{tip}</title><rect x="{x:.1f}" y="{top}" width="{wide:.1f}" height="{height}" rx="2" '
        f'fill="{COLORS[action.kind]}"/>{strip}{text}</g>'
    )


def _closing(segment: Segment, left: float, top: int, scale: float, height: int) -> str:
    """Draw the all-reduce of gradients, the optimizer, or a gather, after the actions."""
    x, wide = left + segment.start * scale, max((segment.end - segment.start) * scale - 1, 0.5)
    letter, what = CLOSINGS[segment.kind]
    text = ""
    if wide > 9:
        text = f'<text x="{x + wide / 2:.1f}" y="{top + height - 7}" text-anchor="middle" fill="#fff">{letter}</text>'
    return (
        f'<g><title>{what}: {seconds_text(segment.end - segment.start)}</title><rect x="{x:.1f}" y="{top}" width="{wide:.1f}" '
        f'height="{height}" rx="2" fill="{COLORS[segment.kind]}"/>{text}</g>'
    )


def _paths(row: Sequence[Span], left: float, top: int, scale: float, height: int) -> list[str]:
    """Draw one shape for each kind of action of a rank, and one for the collectives in them."""
    outlines: dict[str, list[str]] = {}
    for span in (span for span in row if span.drawn):
        x, wide = left + span.start * scale, (span.end - span.start) * scale
        outlines.setdefault(span.action.kind, []).append(f"M{x:.1f} {top}h{max(wide - 0.4, 0.4):.1f}v{height}H{x:.1f}z")
        if span.collectives:
            long = sum(taken for _, taken in span.collectives) * scale
            strip = f"M{x + wide - long:.1f} {top + height - _STRIP}h{long:.1f}v{_STRIP}h-{long:.1f}z"
            outlines.setdefault("collectives", []).append(strip)
    return [f'<path fill="{COLORS[kind]}" d="{"".join(outlines[kind])}"/>' for kind in COLORS if kind in outlines]


def memory_chart(
    predicted: Mapping[str, Any], names: Sequence[str], width: int = 900, height: int = 18, gap: int = 5
) -> str:
    """Draw a bar for each pp rank: the parts of its memory at the peak, and a line at the device's memory if that is near."""
    peaks, capacity = predicted["peak_memory_bytes"], predicted["memory_bytes"]
    longest = max(max(peaks), 1)
    near, left = longest > capacity / 3, _left(names)
    scale = (width - left - 90) / (max(longest, capacity) if near else longest)
    shapes = []
    for rank, (memory, peak) in enumerate(zip(predicted["memory"], peaks)):
        top, x = rank * (height + gap), left
        shapes.append(_name(names[rank], top + height - 5))
        for part in PARTS:
            wide = memory[part] * scale
            if wide >= 0.05:
                tip = f"{part.replace('_', ' ')}: {bytes_text(memory[part])}"
                shapes.append(
                    f'<g><title>{tip}</title><rect x="{x:.1f}" y="{top}" width="{wide:.1f}" height="{height}" fill="{PARTS[part]}"/></g>'
                )
            x += wide
        shapes.append(f'<text class="axis" x="{x + 5:.1f}" y="{top + height - 5}">{bytes_text(peak)}</text>')
    tall = len(peaks) * (height + gap)
    if near:
        x = left + capacity * scale
        shapes.append(f'<path d="M{x:.1f} 0v{tall}" stroke="#c0392b" stroke-dasharray="4 3"/>')
    used = [part for part in PARTS if any(memory[part] for memory in predicted["memory"])]
    key = "".join(
        f'<span class="key" style="background:{PARTS[part]}"></span>{part.replace("_", " ")}' for part in used
    )
    line = " (the line)" if near else ""
    return (
        f'<div class="scroll"><svg viewBox="0 0 {width} {tall}" width="{width}" height="{tall}" role="img">{"".join(shapes)}</svg></div>'
        f'<div class="soft">{key}</div>'
        f'<p class="soft">At the peak of a device of each pipeline rank. A device has {bytes_text(capacity)}{line}.</p>'
    )


def throughput_svg(points: Sequence[tuple[str, int, float, str]], width: int = 700, height: int = 300) -> str:
    """Draw rows a second against devices, both from 0, as a line for each name.

    ``points``: name of the line, devices, rows a second, cluster.
    """
    colors = list(PARTS.values())
    left, foot = 70, 24
    most, fastest = max(point[1] for point in points), max(point[2] for point in points)
    lines: dict[str, list[tuple[float, float, str]]] = {}
    for name, devices, rate, cluster in sorted(points, key=lambda point: point[1]):
        x, y = left + (width - left - 10) * devices / most, height - foot - (height - foot - 10) * rate / fastest
        tip = f"{name}, {cluster}: {rate:,.4g} rows/s on {devices} devices"
        lines.setdefault(name, []).append((x, y, escape(tip)))
    shapes = [f'<path d="M{left} 10V{height - foot}H{width - 10}" fill="none" stroke="#98a5b2"/>']
    for devices in sorted({point[1] for point in points}):
        x = left + (width - left - 10) * devices / most
        shapes.append(f'<text class="axis" x="{x:.1f}" y="{height - 8}" text-anchor="middle">{devices}</text>')
    for share in (0.5, 1.0):
        y = height - foot - (height - foot - 10) * share
        shapes.append(
            f'<text class="axis" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{fastest * share:,.3g}</text>'
        )
    key = ""
    for place, (name, line) in enumerate(lines.items()):
        color = colors[place % len(colors)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in line)
        shapes.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        shapes += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"><title>{tip}</title></circle>'
            for x, y, tip in line
        ]
        key += f'<span class="key" style="background:{color}"></span>{escape(name)}'
    return (
        f'<div class="scroll"><svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">{"".join(shapes)}'
        f'</svg></div><div class="soft">{key}</div>'
    )
