"""Where stages begin, so that the slowest is as fast as possible; and how fast at best, where memory is short.

    StagePrices ──EqualStages──► starts
    UnitSavings, bytes ──StageBalancer──► starts under each rank's memory

Where a rank's memory is short its units recompute. A unit's choices are points (bytes saved, seconds more), and a share of a choice is
allowed here: then the least seconds that save so many bytes in a run of units are found by taking the cheapest savings first. The
result is a lower bound of what whole choices take, and a good place to begin stages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from graphpar.cost_models.memory import ALLOCATOR_SLACK
from graphpar.cost_models.pricing import Pricing
from graphpar.cost_models.run_bytes import RunBytes, run_largest, run_sums
from graphpar.cost_models.stage_prices import StagePrices

Array = NDArray[np.float64]


class _Choices(NamedTuple):
    """The columns of :class:`UnitSavings` of one unit, as lists, which are read faster than arrays."""

    saved: list[float]
    more: list[float]
    on_top: list[float]


class UnitSavings:
    """What each unit can recompute, how many bytes that saves, and in how many seconds.

    Args:
        kinds: how many kinds of recomputation there are, the least first.
        pricing: of each of them.
        running: with each of them, the bytes of every run of units for microbatches of ``rows``.
    """

    def __init__(
        self, kinds: int, pricing: Callable[[int], Pricing], running: Callable[[int], RunBytes], rows: int
    ) -> None:
        self._kinds, self._pricing, self._running, self.rows = range(kinds), pricing, running, rows
        self.count = len(pricing(0).units)

    @cached_property
    def _bytes(self) -> tuple[RunBytes, ...]:
        return tuple(map(self._running, self._kinds))

    @property
    def first(self) -> RunBytes:
        """The bytes of every run of units with the first kind."""
        return self._bytes[0]

    @cached_property
    def least_runs(self) -> Array:
        """A table [first, after] of lower bounds of the seconds of every run of units with the first kind."""
        return _range_sums(self._least[0])

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

    @cached_property
    def by_unit(self) -> list[_Choices]:
        """For each unit the bytes saved, the seconds more and the bytes on top of what is kept of each kind."""
        return list(map(_Choices, self.saved.T.tolist(), self.more.T.tolist(), self._on_top.T.tolist()))

    def on_top(self, first: int, after: int) -> float:
        """Return the bytes that a run of units needs on top of what is kept, with the first kind."""
        return float(self._bytes[0].transient[first, after])

    def least_on_top(self, units: Iterable[int]) -> float:
        """Return the bytes that units need on top of what is kept, with the kinds that need the least."""
        return max(map(self._least_on_top.__getitem__, units))

    @cached_property
    def _on_top(self) -> Array:
        """For each kind and unit, the bytes that it needs on top of what is kept."""
        return np.array([each.transient.diagonal(1) for each in self._bytes])

    @cached_property
    def _least_on_top(self) -> list[float]:
        """For each unit, the bytes that the kind that needs the least on top of what is kept needs."""
        found: list[float] = self._on_top.min(axis=0).tolist()
        return found

    @property
    def more(self) -> Array:
        """For each kind and unit, the seconds of a microbatch that it takes more than with the first kind, at least."""
        return self._least[1]

    @cached_property
    def caps(self) -> list[_Cap]:
        """The savings among kinds that need at most so many bytes on top of what is kept, from the fewest bytes up."""
        varies = self._on_top.max(axis=0) > self._on_top.min(axis=0)
        limits = np.unique(self._on_top[:, varies].max(axis=1)) if varies.any() else np.zeros(1)
        found = []
        for before, limit in itertools.pairwise([0.0, *limits]):
            able = (self._on_top <= limit) | ~varies
            lowest = run_largest(self._on_top.min(axis=0))
            charged = np.where(run_largest((~able.any(axis=0)).astype(float)) > 0, np.inf, np.maximum(before, lowest))
            found.append(_Cap(before, charged, self._steps(able), able.any(axis=0)))
        return found

    def _steps(self, able: NDArray[np.bool_]) -> list[list[_Step]]:
        """Return the steps of each unit among the kinds that are ``able``, [kind, unit]."""
        different, places = np.unique(np.concatenate([able, self.saved, self.more]), axis=1, return_inverse=True)
        hulls = []
        for column in different.T:
            able_of, saved, more = column.reshape(3, -1).tolist()
            hulls.append(hull([(kind, saved[kind], more[kind]) for kind, can in enumerate(able_of) if can]))
        return [hulls[place] for place in places.ravel()]

    def kinds_of(self, unit: int) -> list[int]:
        """Return the kinds that save bytes of a unit, the one that saves most last."""
        return [step.kind for step in self.caps[-1].steps[unit]]

    def cheapest(self, alive: Mapping[int, float], needed: float) -> dict[int, int]:
        """Choose a kind for each unit, so that they save ``needed`` bytes in about the fewest seconds; where they can't, all they can.

        Args:
            alive: of each unit of a rank, the microbatches in flight.
        """
        chosen, left = dict.fromkeys(alive, 0), needed
        for _, unit, _, kind, _ in self.caps[-1].ordered(alive):
            if left <= 0:
                break
            saved, more, _ = self.by_unit[unit]
            left += alive[unit] * saved[chosen[unit]]
            able = [each for each, nbytes in enumerate(saved) if alive[unit] * nbytes >= left]
            chosen[unit] = min(able, key=more.__getitem__) if able else kind
            left -= alive[unit] * saved[chosen[unit]]
        return chosen

    def least_in_all_s(self, missing: float) -> float:
        """Return a lower bound of the seconds of a microbatch in all units where it keeps ``missing`` bytes too many; ``inf`` where they
        can't save so many."""
        saved, seconds = self._savings
        if missing > saved[-1] * (1 + 1e-9) + 64:
            return math.inf
        return float(self._least[0].sum() + np.interp(missing, saved, seconds))

    @cached_property
    def _savings(self) -> tuple[Array, Array]:
        """Bytes of a microbatch that all units together can save, and the seconds that takes, the cheapest savings first."""
        of_units = self._steps(np.ones(self.saved.shape, dtype=np.bool_))
        steps = sorted((step.price, step.nbytes) for unit in of_units for step in unit)
        prices, sizes = np.array([(0.0, 0.0), *steps]).T
        return sizes.cumsum(), (prices * sizes).cumsum()

    def least_s(self, alive: Mapping[int, float], missing: float, on_top: float) -> float:
        """Return a lower bound of the seconds of a microbatch in units of a rank that has ``missing`` bytes too few; ``inf`` where they
        can't save so many.

        Args:
            alive: as :meth:`cheapest` takes it.
            on_top: the bytes that the rank needs on top of what is kept, with the first kind.
        """
        own, lowest = float(sum(self._least[0][unit] for unit in alive)), self.least_on_top(alive)
        found = math.inf
        for cap in self.caps:
            left = missing - (1 + ALLOCATOR_SLACK) * (on_top - max(lowest, cap.above))
            if cap.all_able or cap.able[list(alive)].all():
                found = min(found, own + (cap.least_s(alive, left) if left > 0 else 0.0))
        return found


