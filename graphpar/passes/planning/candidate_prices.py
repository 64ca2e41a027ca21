"""``CandidatePrices``: what the plans of a search cost: the prices of each mesh, computed once however many candidates ask for them.

    Candidate ──mesh, rows──► Sharded ──► units of a rank ──► Pricing ──► seconds and bytes of its stages
                                                         └──► StageBalancer, RunBytes: where stages may begin

Placements are searched, lowered and measured once for each mesh of compute axes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from graphpar.cost_models.estimates import Layout
from graphpar.cost_models.execution import Execution
from graphpar.cost_models.memory import ALLOCATOR_SLACK
from graphpar.cost_models.pipeline_units import Unit
from graphpar.cost_models.pricing import Pricing
from graphpar.cost_models.stage_prices import StagePrices
from graphpar.cost_models.unit_bytes import RunBytes
from graphpar.errors import GraphparError
from graphpar.ir.recomputation import GATHERS
from graphpar.ir.split_points import SplitAt
from graphpar.passes.normalize.coupled import program_mesh
from graphpar.passes.planning.candidates import Candidate
from graphpar.passes.planning.measured_units import units_of_ranks
from graphpar.passes.planning.recomputation import recomputed_blocks
from graphpar.passes.planning.space import Space
from graphpar.passes.planning.stage_balance import EqualStages, StageBalancer, UnitSavings
from graphpar.passes.sharding.shard import Sharded
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.options import prefetching
from graphpar.schedules.registry import get_schedule


class CandidatePrices:
    """The prices of the candidates of ``space``.

    Args:
        solve: from compute axes and a microbatch size to placements and the program of a rank.
        execution: how ranks run, apart from what candidates say.
        like: prices of the same program, whose sharded programs are used on.
        show: is called with what is being solved.
    """

    def __init__(
        self,
        space: Space,
        solve: Callable[[Mesh, int], Sharded],
        execution: Execution,
        dtype: str,
        like: CandidatePrices | None = None,
        show: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.space, self.solve, self.execution, self.dtype, self.show = space, solve, execution, dtype, show
        self.program, self.cluster = space.program, space.cluster
        self._sharded: dict[tuple[Mesh, int], Sharded | None] = {} if like is None else like._sharded
        self._units: dict[tuple[object, ...], list[Unit]] = {}
        self._pricings: dict[tuple[object, ...], Pricing] = {}
        self._balancers: dict[tuple[object, ...], StageBalancer] = {}
        self._savings: dict[tuple[object, ...], UnitSavings] = {}
        self._equal: dict[StagePrices, EqualStages] = {}
        self._run_bytes: dict[tuple[object, ...], RunBytes] = {}
        self._alive: dict[tuple[object, ...], tuple[float, ...]] = {}
        self._together: dict[tuple[object, ...], tuple[float, ...]] = {}

    @functools.cached_property
    def recomputed(self) -> tuple[Mapping[str, str], ...]:
        """For each kind of recomputation that candidates may use, that of each block, by path."""
        return tuple(recomputed_blocks(self.program, kind) for kind in self.space.wishes.recompute)

    def units(
        self,
        mesh: Mesh,
        rows: int,
        run: Execution,
        split_points: tuple[SplitAt, ...] | None = None,
        kind: int = 0,
    ) -> list[Unit] | None:
        """Return the units of a rank that runs as ``run`` says; None where the model can't be sharded so, or can't run microbatches of
        ``rows``."""
        sharded = self.sharded(mesh, rows)
        if sharded is None:
            return None
        if self.space.wishes.recompute[kind] == GATHERS and program_mesh(self.program, mesh).size == 1:
            kind = 0  # nothing is gathered
        key = id(sharded), split_points, kind, run.recasts, run.joined
        if key not in self._units:
            run = replace(run, blocks=tuple(self.recomputed[kind].items()))
            self._units[key] = units_of_ranks(sharded, run, device=self.cluster.device.kind, wanted=split_points or ())
        return self._units[key]

    def sharded(self, mesh: Mesh, rows: int) -> Sharded | None:
        """Return the program of a rank, solved once for each mesh of compute axes; None where there is none."""
        compute = program_mesh(self.program, mesh)
        key = compute, 0 if self.program.symbolic else rows
        if key not in self._sharded:
            self.show(f"planning: sharding over {compute}" if compute.size > 1 else "planning: one device")
            try:
                self._sharded[key] = self.solve(
                    compute, self.space.middle_size(compute) if self.program.symbolic else rows
                )
            except GraphparError as error:
                self._sharded[key] = None
                self.space.refused[str(error)] = None
        return self._sharded[key]

    @property
    def solved(self) -> list[Sharded]:
        """The programs of a rank that were made so far."""
        return [sharded for sharded in self._sharded.values() if sharded is not None]

    def is_solved(self, candidate: Candidate) -> bool:
        """Whether :meth:`sharded` has been asked for the candidate's compute axes, at any size of microbatches."""
        compute = program_mesh(self.program, candidate.mesh)
        return compute.size == 1 or any(mesh == compute for mesh, _ in self._sharded)

    def run_of(self, candidate: Candidate) -> Execution:
        """Say how ranks run a candidate, but for what they recompute."""
        wished = self.space.wishes.prefetch, self.space.wishes.prefetch_distance
        prefetch = prefetching(candidate.mesh.pp, candidate.zero, candidate.reshard, *wished)
        how = gathering(candidate.zero, candidate.reshard, *prefetch)
        return replace(self.execution, joined=self._joined(candidate), **how)

    def _joined(self, candidate: Candidate) -> bool:
        """Whether collectives and products are one function: not where a schedule runs the halves of backwards apart."""
        return self.execution.joined and not get_schedule(candidate.schedule).splits_backward

    def pricing(self, candidate: Candidate, kind: int = 0) -> Pricing | None:
        """Return the prices of the candidate's mesh, where all units recompute as ``kind`` says; None where the model can't be
        sharded over it."""
        mesh, rows, split_points = candidate.mesh, candidate.microbatch_size, candidate.split_points
        size = 0 if self.program.symbolic else rows
        key = mesh, candidate.zero, candidate.reshard, size, split_points, kind, self._joined(candidate)
        if key not in self._pricings:
            run = self.run_of(candidate)
            units = self.units(mesh, rows, run, split_points, kind)
            if units is None:
                return None
            self._pricings[key] = Pricing(
                units, mesh, self.cluster, run, dtype=self.dtype,
                train=self.program.mode == "train", like=next(iter(self._pricings.values()), None),
            )  # fmt: skip
        return self._pricings[key]

    def known(self, candidate: Candidate, kind: int = 0) -> Pricing:
        """Return :meth:`pricing` of a candidate that is known to have prices."""
        pricing = self.pricing(candidate, kind)
        assert pricing is not None
        return pricing

    def mixed(self, candidate: Candidate, choices: Sequence[int]) -> Pricing:
        """Return the prices where each unit recomputes as its own kind says."""
        pricing = self.known(candidate)
        if not any(choices):
            return pricing
        units = {kind: self.known(candidate, kind).units for kind in set(choices)}
        return pricing.with_units([units[kind][place] for place, kind in enumerate(choices)])

    def balancer(self, candidate: Candidate) -> StageBalancer:
        """Return what places the stages of the candidate's mesh."""
        state, rows = (candidate.zero, candidate.reshard), candidate.microbatch_size
        key = candidate.mesh, state, rows, candidate.split_points, self._joined(candidate)
        if key not in self._balancers:
            self._balancers[key] = StageBalancer(self.known(candidate).bytes.fixed_runs, self.savings(candidate))
        return self._balancers[key]

    def savings(self, candidate: Candidate) -> UnitSavings:
        """Return what the units of the candidate's mesh may recompute; it is that of every mesh with equal units and groups."""
        compute, rows = program_mesh(self.program, candidate.mesh), candidate.microbatch_size
        key = compute, self.known(candidate).groups, rows, candidate.split_points, self._joined(candidate)
        if key not in self._savings:
            pricing = functools.partial(self.known, candidate)
            running = functools.partial(self._running, candidate)
            self._savings[key] = UnitSavings(len(self.recomputed), pricing, running, rows)
        return self._savings[key]

    def balanced(self, candidate: Candidate, stages: int) -> tuple[int, ...]:
        """Return the first unit of each of so many stages, memory aside."""
        prices = self.known(candidate).stage_prices(candidate.microbatch_size)
        if prices not in self._equal:
            self._equal[prices] = EqualStages(prices)
        found = self._equal[prices].balanced(stages)
        assert found is not None
        return found

    def _running(self, candidate: Candidate, kind: int) -> RunBytes:
        """Return the bytes of every run of units that depend on the microbatch; they are those of every mesh with equal units."""
        compute, rows = program_mesh(self.program, candidate.mesh), candidate.microbatch_size
        key = compute, rows, candidate.split_points, kind
        if key not in self._run_bytes:
            self._run_bytes[key] = RunBytes.of(self.known(candidate, kind).units, rows)
        return self._run_bytes[key]

    def alive_on(self, candidate: Candidate, pricing: Pricing) -> tuple[float, ...]:
        """Return the microbatches in flight on each stage."""
        stages = candidate.mesh.pp * candidate.stages_per_rank
        key = candidate.schedule, candidate.mesh.pp, stages, candidate.microbatches
        if key not in self._alive:
            starts = tuple(range(stages))
            layout = Layout(candidate.schedule, candidate.microbatch_size, candidate.microbatches, starts)
            self._alive[key] = pricing.in_flight(layout)
        return self._alive[key]

    def kept_together(self, candidate: Candidate, pricing: Pricing) -> tuple[float, ...]:
        """Return for each rank a number of microbatches of which it keeps those of all its stages at one time."""
        stages = candidate.mesh.pp * candidate.stages_per_rank
        key = candidate.schedule, candidate.mesh.pp, stages, candidate.microbatches
        if key not in self._together:
            layout = Layout(candidate.schedule, candidate.microbatch_size, candidate.microbatches, tuple(range(stages)))
            self._together[key] = pricing.kept_together(layout)
        return self._together[key]

    def messages(self, candidate: Candidate) -> int:
        """Return how many microbatches of messages between stages are kept."""
        return candidate.microbatches if self.execution.hold_messages else 1

    def room(self, pricing: Pricing) -> float:
        """Return the bytes of a device, and what tables of runs count twice."""
        return self.cluster.device.memory_bytes + pricing.bytes.counted_twice

    def missing(self, pricing: Pricing, layout: Layout) -> list[int]:
        """Return by how many bytes each rank exceeds a device; not positive where it fits."""
        room = self.cluster.device.memory_bytes
        return [nbytes - room for nbytes in pricing.totals(layout)]

    def on_top(self, candidate: Candidate, pricing: Pricing, layout: Layout) -> list[float]:
        """Return the bytes that each rank needs on top of what is kept, with the first kind."""
        savings, stages = self.savings(candidate), pricing.stages_of(layout)
        return [max(savings.on_top(*stages[place]) for place in places) for places in pricing.places(layout)]

    def alive_by_rank(self, candidate: Candidate, pricing: Pricing, layout: Layout) -> list[dict[int, float]]:
        """Return for each rank and each of its units how many microbatches it keeps, with the allocator's overhead."""
        stages, alive = pricing.stages_of(layout), self.alive_on(candidate, pricing)
        return [
            {unit: (1 + ALLOCATOR_SLACK) * alive[place] for place in places for unit in range(*stages[place])}
            for places in pricing.places(layout)
        ]

    @staticmethod
    def chosen_in_memory(candidate: Candidate) -> bool:
        """Whether stages may begin elsewhere where memory is short: where a rank has several, they are as equal as units allow."""
        return candidate.mesh.pp > 1 and candidate.stages_per_rank == 1 and candidate.split_points is None

    def starts(self, candidate: Candidate) -> tuple[int, ...]:
        """Return the first unit of each stage, memory aside."""
        if candidate.split_points is not None:
            pinned = {unit.split_point: place for place, unit in enumerate(self.known(candidate).units)}
            return (0, *sorted(pinned[point] for point in candidate.split_points))
        stages = candidate.mesh.pp * candidate.stages_per_rank
        return (0,) if stages == 1 else self.balanced(candidate, stages)


def gathering(zero: int, reshard: str | int, prefetch: str | None, distance: int) -> dict[str, Any]:
    """Return the fields of an execution that say how state is sharded and gathered."""
    gathered = {"pre": 1 + distance, "post": distance}.get(prefetch or "", 1)
    return {"zero": zero, "reshard": reshard, "prefetch": prefetch != "none", "gathered": gathered}
