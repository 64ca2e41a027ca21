"""The arguments of :func:`graphpar.plan`: checked before anything slow runs, then turned into a plan.

cluster, mesh, schedule, ... ──ask──► Asked, or an error without a program ──planned(program)──► Plan
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graphpar.annotations.patterns import read_entry
from graphpar.errors import GraphparError, NothingFits
from graphpar.hardware.cluster import Cluster
from graphpar.ir.mesh import Mesh
from graphpar.ir.plan import Plan
from graphpar.ir.precision import Precision, check_dtype
from graphpar.ir.program import Program
from graphpar.ir.recomputation import Recompute
from graphpar.ir.split_points import split_points_of
from graphpar.passes.kernel_dropout import check_dropout, with_dropout
from graphpar.passes.planning.candidates import SHOWN
from graphpar.passes.planning.choose import CUSTOM, checked_table, choose
from graphpar.passes.planning.constraints import (
    PlanConstraints,
    check_degrees,
    check_dp_mean,
    check_heads,
    check_microbatch_size,
    check_offload,
    check_overlap,
    check_pipelined,
    read_offload,
)
from graphpar.passes.planning.generation import pins_of_generation
from graphpar.passes.planning.planning import estimate_plan, search_plan
from graphpar.passes.planning.recomputation import (
    AUTO,
    OF_THE_MODEL,
    check_recompute,
    least_first,
    numbered,
    of_the_model,
)
from graphpar.passes.planning.sharded_state import (
    check_level,
    check_prefetch,
    check_reduced,
    check_reshard,
    check_zero,
    check_zero1_by,
    gathers_again,
    level_of,
)
from graphpar.passes.planning.space import free_axes
from graphpar.runtime.compiled import obstacle
from graphpar.runtime.modes import GENERATE
from graphpar.schedules.registry import canonical_name
from graphpar.schedules.table import parse_table

Splits = Sequence[str | Mapping[str, str]] | Mapping[str, Any] | Callable[[Program], Sequence[str]]


@dataclass(frozen=True)
class Asked:
    """A checked request for a plan.

    Attributes:
        mesh: degrees of the axes that are pinned.
        devices: None where only the mesh says how many.
        split: computes split points from the program.
        top: how many alternatives to show.
        limit_s: after so many seconds a search returns the best plan so far.
    """

    pins: PlanConstraints
    mesh: Mapping[str, int]
    devices: int | None
    split: Callable[[Program], Sequence[str]] | None = None
    top: int = SHOWN
    limit_s: float | None = None

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.mesh.values()) if self.devices is None else self.devices

    @property
    def complete(self) -> bool:
        """Whether no axis is left to the search."""
        alone = not self.mesh and self.pins.cluster is None and self.size == 1
        full = bool(self.mesh) and self.size == math.prod(self.mesh.values())
        return self.pins.table is not None or alone or full or not free_axes(self.mesh, self.pins.zero)

    @property
    def searched(self) -> bool:
        """Whether something is searched: on a cluster that is given also what a whole mesh leaves open."""
        return not self.complete or (self.pins.cluster is not None and self.pins.table is None)


def ask(
    cluster: Cluster | int | str | Path | None = None,
    *,
    devices: int | None = None,
    global_batch: int | None = None,
    mesh: Mapping[str, int] | str | None = None,
    schedule: str | None = None,
    microbatch_size: int | None = None,
    split: Splits | None = None,
    stages: Sequence[Sequence[str]] | None = None,
    layers_per_stage: int | None = None,
    edge_layers: tuple[int, int] | None = None,
    table: str | None = None,
    shard_plan: Mapping[str, Any] | None = None,
    allow_batch_coupling: bool = False,
    dp_mean: bool = False,
    dropout: str = "exact",
    zero: int | None = None,
    zero1_by: str | None = None,
    reshard: str | int | None = None,
    prefetch: str | None = None,
    prefetch_distance: int | None = None,
    recompute: Recompute | None = None,
    overlap_tp: bool | None = None,
    offload: str | Sequence[str] = (),
    dtype: str | None = None,
    reduce_dtype: str | None = None,
    top: int = SHOWN,
    time_limit: float | None = None,
    compile: bool = False,
) -> Asked:
    """Check the arguments of :func:`graphpar.plan` as far as that needs no program.

    Raises:
        GraphparError: one has a wrong type, is out of range, unknown, or contradicts another.
    """
    hardware = Cluster.parse(cluster) if isinstance(cluster, str | Path) else cluster
    counts = {
        "devices": devices,
        "global_batch": global_batch,
        "microbatch_size": microbatch_size,
        "layers_per_stage": layers_per_stage,
        "prefetch_distance": prefetch_distance,
    }
    for name, value in counts.items():
        _check_count(name, value)
    _check_count("top", top, least=0)
    if time_limit is not None and (type(time_limit) not in (int, float) or not time_limit >= 0):
        raise GraphparError(f"time_limit is {time_limit!r}; it must be a number of seconds from 0.")
    check_dtype("dtype", dtype)
    check_dtype("reduce_dtype", reduce_dtype)
    if recompute is not None and recompute != AUTO:
        check_recompute(recompute)
    _check_edges(edge_layers)
    count = _device_count(hardware, devices)
    if count is None and not mesh and table is None:
        count = 1
    given = Mesh.pinned(Mesh.parse(mesh) if isinstance(mesh, str) else mesh, count)
    if table is not None:
        _check_table(table, schedule, given)
    pins = PlanConstraints(
        schedule=schedule,
        microbatch_size=microbatch_size,
        global_batch=global_batch,
        split_points=None if split is None or callable(split) else split_points_of(split),
        stages=None if stages is None else tuple(tuple(paths) for paths in stages),
        table=table,
        allow_batch_coupling=allow_batch_coupling,
        dp_mean=dp_mean,
        dropout=dropout,
        zero=zero,
        zero1_by=zero1_by,
        reshard=reshard,
        prefetch=prefetch,
        prefetch_distance=prefetch_distance,
        recompute=OF_THE_MODEL if recompute is None else recompute,
        overlap_tp=overlap_tp,
        offload=read_offload(offload),
        dtype=dtype or "",
        reduce_dtype=reduce_dtype,
        layers_per_stage=layers_per_stage,
        edge_layers=edge_layers,
        shard_plan=shard_plan,
        compile=compile,
        cluster=hardware if isinstance(hardware, Cluster) else None,
    )
    asked = Asked(pins, given, count, split if callable(split) else None, top, time_limit)
    _check(asked)
    return asked


def planned(program: Program, asked: Asked, show: Callable[[str], None] | None = None) -> Plan:
    """Make the plan that is asked for: usual values where all degrees of the mesh are given and no cluster is, else searched. A whole
    mesh that fits a given cluster in no way is taken all the same.

    Args:
        show: is called with what a search is at.

    Raises:
        GraphparError: the program can't be planned so; the message says why.
    """
    check_heads(program, asked.mesh, asked.pins.shard_plan)
    program = with_dropout(program, asked.pins.dropout)
    if program.mode == GENERATE:
        pins, mesh = pins_of_generation(asked.pins, asked.mesh, asked.size)
        asked = replace(asked, pins=pins, mesh=mesh)
    precision = _precision(program, asked.pins.dtype)
    pins = replace(asked.pins, dtype=precision.dtype, param_dtype=precision.param_dtype)
    if asked.split is not None:
        pins = replace(pins, split_points=split_points_of(asked.split(program)))
    if pins.recompute == OF_THE_MODEL:
        recompute, warnings = of_the_model(program)
        recompute = AUTO if recompute == "none" and asked.searched else recompute
        plan = _planned(program, asked, replace(pins, recompute=recompute), show)
        return replace(plan, warnings=(*plan.warnings, *warnings))
    if pins.recompute == AUTO and not asked.searched:
        return _least_recomputation(program, asked, pins)
    return _planned(program, asked, pins, show)


def _planned(program: Program, asked: Asked, pins: PlanConstraints, show: Callable[[str], None] | None = None) -> Plan:
    if not asked.searched:
        chosen = choose(program, Mesh.resolve(asked.mesh, asked.devices), pins)
        if pins.cluster is None:
            return chosen
        return _priced(program, chosen, pins, pins.cluster)
    cluster = pins.cluster or Cluster.of_this_machine(asked.size)
    if not asked.complete:
        return search_plan(program, cluster, asked.mesh, pins, asked.top, asked.limit_s, show)
    mesh = Mesh.resolve(asked.mesh, asked.devices)
    try:
        return search_plan(program, cluster, mesh.degrees(), pins, asked.top, asked.limit_s, show)
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


def _least_recomputation(program: Program, asked: Asked, pins: PlanConstraints) -> Plan:
    """Return the plan with the least recomputation that fits in the devices' memory; where none fits, as with the most."""
    *less, most = least_first(program, pins.compile, bool(pins.overlap_tp), pins.offload)
    cluster = pins.cluster or Cluster.of_this_machine(asked.size)
    for kind in less:
        try:
            plan = _planned(program, asked, replace(pins, recompute=kind))
        except NothingFits:
            continue
        estimate = plan.predicted or estimate_plan(program, plan, cluster)
        if max(estimate.peak_memory_bytes) <= estimate.memory_bytes:
            return plan
    return _planned(program, asked, replace(pins, recompute=most))