class EqualStages:
    """Stages as equal as units allow, of which ``prices`` has the seconds."""

    def __init__(self, prices: StagePrices) -> None:
        own = [prices.stage(place, place + 1) for place in range(prices.count)]
        seconds = np.array([cost.forward + cost.backward for cost in own])
        least = float(seconds.sum()) * 2.0**-40  # whole multiples add up exactly, so equal stages are equal
        self.seconds = np.asfortranarray(
            _range_sums(np.round(seconds / least)) * least if least else _range_sums(seconds)
        )
        self._reaches: list[_Reach] = []

    def balanced(self, stages: int) -> tuple[int, ...] | None:
        """Return the first unit of each stage; ties go to the earliest starts."""
        while len(self._reaches) < stages:
            self._reaches.append(_further(self._reaches[-1] if self._reaches else None, self.seconds))
        return _best(self._reaches[:stages])[1]


def balanced(tables: Sequence[EqualStages]) -> tuple[int, ...] | None:
    """Return the first unit of each stage, of which ``tables`` has one for each; where they differ, so do stages' devices."""
    if len(set(tables)) == 1:
        return tables[0].balanced(len(tables))
    reach: _Reach | None = None
    reaches = [reach := _further(reach, each.seconds) for each in tables]
    return _best(reaches)[1]


