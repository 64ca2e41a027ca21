"""``Fitting``: the stages and the recomputation with which a candidate is fastest in its devices' memory.

    Candidate ──slowest stage as fast as possible──► fits ──► Priced
                                      └─ too large ──► units recompute, or ranks hold fewer of them, until they fit

Choices of recomputation are found by taking the cheapest savings first, which is not always the best there is: the difference to the
bounds is the search's gap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from graphpar.cost_models.estimates import Layout
from graphpar.cost_models.memory import ALLOCATOR_SLACK
from graphpar.cost_models.pipeline_units import Unit
from graphpar.cost_models.pricing import Pricing
from graphpar.passes.planning.candidates import Candidate, Priced
from graphpar.passes.planning.prices import CandidatePrices
from graphpar.passes.planning.stage_balance import UnitSavings
from graphpar.runtime.option_kinds import Recompute
from graphpar.runtime.records import packed
from graphpar.runtime.schedule_records import get_schedule

TRIES = 10
"""How often the bytes that are to be saved are corrected by those that a choice was found to miss."""
_NEARLY = 0.02
"""By which share of a device's memory other choices are tried that do not fit by the savings of single units: these don't quite add up."""
CHOICES, ROUND = 32, 8
"""How many other choices of what is recomputed are tried of a plan that is about as fast as the first, and how many of them before others
follow from the best so far."""
MOVES = 64
"""How many stages are tried beside those whose slowest is as fast as possible."""


class Fitting:
    """Prices candidates at ``prices``, fitted to memory."""

    def __init__(self, prices: CandidatePrices) -> None:
        self.prices = prices
        self._paths: dict[Unit, list[str]] = {}
        self._apart: dict[tuple[Unit, ...], bool] = {}  # whether no two of these run the same block

    def price(self, candidate: Candidate) -> Priced:
        """Price the candidate with its slowest stage as fast as possible; where that does not fit, as fast as memory allows.

        Where stages are too large, their ranks recompute, or hold fewer units.
        """
        pricing = self.prices.known(candidate)
        best = self._fitted(candidate, self.prices.starts(candidate))
        if best.fits and not any(best.choices):
            return best
        if not self.prices.chosen_in_memory(candidate):
            return best
        balancer, rooms = self.prices.balancer(candidate), self.prices.rooms(pricing)
        for _ in range(TRIES):
            starts = balancer.within(self.prices.alive_on(candidate, pricing), rooms)[1]
            if starts is None:
                break
            other = self._fitted(candidate, starts)
            best = min(best, other, key=lambda each: (max(0, each.missing), each.rank_key))
            if other.fits:
                break
            rooms = [room - other.missing for room in rooms]
        return best

    def exactly(self, priced: Priced) -> Priced:
        """Price again, with every microbatch simulated."""
        pricing = self.prices.mixed(priced.candidate, priced.choices)
        return replace(priced, estimate=pricing.estimate(priced.layout))

    def polished(self, priced: Priced) -> Priced:
        """Return ``priced``, or a faster plan that fits whose stages begin a unit earlier or later, and where a unit or two of a rank
        recompute something else; pinned stages stay."""
        return self._rechosen(self._moved(priced))

    def _rechosen(self, priced: Priced) -> Priced:
        """Return ``priced``, or a faster plan that fits with other choices of a unit or two of one rank."""
        best, tried = priced, {priced.choices}
        while any(best.choices) and len(tried) < CHOICES:
            untried = (each for each in self._other_choices(best) if each not in tried)
            others = [*itertools.islice(untried, min(ROUND, CHOICES - len(tried)))]
            if not others:
                break
            tried.update(others)
            step_s, found = best.estimate.step_time_s * (1 - 1e-9), best
            for choices in others:
                pricing = self.prices.mixed(best.candidate, choices)
                if max(self.prices.missing(pricing, best.layout)) <= 0 and pricing.step_s(best.layout) < step_s:
                    recompute = self._recompute(best.candidate, pricing, choices)
                    sharded = self.prices.chosen(best.candidate, choices)
                    each = replace(best, choices=choices, recompute=recompute, sharded=sharded)
                    each = self.exactly(each)
                    step_s, found = (each.estimate.step_time_s, each) if each.fits else (step_s, found)
            best = found
        return best

    def _other_choices(self, priced: Priced) -> list[tuple[int, ...]]:
        """Return choices that may be faster and fit: first those that fit by the savings of single units, and of these those that take the
        fewest seconds of a microbatch.

        A unit or two of one rank, or all that are alike, recompute otherwise. They take fewer seconds than ``priced``, but where stages
        that recompute nothing split their backward.
        """
        candidate, layout = priced.candidate, priced.layout
        pricing, savings, now = self.prices.known(candidate), self.prices.savings(candidate), priced.choices
        most = math.inf if get_schedule(candidate.schedule).splits_backward else 0.0
        missing = self.prices.missing(self.prices.mixed(candidate, now), layout)
        found: dict[tuple[int, ...], tuple[bool, float]] = {}
        by_unit, kinds = savings.by_unit, len(savings.more)
        for own, spare in zip(self.prices.alive_by_rank(candidate, pricing, layout), missing):
            tops = sorted(((by_unit[unit].on_top[now[unit]], unit) for unit in own), reverse=True)
            mixes = (mix for units in self._alike(savings, own) for mix in _mixes(units, kinds))
            for changed in itertools.chain(_changes(now, self._different(savings, own, now), kinds), mixes):
                more = less = 0.0
                top = next((nbytes for nbytes, unit in tops if unit not in changed), 0.0)
                for unit, kind in changed.items():
                    choices, before = by_unit[unit], now[unit]
                    more += choices.more[kind] - choices.more[before]
                    less += own[unit] * (choices.saved[before] - choices.saved[kind])
                    top = max(top, choices.on_top[kind])
                less += top - tops[0][0]
                if more < most and less + spare <= _NEARLY * self.prices.cluster.room_bytes:
                    chosen = self._agreed(
                        candidate, pricing, [changed.get(unit, kind) for unit, kind in enumerate(now)]
                    )
                    found[chosen] = less + spare > 0, more
        return sorted(found, key=lambda each: (found[each], each))

    @staticmethod
    def _alike(savings: UnitSavings, alive: Mapping[int, float]) -> list[list[int]]:
        """Return the units of a rank that recompute, in runs of those that have the same choices."""
        alike: dict[tuple[object, ...], list[int]] = {}
        for unit, number in alive.items():
            key = number, savings.more[:, unit].tobytes(), savings.saved[:, unit].tobytes()
            alike.setdefault(key, []).append(unit)
        return [units for units in alike.values() if len(units) > 2 and savings.saved[:, units[0]].any()]

    @staticmethod
    def _different(savings: UnitSavings, alive: Mapping[int, float], choices: Sequence[int]) -> list[int]:
        """Return the first and the last of the units of a rank that have the same choices and made the same one."""
        alike: dict[tuple[object, ...], list[int]] = {}
        for unit, number in alive.items():
            key = choices[unit], number, savings.more[:, unit].tobytes(), savings.saved[:, unit].tobytes()
            alike.setdefault(key, []).append(unit)
        return sorted({unit for units in alike.values() for unit in (units[0], units[-1])})

    def _moved(self, priced: Priced) -> Priced:
        """Return ``priced``, or a faster plan that fits whose stages begin a unit earlier or later."""
        candidate, count = priced.candidate, len(self.prices.known(priced.candidate).units)
        if not self.prices.chosen_in_memory(candidate):
            return priced
        best, tried = priced, {priced.layout.starts}
        while len(tried) < MOVES:
            others = [each for each in _neighbours(best.layout.starts, count) if each not in tried][
                : MOVES - len(tried)
            ]
            tried.update(others)
            faster = [
                each
                for starts in others
                if (each := self._fitted(candidate, starts)).fits
                and each.estimate.step_time_s < best.estimate.step_time_s * (1 - 1e-9)
            ]
            whole = [each for each in map(self.exactly, faster) if each.fits]
            found = min((best, *whole), key=lambda each: each.rank_key)
            if found is best:
                break
            best = found
        return best

    def _fitted(self, candidate: Candidate, starts: tuple[int, ...]) -> Priced:
        """Price stages, with as little recomputation as lets their ranks fit, or as much as there is."""
        pricing = self.prices.known(candidate)
        layout = Layout(candidate.schedule, candidate.microbatch_size, candidate.microbatches, starts)
        choices = (0,) * len(pricing.units)
        if len(self.prices.recomputed(candidate)) > 1:
            missing = self.prices.missing(pricing, layout)
            if max(missing) > 0:
                choices = self._recomputing(candidate, pricing, layout, missing)
        mixed = self.prices.mixed(candidate, choices)
        split_points = tuple(
            point for start in layout.starts[1:] if (point := pricing.units[start].split_point) is not None
        )
        sharded = self.prices.chosen(candidate, choices)
        estimate = mixed.estimate(layout, exact=False)
        return Priced(
            candidate,
            layout,
            sharded,
            split_points,
            estimate,
            choices,
            self._recompute(candidate, pricing, choices),
        )

    def _recomputing(
        self, candidate: Candidate, pricing: Pricing, layout: Layout, missing: Sequence[int]
    ) -> tuple[int, ...]:
        """Choose what each unit recomputes, so that ``missing`` bytes are saved on each rank in the fewest seconds."""
        savings, own = self.prices.savings(candidate), self.prices.alive_by_rank(candidate, pricing, layout)
        needed = [
            nbytes - (1 + ALLOCATOR_SLACK) * (on_top - savings.least_on_top(units))
            for units, nbytes, on_top in zip(own, missing, self.prices.on_top(candidate, pricing, layout))
        ]
        most = {unit: kinds[-1] for unit, kinds in enumerate(map(savings.kinds_of, range(savings.count))) if kinds}
        chosen, times = (0,) * savings.count, 1
        for _ in range(TRIES):
            by_unit: dict[int, int] = {}
            for units, nbytes in zip(own, needed):
                by_unit |= savings.cheapest(units, nbytes)
            known, chosen = chosen, self._agreed(candidate, pricing, [by_unit[unit] for unit in range(savings.count)])
            times = 2 * times if chosen == known else 1  # what is missed may be too little for another choice
            left = self.prices.missing(self.prices.mixed(candidate, chosen), layout)
            if max(left) <= 0 or all(chosen[unit] == kind for unit, kind in most.items()):
                break
            needed = [before + times * max(0, each) for before, each in zip(needed, left)]
        return chosen

    def _agreed(self, candidate: Candidate, pricing: Pricing, choices: Sequence[int]) -> tuple[int, ...]:
        """Let units that run the same block recompute as the one of them that recomputes most: a plan says it by the block's path."""
        if pricing.units not in self._apart:
            paths = [path for unit in pricing.units for path in self._recomputed_in(candidate, unit)]
            self._apart[pricing.units] = len(paths) == len(set(paths))
        if self._apart[pricing.units]:
            return tuple(choices)
        agreed = list(choices)
        most: dict[str, int] = {}
        for unit, kind in zip(pricing.units, choices):
            for path in self._recomputed_in(candidate, unit):
                most[path] = max(kind, most.get(path, 0))
        for place, unit in enumerate(pricing.units):
            agreed[place] = max((most[path] for path in self._recomputed_in(candidate, unit)), default=agreed[place])
        return tuple(agreed)

    def _recomputed_in(self, candidate: Candidate, unit: Unit) -> list[str]:
        """Return the paths of a unit's blocks that may be recomputed."""
        if unit not in self._paths:
            calls = (str(node.target) for node in unit.stage.graph.nodes if node.op == "call_module")
            self._paths[unit] = [path for path in calls if path in self.prices.recomputed(candidate)[-1]]
        return self._paths[unit]

    def _recompute(self, candidate: Candidate, pricing: Pricing, choices: Sequence[int]) -> Recompute:
        """Return what units recompute as a plan has it."""
        recomputed = self.prices.recomputed(candidate)
        kinds = [kind for kind, _ in self.prices.kinds(candidate)]
        found = {
            path: recomputed[kind][path]
            for unit, kind in zip(pricing.units, choices)
            for path in self._recomputed_in(candidate, unit)
            if path in recomputed[kind]
        }
        return next((kind for kind, each in zip(kinds, recomputed) if each == found), packed(found))


