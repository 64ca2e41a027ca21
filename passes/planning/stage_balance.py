"""``StageBalancer``: where stages begin, so that the slowest is as fast as possible; and how fast at best, where memory is short.

Where a rank's memory is short its units recompute. A unit's choices are points (bytes saved, seconds more), and a share of a choice is
allowed here: then the least seconds that save so many bytes in a run of units are found by taking the cheapest savings first. The
result is a lower bound of what whole choices take, and a good place to begin stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from graphpar.cost_models.memory import ALLOCATOR_SLACK
from graphpar.cost_models.pricing import Pricing
from graphpar.cost_models.unit_bytes import RunBytes, run_largest, run_sums

Array = NDArray[np.float64]


class StageBalancer:
    """Dynamic programming over units. Tables hold the seconds and bytes of units i up to j; ``inf`` where j <= i.

    Args:
        pricings: of the kinds of recomputation that there are, the least first.
    """

    def __init__(self, pricings: Sequence[Pricing], rows: int) -> None:
        self.pricings, self.rows, self.count = pricings, rows, len(pricings[0].units)
        self._costs: dict[tuple[float, float, int], Array] = {}

    @cached_property
    def _seconds(self) -> Array:
        own = [self.pricings[0].stage_seconds(place, place + 1, self.rows) for place in range(self.count)]
        return _runs(np.array([cost.forward + cost.backward for cost in own]))

    @cached_property
    def _bytes(self) -> tuple[RunBytes, ...]:
        return tuple(pricing.bytes.runs(self.rows) for pricing in self.pricings)

    @cached_property
    def _least(self) -> tuple[Array, Array]:
        """Lower bounds of each unit's seconds, and for each kind of those that it adds to the first kind's."""
        found = [[pricing.least_s(unit, self.rows) for unit in pricing.units] for pricing in self.pricings]
        again = np.array([[seconds for _, seconds in kind] for kind in found])
        return np.array([own for own, _ in found[0]]) + again[0], again - again[0]

    @cached_property
    def saved(self) -> Array:
        """For each kind and unit, the bytes of a microbatch that it keeps less than with the first kind."""
        return np.array([self._bytes[0].own - each.own for each in self._bytes])

    @property
    def more(self) -> Array:
        """For each kind and unit, the seconds of a microbatch that it takes more than with the first kind, at least."""
        return self._least[1]

    @cached_property
    def _savings(self) -> list[tuple[float, Array]]:
        """Seconds a byte, and how many bytes each unit can save at that price; the cheapest first."""
        by_price: dict[float, Array] = {}
        for unit in range(self.count):
            points = list(zip(self.saved[:, unit].tolist(), self.more[:, unit].tolist()))
            before = (0.0, 0.0)
            for place in hull(points):
                price = _price(points[place], *before)
                by_price.setdefault(price, np.zeros(self.count))[unit] += points[place][0] - before[0]
                before = points[place]
        return sorted(by_price.items())

    def balanced(self, stages: int) -> tuple[int, ...] | None:
        """Return the first unit of each stage, memory aside; ties go to the earliest starts."""
        return self._best([self._seconds] * stages)[1]

    def within(self, alive: Sequence[float], room: float, messages: int = 1) -> tuple[float, tuple[int, ...] | None]:
        """Return a lower bound of the slowest stage's seconds, and the first unit of each stage there; ``inf`` where none fit.

        Args:
            alive: microbatches in flight on each stage.
            room: bytes that a stage may take.
            messages: how many microbatches of messages between stages are kept.
        """
        return self._best([self._within(each, room, messages) for each in alive])

    def least_s(self, nbytes: float) -> float:
        """Return a lower bound of the seconds of a microbatch in all units, where they keep ``nbytes`` of it less than with the first
        kind; ``inf`` where they can't."""
        seconds, left = float(self._least[0].sum()), nbytes
        for price, savings in self._savings:
            if left <= 0:
                break
            taken = min(left, float(savings.sum()))
            seconds, left = seconds + price * taken, left - taken
        return math.inf if left > 1 else seconds

    def _within(self, alive: float, room: float, messages: int) -> Array:
        """Return the seconds of every run of units that fits in ``room``."""
        key = alive, room, messages
        if key not in self._costs:
            table = self._bytes[0]
            running = np.min([each.transient.diagonal(1) for each in self._bytes], axis=0)
            moving = (1 + ALLOCATOR_SLACK) * (alive * table.kept + run_largest(running))
            left = np.maximum(0.0, table.fixed + moving + messages * table.message - room)
            left /= (1 + ALLOCATOR_SLACK) * alive
            seconds = _runs(self._least[0])
            for price, savings in self._savings:
                taken = np.minimum(left, run_sums(savings))
                seconds, left = seconds + price * taken, left - taken
            self._costs[key] = np.where(left > 1, np.inf, seconds)
        return self._costs[key]

    def _best(self, costs: Sequence[Array]) -> tuple[float, tuple[int, ...] | None]:
        reach = costs[0][0]  # [end]: seconds of the slowest stage of units 0 to end, at best
        choices: list[NDArray[np.int64]] = []
        for cost in costs[1:]:
            through = np.maximum(reach[:, None], cost)
            choices.append(through.argmin(axis=0))
            reach = through.min(axis=0)
        slowest = float(reach[self.count])
        if not math.isfinite(slowest):
            return math.inf, None
        starts, end = [], self.count
        for choice in reversed(choices):
            end = int(choice[end])
            starts.append(end)
        return slowest, (0, *reversed(starts))


def hull(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return which of (bytes saved, seconds more) are on the lower convex hull from (0, 0) on, those that save least first."""
    found: list[int] = []
    saved = more = 0.0
    while above := [place for place, (nbytes, _) in enumerate(points) if nbytes > saved]:
        best = min(above, key=lambda place: (_price(points[place], saved, more), -points[place][0]))
        found.append(best)
        saved, more = points[best]
    return found


def cheapest(saved: Array, more: Array, needed: float) -> NDArray[np.int64]:
    """Choose a kind for each unit, so that they save ``needed`` bytes in about the fewest seconds; where they can't, as many as they can.

    Args:
        saved, more: [kind, unit], bytes and seconds; the first kind's are 0.
    """
    steps = []
    for unit in range(saved.shape[1]):
        points = list(zip(saved[:, unit].tolist(), more[:, unit].tolist()))
        before = (0.0, 0.0)
        for order, place in enumerate(hull(points)):
            steps.append((_price(points[place], *before), unit, order, place))
            before = points[place]
    chosen = np.zeros(saved.shape[1], dtype=np.int64)
    left = needed
    for _, unit, _, place in sorted(steps):
        if left <= 0:
            break
        left += saved[chosen[unit], unit]
        able = [kind for kind in range(len(saved)) if saved[kind, unit] >= left]
        chosen[unit] = min(able, key=lambda kind: more[kind, unit]) if able else place
        left -= saved[chosen[unit], unit]
    return chosen


def _price(point: tuple[float, float], saved: float, more: float) -> float:
    return max(0.0, (point[1] - more) / (point[0] - saved))


def _runs(values: Array) -> Array:
    """Return a table [i, j] of the sum of values i up to j, infinity where j <= i."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    table = sums[None, :] - sums[:, None]
    return np.where(np.arange(len(sums))[None, :] > np.arange(len(sums))[:, None], table, np.inf)