class StageBalancer:
    """Dynamic programming over units under memory. Tables hold the seconds and bytes of units i up to j; ``inf`` where j <= i.

    Args:
        fixed: gives the bytes of every run of units that do not depend on the microbatch.
        savings: of the units, on the devices of each stage.
    """

    def __init__(self, fixed: Callable[[], Array], savings: Sequence[UnitSavings]) -> None:
        self._fixed_runs, self._savings = fixed, savings
        self._known: dict[tuple[tuple[float, ...], tuple[float, ...]], tuple[float, tuple[int, ...] | None]] = {}

    @cached_property
    def _fixed(self) -> Array:
        return self._fixed_runs()

    def within(self, alive: Sequence[float], rooms: Sequence[float]) -> tuple[float, tuple[int, ...] | None]:
        """Return a lower bound of the slowest stage's seconds, and the first unit of each stage there; ``inf`` where none fit.

        Args:
            alive: microbatches in flight on each stage.
            rooms: bytes that each stage may take.
        """
        key = tuple(alive), tuple(rooms)
        if key not in self._known:
            costs: dict[tuple[float, float, UnitSavings], Array] = {}  # not kept: each is a table of every run of units
            reaches: list[_Reach] = []
            for each in zip(alive, rooms, self._savings):
                if each not in costs:
                    costs[each] = self._within(*each)
                reaches.append(_further(reaches[-1] if reaches else None, costs[each]))
            self._known[key] = _best(reaches)
        return self._known[key]

    def _within(self, alive: float, room: float, savings: UnitSavings) -> Array:
        """Return the seconds of every run of units that fits in ``room``."""
        table = savings.first
        best = np.full(table.kept.shape, np.inf)
        fixed = self._fixed + (1 + ALLOCATOR_SLACK) * alive * table.kept + table.message - room
        for cap in savings.caps:
            left = np.maximum(0.0, fixed + (1 + ALLOCATOR_SLACK) * cap.on_top) / ((1 + ALLOCATOR_SLACK) * alive)
            seconds = savings.least_runs
            for price, sizes in cap.savings:
                taken = np.minimum(left, sizes)
                seconds, left = seconds + price * taken, left - taken
            best = np.minimum(best, np.where(left > 1, np.inf, seconds))
        return np.asfortranarray(best)


class _Reach(NamedTuple):
    """For some stages, of units 0 up to each end: the seconds of the slowest stage at best, and where the last one begins then."""

    seconds: Array
    begins: NDArray[np.int64]


def _further(before: _Reach | None, cost: Array) -> _Reach:
    """Add a stage, of which ``cost`` has the seconds of every run of units; ties go to the earliest starts."""
    if before is None:
        return _Reach(cost[0], np.zeros(len(cost), dtype=np.int64))
    through = np.maximum(before.seconds, cost.T)  # [end, begin]
    begins = through.argmin(axis=1)
    return _Reach(through[np.arange(len(through)), begins], begins)


def _best(reaches: Sequence[_Reach]) -> tuple[float, tuple[int, ...] | None]:
    """Return the seconds of the slowest stage of all units, and the first unit of each stage."""
    slowest, starts = float(reaches[-1].seconds[-1]), [len(reaches[-1].seconds) - 1]
    if not math.isfinite(slowest):
        return math.inf, None
    for reach in reversed(reaches):
        starts.append(int(reach.begins[starts[-1]]))
    return slowest, tuple(reversed(starts[1:]))


class _Step(NamedTuple):
    """A kind of a unit, and by how many bytes and seconds it is above the step before: seconds a byte, kind, bytes."""

    price: float
    kind: int
    nbytes: float


