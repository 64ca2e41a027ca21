"""Charts of a report as SVG, which need no script to be seen: the timeline, memory, the plans of a search, throughput.

The timeline and the memory over a step share an x axis, time from 0 to :data:`WHOLE` in an inner SVG. The page's script zooms by its
viewBox, and draws labels and ticks anew.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from markupsafe import Markup

from graphpar.cost_models.timelines import StageEstimate
from graphpar.report.phrases import mesh_text, zero_text
from graphpar.report.trace import COLLECTIVE, IDLE, TRANSFER, StepSpan, beside, step_spans
from graphpar.schedules.action_table import KINDS, parse_table
from graphpar.schedules.simulation import CLOSINGS, Timeline, in_flight
from graphpar.text import bytes_text, plural, rate_text, seconds_text

WHOLE = 100_000
"""The length of the step on the x axis of inner SVGs."""
WIDTH = 1060
"""The width of charts, in pixels."""
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


def _left_of(names: Sequence[str]) -> float:
    """Return where the x axis begins, right of the rows' names and of the sizes of the memory below, in pixels."""
    return round(10 + _LETTER * max(len("4.00 GiB"), *map(len, names)))


def _zoomed(left: float, tall: int, content: str) -> str:
    """Put shapes whose x is time into an inner SVG that the page's script zooms."""
    return (
        f'<svg class="zoom" x="{left}" y="0" width="{WIDTH - left}" height="{tall}" viewBox="0 0 {WHOLE} {tall}" '
        f'preserveAspectRatio="none">{content}</svg>'
    )


