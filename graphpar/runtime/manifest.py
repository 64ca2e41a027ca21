"""``plan.json`` as the runtime reads it: the stages, and what each one receives and sends.

    plan.json --load_manifest--> Manifest(stages=(StageInterface, ...), inputs=(InputInterface, ...), ...)

Boundary shapes (``receives``, ``sends``) are those of one microbatch on one rank, input shapes those of the global
batch. A stage's ``rank`` is its coordinate on the pp axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from graphpar.runtime.axes import AXES, AXIS, REPLICAS, STATE_AXES
from graphpar.runtime.errors import GraphparError, RuntimeProgramError
from graphpar.runtime.layout import I, P, R, Shard, Stored, Type
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.modes import GENERATE, MODES
from graphpar.runtime.name_runs import unpacked, unpacked_names
from graphpar.runtime.options import Decisions, check_decisions
from graphpar.runtime.plan_record import (
    DTYPES,
    Adapter,
    PlanRecord,
    Record,
    StageRecord,
    degrees_of,
    read_object,
    types_of,
)

T = TypeVar("T")
ROLES = ("input", "target", "sample_keys")


@dataclass(frozen=True)
class TensorInterface:
    """A tensor that is sent from a stage to the next; ``shape`` is that of one microbatch."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    types: Mapping[str, Type] = field(default_factory=dict, hash=False)
    """Its type on each compute axis; for the type check only, so a plan may leave it out."""
    per_position: tuple[int, ...] = ()
    """Of a program for generation: how many elements of each dim a position has; 0 where a dim does not follow them."""

    def shape_at(self, positions: int | None) -> tuple[int, ...]:
        """Return the shape for a window of so many positions."""
        if positions is None:
            return self.shape
        return tuple(each * positions or n for n, each in zip(self.shape, self.per_position))


@dataclass(frozen=True)
class InputInterface:
    """An input of the whole program.

    Attributes:
        batch_dim: ``None`` when every microbatch gets it whole.
        below: of token ids: how many tokens the model knows.
        classes: of labels: how many classes the loss knows, besides the label ``ignored``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None
    role: str
    below: int | None = None
    classes: int | None = None
    ignored: int | None = None


@dataclass(frozen=True)
class OutputInterface:
    """What the last stage returns. ``batch_dim`` says along which dim microbatches are joined."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None


@dataclass(frozen=True)
class StageInterface:
    """One stage: its class, the pp coordinate of the ranks that hold it, and its inputs and outputs by name."""

    index: int
    rank: int
    modules: tuple[str, ...]
    class_name: str
    file: str
    inputs: tuple[str, ...]
    counts: tuple[str, ...]
    receives: tuple[TensorInterface, ...]
    sends: tuple[TensorInterface, ...]
    recomputes: bool = False
    """Whether blocks of it run their forward again in the backward."""


