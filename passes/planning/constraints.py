"""``PlanConstraints``: what the user has decided, and whether a mesh, a batch and a program allow it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphpar.annotations.patterns import names_of, resolve
from graphpar.annotations.values import WHOLE, Spec, allows, spec_text
from graphpar.cost_models.flops import operator_flops
from graphpar.errors import GraphparError, near_match
from graphpar.hardware.cluster import Cluster
from graphpar.ir.mesh import Mesh
from graphpar.ir.program import Program, module_path
from graphpar.ir.recomputation import Recompute
from graphpar.ir.split_points import SplitAt
from graphpar.operators.matrix import heads_of
from graphpar.operators.table import record_of
from graphpar.passes.normalize.coupled import coupled_text, placed_axes
from graphpar.passes.planning.recomputation import AUTO, BESIDE_OFFLOAD, OF_THE_MODEL, check_beside_rings
from graphpar.passes.planning.sharded_state import (
    check_prefetch,
    check_reduced,
    check_reshard,
    gathers_again,
    level_of,
)
from graphpar.passes.sharding.exchange import exchange_over, exchanged_parameters
from graphpar.passes.sharding.shard import Sharded
from graphpar.runtime.axes import AXIS, OFFLOADS, REPLICAS
from graphpar.runtime.layout import R, Shard
from graphpar.schedules.registry import get_schedule
from graphpar.text import listed, share_text


@dataclass(frozen=True)
class PlanConstraints:
    """The user's decisions; graphpar decides what is None."""

    schedule: str | None = None
    microbatch_size: int | None = None
    global_batch: int | None = None
    split_points: tuple[SplitAt, ...] | None = None
    stages: tuple[tuple[str, ...], ...] | None = None  # module paths of each stage
    table: str | None = None  # the user's own schedule table, as CSV text
    allow_batch_coupling: bool = False
    dp_mean: bool = False
    dropout: str = "exact"
    zero: int | None = None
    zero1_by: str | None = None
    reshard: str | int | None = None
    prefetch: str | None = None
    prefetch_distance: int | None = None
    recompute: Recompute = "none"
    overlap_tp: bool | None = None  # None: where prices say that it is faster
    offload: tuple[str, ...] = ()
    dtype: str = "fp32"
    param_dtype: str = "fp32"
    reduce_dtype: str | None = None
    layers_per_stage: int | None = None
    edge_layers: tuple[int, int] | None = None  # how many layers the modules before and after the layers count as
    shard_plan: Mapping[str, Any] | None = None
    compile: bool = False  # torch.compile is to compile the blocks
    cluster: Cluster | None = None  # of as many devices as the mesh
    sharded: Sharded | None = None  # already solved, for the mesh's compute axes

    @property
    def by_layers(self) -> bool:
        """Whether split points are given as numbers of layers."""
        return self.layers_per_stage is not None or self.edge_layers is not None

    def check_one_way(self, computed: bool = False) -> None:
        """Check that split points are given in at most one way; ``computed``: a function of the program will give them.

        Raises:
            GraphparError: several ways are used.
        """
        ways = {
            "split points": self.split_points is not None or computed,
            "lists of modules a stage": self.stages is not None,
            "layers a stage": self.by_layers,
        }
        given = [name for name, is_given in ways.items() if is_given]
        if len(given) > 1:
            raise GraphparError(f"Give {' or '.join(given)}, not both: each says where the stages begin.")


def check_degrees(mesh: Mesh, batch: int | None) -> None:
    """Check that the mesh's degrees can run, and divide ``batch`` rows where that number is known.

    Raises:
        GraphparError: they can't.
    """
    if batch is not None and batch % mesh.replicas:
        shown = " x ".join(f"{axis}={mesh.degrees()[axis]}" for axis in REPLICAS if mesh.degrees()[axis] > 1)
        raise GraphparError(
            f"A global batch of {batch} does not divide over {shown}; each replica takes as many rows. "
            f"Degrees that do: {', '.join(_divisors(batch))}."
        )


def check_data_axes(mesh: Mesh, pins: PlanConstraints, program: Program) -> None:
    """Check that what is pinned about losses, gradients and state of replicas can be done on ``mesh``.

    Raises:
        GraphparError: it can't.
    """
    level = level_of(mesh, pins.zero)
    check_reduced(mesh, level, pins.reduce_dtype, program.mode)
    check_dp_mean(mesh, pins, program)
    check_overlap(mesh, pins)
    check_offload(pins, program)
    check_reshard(mesh, level, pins.reshard or "default")
    check_prefetch(gathers_again(mesh.pp, level, pins.reshard), pins.prefetch, pins.prefetch_distance)
    check_replicas(mesh, level, pins.shard_plan, program)


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
            found = Shard(0) if AXIS[axis].stores_shards and in_shards else experts.get(name, {}).get(axis, R)
            if (axis in placed and not AXIS[axis].stores_shards) or allows(spec[axis], found, len(shape)):
                continue
            if not AXIS[axis].stores_shards:
                why = f"the {degrees[axis]} ranks of {axis} compute with it as {found}; dp_shard stores shards, tp uses them"
            elif in_shards:
                why = (
                    f"zero={level} stores it as {found} over {axis}={degrees[axis]}; leave the pin out, or take zero=1"
                )
            else:
                why = f"with zero={level} it is whole on the {degrees[axis]} ranks of {axis}; zero=2 and 3 store {list(shape)} as S(0)"
            raise refused(name, spec, axis, why)
    activations = [
        (path, spec) for table in (pins.inputs, pins.outputs) for path, specs in table.items() for spec in specs
    ]
    activations += [(path, spec) for path, specs in pins.keyword_inputs.items() for spec in specs.values()]
    for path, given in activations:
        for axis in given or ():
            if axis not in placed:
                why = f"the {degrees[axis]} ranks of {axis} take rows of their own, and nothing is placed on it; leave the pin out"
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
                f"accept it with the pin {{{pattern!r}: 'replicate'}}."
            )


