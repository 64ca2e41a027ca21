"""``StageBalancer``: split points that make the slowest stage as fast as possible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from graphpar.cost_models.memory import ALLOCATOR_SLACK
from graphpar.cost_models.pricing import Pricing
from graphpar.cost_models.unit_bytes import RunBytes


class StageBalancer:
    """Dynamic programming over units. Tables hold the seconds and bytes of units i up to j; ``inf`` where j <= i."""

    def __init__(self, pricing: Pricing, rows: int) -> None:
        count = len(pricing.units)
        self.count = count
        own = [pricing.stage_seconds(place, place + 1, rows) for place in range(count)]
        sums = np.concatenate([[0.0], np.cumsum([cost.forward + cost.backward for cost in own])])
        self.seconds = _runs(sums)
        self.pricing, self.rows = pricing, rows

    @cached_property
    def bytes(self) -> RunBytes:
        """Tables of the bytes of every run of units."""
        return self.pricing.bytes.runs(self.rows)

    def balanced(
        self, stages: int, alive: Sequence[float] | None = None, room: float = math.inf, messages: int = 1
    ) -> tuple[int, ...] | None:
        """Return the first unit of each stage; ties go to the earliest starts.

        Args:
            alive: microbatches in flight on each stage; with it, no stage may need more than ``room`` bytes.
            messages: how many microbatches of messages between stages are kept.

        Returns:
            None where no choice fits in ``room``.
        """
        costs = [self.seconds if alive is None else np.where(self._bytes(alive[stage], messages) <= room, self.seconds, np.inf)
                 for stage in range(stages)]  # fmt: skip
        reach = costs[0][0]  # [end]: seconds of the slowest stage of units 0 to end, at best
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
    """Return ``sums[j] - sums[i]`` for i < j, else infinity."""
    table = sums[None, :] - sums[:, None]
    return np.where(np.arange(len(sums))[None, :] > np.arange(len(sums))[:, None], table, np.inf)
