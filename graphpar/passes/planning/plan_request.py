"""The arguments of :func:`graphpar.plan`: checked before anything slow runs, then turned into a plan.

cluster, mesh, schedule, ... ──plan_request──► PlanConstraints, or an error without a program ──planned(program)──► Plan
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphpar.annotations.files import load_shard_plan
from graphpar.annotations.patterns import read_entry
from graphpar.errors import GraphparError, NothingFits
from graphpar.hardware.cluster import Cluster
from graphpar.ir.plan import Plan
from graphpar.ir.precision import Precision
from graphpar.ir.program import Program
from graphpar.ir.split_points import split_points_of
from graphpar.passes.kernel_dropout import with_dropout
from graphpar.passes.planning.choose import CUSTOM, checked_table, choose
from graphpar.passes.planning.constraints import PlanConstraints, check_heads, check_pipelined
from graphpar.passes.planning.generation import pins_of_generation
from graphpar.passes.planning.planning import estimate_plan, search_plan
from graphpar.passes.planning.recomputation import least_first, of_the_model
from graphpar.passes.planning.space import free_axes
from graphpar.runtime.compiled import obstacle
from graphpar.runtime.kernel_dropout import EXACT
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.modes import GENERATE
from graphpar.runtime.option_kinds import AUTO, whole_number
from graphpar.runtime.options import check_decisions, checked, numbered
from graphpar.schedules.registry import canonical_name
from graphpar.schedules.table import load_table, parse_table

Splits = Sequence[str | Mapping[str, str]] | Mapping[str, Any] | Callable[[Program], Sequence[str]]


def plan_request(cluster: Cluster | int | str | Path | None = None, **options: Any) -> PlanConstraints:
    """Check the arguments of :func:`graphpar.plan` as far as that needs no program.

    Raises:
        GraphparError: one has a wrong type, is out of range, unknown, or contradicts another.
    """
    given = checked(options)
    hardware = Cluster.parse(cluster) if isinstance(cluster, str | Path) else cluster
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


def planned(program: Program, pins: PlanConstraints, show: Callable[[str], None] | None = None) -> Plan:
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
    pins = replace(pins, dtype=precision.dtype, param_dtype=precision.param_dtype)
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


def _planned(program: Program, pins: PlanConstraints, show: Callable[[str], None] | None = None) -> Plan:
    if not pins.searched:
        chosen = choose(program, Mesh.resolve(pins.mesh, pins.devices), pins)
        if pins.cluster is None:
            return chosen
        return _priced(program, chosen, pins, pins.cluster)
    cluster = pins.cluster or Cluster.of_this_machine(pins.size)
    if not pins.complete:
        return search_plan(program, cluster, pins.mesh, pins, show)
    mesh = Mesh.resolve(pins.mesh, pins.devices)
    try:
        return search_plan(program, cluster, mesh.degrees(), pins, show)
    except NothingFits:
        most = (
            least_first(program, pins.compile, bool(pins.overlap_tp), pins.offload)[-1]
            if pins.recompute == AUTO
            else pins.recompute
        )
        chosen = choose(program, mesh, replace(pins, recompute=most))
        return _priced(program, chosen, pins, cluster)


def _priced(program: Program, plan: Plan, pins: PlanConstraints, cluster: Cluster) -> Plan:
    """Return ``plan`` with its price; with collectives of tp beside products where that is left open and faster."""
    plan = replace(plan, predicted=estimate_plan(program, plan, cluster))
    if pins.overlap_tp is not None or plan.mesh.tp == 1 or numbered(plan.recompute):
        return plan
    beside = replace(plan, overlap_tp=True, predicted=None)
    predicted = estimate_plan(program, beside, cluster)
    assert plan.predicted is not None
    return replace(beside, predicted=predicted) if predicted.step_time_s < plan.predicted.step_time_s else plan


def _least_recomputation(program: Program, pins: PlanConstraints) -> Plan:
    """Return the plan with the least recomputation that fits in the devices' memory; where none fits, as with the most."""
    *less, most = least_first(program, pins.compile, bool(pins.overlap_tp), pins.offload)
    cluster = pins.cluster or Cluster.of_this_machine(pins.size)
    for kind in less:
        try:
            plan = _planned(program, replace(pins, recompute=kind))
        except NothingFits:
            continue
        estimate = plan.predicted or estimate_plan(program, plan, cluster)
        if max(estimate.peak_memory_bytes) <= estimate.memory_bytes:
            return plan
    return _planned(program, replace(pins, recompute=most))


def _precision(program: Program, pins: PlanConstraints) -> Precision:
    """Return the dtypes that the program was exported for, which must be those that are asked for, if any."""
    exported = (Precision() if program.source is None else program.source.precision).resolved(program.mode)
    for name in ("dtype", "param_dtype"):
        if (asked := getattr(pins, name)) not in (None, getattr(exported, name)):
            raise GraphparError(
                f"{name} is {asked!r}, but the program was exported in {getattr(exported, name)!r}; leave it out, or export again."
            )
    return exported


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
    schedule = "" if pins.schedule is None else canonical_name(pins.schedule)
    rows = () if pins.table is None else parse_table(pins.table).rows
    cells = [str(cell) for row in rows for cell in row if cell is not None]
    recompute = "none" if pins.recompute in (AUTO, None) else pins.recompute
    reason = obstacle(schedule or CUSTOM, cells, recompute, pins.offload or ())
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
