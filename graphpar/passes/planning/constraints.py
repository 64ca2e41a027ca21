"""``PlanConstraints``: what the user has decided, and whether a mesh, a batch and a program allow it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from graphpar.annotations.patterns import names_of, resolve
from graphpar.annotations.values import WHOLE, Spec, allows, spec_text
from graphpar.cost_models.flops import operator_flops
from graphpar.emitted.packed_attention import packed_attention
from graphpar.errors import GraphparError
from graphpar.hardware.cluster import Cluster
from graphpar.ir.precision import Precision
from graphpar.ir.program import Program, module_path
from graphpar.ir.split_points import SplitAt
from graphpar.operators.matrix import heads_of
from graphpar.operators.table import record_of
from graphpar.passes.normalize.coupled import coupled_text, is_coupled, placed_axes
from graphpar.passes.sharding.exchange import exchange_over, exchanged_parameters
from graphpar.passes.sharding.shard import Sharded
from graphpar.runtime.axes import AXIS
from graphpar.runtime.layout import R, Shard
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.option_kinds import GENERATE, TRAIN
from graphpar.runtime.options import Request, check_decisions, level_of
from graphpar.runtime.schedule_records import get_schedule
from graphpar.runtime.stages.compiled import obstacle
from graphpar.text import listed, share_text

FREE_AXES = tuple(name for name, axis in AXIS.items() if axis.searched)
"""The axes whose degrees are searched where they are not pinned."""


def free_axes(pinned: Collection[str], zero: int | None, mode: str = "train") -> tuple[str, ...]:
    """Return the axes that are searched where some are pinned.

    A pinned dp_replicate says how replicas are to be made, so state is then sharded only where a ZeRO level is asked for.
    """
    sharded = mode == "train" and (zero or (zero is None and "dp_replicate" not in pinned))
    return tuple(axis for axis in FREE_AXES if axis not in pinned and (sharded or axis != "dp_shard"))


@dataclass(frozen=True, kw_only=True)
class PlanConstraints(Request):
    """A request that was checked; graphpar decides what is None.

    Attributes:
        cluster: of as many devices as there are; None where it was not given.
        mesh: degrees of the axes that are given.
        devices: None where only the mesh says how many.
        table: CSV text.
        split: a function that computes split points of the program.
        split_points: those that are given.
        sharded: the program of a rank, already solved for the mesh's compute axes.
    """

    cluster: Cluster | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    split_points: tuple[SplitAt, ...] | None = None
    sharded: Sharded | None = None

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.mesh.values()) if self.devices is None else self.devices

    @property
    def complete(self) -> bool:
        """Whether no axis is left to the search."""
        alone = not self.mesh and self.cluster is None and self.size == 1
        full = bool(self.mesh) and self.size == math.prod(self.mesh.values())
        return self.table is not None or alone or full or not free_axes(self.mesh, self.zero)

    @property
    def searched(self) -> bool:
        """Whether something is searched: on a cluster that is given also what a whole mesh leaves open."""
        return not self.complete or (self.cluster is not None and self.table is None)

    @property
    def by_layers(self) -> bool:
        """Whether split points are given as numbers of layers."""
        return self.layers_per_stage is not None or self.edge_layers is not None

    def check_one_way(self) -> None:
        """Check that split points are given in at most one way.

        Raises:
            GraphparError: several ways are used.
        """
        ways = {
            "split points": self.split_points is not None or self.split is not None,
            "lists of modules a stage": self.stages is not None,
            "layers a stage": self.by_layers,
        }
        given = [name for name, is_given in ways.items() if is_given]
        if len(given) > 1:
            raise GraphparError(f"Give {' or '.join(given)}, not both: each says where the stages begin.")


def global_batch(program: Program, pins: PlanConstraints) -> int:
    """Return the rows of the global batch, as pinned or as in the example.

    Raises:
        GraphparError: fewer than one row is pinned.
    """
    batch = program.batch if pins.global_batch is None else pins.global_batch
    if batch < 1:
        raise GraphparError(f"The global batch is {batch}; it must be at least 1.")
    return batch


def coupling_reason(program: Program, pins: PlanConstraints) -> str | None:
    """Return why the batch can't be split at all; None where it can."""
    if program.couplings and not pins.allow_batch_coupling and program.unsplittable is None:
        return f"examples depend on each other: {coupled_text(program.couplings)}"
    return program.unsplittable


def compiles(program: Program, pins: PlanConstraints, schedule: str, cells: Iterable[str | None] = ()) -> bool:
    """Whether blocks are compiled under a schedule, whose table has ``cells``, if any: as pinned; else on GPUs where they can be, but for
    generation, and packed attention, whose mask compiled blocks make."""
    if pins.compile is not None:
        return pins.compile
    on_gpus = pins.cluster is not None and pins.cluster.device.kind != "cpu"
    if not on_gpus or program.mode == GENERATE or is_packed(program):
        return False
    return obstacle(schedule, cells, pins.dropout, pins.offload or ()) is None


