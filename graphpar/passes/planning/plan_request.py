"""The arguments of :func:`graphpar.plan`: checked before anything slow runs, then turned into a plan.

cluster, mesh, schedule, ... ──plan_request──► PlanConstraints, or an error without a program ──planned(program)──► Plan
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphpar.annotations.files import load_shard_plan
from graphpar.annotations.patterns import read_entry
from graphpar.cost_models.estimates import Alone
from graphpar.errors import GraphparError, NothingFits
from graphpar.hardware.cluster import Cluster
from graphpar.ir.plan import Plan
from graphpar.ir.precision import Precision
from graphpar.ir.program import Program
from graphpar.ir.split_points import SplitAt, split_points_of
from graphpar.passes.kernel_dropout import with_dropout
from graphpar.passes.planning.choose import CUSTOM, checked_table, choose
from graphpar.passes.planning.constraints import (
    PlanConstraints,
    check_heads,
    check_pipelined,
    decided_by,
    exported_precision,
    free_axes,
    global_batch,
)
from graphpar.passes.planning.explain import misfit_text
from graphpar.passes.planning.planned import Planned
from graphpar.passes.planning.prices import estimate_plan
from graphpar.passes.planning.recomputation import least_first, of_the_model
from graphpar.passes.planning.search import Planner
from graphpar.runtime.axes import AXIS, Divides
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.option_kinds import AUTO, GENERATE, Seq, seq_text, whole_number
from graphpar.runtime.options import Decisions, check_decisions, checked, numbered
from graphpar.runtime.schedule_records import SCHEDULES, canonical_name
from graphpar.runtime.stages.compiled import obstacle
from graphpar.runtime.stages.dropout import EXACT
from graphpar.schedules.action_table import load_table, parse_table

Splits = Sequence[str | Mapping[str, str] | SplitAt] | Mapping[str, Any] | Callable[[Program], Sequence[str]]


def plan_request(cluster: Cluster | int | str | Path | None = None, **options: Any) -> PlanConstraints:
    """Check the arguments of :func:`graphpar.plan` as far as that needs no program.

    Raises:
        GraphparError: one has a wrong type, is out of range, unknown, or contradicts another.
    """
    given = checked(options)
    hardware = Cluster.parse(cluster) if isinstance(cluster, str | Path) else cluster
    hardware = hardware.with_headroom(given.get("memory_headroom")) if isinstance(hardware, Cluster) else hardware
    table, shard_plan, split, mesh = (given.get(name) for name in ("table", "shard_plan", "split", "mesh"))
    if isinstance(table, Path):
        table = str(load_table(table))
    if isinstance(shard_plan, Path):
        shard_plan = load_shard_plan(shard_plan)
    count = _device_count(hardware, given.get("devices"))
    if count is None and not mesh and table is None:
        count = 1
    degrees = Mesh.pinned(Mesh.parse(mesh) if isinstance(mesh, str) else mesh, count)
    if table is not None:
        _check_table(table, given.get("schedule"), degrees)
    pins = PlanConstraints(
        **given
        | {
            "cluster": hardware if isinstance(hardware, Cluster) else None,
            "devices": count,
            "mesh": degrees,
            "table": table,
            "shard_plan": shard_plan,
            "split": split if callable(split) else None,
            "split_points": None if split is None or callable(split) else split_points_of(split),
        }
    )
    _check(pins)
    return pins


def planned(program: Program, pins: PlanConstraints, show: Callable[[str], None] | None = None) -> Planned:
    """Make the plan that is asked for: usual values where all degrees of the mesh are given and no cluster is, else searched. A whole
    mesh that fits a given cluster in no way is taken all the same.

    Args:
        show: is called with what a search is at.

    Raises:
        GraphparError: the program can't be planned so; the message says why.
    """
    check_heads(program, pins.mesh, pins.shard_plan)
    program = with_dropout(program, pins.dropout or EXACT)
    if program.mode == GENERATE:
        pins = pins_of_generation(pins)
    precision = _precision(program, pins)
    pins = replace(pins, seq=_lengths(program, pins.seq), **decided_by(precision))
    if pins.split is not None:
        pins = replace(pins, split_points=split_points_of(pins.split(program)), split=None)
    if pins.recompute is None:
        recompute, warnings = of_the_model(program)
        recompute = AUTO if recompute == "none" and pins.searched else recompute
        plan = _planned(program, replace(pins, recompute=recompute), show)
        return replace(plan, warnings=(*plan.warnings, *warnings))
    if pins.recompute == AUTO and not pins.searched:
        return _least_recomputation(program, pins)
    return _planned(program, pins, show)


def _planned(program: Program, pins: PlanConstraints, show: Callable[[str], None] | None = None) -> Planned:
    if not pins.searched:
        chosen = choose(program, Mesh.resolve(pins.mesh, pins.devices), pins)
        if pins.cluster is None:
            return chosen
        return _priced(program, chosen, pins, pins.cluster)
    mesh = Mesh.resolve(pins.mesh, pins.devices).degrees() if pins.complete else pins.mesh
    cluster = pins.cluster or _this_machine(pins)
    return search_plan(program, replace(pins, cluster=cluster, mesh=mesh), show)


def _this_machine(pins: PlanConstraints) -> Cluster:
    return Cluster.of_this_machine(pins.size).with_headroom(pins.memory_headroom)


def _priced(program: Program, plan: Planned, pins: PlanConstraints, cluster: Cluster) -> Planned:
    """Return ``plan`` with its price; with collectives of tp beside products where that is left open and faster."""
    plan = replace(plan, predicted=estimate_plan(program, plan, cluster))
    if pins.overlap_tp is not None or plan.mesh.tp == 1 or numbered(plan.recompute):
        return plan
    beside = replace(plan, overlap_tp=True, predicted=None)
    predicted = estimate_plan(program, beside, cluster)
    assert plan.predicted is not None
    return replace(beside, predicted=predicted) if predicted.step_time_s < plan.predicted.step_time_s else plan


def _least_recomputation(program: Program, pins: PlanConstraints) -> Planned:
    """Return the plan with the least recomputation that fits in the devices' memory; where none fits, as with the most."""
    *less, most = least_first(program, bool(pins.overlap_tp), pins.offload)
    cluster = pins.cluster or _this_machine(pins)
    for kind in less:
        plan = _planned(program, replace(pins, recompute=kind))
        estimate = plan.predicted or estimate_plan(program, plan, cluster)
        if estimate.missing_bytes <= 0:
            return plan
    return _planned(program, replace(pins, recompute=most))