def _round_step(target: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least ``target``."""
    power = 10.0 ** math.floor(math.log10(target))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= target * (1 - 1e-9))


# ---- the timeline ----------------------------------------------------------------------------------------------

COLORS = {"F": "#2f78b7", "B": "#c9701f", "I": "#a8851a", "W": "#46875a", "UNSHARD": "#6264c4", "REDUCE_GRAD": "#a05195",
          "gradients": "#a05195", "optimizer": "#6b7885", "parameters": "#6264c4", COLLECTIVE: "#b0305c", TRANSFER: "#c9a9b4",
          IDLE: "#8a97a433"}  # fmt: skip
"""Colors of spans by kind, in the order of the legend."""
_WORDS = {kind: words for kind, (_, words) in (KINDS | CLOSINGS).items()} | {
    TRANSFER: "waits for a transfer",
    IDLE: "idle",
}
_LABELLED = 3000
"""With more spans than this, a row's spans of one kind are one shape, so that the page stays small."""
_HEIGHT, _BESIDE, _GAP, _AXIS = 22, 5, 6, 18
"""Of a row, of what runs beside it, between rows, and of the axis, in pixels."""


def timeline_svg(timeline: Timeline, names: Sequence[str], several: bool, seconds: bool) -> Markup:
    """Draw a row for each pp group with its name, and every span of it, in time from left to right.

    Args:
        several: label actions with their stage.
        seconds: times are in seconds; draw an axis of them.
    """
    rows, hidden = step_spans(timeline), beside(timeline)
    pitch = _HEIGHT + (_BESIDE + 1 if any(hidden) else 0) + _GAP
    left, whole = _left_of(names), timeline.length or 1.0
    shown = [[span for span in row if span.length > 0] for row in rows]
    few = sum(map(len, shown)) <= _LABELLED
    inner, labels = [], []
    for number, row in enumerate(shown):
        top = number * pitch
        shapes = _boxes(row, top, _HEIGHT, whole, several, seconds) if few else _shapes(row, top, whole)
        inner.append(f'<g class="row">{"".join(shapes)}</g>')
        labels += _labels(row, top, left, whole, several) if few else []
        inner += _boxes(hidden[number], top + _HEIGHT + 1, _BESIDE, whole, several, seconds) if any(hidden) else []
    tall = len(rows) * pitch
    named = "".join(
        f'<text class="axis" x="0" y="{n * pitch + _HEIGHT - 7}">{name}</text>' for n, name in enumerate(names)
    )
    axis = f'<g class="ticks">{"".join(_ticks(timeline.length, left, tall))}</g>' if seconds and timeline.length else ""
    return Markup(
        f'<svg class="timeline" viewBox="0 0 {WIDTH} {tall + _AXIS}" role="img" aria-label="Timeline of the step" '
        f'data-left="{left}" data-tall="{tall}" data-length="{timeline.length!r}" data-seconds="{int(seconds)}">{named}'
        f'{_zoomed(left, tall, "".join(inner))}<g class="labels">{"".join(labels)}</g>{axis}</svg>'
    )


def timeline_key(timeline: Timeline) -> Markup:
    """Explain the colors of the timeline."""
    rows = (*step_spans(timeline), *beside(timeline))
    kinds = {span.kind for row in rows for span in row if span.length > 0}
    axes = ", ".join(dict.fromkeys(span.axis for row in rows for span in row if span.kind == COLLECTIVE))
    words = _WORDS | {COLLECTIVE: f"collectives inside actions ({axes})"}
    return legend((COLORS[kind], words[kind]) for kind in COLORS if kind in kinds)


def _boxes(row: Iterable[StepSpan], top: int, height: int, whole: float, several: bool, seconds: bool) -> list[str]:
    """Draw each span as a box with what it is, how long it takes, and from when."""
    scale, found = WHOLE / whole, []
    for span in row:
        takes = f"{span.length / whole:.2%} of the step"
        if seconds:
            takes = f"{seconds_text(span.length)}, from {seconds_text(span.start)}"
        found.append(
            f'<rect x="{span.start * scale:.1f}" y="{top}" width="{span.length * scale:.1f}" height="{height}" '
            f'fill="{COLORS[span.kind]}" data-n="{_label(span, several)}"><title>{escape(f"{span.words}: {takes}")}</title></rect>'
        )
    return found


def _shapes(row: Sequence[StepSpan], top: int, whole: float) -> list[str]:
    """Draw one shape for each kind of span: lines as wide as the row."""
    scale, middle = WHOLE / whole, top + _HEIGHT / 2
    outlines: dict[str, list[str]] = {}
    for span in row:
        x, end = round(span.start * scale), round(span.end * scale)
        outlines.setdefault(span.kind, []).append(f"M{x} {middle}h{max(1, end - x)}")
    return [
        f'<path stroke="{COLORS[kind]}" stroke-width="{_HEIGHT}" data-w="{_WORDS.get(kind, kind)}" d="{"".join(outlines[kind])}"/>'
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
    step, scale = _round_step(length / 10), (WIDTH - left) / length
    times = [step * number for number in range(math.floor(length / step) + 1)]
    unit, name = next((unit, name) for unit, name in ((1.0, "s"), (1e-3, "ms"), (0.0, "us")) if length >= 10 * unit)
    return [
        f'<path d="M{left + time * scale:.1f} {top}v4"/>'
        f'<text class="axis" x="{left + time * scale:.1f}" y="{top + 14}">{time / (unit or 1e-6):.6g} {name}</text>'
        for time in times
        if left + time * scale < WIDTH - 14
    ]


# ---- memory over the step --------------------------------------------------------------------------------------

LINES = ("#2f78b7", "#c9701f", "#46875a", "#a05195", "#a8851a", "#6264c4", "#b0305c", "#6b7885")
"""Colors of lines, one after the other."""
_MOST = 1000
"""A line of more steps than this is drawn as the highest value in each of as many equal times."""
_TALL = 190
Levels = Sequence[tuple[float, float]]
"""(seconds, bytes): the bytes hold until the next entry."""


def memory_over_time(data: Mapping[str, Any], timeline: Timeline) -> list[Levels] | None:
    """Return for each pp group the bytes that its ranks hold, from 0 to the end of the step.

    While an action runs there is on top what the largest forward or backward of its ranks needs, so the highest value is the predicted
    peak. None where there is no prediction, or it does not say what stages keep.
    """
    predicted = data.get("predicted")
    if not predicted or any("kept_bytes" not in stage for stage in predicted["stages"]):
        return None
    stages = [StageEstimate.from_json(stage) for stage in predicted["stages"]]
    keeps = data["mode"] == "train"
    kept = in_flight(parse_table("\n".join(data["actions"])), [stage.kept_bytes for stage in stages])
    found: list[Levels] = []
    for row, memory, after in zip(timeline.spans, predicted["memory"], kept):
        activations, transient, slack = memory["activations"], memory["transient"], memory["slack"]
        moving = activations + transient
        overhead = 1 + (slack / (moving + memory["buckets"]) if moving + memory["buckets"] else 0.0)
        constant = sum(memory.values()) - overhead * moving
        levels, before = [(0.0, constant)], 0.0
        for span, held in zip(row, after.after):
            now = held if keeps else activations
            if span.end > span.start:
                levels.append((span.start, constant + overhead * (max(before, now) + transient)))
            before = now if keeps else 0.0
            levels.append((span.end, constant + overhead * before))
        found.append(_merged([*levels, (timeline.length, constant)]))
    return found


def _merged(levels: Levels) -> Levels:
    """Leave out levels that hold for no time, or are as the one before; the last stays."""
    found: list[tuple[float, float]] = []
    for place, (start, level) in enumerate(levels):
        last = place == len(levels) - 1
        if not last and levels[place + 1][0] <= start:
            continue
        if last or not found or found[-1][1] != level:
            found.append((start, level))
    return found


def memory_time_svg(lines: Sequence[Levels], names: Sequence[str], capacity: float, length: float) -> Markup:
    """Draw a line for each pp group over the time axis of the timeline, from 0 bytes, and the device's memory where that is near."""
    most = max(level for line in lines for _, level in line)
    top = capacity * 1.05 if capacity < 2 * most else most * 1.1
    left, pixels, inner = _left_of(names), _TALL / top, []
    for number, line in enumerate(lines):
        dash = "" if number < len(LINES) else f' stroke-dasharray="{2 + number // len(LINES)} 2"'
        tip = f"{names[number]}: at most {bytes_text(max(level for _, level in line))}"
        path, color = _path(line, length, pixels), LINES[number % len(LINES)]
        inner.append(f'<path class="line" d="{path}" stroke="{color}"{dash}><title>{tip}</title></path>')
    if capacity <= top:
        inner.append(f'<path class="line limit" d="M0 {_TALL - capacity * pixels:.1f}H{WHOLE}"/>')
    step = 2.0 ** math.ceil(math.log2(top / 5))
    axis = "".join(
        f'<path class="grid" d="M{left} {_TALL - step * n * pixels:.1f}H{WIDTH}"/>'
        f'<text class="axis end" x="{left - 5}" y="{_TALL - step * n * pixels + (3 if n else -1):.1f}">{bytes_text(step * n)}</text>'
        for n in range(math.floor(top / step) + 1)
        if _TALL - step * n * pixels > 6
    )
    return Markup(
        f'<svg class="memory" viewBox="0 0 {WIDTH} {_TALL + 2}" role="img" aria-label="Memory of ranks over the step">{axis}'
        f"{_zoomed(left, _TALL, ''.join(inner))}</svg>"
    )


def line_key(names: Sequence[str], lines: Sequence[Levels], capacity: float) -> Markup:
    """Explain the lines of the first pp groups, and that of the device's memory where that is near."""
    shown = legend((LINES[number % len(LINES)], name) for number, name in enumerate(names[:16]))
    more = f" and {len(names) - 16} more" if len(names) > 16 else ""
    near = capacity < 2 * max(level for line in lines for _, level in line)
    limit = '<span class="entry"><span class="key limit"></span>memory of a device</span>' if near else ""
    return Markup(f"{shown}{more}{limit}")


def _path(line: Levels, length: float, pixels: float) -> str:
    scale = WHOLE / (length or 1.0)
    steps = [(start * scale, _TALL - level * pixels) for start, level in line]
    if len(steps) > _MOST:  # for each of as many equal times the highest value: the smallest y
        width, highest, end = WHOLE / _MOST, [math.inf] * _MOST, (WHOLE, steps[-1][1])
        for (start, y), (until, _) in itertools.pairwise(steps):
            for place in range(int(start / width), min(_MOST - 1, int(until / width)) + 1):
                highest[place] = min(highest[place], y)
        steps = [*((place * width, y) for place, y in enumerate(highest) if math.isfinite(y)), end]
    (x, y), rest = steps[0], steps[1:]
    return f"M{x:.0f} {y:.1f}" + "".join(f"H{x:.0f}V{y:.1f}" for x, y in rest)


# ---- memory at the peak ----------------------------------------------------------------------------------------

PARTS = {
    "parameters": "#3b82c4", "copies": "#7fb0dd", "gradients": "#e08a3c", "optimizer": "#5a9e6f", "main_copies": "#8fbf9f",
    "activations": "#a05195", "transient": "#d45087", "boundaries": "#c9a227", "buckets": "#7f8c9a", "buffers": "#6b6ecf",
    "inputs": "#9c9ede", "slack": "#b9c2cb", "communicators": "#8c6d31",
}  # fmt: skip
"""Colors of the parts of a rank's memory, in the order in which they are drawn."""


def memory_svg(predicted: Mapping[str, Any], names: Sequence[str], height: int = 18, gap: int = 5) -> Markup:
    """Draw a bar for a rank of each pp group: the parts of its memory at the peak, and a line at the device's memory if that is near."""
    peaks, capacity = predicted["peak_memory_bytes"], predicted["memory_bytes"]
    longest, left = max(max(peaks), 1), _left_of(names)
    near = longest > capacity / 3
    scale = (WIDTH - left - 90) / (max(longest, capacity) if near else longest)
    shapes = []
    for rank, (memory, peak) in enumerate(zip(predicted["memory"], peaks)):
        top, x = rank * (height + gap), left
        shapes.append(f'<text class="axis" x="0" y="{top + height - 5}">{names[rank]}</text>')
        for part, color in PARTS.items():
            wide = memory.get(part, 0) * scale
            if wide >= 0.05:
                tip = f"{part.replace('_', ' ')}: {bytes_text(memory[part])}"
                box = f'<rect x="{x:.1f}" y="{top}" width="{wide:.1f}" height="{height}" fill="{color}"/>'
                shapes.append(f"<g><title>{tip}</title>{box}</g>")
            x += wide
        shapes.append(f'<text class="axis" x="{x + 5:.1f}" y="{top + height - 5}">{bytes_text(peak)}</text>')
    tall = len(peaks) * (height + gap)
    limit = f'<path class="limit" d="M{left + capacity * scale:.1f} 0v{tall}"/>' if near else ""
    return Markup(
        f'<svg class="peaks" viewBox="0 0 {WIDTH} {tall}" role="img" aria-label="Memory at the peak">{"".join(shapes)}{limit}</svg>'
    )


def memory_key(predicted: Mapping[str, Any]) -> Markup:
    """Explain the parts of memory that some rank has."""
    used = [part for part in PARTS if any(memory[part] for memory in predicted["memory"])]
    return legend((PARTS[part], part.replace("_", " ")) for part in used)


# ---- the plans of a search -------------------------------------------------------------------------------------

_LEFT, _RIGHT, _TOP, _FOOT, _HIGH = 70, 20, 16, 40, 360
_SPREAD = 5.0
"""Values whose ratio is larger than this are drawn on a logarithmic axis."""


def plans_of(search: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the priced plans of a search's JSON, the fastest first, each as a mapping, with whether it is ``chosen``, and ``best``:
    on the Pareto front."""
    points = search.get("points") or {"columns": [], "rows": [], "chosen": None, "front": []}
    front = set(points["front"])
    return [
        {**dict(zip(points["columns"], row)), "chosen": place == points["chosen"], "best": place in front}
        for place, row in enumerate(points["rows"])
    ]


def plan_text(plan: Mapping[str, Any]) -> str:
    """Describe a plan: mesh, ZeRO, recomputation, schedule, microbatches, time, memory."""
    axes = ("pp", "dp_replicate", "dp_shard", "dp_expert", "cp", "ep", "tp")
    deep = f" with {plan['stages_per_rank']} stages a rank" if plan["stages_per_rank"] > 1 else ""
    count = plural(plan["microbatches"], "microbatch", "microbatches")
    parts = [
        "CHOSEN" if plan["chosen"] else "",
        mesh_text({axis: plan[axis] for axis in axes}),
        zero_text(plan["zero"], plan["reshard"]).replace(" with", ",") or "no ZeRO",
        f"recomputation {plan['recompute']}",
        f"{plan['schedule']}{deep}" if plan["pp"] > 1 else "",
        f"{count} of {plan['microbatch_size']}",
        seconds_text(plan["step_time_s"]),
        f"{bytes_text(plan['peak_memory_bytes'])}{'' if plan['fits'] else ': does not fit'}",
    ]
    return " · ".join(filter(None, parts))


def plans_svg(plans: Sequence[Mapping[str, Any]], capacity: float) -> Markup:
    """Draw the step time and the peak memory of the fullest rank of each plan as a point, the Pareto front and the memory of a device as
    lines, and a ring around the chosen plan."""
    sizes = [plan["peak_memory_bytes"] for plan in plans]
    off = capacity > _SPREAD * max(sizes)
    across = _Scale([plan["step_time_s"] for plan in plans], _LEFT, WIDTH - _RIGHT)
    up = _Scale([*sizes, *([] if off else [capacity])], _HIGH - _FOOT, _TOP + 14, binary=True)
    y = _TOP + 2 if off else up.at(capacity)
    text = f"memory of a device: {bytes_text(capacity)}{', above this scale' if off else ''}"
    shapes = [
        *_axes(across, up),
        f'<path class="limit" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>',
        f'<text class="axis end limited" x="{WIDTH - _RIGHT}" y="{y - 4:.1f}">{text}</text>',
    ]
    front = [
        f"{across.at(plan['step_time_s']):.1f} {up.at(plan['peak_memory_bytes']):.1f}" for plan in plans if plan["best"]
    ]
    if len(front) > 1:
        shapes.append(f'<path class="front" d="M{"L".join(front)}"/>')
    drawn = sorted(plans, key=lambda each: (each["chosen"], each["best"], each["fits"]))
    shapes += [_mark(each, across, up) for each in drawn]
    return Markup(
        f'<svg class="pareto" viewBox="0 0 {WIDTH} {_HIGH}" role="img" '
        f'aria-label="Step time and peak memory of the plans that were priced">{"".join(shapes)}</svg>'
    )


class _Scale:
    """An axis from pixel ``first`` to ``last``; logarithmic where the values are far apart."""

    def __init__(self, values: Sequence[float], first: float, last: float, binary: bool = False) -> None:
        least, most = max(min(values), 1e-12), max(*values, 1e-12)
        self.first, self.last, self.binary, self.log = first, last, binary, most > _SPREAD * least
        room = 0.06 * (math.log(most / least) if self.log else most - least) or (0.1 * least)
        self.least = least * math.exp(-room) if self.log else max(0.0, least - room)
        self.most = most * math.exp(room) if self.log else most + room

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        if self.log:
            share = math.log(max(value, 1e-12) / self.least) / math.log(self.most / self.least)
        else:
            share = (value - self.least) / (self.most - self.least)
        return self.first + share * (self.last - self.first)

    def ticks(self) -> list[float]:
        """Return round values, powers of two where the axis is binary and logarithmic."""
        if self.log:
            base = (1.0,) if self.binary else (1.0, 2.0, 5.0)
            power = 2.0 if self.binary else 10.0
            first, last = (math.floor(math.log(each, power)) for each in (self.least, self.most))
            found = [times * power**n for n in range(first, last + 1) for times in base]
            shown = [each for each in found if self.least <= each <= self.most]
            return shown[:: max(1, math.ceil(len(shown) / 9))]
        target = (self.most - self.least) / 8
        step = 2.0 ** math.ceil(math.log2(target)) if self.binary else _round_step(target)
        return [step * n for n in range(math.ceil(self.least / step), math.floor(self.most / step) + 1)]


def _axes(across: _Scale, up: _Scale) -> list[str]:
    foot, middle = _HIGH - _FOOT, (_LEFT + WIDTH - _RIGHT) / 2
    shapes = [f'<path class="frame" d="M{_LEFT} {_TOP}V{foot}H{WIDTH - _RIGHT}"/>']
    for value in across.ticks():
        x = across.at(value)
        shapes.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{foot}"/>')
        shapes.append(f'<text class="axis mid" x="{x:.1f}" y="{foot + 14}">{seconds_text(value)}</text>')
    for value in up.ticks():
        y = up.at(value)
        shapes.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        shapes.append(f'<text class="axis end" x="{_LEFT - 5}" y="{y + 3:.1f}">{bytes_text(value)}</text>')
    logarithmic = [" (logarithmic)" if scale.log else "" for scale in (across, up)]
    shapes.append(f'<text class="axis mid" x="{middle}" y="{_HIGH - 8}">a step{logarithmic[0]}</text>')
    return [*shapes, f'<text class="axis" x="4" y="10">peak of the fullest rank{logarithmic[1]}</text>']


def _mark(plan: Mapping[str, Any], across: _Scale, up: _Scale) -> str:
    x, y = across.at(plan["step_time_s"]), up.at(plan["peak_memory_bytes"])
    title = f"<title>{escape(plan_text(plan))}</title>"
    if not plan["fits"]:
        return f'<path class="plan misfit" d="M{x - 3.5:.1f} {y - 3.5:.1f}l7 7m0 -7l-7 7">{title}</path>'
    ring = f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="9"/>' if plan["chosen"] else ""
    kind = " chosen" if plan["chosen"] else " best" if plan["best"] else ""
    return f'{ring}<circle class="plan{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{5 if kind else 3.5}">{title}</circle>'


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
    colors = dict(zip(lines, itertools.cycle(PARTS.values())))
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
