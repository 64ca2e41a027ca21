"""``CandidatePrices``: what the plans of a search cost: the prices of each mesh, computed once however many candidates ask for them.

    Candidate ──mesh, rows──► Sharded ──► units of a rank ──► Pricing ──► seconds and bytes of its stages
                                                         └──► StageBalancer, RunBytes: where stages may begin

Placements are searched, lowered and measured once for each mesh of compute axes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from graphpar.cost_models.bf16_estimate import halved
from graphpar.cost_models.estimates import Estimate, Layout
from graphpar.cost_models.execution import Execution
from graphpar.cost_models.flops import dominant_dtype
from graphpar.cost_models.memory import ALLOCATOR_SLACK
from graphpar.cost_models.pipeline_units import Unit
from graphpar.cost_models.pricing import Pricing
from graphpar.cost_models.run_bytes import RunBytes
from graphpar.cost_models.stage_prices import StagePrices
from graphpar.errors import GraphparError
from graphpar.hardware.cluster import Cluster
from graphpar.ir.plan import Plan
from graphpar.ir.program import Chunked, Program
from graphpar.ir.recomputation import gathers_again
from graphpar.operators.parallel_products import ring_products_of
from graphpar.operators.parameter_casts import gather_dtype, read_otherwise
from graphpar.passes.kernel_dropout import with_dropout
from graphpar.passes.loss_chunks import Head, heads_of
from graphpar.passes.normalize.coupled import program_mesh
from graphpar.passes.planning.candidates import Candidate
from graphpar.passes.planning.choose import solve
from graphpar.passes.planning.constraints import exported_precision
from graphpar.passes.planning.planned import sharded_as
from graphpar.passes.planning.recomputation import recomputed_blocks
from graphpar.passes.planning.space import Space
from graphpar.passes.planning.stage_balance import EqualStages, StageBalancer, UnitSavings, balanced
from graphpar.passes.sharding.expert_room import divides_rows
from graphpar.passes.sharding.shard import Sharded, in_chunks
from graphpar.passes.split import positions_of
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.option_kinds import ZERO1_BY, Recompute
from graphpar.runtime.options import Decisions, prefetching
from graphpar.runtime.records import DTYPES
from graphpar.runtime.schedule_records import get_schedule
from graphpar.runtime.state.optimizers import FUSED
from graphpar.schedules.action_table import ActionTable, parse_table
from graphpar.schedules.order import order_of
from graphpar.schedules.registry import action_table
from graphpar.text import plural


class CandidatePrices:
    """The prices of the candidates of ``space``.

    Args:
        like: prices of the same program, whose sharded programs are used on.
        show: is called with what is being solved.
    """

    def __init__(
        self, space: Space, like: CandidatePrices | None = None, show: Callable[[str], None] = lambda text: None
    ) -> None:
        self.space, self.program, self.cluster, self.show = space, space.program, space.cluster, show
        self.dtype = dominant_dtype(self.program)
        self._sharded: dict[tuple[Mesh, int, str], Sharded | None] = {} if like is None else like._sharded
        self._hides: dict[Sharded, bool] = {}
        self._chunked: dict[Sharded, Sharded] = {}
        self._heads: dict[Sharded, list[Head]] = {}
        self._saves: dict[tuple[Sharded, int], bool] = {}
        self._recomputed: dict[tuple[bool, bool], tuple[Mapping[str, str], ...]] = {}
        self._runs: dict[tuple[object, ...], Execution] = {}
        self._pricings: dict[tuple[object, ...], Pricing] = {}
        self._balancers: dict[tuple[object, ...], StageBalancer] = {}
        self._savings: dict[tuple[object, ...], UnitSavings] = {}
        self._equal: dict[StagePrices, EqualStages] = {}
        self._run_bytes: dict[tuple[object, ...], RunBytes] = {}
        self._alive: dict[tuple[object, ...], tuple[float, ...]] = {}
        self._together: dict[tuple[object, ...], tuple[float, ...]] = {}

    def recomputed(self, candidate: Candidate) -> tuple[Mapping[str, str], ...]:
        """Return for each kind of recomputation that a candidate may use that of each block, by path."""
        key = candidate.overlap_tp, self._in_chunks(candidate)
        if key not in self._recomputed:
            self._recomputed[key] = tuple(recomputed_blocks(self.program, kind) for kind, _ in self.kinds(candidate))
        return self._recomputed[key]

    def kinds(self, candidate: Candidate) -> list[tuple[Recompute, bool]]:
        """Return what a candidate's units may keep, the most first: the kind of recomputation of their blocks, and whether heads and losses
        are computed in chunks of tokens."""
        first, *others = self.space.kinds_beside(candidate.overlap_tp)
        chunks = self._in_chunks(candidate)
        return [(first, False), *([(first, True)] if chunks else []), *((kind, chunks) for kind in others)]

    def _in_chunks(self, candidate: Candidate) -> bool:
        """Whether heads and losses take less memory in chunks of tokens, and may."""
        rows = candidate.microbatch_size
        sharded = None if self.space.pins.loss_chunk is not None else self.sharded(candidate.mesh, rows)
        if sharded is None:
            return False
        if sharded not in self._heads:
            self._heads[sharded] = heads_of(sharded.local)
        if (sharded, rows) not in self._saves:
            self._saves[sharded, rows] = any(head.saves(rows) for head in self._heads[sharded])
        return self._saves[sharded, rows]

    def chunked(self, sharded: Sharded) -> Sharded:
        """Return the program of a rank with its heads and losses in chunks."""
        if sharded not in self._chunked:
            self._chunked[sharded] = in_chunks(sharded, min(head.chunk for head in self._heads[sharded]))
        return self._chunked[sharded]

    def chosen(self, candidate: Candidate, choices: Sequence[int]) -> Sharded:
        """Return the program of a rank whose units keep what ``choices`` say, numbers of :meth:`kinds`."""
        sharded, kinds = self.sharded(candidate.mesh, candidate.microbatch_size), self.kinds(candidate)
        assert sharded is not None
        units = self.mixed(candidate, choices).units if any(choices) else ()
        calls = (node for unit, kind in zip(units, choices) if kinds[kind][1] for node in unit.stage.graph.nodes)
        return self.chunked(sharded) if any(isinstance(node.target, Chunked) for node in calls) else sharded

    def units(self, candidate: Candidate, run: Execution | None = None, kind: int = 0) -> list[Unit] | None:
        """Return the units of a rank that runs a candidate as ``run`` says; None where the model can't be sharded so, can't run such
        microbatches, has no collectives that products could hide, or no rows of experts that ``expert_room`` is for."""
        sharded = self.sharded(candidate.mesh, candidate.microbatch_size)
        beside = candidate.overlap_tp and self.space.pins.overlap_tp is None
        if sharded is None or (beside and not self._can_hide(sharded)):
            return None
        if self.space.pins.expert_room is not None and not divides_rows(sharded.local):
            self.space.refused["expert_room is room for rows of experts that are divided over ranks"] = None
            return None
        how, chunked = self.kinds(candidate)[kind]
        if gathers_again(how) and program_mesh(self.program, candidate.mesh).size == 1:
            kind = 0  # nothing is gathered
        sharded = self.chunked(sharded) if chunked else sharded
        run = replace(run or self.run_of(candidate), blocks=tuple(self.recomputed(candidate)[kind].items()))
        return sharded.units.of(run, device=self.cluster.device.kind, required=candidate.split_points or ())

    def _can_hide(self, sharded: Sharded) -> bool:
        """Whether products can hide collectives of a rank's program."""
        if sharded not in self._hides:
            graphs = sharded.local.graph, *(block.graph for block in sharded.local.blocks.values())
            self._hides[sharded] = any(ring_products_of(node) for graph in graphs for node in graph.nodes)
        return self._hides[sharded]

    def sharded(self, mesh: Mesh, rows: int) -> Sharded | None:
        """Return the program of a rank, solved once for each mesh of compute axes; None where there is none."""
        compute = program_mesh(self.program, mesh)
        key = compute, 0 if self.program.symbolic else rows, self.program.dropout
        if key not in self._sharded:
            self.show(f"planning: sharding over {compute}" if compute.size > 1 else "planning: one device")
            try:
                size = self.space.middle_size(compute) if self.program.symbolic else rows
                pins = self.space.pins
                self._sharded[key] = solve(
                    self.program,
                    compute,
                    size,
                    1,
                    pins.shard_plan,
                    self.cluster,
                    pins.sp,
                    pins.loss_parallel,
                    pins.loss_chunk or 0,
                    pins.expert_room,
                )
            except GraphparError as error:
                self._sharded[key] = None
                self.space.refused[str(error)] = None
        return self._sharded[key]

    def is_solved(self, candidate: Candidate) -> bool:
        """Whether :meth:`sharded` has been asked for the candidate's compute axes, at any size of microbatches."""
        compute = program_mesh(self.program, candidate.mesh)
        return compute.size == 1 or any(mesh == compute for mesh, *_ in self._sharded)

    def run_of(self, candidate: Candidate) -> Execution:
        """Say how ranks run a candidate, but for what they recompute."""
        state, joined = (candidate.zero, candidate.reshard), self._joined(candidate)
        key = candidate.mesh.pp, state, candidate.overlap_tp, candidate.compile, joined
        if key not in self._runs:
            given = replace(self.space.pins, **candidate.decisions)
            run = execution_of(self.program, given, candidate.mesh.pp, self.cluster, self._gather_bytes)
            self._runs[key] = replace(run, joined=joined)
        return self._runs[key]

    @cached_property
    def _gather_bytes(self) -> int | None:
        return gather_bytes(self.program)

    @staticmethod
    def _joined(candidate: Candidate) -> bool:
        """Whether collectives and products are one function: not where a schedule runs the halves of backwards apart."""
        return not get_schedule(candidate.schedule).splits_backward

    def pricing(self, candidate: Candidate, kind: int = 0) -> Pricing | None:
        """Return the prices of the candidate's mesh, where all units recompute as ``kind`` says; None where the model can't be
        sharded over it."""
        key = self._key(candidate, kind)
        if key not in self._pricings:
            run = self.run_of(candidate)
            units = self.units(candidate, run, kind)
            if units is None:
                return None
            self._pricings[key] = Pricing(
                units, candidate.mesh, self.cluster, run, dtype=self.dtype,
                train=self.program.mode == "train", like=next(iter(self._pricings.values()), None),
            )  # fmt: skip
        return self._pricings[key]

    def level(self, candidate: Candidate) -> int:
        """Return the lowest ZeRO level at which all prices are those of the candidate: 2 also for 3 where a pipeline gathers parameters
        for a whole step as they are read, and devices store the shards."""
        whole = candidate.zero == 3 and candidate.mesh.pp > 1 and candidate.reshard == "default"
        same = whole and self._gather_bytes is not None and "params" not in (self.space.pins.offload or ())
        return 2 if same else candidate.zero

    def _key(self, candidate: Candidate, kind: int) -> tuple[object, ...]:
        size = 0 if self.program.symbolic else candidate.microbatch_size
        state = self.level(candidate), candidate.reshard
        how = self._joined(candidate), candidate.overlap_tp, kind > 0 and self._in_chunks(candidate)
        return candidate.mesh, state, size, candidate.split_points, kind, how

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

    def measured(self, candidate: Candidate) -> dict[str, tuple[Unit, ...]]:
        """Return the units of each kind of recomputation for all blocks that was measured, by its name."""
        found = {}
        for kind, (how, chunks) in enumerate(self.kinds(candidate)):
            pricing = self._pricings.get(self._key(candidate, kind))
            if pricing is not None and all(unit.kind.is_measured for unit in pricing.units):
                found[f"{how}, heads in chunks" if chunks else str(how)] = pricing.units
        return found

    def balancer(self, candidate: Candidate) -> StageBalancer:
        """Return what places the stages of the candidate's mesh."""
        state, rows = (self.level(candidate), candidate.reshard), candidate.microbatch_size
        key = candidate.mesh, state, rows, candidate.split_points, self._joined(candidate), candidate.overlap_tp
        if key not in self._balancers:
            pricing = self.known(candidate)
            savings = [self.savings(candidate, rank) for rank in range(candidate.mesh.pp)]
            self._balancers[key] = StageBalancer(pricing.bytes.fixed_runs, savings)
        return self._balancers[key]

    def savings(self, candidate: Candidate, rank: int | None = None) -> UnitSavings:
        """Return what the units of the candidate's mesh may recompute; it is that of every mesh with equal units and groups. ``rank``: on
        devices of a pp rank, where there are several kinds; None: at best.
        """
        compute, rows = program_mesh(self.program, candidate.mesh), candidate.microbatch_size
        groups, how = self.known(candidate).groups, (self._joined(candidate), candidate.overlap_tp)
        on = None if rank is None or not self.cluster.groups else self.known(candidate).kinds_of_ranks[rank]
        key = compute, groups, rows, candidate.split_points, how, on
        if key not in self._savings:

            def pricing(kind: int) -> Pricing:
                found = self.known(candidate, kind)
                return found if on is None or rank is None else found.on(rank)

            running = functools.partial(self._running, candidate)
            self._savings[key] = UnitSavings(len(self.recomputed(candidate)), pricing, running, rows)
        return self._savings[key]

    def balanced(self, candidate: Candidate, stages: int) -> tuple[int, ...]:
        """Return the first unit of each of so many stages, memory aside."""
        pricing, tables = self.known(candidate), []
        for rank in pricing.ranks_of(candidate.schedule, stages):
            prices = pricing.on(rank).stage_prices(candidate.microbatch_size)
            if prices not in self._equal:
                self._equal[prices] = EqualStages(prices)
            tables.append(self._equal[prices])
        found = balanced(tables)
        assert found is not None
        return found

    def _running(self, candidate: Candidate, kind: int) -> RunBytes:
        """Return the bytes of every run of units that depend on the microbatch; they are those of every mesh with equal units."""
        compute, rows = program_mesh(self.program, candidate.mesh), candidate.microbatch_size
        key = compute, rows, candidate.split_points, kind, candidate.overlap_tp
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

    def rooms(self, pricing: Pricing) -> list[float]:
        """Return the bytes of the device of each pp rank, and what tables of runs count twice."""
        return [pricing.bytes.room(room) for room in pricing.rooms]

    def missing(self, pricing: Pricing, layout: Layout, *, halves: bool = True) -> list[int]:
        """Return by how many bytes each rank exceeds a device; not positive where it fits. ``halves``: see :meth:`Pricing.totals`."""
        return [nbytes - room for nbytes, room in zip(pricing.totals(layout, halves=halves), pricing.rooms)]

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


