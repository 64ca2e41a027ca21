"""``Planner``: of all candidates for a program on a cluster, the fastest that fits.

    Space ──StepBounds──► a heap, the most promising first ──higher bounds──► Fitting ──► the fastest that fits, why not the others
                               └────────── CandidatePrices ────────────────────┘

A candidate is priced when no other has a lower bound, until none is below the best time so far, so what is left can't be faster.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from graphpar.cost_models.estimates import Alone
from graphpar.cost_models.execution import Execution
from graphpar.cost_models.pricing import Pricing
from graphpar.hardware.cluster import Cluster
from graphpar.ir.mesh import Mesh
from graphpar.ir.program import Program
from graphpar.passes.planning.bounds import StepBounds
from graphpar.passes.planning.candidate_prices import CandidatePrices
from graphpar.passes.planning.candidates import (
    SHOWN,
    Candidate,
    PlannerConstraints,
    Point,
    Priced,
    SearchResult,
    Tried,
)
from graphpar.passes.planning.fitting import Fitting
from graphpar.passes.planning.space import Space
from graphpar.passes.sharding.shard import Sharded
from graphpar.runtime.modes import GENERATE
from graphpar.text import listed, plural, seconds_text

_NEAR = 1.03
"""Up to how many times the fastest step a plan takes whose stages are looked at again."""
_DOUBTFUL = -1
"""The level of a candidate that has not been sharded; at others, so many of the higher bounds are known."""
_AT_LEAST = 8
"""So many of the most promising plans are priced also where time is over: that takes little beside placements."""
_Entry = tuple[float, tuple[Any, ...], int, int]
"""A bound, the order of candidates that have the same, the number of one, and its level."""
SHOWN_EVERY_S = 0.2
"""How often a search says what it is at."""


@dataclass
class _Explored:
    """What a search has found so far.

    Attributes:
        best: the fastest that fits, of each mesh.
        hopeless: candidates that can't fit.
        lower: no candidate takes fewer seconds a step.
        points: those that were priced.
        open: how many were not, for want of time.
        expanded: candidates with a doubtful tp that were tried after all, since no bound was above the best: those that are ``added`` to
            the others, and how many are ``impossible``.
    """

    best: dict[Mesh, Priced] = field(default_factory=dict)
    misfits: list[Priced] = field(default_factory=list)
    hopeless: list[Candidate] = field(default_factory=list)
    lower: float = math.inf
    points: dict[Candidate, Point] = field(default_factory=dict)
    open: int = 0
    added: list[Candidate] = field(default_factory=list)
    expanded: list[Candidate] = field(default_factory=list)
    impossible: int = 0

    def noted(self, priced: Priced) -> Priced:
        """Keep a priced candidate in short; of the same one the last price counts."""
        self.points[priced.candidate] = Point.of(priced)
        return priced

    def text(self, candidates: int) -> str:
        """Say how far the search is, and the best plan so far."""
        text = f"planning: {len(self.points)} priced of {plural(candidates, 'plan')}"
        if not self.best:
            return text
        best = min(self.best.values(), key=lambda each: each.rank_key)
        return f"{text}, best so far {seconds_text(best.estimate.step_time_s)} a step ({best.candidate.mesh})"


class Planner:
    """Searches the plans of ``program`` on ``cluster``.

    Args:
        batch: rows of the global batch.
        pinned: degrees of axes that are not searched.
        solve: from compute axes and a microbatch size to placements and the program of a rank.
        execution: how ranks run, apart from what candidates say.
        shown: how many alternatives to return.
        like: a planner of the same program, whose sharded programs are used on.
        limit_s: after so many seconds the search ends as soon as it has a plan that fits.
        show: is called with what the search is at.
    """

    def __init__(
        self,
        program: Program,
        cluster: Cluster,
        batch: int,
        solve: Callable[[Mesh, int], Sharded],
        pinned: Mapping[str, int] | None = None,
        wishes: PlannerConstraints | None = None,
        execution: Execution | None = None,
        dtype: str = "fp32",
        shown: int = SHOWN,
        like: Planner | None = None,
        limit_s: float | None = None,
        show: Callable[[str], None] | None = None,
    ) -> None:
        self.program, self.cluster, self.batch, self.shown = program, cluster, batch, shown
        self.limit_s, self.show = limit_s, show or (lambda text: None)
        self.space = Space(program, cluster, batch, pinned or {}, wishes or PlannerConstraints())
        self.prices: CandidatePrices = CandidatePrices(
            self.space, solve, execution or Execution(), dtype, None if like is None else like.prices, self.show
        )
        self.bounds, self.fitting = StepBounds(self.prices), Fitting(self.prices)
        self._useless: frozenset[Candidate] = frozenset()
        self._unsolved: frozenset[Candidate] = frozenset()
        self._began = time.monotonic()

    @property
    def _over(self) -> bool:
        """Whether the time of the search is over."""
        return self.limit_s is not None and time.monotonic() - self._began > self.limit_s

    @property
    def wishes(self) -> PlannerConstraints:
        """The user's pins."""
        return self.space.wishes

    def bounded(self, *, all_degrees: bool = False) -> tuple[list[Candidate], int]:
        """Return candidates with their first bounds, the most promising first, and how many are impossible.

        Unless ``all_degrees``, those with a tp degree beyond the first that makes microbatches no faster are not among them; see
        :meth:`_doubtful`. (Such a degree may still be needed for memory.) Nor are those with a degree for which there is no time.
        """
        found, impossible = [], 0
        self._useless = self._unsolved = frozenset()
        if not all_degrees:
            self._useless = self._with_degrees(self._useless_degrees(self.space.all))
            if self._over:
                self._unsolved = self._with_degrees(self._unsolved_degrees(self.space.all)) - self._useless
        for candidate in self.space.all:
            if candidate in self._useless or candidate in self._unsolved:
                continue
            bounded = self._bounded(candidate)
            impossible += bounded is None
            found += [] if bounded is None else [bounded]
        return sorted(found, key=lambda candidate: (candidate.bound, candidate.key)), impossible

    def _with_degrees(self, degrees: Mapping[tuple[int, ...], Collection[int]]) -> frozenset[Candidate]:
        """Return the candidates with these tp degrees, by cp and ep."""
        return frozenset(each for each in self.space.all if each.mesh.tp in degrees.get(_beside(each.mesh), ()))

    def _bounded(self, candidate: Candidate) -> Candidate | None:
        """Return the candidate with its first bound; None where it is impossible."""
        pricing = self.prices.pricing(candidate)
        if pricing is None or len(pricing.units) < candidate.mesh.pp * candidate.stages_per_rank:
            return None
        return replace(candidate, bound=self.bounds.of(candidate, pricing))

    def _doubtful(self) -> list[Candidate]:
        """Return the candidates whose degree makes microbatches no faster, as far as a smaller one shows, with a bound that needs no
        placements of theirs: they divide a microbatch's seconds at the largest smaller degree at best."""
        degrees: dict[tuple[int, ...], set[int]] = {}
        for each in self.space.all:
            if each not in self._useless and each not in self._unsolved:
                degrees.setdefault(_beside(each.mesh), set()).add(each.mesh.tp)
        found = []
        for each in self._useless | self._unsolved:
            smaller = max(degree for degree in degrees[_beside(each.mesh)] if each.mesh.tp % degree == 0)
            seconds = self.bounds.of_smaller(each, smaller)
            found.append(replace(each, bound=seconds))
        return found

    def _useless_degrees(self, candidates: Sequence[Candidate]) -> dict[tuple[int, ...], set[int]]:
        """Return for each dp_expert, cp and ep the tp degrees beyond the first that is no faster than smaller ones, for small and large
        microbatches."""
        found: dict[tuple[int, ...], set[int]] = {}
        sizes = {candidate.microbatch_size for candidate in candidates}
        for beside in dict.fromkeys(_beside(candidate.mesh) for candidate in candidates):
            first: dict[int, Candidate] = {}
            for candidate in candidates:
                if _beside(candidate.mesh) == beside:
                    first.setdefault(candidate.mesh.tp, candidate)
            degrees, best = sorted(first), [math.inf, math.inf]
            for place, degree in enumerate(degrees):
                if place and self._over:
                    break
                seconds = []
                for size in (min(sizes), max(sizes)):
                    pricing = self.prices.pricing(replace(first[degree], microbatch_size=size))
                    seconds.append(math.inf if pricing is None else _microbatch_s(pricing, size))
                if place and all(now >= before for now, before in zip(seconds, best)):
                    found[beside] = set(degrees[place + 1 :])
                    break
                best = [min(now, before) for now, before in zip(seconds, best)]
        return found

    def _unsolved_degrees(self, candidates: Sequence[Candidate]) -> dict[tuple[int, ...], set[int]]:
        """Return for each cp and ep the tp degrees whose placements have not been solved, but the smallest."""
        found: dict[tuple[int, ...], set[int]] = {}
        for beside in dict.fromkeys(_beside(candidate.mesh) for candidate in candidates):
            degrees = {each.mesh.tp: each for each in candidates if _beside(each.mesh) == beside}
            unsolved = {tp for tp, each in degrees.items() if not self.prices.is_solved(each)} - {min(degrees)}
            found[beside] = unsolved
        return found

    def search(self, prune: bool = True) -> SearchResult:
        """Return the fastest candidate that fits. Without ``prune`` all are priced, with the same result."""
        found = self._searched(prune, all_degrees=False)
        if found.best is not None or not self.space.all or self.cluster.size == 1:
            return found
        self.space.divide_any_sequence()  # a part of one may fit where a whole one does not
        return self._searched(prune, all_degrees=True)

    def fastest(self, keep: Callable[[Candidate], bool]) -> tuple[Priced | None, bool]:
        """Return the fastest that fits of the candidates that ``keep`` takes, and whether there was time for all of them."""
        candidates = [each for each in self.bounded(all_degrees=True)[0] if keep(each)]
        self._began = time.monotonic()
        found = self._explored(candidates, True)
        ranked = sorted(map(self.fitting.exactly, found.best.values()), key=lambda each: each.rank_key)
        return next((each for each in ranked if each.fits), None), not found.open

    def alone(self) -> Alone:
        """Estimate the whole batch on one device of the cluster; the unsharded program's measurements are reused."""
        device = Cluster(1, 1, self.cluster.device, self.cluster.intra_node, self.cluster.inter_node)
        free = (
            self.program.symbolic and self.program.mode != GENERATE
        )  # else each other size is a trace, or another window
        size = None if free else self.wishes.microbatch_size
        wishes = PlannerConstraints(
            microbatch_size=size, one_microbatch=self.wishes.one_microbatch, recompute=self.wishes.recompute
        )
        run, dtype = self.prices.execution, self.prices.dtype
        one = Planner(self.program, device, self.batch, self.prices.solve, {}, wishes, run, dtype, shown=1, like=self)
        found = one.search()
        best = found.best or found.alternatives[0]
        estimate = best.estimate
        return Alone(
            str(device),
            estimate.step_time_s,
            best.candidate.microbatch_size,
            max(estimate.peak_memory_bytes),
            estimate.memory_bytes,
            best.recompute,
        )

    def any_that_fits(self, *, largest: bool = False, tries: int = 40) -> Priced | None:
        """Return a candidate that fits, trying those that need the least memory first; None if the first ``tries`` don't.

        ``largest``: try the largest microbatches first instead.
        """
        room = self.cluster.device.memory_bytes
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

    def _searched(self, prune: bool, all_degrees: bool) -> SearchResult:
        self._began = time.monotonic()
        candidates, impossible = self.bounded(all_degrees=all_degrees)
        found = self._explored(candidates, prune, self._doubtful())
        candidates, impossible = candidates + found.added, impossible + found.impossible
        self._useless -= set(found.expanded)
        self._unsolved -= set(found.expanded)
        best, misfits, hopeless = found.best, found.misfits, found.hopeless
        exact = [found.noted(self.fitting.exactly(each)) for each in best.values()]
        whole = sorted(exact, key=lambda each: each.rank_key)
        ranked = self._polished([each for each in whole if each.fits], found)
        misfits += [each for each in whole if not each.fits]  # simulating few microbatches underestimated them
        if not ranked:
            misfits += [
                found.noted(self.fitting.price(candidate))
                for candidate in sorted(hopeless, key=self.bounds.least_bytes)[: 4 * SHOWN]
            ]
        nearest = sorted(misfits, key=lambda each: (each.missing, each.rank_key))
        faster = self._faster(ranked[0], found) if ranked else ()
        return SearchResult(
            best=ranked[0] if ranked else None,
            alternatives=tuple(ranked[1 : self.shown + 1] if ranked else nearest[: max(1, self.shown)]),
            considered=len(self.space.all),
            priced=len(found.points),
            infeasible=impossible + len(misfits) + len(hopeless),
            refused=tuple(self.space.refused),
            misfits=faster,
            lower_bound_s=found.lower,
            left_out=self._left_out(candidates, found.open),
            points=tuple(sorted(found.points.values(), key=lambda each: (each.step_time_s, *each.candidate.key))),
            tried=Tried.of(
                self.space.all, candidates, hopeless, found.points, self._useless, self._unsolved, found.open
            ),
        )

    def _explored(self, candidates: Sequence[Candidate], prune: bool, doubtful: Sequence[Candidate] = ()) -> _Explored:
        """Price candidates in the order of their bounds, until what is left can't be shown, or time is over.

        ``doubtful`` ones are sharded only if they may be faster than the best, and when time is over only if nothing else fits.
        """
        found, shown_at, known_ones = _Explored(), -math.inf, [*candidates, *doubtful]
        higher = (self.bounds.in_all_memory, self.bounds.of_stages, self.bounds.in_memory)
        first = [0] * len(candidates) + [_DOUBTFUL] * len(doubtful)
        heap: list[_Entry] = [
            (each.bound, each.key, number, level) for number, (each, level) in enumerate(zip(known_ones, first))
        ]
        heapq.heapify(heap)
        later: list[_Entry] = []
        while heap or (later and not found.best):
            if not heap:
                self._expand(heapq.heappop(later)[2], known_ones, found, heap)
                continue
            bound, _, number, level = heap[0]
            candidate, now = known_ones[number], time.monotonic()
            if self._over and found.best and len(found.points) >= _AT_LEAST:
                break
            heapq.heappop(heap)
            if self._over and level == _DOUBTFUL:
                heapq.heappush(later, (bound, candidate.key, number, level))
                continue
            if now - shown_at > SHOWN_EVERY_S:
                self.show(found.text(len(candidates)))
                shown_at = now
            times = sorted(each.estimate.step_time_s for each in found.best.values())
            if prune and times[self.shown :] and bound > times[self.shown]:
                heap.clear()
                break
            if level == _DOUBTFUL:
                if not times or bound < times[0]:
                    self._expand(number, known_ones, found, heap)
                continue
            known = found.best.get(candidate.mesh)
            if prune and known is not None and bound > known.estimate.step_time_s:
                continue
            if level < len(higher):
                bound = max(bound, higher[level](candidate))
                if math.isfinite(bound) or not prune:
                    heapq.heappush(heap, (bound, candidate.key, number, level + 1))
                else:
                    found.hopeless.append(candidate)
                continue
            priced = found.noted(self.fitting.price(candidate))
            exact = priced.fits and not any(priced.choices)
            found.lower = min(found.lower, priced.estimate.step_time_s if exact else bound)
            if not priced.fits:
                found.misfits.append(priced)
            elif known is None or priced.rank_key < known.rank_key:
                found.best[candidate.mesh] = priced
        self._note_open([*heap, *later], known_ones, found)
        return found

    def _note_open(self, left: Sequence[_Entry], candidates: Sequence[Candidate], found: _Explored) -> None:
        """Note those for which there was no time, that may be faster than the best."""
        best = min((each.estimate.step_time_s for each in found.best.values()), default=math.inf)
        faster = [entry for entry in left if entry[0] < best]
        found.lower = min([found.lower, *(bound for bound, *_ in faster)])
        found.open = sum(candidates[number] not in self._useless for _, _, number, _ in faster)

    def _expand(self, number: int, candidates: list[Candidate], found: _Explored, heap: list[_Entry]) -> None:
        """Shard a doubtful candidate, and try it like the others."""
        found.expanded.append(candidates[number])
        bounded = self._bounded(candidates[number])
        if bounded is None:
            found.impossible += 1
            return
        candidates[number] = bounded
        found.added.append(bounded)
        heapq.heappush(heap, (bounded.bound, bounded.key, number, 0))

    def _polished(self, ranked: list[Priced], found: _Explored) -> list[Priced]:
        """Move the boundaries of stages of the plans that are about as fast as the first: the search has the slowest stage as fast as
        possible, which is not always the fastest step."""
        near = [each for each in ranked if each.estimate.step_time_s <= _NEAR * ranked[0].estimate.step_time_s]
        better = {each.candidate: found.noted(self.fitting.polished(each)) for each in near[: self.shown + 1]}
        return sorted((better.get(each.candidate, each) for each in ranked), key=lambda each: each.rank_key)

    def _left_out(self, candidates: Sequence[Candidate], unpriced: int) -> tuple[str, ...]:
        """Say what was not tried: degrees, and ``unpriced`` candidates for which there was no time."""
        tried = {candidate.mesh.tp for candidate in candidates}
        others = sorted({candidate.mesh.tp for candidate in self._useless} - tried)
        found = [f"tp={listed(list(map(str, others)), 4)}, as tp={max(tried)} is no faster"] if others and tried else []
        if "cp" not in self.space.pinned and not self.space.divides_sequences and self.cluster.size > 1:
            found.append("cp, as rows suffice")
        if unpriced:
            found.append(
                f"{plural(unpriced, 'plan')}, as the time limit of {seconds_text(self.limit_s or 0.0)} was over"
            )
        return tuple(found)

    def _faster(self, chosen: Priced, found: _Explored) -> tuple[Priced, ...]:
        """Return the candidates nearest to fitting, on meshes on which nothing fits, that would be faster than ``chosen``."""
        smallest: dict[Mesh, Candidate] = {}
        for candidate in sorted(found.hopeless, key=lambda each: (self.bounds.least_bytes(each), each.key)):
            if candidate.mesh not in found.best and candidate.bound < chosen.estimate.step_time_s:
                smallest.setdefault(candidate.mesh, candidate)
        first = sorted(smallest.values(), key=lambda candidate: (candidate.bound, candidate.key))[: self.shown]
        others = [each for each in found.misfits if each.candidate.mesh not in found.best] + [
            found.noted(self.fitting.price(candidate)) for candidate in first
        ]
        return _nearest([each for each in others if each.rank_key < chosen.rank_key])[: self.shown]


def _beside(mesh: Mesh) -> tuple[int, ...]:
    """Return the degrees of the axes other than tp that a rank's program depends on."""
    return mesh.dp_expert, mesh.cp, mesh.ep


def _microbatch_s(pricing: Pricing, rows: int) -> float:
    """Return the seconds of a microbatch through all units, forward and backward."""
    whole = pricing.stage_seconds(0, len(pricing.units), rows)
    return whole.forward + whole.backward


def _nearest(found: Sequence[Priced]) -> tuple[Priced, ...]:
    """Return the candidate of each mesh that is nearest to fitting, the fastest first."""
    by_mesh: dict[Mesh, Priced] = {}
    for each in sorted(found, key=lambda each: (each.missing, each.rank_key)):
        by_mesh.setdefault(each.candidate.mesh, each)
    return tuple(sorted(by_mesh.values(), key=lambda each: each.rank_key))