def _changes(choices: Sequence[int], units: Sequence[int], kinds: int) -> Iterator[dict[int, int]]:
    """Yield other kinds of one of ``units`` that recomputes, alone and with another one."""
    for unit in (unit for unit in units if choices[unit]):
        yield from ({unit: kind} for kind in range(kinds) if kind != choices[unit])
        for other in (other for other in units if other != unit):
            yield from ({unit: kind, other: second} for kind in range(kinds) for second in range(kinds))


def _mixes(units: Sequence[int], kinds: int) -> Iterator[dict[int, int]]:
    """Yield choices of all ``units``, which are alike: some recompute one kind, and the others another."""
    counts = sorted({1, 2, len(units) // 2, len(units) - 2, len(units) - 1, len(units)} - {0})
    for first, second in itertools.permutations(range(kinds), 2):
        yield from ({unit: first if place < count else second for place, unit in enumerate(units)} for count in counts)


def _neighbours(starts: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """Return the stages of which one begins a unit earlier or later; there are ``count`` units."""
    ends = (*starts[1:], count)
    found = []
    for place in range(1, len(starts)):
        for start in (starts[place] - 1, starts[place] + 1):
            if starts[place - 1] < start < ends[place]:
                found.append((*starts[:place], start, *starts[place + 1 :]))
    return found