def _precision(program: Program, pins: PlanConstraints) -> Precision:
    """Return the dtypes that the program was exported for, which must be those that are asked for, if any, and those of the devices."""
    exported = exported_precision(program)
    if pins.cluster is not None:
        exported.check_units(pins.cluster.device)
    for name, own in decided_by(exported).items():
        if (requested := getattr(pins, name)) not in (None, own):
            raise GraphparError(
                f"{name} is {requested!r}, but the program was exported in {own!r}; leave it out, or export again."
            )
    return exported


def _lengths(program: Program, requested: Seq | None) -> Seq | None:
    """Return the lengths that the program was exported for, which must be those that are asked for, if any."""
    exported = None if program.lengths is None else program.lengths.seq
    if requested is not None and requested != exported:
        shown = "one length" if exported is None else seq_text(exported)
        raise GraphparError(
            f"seq is {seq_text(requested)}, but the program was exported for {shown}; leave it out, or export again."
        )
    return exported


def search_plan(program: Program, pins: PlanConstraints, show: Callable[[str], None] | None = None) -> Planned:
    """Return the fastest plan that fits ``pins.cluster``, with ``pins.top`` alternatives; axes that are not in ``pins.mesh`` are searched.
    On a mesh that is given as a whole and fits in no way, it is the plan that is nearest to fitting.

    After ``pins.time_limit`` seconds the best so far is returned, with its gap; ``show`` is called with what the search is at.

    Raises:
        GraphparError: the pins can't be met, or nothing fits.
    """
    planner = Planner(program, pins, show=show)
    cluster, found = planner.cluster, planner.search()
    best = found.nearest
    if best is None:
        if wrong := _wrong_pins(program, replace(pins, recompute=planner.space.kinds[0]), cluster.size):
            raise wrong
        reasons = "; ".join(found.refused) or "no mesh divides its batch and its modules"
        raise GraphparError(f"{program.name} can't be laid out on {cluster}: {reasons}.")
    if found.best is None and not pins.complete:
        raise NothingFits(misfit_text(program, pins, best, planner))
    decided = replace(
        pins,
        **best.candidate.decisions,
        recompute=best.recompute,
        split_points=best.split_points if best.candidate.mesh.pp > 1 else None,
        stages=None,
        layers_per_stage=None,
        edge_layers=None,
        sharded=best.sharded,
    )
    alone = on_one_device(program, pins, cluster, planner) if cluster.size > 1 and program.symbolic else None
    chosen = choose(program, best.candidate.mesh, decided)
    return replace(chosen, predicted=best.estimate, found=found if found.best else None, alone=alone)


