"""The memory of ranks as SVG: by kind over the step, on the time axis of the timeline, and part by part at the peak.

predicted memory, schedule ──memory_over_time──► bytes of each kind at every moment ──memory_time_svg──► a stack for each pp group
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from graphpar.cost_models.memory import Memory
from graphpar.cost_models.timelines import StageEstimate
from graphpar.report.charts import WHOLE, WIDTH, left_of, legend, zoomed
from graphpar.report.memory_table import MOMENTS
from graphpar.report.phrases import device_bytes
from graphpar.schedules.action_table import Action, parse_table
from graphpar.schedules.simulation import Segment, Span, Timeline, in_flight
from graphpar.text import bytes_text

PARTS = {
    "parameters": "#3b82c4", "copies": "#7fb0dd", "gradients": "#e08a3c", "optimizer": "#5a9e6f", "main_copies": "#8fbf9f",
    "activations": "#a05195", "transient": "#d45087", "boundaries": "#c9a227", "buckets": "#7f8c9a", "buffers": "#6b6ecf",
    "inputs": "#9c9ede", "slack": "#b9c2cb", "communicators": "#8c6d31",
}  # fmt: skip
"""Colors of the parts of a rank's memory, in the order in which they are drawn."""


KINDS = {
    "parameters": ("parameters", "copies", "buffers"),
    "optimizer": ("optimizer", "main_copies"),
    "gradients": ("gradients",),
    "buckets and gathered": ("buckets",),
    "messages and inputs": ("boundaries", "inputs", "cache"),
    "communicators": ("communicators",),
    "activations": ("activations",),
    "temporary": ("transient",),
    "slack": ("slack",),
}
"""Kinds of memory, the lowest of a stack first, with the parts of :class:`~graphpar.cost_models.memory.Memory` that each is made of. Its
color is that of the first."""

# ---- over the step ---------------------------------------------------------------------------------------------

ROWS = 16
"""With more pp groups than this, only so many have a stack of their own, the fullest among them."""
_MOST = 400
"""An edge of more steps than this is drawn as the highest value in each of as many equal times."""
_TALL, _ALONE, _GAP = 64, 170, 12
"""Of a stack, of one that is alone, and between them, in pixels."""


@dataclass(frozen=True)
class Level:
    """What a rank holds from ``start`` on, in seconds, until the next level: bytes of each of :data:`KINDS`."""

    start: float
    bytes: tuple[float, ...]

    @property
    def total(self) -> float:
        """All of them."""
        return math.fsum(self.bytes)


Levels = Sequence[Level]


def memory_over_time(data: Mapping[str, Any], timeline: Timeline) -> list[Levels] | None:
    """Return for each pp group what its ranks hold, from 0 to the end of the step.

    While an action runs there is on top what the largest forward or backward of its ranks needs, so the highest total is the predicted
    peak. Gradients are there from the first backward on. When the optimizer begins, and when it has ended, ranks hold what the moments of
    ``estimate --memory`` say. None where there is no prediction, or it does not say what stages keep, or a rank is at its peak between
    steps of training, while the program generates.
    """
    predicted = data.get("predicted")
    if not predicted or any("kept_bytes" not in stage for stage in predicted["stages"]):
        return None
    if data["mode"] == "train" and any(memory.get("cache") for memory in predicted["memory"]):
        return None
    stages = [StageEstimate.from_json(stage) for stage in predicted["stages"]]
    table, left = parse_table("\n".join(data["actions"])), [stage.left_bytes for stage in stages]
    kept = in_flight(table, [stage.kept_bytes for stage in stages], left)
    closing = timeline.closing or ((),) * len(timeline.spans)
    whole = [_whole([span.action for span in spans], stages) for spans in timeline.spans]
    memory = zip(predicted["memory"], predicted["reduced_bytes"])
    rows = zip(timeline.spans, closing, memory, (each.after for each in kept), whole)
    return [_of_rank(*row, data["mode"] == "train", timeline.length) for row in rows]


def _whole(actions: Sequence[Action], stages: Sequence[StageEstimate]) -> list[tuple[int, int]]:
    """Return for each of a rank's actions the bytes of sharded state that are whole: while it runs, and after it."""
    last = {action.stage: place for place, action in enumerate(actions)}
    gathered, summing, found = dict[int, int](), dict[int, int](), list[tuple[int, int]]()
    for place, action in enumerate(actions):
        gathered[action.stage] = stages[action.stage].gathered_bytes
        if action.kind in ("B", "I", "W"):
            summing[action.stage] = stages[action.stage].gradient_bytes
        running = sum(gathered.values()) + sum(summing.values())
        if last[action.stage] == place:
            del gathered[action.stage]
            summing.pop(action.stage, None)
        found.append((running, sum(gathered.values()) + sum(summing.values())))
    return found


