"""``Planner``: of all meshes, schedules and microbatch sizes for a program on a cluster, the fastest that fits.

    every mesh x schedule x microbatch size ──bound──► cheapest first ──StageBalancer, Pricing──► fastest that fits, and why not the others
              │
              └─ the sharding of each tp degree is searched, lowered and measured once (:mod:`graphpar.passes.planning.measured_units`)

A candidate's bound is its work spread evenly over its ranks, with no bubble and nothing sent between stages: no schedule is faster.
Candidates are priced in order of their bounds until a bound exceeds the best time so far, so the result is that of pricing all of them.
Two decisions come first: the sharding of a tp degree is searched once, for the middle one of its microbatch sizes, and only useful
degrees are tried (:meth:`Planner.bounded`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from graphpar.cost_models.estimates import Alone, Estimate, Layout
from graphpar.cost_models.execution import Execution
from graphpar.cost_models.pipeline_units import Unit
from graphpar.cost_models.pricing import Pricing
from graphpar.errors import GraphparError
from graphpar.hardware.cluster import Cluster
from graphpar.ir.mesh import Mesh
from graphpar.ir.program import Program
from graphpar.ir.split_points import SplitAt
from graphpar.passes.normalize.coupled import placed_axes
from graphpar.passes.planning.candidates import SHOWN, Candidate, PlannerConstraints, Priced, SearchResult
from graphpar.passes.planning.measured_units import units_of_ranks
from graphpar.passes.planning.stage_balance import StageBalancer
from graphpar.passes.sharding.shard import Sharded
from graphpar.runtime.axes import AXIS
from graphpar.schedules.registry import SCHEDULES, legal_microbatches, stage_ranks

FREE_AXES = tuple(name for name, axis in AXIS.items() if axis.searched)
"""The axes whose degrees are searched where they are not pinned."""
_OF_STATE = tuple("dp_shard" if name == "dp_replicate" else name for name in FREE_AXES)
DEPTHS = (2, 3, 4)
"""Stages a rank to try for schedules that take any number of them."""
_KEEPS_ALL = ("GPipe", "LoopedBFS")  # schedules whose ranks keep every microbatch at once


def free_axes(pinned: Collection[str], zero: int) -> tuple[str, ...]:
    """Return the axes that are searched where some are pinned: data parallelism is dp_shard where its state is to be sharded."""
    axes = _OF_STATE if zero and "dp_shard" not in pinned else FREE_AXES
    return tuple(axis for axis in axes if axis not in pinned)


class Planner:
    """Searches the plans of ``program`` on ``cluster``.

    Args:
        batch: rows of the global batch.
        pinned: degrees of axes that are not searched.
        solve: from compute axes and a microbatch size to placements and the program of a rank.
        shown: how many alternatives to return.
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
    ) -> None:
        self.program, self.cluster, self.batch, self.solve, self.dtype = program, cluster, batch, solve, dtype
        self.pinned, self.wishes = dict(pinned or {}), wishes or PlannerConstraints()
        self.execution, self.shown = execution or Execution(), shown
        self.refused: dict[str, None] = {}
        self._sharded: dict[tuple[Mesh, int], Sharded | None] = {}
        self._pricings: dict[tuple[Mesh, int, tuple[SplitAt, ...]], Pricing] = {}
        self._balancers: dict[tuple[Mesh, int], StageBalancer] = {}

    # ---- what there is ----

    def meshes(self) -> list[Mesh]:
        """Return every factorisation of the devices over the axes that are not pinned.

        Raises:
            GraphparError: the pinned degrees don't divide the number of devices.
        """
        fixed = math.prod(self.pinned.values())
        if self.cluster.size % fixed:
            shown = ", ".join(f"{axis}={degree}" for axis, degree in self.pinned.items())
            raise GraphparError(
                f"{self.cluster.size} devices don't divide by the mesh's {shown}; take a multiple of {fixed} devices, or other degrees."
            )
        free = free_axes(self.pinned, self.execution.zero)
        found = [
            Mesh(**(self.pinned | dict(zip(free, degrees))))
            for degrees in _factorisations(self.cluster.size // fixed, len(free))
        ]
        able = [mesh for mesh in found if (mesh.dp_shard > 1 or not self.execution.zero) and self._able(mesh)]
        return sorted(able, key=lambda mesh: tuple(mesh.degrees().values()))

    def _able(self, mesh: Mesh) -> bool:
        try:
            if self.wishes.check is not None:
                self.wishes.check(mesh)
        except GraphparError as error:
            self.refused[str(error)] = None
            return False
        return True

    def candidates(self) -> Iterator[Candidate]:
        """Yield every legal candidate; those whose mesh can't divide the model or the batch are left out."""
        for mesh in self.meshes():
            if self.batch % mesh.replicas:
                continue
            rows = self.batch // mesh.replicas
            for schedule, depth, split_points in self._schedules(mesh):
                counts = legal_microbatches(schedule, mesh.pp, depth, rows) if mesh.pp > 1 else _divisors(rows)
                for count in counts:
                    if self._wanted(rows // count, count):
                        yield Candidate(mesh, schedule, depth, rows // count, count, split_points)

    def _wanted(self, size: int, count: int) -> bool:
        if self.wishes.one_microbatch and count > 1:
            return False
        return self.wishes.microbatch_size in (None, size)

    def _schedules(self, mesh: Mesh) -> Iterator[tuple[str, int, tuple[SplitAt, ...] | None]]:
        """Yield (name, stages a rank, split points if they are pinned)."""
        wished = self.wishes.schedule
        if mesh.pp == 1:
            if self.wishes.split_points is None and wished is None:
                yield "1F1B" if self.program.mode == "train" else "GPipe", 1, None
            return
        for row in SCHEDULES.values():
            if (wished is None and row.torch_class is None) or wished not in (None, row.name):
                continue
            if self.program.mode == "infer" and (row.splits_backward or row.min_stages > 1):
                continue
            if row.splits_backward and mesh.dp_shard > 1 and not self.execution.kept_for_step:
                continue
            if self.wishes.split_points is None:
                depths = (
                    [row.default_stages] if row.max_stages is not None else [d for d in DEPTHS if d >= row.min_stages]
                )
                yield from ((row.name, depth, None) for depth in depths)
                continue
            try:
                split_points = self.wishes.split_points(mesh, row.name)
            except GraphparError as error:
                self.refused[str(error)] = None
                continue
            depth, rest = divmod(len(split_points) + 1, mesh.pp)
            if not rest and row.min_stages <= depth <= (row.max_stages or depth):
                yield row.name, depth, split_points

    # ---- prices ----

    def units(self, mesh: Mesh, rows: int, split_points: tuple[SplitAt, ...] | None = None) -> list[Unit] | None:
        """Return the units of a rank; None where the model can't be sharded so, or can't run microbatches of ``rows``."""
        sharded = self.sharded(mesh, rows)
        if sharded is None:
            return None
        return units_of_ranks(sharded, self.execution, device=self.cluster.device.kind, wanted=split_points or ())

    def sharded(self, mesh: Mesh, rows: int) -> Sharded | None:
        """Return the program of a rank, solved once for each mesh of compute axes; None where there is none."""
        compute = Mesh(**placed_axes(self.program, mesh))
        key = compute, 0 if self.program.symbolic else rows
        if key not in self._sharded:
            try:
                self._sharded[key] = self.solve(compute, self._sizes.get(compute, 1) if self.program.symbolic else rows)
            except GraphparError as error:
                self._sharded[key] = None
                self.refused[str(error)] = None
        return self._sharded[key]

    @cached_property
    def _sizes(self) -> dict[Mesh, int]:
        """For each mesh of compute axes, the middle one of its candidates' microbatch sizes."""
        sizes: dict[Mesh, set[int]] = {}
        for candidate in self.candidates():
            sizes.setdefault(Mesh(**placed_axes(self.program, candidate.mesh)), set()).add(candidate.microbatch_size)
        return {compute: sorted(found)[len(found) // 2] for compute, found in sizes.items()}

    def pricing(self, candidate: Candidate) -> Pricing | None:
        """Return the prices of the candidate's mesh; None where the model can't be sharded over it."""
        mesh, rows, split_points = candidate.mesh, candidate.microbatch_size, candidate.split_points
        key = mesh, 0 if self.program.symbolic else rows, split_points or ()
        if key not in self._pricings:
            units = self.units(mesh, rows, split_points)
            if units is None:
                return None
            train = self.program.mode == "train"
            self._pricings[key] = Pricing(units, mesh, self.cluster, self.execution, dtype=self.dtype, train=train)
        return self._pricings[key]

    def bounded(self, *, all_degrees: bool = False) -> tuple[list[Candidate], int]:
        """Return candidates with their bounds, the most promising first, and how many are impossible.

        Unless ``all_degrees``, tp degrees from the first that makes microbatches no faster are left out: more replicas or stages use
        the devices better. (Such a degree may still be needed for memory.)
        """
        found, impossible = [], 0
        candidates = list(self.candidates())
        degrees = None if all_degrees else self._useful_degrees(candidates)
        for candidate in candidates:
            pricing = self.pricing(candidate) if degrees is None or candidate.mesh.tp in degrees else None
            if pricing is None or len(pricing.units) < candidate.mesh.pp * candidate.stages_per_rank:
                impossible += 1
                continue
            bound = candidate.microbatches * self._microbatch_s(candidate, pricing) / candidate.mesh.pp
            found.append(replace(candidate, bound=bound))
        return sorted(found, key=lambda candidate: (candidate.bound, candidate.key)), impossible

    def _microbatch_s(self, candidate: Candidate, pricing: Pricing) -> float:
        """Return the seconds of a microbatch through all units, forward and backward."""
        whole = pricing.stage_seconds(0, len(pricing.units), candidate.microbatch_size)
        return whole.forward + whole.backward

    def _useful_degrees(self, candidates: Sequence[Candidate]) -> set[int]:
        """Return the tp degrees up to the first that is no faster than smaller ones, for small and large microbatches."""
        sizes = {candidate.microbatch_size for candidate in candidates}
        useful: set[int] = set()
        best = [math.inf, math.inf]
        for degree in sorted({candidate.mesh.tp for candidate in candidates}):
            first = next(candidate for candidate in candidates if candidate.mesh.tp == degree)
            seconds = []
            for size in (min(sizes), max(sizes)) if sizes else ():
                sized = replace(first, microbatch_size=size)
                pricing = self.pricing(sized)
                seconds.append(math.inf if pricing is None else self._microbatch_s(sized, pricing))
            if useful and all(now >= before for now, before in zip(seconds, best)):
                break
            useful.add(degree)
            best = [min(now, before) for now, before in zip(seconds, best)]
        return useful

    def _least_bytes(self, candidate: Candidate) -> float:
        """Return a lower bound of the average rank's bytes, wherever the model is split."""
        pricing = self.pricing(candidate)
        assert pricing is not None
        alive = candidate.microbatches if candidate.schedule in _KEEPS_ALL else 1
        return pricing.bytes.average(candidate.microbatch_size, candidate.microbatches, alive)

    def price(self, candidate: Candidate) -> Priced:
        """Price the candidate with its slowest stage as fast as possible; where that does not fit, as fast as memory allows."""
        pricing = self.pricing(candidate)
        assert pricing is not None
        stages = candidate.mesh.pp * candidate.stages_per_rank
        if candidate.split_points is not None or stages == 1:
            pinned = {unit.split_point: place for place, unit in enumerate(pricing.units)}
            return self._priced(
                candidate, pricing, (0, *sorted(pinned[point] for point in candidate.split_points or ()))
            )
        balancer = self._balancer(candidate, pricing)
        balanced = balancer.balanced(stages)
        assert balanced is not None
        priced = self._priced(candidate, pricing, balanced)
        if priced.fits:
            return priced
        alive = [count / candidate.stages_per_rank for count in pricing.in_flight(priced.layout)]
        ranks = stage_ranks(candidate.schedule, candidate.mesh.pp, candidate.stages_per_rank)
        room = self.cluster.device.memory_bytes / candidate.stages_per_rank
        held = candidate.microbatches if self.execution.hold_messages else 1
        within = balancer.balanced(stages, [alive[rank] for rank in ranks], room, held)
        other = None if within is None else self._priced(candidate, pricing, within)
        return other if other is not None and other.missing < priced.missing else priced

    def exactly(self, priced: Priced) -> Priced:
        """Price again, with every microbatch simulated."""
        pricing = self.pricing(priced.candidate)
        assert pricing is not None
        return self._with_estimate(priced.candidate, pricing, priced.layout, pricing.estimate(priced.layout))

    def _priced(self, candidate: Candidate, pricing: Pricing, starts: tuple[int, ...]) -> Priced:
        layout = Layout(candidate.schedule, candidate.microbatch_size, candidate.microbatches, starts)
        return self._with_estimate(candidate, pricing, layout, pricing.estimate(layout, exact=False))

    def _with_estimate(self, candidate: Candidate, pricing: Pricing, layout: Layout, estimate: Estimate) -> Priced:
        split_points = tuple(
            point for start in layout.starts[1:] if (point := pricing.units[start].split_point) is not None
        )
        sharded = self.sharded(candidate.mesh, candidate.microbatch_size)
        assert sharded is not None
        return Priced(candidate, layout, sharded, split_points, estimate)

    def _balancer(self, candidate: Candidate, pricing: Pricing) -> StageBalancer:
        key = candidate.mesh, candidate.microbatch_size
        if key not in self._balancers:
            self._balancers[key] = StageBalancer(pricing, candidate.microbatch_size)
        return self._balancers[key]

    # ---- the search ----

    def search(self, prune: bool = True) -> SearchResult:
        """Return the fastest candidate that fits. Without ``prune`` all are priced, with the same result."""
        found = self._searched(prune, all_degrees=False)
        return found if found.best is not None else self._searched(prune, all_degrees=True)

    def alone(self) -> Alone:
        """Estimate the whole batch on one device of the cluster; the unsharded program's measurements are reused."""
        device = Cluster(1, 1, self.cluster.device, self.cluster.intra_node, self.cluster.inter_node)
        size = None if self.program.symbolic else self.wishes.microbatch_size  # each other size is a trace
        wishes = replace(self.wishes, schedule=None, split_points=None, microbatch_size=size, check=None)
        run = replace(self.execution, zero=0)
        one = Planner(self.program, device, self.batch, self.solve, {}, wishes, run, self.dtype, shown=1)
        one._sharded = self._sharded
        found = one.search()
        best = found.best or found.alternatives[0]
        estimate = best.estimate
        return Alone(
            str(device),
            estimate.step_time_s,
            best.candidate.microbatch_size,
            max(estimate.peak_memory_bytes),
            estimate.memory_bytes,
        )

    def any_that_fits(self, *, largest: bool = False, tries: int = 40) -> Candidate | None:
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
            if self.price(candidate).fits:
                return candidate
        return None

    def _searched(self, prune: bool, all_degrees: bool) -> SearchResult:
        candidates, impossible = self.bounded(all_degrees=all_degrees)
        best: dict[Mesh, Priced] = {}
        misfits: list[Priced] = []
        hopeless: list[Candidate] = []
        priced_count = 0
        for candidate in candidates:
            slowest_shown = sorted(each.estimate.step_time_s for each in best.values())[self.shown :]
            if prune and slowest_shown and candidate.bound > slowest_shown[0]:
                break
            if prune and candidate.mesh in best and candidate.bound > best[candidate.mesh].estimate.step_time_s:
                continue
            if self._least_bytes(candidate) > self.cluster.device.memory_bytes:
                hopeless.append(candidate)
                continue
            priced = self.price(candidate)
            if not priced.fits:
                misfits.append(priced)
            elif candidate.mesh not in best or priced.rank_key < best[candidate.mesh].rank_key:
                best[candidate.mesh] = priced
            priced_count += 1
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
            refused=tuple(self.refused),
            misfits=self._faster(ranked[0], best, misfits, hopeless) if ranked else (),
        )

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


def _nearest(found: Sequence[Priced]) -> tuple[Priced, ...]:
    """Return the candidate of each mesh that is nearest to fitting, the fastest first."""
    by_mesh: dict[Mesh, Priced] = {}
    for each in sorted(found, key=lambda each: (each.missing, each.rank_key)):
        by_mesh.setdefault(each.candidate.mesh, each)
    return tuple(sorted(by_mesh.values(), key=lambda each: each.rank_key))


def _factorisations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 0:
        if number == 1:
            yield ()
        return
    for divisor in _divisors(number):
        for rest in _factorisations(number // divisor, parts - 1):
            yield (divisor, *rest)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
