"""The plans that a search priced, as a chart of step time against the peak memory of the fullest rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from graphpar.report.predicted import mesh_text
from graphpar.report.timeline_chart import WIDTH, round_step
from graphpar.text import bytes_text, plural, seconds_text

_LEFT, _RIGHT, _TOP, _FOOT, _TALL = 70, 20, 16, 40, 360
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


def plan_said(plan: Mapping[str, Any]) -> str:
    """Describe a plan: mesh, ZeRO, recomputation, schedule, microbatches, time, memory."""
    axes = ("pp", "dp_replicate", "dp_shard", "dp_expert", "cp", "ep", "tp")
    deep = f" with {plan['stages_per_rank']} stages a rank" if plan["stages_per_rank"] > 1 else ""
    reshard = "" if plan["reshard"] == "default" else f", reshard {plan['reshard']}"
    count = plural(plan["microbatches"], "microbatch", "microbatches")
    parts = [
        mesh_text({axis: plan[axis] for axis in axes}),
        f"ZeRO-{plan['zero']}{reshard}" if plan["zero"] else "no ZeRO",
        f"recomputation {plan['recompute']}",
        *([f"{plan['schedule']}{deep}"] if plan["pp"] > 1 else []),
        f"{count} of {plan['microbatch_size']}",
        seconds_text(plan["step_time_s"]),
        f"{bytes_text(plan['peak_memory_bytes'])}{'' if plan['fits'] else ': does not fit'}",
    ]
    return " · ".join([*(["CHOSEN"] if plan["chosen"] else []), *parts])


def pareto_svg(plans: Sequence[Mapping[str, Any]], capacity: float) -> str:
    """Draw a point for each plan, the front and the memory of a device as lines, and a ring around the chosen plan."""
    times = [plan["step_time_s"] for plan in plans]
    sizes = [plan["peak_memory_bytes"] for plan in plans]
    off = capacity > _SPREAD * max(sizes)
    across = _Scale(times, _LEFT, WIDTH - _RIGHT)
    up = _Scale([*sizes, *([] if off else [capacity])], _TALL - _FOOT, _TOP + 14, binary=True)
    shapes = [_axes(across, up), _limit(up, capacity, off)]
    front = [each for each in plans if each["best"]]
    line = "L".join(f"{across.at(each['step_time_s']):.1f} {up.at(each['peak_memory_bytes']):.1f}" for each in front)
    shapes.append(f'<path class="front" d="M{line}"/>' if len(front) > 1 else "")
    drawn = sorted(plans, key=lambda each: (each["chosen"], each["best"], each["fits"]))
    shapes += [_mark(each, across, up) for each in drawn]
    return (
        f'<svg class="pareto" viewBox="0 0 {WIDTH} {_TALL}" role="img" '
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
        wanted = (self.most - self.least) / 8
        step = 2.0 ** math.ceil(math.log2(wanted)) if self.binary else round_step(wanted)
        return [step * n for n in range(math.ceil(self.least / step), math.floor(self.most / step) + 1)]


def _axes(across: _Scale, up: _Scale) -> str:
    foot = _TALL - _FOOT
    shapes = [f'<path class="frame" d="M{_LEFT} {_TOP}V{foot}H{WIDTH - _RIGHT}"/>']
    for value in across.ticks():
        x = across.at(value)
        shapes.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{foot}"/>')
        shapes.append(f'<text class="axis mid" x="{x:.1f}" y="{foot + 14}">{seconds_text(value)}</text>')
    for value in up.ticks():
        y = up.at(value)
        shapes.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        shapes.append(f'<text class="axis end" x="{_LEFT - 5}" y="{y + 3:.1f}">{bytes_text(round(value))}</text>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    shapes.append(
        f'<text class="axis mid" x="{middle}" y="{_TALL - 8}">a step{" (logarithmic)" if across.log else ""}</text>'
    )
    shapes.append(
        f'<text class="axis" x="4" y="10">peak of the fullest rank{" (logarithmic)" if up.log else ""}</text>'
    )
    return "".join(shapes)


def _limit(up: _Scale, capacity: float, off: bool) -> str:
    y = _TOP + 2 if off else up.at(capacity)
    text = f"memory of a device: {bytes_text(round(capacity))}{', above this scale' if off else ''}"
    return (
        f'<path class="limit" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>'
        f'<text class="axis end limited" x="{WIDTH - _RIGHT}" y="{y - 4:.1f}">{text}</text>'
    )


def _mark(plan: Mapping[str, Any], across: _Scale, up: _Scale) -> str:
    x, y = across.at(plan["step_time_s"]), up.at(plan["peak_memory_bytes"])
    title = f"<title>{escape(plan_said(plan))}</title>"
    if not plan["fits"]:
        return f'<path class="plan misfit" d="M{x - 3.5:.1f} {y - 3.5:.1f}l7 7m0 -7l-7 7">{title}</path>'
    ring = f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="9"/>' if plan["chosen"] else ""
    kind = " chosen" if plan["chosen"] else " best" if plan["best"] else ""
    return f'{ring}<circle class="plan{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{5 if kind else 3.5}">{title}</circle>'
