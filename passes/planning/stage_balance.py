"""``StageBalancer``: where stages begin, so that the slowest is as fast as possible; and how fast at best, where memory is short.

Where a rank's memory is short its units recompute. A unit's choices are points (bytes saved, seconds more), and a share of a choice is
allowed here: then the least seconds that save so many bytes in a run of units are found by taking the cheapest savings first. The
result is a lower bound of what whole choices take, and a good place to begin stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
        kinds: how many kinds of recomputation there are, the least first.
        pricing: of each of them.
        running: with each of them, the bytes of every run of units for microbatches of ``rows``.
    """

    def __init__(
        self, kinds: int, pricing: Callable[[int], Pricing], running: Callable[[int], RunBytes], rows: int
    ) -> None:
        self._kinds, self._pricing, self._running, self.rows = range(kinds), pricing, running, rows
        self.first = pricing(0)
        self.count = len(self.first.units)
        self._costs: dict[tuple[float, float, int], Array] = {}

    @cached_property
    def _seconds(self) -> Array:
        own = [self.first.stage_seconds(place, place + 1, self.rows) for place in range(self.count)]
        return _runs(np.array([cost.forward + cost.backward for cost in own]))

    @cached_property
    def _bytes(self) -> tuple[RunBytes, ...]:
        return tuple(map(self._running, self._kinds))

    @cached_property
    def _fixed(self) -> Array:
        return self.first.bytes.fixed_runs()

    @cached_property
    def _least(self) -> tuple[Array, Array]:
        """Lower bounds of each unit's seconds, and for each kind of those that it adds to the first kind's."""
        found = []
        for pricing in map(self._pricing, self._kinds):
            units = {id(unit.kind): unit for unit in pricing.units}
            least = {key: pricing.least_s(unit, self.rows) for key, unit in units.items()}
            found.append([least[id(unit.kind)] for unit in pricing.units])
        again = np.array([[seconds for _, seconds in kind] for kind in found])
        return np.array([own for own, _ in found[0]]) + again[0], again - again[0]

    @cached_property
    def saved(self) -> Array:
        """For each kind and unit, the bytes of a microbatch that it keeps less than with the first kind."""
        return np.array([self._bytes[0].own - each.own for each in self._bytes])

    def less_on_top(self, first: int, after: int) -> float:
        """Return the most bytes by which a run of units needs less on top of what is kept, with other kinds of recomputation."""
        return float(self._bytes[0].transient[first, after] - self._least_on_top[first, after])

    @cached_property
    def _least_on_top(self) -> Array:
        return run_largest(np.min([each.transient.diagonal(1) for each in self._bytes], axis=0))

    @property
    def more(self) -> Array:
        """For each kind and unit, the seconds of a microbatch that it takes more than with the first kind, at least."""
        return self._least[1]

    @cached_property
    def _steps(self) -> list[list[tuple[float, int, float]]]:
        """What each unit can save, the cheapest first: (seconds a byte, kind, bytes saved more than with the step before)."""
        known: dict[tuple[tuple[float, float], ...], list[tuple[float, int, float]]] = {}
        found = []
        for unit in range(self.count):
            points = tuple(zip(self.saved[:, unit].tolist(), self.more[:, unit].tolist()))
            if points not in known:
                before, known[points] = (0.0, 0.0), []
                for kind in hull(points):
                    price = max(0.0, (points[kind][1] - before[1]) / (points[kind][0] - before[0]))
                    known[points].append((price, kind, points[kind][0] - before[0]))
                    before = points[kind]
            found.append(known[points])
        return found

    def kinds_of(self, unit: int) -> list[int]:
        """Return the kinds that save bytes of a unit, the one that saves most last."""
        return [kind for _, kind, _ in self._steps[unit]]

    @cached_property
    def _savings(self) -> list[tuple[float, Array]]:
        """Seconds a byte, and how many bytes each unit can save at that price; the cheapest first."""
        by_price: dict[float, Array] = {}
        for unit, steps in enumerate(self._steps):
            for price, _, nbytes in steps:
                by_price.setdefault(price, np.zeros(self.count))[unit] += nbytes
        return sorted(by_price.items(), key=lambda entry: entry[0])

    def _ordered(self, alive: Mapping[int, float]) -> list[tuple[float, int, int, int]]:
        """Return the steps of units, the cheapest first: (seconds a byte of all microbatches in flight, unit, place, kind)."""
        return sorted(
            (price / alive[unit], unit, place, kind)
            for unit in alive
            for place, (price, kind, _) in enumerate(self._steps[unit])
        )

    def cheapest(self, alive: Mapping[int, float], needed: float) -> dict[int, int]:
        """Choose a kind for each unit, so that they save ``needed`` bytes in about the fewest seconds; where they can't, all they can.

        Args:
            alive: of each unit of a rank, the microbatches in flight.
        """
        chosen, left = dict.fromkeys(alive, 0), needed
        for _, unit, _, kind in self._ordered(alive):
            if left <= 0:
                break
            left += alive[unit] * self.saved[chosen[unit], unit]
            able = [each for each, nbytes in enumerate(self.saved[:, unit]) if alive[unit] * nbytes >= left]
            chosen[unit] = min(able, key=lambda each: self.more[each, unit]) if able else kind
            left -= alive[unit] * self.saved[chosen[unit], unit]
        return chosen

    def least_s(self, alive: Mapping[int, float], needed: float) -> float:
        """Return a lower bound of the seconds of a microbatch in units that save ``needed`` bytes; ``inf`` where they can't.

        Args:
            alive: as :meth:`cheapest` takes it.
        """
        seconds, left = float(sum(self._least[0][unit] for unit in alive)), needed
        for price, unit, place, _ in self._ordered(alive) if needed > 0 else ():
            if left <= 0:
                break
            taken = min(left, alive[unit] * self._steps[unit][place][2])
            seconds, left = seconds + price * taken, left - taken
        return math.inf if left > 1 else seconds

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

    def _within(self, alive: float, room: float, messages: int) -> Array:
        """Return the seconds of every run of units that fits in ``room``."""
        key = alive, room, messages
        if key not in self._costs:
            table = self._bytes[0]
            moving = (1 + ALLOCATOR_SLACK) * (alive * table.kept + self._least_on_top)
            left = np.maximum(0.0, self._fixed + moving + messages * table.message - room)
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
        prices = {place: max(0.0, (points[place][1] - more) / (points[place][0] - saved)) for place in above}
        best = min(above, key=lambda place: (prices[place], -points[place][0]))
        found.append(best)
        saved, more = points[best]
    return found


def _runs(values: Array) -> Array:
    """Return a table [i, j] of the sum of values i up to j, infinity where j <= i."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    table = sums[None, :] - sums[:, None]
    return np.where(np.arange(len(sums))[None, :] > np.arange(len(sums))[:, None], table, np.inf)