def gather_bytes(program: Program) -> int | None:
    """Return the bytes of an element of the parameters that are gathered; None: those of each parameter's own dtype."""
    gathered = gather_dtype(program, program.parameters.keys() - read_otherwise(program))
    return None if gathered is None else gathered.itemsize


def execution_of(program: Program, given: Decisions, pp: int, cluster: Cluster, gathered: int | None) -> Execution:
    """Say how ranks run ``program`` over ``pp`` stages as decided, but for what they recompute; what is gathered before a unit computes
    stays beside it. Where devices are their own hosts nothing is offloaded. ``gathered``: :func:`gather_bytes` of it."""
    prefetch, distance = prefetching(pp, given.zero, given.reshard, given.prefetch, given.prefetch_distance)
    return Execution(
        gather_bytes=gathered,
        reduce_bytes=None if given.reduce_dtype is None else DTYPES[given.reduce_dtype].itemsize,
        copies_gradients=True,
        halves=True,
        joined=True,
        travelling=True,
        optimizer=program.optimizer,
        zero=given.zero,
        zero1_by=given.zero1_by or ZERO1_BY[0],
        reshard=given.reshard,
        units=given.units,
        prefetch=prefetch != "none",
        gathered={"pre": 1 + distance, "post": distance}.get(prefetch or "", 1),
        rings=bool(given.overlap_tp),
        offload=() if cluster.device.kind == "cpu" else given.offload or (),
        compiled=bool(given.compile),
        communicator_bytes=cluster.device.communicator_bytes or 0,
        foreach=cluster.device.kind == "cuda" and program.optimizer.name not in FUSED,
        one_by_one=cluster.device.kind == "cpu",
    )