def is_packed(program: Program) -> bool:
    """Whether attention is inside of documents that are packed into rows."""
    graphs = (program.graph, *(block.graph for block in program.blocks.values()))
    return any(node.target is packed_attention for graph in graphs for node in graph.nodes)


def usual_schedule(program: Program, pins: PlanConstraints) -> str:
    """Return the schedule of plans for which none is pinned and no other is searched: that of a mesh without hardware, or without a
    pipeline."""
    return "1F1B" if program.mode == TRAIN and coupling_reason(program, pins) is None else "GPipe"


def exported_precision(program: Program) -> Precision:
    """Return the dtypes that ``program`` was exported for."""
    return (Precision() if program.source is None else program.source.precision).resolved(program.mode)


def decided_by(precision: Precision) -> dict[str, Any]:
    """Return the decisions of a plan that the dtypes of its program are."""
    return {name: value or None for name, value in vars(precision).items()}


def check_on_mesh(mesh: Mesh, pins: PlanConstraints, program: Program) -> None:
    """Check that what is pinned can be done with ``program`` on ``mesh``.

    Raises:
        GraphparError: it can't.
    """
    check_decisions(pins, mesh, program.mode)
    check_dp_mean(pins, program)
    check_offload(pins, program)
    check_replicas(mesh, level_of(mesh, pins.zero), pins.shard_plan, program)


def check_replicas(
    mesh: Mesh,
    level: int,
    shard_plan: Mapping[str, Any] | None,
    program: Program,
    stored: Collection[str] | None = None,
) -> None:
    """Check that what a shard plan says of axes of replicas, where nothing is searched, is so.

    Args:
        level: that of ZeRO.
        stored: the parameters that are stored in shards from level 2 on; None before that is known.

    Raises:
        GraphparError: it is not.
    """
    degrees = {axis: degree for axis, degree in mesh.degrees().items() if AXIS[axis].replicas and degree > 1}
    if not shard_plan or not degrees:
        return
    pins, placed = resolve(shard_plan, names_of(program), degrees), placed_axes(program, mesh)
    experts = exchanged_parameters(program) if exchange_over(program, mesh) else {}

    def refused(name: str, spec: Spec, axis: str, why: str) -> GraphparError:
        patterns = ", ".join(map(repr, pins.origins[name]))
        return GraphparError(f"Shard plan, {patterns}: {name!r} can't be {spec_text({axis: spec[axis]})}: {why}.")

    for name, spec in pins.parameters.items():
        shape = program.parameters[name].shape
        in_shards = level >= 2 and (bool(shape) if stored is None else name in stored)
        for axis in spec:
            found = _stored_as(spec) if AXIS[axis].stores_shards and in_shards else experts.get(name, {}).get(axis, R)
            if (axis in placed and not AXIS[axis].stores_shards) or allows(spec[axis], found, len(shape)):
                continue
            if not AXIS[axis].stores_shards:
                why = f"the {degrees[axis]} ranks of {axis} compute with it as {found}; dp_shard stores shards, tp uses them"
            elif in_shards:
                why = (
                    f"zero={level} stores it as {found} over {axis}={degrees[axis]}; leave the pin out, or take zero=1"
                )
            else:
                why = f"with zero={level} it is replicated on the {degrees[axis]} ranks of {axis}; zero=2 and 3 store {list(shape)} as S(0)"
            raise refused(name, spec, axis, why)
    activations = [
        (path, spec) for table in (pins.inputs, pins.outputs) for path, specs in table.items() for spec in specs
    ]
    activations += [(path, spec) for path, specs in pins.keyword_inputs.items() for spec in specs.values()]
    for path, given in activations:
        for axis in given or ():
            if axis not in placed:
                why = f"the {degrees[axis]} ranks of {axis} take different rows, and nothing is placed on it; leave the pin out"
                raise refused(path, given or {}, axis, why)


def check_heads(program: Program, degrees: Mapping[str, int], shard_plan: Mapping[str, Any] | None) -> None:
    """Check that the ranks of tp divide the heads of some attention.

    An attention of one head, which no degree divides, does not count, nor does one whose parameters the shard plan keeps whole on tp:
    those of its module, or of the nearest around it that has any.

    Args:
        degrees: those of the axes that the user gave.

    Raises:
        GraphparError: there is attention, and the degree divides the heads of none.
    """
    degree = degrees.get("tp", 1)
    if degree == 1:
        return
    graphs = [("", program.graph), *((name, block.graph) for name, block in program.blocks.items())]
    rows, heads, flops, total = program.batch, dict[str, int](), 0.0, 0.0
    for scope, graph in graphs:
        count = len(program.prefixes(scope))
        for node in graph.nodes:
            if node.op != "call_function" or not record_of(node).multiplies:
                continue
            work = operator_flops(node, rows) * count
            total += work
            if (number := heads_of(node)) > 1:
                heads[module_path(node)] = number
                flops += work
    if not heads or any(number % degree == 0 for number in heads.values()):
        return
    names = names_of(program)
    pins = resolve(shard_plan or {}, names, degrees).parameters
    whole = {name for name, spec in pins.items() if "tp" in spec and spec["tp"] <= WHOLE}
    for path, number in heads.items():
        while path and not names.below(path):
            path = path.rpartition(".")[0]
        if set(names.below(path)) - whole:
            fits = [each for each in range(2, number + 1) if number % each == 0]
            pattern = ".".join("*" if part.isdecimal() else part for part in path.split(".")) or "**"
            raise GraphparError(
                f"tp={degree} divides the heads of no attention, such as the {number} of {path or program.name}: each rank would compute "
                f"all of it, {share_text(flops / total)} of the flops of matrix products. Take tp={listed(list(map(str, fits)), 4)}, or "
                f"accept it with the pin {{{pattern!r}: 'replicate'}} (--shard-plan)."
            )