def _precision(program: Program, asked: str) -> Precision:
    """Return the dtypes that the program was exported for, of which ``asked`` must be the computation's."""
    exported = (Precision() if program.source is None else program.source.precision).resolved(program.mode)
    if asked not in ("", exported.dtype):
        raise GraphparError(
            f"dtype is {asked!r}, but the program was exported in {exported.dtype!r}; leave it out, or export again."
        )
    return exported


# ---- checks ----------------------------------------------------------------------------------------------------


def check_batch(asked: Asked, batch: int) -> None:
    """Check that the global batch (``batch`` rows where none is asked for) divides over replicas and microbatches.

    Raises:
        GraphparError: it does not.
    """
    rows = batch if asked.pins.global_batch is None else asked.pins.global_batch
    mesh = Mesh(**asked.mesh)
    check_degrees(mesh, rows)
    if asked.pins.microbatch_size is not None:
        check_microbatch_size(asked.pins.microbatch_size, rows, mesh.replicas)


def _check(asked: Asked) -> None:
    """Check the arguments against each other."""
    pins = asked.pins
    check_degrees(Mesh(**asked.mesh), pins.global_batch)
    check_level(pins.zero)
    check_zero1_by(pins.zero1_by, pins.zero)
    if "dp_shard" in asked.mesh or asked.complete:
        check_zero(Mesh(**asked.mesh), pins.zero)
    mesh = Mesh(**asked.mesh)
    if pins.zero and not asked.complete and "dp_shard" not in asked.mesh:  # searched: some degree that can do it
        mesh = replace(mesh, dp_shard=2 * pins.reshard if type(pins.reshard) is int and pins.reshard > 1 else 2)
    level = level_of(mesh, pins.zero)
    if pins.reshard is not None:
        check_reshard(mesh, level, pins.reshard)
    check_prefetch(gathers_again(mesh.pp, level, pins.reshard), pins.prefetch, pins.prefetch_distance)
    if asked.complete or "tp" in asked.mesh:
        check_overlap(mesh, pins)
    if asked.complete or not {"dp_replicate", "dp_shard"} & set(free_axes(asked.mesh, pins.zero)):
        check_dp_mean(mesh, pins)
    if asked.complete:
        mesh = Mesh.resolve(asked.mesh, asked.devices)
        check_reduced(mesh, level_of(mesh, pins.zero), pins.reduce_dtype)
        if pins.schedule is not None:
            check_pipelined(pins.schedule, mesh)
    if pins.schedule is not None:
        canonical_name(pins.schedule)
    check_dropout(pins.dropout, pins.compile)
    if pins.compile:
        _check_compile(pins)
    check_offload(pins)
    if pins.global_batch is not None:
        check_batch(asked, pins.global_batch)
    pins.check_one_way(asked.split is not None)
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
    left_open = pins.recompute in (AUTO, OF_THE_MODEL)
    reason = obstacle(schedule or CUSTOM, cells, "none" if left_open else pins.recompute, pins.offload)
    if reason is not None:
        raise GraphparError(f"compile: {reason}.")


def _check_count(name: str, value: Any, least: int = 1) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise GraphparError(f"{name} is {value!r}; it must be a whole number.")
    if value < least:
        raise GraphparError(f"{name} is {value}; it must be at least {least}.")


def _check_edges(edges: Any) -> None:
    if edges is None:
        return
    if not isinstance(edges, tuple | list) or len(edges) != 2:
        raise GraphparError(f"edge_layers is {edges!r}; it must be two numbers, of layers before and after.")
    for value in edges:
        _check_count("edge_layers", value, least=0)


def _device_count(cluster: Any, devices: int | None) -> int | None:
    """Return the number of devices, from whichever argument gives it; None where neither does."""
    if not isinstance(cluster, Cluster):
        if cluster is not None and (isinstance(cluster, bool) or not isinstance(cluster, int)):
            raise GraphparError(
                f"cluster is a {type(cluster).__name__}; it must be a Cluster, a name such as '2xH100', a file, or a number of devices."
            )
        _check_count("the number of devices", cluster)
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
