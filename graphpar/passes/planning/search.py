"""``Planner``: of all candidates for a program on a cluster, the fastest that fits.

    Space ──StepBounds──► a heap, the most promising first ──higher bounds──► Fitting ──► the fastest that fits, why not the others
                               └────────── CandidatePrices ────────────────────┘

A candidate is priced when no other has a lower bound, until none is below the best time so far, so what is left can't be faster.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from graphpar.cost_models.kept_plans import KeptPlan, KeptPlans
from graphpar.ir.program import Program
from graphpar.passes.kernel_dropout import with_dropout
from graphpar.passes.normalize.coupled import is_coupled
from graphpar.passes.planning.bounds import StepBounds
from graphpar.passes.planning.candidates import (
    Bounded,
    Candidate,
    Point,
    Priced,
    SearchResult,
    Tried,
    surest_first,
)
from graphpar.passes.planning.constraints import PlanConstraints
from graphpar.passes.planning.fitting import Fitting
from graphpar.passes.planning.prices import CandidatePrices
from graphpar.passes.planning.space import Space
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.option_kinds import GENERATE, SHOWN, TRAIN
from graphpar.text import listed, plural, seconds_text

NEAR = 1.03
"""Up to how many times the fastest step a plan takes whose stages are looked at again."""
_DOUBTFUL = -1
"""The level of a candidate that has not been sharded; at others, so many of the higher bounds are known."""
_AT_LEAST = 8
"""So many of the most promising plans are priced also where time is over: that takes little beside placements."""
KEPT = 16
"""How many plans are kept with what their prices need."""
SHOWN_EVERY_S = 0.2
"""How often a search says what it is at."""


Entry = tuple[float, int, int, int]
"""A bound, the order of candidates that have the same, the number of one in its space, and its level."""


@dataclass
class Explored:
    """What a search has found so far, and what it has yet to try. Candidates go by their numbers in the space.

    Attributes:
        bounds: the first bound of each candidate that is tried; doubtful ones have one that needs no placements.
        heap: what is left to try, the most promising first.
        later: doubtful candidates that are left for when nothing else fits, as time is over.
        best: the fastest that fits, of each mesh.
        fastest: of all of these.
        hopeless: candidates that can't fit.
        slower: those that a bound of their time ruled out, with that bound.
        lower: no candidate takes fewer seconds a step.
        exact: the best of each mesh with every microbatch simulated, once the search has ended.
        points: those that were priced.
        open: how many were not, for want of time.
        able: candidates that can run, those with a doubtful tp only once they are ``expanded``: tried after all, since no bound was above
            the best.
        impossible: how many of those that were looked at can't run.
        shown_at: when it was last told what the search is at.
        times: the seconds of the best of each mesh, ascending.
        known: higher bounds, by candidate and level; those at other levels of ZeRO that cost the same are not among them.
        alike: plans that were priced, for candidates that cost the same and come later.
    """

    bounds: dict[int, float]
    able: list[int]
    impossible: int
    heap: list[Entry]
    later: list[Entry] = field(default_factory=list)
    best: dict[Mesh, Priced] = field(default_factory=dict)
    fastest: Priced | None = None
    misfits: list[Priced] = field(default_factory=list)
    hopeless: list[Candidate] = field(default_factory=list)
    slower: list[tuple[float, int]] = field(default_factory=list)
    lower: float = math.inf
    exact: list[Priced] = field(default_factory=list)
    points: dict[Candidate, Point] = field(default_factory=dict)
    open: int = 0
    expanded: list[int] = field(default_factory=list)
    shown_at: float = -math.inf
    times: list[float] = field(default_factory=list)
    known: dict[tuple[Candidate, int], float] = field(default_factory=dict)
    alike: dict[Candidate, Priced] = field(default_factory=dict)

    def fits(self, priced: Priced) -> None:
        """Take a plan that fits, where it is the fastest of its mesh."""
        known = self.best.get(priced.candidate.mesh)
        if known is None or priced.rank_key < known.rank_key:
            self.best[priced.candidate.mesh] = priced
            self.times = sorted(each.estimate.step_time_s for each in self.best.values())
            if self.fastest is None or priced.rank_key < self.fastest.rank_key:
                self.fastest = priced

    def noted(self, priced: Priced) -> Priced:
        """Keep a priced candidate in short; of the same one the last price counts."""
        self.points[priced.candidate] = Point.of(priced)
        return priced

    def text(self, candidates: int) -> str:
        """Say how far the search is, and the best plan so far."""
        text = f"planning: {len(self.points)} priced of {plural(candidates, 'plan')}"
        if self.fastest is None:
            return text
        return f"{text}, best so far {seconds_text(self.fastest.estimate.step_time_s)} a step ({self.fastest.candidate.mesh})"


class Planner:
    """Searches the plans of ``program`` on ``cluster``.

    Args:
        pins: what is decided already, of axes the degrees in ``pins.mesh``; and the cluster.
        like: a planner of the same program, whose sharded programs are used on.
        show: is called with what the search is at.
    """

    def __init__(
        self,
        program: Program,
        pins: PlanConstraints,
        like: Planner | None = None,
        show: Callable[[str], None] | None = None,
    ) -> None:
        self.program = with_dropout(program, pins.dropout or program.dropout)
        self.shown, self.limit_s = SHOWN if pins.top is None else pins.top, pins.time_limit
        self._settled = max(self.shown, SHOWN)  # so that the plan does not depend on how many are shown
        self.show = show or (lambda text: None)
        self.space = Space(self.program, pins)
        self.cluster = self.space.cluster
        self.prices: CandidatePrices = CandidatePrices(self.space, None if like is None else like.prices, self.show)
        self.bounds, self.fitting = StepBounds(self.prices), Fitting(self.prices)
        self._useless: frozenset[int] = frozenset()
        self._unsolved: frozenset[int] = frozenset()
        self._began = time.monotonic()

    @property
    def _over(self) -> bool:
        """Whether the time of the search is over."""
        return self.limit_s is not None and time.monotonic() - self._began > self.limit_s

    def bounded(self, *, all_degrees: bool = False) -> tuple[list[Candidate], int]:
        """Return candidates with their first bounds, the most promising first, and how many are impossible.

        Unless ``all_degrees``, those with a tp degree beyond the first that makes microbatches no faster are not among them; see
        :meth:`_doubtful`. (Such a degree may still be needed for memory.) Nor are those with a degree for which there is no time.
        """
        bounds, impossible = self._bounds(all_degrees)
        every, order = self.space.all, self.space.order
        numbers = sorted(bounds, key=lambda number: (bounds[number], order[number]))
        return [replace(every[number], bound=bounds[number]) for number in numbers], impossible

    def _bounds(self, all_degrees: bool) -> tuple[dict[int, float], int]:
        """Return the first bounds of :meth:`bounded` by the numbers of candidates, and how many are impossible."""
        found: dict[int, float] = {}
        impossible = 0
        self._useless = self._unsolved = frozenset()
        if not all_degrees:
            self._useless = self._with_degrees(self._useless_degrees())
            if self._over:
                self._unsolved = self._with_degrees(self._unsolved_degrees()) - self._useless
        left_out = self._useless | self._unsolved
        for number, candidate in enumerate(self.space.all):
            if number not in left_out:
                bound = self._bound(candidate)
                if bound is None:
                    impossible += 1
                else:
                    found[number] = bound
        return found, impossible

    def _with_degrees(self, degrees: Mapping[tuple[int, ...], Collection[int]]) -> frozenset[int]:
        """Return the candidates with these tp degrees, by :attr:`Candidate.compute`."""
        every = enumerate(self.space.all)
        return frozenset(number for number, each in every if each.mesh.tp in degrees.get(each.compute, ()))

    def _bound(self, candidate: Candidate) -> float | None:
        """Return the candidate's first bound; None where it is impossible."""
        pricing = self.prices.pricing(candidate)
        if pricing is None or len(pricing.units) < candidate.mesh.pp * candidate.stages_per_rank:
            return None
        return self.bounds.of(candidate, pricing)

    def _doubtful(self) -> dict[int, float]:
        """Return the candidates whose degree makes microbatches no faster, as far as a smaller one shows, with a bound that needs no
        placements of theirs: they divide a microbatch's seconds at the largest smaller degree at best."""
        degrees: dict[tuple[int, ...], set[int]] = {}
        left_out = self._useless | self._unsolved
        for number, each in enumerate(self.space.all):
            if number not in left_out:
                degrees.setdefault(each.compute, set()).add(each.mesh.tp)
        found = {}
        for number in left_out:
            each = self.space.all[number]
            known = degrees[each.compute]
            smaller = max((degree for degree in known if each.mesh.tp % degree == 0), default=min(known))
            found[number] = self.bounds.of_smaller(each, smaller)
        return found

    def _useless_degrees(self) -> dict[tuple[int, ...], set[int]]:
        """Return the tp degrees beyond the first that is no faster than smaller ones, for small and large microbatches, by
        :attr:`Candidate.compute`."""
        found: dict[tuple[int, ...], set[int]] = {}
        sizes = {candidate.microbatch_size for candidate in self.space.all}
        for compute, ways in self._by_degree().items():
            degrees, best = sorted(ways), [math.inf, math.inf]
            for place, degree in enumerate(degrees):
                if place and self._over:
                    break
                seconds = [
                    min(self._microbatch_s(replace(way, microbatch_size=size)) for way in ways[degree].values())
                    for size in (min(sizes), max(sizes))
                ]
                if place and all(now >= before for now, before in zip(seconds, best)):
                    found[compute] = set(degrees[place + 1 :])
                    break
                best = [min(now, before) for now, before in zip(seconds, best)]
        return found

    def _microbatch_s(self, candidate: Candidate) -> float:
        """Return the seconds of a microbatch through all units, forward and backward; infinity where a candidate is impossible."""
        if (pricing := self.prices.pricing(candidate)) is None:
            return math.inf
        whole = pricing.stage_seconds(0, len(pricing.units), candidate.microbatch_size)
        return whole.forward + whole.backward

    def _unsolved_degrees(self) -> dict[tuple[int, ...], set[int]]:
        """Return the tp degrees whose placements have not been solved, but the smallest, by :attr:`Candidate.compute`."""
        return {
            compute: {tp for tp, each in ways.items() if not self.prices.is_solved(next(iter(each.values())))}
            - {min(ways)}
            for compute, ways in self._by_degree().items()
        }

    def _by_degree(self) -> dict[tuple[int, ...], dict[int, dict[bool, Candidate]]]:
        """Return the first candidate with each tp degree, and with collectives of tp beside products or not, by
        :attr:`Candidate.compute`."""
        found: dict[tuple[int, ...], dict[int, dict[bool, Candidate]]] = {}
        for each in self.space.all:
            found.setdefault(each.compute, {}).setdefault(each.mesh.tp, {}).setdefault(each.overlap_tp, each)
        return found

    def search(self, prune: bool = True, keep: Callable[[Candidate], bool] = lambda candidate: True) -> SearchResult:
        """Return the fastest candidate that fits. Without ``prune`` all are priced, with the same result.

        Where nothing fits, the search is repeated with all degrees, and with sequences in parts where whole ones do not fit.

        Args:
            keep: says which candidates are tried.
        """
        found = self._begun(keep)
        self._explore(found, prune)
        if not found.best and self.space.all and self.cluster.size > 1:
            self.space.divide_any_sequence()
            found = self._begun(keep, all_degrees=True)
            self._explore(found, prune)
        return self._result(found)

    def _begun(self, keep: Callable[[Candidate], bool], *, all_degrees: bool = False) -> Explored:
        """Return a search that has tried nothing yet; doubtful candidates are sharded only if they may be faster than the best, and when
        time is over only if nothing else fits."""
        self._began = time.monotonic()
        bounds, impossible = self._bounds(all_degrees)
        doubtful, order = self._doubtful(), self.space.order
        heap: list[Entry] = [(bound, order[number], number, 0) for number, bound in bounds.items()]
        heap += [(bound, order[number], number, _DOUBTFUL) for number, bound in doubtful.items()]
        heap = [entry for entry in heap if keep(self.space.all[entry[2]])]
        heapq.heapify(heap)
        return Explored(bounds | doubtful, list(bounds), impossible, heap)

    def any_that_fits(self, *, largest: bool = False, tries: int = 40) -> Priced | None:
        """Return a candidate that fits, trying those that need the least memory first; None if the first ``tries`` don't.

        ``largest``: try the largest microbatches first instead.
        """
        room = self.cluster.room_bytes
        needs = [(self.bounds.least_bytes(candidate), candidate) for candidate in self.bounded(all_degrees=True)[0]]
        promising = [
            (-candidate.microbatch_size if largest else 0, least, candidate.key, candidate)
            for least, candidate in needs
            if least <= room
        ]
        for *_, candidate in sorted(promising, key=lambda entry: entry[:3])[:tries]:
            priced = self.fitting.price(candidate)
            if priced.fits:
                return priced
        return None

    def _result(self, found: Explored) -> SearchResult:
        """Return the result of a search that has ended."""
        self._note_open(found)
        every = self.space.all
        self._useless -= set(found.expanded)
        self._unsolved -= set(found.expanded)
        ranked, hopeless = surest_first(self._ranked(found)), found.hopeless
        # Simulating few microbatches underestimates some.
        misfits = found.misfits + [each for each in found.exact if not each.fits]
        if not ranked:
            misfits += [
                found.noted(self.fitting.price(candidate))
                for candidate in sorted(hopeless, key=self.bounds.least_bytes)[: 4 * SHOWN]
            ]
        nearest = sorted(misfits, key=lambda each: (each.missing, each.rank_key))
        faster = self._faster(ranked[0], found, misfits) if ranked else ()
        able = [every[number] for number in found.able]
        return SearchResult(
            best=ranked[0] if ranked else None,
            alternatives=tuple(ranked[1 : self.shown + 1] if ranked else nearest[: max(1, self.shown)]),
            considered=len(every),
            priced=len(found.points),
            infeasible=found.impossible + len(misfits) + len(hopeless),
            refused=tuple(self.space.refused),
            misfits=faster,
            lower_bound_s=found.lower,
            left_out=self._left_out(able, found.open),
            points=tuple(sorted(found.points.values(), key=lambda each: (each.step_time_s, *each.candidate.key))),
            bounded=self._ruled_out(found),
            tried=Tried.of(every, able, hopeless, found.points, self._useless, self._unsolved, found.open),
            kept=self._kept([*ranked[: KEPT - len(faster)], *faster]) if ranked else None,
        )

    def _ruled_out(self, found: Explored) -> tuple[Bounded, ...]:
        """Return of each mesh the candidate with the lowest bound of its time among those that were not priced, as a bound ruled them
        out; of those that can't fit only where the mesh has no other."""
        every, first = self.space.all, dict[Mesh, Bounded]()
        slower = sorted((seconds, self.space.order[number], number) for seconds, number in found.slower)
        hopeless = sorted(found.hopeless, key=lambda each: each.bound)
        for candidate, seconds, fits in itertools.chain(
            ((every[number], seconds, True) for seconds, _, number in slower),
            ((each, each.bound, False) for each in hopeless),
        ):
            if candidate.mesh not in first and candidate not in found.points:
                first[candidate.mesh] = Bounded(candidate, seconds, fits)
        return tuple(sorted(first.values(), key=lambda each: (each.bound_s, *each.candidate.key)))

    def _kept(self, plans: Sequence[Priced]) -> KeptPlans | None:
        """Return these plans, the chosen one first, with what their prices need."""
        if self.program.mode == GENERATE or any(each.layout.order is not None for each in plans):
            return None
        kept = []
        for each in plans:
            pricing = self.prices.mixed(each.candidate, each.choices)
            others = self.prices.measured(each.candidate)
            run = replace(pricing.execution, zero=each.candidate.zero)
            kept.append(KeptPlan(each.candidate.mesh, each.layout, run, each.recompute, pricing.units, others))
        return KeptPlans(
            self.cluster, self.space.batch, self.prices.dtype, self.program.mode == TRAIN, symbolic=self.program.symbolic,
            splits=self.space.splits, coupled=is_coupled(self.program), plans=tuple(kept),
        )  # fmt: skip

    def _ranked(self, found: Explored) -> list[Priced]:
        """Return the plans of a search so far that fit when every microbatch is simulated, the fastest first, with their stages moved."""
        found.exact = [found.noted(self.fitting.exactly(each)) for each in found.best.values()]
        whole = sorted(found.exact, key=lambda each: each.rank_key)
        return self._polished([each for each in whole if each.fits], found)

    def _explore(self, found: Explored, prune: bool = True) -> None:
        """Price candidates in the order of their bounds, until what is left can't be shown, or time is over."""
        while self._step(found, prune):
            pass

    def _step(self, found: Explored, prune: bool = True) -> bool:
        """Try the most promising candidate that is left, a bound further; return whether that was not the end."""
        bounds, heap = self.bounds, found.heap
        higher = bounds.in_all_memory, bounds.of_stages, bounds.in_memory, bounds.in_order
        if not heap:
            if not found.later or found.best:
                return False
            self._expand(heapq.heappop(found.later)[2], found)
            return True
        bound, order, number, level = heap[0]
        now = time.monotonic()
        if self._over and found.best and len(found.points) >= _AT_LEAST:
            return False
        heapq.heappop(heap)
        if self._over and level == _DOUBTFUL:
            heapq.heappush(found.later, (bound, order, number, level))
            return True
        if now - found.shown_at > SHOWN_EVERY_S:
            self.show(found.text(len(found.able)))
            found.shown_at = now
        if prune and found.times[self._settled :] and bound > found.times[self._settled]:
            found.slower += [(bound, number), *((bound, number) for bound, _, number, _ in heap)]
            heap.clear()
            return False
        if level == _DOUBTFUL:
            if not found.times or bound < found.times[0]:
                self._expand(number, found)
            else:
                found.slower.append((bound, number))
            return True
        candidate = replace(self.space.all[number], bound=found.bounds[number])
        known = found.best.get(candidate.mesh)
        if prune and known is not None and bound > known.estimate.step_time_s:
            found.slower.append((bound, number))
            return True
        like = replace(candidate, zero=self.prices.level(candidate))
        if level < len(higher):
            if (like, level) not in found.known:
                found.known[like, level] = higher[level](like)
            bound = max(bound, found.known[like, level])
            if math.isfinite(bound) or not prune:
                heapq.heappush(heap, (bound, order, number, level + 1))
            else:
                found.hopeless.append(candidate)
            return True
        alike = found.alike.pop(like, None) or self.fitting.price(like)
        if candidate.zero == 2:
            found.alike[like] = alike
        priced = found.noted(replace(alike, candidate=candidate))
        exact = priced.fits and not any(priced.choices)
        found.lower = min(found.lower, priced.estimate.step_time_s if exact else bound)
        if priced.fits:
            found.fits(priced)
        else:
            found.misfits.append(priced)
        return True

    def _note_open(self, found: Explored) -> None:
        """Note those for which there was no time, that may be faster than the best."""
        best = found.times[0] if found.times else math.inf
        faster = [entry for entry in (*found.heap, *found.later) if entry[0] < best]
        found.lower = min([found.lower, *(bound for bound, *_ in faster)])
        found.open = sum(number not in self._useless for _, _, number, _ in faster)

    def _expand(self, number: int, found: Explored) -> None:
        """Shard a doubtful candidate, and try it like the others."""
        found.expanded.append(number)
        bound = self._bound(self.space.all[number])
        if bound is None:
            found.impossible += 1
            return
        found.bounds[number] = bound
        found.able.append(number)
        heapq.heappush(found.heap, (bound, self.space.order[number], number, 0))

    def _polished(self, ranked: list[Priced], found: Explored) -> list[Priced]:
        """Move the boundaries of stages of the plans that are about as fast as the first: the search has the slowest stage as fast as
        possible, which is not always the fastest step."""
        near = [each for each in ranked if each.estimate.step_time_s <= NEAR * ranked[0].estimate.step_time_s]
        better = {each.candidate: found.noted(self.fitting.polished(each)) for each in near[: self.shown + 1]}
        return sorted((better.get(each.candidate, each) for each in ranked), key=lambda each: each.rank_key)

    def _left_out(self, candidates: Sequence[Candidate], unpriced: int) -> tuple[str, ...]:
        """Say what was not tried: degrees, and ``unpriced`` candidates for which there was no time."""
        tried = {candidate.mesh.tp for candidate in candidates}
        others = sorted({self.space.all[number].mesh.tp for number in self._useless} - tried)
        found = [f"tp={listed(list(map(str, others)), 4)}, as tp={max(tried)} is no faster"] if others and tried else []
        if "cp" not in self.space.pinned and not self.space.divides_sequences and self.cluster.size > 1:
            found.append("cp (the batch covers all devices)")
        if unpriced:
            found.append(
                f"{plural(unpriced, 'plan')}, as the time limit of {seconds_text(self.limit_s or 0.0)} was over"
            )
        return tuple(found)

    def _faster(self, chosen: Priced, found: Explored, misfits: Sequence[Priced]) -> tuple[Priced, ...]:
        """Return the candidates nearest to fitting, on meshes on which nothing fits, that would be faster than ``chosen``."""
        smallest: dict[Mesh, Candidate] = {}
        faster = [each for each in found.hopeless if each.bound < chosen.estimate.step_time_s]
        without = [each for each in faster if each.mesh not in found.best]
        for candidate in sorted(without, key=lambda each: (self.bounds.least_bytes(each), each.key)):
            smallest.setdefault(candidate.mesh, candidate)
        first = sorted(smallest.values(), key=lambda candidate: (candidate.bound, candidate.key))[: self.shown]
        others = [each for each in misfits if each.candidate.mesh not in found.best] + [
            found.noted(self.fitting.price(candidate)) for candidate in first
        ]
        return _nearest([each for each in others if each.rank_key < chosen.rank_key])[: self.shown]


def _nearest(found: Sequence[Priced]) -> tuple[Priced, ...]:
    """Return the candidate of each mesh that is nearest to fitting, the fastest first."""
    by_mesh: dict[Mesh, Priced] = {}
    for each in sorted(found, key=lambda each: (each.missing, each.rank_key)):
        by_mesh.setdefault(each.candidate.mesh, each)
    return tuple(sorted(by_mesh.values(), key=lambda each: each.rank_key))
