"""``choose``: from a program, a mesh and decisions to a :class:`~graphpar.passes.planning.planned.Planned`.

    Program, Mesh, PlanConstraints ──defaults──► schedule, split points, microbatches ──solve──► Sharding ──► Plan

The search (:mod:`graphpar.passes.planning.search`) runs before this, and pins what it found. Without hardware there are no prices to search
by, so what is open has usual values: split points balanced by flops, 1F1B, about two microbatches a stage.
What the user pinned is used unchanged, or refused with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from graphpar.annotations.patterns import names_of, resolve
from graphpar.codegen.units import gathered_in_turn, stored_in_shards
from graphpar.cost_models.sharding import costs_for
from graphpar.errors import GraphparError
from graphpar.hardware.cluster import Cluster
from graphpar.ir.program import Program
from graphpar.ir.sharding import Sharding
from graphpar.ir.split_points import SplitAt
from graphpar.operators.discover import discovered
from graphpar.operators.rules import has_rule
from graphpar.passes.fsdp_units import with_own_units
from graphpar.passes.normalize.coupled import batch_warning, coupled_text, placed_axes, splitting_advice
from graphpar.passes.planning.constraints import (
    PlanConstraints,
    check_dp_mean,
    check_even,
    check_offload,
    check_pipelined,
    check_replicas,
    compiles,
    coupling_reason,
    global_batch,
    idle_pins,
    stored_dims,
    usual_schedule,
)
from graphpar.passes.planning.planned import Planned
from graphpar.passes.planning.read_elsewhere import with_read_elsewhere
from graphpar.passes.planning.recomputation import recomputed_blocks
from graphpar.passes.planning.split_points import balanced_split_points, pinned_split_points
from graphpar.passes.sharding.costs import Workload
from graphpar.passes.sharding.exchange import check_shares, exchange_over, exchanged_parameters
from graphpar.passes.sharding.expert_room import divides_rows
from graphpar.passes.sharding.pins import pin_nodes, points_of, variants_of
from graphpar.passes.sharding.search import SearchConstraints, search
from graphpar.passes.sharding.sequences import check_sequences
from graphpar.passes.sharding.shard import Sharded, in_chunks, problem_of, sharded
from graphpar.passes.sharding.solution import sharding_of, undivided_work
from graphpar.passes.sharding.tp_switches import with_switches
from graphpar.passes.sharding.widened import of_a_replica
from graphpar.passes.split import positions_of, split
from graphpar.runtime.axes import AXIS
from graphpar.runtime.layout import R, Type
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.option_kinds import GENERATE, TRAIN, ZERO1_BY
from graphpar.runtime.options import Decisions, check_decisions, decided, level_of, prefetching
from graphpar.runtime.plan_record import StageRecord
from graphpar.runtime.schedule_records import canonical_name, get_schedule
from graphpar.schedules.action_table import (
    ActionTable,
    has_state_actions,
    parse_table,
    validate_table,
    with_state_actions,
)
from graphpar.schedules.order import check_deadlock
from graphpar.schedules.registry import action_table, bubble_warning, check_legal, legal_microbatches, stage_ranks
from graphpar.text import plural

CUSTOM = "custom"
"""The schedule name of a plan that runs the user's own table."""


def choose(program: Program, mesh: Mesh, pins: PlanConstraints) -> Planned:
    """Make a plan for a pipeline over ``mesh.pp`` ranks.

    Raises:
        GraphparError: something pinned is not possible for this program and mesh.
    """
    batch = global_batch(program, pins)
    pins = replace(pins, global_batch=batch)
    check_decisions(pins, mesh, program.mode)
    if pins.schedule is not None:
        check_pipelined(pins.schedule, mesh)
    split_points = pinned_split_points(program, mesh, pins)
    recomputed_blocks(program, pins.recompute or "none")
    if split_points:
        positions_of(program, split_points)  # report a misspelt name before anything else
    if pins.table is not None:
        return _with_table(program, mesh, pins, split_points, batch)
    schedule = canonical_name(pins.schedule or usual_schedule(program, pins))
    if program.mode != TRAIN and get_schedule(schedule).splits_backward:
        raise GraphparError(f"Schedule {schedule} is for training; a program without a loss runs GPipe or 1F1B.")
    per_rank = _stages_per_rank(schedule, mesh, split_points)
    count = mesh.pp * per_rank if mesh.pp > 1 else len(split_points or ()) + 1
    if mesh.pp == 1 and count > 1:
        raise GraphparError(f"{_given_points(split_points or ())} {count} stages, but the mesh has pp=1.")
    chosen = split_points if split_points is not None else balanced_split_points(program, count)
    microbatches = _microbatches(program, schedule, mesh, per_rank, batch, pins)
    if mesh.pp > 1:
        check_legal(schedule, mesh.pp, per_rank, microbatches)
    ranks = stage_ranks(schedule, mesh.pp, per_rank) if mesh.pp > 1 else [0]
    cells = None
    gathers = level_of(mesh, pins.zero) >= 2
    if mesh.pp > 1 and (get_schedule(schedule).lead is not None or gathers):  # torch's runtime takes it as a table
        cells = _cells(_with_state(action_table(schedule, mesh.pp, per_rank, microbatches), mesh, pins))
    plan = _plan(program, mesh, schedule, batch, microbatches, chosen, ranks, pins, cells)
    if mesh.pp == 1 or pins.cluster is not None:  # on a cluster the prediction shows the bubble
        return plan
    rows = 1 if coupling_reason(program, pins) is not None else batch // mesh.replicas  # that can be split
    warning = bubble_warning(schedule, mesh.pp, per_rank, microbatches, rows)
    return plan if warning is None else replace(plan, warnings=(*plan.warnings, warning))