@dataclass(frozen=True, kw_only=True)
class Manifest(Decisions):
    """Everything that the runtime needs to know about an emitted folder: the decisions of its plan, and the program's interface."""

    folder: Path
    mode: str
    mesh: Mapping[str, int]
    microbatches: int
    actions: Mapping[int, tuple[str | None, ...]] | None
    stages: tuple[StageInterface, ...]
    inputs: tuple[InputInterface, ...]
    count_names: tuple[str, ...]
    count_inputs: tuple[str, ...]
    outputs: tuple[OutputInterface, ...]
    ties: tuple[tuple[str, ...], ...]
    types: Mapping[str, Mapping[str, Type]]
    """The types in which parameters are stored, as the plan lists them, under every name of a tie; ``stored`` adds those that it
    leaves out."""
    shapes: Mapping[str, tuple[int, ...]]
    """Whole shapes of the tensors that some axis shards, under every name of a tie."""
    steady: tuple[str, ...] = ()
    """Buffers that every microbatch writes alike, so that a step writes them once."""
    placed: tuple[str, ...] = ()
    """The axes on which operators are placed, so that stages communicate over them."""
    streams: tuple[tuple[int, ...], ...] = ()
    """Of each dropout, in execution order, the dim that has the batch, and how many rows are before and behind each example in it."""
    owners: Mapping[str, int] = field(default_factory=dict)
    """At level 1, which of the ranks that share state updates a parameter, under every name of a tie; empty where each updates a slice of
    all."""
    gather_dtype: torch.dtype | None = None
    """The dtype in which the stages read all parameters; None: in several."""
    casts: Mapping[str, torch.dtype] = field(default_factory=dict)
    """The dtype in which stages read a parameter that is stored in another and not in shards."""
    model_file: str | None = None
    """What the program was compiled from: a path relative to ``folder``, or a dotted module name."""
    no_eval: str | None = None
    """Why a program for training can't compute what the model computes in evaluation."""
    coupled: str | None = None
    """What a program for training computes of the examples of a batch together, so that the batch can't be computed in parts."""
    unsplittable: str | None = None
    """Why the loss of a program for training is no sum over examples."""
    plain: Mapping[str, Any] = field(default_factory=dict)
    """What the model was given besides tensors, by name: numbers, strings, None."""
    parameters: tuple[str, ...] = ()
    """Of a program for training: the names that ``named_parameters()`` of the model gives, in its order."""
    adapters: tuple[Adapter, ...] = ()
    """Low-rank adapters that the model has."""
    wrapped: str = ""
    """What names of transformers' model begin with in the program's, where that wraps it."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """How tokens are chosen where a call does not say."""

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
    def fully_sharded(self) -> frozenset[str]:
        """The parameters of which each rank of dp_shard and cp holds a shard, under every name of a tie."""
        return frozenset(name for name, types in self.types.items() if isinstance(types.get("dp_shard"), Shard))

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
    interface = plan.record("interface")
    counts = interface.record("counts")
    ties = interface.lists("ties", str) if interface.has("ties") else ()
    shapes = unpacked(interface.listings("shapes", int)) if interface.has("shapes") else {}
    manifest = Manifest(
        folder=Path(folder).resolve(),
        mode=record.mode,
        mesh=record.mesh.degrees(),
        microbatches=record.microbatches,
        actions=None if record.actions is None else dict(enumerate(record.actions)),
        stages=_stages(record.stages, interface.records("stages")),
        inputs=tuple(_input(record) for record in interface.records("inputs")),
        count_names=counts.strings("names"),
        count_inputs=counts.strings("inputs"),
        outputs=tuple(_output(record) for record in interface.records("outputs")),
        ties=ties,
        types=_under_every_name(record.parameters, ties),
        shapes=_under_every_name(shapes, ties),
        streams=interface.lists("streams", int) if interface.has("streams") else (),
        gather_dtype=_dtype(interface, "gather_dtype"),
        casts=_dtypes(interface, "casts"),
        owners=_under_every_name(unpacked(interface.values("owners", int)) if interface.has("owners") else {}, ties),
        steady=tuple(interface.optional("steady", list, [])),
        placed=tuple(degrees_of(plan.record("sharding"), "axes")) if plan.has("sharding") else (),
        model_file=plan.optional("model_file", (str, type(None)), None),
        no_eval=interface.optional("no_eval", (str, type(None)), None),
        coupled=interface.optional("coupled", (str, type(None)), None),
        unsplittable=interface.optional("unsplittable", (str, type(None)), None),
        plain=interface.optional("plain", dict, {}),
        parameters=unpacked_names(interface.items("parameters", (str, dict))) if interface.has("parameters") else (),
        adapters=tuple(map(Adapter.read, interface.records("adapters"))) if interface.has("adapters") else (),
        generation=interface.optional("generation", dict, {}),
        wrapped=f"{inner}." if (inner := interface.optional("pretrained", dict, {}).get("path")) else "",
        **record.decisions,
    )
    _check(manifest, str(path))
    return manifest


def _dtype(record: Record, field: str) -> torch.dtype | None:
    name = record.optional(field, (str, type(None)), None)
    if name is not None and name not in DTYPES:
        raise RuntimeProgramError(f"{record.where}: {field} is {name!r}, not one of {', '.join(DTYPES)}")
    return None if name is None else DTYPES[name]


def _dtypes(record: Record, field: str) -> dict[str, torch.dtype]:
    names = unpacked(record.values(field, str)) if record.has(field) else {}
    if strange := sorted(set(names.values()) - set(DTYPES)):
        raise RuntimeProgramError(f"{record.where}: {field} has {strange[0]!r}, not one of {', '.join(DTYPES)}")
    return {name: DTYPES[dtype] for name, dtype in names.items()}


def _under_every_name(values: Mapping[str, T], ties: Sequence[Sequence[str]]) -> dict[str, T]:
    """``values``, and for a name that it lacks the value of another name of its tie."""
    found = dict(values)
    for group in ties:
        given = [values[name] for name in group if name in values]
        found.update({name: given[0] for name in group if given and name not in found})
    return found


def _stages(placements: Sequence[StageRecord], interfaces: list[Record]) -> tuple[StageInterface, ...]:
    if len(placements) != len(interfaces):
        raise RuntimeProgramError(
            f"{interfaces[0].where if interfaces else 'plan.json'}: {len(placements)} stages are placed, "
            f"but {len(interfaces)} have an interface"
        )
    return tuple(
        StageInterface(
            index=placement.index,
            rank=placement.rank,
            modules=placement.modules,
            class_name=interface.get("class", str),
            file=interface.get("file", str),
            inputs=interface.strings("inputs"),
            counts=interface.strings("counts"),
            receives=tuple(_tensor(record) for record in interface.records("receives")),
            sends=tuple(_tensor(record) for record in interface.records("sends")),
            recomputes=interface.optional("recomputes", bool, False),
        )
        for placement, interface in zip(placements, interfaces)
    )


def _tensor(record: Record) -> TensorInterface:
    name, shape, dtype = _described(record)
    types = types_of({name: record.optional("types", dict, {})}, record.where)[name]
    per_position = record.items("per_position", int) if record.has("per_position") else ()
    return TensorInterface(name, shape, dtype, record.get("requires_grad", bool), types, per_position)


def _input(record: Record) -> InputInterface:
    batch_dim, role = record.optional("batch_dim", int, None), record.get("role", str)
    known = (record.optional(name, int, None) for name in ("below", "classes", "ignored"))
    return InputInterface(*_described(record), batch_dim, role, *known)


def _output(record: Record) -> OutputInterface:
    return OutputInterface(*_described(record), record.optional("batch_dim", int, None))


def _described(record: Record) -> tuple[str, tuple[int, ...], torch.dtype]:
    return record.get("name", str), record.shape(), record.dtype()


def _check(plan: Manifest, where: str) -> None:
    """What must hold between the fields of a plan; a violation is a broken or edited ``plan.json``."""
    known = {spec.name for spec in plan.inputs}
    used = {name for stage in plan.stages for name in stage.inputs} | set(plan.count_inputs)
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
    if plan.zero != 1 and plan.owners:
        broken.append(f"zero is {plan.zero}, but owners says which rank updates {min(plan.owners)!r}, as at level 1")
    asked: list[object] = [plan.recompute] if isinstance(plan.recompute, str) else list(plan.recompute.values())
    kinds = {str(kind) for kind in asked}
    recomputing = [stage.index for stage in plan.stages if stage.recomputes]
    if recomputing and kinds == {"none"}:
        broken.append(f"recompute is 'none', but stage {recomputing[0]} recomputes")
    if not recomputing and kinds <= {"full", "selective"}:
        broken.append(f"recompute is {plan.recompute!r}, but no stage recomputes")
    strange = next(((name, rank) for name, rank in plan.owners.items() if not 0 <= rank < plan.shards), None)
    if strange is not None:
        broken.append(
            f"{strange[0]!r} is updated by rank {strange[1]} of those that share state, of which there are {plan.shards}"
        )
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
    for before, after in zip(plan.stages, plan.stages[1:]):
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
            broken.append(f"{name!r} is sharded, but interface.shapes does not have its whole shape")
    for group in plan.ties:
        specs = {str(plan.spec(name)) for name in group}
        if len(specs) > 1:
            broken.append(f"the names {', '.join(group)} of one parameter have different types: {sorted(specs)}")
    return broken