class _Cap:
    """What units can save with kinds that need at most so many bytes on top of what is kept.

    Args:
        above: they need more than that, or other kinds do as well.
        on_top: for every run of units, the bytes that are needed at least.
        steps: of each unit, the cheapest first.
        able: whether each unit has such a kind.
    """

    def __init__(self, above: float, on_top: Array, steps: list[list[_Step]], able: NDArray[np.bool_]) -> None:
        self.above, self.on_top, self.steps, self.able = above, on_top, steps, able
        self._curves: dict[tuple[tuple[int, ...], tuple[float, ...]], tuple[Array, Array]] = {}

    @cached_property
    def all_able(self) -> bool:
        """Whether every unit has such a kind."""
        return bool(self.able.all())

    @cached_property
    def savings(self) -> list[tuple[float, Array]]:
        """Seconds a byte, and how many bytes every run of units can save at that price; the cheapest first."""
        by_price: dict[float, Array] = {}
        for unit, steps in enumerate(self.steps):
            for step in steps:
                by_price.setdefault(step.price, np.zeros(len(self.steps)))[unit] += step.nbytes
        return [(price, run_sums(savings)) for price, savings in sorted(by_price.items(), key=lambda entry: entry[0])]

    @cached_property
    def _padded(self) -> tuple[Array, Array]:
        """Seconds a byte and bytes of each unit's steps, [unit, step]; steps that there are not have no bytes."""
        width = max(1, *map(len, self.steps))
        prices, sizes = np.zeros((len(self.steps), width)), np.zeros((len(self.steps), width))
        for unit, steps in enumerate(self.steps):
            for place, step in enumerate(steps):
                prices[unit, place], sizes[unit, place] = step.price, step.nbytes
        return prices, sizes

    def least_s(self, alive: Mapping[int, float], nbytes: float) -> float:
        """Return the least seconds that save ``nbytes``, where shares of a step are allowed; ``inf`` where there is not so much."""
        saved, seconds = self._curve(tuple(alive), tuple(alive.values()))
        return math.inf if nbytes > saved[-1] + 1 else float(np.interp(nbytes, saved, seconds))

    def _curve(self, units: tuple[int, ...], flying: tuple[float, ...]) -> tuple[Array, Array]:
        """Return the bytes that the cheapest steps of units save together, and their seconds, from no step on."""
        if (units, flying) not in self._curves:
            prices, sizes = (each[list(units)] for each in self._padded)
            number = np.array(flying)[:, None]
            prices, sizes = (prices / number).ravel(), (sizes * number).ravel()
            order = prices.argsort(kind="stable")
            sums = (np.append(0.0, each[order].cumsum()) for each in (sizes, prices * sizes))
            self._curves[units, flying] = next(sums), next(sums)
        return self._curves[units, flying]

    def ordered(self, alive: Mapping[int, float]) -> list[tuple[float, int, int, int, float]]:
        """Return the steps of units, the cheapest first: (seconds a byte of all microbatches in flight, unit, place, kind, bytes)."""
        return sorted(
            (step.price / alive[unit], unit, place, step.kind, step.nbytes)
            for unit in alive
            for place, step in enumerate(self.steps[unit])
        )


def hull(points: Sequence[tuple[int, float, float]]) -> list[_Step]:
    """Return the lower convex hull of (kind, bytes saved, seconds more) from (0, 0) on, those that save least first."""
    found: list[_Step] = []
    saved = more = 0.0
    while above := [point for point in points if point[1] > saved]:
        prices = {kind: max(0.0, (seconds - more) / (nbytes - saved)) for kind, nbytes, seconds in above}
        kind, nbytes, seconds = min(above, key=lambda point: (prices[point[0]], -point[1]))
        found.append(_Step(prices[kind], kind, nbytes - saved))
        saved, more = nbytes, seconds
    return found


def _range_sums(values: Array) -> Array:
    """Return a table [i, j] of the sum of values i up to j, infinity where j <= i."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    table = sums[None, :] - sums[:, None]
    return np.where(np.arange(len(sums))[None, :] > np.arange(len(sums))[:, None], table, np.inf)