def _with_state(table: ActionTable, mesh: Mesh, pins: PlanConstraints) -> ActionTable:
    """Return ``table`` with the gathers and reductions of sharded state, unless it says itself when they are.

    Raises:
        GraphparError: its backwards are split, and parameters are to be freed after each; or it has actions on state that is not sharded.
    """
    gathers = pins.reshard in (None, "default", "never")
    split_at = next((action for _, _, _, action in table.actions() if action.kind == "I"), None)
    if level_of(mesh, pins.zero) < 2:
        if has_state_actions(table):
            raise GraphparError(
                "The schedule table gathers or reduces state, but the mesh shards none; give dp_shard=2 or more, or zero=3 with cp."
            )
        return table
    if not gathers and split_at is not None:
        raise GraphparError(
            f"reshard={pins.reshard} frees a stage's parameters after each backward, but this schedule splits backwards in two, as at "
            f"{split_at}; use a schedule that does not, such as 1F1B or Interleaved1F1B, or reshard=default."
        )
    if not has_state_actions(table):
        return with_state_actions(table, gathers=gathers)
    if any(action.kind == "UNSHARD" for _, _, _, action in table.actions()) != gathers:
        raise GraphparError(
            f"The schedule table {'has no' if gathers else 'has'} UNSHARD actions, but with reshard={pins.reshard or 'default'} "
            f"{'it says when parameters are gathered' if gathers else 'stages gather their parameters themselves'}."
        )
    return table


def checked_table(text: str, pp: int) -> ActionTable:
    """Parse a user's schedule table, and check that it is for ``pp`` ranks and can run.

    Raises:
        GraphparError: it is not, or deadlocks.
    """
    table = parse_table(text)
    if table.ranks != pp:
        raise GraphparError(f"The schedule table has {table.ranks} rows, but the mesh has pp={pp}: one row a rank.")
    validate_table(table, table.stages, table.microbatches)
    check_deadlock(table)
    return table


def _plan(
    program: Program,
    mesh: Mesh,
    schedule: str,
    batch: int,
    microbatches: int,
    split_points: Sequence[SplitAt],
    ranks: Sequence[int],
    pins: PlanConstraints,
    actions: tuple[tuple[str, ...], ...] | None = None,
) -> Planned:
    stages = split(program, positions_of(program, split_points))
    size = batch // (microbatches * mesh.replicas)
    if program.mode != GENERATE:
        program.check_batch(size, batch)
    coupled = batch_warning(program, mesh, microbatches, bool(pins.allow_batch_coupling))
    zero = level_of(mesh, pins.zero)
    check_decisions(replace(pins, zero=zero), mesh, program.mode)
    found = pins.sharded or solve(
        program,
        mesh,
        size,
        microbatches,
        pins.shard_plan,
        pins.cluster,
        pins.sp,
        pins.loss_parallel,
        pins.loss_chunk,
        pins.expert_room,
    )
    check_room(pins, found.local, mesh)
    check_whole(mesh, zero, found.sharding.parameters)
    check_dp_mean(pins, program)
    check_offload(pins, program)
    idle = idle_pins(mesh, pins.shard_plan, program)
    units = with_own_units(program, stages, pins.units) if zero >= 2 else (program, stages)
    in_shards = stored_in_shards(*units) if zero >= 2 else frozenset()
    check_replicas(mesh, zero, pins.shard_plan, program, in_shards)
    dims = stored_dims(mesh, pins.shard_plan, program, found.local, in_shards)
    check_even(mesh, dims, found.local)
    prefetch, distance = prefetching(mesh.pp, zero, pins.reshard, pins.prefetch, pins.prefetch_distance)
    check_reach(distance, max(len(gathered_in_turn(units[0], stage)) for stage in units[1]))
    decisions = decided(pins) | {
        "schedule": schedule,
        "global_batch": batch,
        "microbatch_size": size,
        "zero": zero,
        "zero1_by": (pins.zero1_by or ZERO1_BY[0]) if zero == 1 else None,
        "prefetch": prefetch,
        "prefetch_distance": distance,
        "dropout": program.dropout,
        "compile": compiles(program, pins, schedule, (cell for row in actions or () for cell in row)),
    }
    return Planned(
        model=program.name,
        mode=program.mode,
        mesh=mesh,
        split_points=tuple(split_points),
        stages=tuple(StageRecord(stage.index, ranks[stage.index], stage.modules) for stage in stages),
        actions=actions,
        fully_sharded=dims,
        sharding=found.sharding,
        cluster=pins.cluster,
        warnings=(*program.warnings, *([] if coupled is None else [coupled]), *idle, *found.sharding.undivided),
        sharded=found,
        **decisions,
    )


