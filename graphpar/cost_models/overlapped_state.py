"""How much of reducing gradients and of gathering parameters a pp rank's own actions hide.

    rank   F0 F1 ... B1 B1 B1 B0 B0 B0 |            stage 1's gradients are whole after its last backward: they are reduced beside
                          ├─ reduce 1 ─┤ reduce 0   those of stage 0; parameters are gathered in the order of the stages' first forwards

Collectives of a rank run one after the other. Those of one stage start with its last backward (a bucket at a time, the last bucket
after it), and end before its first forward ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from graphpar.cost_models.step_costs import StageSeconds
from graphpar.schedules.order import KIND_ORDER, Order


@dataclass(frozen=True)
class StageWindow:
    """The seconds that a pp rank computes before the first forward of a stage, and after its last backward."""

    before: float
    later: float


def windows(order: Order, rank: int, costs: Sequence[StageSeconds]) -> dict[int, StageWindow]:
    """Return the window of each stage of a pp rank, which computes without waiting."""
    count = order.stages
    seconds = np.zeros(len(KIND_ORDER) * count)
    for stage, cost in enumerate(costs):
        each = {"F": cost.forward, "B": cost.backward, "I": cost.backward - cost.weight, "W": cost.weight}
        for kind, value in each.items():
            seconds[KIND_ORDER.index(kind) * count + stage] = value
    taken = seconds[order.price[order.actions_of[rank]]]
    ends = np.cumsum(taken)
    return {
        stage: StageWindow(float(ends[begin] - taken[begin]), float(ends[-1] - ends[last]))
        for stage, (begin, last) in order.windows_of[rank].items()
    }


def exposed_reduce(
    reduces: Mapping[int, float], costs: Sequence[StageSeconds], last: float, around: Mapping[int, StageWindow]
) -> float:
    """Return the seconds of reducing gradients after a rank's last action.

    Args:
        reduces: of each of the rank's stages.
        costs: of all stages.
        last: of the last bucket.
        around: the windows of the rank's stages.
    """
    free = -float("inf")
    for stage in sorted(reduces, key=lambda stage: -around[stage].later):
        ready = -around[stage].later
        free = max(max(free, ready - costs[stage].backward) + reduces[stage], ready + min(last, reduces[stage]))
    return max(0.0, free)


def exposed_gather(
    gathers: Mapping[int, float], costs: Sequence[StageSeconds], around: Mapping[int, StageWindow]
) -> float:
    """Return the seconds by which gathering the parameters of a rank's stages delays its forwards."""
    exposed = done = 0.0
    for stage in sorted(gathers, key=lambda stage: around[stage].before):
        done += gathers[stage]
        exposed = max(exposed, done - around[stage].before - costs[stage].forward)
    return exposed