def _stored_as(spec: Spec) -> Shard:
    """Return how a parameter that is pinned to ``spec`` is stored in shards."""
    return Shard(next((kind.dim for kind in spec.get("dp_shard", ()) if isinstance(kind, Shard)), 0))


def stored_dims(
    mesh: Mesh, shard_plan: Mapping[str, Any] | None, program: Program, local: Program, stored: Collection[str]
) -> dict[str, int]:
    """Return on which dim each of the parameters that are ``stored`` in shards is divided: as a shard plan says, else on the first; where
    that has fewer rows on a rank (of the program ``local``) than there are shards, such as the experts of a rank, on the first dim
    that divides evenly, if there is one."""
    pins = resolve(shard_plan, names_of(program), mesh.degrees()).parameters if shard_plan else {}

    def divided(name: str) -> int:
        shape = local.parameters[name].shape
        if pins.get(name, {}).get("dp_shard") or shape[0] >= mesh.shards:
            return _stored_as(pins.get(name, {})).dim
        return next((dim for dim, size in enumerate(shape) if size % mesh.shards == 0), 0)

    return {name: divided(name) for name in sorted(stored)}


def check_even(mesh: Mesh, dims: Mapping[str, int], local: Program) -> None:
    """Check that shards of parameters that are not divided on their first dim are equal, since FSDP2 pads the first alone.

    Args:
        local: the program of a rank.

    Raises:
        GraphparError: they are not.
    """
    for name, dim in dims.items():
        shape = local.parameters[name].shape
        if dim and shape[dim] % mesh.shards:
            raise GraphparError(
                f"Shard plan: {name!r} can't be S({dim})@dp_shard: its dim {dim}, {shape[dim]} on a rank, does not divide evenly over "
                f"{mesh.state_text}, and FSDP2 pads dim 0 alone. Leave the pin out, or take a dim that divides."
            )


def idle_pins(mesh: Mesh, shard_plan: Mapping[str, Any] | None, program: Program) -> list[str]:
    """Return a warning for each axis of one rank over which a shard plan asks for shards: there they change nothing."""
    idle = resolve(shard_plan, names_of(program), mesh.degrees()).idle if shard_plan else {}
    return [
        f"The shard plan divides {listed([repr(each) for each in patterns], 3)} over {axis}, which has one rank in this plan: there it "
        f"changes nothing; give {axis} a degree in --mesh."
        for axis, patterns in idle.items()
    ]


def check_dp_mean(pins: PlanConstraints, program: Program) -> None:
    """Check that the loss of ``program`` can be the mean of the replicas' own losses, if that is asked for.

    Raises:
        GraphparError: it can't.
    """
    if pins.dp_mean and is_coupled(program):
        raise GraphparError(
            f"dp_mean takes the mean of the replicas' own losses, but {program.unsplittable or coupled_text(program.couplings)}, over the "
            "rows of all replicas; leave it out."
        )


def check_offload(pins: PlanConstraints, program: Program) -> None:
    """Check that ``program`` has what is to live in the memory of the host.

    Raises:
        GraphparError: it has no blocks, whose activations are to.
    """
    if "activations" in (pins.offload or ()) and not program.blocks:
        raise GraphparError(
            f"offload=activations moves activations of repeated blocks, and {program.name} has none; leave it out."
        )


def check_pipelined(schedule: str, mesh: Mesh) -> None:
    """Check that without a pipeline no schedule is asked for that needs several stages a rank.

    Raises:
        GraphparError: it is.
    """
    row = get_schedule(schedule)
    if mesh.pp == 1 and row.min_stages > 1:
        shown = "".join(f" {axis}={degree}" for axis, degree in mesh.degrees().items() if degree > 1)
        shown = shown.replace(" ", ", ").replace(", ", " ", 1)
        raise GraphparError(
            f"Schedule {row.name} needs a pipeline with {row.min_stages} stages a rank, but the mesh{shown} has pp=1; give pp=2 or "
            "more, or leave the schedule out."
        )
