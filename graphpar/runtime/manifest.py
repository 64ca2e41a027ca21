"""``plan.json`` as the runtime reads it: the stages, and what each one receives and sends.

    plan.json --load_manifest--> Manifest(stages=(StageInterface, ...), inputs=(InputInterface, ...), ...)

Boundary shapes (``receives``, ``sends``) are those of one microbatch on one rank, input shapes those of the global
batch. A stage's ``rank`` is its coordinate on the pp axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

import torch

from graphpar.runtime.axes import AXES, AXIS, REPLICAS, STATE_AXES
from graphpar.runtime.errors import GraphparError, RuntimeProgramError
from graphpar.runtime.layout import I, P, R, Shard, Stored, Type
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.option_kinds import GENERATE, MODES, TRAIN, ends_of
from graphpar.runtime.options import Decisions, check_decisions
from graphpar.runtime.plan_record import Adapter, PlanRecord, read_object, without_usual
from graphpar.runtime.records import DTYPES, Record, degrees_of, kept, packed, packed_fields, read

T = TypeVar("T")
ROLES = ("input", "target", "sample_keys")


@dataclass(frozen=True)
class TensorInterface:
    """A tensor that is sent from a stage to the next; ``shape`` is that of one microbatch."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    types: Mapping[str, Type] = field(default_factory=dict, hash=False, metadata={"always": True})
    """Its type on each compute axis; for the type check only, so a plan may leave it out."""
    per_position: tuple[int, ...] = ()
    """Of a program for generation: how many elements of each dim a position has; 0 where a dim does not follow them. Of one for a range of
    lengths: by how many a dim grows with as many positions as lengths are multiples of."""

    def shape_at(self, positions: int | None) -> tuple[int, ...]:
        """Return the shape for a window of so many positions."""
        if positions is None:
            return self.shape
        return tuple(each * positions or n for n, each in zip(self.shape, self.per_position))