def _wrong_pins(program: Program, pins: PlanConstraints, devices: int) -> GraphparError | None:
    """Return what is wrong where all other devices are of one axis: what is so of most such axes, and else of the first."""
    free = free_axes(pins.mesh, pins.zero, program.mode)
    axes = ["dp_shard"] if pins.zero and "dp_shard" in free else free
    rest = devices // math.prod(pins.mesh.values())
    found: dict[str, list[GraphparError]] = {}
    for axis in axes if rest > 1 and axes else ["pp"]:
        try:
            choose(program, Mesh.resolve({axis: rest} | dict(pins.mesh), devices), pins)
        except GraphparError as error:
            found.setdefault(str(error), []).append(error)
    return max(found.values(), key=len)[0] if found else None


def on_one_device(program: Program, given: Decisions, cluster: Cluster, like: Planner | None = None) -> Alone:
    """Estimate the batch of a plan or a request on one device of ``cluster``, with the best microbatch size there.

    Args:
        like: a planner of the same program, whose sharded programs are used on.
    """
    one = replace(cluster.kinds[0], nodes=1, devices_per_node=1, host_memory_bytes=None, devices_per_host=None)
    free = program.symbolic and program.mode != GENERATE  # else each other size is a trace, or another window
    size = program.batch if program.of_one_size else given.microbatch_size  # the rows of all replicas are one trace's
    pins = PlanConstraints(
        cluster=one,
        global_batch=given.global_batch,
        microbatch_size=None if free else size,
        allow_batch_coupling=given.allow_batch_coupling,
        recompute=AUTO if isinstance(given, Plan) else given.recompute,
        offload=tuple(each for each in given.offload or () if each != "params"),  # one device shards none
        compile=given.compile,
        dropout=given.dropout,
        top=1,
    )
    if isinstance(given, Plan) and given.schedule in SCHEDULES and SCHEDULES[given.schedule].splits_backward:
        pins = replace(pins, compile=None)  # no schedule is in the way here
    best = Planner(program, pins, like).search().nearest
    if best is None:
        raise GraphparError(f"No plan of one device has a batch of {global_batch(program, pins)}.")
    estimate = best.estimate
    return Alone(
        str(one),
        estimate.step_time_s,
        best.candidate.microbatch_size,
        max(estimate.peak_memory_bytes),
        estimate.room_bytes,
        best.recompute,
    )


# ---- checks ----------------------------------------------------------------------------------------------------


def check_batch(pins: PlanConstraints, batch: int) -> None:
    """Check that the global batch (``batch`` rows where none is asked for) divides over replicas and microbatches.

    Raises:
        GraphparError: it does not.
    """
    if pins.global_batch is None:
        check_decisions(PlanConstraints(global_batch=batch, microbatch_size=pins.microbatch_size), Mesh(**pins.mesh))


def _check(pins: PlanConstraints) -> None:
    """Check the arguments against each other."""
    mesh = Mesh.resolve(pins.mesh, pins.devices) if pins.complete else Mesh(**pins.mesh)
    check_decisions(pins, mesh, searched=() if pins.complete else (*free_axes(pins.mesh, pins.zero),))
    if pins.schedule is not None:
        canonical_name(pins.schedule)
        if pins.complete:
            check_pipelined(pins.schedule, mesh)
    if pins.compile:
        _check_compile(pins)
    if pins.memory_headroom is not None and pins.cluster is None and not pins.searched and pins.recompute != AUTO:
        raise GraphparError(
            "memory_headroom is for a plan that is searched, or priced on a cluster; give --cluster, or leave it out."
        )
    pins.check_one_way()
    if pins.shard_plan is not None:
        if not isinstance(pins.shard_plan, Mapping):
            raise GraphparError(
                f"shard_plan is a {type(pins.shard_plan).__name__}; it must be a dict of patterns and styles."
            )
        for pattern, value in pins.shard_plan.items():
            read_entry(pattern, value)