def check_room(given: Decisions, local: Program, mesh: Mesh) -> None:
    """Check that there are rows that ``expert_room`` is for.

    Raises:
        GraphparError: a rank's program has none.
    """
    if given.expert_room is not None and not divides_rows(local):
        raise GraphparError(
            f"expert_room={given.expert_room} is room for the rows of a rank's experts, but on mesh {mesh.text} {local.name} has no rows "
            "sorted by expert that are divided over ranks; give mesh dp_expert=2 or more, or ep=2, or leave it out."
        )


def check_reach(distance: int, units: int) -> None:
    """Check that there are as many units to gather ahead as ``distance`` says.

    Args:
        units: how many the largest stage has besides itself.

    Raises:
        GraphparError: there are fewer.
    """
    if distance > max(1, units):
        raise GraphparError(
            f"prefetch_distance={distance} gathers {distance} units ahead, but no stage has more than {units} inside its outer unit; give "
            f"at most {max(1, units)}."
        )


def check_whole(mesh: Mesh, level: int, parameters: Mapping[str, Mapping[str, Type]]) -> None:
    """Check that parameters are computed with whole on all ranks that share state, and are summed over these.

    Raises:
        GraphparError: a pin says otherwise.
    """
    for axis in mesh.state_axes if level else ():
        name = next((name for name, spec in parameters.items() if spec.get(axis, R) != R), None)
        if name is not None:
            raise GraphparError(
                f"{name} is pinned to {parameters[name][axis]}@{axis}, but zero={level} stores shards over {mesh.state_text} of parameters "
                f"that are R@{axis}; leave out the pin, or the ZeRO level."
            )


def solve(
    program: Program,
    mesh: Mesh,
    microbatch: int,
    microbatches: int,
    shard_plan: Mapping[str, Any] | None = None,
    cluster: Cluster | None = None,
    sp: bool | None = None,
    loss_parallel: bool | None = None,
    loss_chunk: int | None = None,
    expert_room: float | None = None,
) -> Sharded:
    """Search a placement of every tensor over ``mesh``, at the prices of ``cluster``, and derive the program that a rank runs.

    ``loss_chunk``: tokens of which heads and losses are computed at once, 0 for all; None: as many as take less memory than all do.

    Raises:
        GraphparError: the shard plan is wrong, or can't be fulfilled.
    """
    started = time.perf_counter()
    axes, exchange = placed_axes(program, mesh), exchange_over(program, mesh)
    pins = resolve(shard_plan or {}, names_of(program), axes)  # checked even where no axis needs placements
    annotated = time.perf_counter() - started
    experts = exchanged_parameters(program) if exchange else {}
    if not axes:
        return in_chunks(
            sharded(
                program, Sharding(parameters=experts, exchange=exchange, expert_room=expert_room), microbatch, None
            ),
            loss_chunk,
        )
    sized = of_a_replica(program, microbatch, axes)
    variants, points = variants_of(sized, pins), points_of(pins)
    problem = problem_of(program, Sharding(axes, variants=variants, points=tuple(points)), microbatch)
    assert problem is not None
    workload = Workload(microbatch, microbatches, program.mode == "train")
    costs = costs_for(sized, mesh, cluster)
    # What dp_shard stores is said by the level of ZeRO, whose shards are computed with whole.
    types = {
        name: {axis: spec[axis] for axis in spec if not AXIS[axis].stores_shards}
        for name, spec in pins.parameters.items()
    }
    read = with_read_elsewhere(program, problem, microbatch, types)
    given = SearchConstraints(read, pin_nodes(problem.program, pins, points))
    given = with_switches(given, problem, sp, loss_parallel)
    solution = search(problem, workload, costs, given)
    check_sequences(solution, given)
    unknown = [
        operator.node for operator in problem.operators if operator.kind == "operator" and not has_rule(operator.node)
    ]
    placed = sharding_of(solution)
    sharding = replace(
        placed,
        parameters={name: {**experts.get(name, {}), **spec} for name, spec in {**experts, **placed.parameters}.items()},
        exchange=exchange,
        variants=variants,
        points=tuple(points),
        undivided=undivided_work(solution, workload),
        discovered=discovered(unknown),
        expert_room=expert_room,
    )
    check_shares(program, sharding)
    found = sharded(program, sharding, microbatch, problem)
    found.seconds["annotate"] = annotated
    return in_chunks(found, loss_chunk)


