"""``StageCuts``: where stages begin, so that the slowest is as fast as can be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from graphpar.cost_models.memory import ALLOCATOR_SLACK
from graphpar.cost_models.pricing import Pricing
from graphpar.cost_models.unit_bytes import RunBytes


class StageCuts:
    """By dynamic programming over units.

    Seconds and bytes of every run of units [i, j) are tables; ``inf`` where j <= i.
    """

    def __init__(self, pricing: Pricing, rows: int) -> None:
        count = len(pricing.units)
        self.count = count
        own = [pricing.stage_seconds(place, place + 1, rows) for place in range(count)]
        sums = np.concatenate([[0.0], np.cumsum([cost.forward + cost.backward for cost in own])])
        self.seconds = _runs(sums)
        self.pricing, self.rows = pricing, rows

    @cached_property
    def bytes(self) -> RunBytes:
        return self.pricing.bytes.runs(self.rows)

    def balanced(
        self, stages: int, alive: Sequence[float] | None = None, room: float = math.inf, messages: int = 1
    ) -> tuple[int, ...] | None:
        """The first unit of each stage. With ``alive``, microbatches in flight a stage, no stage takes more than ``room`` bytes.

        Of cuts whose slowest stage is equally fast the one with the earliest starts; None where no cut has room.
        """
        costs = [self.seconds if alive is None else np.where(self._bytes(alive[stage], messages) <= room, self.seconds, np.inf)
                 for stage in range(stages)]  # fmt: skip
        reach = costs[0][0]  # [end]: the slowest stage of the best cut of the first units
        choices: list[NDArray[np.int64]] = []
        for stage in range(1, stages):
            through = np.maximum(reach[:, None], costs[stage])
            choices.append(through.argmin(axis=0))
            reach = through.min(axis=0)
        if not math.isfinite(reach[self.count]):
            return None
        starts, end = [], self.count
        for choice in reversed(choices):
            end = int(choice[end])
            starts.append(end)
        return (0, *reversed(starts))

    def _bytes(self, alive: float, messages: int) -> NDArray[np.float64]:
        table = self.bytes
        moving = (1 + ALLOCATOR_SLACK) * (alive * table.kept + table.transient)
        return np.asarray(table.fixed + moving + messages * table.message)


def _runs(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """``sums[j] - sums[i]`` for i < j, else infinite."""
    table = sums[None, :] - sums[:, None]
    return np.where(np.arange(len(sums))[None, :] > np.arange(len(sums))[:, None], table, np.inf)
