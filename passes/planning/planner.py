"""``Planner``: of all candidates for a program on a cluster, the fastest that fits.

    Space ──bound──► a heap, the most promising first ──memory──► a higher bound ──price──► the fastest that fits, and why not the others
                          │                                                   │
                          │                                                   └─ stages (StageBalancer), and what each unit recomputes
                          └─ the sharding of each tp degree is searched, lowered and measured once

Bounds are lower bounds of a candidate's step time. The first is its work spread evenly over its ranks, with the wait of each rank for
its first microbatch. The second adds what must be recomputed where memory is short, by shares of the choices that a unit has. A
candidate is priced when no other has a lower bound, until none is below the best time so far, so what is left can't be faster.
Where candidates recompute, whole choices are found by taking the cheapest savings first, which is not always the best there is: the
difference to the bounds is the search's gap.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from graphpar.cost_models.estimates import Alone, Layout
from graphpar.cost_models.execution import Execution
from graphpar.cost_models.memory import ALLOCATOR_SLACK
from graphpar.cost_models.pipeline_units import Unit
from graphpar.cost_models.pricing import Pricing
from graphpar.cost_models.unit_bytes import RunBytes
from graphpar.errors import GraphparError
from graphpar.hardware.cluster import Cluster
from graphpar.ir.mesh import Mesh
from graphpar.ir.program import Program
from graphpar.ir.recomputation import Recompute
from graphpar.ir.split_points import SplitAt
from graphpar.passes.normalize.coupled import placed_axes
from graphpar.passes.planning.candidates import SHOWN, Candidate, PlannerConstraints, Priced, SearchResult
from graphpar.passes.planning.measured_units import units_of_ranks
from graphpar.passes.planning.recomputation import recomputed_blocks
from graphpar.passes.planning.sharded_state import gathers_again, prefetching
from graphpar.passes.planning.space import Space
from graphpar.passes.planning.stage_balance import StageBalancer
from graphpar.passes.sharding.shard import Sharded
from graphpar.schedules.registry import get_schedule
from graphpar.text import listed

TRIES = 10
"""How often the bytes that are to be saved are corrected by those that a choice was found to miss."""


class Planner:
    """Searches the plans of ``program`` on ``cluster``.

    Args:
        batch: rows of the global batch.
        pinned: degrees of axes that are not searched.
        solve: from compute axes and a microbatch size to placements and the program of a rank.
        execution: how ranks run, apart from what candidates say.
        shown: how many alternatives to return.
        like: a planner of the same program, whose sharded programs are used on.
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
    ) -> None:
        self.program, self.cluster, self.batch, self.solve, self.dtype = program, cluster, batch, solve, dtype
        self.wishes, self.execution, self.shown = wishes or PlannerConstraints(), execution or Execution(), shown
        self.space = Space(program, cluster, batch, pinned or {}, self.wishes)
        self._sharded: dict[tuple[Mesh, int], Sharded | None] = {} if like is None else like._sharded
        self._pricings: dict[tuple[object, ...], Pricing] = {}
        self._balancers: dict[tuple[object, ...], StageBalancer] = {}
        self._run_bytes: dict[tuple[object, ...], RunBytes] = {}
        self._alive: dict[tuple[object, ...], tuple[float, ...]] = {}
        self._bounds: dict[tuple[object, ...], float] = {}

    # ---- prices ----

    @functools.cached_property
    def recomputed(self) -> tuple[Mapping[str, str], ...]:
        """For each kind of recomputation that candidates may use, that of each block, by path."""
        return tuple(recomputed_blocks(self.program, kind) for kind in self.wishes.recompute)

    def units(
        self, mesh: Mesh, rows: int, split_points: tuple[SplitAt, ...] | None = None, kind: int = 0
    ) -> list[Unit] | None:
        """Return the units of a rank; None where the model can't be sharded so, or can't run microbatches of ``rows``."""
        sharded = self.sharded(mesh, rows)
        if sharded is None:
            return None
        run = replace(self.execution, blocks=tuple(self.recomputed[kind].items()))
        return units_of_ranks(sharded, run, device=self.cluster.device.kind, wanted=split_points or ())

    def sharded(self, mesh: Mesh, rows: int) -> Sharded | None:
        """Return the program of a rank, solved once for each mesh of compute axes; None where there is none."""
        compute = Mesh(**placed_axes(self.program, mesh))
        key = compute, 0 if self.program.symbolic else rows
        if key not in self._sharded:
            try:
                self._sharded[key] = self.solve(compute, self._sizes.get(compute, 1) if self.program.symbolic else rows)
            except GraphparError as error:
                self._sharded[key] = None
                self.space.refused[str(error)] = None
        return self._sharded[key]

    @functools.cached_property
    def _sizes(self) -> dict[Mesh, int]:
        """For each mesh of compute axes, the middle one of its candidates' microbatch sizes."""
        sizes: dict[Mesh, set[int]] = {}
        for mesh, size in dict.fromkeys((each.mesh, each.microbatch_size) for each in self._all):
            sizes.setdefault(Mesh(**placed_axes(self.program, mesh)), set()).add(size)
        return {compute: sorted(found)[len(found) // 2] for compute, found in sizes.items()}

    @functools.cached_property
    def _all(self) -> tuple[Candidate, ...]:
        return tuple(self.space.candidates())

    def run_of(self, candidate: Candidate) -> Execution:
        """Say how ranks run a candidate, but for what they recompute."""
        again = gathers_again(candidate.mesh.pp, candidate.zero, candidate.reshard)
        wished = (self.wishes.prefetch, self.wishes.prefetch_distance) if again else (None, None)
        return replace(self.execution, **gathering(candidate.zero, candidate.reshard, *prefetching(again, *wished)))

    def pricing(self, candidate: Candidate, kind: int = 0) -> Pricing | None:
        """Return the prices of the candidate's mesh, where all units recompute as ``kind`` says; None where the model can't be
        sharded over it."""
        mesh, rows, split_points = candidate.mesh, candidate.microbatch_size, candidate.split_points
        key = mesh, candidate.zero, candidate.reshard, 0 if self.program.symbolic else rows, split_points, kind
        if key not in self._pricings:
            units = self.units(mesh, rows, split_points, kind)
            if units is None:
                return None
            self._pricings[key] = Pricing(
                units, mesh, self.cluster, self.run_of(candidate), dtype=self.dtype,
                train=self.program.mode == "train", like=next(iter(self._pricings.values()), None),
            )  # fmt: skip
        return self._pricings[key]

    def price(self, candidate: Candidate) -> Priced:
        """Price the candidate with its slowest stage as fast as possible; where that does not fit, as fast as memory allows.

        Where stages are too large, their ranks recompute, or hold fewer units.
        """
        pricing = self._known(candidate)
        best = self._fitted(candidate, self._starts(candidate))
        if best.fits and not any(best.choices):
            return best
        if not self._chosen_in_memory(candidate):
            return best
        balancer, room = self._balancer(candidate), self._room(pricing)
        for _ in range(TRIES):
            starts = balancer.within(self._alive_on(candidate, pricing), room, self._messages(candidate))[1]
            if starts is None:
                break
            other = self._fitted(candidate, starts)
            best = min(best, other, key=lambda each: (max(0, each.missing), each.rank_key))
            if other.fits:
                break
            room -= other.missing
        return best

    def exactly(self, priced: Priced) -> Priced:
        """Price again, with every microbatch simulated."""
        pricing = self._mixed(priced.candidate, priced.choices)
        return replace(priced, estimate=pricing.estimate(priced.layout))

    def _known(self, candidate: Candidate, kind: int = 0) -> Pricing:
        pricing = self.pricing(candidate, kind)
        assert pricing is not None
        return pricing

    def _mixed(self, candidate: Candidate, choices: Sequence[int]) -> Pricing:
        """Return the prices where each unit recomputes as its own kind says."""
        pricing = self._known(candidate)
        if not any(choices):
            return pricing
        return pricing.with_units([self._known(candidate, kind).units[place] for place, kind in enumerate(choices)])

    def _fitted(self, candidate: Candidate, starts: tuple[int, ...]) -> Priced:
        """Price stages, with as little recomputation as lets their ranks fit, or as much as there is."""
        pricing = self._known(candidate)
        layout = Layout(candidate.schedule, candidate.microbatch_size, candidate.microbatches, starts)
        choices = (0,) * len(pricing.units)
        if len(self.recomputed) > 1:
            missing = self._missing(pricing, layout)
            if max(missing) > 0:
                choices = self._recomputing(candidate, pricing, layout, missing)
        mixed = self._mixed(candidate, choices)
        split_points = tuple(
            point for start in layout.starts[1:] if (point := pricing.units[start].split_point) is not None
        )
        sharded = self.sharded(candidate.mesh, candidate.microbatch_size)
        assert sharded is not None
        estimate = mixed.estimate(layout, exact=False)
        return Priced(candidate, layout, sharded, split_points, estimate, choices, self._recompute(pricing, choices))

    def _missing(self, pricing: Pricing, layout: Layout) -> list[int]:
        room = self.cluster.device.memory_bytes
        return [memory.total - room for memory in pricing.memories(layout, exact=False)]

    def _recomputing(
        self, candidate: Candidate, pricing: Pricing, layout: Layout, missing: Sequence[int]
    ) -> tuple[int, ...]:
        """Choose what each unit recomputes, so that ``missing`` bytes are saved on each rank in the fewest seconds."""
        balancer, own = self._balancer(candidate), self._alive_by_rank(candidate, pricing, layout)
        needed = [
            nbytes - (1 + ALLOCATOR_SLACK) * (on_top - balancer.least_on_top(units))
            for units, nbytes, on_top in zip(own, missing, self._on_top(candidate, pricing, layout))
        ]
        most = {unit: kinds[-1] for unit, kinds in enumerate(map(balancer.kinds_of, range(balancer.count))) if kinds}
        chosen, times = (0,) * balancer.count, 1
        for _ in range(TRIES):
            by_unit: dict[int, int] = {}
            for units, nbytes in zip(own, needed):
                by_unit |= balancer.cheapest(units, nbytes)
            known, chosen = chosen, self._agreed(pricing, [by_unit[unit] for unit in range(balancer.count)])
            times = 2 * times if chosen == known else 1  # what is missed may be too little for another choice
            left = self._missing(self._mixed(candidate, chosen), layout)
            if max(left) <= 0 or all(chosen[unit] == kind for unit, kind in most.items()):
                break
            needed = [before + times * max(0, each) for before, each in zip(needed, left)]
        return chosen

    def _agreed(self, pricing: Pricing, choices: Sequence[int]) -> tuple[int, ...]:
        """Let units that run the same block recompute as the one of them that recomputes most: a plan says it by the block's path."""
        agreed = list(choices)
        most: dict[str, int] = {}
        for unit, kind in zip(pricing.units, choices):
            for path in self._recomputed_in(unit):
                most[path] = max(kind, most.get(path, 0))
        for place, unit in enumerate(pricing.units):
            agreed[place] = max((most[path] for path in self._recomputed_in(unit)), default=agreed[place])
        return tuple(agreed)

    def _recomputed_in(self, unit: Unit) -> list[str]:
        """Return the paths of a unit's blocks that may be recomputed."""
        calls = (str(node.target) for node in unit.stage.graph.nodes if node.op == "call_module")
        return [path for path in calls if path in self.recomputed[-1]]

    def _on_top(self, candidate: Candidate, pricing: Pricing, layout: Layout) -> list[float]:
        """Return the bytes that each rank needs on top of what is kept, with the first kind."""
        balancer, stages = self._balancer(candidate), pricing.stages_of(layout)
        return [max(balancer.on_top(*stages[place]) for place in places) for places in pricing.places(layout)]

    def _alive_by_rank(self, candidate: Candidate, pricing: Pricing, layout: Layout) -> list[dict[int, float]]:
        """Return for each rank and each of its units how many microbatches it keeps, with the allocator's overhead."""
        stages, alive = pricing.stages_of(layout), self._alive_on(candidate, pricing)
        return [
            {unit: (1 + ALLOCATOR_SLACK) * alive[place] for place in places for unit in range(*stages[place])}
            for places in pricing.places(layout)
        ]

    def _recompute(self, pricing: Pricing, choices: Sequence[int]) -> Recompute:
        """Return what units recompute as a plan has it."""
        found = {
            path: self.recomputed[kind][path]
            for unit, kind in zip(pricing.units, choices)
            for path in self._recomputed_in(unit)
            if path in self.recomputed[kind]
        }
        return next((kind for kind, each in zip(self.wishes.recompute, self.recomputed) if each == found), found)

    def _balancer(self, candidate: Candidate) -> StageBalancer:
        key = candidate.mesh, candidate.zero, candidate.reshard, candidate.microbatch_size, candidate.split_points
        if key not in self._balancers:
            pricing = functools.partial(self._known, candidate)
            running = functools.partial(self._running, candidate)
            self._balancers[key] = StageBalancer(len(self.recomputed), pricing, running, candidate.microbatch_size)
        return self._balancers[key]

    def _running(self, candidate: Candidate, kind: int) -> RunBytes:
        """Return the bytes of every run of units that depend on the microbatch; they are those of every mesh with equal units."""
        compute, rows = Mesh(**placed_axes(self.program, candidate.mesh)), candidate.microbatch_size
        key = compute, rows, candidate.split_points, kind
        if key not in self._run_bytes:
            self._run_bytes[key] = RunBytes.of(self._known(candidate, kind).units, rows)
        return self._run_bytes[key]

    def _alive_on(self, candidate: Candidate, pricing: Pricing) -> tuple[float, ...]:
        """Return the microbatches in flight on each stage."""
        stages = candidate.mesh.pp * candidate.stages_per_rank
        key = candidate.schedule, candidate.mesh.pp, stages, candidate.microbatches
        if key not in self._alive:
            starts = tuple(range(stages))
            layout = Layout(candidate.schedule, candidate.microbatch_size, candidate.microbatches, starts)
            self._alive[key] = pricing.in_flight(layout)
        return self._alive[key]

    def _messages(self, candidate: Candidate) -> int:
        return candidate.microbatches if self.execution.hold_messages else 1

    def _room(self, pricing: Pricing) -> float:
        """Return the bytes of a device, and what tables of runs count twice."""
        return self.cluster.device.memory_bytes + pricing.bytes.counted_twice

    # ---- bounds ----

    def bounded(self, *, all_degrees: bool = False) -> tuple[list[Candidate], int]:
        """Return candidates with their first bounds, the most promising first, and how many are impossible.

        Unless ``all_degrees``, tp degrees from the first that makes microbatches no faster are left out: more replicas or stages use
        the devices better. (Such a degree may still be needed for memory.)
        """
        found, impossible = [], 0
        left_out = {} if all_degrees else self._useless_degrees(self._all)
        for candidate in self._all:
            pricing = (
                None if candidate.mesh.tp in left_out.get(_beside(candidate.mesh), ()) else self.pricing(candidate)
            )
            if pricing is None or len(pricing.units) < candidate.mesh.pp * candidate.stages_per_rank:
                impossible += 1
                continue
            found.append(replace(candidate, bound=self._bound(candidate, pricing)))
        return sorted(found, key=lambda candidate: (candidate.bound, candidate.key)), impossible

    def _bound(self, candidate: Candidate, pricing: Pricing) -> float:
        """Return a lower bound of the step time, memory aside."""
        split = get_schedule(candidate.schedule).splits_backward
        key = id(pricing), candidate.microbatch_size, candidate.microbatches, split, candidate.stages_per_rank == 1
        if key not in self._bounds:
            self._bounds[key] = self._computed_bound(candidate, pricing)
        return self._bounds[key]

    def _computed_bound(self, candidate: Candidate, pricing: Pricing) -> float:
        count, pp = candidate.microbatches, candidate.mesh.pp
        whole = pricing.stage_seconds(0, len(pricing.units), candidate.microbatch_size)
        waiting = sum(whole.exposed.values())
        work = (whole.forward + whole.backward - waiting) * pricing.crowd + waiting
        if pp == 1:
            return count * work + pricing.least_end_s
        split = get_schedule(candidate.schedule).splits_backward
        through = whole.forward + whole.backward - (whole.weight if split else 0.0)  # one microbatch, from end to end
        bound = max(through, (count * work + self._filling(candidate, pricing)) / pp)
        if candidate.stages_per_rank == 1 and not split:
            # Stage s takes w(s): the step is at least count * w(s) + w(0) + ... + w(s - 1) for each s.
            bound = max(bound, (whole.forward + whole.backward) / (1 - (1 - 1 / count) ** pp))
        return bound + pricing.least_end_s

    def _filling(self, candidate: Candidate, pricing: Pricing) -> float:
        """Return a lower bound of the seconds in which ranks, all together, wait for their first microbatch, and idle after their last.

        Before rank r begins, r stages have run forward, of at least a unit each; after it, they run backward, unless these are split.
        """
        ways = 1 if get_schedule(candidate.schedule).splits_backward else 3
        seconds = pricing.stage_prices(candidate.microbatch_size).busy(ways)[: candidate.mesh.pp - 1]
        return float(seconds.cumsum().sum())

    def _bound_in_memory(self, candidate: Candidate) -> float:
        """Return a lower bound of the step time of a candidate under the memory of its ranks; infinity where it can't fit."""
        pricing, balancer, count = self._known(candidate), self._balancer(candidate), candidate.microbatches
        if self._chosen_in_memory(candidate):
            alive, room = self._alive_on(candidate, pricing), self._room(pricing)
            return count * balancer.within(alive, room, self._messages(candidate))[0] + pricing.least_end_s
        layout = Layout(candidate.schedule, candidate.microbatch_size, count, self._starts(candidate))
        missing = self._missing(pricing, layout)
        if max(missing) <= 0:
            return candidate.bound
        own = self._alive_by_rank(candidate, pricing, layout)
        on_top = self._on_top(candidate, pricing, layout)
        seconds = [balancer.least_s(*each) for each in zip(own, missing, on_top)]
        return self._bound_of_stages(candidate, seconds)

    def _bound_of_stages(self, candidate: Candidate, least: Sequence[float] = ()) -> float:
        """Return a lower bound of the step time of given stages, memory aside: each rank's work, and the time that it surely idles.

        Args:
            least: of each rank, other lower bounds of the seconds of a microbatch.
        """
        pricing, count = self._known(candidate), candidate.microbatches
        if self._chosen_in_memory(candidate) or (candidate.mesh.pp == 1 and not least):
            return candidate.bound
        layout = Layout(candidate.schedule, candidate.microbatch_size, count, self._starts(candidate))
        split = get_schedule(candidate.schedule).splits_backward
        costs = [pricing.stage_seconds(*stage, candidate.microbatch_size) for stage in pricing.stages_of(layout)]
        before = itertools.accumulate((cost.forward + (0.0 if split else cost.backward) for cost in costs), initial=0.0)
        own = [
            sum(costs[place].forward + costs[place].backward for place in places) for places in pricing.places(layout)
        ]
        busy = list(map(max, own, least or own))
        through = sum(cost.forward + cost.backward - (cost.weight if split else 0.0) for cost in costs)
        through += sum(seconds - known for seconds, known in zip(busy, own))
        ends = [idle + count * seconds for idle, seconds in zip(before, busy)]
        return max(through, *ends) + pricing.least_end_s

    @staticmethod
    def _chosen_in_memory(candidate: Candidate) -> bool:
        """Whether stages may begin elsewhere where memory is short: where a rank has several, they are as equal as units allow."""
        return candidate.mesh.pp > 1 and candidate.stages_per_rank == 1 and candidate.split_points is None

    def _starts(self, candidate: Candidate) -> tuple[int, ...]:
        """Return the first unit of each stage, memory aside."""
        if candidate.split_points is not None:
            pinned = {unit.split_point: place for place, unit in enumerate(self._known(candidate).units)}
            return (0, *sorted(pinned[point] for point in candidate.split_points))
        stages = candidate.mesh.pp * candidate.stages_per_rank
        balanced = (0,) if stages == 1 else self._balancer(candidate).balanced(stages)
        assert balanced is not None
        return balanced

    def _useless_degrees(self, candidates: Sequence[Candidate]) -> dict[tuple[int, ...], set[int]]:
        """Return for each cp and ep the tp degrees from the first on that is no faster than smaller ones, for small and large
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
                seconds = []
                for size in (min(sizes), max(sizes)):
                    pricing = self.pricing(replace(first[degree], microbatch_size=size))
                    seconds.append(math.inf if pricing is None else _microbatch_s(pricing, size))
                if place and all(now >= before for now, before in zip(seconds, best)):
                    found[beside] = set(degrees[place:])
                    break
                best = [min(now, before) for now, before in zip(seconds, best)]
        return found

    def _least_bytes(self, candidate: Candidate) -> float:
        """Return a lower bound of the average rank's bytes, wherever the model is split, with the most recomputation."""
        pricing = self._known(candidate, len(self.recomputed) - 1)
        alive = min(self._alive_on(candidate, pricing)) / candidate.stages_per_rank
        return pricing.bytes.average(candidate.microbatch_size, candidate.microbatches, alive)

    # ---- the search ----

    def search(self, prune: bool = True) -> SearchResult:
        """Return the fastest candidate that fits. Without ``prune`` all are priced, with the same result."""
        found = self._searched(prune, all_degrees=False)
        if found.best is not None or not self._all:
            return found
        self.space.any_cp = True  # a part of a sequence may fit where a whole one does not
        for name in ("_all", "_sizes"):
            self.__dict__.pop(name, None)
        return self._searched(prune, all_degrees=True)

    def alone(self) -> Alone:
        """Estimate the whole batch on one device of the cluster; the unsharded program's measurements are reused."""
        device = Cluster(1, 1, self.cluster.device, self.cluster.intra_node, self.cluster.inter_node)
        size = None if self.program.symbolic else self.wishes.microbatch_size  # each other size is a trace
        wishes = PlannerConstraints(
            microbatch_size=size, one_microbatch=self.wishes.one_microbatch, recompute=self.wishes.recompute
        )
        run, dtype = self.execution, self.dtype
        one = Planner(self.program, device, self.batch, self.solve, {}, wishes, run, dtype, shown=1, like=self)
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
        needs = [(self._least_bytes(candidate), candidate) for candidate in self.bounded(all_degrees=True)[0]]
        promising = [
            (-candidate.microbatch_size if largest else 0, least, candidate.key, candidate)
            for least, candidate in needs
            if least <= room
        ]
        for *_, candidate in sorted(promising, key=lambda entry: entry[:3])[:tries]:
            priced = self.price(candidate)
            if priced.fits:
                return priced
        return None

    def _searched(self, prune: bool, all_degrees: bool) -> SearchResult:
        candidates, impossible = self.bounded(all_degrees=all_degrees)
        higher = (self._bound_of_stages, self._bound_in_memory)
        heap = [(each.bound, each.key, number, 0) for number, each in enumerate(candidates)]
        best: dict[Mesh, Priced] = {}
        misfits: list[Priced] = []
        hopeless: list[Candidate] = []
        lower, priced_count = math.inf, 0
        while heap:
            bound, _, number, level = heapq.heappop(heap)
            candidate = candidates[number]
            slowest_shown = sorted(each.estimate.step_time_s for each in best.values())[self.shown :]
            if prune and slowest_shown and bound > slowest_shown[0]:
                break
            if prune and candidate.mesh in best and bound > best[candidate.mesh].estimate.step_time_s:
                continue
            if level < len(higher):
                bound = max(bound, higher[level](candidate))
                if math.isfinite(bound) or not prune:
                    heapq.heappush(heap, (bound, candidate.key, number, level + 1))
                else:
                    hopeless.append(candidate)
                continue
            priced = self.price(candidate)
            priced_count += 1
            exact = priced.fits and not any(priced.choices)
            lower = min(lower, priced.estimate.step_time_s if exact else bound)
            if not priced.fits:
                misfits.append(priced)
            elif candidate.mesh not in best or priced.rank_key < best[candidate.mesh].rank_key:
                best[candidate.mesh] = priced
        whole = sorted(map(self.exactly, best.values()), key=lambda each: each.rank_key)
        ranked = [each for each in whole if each.fits]
        misfits += [each for each in whole if not each.fits]  # simulating few microbatches underestimated them
        if not ranked:
            misfits += [self.price(candidate) for candidate in sorted(hopeless, key=self._least_bytes)[: 4 * SHOWN]]
        nearest = sorted(misfits, key=lambda each: (each.missing, each.rank_key))
        return SearchResult(
            best=ranked[0] if ranked else None,
            alternatives=tuple(ranked[1 : self.shown + 1] if ranked else nearest[: max(1, self.shown)]),
            considered=len(candidates) + impossible,
            priced=priced_count,
            infeasible=impossible + len(misfits) + len(hopeless),
            refused=tuple(self.space.refused),
            misfits=self._faster(ranked[0], best, misfits, hopeless) if ranked else (),
            lower_bound_s=lower,
            left_out=self._left_out(candidates),
        )

    def _left_out(self, candidates: Sequence[Candidate]) -> tuple[str, ...]:
        """Say which degrees were not tried."""
        tried = {candidate.mesh.tp for candidate in candidates}
        others = sorted({candidate.mesh.tp for candidate in self._all} - tried)
        found = [f"tp={listed(list(map(str, others)), 4)}, no faster than tp={max(tried)}"] if others and tried else []
        if "cp" not in self.space.pinned and not self.space.divides_sequences and self.cluster.size > 1:
            found.append("cp, as rows suffice")
        return tuple(found)

    def _faster(
        self, chosen: Priced, fitting: Collection[Mesh], misfits: Sequence[Priced], hopeless: Sequence[Candidate]
    ) -> tuple[Priced, ...]:
        """Return the candidates nearest to fitting, on meshes on which nothing fits, that would be faster than ``chosen``."""
        smallest: dict[Mesh, Candidate] = {}
        for candidate in sorted(hopeless, key=lambda candidate: (self._least_bytes(candidate), candidate.key)):
            if candidate.mesh not in fitting and candidate.bound < chosen.estimate.step_time_s:
                smallest.setdefault(candidate.mesh, candidate)
        first = sorted(smallest.values(), key=lambda candidate: (candidate.bound, candidate.key))[: self.shown]
        others = [each for each in misfits if each.candidate.mesh not in fitting] + [
            self.price(candidate) for candidate in first
        ]
        return _nearest([each for each in others if each.rank_key < chosen.rank_key])[: self.shown]


def gathering(zero: int, reshard: str | int, prefetch: str | None, distance: int) -> dict[str, Any]:
    """Return the fields of an execution that say how state is sharded and gathered."""
    gathered = {"pre": 1 + distance, "post": distance}.get(prefetch or "", 1)
    return {"zero": zero, "reshard": reshard, "prefetch": prefetch != "none", "gathered": gathered}


def _beside(mesh: Mesh) -> tuple[int, ...]:
    """Return the degrees of the compute axes other than tp."""
    return mesh.cp, mesh.ep


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
