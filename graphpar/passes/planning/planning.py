"""Search a plan for a program, a cluster and the user's pins; estimate a given plan.

pins ──PlannerConstraints──► Planner ──► the fastest that fits ──choose──► Plan, with its Estimate and the alternatives
plan ──units, layout──► Estimate
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from graphpar.cost_models.bf16_estimate import halved
from graphpar.cost_models.estimates import Alone, Estimate, Layout
from graphpar.cost_models.execution import Execution
from graphpar.cost_models.flops import dominant_dtype
from graphpar.cost_models.pricing import Pricing
from graphpar.errors import GraphparError, NothingFits
from graphpar.hardware.cluster import Cluster
from graphpar.ir.plan import Plan
from graphpar.ir.program import Program
from graphpar.ir.split_points import SplitAt
from graphpar.operators.parallel_products import ring_products_of
from graphpar.operators.parameter_casts import gather_dtype
from graphpar.passes.kernel_dropout import with_dropout, writes_out_dropout
from graphpar.passes.planning.candidate_prices import gathering
from graphpar.passes.planning.candidates import PlannerConstraints, Priced, SearchResult
from graphpar.passes.planning.choose import choose, coupling_reason, global_batch, pinned_split_points, solve
from graphpar.passes.planning.constraints import PlanConstraints, check_on_mesh
from graphpar.passes.planning.joint_search import search_together
from graphpar.passes.planning.measured_units import units_of_ranks
from graphpar.passes.planning.oom_suggestions import GROWTH, remedies
from graphpar.passes.planning.planner import Planner
from graphpar.passes.planning.recomputation import least_first, recomputed_blocks
from graphpar.passes.planning.space import free_axes
from graphpar.passes.planning.split_points import marked_split_points
from graphpar.passes.sharding.planned import sharded_as
from graphpar.passes.sharding.shard import Sharded
from graphpar.passes.split import positions_of
from graphpar.runtime.kernel_dropout import KERNEL
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.modes import GENERATE
from graphpar.runtime.option_kinds import AUTO, SHOWN, Recompute
from graphpar.runtime.plan_record import DTYPES
from graphpar.schedules.order import order_of
from graphpar.schedules.registry import action_table, canonical_name
from graphpar.schedules.table import ActionTable, parse_table
from graphpar.text import bytes_text, seconds_text


def search_plan(
    program: Program,
    cluster: Cluster,
    pinned: Mapping[str, int],
    pins: PlanConstraints,
    show: Callable[[str], None] | None = None,
) -> Plan:
    """Return the fastest plan that fits ``cluster``, with ``pins.top`` alternatives; axes that are not ``pinned`` are searched.

    After ``pins.time_limit`` seconds the best so far is returned, with its gap; ``show`` is called with what the search is at.

    Raises:
        GraphparError: the pins can't be met, or nothing fits.
    """
    pins = replace(pins, cluster=cluster)
    planner = planner_for(program, cluster, pinned, pins, show=show)
    rings, found = _searched(program, cluster, pinned, pins, planner, show)
    if found.best is None and not found.alternatives:
        rest = cluster.size // math.prod(pinned.values())
        free = free_axes(pinned, pins.zero, program.mode)
        one = ["dp_shard"] if pins.zero and "dp_shard" in free else free[:1]
        asked = replace(pins, recompute=planner.wishes.recompute[0])
        mesh = Mesh.resolve(dict.fromkeys(one, rest) | dict(pinned), cluster.size)
        choose(program, mesh, asked)  # raises where the pins are wrong
        reasons = "; ".join(found.refused) or "no mesh divides its batch and its modules"
        raise GraphparError(f"{program.name} can't be laid out on {cluster}: {reasons}.")
    if found.best is None:
        raise NothingFits(_misfit(program, cluster, pinned, pins, found, planner))
    pins = replace(pins, overlap_tp=rings)
    best = found.best
    assert best is not None
    decided = replace(
        pins,
        schedule=best.candidate.schedule,
        microbatch_size=best.candidate.microbatch_size,
        split_points=best.split_points if best.candidate.mesh.pp > 1 else None,
        stages=None,
        layers_per_stage=None,
        edge_layers=None,
        zero=best.candidate.zero,
        reshard=best.candidate.reshard,
        recompute=best.recompute,
        sharded=best.sharded,
    )
    alone = planner.alone() if cluster.size > 1 and program.symbolic else None
    return replace(choose(program, best.candidate.mesh, decided), predicted=best.estimate, found=found, alone=alone)


def _searched(
    program: Program,
    cluster: Cluster,
    pinned: Mapping[str, int],
    pins: PlanConstraints,
    planner: Planner,
    show: Callable[[str], None] | None,
) -> tuple[bool | None, SearchResult]:
    """Return whether collectives of tp run beside products, and what ``planner`` found, or one with these: the faster of both.

    Where it is not pinned both are searched, each no further than the other's fastest plan allows.
    """

    def wins(number: int, priced: Priced) -> bool:
        return number == 0 or priced.candidate.mesh.tp <= cluster.devices_per_node

    begun, asked = planner.begun(), pins.overlap_tp is None
    if not (asked and _hides(cluster, planner)):
        found = planner.ended(begun)
        if found.best is None or not (asked and _hides(cluster, planner)):  # a degree that was sharded later may
            return pins.overlap_tp, found
        begun = planner.begun()
    beside = planner_for(program, cluster, pinned, replace(pins, overlap_tp=True), planner, show)
    beside.space.lies_in(planner.space)
    number, found = search_together([(planner, begun), (beside, beside.begun())], wins)
    rings = pins.overlap_tp if number == 0 or found.best is None else found.best.candidate.mesh.tp > 1
    return rings, found


def _hides(cluster: Cluster, planner: Planner) -> bool:
    """Whether products could hide collectives of a program that ``planner`` placed: a CPU sends and multiplies in turn."""
    graphs = [
        graph
        for sharded in planner.prices.solved
        for graph in (sharded.local.graph, *(block.graph for block in sharded.local.blocks.values()))
    ]
    return cluster.device.kind != "cpu" and any(ring_products_of(node) for graph in graphs for node in graph.nodes)


def planner_for(
    program: Program,
    cluster: Cluster,
    pinned: Mapping[str, int],
    pins: PlanConstraints,
    like: Planner | None = None,
    show: Callable[[str], None] | None = None,
) -> Planner:
    """Return a planner that searches what ``pinned`` and ``pins`` leave open; with the sharded programs of ``like``, if given."""
    batch = global_batch(program, pins)
    reason = coupling_reason(program, pins)

    def solved(mesh: Mesh, rows: int) -> Sharded:
        return solve(program, mesh, rows, 1, pins.shard_plan, cluster)

    def split_points_for(mesh: Mesh, schedule: str) -> tuple[SplitAt, ...]:
        given = pinned_split_points(program, mesh, replace(pins, schedule=schedule))
        assert given is not None
        positions_of(program, given)
        return given

    wishes = PlannerConstraints(
        schedule=canonical_name(pins.schedule) if pins.schedule else None,
        microbatch_size=pins.microbatch_size,
        split_points=split_points_for if _has_split_points(program, pins) else None,
        one_microbatch=reason is not None,
        zero=pins.zero,
        reshard=pins.reshard,
        prefetch=pins.prefetch,
        prefetch_distance=pins.prefetch_distance,
        recompute=_able(program, pins) if pins.recompute == AUTO else (pins.recompute or "none",),
        whole_backwards=bool(pins.compile),
        check=lambda mesh, zero, reshard: check_on_mesh(mesh, replace(pins, zero=zero, reshard=reshard), program),
    )
    moved = moved_on(cluster, pins.offload or ())
    execution = replace(
        _execution(program, reduce_dtype=pins.reduce_dtype),
        rings=bool(pins.overlap_tp), offload=moved, compiled=bool(pins.compile),
    )  # fmt: skip
    dtype = dominant_dtype(program)
    top = SHOWN if pins.top is None else pins.top
    return Planner(program, cluster, batch, solved, pinned, wishes, execution, dtype, top, like, pins.time_limit, show)


def _able(program: Program, pins: PlanConstraints) -> tuple[Recompute, ...]:
    """Return the kinds of recomputation that all blocks of ``program`` can do, the least first."""
    kinds = least_first(program, bool(pins.compile), bool(pins.overlap_tp), pins.offload)
    try:
        recomputed_blocks(program, kinds[-1])
    except GraphparError:
        return ("none",)
    return kinds


def _has_split_points(program: Program, pins: PlanConstraints) -> bool:
    given = (pins.split_points, pins.stages, pins.layers_per_stage, pins.edge_layers, marked_split_points(program))
    return any(each is not None for each in given)


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
    """Return the prices of the plan's mesh and sharding, and its layout in stages.

    Raises:
        GraphparError: the cluster has another number of devices.
    """
    program = with_dropout(program, plan.dropout)
    if cluster.size != plan.mesh.size:
        raise GraphparError(f"The plan is for {plan.mesh.size} devices, but the cluster {cluster} has {cluster.size}.")
    if execution is None:
        shared = plan.zero, plan.reshard, plan.prefetch, plan.prefetch_distance, plan.reduce_dtype
        moved = moved_on(cluster, plan.offload)
        execution = replace(_execution(program, *shared), rings=plan.overlap_tp, offload=moved, compiled=plan.compile)
    run = replace(execution, blocks=tuple(recomputed_blocks(program, plan.recompute).items()))
    sharded = sharded_as(program, plan)
    local = sharded.local
    units = units_of_ranks(sharded, run, device=cluster.device.kind, wanted=plan.split_points)
    places = {unit.position: place for place, unit in enumerate(units)}
    starts = (0, *(places[position] for position in positions_of(local, plan.split_points)))
    order = None if plan.actions is None else order_of(table_of(plan))
    layout = Layout(plan.schedule, plan.microbatch_size, plan.microbatches, starts, order)
    train = local.mode == "train"
    return Pricing(units, plan.mesh, cluster, run, dtype=dominant_dtype(local), train=train), layout


def moved_on(cluster: Cluster, offload: tuple[str, ...]) -> tuple[str, ...]:
    """Return what is offloaded on the devices of ``cluster``: nothing where they are their own hosts."""
    return () if cluster.device.kind == "cpu" else offload


def _execution(
    program: Program,
    zero: int = 0,
    reshard: str | int = "default",
    prefetch: str | None = None,
    distance: int = 0,
    reduce_dtype: str | None = None,
) -> Execution:
    """Say how a rank of a plan runs ``program``; what is gathered before a unit computes stays beside it."""
    dtype = gather_dtype(program)
    return replace(
        Execution(
            gather_bytes=None if dtype is None else dtype.itemsize,
            reduce_bytes=None if reduce_dtype is None else DTYPES[reduce_dtype].itemsize,
            copies_gradients=True,
            joined=True,
        ),
        **gathering(zero, reshard, prefetch, distance),
    )


def in_bf16_s(program: Program, plan: Plan, cluster: Cluster) -> float | None:
    """Estimate the seconds of a step of an fp32 plan in bf16; None for other dtypes, or where the device is no faster in bf16."""
    device = cluster.device
    if dominant_dtype(sharded_as(program, plan).local) != "fp32" or not device.faster_in_bf16:
        return None
    pricing, layout = pricing_of(program, plan, cluster)
    return Pricing(
        halved(pricing.units), plan.mesh, cluster, pricing.execution, dtype="bf16", train=pricing.train
    ).step_s(layout)


def table_of(plan: Plan) -> ActionTable:
    """Return the actions of the plan's ranks: its own table, its schedule's, or one microbatch after the other without a pipeline."""
    if plan.actions is not None:
        return parse_table("\n".join(",".join(row) for row in plan.actions))
    if plan.mesh.pp == 1:
        return parse_table(",".join(f"0F{number},0B{number}" for number in range(plan.microbatches)))
    return action_table(plan.schedule, plan.mesh.pp, plan.stages_per_rank, plan.microbatches)


# ---- one device ------------------------------------------------------------------------------------------------


def on_one_device(program: Program, plan: Plan, cluster: Cluster) -> Alone:
    """Estimate the batch of ``plan`` on one device of ``cluster``, with the best microbatch size there."""
    program = with_dropout(program, plan.dropout)
    size = program.batch if program.of_one_size else plan.microbatch_size  # the rows of all replicas are one trace's
    pins = PlanConstraints(
        global_batch=plan.global_batch,
        microbatch_size=None if program.symbolic and program.mode != GENERATE else size,
        allow_batch_coupling=plan.allow_batch_coupling,
        recompute=AUTO,
        compile=plan.compile,
    )
    return planner_for(program, cluster, {}, pins).alone()


# ---- where nothing fits ----------------------------------------------------------------------------------------


def _misfit(
    program: Program,
    cluster: Cluster,
    pinned: Mapping[str, int],
    pins: PlanConstraints,
    found: SearchResult,
    planner: Planner,
) -> str:
    """Say by how much the nearest plan does not fit, on which stage, and the smallest changes that would help."""
    nearest = found.alternatives[0]
    estimate = nearest.estimate
    fullest, on = estimate.fullest
    needed, room = estimate.peak_memory_bytes[fullest], estimate.memory_bytes
    mesh = (
        ", ".join(f"{axis}={degree}" for axis, degree in nearest.candidate.mesh.degrees().items() if degree > 1)
        or "one device"
    )
    stages = "/".join(map(str, on))
    text = (
        f"No plan for {program.name} fits {cluster}. The nearest ({mesh}, {nearest.candidate.schedule}, microbatches of "
        f"{nearest.candidate.microbatch_size}) needs {bytes_text(needed)} on stage {stages}, where {bytes_text(room)} are: "
        f"{bytes_text(nearest.missing)} too much."
    )

    def fits(on: Cluster, degrees: Mapping[str, int], wanted: PlanConstraints) -> Priced | None:
        other = planner_for(program, on, degrees, wanted, like=planner)
        return other.search().best if on == cluster else other.any_that_fits()

    changes = [each.text for each in remedies(program, cluster, pinned, pins, fits)]
    if not pins.compile and cluster.device.kind != "cpu" and writes_out_dropout(program):
        by_kernel = planner_for(with_dropout(program, KERNEL), cluster, pinned, pins).any_that_fits()
        if by_kernel is not None:
            changes.append(f"dropout='kernel' ({seconds_text(by_kernel.estimate.step_time_s)} a step)")
    memory = f"devices with {bytes_text(needed)}"
    if not changes:
        return f"{text} It would take {memory}; {GROWTH[-1]} times as many of these would not do."
    return f"{text} What would fit: {'; '.join(changes)}; {memory}."
