"""The memory of each pp group's ranks over a step: what they always hold, and activations as the schedule keeps and frees them.

actions, StageEstimates ──in_flight──► activations after each action ──timeline──► steps of (seconds, bytes) ──► a chart
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from graphpar.cost_models.timelines import StageEstimate
from graphpar.report.timeline_chart import WHOLE, WIDTH, left_of, zoomed
from graphpar.schedules.simulation import Timeline, in_flight
from graphpar.schedules.table import parse_table
from graphpar.text import bytes_text

LINES = ("#2f78b7", "#c9701f", "#46875a", "#a05195", "#a8851a", "#6264c4", "#b0305c", "#6b7885")
"""Colors of lines, one after the other."""
_MOST = 1000
"""A line of more steps than this is drawn as the highest value in each of as many equal times."""
_TALL = 190


def memory_over_time(data: Mapping[str, Any], timeline: Timeline) -> list[list[tuple[float, float]]] | None:
    """Return for each pp group (seconds, bytes) from 0 to the end of the step: the bytes hold until the next entry.

    While an action runs there is on top what the largest forward or backward of its ranks needs, so the highest value is the predicted
    peak. None where there is no prediction, or it does not say what stages keep.
    """
    predicted = data.get("predicted")
    if not predicted or any("kept_bytes" not in stage for stage in predicted["stages"]):
        return None
    stages = [StageEstimate.from_json(stage) for stage in predicted["stages"]]
    keeps = data["mode"] == "train"
    kept = in_flight(parse_table("\n".join(data["actions"])), [stage.kept_bytes for stage in stages])
    found = []
    for row, memory, after in zip(timeline.spans, predicted["memory"], kept):
        varying = memory["activations"], memory["transient"], memory["slack"]
        total = sum(memory.values())
        moving = varying[0] + varying[1]
        overhead = 1 + (varying[2] / (moving + memory["buckets"]) if moving + memory["buckets"] else 0.0)
        constant = total - overhead * moving
        levels = [(0.0, constant)]
        before = 0.0
        for span, held in zip(row, after.after):
            now = held if keeps else memory["activations"]
            if span.end > span.start:
                levels.append((span.start, constant + overhead * (max(before, now) + varying[1])))
            before = now if keeps else 0.0
            levels.append((span.end, constant + overhead * before))
        found.append(_merged([*levels, (timeline.length, constant)]))
    return found


def _merged(levels: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Leave out levels that hold for no time, or are as the one before; the last stays."""
    found: list[tuple[float, float]] = []
    for place, (start, level) in enumerate(levels):
        last = place == len(levels) - 1
        if not last and levels[place + 1][0] <= start:
            continue
        if last or not found or found[-1][1] != level:
            found.append((start, level))
    return found


def memory_time_svg(
    lines: Sequence[Sequence[tuple[float, float]]], names: Sequence[str], capacity: float, length: float
) -> str:
    """Draw a line for each pp group over the time axis of the timeline, from 0 bytes, and the device's memory where that is near."""
    most = max(level for line in lines for _, level in line)
    top = capacity * 1.05 if capacity < 2 * most else most * 1.1
    left, pixels = left_of(names), _TALL / top
    inner = []
    for number, line in enumerate(lines):
        dash = "" if number < len(LINES) else f' stroke-dasharray="{2 + number // len(LINES)} 2"'
        path = _path(line, length, pixels)
        tip = f"{names[number]}: at most {bytes_text(round(max(level for _, level in line)))}"
        inner.append(
            f'<path class="line" d="{path}" stroke="{LINES[number % len(LINES)]}"{dash}><title>{tip}</title></path>'
        )
    if capacity <= top:
        inner.append(f'<path class="line limit" d="M0 {_TALL - capacity * pixels:.1f}H{WHOLE}"/>')
    step = 2.0 ** math.ceil(math.log2(top / 5))
    axis = "".join(
        f'<path class="grid" d="M{left} {_TALL - step * n * pixels:.1f}H{WIDTH}"/>'
        f'<text class="axis end" x="{left - 5}" y="{_TALL - step * n * pixels + (3 if n else -1):.1f}">{bytes_text(round(step * n))}</text>'
        for n in range(math.floor(top / step) + 1)
        if _TALL - step * n * pixels > 6
    )
    return (
        f'<svg class="memory" viewBox="0 0 {WIDTH} {_TALL + 2}" role="img" aria-label="Memory of ranks over the step">{axis}'
        f"{zoomed(left, _TALL, ''.join(inner))}</svg>"
    )


def line_key(names: Sequence[str], capacity: bool) -> str:
    """Explain the lines of the first pp groups."""
    shown = "".join(
        f'<span class="entry"><span class="key" style="background:{LINES[number % len(LINES)]}"></span>{name}</span>'
        for number, name in enumerate(names[:16])
    )
    more = f" and {len(names) - 16} more" if len(names) > 16 else ""
    return (
        shown
        + more
        + ('<span class="entry"><span class="key limit"></span>memory of a device</span>' if capacity else "")
    )


def _path(line: Sequence[tuple[float, float]], length: float, pixels: float) -> str:
    scale = WHOLE / (length or 1.0)
    steps = [(start * scale, _TALL - level * pixels) for start, level in line]
    if len(steps) > _MOST:
        steps = _highest(steps)
    (x, y), rest = steps[0], steps[1:]
    return f"M{x:.0f} {y:.1f}" + "".join(f"H{x:.0f}V{y:.1f}" for x, y in rest)


def _highest(steps: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return for each of ``_MOST`` equal times the highest value (the smallest y) in it."""
    width = WHOLE / _MOST
    lowest = [math.inf] * _MOST
    for (start, y), (end, _) in itertools.pairwise(steps):
        for place in range(int(start / width), min(_MOST - 1, int(end / width)) + 1):
            lowest[place] = min(lowest[place], y)
    return [(place * width, y) for place, y in enumerate(lowest) if math.isfinite(y)] + [(WHOLE, steps[-1][1])]