# ---- a given plan ----------------------------------------------------------------------------------------------


def estimate_plan(program: Program, plan: Plan, cluster: Cluster, execution: Execution | None = None) -> Estimate:
    """Estimate a step of ``plan`` on ``cluster``, executed as the emitted program does unless ``execution`` says otherwise.

    Raises:
        GraphparError: the cluster has another number of devices.
    """
    pricing, layout = pricing_of(program, plan, cluster, execution)
    return pricing.estimate(layout)


def pricing_of(
    program: Program, plan: Plan, cluster: Cluster, execution: Execution | None = None
) -> tuple[Pricing, Layout]:
    """Return the prices of the plan's mesh and sharding, and its layout in stages; of an fp32 program in bf16 as estimated from its
    operators in fp32, seconds alone.

    Raises:
        GraphparError: the cluster has another number of devices.
    """
    program = with_dropout(program, plan.dropout)
    if cluster.size != plan.mesh.size:
        raise GraphparError(
            f"The plan is for {plural(plan.mesh.size, 'device')}, but the cluster {cluster} has {cluster.size}; give a cluster of as many "
            "devices as the plan, or a mesh of as many as the cluster."
        )
    execution = execution or execution_of(program, plan, plan.mesh.pp, cluster, gather_bytes(program))
    run = replace(execution, blocks=tuple(recomputed_blocks(program, plan.recompute).items()))
    sharded = sharded_as(program, plan)
    local = sharded.local
    units = sharded.units.of(run, device=cluster.device.kind, required=plan.split_points)
    places = {unit.position: place for place, unit in enumerate(units)}
    starts = (0, *(places[position] for position in positions_of(local, plan.split_points)))
    order = None if plan.actions is None else order_of(table_of(plan))
    layout = Layout(plan.schedule, plan.microbatch_size, plan.microbatches, starts, order)
    train = local.mode == "train"
    dtype = dominant_dtype(local)
    if plan.dtype == "bf16" != exported_precision(program).dtype and dtype == "fp32":
        units, dtype = halved(units), plan.dtype
    return Pricing(units, plan.mesh, cluster, run, dtype=dtype, train=train), layout


def in_bf16_s(program: Program, plan: Plan, cluster: Cluster) -> float | None:
    """Estimate the seconds of a step of an fp32 plan in bf16; None for other dtypes, or where the device is no faster in bf16."""
    device = cluster.device
    if dominant_dtype(sharded_as(program, plan).local) != "fp32" or not device.faster_in_bf16:
        return None
    pricing, layout = pricing_of(program, replace(plan, dtype="bf16"), cluster)
    return pricing.step_s(layout)


def table_of(plan: Plan) -> ActionTable:
    """Return the actions of the plan's ranks: its own table, its schedule's, or one microbatch after the other without a pipeline."""
    if plan.actions is not None:
        return parse_table("\n".join(",".join(row) for row in plan.actions))
    if plan.mesh.pp == 1:
        return parse_table(",".join(f"0F{number},0B{number}" for number in range(plan.microbatches)))
    return action_table(plan.schedule, plan.mesh.pp, plan.stages_per_rank, plan.microbatches)