def idle_pins(mesh: Mesh, shard_plan: Mapping[str, Any] | None, program: Program) -> list[str]:
    """Return a warning for each axis of one rank over which a shard plan asks for shards: there they change nothing."""
    idle = resolve(shard_plan, names_of(program), mesh.degrees()).idle if shard_plan else {}
    return [
        f"The shard plan divides {listed([repr(each) for each in patterns], 3)} over {axis}, which has one rank in this plan: there it "
        f"changes nothing; give {axis} a degree in --mesh."
        for axis, patterns in idle.items()
    ]


def check_dp_mean(mesh: Mesh, pins: PlanConstraints, program: Program | None = None) -> None:
    """Check that the loss can be the mean of the replicas' own losses, if that is asked for.

    Raises:
        GraphparError: it can't.
    """
    if not pins.dp_mean:
        return
    if mesh.replicas == 1:
        raise GraphparError(
            "dp_mean takes the mean of the replicas' own losses, but the mesh gives no replicas; give mesh dp_replicate=2 or more, or "
            "dp_shard."
        )
    if program is not None and program.mode != "train":
        raise GraphparError(
            "dp_mean says what the loss of training is; this program is for inference, so leave it out."
        )
    if program is not None and (program.couplings or program.unsplittable is not None):
        raise GraphparError(
            f"dp_mean takes the mean of the replicas' own losses, but {program.unsplittable or coupled_text(program.couplings)}, over the "
            "rows of all replicas; leave it out."
        )


def check_overlap(mesh: Mesh, pins: PlanConstraints) -> None:
    """Check that there is tensor parallelism whose collectives can run beside products, if that is asked for.

    Raises:
        GraphparError: there is none, or budgets say what is recomputed.
    """
    if not pins.overlap_tp:
        return
    check_beside_rings(pins.recompute)
    if mesh.tp == 1:
        raise GraphparError(
            "overlap_tp runs collectives of tensor parallelism beside products, but the mesh has tp=1; give mesh tp=2 or more, or leave "
            "it out."
        )


def read_offload(value: str | Sequence[str]) -> tuple[str, ...]:
    """Return what is asked for, ``"optimizer,activations"`` or a list, in the order of :data:`OFFLOADS`.

    Raises:
        GraphparError: there is no such thing.
    """
    listed = isinstance(value, Sequence) and all(isinstance(each, str) for each in value)
    names = (
        [each.strip() for each in value.split(",")] if isinstance(value, str) else list(value) if listed else [value]
    )
    other = next((name for name in names if name not in OFFLOADS), None)
    if other is not None:
        raise GraphparError(
            f"offload is {value!r}; it may have {' and '.join(OFFLOADS)}, separated by commas."
            f"{near_match(str(other), OFFLOADS)}"
        )
    return tuple(name for name in OFFLOADS if name in names)


def check_offload(pins: PlanConstraints, program: Program | None = None) -> None:
    """Check that what is to live in the memory of the host can.

    Raises:
        GraphparError: it can't.
    """
    if not pins.offload:
        return
    if program is not None and program.mode != "train":
        raise GraphparError("offload moves what training stores; this program is for inference, so leave it out.")
    if "activations" not in pins.offload:
        return
    if program is not None and not program.blocks:
        raise GraphparError(
            f"offload=activations moves what repeated blocks keep, and {program.name} has none; leave it out."
        )
    kinds = pins.recompute.values() if isinstance(pins.recompute, Mapping) else [pins.recompute]
    other = next((kind for kind in kinds if kind not in (*BESIDE_OFFLOAD, OF_THE_MODEL, AUTO)), None)
    if other is not None:
        raise GraphparError(
            f"offload=activations moves what autograd keeps, and recompute={other} keeps results by other means; take "
            f"{' or '.join(BESIDE_OFFLOAD)}."
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


def check_microbatch_size(size: int, batch: int, replicas: int) -> None:
    """Check that microbatches of ``size`` rows divide the rows of each replica evenly.

    Raises:
        GraphparError: they don't; the sizes that do are listed.
    """
    rows = batch // replicas
    if size < 1 or rows % size:
        whose = f"The {rows} rows of a replica do" if replicas > 1 else f"A global batch of {batch} does"
        raise GraphparError(
            f"{whose} not divide into microbatches of {size}; sizes that do: {', '.join(_divisors(rows))}."
        )


def _divisors(rows: int) -> list[str]:
    return [str(number) for number in range(1, rows + 1) if rows % number == 0]