def _of_rank(
    spans: Sequence[Span],
    closing: Sequence[Segment],
    memory: tuple[Mapping[str, int], int],
    after: Sequence[float],
    whole: Sequence[tuple[int, int]],
    trains: bool,
    length: float,
) -> Levels:
    """Return the levels of a rank, which keeps ``after`` each of its ``spans`` so many bytes of activations, and has ``whole`` state."""
    parts, reduced = memory
    peak = Memory(**parts)
    moving = peak.activations + peak.transient + peak.buckets
    overhead = peak.slack / moving if moving else 0.0
    begun = not trains
    highest = max((min(held, peak.activations) + most for held, (most, _) in zip([0, *after], whole)), default=0)
    gathered = max(0.0, peak.buckets - max(0.0, highest - peak.activations))  # what is there all the time

    def level(start: float, activations: float, transient: float, whole: float, gradients: int) -> Level:
        activations, buckets = min(activations, peak.activations), min(gathered + whole, peak.buckets)
        slack = overhead * (activations + transient + buckets)
        shown = {"activations": activations, "transient": transient, "slack": slack, "buckets": buckets}
        return _level(start, vars(peak) | {"gradients": gradients if begun else 0} | shown)

    levels, before = [level(0.0, 0.0, 0.0, 0.0, 0)], 0.0
    for span, held, (running, ended) in zip(spans, after, whole):
        now = held if trains else peak.activations
        begun = begun or span.action.kind in ("B", "I", "W")
        if span.end > span.start:
            levels.append(level(span.start, max(before, now), peak.transient, running, peak.gradients))
        before = now if trains else 0.0
        levels.append(level(span.end, before, 0.0, ended, max(reduced, peak.gradients)))
    for segment in closing:
        if segment.kind == "optimizer":
            levels.append(_level(segment.start, vars(peak.after_backward(reduced))))
            levels.append(_level(segment.end, vars(peak.between_steps())))
    return _merged([*levels, replace(levels[-1], start=length)])


def _level(start: float, parts: Mapping[str, float]) -> Level:
    return Level(start, tuple(math.fsum(parts[part] for part in each) for each in KINDS.values()))


def _merged(levels: Levels) -> Levels:
    """Leave out levels that hold for no time, or are as the one before; the last stays."""
    found: list[Level] = []
    for place, level in enumerate(levels):
        last = place == len(levels) - 1
        if not last and levels[place + 1].start <= level.start:
            continue
        if last or not found or found[-1].bytes != level.bytes:
            found.append(level)
    return found


def stacks_of(rows: Sequence[Levels]) -> list[int]:
    """Return the pp groups that are drawn: the fullest, and others at equal distances, the first and the last among them."""
    count = len(rows)
    if count <= ROWS:
        return list(range(count))
    fullest = max(range(count), key=lambda rank: max(level.total for level in rows[rank]))
    spread = [round(place * (count - 1) / (ROWS - 2)) for place in range(ROWS - 1)]
    return sorted({fullest, *spread})


def memory_time_svg(rows: Sequence[Levels], names: Sequence[str], devices: Sequence[float], length: float) -> Markup:
    """Draw a stack of kinds for each pp group over the time axis of the timeline, and the memory of its device where that is near:
    ``devices`` has that of each group."""
    most, near = max(map(_most, rows)), [_near(*each) for each in zip(rows, devices)]
    top = max([most * (1.1 if not any(near) else 1.0), *(1.05 * own for own, is_near in zip(devices, near) if is_near)])
    shown, left, inner, axis = stacks_of(rows), left_of(names), [], []
    tall = _ALONE if len(shown) == 1 else _TALL
    pixels, step = tall / top, 2.0 ** math.ceil(math.log2(top / (5 if len(shown) == 1 else 2)))
    for place, rank in enumerate(shown):
        foot = place * (tall + _GAP) + tall + 4
        for step_bytes in (step * n for n in range(1, math.floor(top / step) + 1)):
            y = foot - step_bytes * pixels
            axis.append(f'<path class="grid" d="M{left} {y:.1f}H{WIDTH}"/>')
            axis.append(f'<text class="axis end" x="{left - 5}" y="{y + 3:.1f}">{bytes_text(step_bytes)}</text>')
        axis.append(f'<path class="frame" d="M{left} {foot}H{WIDTH}"/>')
        axis.append(f'<text class="axis" x="0" y="{foot - 1}">{names[rank]}</text>')
        inner += _stack(rows[rank], names[rank], foot, pixels, length)
        if near[rank]:
            inner.append(f'<path class="line limit" d="M0 {foot - devices[rank] * pixels:.1f}H{WHOLE}"/>')
    whole = len(shown) * (tall + _GAP) + 4
    return Markup(
        f'<svg class="memory" viewBox="0 0 {WIDTH} {whole}" role="img" aria-label="Memory of ranks by kind over the step">'
        f"{zoomed(left, whole, ''.join(inner))}{''.join(axis)}</svg>"
    )


def memory_time_key(rows: Sequence[Levels], devices: Sequence[float]) -> Markup:
    """Explain the colors of kinds that some rank has, and the line of the device's memory where that is near."""
    used = [any(level.bytes[place] for row in rows for level in row) for place in range(len(KINDS))]
    shown = legend((PARTS[parts[0]], kind) for (kind, parts), own in zip(KINDS.items(), used) if own)
    limit = '<span class="entry"><span class="key limit"></span>memory of a device</span>'
    return Markup(f"{shown}{limit if any(map(_near, rows, devices)) else ''}")