def _check_compile(pins: PlanConstraints) -> None:
    """Check that blocks can be compiled under what is pinned."""
    schedule = CUSTOM if pins.schedule is None else canonical_name(pins.schedule)
    rows = () if pins.table is None else parse_table(pins.table).rows
    cells = [str(cell) for row in rows for cell in row if cell is not None]
    reason = obstacle(schedule, cells, pins.dropout, pins.offload or ())
    if reason is not None:
        raise GraphparError(f"compile: {reason}.")


def _device_count(cluster: Any, devices: int | None) -> int | None:
    """Return the number of devices, from whichever argument gives it; None where neither does."""
    if not isinstance(cluster, Cluster):
        if cluster is not None and (isinstance(cluster, bool) or not isinstance(cluster, int)):
            raise GraphparError(
                f"cluster is a {type(cluster).__name__}; it must be a Cluster, a name such as '2xH100', a file, or a number of devices."
            )
        if cluster is not None:
            whole_number("the number of devices", cluster)
    count = cluster.size if isinstance(cluster, Cluster) else cluster
    if count is not None and devices is not None and count != devices:
        what = f"the cluster {cluster} has" if isinstance(cluster, Cluster) else "the second argument says"
        raise GraphparError(f"devices is {devices}, but {what} {count}; leave one of them out.")
    return devices if count is None else count


def _check_table(text: str, schedule: str | None, mesh: dict[str, int]) -> None:
    """Check that a user's schedule table can run; where ``mesh`` has no ``pp``, set it to the table's number of ranks."""
    if schedule is not None:
        raise GraphparError(
            f"Give a schedule, {schedule!r}, or a table of your own, not both: each says what every rank runs."
        )
    checked_table(text, mesh.setdefault("pp", parse_table(text).ranks))


# ---- generation ------------------------------------------------------------------------------------------------

_DIVIDE = (Divides.LAYERS, Divides.EXPERTS, Divides.WEIGHTS)
"""What may be divided over ranks while tokens are generated, besides the sequences."""
_SEQUENCES = "dp_replicate"
"""The axis whose ranks have other sequences."""
_AXES = tuple(name for name, record in AXIS.items() if record.divides in _DIVIDE or name == _SEQUENCES)


def groups_of(mesh: Mapping[str, int], devices: int) -> int:
    """Return how many groups of sequences are in flight, in plans of ``devices`` that share the degrees of ``mesh``.

    Where pp or dp_replicate are left to the search, all of its plans have as many, those that divide weights instead too: so prices
    of a step are of the same work.
    """
    apart = math.prod(degree for axis, degree in mesh.items() if axis not in ("pp", _SEQUENCES))
    return max(1, devices // apart)


def pins_of_generation(pins: PlanConstraints) -> PlanConstraints:
    """Return the pins with what generation leaves no choice of.

    Raises:
        GraphparError: something is asked for that a program for generation doesn't have.
    """
    given = {axis: degree for axis, degree in pins.mesh.items() if degree > 1}
    for axis, degree in given.items():
        if axis not in _AXES:
            raise GraphparError(
                f"mesh {axis}={degree} is for training: generation divides layers (pp), weights (tp), experts (ep) and sequences "
                f"({_SEQUENCES})."
            )
    if pins.global_batch is not None or pins.microbatch_size is not None:
        raise GraphparError(
            "A program for generation takes as many sequences at once as its example has rows, on each replica; leave global_batch and "
            "microbatch_size out."
        )
    if pins.zero or pins.table is not None or pins.dp_mean:
        raise GraphparError("zero, dp_mean and a table of actions are for training; leave them out for generation.")
    unused = {axis: 1 for axis in AXIS if axis not in _AXES}
    groups = groups_of(pins.mesh, pins.size)
    return replace(pins, mesh={**unused, **pins.mesh}, microbatch_size=1, global_batch=groups, recompute="none")
