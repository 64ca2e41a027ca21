"""The process groups of a plan: which ranks communicate, and over what.

    Group        over                     ranks  groups  of rank 0
    tp           tp                           2       4  0, 1
    expert       dp_expert x tp               4       2  0-3
    expert_data  dp_replicate                 2       4  0, 4        gradients of experts are summed over it

Groups of several axes go by the names of :data:`graphpar.runtime.axes.GROUPS`. Those of experts follow the plan, since a shard plan may
divide experts over ranks of tp or cp as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphpar.errors import GraphparError, near_match
from graphpar.ir.plan import Plan
from graphpar.runtime.axes import AXES, AXIS, GROUPS, REPLICAS, STATE_AXES
from graphpar.text import indices_text

_SHOWN = 8
"""How many ranks of a group with gaps a table lists."""


def group_axes(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Return the axes of several ranks of every group that the plan has, by the group's name."""
    expert = expert_axes(plan)
    same = {"efsdp": STATE_AXES, "expert_data": (*REPLICAS, "cp")}  # on the other axes experts are the same
    own = {name: tuple(axis for axis in axes if expert and axis not in expert) for name, axes in same.items()}
    named = {axis: (axis,) for axis in AXES} | GROUPS | {"expert": expert} | own
    degrees = plan.mesh.degrees()
    found = {name: tuple(axis for axis in AXES if axis in axes and degrees[axis] > 1) for name, axes in named.items()}
    return {name: axes for name, axes in found.items() if axes}


def expert_axes(plan: Plan) -> tuple[str, ...]:
    """Return the axes whose ranks hold different experts; none where the plan divides no experts by their number."""
    stored = [axis for axis in AXES if AXIS[axis].stores_shards or (AXIS[axis].shares_state and plan.zero)]
    found = {
        axis
        for spec in plan.parameters().values()
        if any(axis in GROUPS["expert"] and kind == "S(0)" for axis, kind in spec.items())
        for axis, kind in spec.items()
        if kind == "S(0)" and axis not in stored
    }
    return tuple(axis for axis in AXES if axis in found)


def groups_data(plan: Plan) -> list[dict[str, Any]]:
    """Describe every group that the plan has: name, degrees of its axes, and the ranks of the one that rank 0 is in."""
    rows = []
    for name, axes in group_axes(plan).items():
        ranks = plan.mesh.groups_over(axes)
        degrees = {axis: plan.mesh.degrees()[axis] for axis in axes}
        rows.append({"name": name, "axes": degrees, "size": len(ranks[0]), "groups": len(ranks), "of_rank_0": ranks[0]})
    return rows


def ranks_of(plan: Plan, name: str) -> list[list[int]]:
    """Return the ranks of every group that has a name.

    Raises:
        GraphparError: there is no such name, or the plan has no group of it; those that it has are listed.
    """
    found = group_axes(plan)
    known = (*AXES, *GROUPS)
    if name not in known:
        raise GraphparError(f"There is no group {name!r}; there are {', '.join(known)}.{near_match(name, known)}")
    if name not in found:
        *first, last = GROUPS.get(name, (name,))
        enabled = f"it has {', '.join(found)}" if found else "each rank is alone"
        reason = f"{', '.join(first)} and {last} have one rank" if first else f"{last} has one rank"
        if name in ("efsdp", "expert", "expert_data") and not expert_axes(plan):
            reason = "it divides no experts by their number"
        raise GraphparError(f"The plan has no group {name}: {reason}; {enabled}.")
    return plan.mesh.groups_over(found[name])


def groups_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lay out the table of :func:`groups_data`."""
    if not rows:
        return [" One rank: there are no groups."]
    cells = [("Group", "over", "ranks", "groups", "of rank 0")]
    for row in rows:
        over = " x ".join(f"{axis}={degree}" for axis, degree in row["axes"].items())
        ranks = indices_text(row["of_rank_0"])
        if ranks.count(",") >= _SHOWN:
            ranks = f"{indices_text(row['of_rank_0'][:_SHOWN])}, ... {row['of_rank_0'][-1]}"
        cells.append((row["name"], over, str(row["size"]), str(row["groups"]), ranks))
    sizes = [max(map(len, column)) for column in zip(*cells)]
    return [
        f" {name:<{sizes[0]}}  {over:<{sizes[1]}}  {size:>{sizes[2]}}  {count:>{sizes[3]}}  {ranks}".rstrip()
        for name, over, size, count, ranks in cells
    ]