def _most(row: Levels) -> float:
    return max(level.total for level in row)


def _near(row: Levels, device: float) -> bool:
    return device < 2 * _most(row)


def _stack(row: Levels, name: str, foot: float, pixels: float, length: float) -> list[str]:
    """Draw the kinds of a rank, the highest first: each from the foot to the top of its own, so that those above it show what they are."""
    shapes = []
    for place, (kind, parts) in reversed(list(enumerate(KINDS.items()))):
        most, least = (way(level.bytes[place] for level in row) for way in (max, min))
        if not most:
            continue
        edge = [(level.start, foot - math.fsum(level.bytes[: place + 1]) * pixels) for level in row]
        from_to = bytes_text(most) if most == least else f"{bytes_text(least)} to {bytes_text(most)}"
        path = f"M0 {foot}{_edge(edge, length)}V{foot}Z"
        shapes.append(f'<path fill="{PARTS[parts[0]]}" d="{path}"><title>{name}, {kind}: {from_to}</title></path>')
    return shapes


def _edge(points: Sequence[tuple[float, float]], length: float) -> str:
    """Return the steps of an edge, from left to right."""
    scale = WHOLE / (length or 1.0)
    steps = [(start * scale, y) for start, y in points]
    if len(steps) > _MOST:  # for each of as many equal times the highest value: the smallest y
        width, highest, end = WHOLE / _MOST, [math.inf] * _MOST, (WHOLE, steps[-1][1])
        for (start, y), (until, _) in itertools.pairwise(steps):
            for place in range(int(start / width), min(_MOST - 1, int(until / width)) + 1):
                highest[place] = min(highest[place], y)
        steps = [*((place * width, y) for place, y in enumerate(highest) if math.isfinite(y)), end]
    found, before = "", ""
    for x, y in steps:
        if (text := f"{y:.1f}") != before:
            found, before = f"{found}H{x:.0f}V{text}", text
    return f"{found}H{WHOLE}"


def memory_rows(predicted: Mapping[str, Any], names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the rows of the table of what ranks hold at each moment, and of each kind at the peak."""
    found = []
    for name, parts, reduced in zip(names, predicted["memory"], predicted["reduced_bytes"]):
        totals = [float(moment(Memory(**parts), reduced).total) for moment in MOMENTS.values()]
        found.append((name, *map(bytes_text, [*totals, *_level(0.0, parts).bytes])))
    return found


# ---- at the peak -----------------------------------------------------------------------------------------------


def memory_svg(predicted: Mapping[str, Any], names: Sequence[str], height: int = 18, gap: int = 5) -> Markup:
    """Draw a bar for a rank of each pp group: the parts of its memory at the peak, and a line at the device's memory if that is near."""
    peaks, devices = predicted["peak_memory_bytes"], device_bytes(predicted)
    longest, left, near = max(max(peaks), 1), left_of(names), peaks_are_near(predicted)
    scale = (WIDTH - left - 90) / (max(longest, *devices) if near else longest)
    shapes = []
    for rank, (memory, peak, device) in enumerate(zip(predicted["memory"], peaks, devices)):
        top, x = rank * (height + gap), left
        shapes.append(f'<text class="axis" x="0" y="{top + height - 5}">{names[rank]}</text>')
        for part, color in PARTS.items():
            wide = memory.get(part, 0) * scale
            if wide >= 0.05:
                tip = f"{part.replace('_', ' ')}: {bytes_text(memory[part])}"
                box = f'<rect x="{x:.1f}" y="{top}" width="{wide:.1f}" height="{height}" fill="{color}"/>'
                shapes.append(f"<g><title>{tip}</title>{box}</g>")
            x += wide
        line = left + device * scale
        if near:
            shapes.append(f'<path class="limit" d="M{line:.1f} {top}v{height + gap}"/>')
        x = line if near and x - 5 < line < x + 60 else x  # beside the line of the device's memory, not on it
        shapes.append(f'<text class="axis" x="{x + 5:.1f}" y="{top + height - 5}">{bytes_text(peak)}</text>')
    tall = len(peaks) * (height + gap)
    return Markup(
        f'<svg class="peaks" viewBox="0 0 {WIDTH} {tall}" role="img" aria-label="Memory at the peak">{"".join(shapes)}</svg>'
    )


def peaks_are_near(predicted: Mapping[str, Any]) -> bool:
    """Whether some rank takes more than a third of its device's memory, so that this is drawn."""
    return any(3 * peak > own for peak, own in zip(predicted["peak_memory_bytes"], device_bytes(predicted)))


def memory_key(predicted: Mapping[str, Any]) -> Markup:
    """Explain the parts of memory that some rank has."""
    used = [part for part in PARTS if any(memory[part] for memory in predicted["memory"])]
    return legend((PARTS[part], part.replace("_", " ")) for part in used)