def _given_points(points: Sequence[SplitAt]) -> str:
    return f"{plural(len(points), 'split point')} {'gives' if len(points) == 1 else 'give'}"


def _stages_per_rank(schedule: str, mesh: Mesh, split_points: Sequence[SplitAt] | None) -> int:
    if split_points is None or mesh.pp == 1:
        return get_schedule(schedule).default_stages if mesh.pp > 1 else 1
    count = len(split_points) + 1
    if count % mesh.pp:
        raise GraphparError(
            f"{_given_points(split_points)} {plural(count, 'stage')}, which pp={mesh.pp} ranks can't hold evenly; give "
            f"{plural(mesh.pp - 1, 'split point')} for one stage a rank, or {2 * mesh.pp - 1} for two."
        )
    return count // mesh.pp


def _microbatches(program: Program, schedule: str, mesh: Mesh, per_rank: int, batch: int, pins: PlanConstraints) -> int:
    """Return the number of microbatches of a rank: as pinned, or about two a stage, or one where the batch can't be split."""
    rows = batch // mesh.replicas
    reason = coupling_reason(program, pins)
    if mesh.replicas > 1 and program.of_one_size and batch != program.batch:
        assert program.unsplittable is not None
        raise GraphparError(_refusal(program, batch, mesh.replicas, program.unsplittable))
    if pins.microbatch_size is not None:
        size = pins.microbatch_size
        if reason is not None and rows // size > 1:
            raise GraphparError(_refusal(program, batch, rows // size, reason))
        return rows // size
    if mesh.pp == 1:
        return 1
    legal = legal_microbatches(schedule, mesh.pp, per_rank, rows)
    if reason is not None:
        if 1 not in legal:
            raise GraphparError(_refusal(program, batch, min(legal, default=2), reason))
        return 1
    if not legal:
        raise GraphparError(
            f"Schedule {schedule} over {mesh.pp} ranks with {per_rank} stages each has no legal number of microbatches that divides "
            f"the {rows} rows of {'a replica' if mesh.replicas > 1 else 'the global batch'}; use --batch with a multiple of "
            f"{mesh.pp * per_rank * mesh.replicas}."
        )
    target = 2 * mesh.pp * per_rank
    enough = [count for count in legal if count >= target]
    return min(enough) if enough else max(legal)


def _refusal(program: Program, batch: int, microbatches: int, reason: str) -> str:
    return (
        f"The batch of {batch} can't be split into {microbatches} microbatches: {reason}. {splitting_advice(program)}"
    )


def _with_table(
    program: Program, mesh: Mesh, pins: PlanConstraints, split_points: Sequence[SplitAt] | None, batch: int
) -> Planned:
    """Make a plan that runs the user's own schedule table."""
    assert pins.table is not None
    table = checked_table(pins.table, mesh.pp)
    microbatches, rows = table.microbatches, batch // mesh.replicas
    whose = "the global batch" if mesh.replicas == 1 else f"a replica (a global batch of {batch})"
    if rows % microbatches:
        raise GraphparError(
            f"The schedule table has {microbatches} microbatches, which don't divide the {rows} rows of {whose}."
        )
    if pins.microbatch_size is not None and pins.microbatch_size * microbatches != rows:
        raise GraphparError(
            f"The schedule table has {microbatches} microbatches; with a global batch of {batch} each has {rows // microbatches} rows, "
            f"not {pins.microbatch_size}."
        )
    reason = program.unsplittable or ("" if pins.allow_batch_coupling else coupled_text(program.couplings))
    if reason and microbatches > 1:
        raise GraphparError(_refusal(program, batch, microbatches, reason))
    stages = table.stages
    if split_points is not None and len(split_points) + 1 != stages:
        raise GraphparError(
            f"The schedule table has {plural(stages, 'stage')}, but the split points give {len(split_points) + 1}."
        )
    ranks = [0] * stages
    for rank, _, _, action in table.actions():
        ranks[action.stage] = rank
    chosen = split_points if split_points is not None else balanced_split_points(program, stages)
    cells = _cells(_with_state(table, mesh, pins))
    plan = _plan(program, mesh, "GPipe", batch, microbatches, chosen, ranks, pins, cells)
    return replace(plan, schedule=CUSTOM)


def _cells(table: ActionTable) -> tuple[tuple[str, ...], ...]:
    """Return the table as a plan holds it: text, empty where a rank idles."""
    return tuple(tuple("" if cell is None else str(cell) for cell in row) for row in table.rows)