@dataclass(frozen=True, kw_only=True)
class InputInterface:
    """An input of the whole program.

    Attributes:
        batch_dim: ``None`` when every microbatch gets it whole.
        below: of token ids: how many tokens the model knows.
        classes: of labels: how many classes the loss knows, besides the label ``ignored``.
        per_position: as of what is sent, where the length of the sequence varies.
        fill: what a batch is padded with to a length that the program takes; None: its last position.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None = kept(None, always=True)
    role: str
    below: int | None = None
    classes: int | None = None
    ignored: int | None = None
    per_position: tuple[int, ...] = ()
    fill: int | None = None


@dataclass(frozen=True, kw_only=True)
class OutputInterface:
    """What the last stage returns. ``batch_dim`` says along which dim microbatches are joined."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None = kept(None, always=True)
    per_position: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelOutputInterface:
    """What the model of a training program returns besides the loss.

    Attributes:
        stage: the stage that computes it.
        module: the block whose result it is; None: the stage calls ``keep_output`` with it.
        shape: that of one microbatch, unsharded.
        batch_dim: along which microbatches and replicas are joined.
        adds: whether they are added up.
        types: its type on each axis but those of replicas.
    """

    name: str
    stage: int
    module: str | None = None
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None = kept(None, always=True)
    adds: bool = False
    types: Mapping[str, Type] = kept(make=dict)
    per_position: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EvaluatedInterface:
    """What a stage takes and sends in evaluation, where it has a method ``evaluated``."""

    inputs: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    receives: tuple[TensorInterface, ...] = ()
    sends: tuple[TensorInterface, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StageInterface:
    """One stage: its class, the pp coordinate of the ranks that hold it, and its inputs and outputs by name."""

    index: int = kept(0, never=True)
    rank: int = kept(0, never=True)
    modules: tuple[str, ...] = kept((), never=True)
    class_name: str = kept(key="class")
    file: str
    inputs: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    receives: tuple[TensorInterface, ...] = ()
    sends: tuple[TensorInterface, ...] = ()
    recomputes: bool = False
    """Whether blocks of it run their forward again in the backward."""
    partly: tuple[str, ...] = ()
    """Those of them that keep results of single operators."""
    evaluated: EvaluatedInterface | None = None
    """What it takes and sends in evaluation, where the model is another program then."""

    @property
    def in_evaluation(self) -> StageInterface:
        """The stage as it is in evaluation."""
        if self.evaluated is None:
            return self
        return replace(
            self, evaluated=None, **{each.name: getattr(self.evaluated, each.name) for each in fields(self.evaluated)}
        )


@dataclass(frozen=True)
class Counts:
    """What the loss divides by: names of the counts, and the inputs and buffers that they are computed from."""

    names: tuple[str, ...] = kept((), always=True)
    inputs: tuple[str, ...] = kept((), always=True)
    buffers: tuple[str, ...] = kept(())


@dataclass(frozen=True, kw_only=True)
class Interface:
    """What a program is to the runtime, besides its plan: code generation writes it into ``plan.json``."""

    inputs: tuple[InputInterface, ...]
    counts: Counts
    stages: tuple[StageInterface, ...]
    outputs: tuple[OutputInterface, ...]
    model_outputs: tuple[ModelOutputInterface, ...] = ()
    """Of a program for training: what the model returns besides the loss, as far as the loss is computed from it."""
    evaluated_outputs: tuple[ModelOutputInterface, ...] = ()
    """The same in evaluation, where the model is another program then."""
    steady: tuple[str, ...] = ()
    """Buffers that every microbatch writes alike, so that a step writes them once."""
    branches: Mapping[str, str] = kept(make=dict)
    """Branches on values, of which the program has one each: what each asks, by the buffer that holds whether it was another."""
    shapes: Mapping[str, tuple[int, ...]] = kept(make=dict, packed=True)
    """Full shapes of the tensors that some axis shards; in a manifest under every name of a tie."""
    gather_dtype: torch.dtype | None = kept(None, short=True)
    """The dtype in which the stages read all parameters; None: in several."""
    casts: Mapping[str, torch.dtype] = kept(make=dict, packed=True, short=True)
    """The dtype in which stages read a parameter that is stored in another and not in shards."""
    working: Mapping[str, torch.dtype] = kept(make=dict, packed=True, short=True)
    """At level 1, the dtype in which ranks store a trained parameter whole, where each has only its piece in that in which it is updated;
    in a manifest under every name of a tie."""
    owners: Mapping[str, int] = kept(make=dict, packed=True)
    """At level 1, which of the ranks that share state updates a parameter, in a manifest under every name of a tie; empty where each
    updates a slice of all."""
    ties: tuple[tuple[str, ...], ...] = ()
    streams: tuple[tuple[int, ...], ...] = ()
    """Of each random operator, in execution order, the dim that has the batch (-1: none has), and how many rows are before and behind
    each example in it; of what is no dropout also the bits of precision of the floats that it draws, 0 of whole numbers."""
    evaluated_streams: tuple[tuple[int, ...], ...] = ()
    """The same of evaluation, where the model is another program then."""
    rounded_weights: Mapping[str, tuple[str, ...]] = kept(make=dict, packed=True)
    """The weights of products in 8 bits, each with the recipe, and how it is divided where it is multiplied: ``mxfp8``,
    ``tp S(0)``, the outermost first."""
    plain: Mapping[str, Any] = field(default_factory=dict)
    """What the model was given besides tensors, by name: numbers, strings, None."""
    unread: tuple[str, ...] = ()
    """What the model was given and reads nothing of: batches may have anything there."""
    no_eval: str | None = None
    """Why a program for training can't compute what the model computes in evaluation."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """How tokens are chosen where a call does not say."""
    pretrained: Mapping[str, Any] = field(default_factory=dict)
    """Of a model that transformers loads: where it is from, and the ``path`` at which the program wraps it."""
    adapters: tuple[Adapter, ...] = ()
    """Low-rank adapters that the model has."""
    unsplittable: str | None = None
    """Why the loss of a program for training is no sum over examples."""
    coupled: str | None = None
    """What a program for training computes of the examples of a batch together, so that the batch can't be computed in parts."""
    multiple: int = 1
    """Where the length of the sequence varies: stages take multiples of it."""
    unpadded: str | None = None
    """Why results would change if a batch of another length were padded to a multiple."""
    parameters: tuple[str, ...] = kept((), packed=True)
    """Of a program for training: the names that ``named_parameters()`` of the model gives, in its order."""


def packed_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``plan.json`` in which names of equal layers stand once, without usual values; what reads a plan takes both."""
    interface = packed_fields(Interface, record["interface"])
    return {**without_usual(record), "parameters": packed(record["parameters"]), "interface": interface}


@dataclass(frozen=True, kw_only=True)
class Manifest(Decisions, Interface):
    """Everything that the runtime needs to know about an emitted folder: the decisions of its plan, and the program's interface."""

    folder: Path
    mode: str
    mesh: Mapping[str, int]
    microbatches: int
    actions: Mapping[int, tuple[str | None, ...]] | None
    types: Mapping[str, Mapping[str, Type]]
    """The types in which parameters are stored, as the plan lists them, under every name of a tie; ``stored`` adds those that it
    leaves out."""
    placed: tuple[str, ...] = ()
    """The axes on which operators are placed, so that stages communicate over them."""
    padding: int = 0
    """How many positions of its sequences are padding."""
    model_file: str | None = None
    """What the program was compiled from: a path relative to ``folder``, or a dotted module name."""
    device_kind: str | None = None
    """The kind of device that the plan is for; None where it was made for a mesh alone."""

    @property
    def count_names(self) -> tuple[str, ...]:
        """What the loss divides by."""
        return self.counts.names

    @property
    def count_inputs(self) -> tuple[str, ...]:
        """The inputs from which that is computed."""
        return self.counts.inputs

    @property
    def wrapped(self) -> str:
        """What names of transformers' model begin with in the program's, where that wraps it."""
        return f"{inner}." if (inner := self.pretrained.get("path")) else ""

    @property
    def world_size(self) -> int:
        """How many ranks the plan is for."""
        return math.prod(self.mesh.values())

    @property
    def reduced(self) -> torch.dtype | None:
        """The dtype in which gradients are summed over replicas; None: that of each parameter."""
        return None if self.reduce_dtype is None else DTYPES[self.reduce_dtype]

    @property
    def pp(self) -> int:
        """How many pipeline ranks hold the stages."""
        return self.mesh.get("pp", 1)

    @property
    def gathers_by_table(self) -> bool:
        """Whether the table of a pipeline says when a stage's parameters are gathered, once a step."""
        return bool(self.fully_sharded) and self.pp > 1 and self.reshard in ("default", "never")

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled for the backward."""
        return self.dtype == "fp16" and self.mode == "train"

    @property
    def replicas(self) -> int:
        """How many replicas of the pipeline there are, each with its own rows of the batch."""
        return math.prod(self.mesh.get(axis, 1) for axis in REPLICAS)

    @property
    def generates(self) -> Path | None:
        """Of a program for training: the folder of that by which it generates between steps, if it does."""
        below = self.folder / GENERATE
        return below if self.mode == TRAIN and (below / "plan.json").is_file() else None

    @property
    def evaluates_apart(self) -> bool:
        """Whether the stages have methods of their own for evaluation."""
        return any(stage.evaluated is not None for stage in self.stages)

    @property
    def rows(self) -> int:
        """How many rows a whole batch has: of a program for generation the sequences that all replicas compute at once."""
        return self.inputs[0].shape[0] if self.mode == GENERATE else self.global_batch

    @property
    def shards(self) -> int:
        """How many ranks share the state from level 1 on."""
        return math.prod(self.mesh.get(axis, 1) for axis in STATE_AXES)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of degree above 1 over which a tensor has a type: all but pp."""
        return tuple(axis for axis in AXES if AXIS[axis].typed and self.mesh.get(axis, 1) > 1)

    @property
    def fully_sharded(self) -> dict[str, int]:
        """The parameters of which each rank of dp_shard and cp holds a shard, under every name of a tie, with the dim that is divided."""
        kinds = {name: types.get("dp_shard") for name, types in self.types.items()}
        return {name: kind.dim for name, kind in kinds.items() if isinstance(kind, Shard)}

    def spec(self, name: str) -> dict[str, Type]:
        """Look up the type on each of ``axes`` in which a parameter or buffer is computed with."""
        listed = self.types.get(name, {})
        types = {axis: listed.get(axis, R if AXIS[axis].replicas else I) for axis in self.axes}
        return {axis: R if AXIS[axis].stores_shards else kind for axis, kind in types.items()}

    def stored(self, name: str) -> dict[str, Type]:
        """Look up the type on each of ``axes`` in which a parameter or buffer, its gradient and its optimizer state are stored."""
        kind = self.types.get(name, {}).get("dp_shard")
        return self.spec(name) | {
            axis: Stored(kind.dim) for axis in self.axes if axis in STATE_AXES and isinstance(kind, Shard)
        }

    def at(self, length: int) -> Manifest:
        """Return the program for sequences of this length: the shapes of what it takes, sends and returns."""
        assert self.seq is not None
        more = length - ends_of(self.seq)[1]
        if not more:
            return self

        def sized(spec: Any) -> Any:
            grown = zip(spec.shape, spec.per_position)
            return (
                replace(spec, shape=tuple(n + each * more // self.multiple for n, each in grown))
                if spec.per_position
                else spec
            )

        def all_sized(specs: tuple[T, ...]) -> tuple[T, ...]:
            return tuple(map(sized, specs))

        stages = (
            replace(stage, receives=all_sized(stage.receives), sends=all_sized(stage.sends)) for stage in self.stages
        )
        return replace(
            self, inputs=all_sized(self.inputs), outputs=all_sized(self.outputs), model_outputs=all_sized(self.model_outputs),
            stages=tuple(stages),
        )  # fmt: skip

    @property
    def offered_outputs(self) -> tuple[ModelOutputInterface, ...]:
        """Of a program for training: what an evaluation gives besides the loss."""
        return self.evaluated_outputs if self.evaluates_apart else self.model_outputs

    def input(self, name: str) -> InputInterface:
        """Look up the input of this name."""
        return next(spec for spec in self.inputs if spec.name == name)

    def stages_of(self, rank: int) -> tuple[StageInterface, ...]:
        """List the stages at the pp coordinate ``rank``, first to last."""
        return tuple(stage for stage in self.stages if stage.rank == rank)


def load_manifest(folder: str | Path) -> Manifest:
    """Read ``plan.json`` of an emitted folder.

    Raises:
        RuntimeProgramError: there is no such file, or it is not a plan of this version.
    """
    path = Path(folder) / "plan.json"
    if not path.is_file():
        raise RuntimeProgramError(f"{folder} is not an emitted folder: it has no plan.json")
    plan = Record(read_object(path), str(path))
    record = PlanRecord.read(plan)
    plan.optional("torch", str, None)  # for people alone
    interface = read(Interface, plan.record("interface"))
    sharding = plan.record("sharding") if plan.has("sharding") else Record({}, str(path))
    device = plan.record("cluster").record("device") if plan.optional("cluster", (dict, NoneType), None) else None
    if len(record.stages) != len(interface.stages):
        raise RuntimeProgramError(
            f"{path}: {len(record.stages)} stages are placed, but {len(interface.stages)} have an interface"
        )
    given = {each.name: getattr(interface, each.name) for each in fields(interface)} | {
        "stages": tuple(
            replace(stage, index=at.index, rank=at.rank, modules=at.modules)
            for at, stage in zip(record.stages, interface.stages)
        ),
        "shapes": under_every_name(interface.shapes, interface.ties),
        "working": under_every_name(interface.working, interface.ties),
        "owners": under_every_name(interface.owners, interface.ties),
    }
    manifest = Manifest(
        folder=Path(folder).resolve(),
        mode=record.mode,
        mesh=record.mesh.degrees(),
        microbatches=record.microbatches,
        actions=None if record.actions is None else dict(enumerate(record.actions)),
        types=under_every_name(record.parameters, interface.ties),
        placed=tuple(degrees_of(sharding, "axes")) if sharding.has("axes") else (),
        model_file=plan.optional("model_file", (str, NoneType), None),
        device_kind=None if device is None else device.get("kind", str),
        **given,
        **record.decisions,
    )
    _check(manifest, str(path))
    return manifest


def under_every_name(values: Mapping[str, T], ties: Sequence[Sequence[str]]) -> dict[str, T]:
    """Return ``values``, and for a name that has none that of another name of its tie."""
    found = dict(values)
    for group in ties:
        given = [values[name] for name in group if name in values]
        found.update({name: given[0] for name in group if given and name not in found})
    return found


def _check(plan: Manifest, where: str) -> None:
    """What must hold between the fields of a plan; a violation is a broken or edited ``plan.json``."""
    known = {spec.name for spec in plan.inputs}
    evaluated = [stage.in_evaluation for stage in plan.stages]
    used = {name for stage in (*plan.stages, *evaluated) for name in stage.inputs} | set(plan.count_inputs)
    broken: list[str] = []
    if plan.mode not in MODES:
        broken.append(f"mode {plan.mode!r} is none of {', '.join(MODES)}")
    if plan.microbatches * plan.microbatch_size * plan.replicas != plan.global_batch:
        replicas = f" on each of {plan.replicas} replicas" if plan.replicas > 1 else ""
        broken.append(
            f"{plan.microbatches} microbatches of {plan.microbatch_size}{replicas} are not a global batch "
            f"of {plan.global_batch}"
        )
    try:
        check_decisions(plan, Mesh(**plan.mesh), plan.mode)
    except GraphparError as error:
        broken.append(f"{error}".removesuffix("."))
    if plan.zero < 2 and plan.fully_sharded:
        broken.append(f"zero is {plan.zero}, but {min(plan.fully_sharded)!r} is stored in shards")
    if plan.zero != 1 and plan.working:
        broken.append(f"zero is {plan.zero}, but working stores {min(plan.working)!r} in two dtypes, as at level 1")
    if plan.zero != 1 and plan.owners:
        broken.append(f"zero is {plan.zero}, but owners says which rank updates {min(plan.owners)!r}, as at level 1")
    requested: list[object] = [plan.recompute] if isinstance(plan.recompute, str) else list(plan.recompute.values())
    kinds = {str(kind) for kind in requested}
    recomputing = [stage.index for stage in plan.stages if stage.recomputes]
    if recomputing and kinds == {"none"}:
        broken.append(f"recompute is 'none', but stage {recomputing[0]} recomputes")
    if not recomputing and kinds <= {"full", "selective"}:
        broken.append(f"recompute is {plan.recompute!r}, but no stage recomputes")
    strange = next(((name, rank) for name, rank in plan.owners.items() if not 0 <= rank < plan.shards), None)
    if strange is not None:
        broken.append(f"{strange[0]!r} is updated by rank {strange[1]} of the {plan.shards} that share state")
    if plan.fully_sharded and plan.pp > 1 and plan.actions is None:
        broken.append("state is sharded under a pipeline, but no actions say when it is reduced")
    if used - known:
        broken.append(f"stages use the inputs {sorted(used - known)}, which the program does not have")
    if [stage.index for stage in plan.stages] != list(range(len(plan.stages))):
        broken.append("the stages are not numbered 0, 1, 2, ...")
    if {stage.rank for stage in plan.stages} != set(range(plan.pp)):
        broken.append(f"the stages are not placed on each of the {plan.pp} pipeline ranks")
    for spec in plan.inputs:
        if spec.role not in ROLES:
            broken.append(f"the role of input {spec.name!r} is {spec.role!r}, not one of {', '.join(ROLES)}")
        pieces = plan.replicas * (1 if plan.mode == GENERATE else plan.microbatches)
        if spec.batch_dim is not None and not 0 <= spec.batch_dim < len(spec.shape):
            broken.append(f"input {spec.name!r} has the shape {list(spec.shape)}, so no dim {spec.batch_dim}")
        elif spec.batch_dim is not None and pieces and spec.shape[spec.batch_dim] % pieces:
            broken.append(
                f"input {spec.name!r} has size {spec.shape[spec.batch_dim]} along dim {spec.batch_dim}, "
                f"which {pieces} microbatches do not divide"
            )
    for before, after in (*zip(plan.stages, plan.stages[1:]), *itertools.pairwise(evaluated)):
        if before.sends != after.receives:
            broken.append(f"stage {after.index} does not receive what stage {before.index} sends")
    for name, value in (("microbatches", plan.microbatches), ("microbatch_size", plan.microbatch_size)):
        if value < 1:
            broken.append(f"{name} is {value}; it must be at least 1")
    broken += _broken_types(plan)
    if broken:
        raise RuntimeProgramError(f"{where} is broken: " + "; ".join(broken))


def _broken_types(plan: Manifest) -> list[str]:
    broken: list[str] = []
    for name, listed in plan.types.items():
        spec = plan.spec(name)
        if P in listed.values():
            broken.append(f"{name!r} is stored as a pending sum (P)")
        if any(isinstance(kind, Shard) for kind in spec.values()) and name not in plan.shapes:
            broken.append(f"{name!r} is sharded, but interface.shapes does not have its full shape")
    for group in plan.ties:
        specs = {str(plan.spec(name)) for name in group}
        if len(specs) > 1:
            broken.append(f"the names {', '.join(group)} of one parameter have different types: {sorted(specs)}")
    return broken
