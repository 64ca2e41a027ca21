"""The search as a picture: step time against peak memory of every plan that was priced, and the bounds of those that were not.

search of a report ──plans_of──► priced plans ──plans_svg──► points, the Pareto front, the memory of a device, the chosen plan
                   └─bounded_of─► plans that a bound ruled out ──► ticks on the time axis, at that bound
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import Any

from markupsafe import Markup

from graphpar.report.charts import WIDTH, legend, round_step
from graphpar.report.phrases import named
from graphpar.text import bytes_text, seconds_text, spread_text

_LEFT, _RIGHT, _TOP, _FOOT, _HIGH = 70, 20, 16, 40, 360
_SPREAD = 5.0
"""Values whose ratio is larger than this are drawn on a logarithmic axis."""


LISTED = 40
"""How many plans the table below the picture lists: the chosen one, the Pareto front, and the fastest."""
_AXES = ("pp", "dp_replicate", "dp_shard", "dp_expert", "cp", "ep", "tp")


def plans_of(search: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the priced plans of a search's JSON, the fastest first, each as a mapping, with whether it is ``chosen``, and ``best``:
    on the Pareto front."""
    points = search.get("points") or {"columns": [], "rows": [], "chosen": None, "front": []}
    front = set(points["front"])
    return [
        {**dict(zip(points["columns"], row)), "chosen": place == points["chosen"], "best": place in front}
        for place, row in enumerate(points["rows"])
    ]


def bounded_of(search: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the plans of a search's JSON that a bound ruled out, the lowest bound of the time first."""
    points = search.get("points") or {}
    return [dict(zip(points["bounded_columns"], row)) for row in points.get("bounded", ())]


def _name(plan: Mapping[str, Any]) -> tuple[str, str]:
    """Name the mesh of a plan, and its schedule, microbatches, ZeRO level and recomputation."""
    mesh, rest = named({**plan, "mesh": {axis: plan[axis] for axis in _AXES}})
    deep = f", {plan['stages_per_rank']} stages a rank" if plan["stages_per_rank"] > 1 else ""
    return mesh, rest + deep


def _time(plan: Mapping[str, Any]) -> str:
    few = "" if plan.get("exact", True) else " (few microbatches simulated)"
    return f"{spread_text(plan['step_time_s'], plan.get('spread_s', 0.0))}{few}"


def plan_text(plan: Mapping[str, Any]) -> str:
    """Describe a priced plan: its decisions, time, memory, and why it was not taken."""
    parts = ["CHOSEN" if plan["chosen"] else "", *_name(plan), _time(plan), bytes_text(plan["peak_memory_bytes"])]
    why = plan.get("why_not") or ("" if plan["fits"] else "does not fit")
    return f"{' · '.join(filter(None, parts))}{f': {why}' if why else ''}"


def bounded_text(plan: Mapping[str, Any]) -> str:
    """Describe a plan that a bound ruled out."""
    why = "" if plan["fits"] else ": by a bound of its memory it can't fit"
    return f"{' · '.join(_name(plan))} · not priced, at least {seconds_text(plan['bound_s'])}{why}"


def plans_rows(plans: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the rows of the table of plans: the chosen one, the Pareto front, and the fastest, :data:`LISTED` in all."""
    order = sorted(range(len(plans)), key=lambda place: (not plans[place]["chosen"], not plans[place]["best"], place))
    rows: list[tuple[str, ...]] = []
    for plan in (plans[place] for place in sorted(order[:LISTED])):
        kind = ", ".join(name for name, key in (("chosen", "chosen"), ("Pareto", "best")) if plan[key])
        why = plan.get("why_not") or ("" if plan["fits"] else "does not fit")
        rows.append((kind, *_name(plan), _time(plan), bytes_text(plan["peak_memory_bytes"]), why))
    return rows


def plans_key(plans: Sequence[Mapping[str, Any]], bounded: Sequence[Mapping[str, Any]]) -> Markup:
    """Explain the marks of the picture."""
    dots = [("#e08a3c", "chosen"), ("var(--accent)", "on the Pareto front: none is faster and smaller")]
    found = legend([*dots, ("var(--accent);opacity:.55", "other")], " dot")
    if not all(plan.get("exact", True) for plan in plans):
        found += legend([("none;border:1.5px solid var(--accent)", "priced from a few of its microbatches")], " dot")
    if not all(plan["fits"] for plan in plans):
        found += Markup('<span class="entry" style="color:var(--warn)">× does not fit</span>')
    if bounded:
        found += legend([("var(--soft);width:.25rem", "not priced: a bound of its time")])
    return found


def plans_svg(
    plans: Sequence[Mapping[str, Any]], devices: Collection[float], bounded: Sequence[Mapping[str, Any]] = ()
) -> Markup:
    """Draw the step time and the peak memory of the fullest rank of each plan as a point, the Pareto front and the memory of a device as
    lines, a ring around the chosen plan, and ticks at the bounds of plans that were not priced, as far as the time axis goes.

    ``devices``: the memory of a device, of each kind.
    """
    sizes = [plan["peak_memory_bytes"] for plan in plans]
    near = {own for own in devices if own <= _SPREAD * max(sizes)}
    across = _Scale([plan["step_time_s"] for plan in plans], _LEFT, WIDTH - _RIGHT)
    up = _Scale([*sizes, *near], _HIGH - _FOOT - 12, _TOP + 14, binary=True)
    shapes = _axes(across, up)
    for own in sorted(near) or [min(devices)]:
        y = up.at(own) if near else _TOP + 2
        text = f"memory of a device: {bytes_text(own)}{'' if near else ', above this scale'}"
        shapes.append(f'<path class="limit" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        shapes.append(f'<text class="axis end limited" x="{WIDTH - _RIGHT}" y="{y - 4:.1f}">{text}</text>')
    shapes += [
        f'<path class="bounded{"" if plan["fits"] else " large"}" d="M{across.at(plan["bound_s"]):.1f} {_HIGH - _FOOT - 9}v8">'
        f"<title>{escape(bounded_text(plan))}</title></path>"
        for plan in bounded
        if across.least <= plan["bound_s"] <= across.most
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
        step = 2.0 ** math.ceil(math.log2(target)) if self.binary else round_step(target)
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
    kind = " chosen" if plan["chosen"] else " best" if plan["best"] else "" if plan.get("exact", True) else " few"
    return f'{ring}<circle class="plan{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{5 if plan["chosen"] or plan["best"] else 3.5}">{title}</circle>'
