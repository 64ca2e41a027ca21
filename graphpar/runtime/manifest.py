"""``plan.json`` as the runtime reads it: which stages there are, what each one is fed and sends.

    plan.json --load_manifest--> Manifest(stages=(StageInterface, ...), inputs=(InputInterface, ...), ...)

Boundary shapes (``receives``, ``sends``) are those of one microbatch, input shapes those of the global batch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphpar.runtime.errors import RuntimeProgramError

VERSION = 1
ROLES = ("input", "target", "sample_keys")


@dataclass(frozen=True)
class TensorInterface:
    """A tensor that crosses from a stage to the next; ``shape`` is that of one microbatch."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class InputInterface:
    """An input of the whole program. ``batch_dim`` is ``None`` when every microbatch gets it whole."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None
    role: str


@dataclass(frozen=True)
class OutputInterface:
    """What the last stage returns. ``batch_dim`` says along which dim microbatches are joined."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None


@dataclass(frozen=True)
class StageInterface:
    """One stage: its class, the rank that holds it, and its inputs and outputs by name."""

    index: int
    rank: int
    modules: tuple[str, ...]
    class_name: str
    file: str
    inputs: tuple[str, ...]
    counts: tuple[str, ...]
    receives: tuple[TensorInterface, ...]
    sends: tuple[TensorInterface, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything that the runtime needs to know about an emitted folder."""

    folder: Path
    mode: str
    mesh: Mapping[str, int]
    schedule: str
    microbatches: int
    microbatch_size: int
    global_batch: int
    actions: Mapping[int, tuple[str | None, ...]] | None
    stages: tuple[StageInterface, ...]
    inputs: tuple[InputInterface, ...]
    count_names: tuple[str, ...]
    count_inputs: tuple[str, ...]
    outputs: tuple[OutputInterface, ...]
    ties: tuple[tuple[str, ...], ...]

    @property
    def world_size(self) -> int:
        """How many ranks the plan is for."""
        size = 1
        for degree in self.mesh.values():
            size *= degree
        return size

    @property
    def pp(self) -> int:
        """How many ranks the stages lie on."""
        return self.mesh.get("pp", 1)

    def input(self, name: str) -> InputInterface:
        """The input of this name."""
        return next(spec for spec in self.inputs if spec.name == name)

    def stages_of(self, rank: int) -> tuple[StageInterface, ...]:
        """The stages that pipeline rank ``rank`` holds, first to last."""
        return tuple(stage for stage in self.stages if stage.rank == rank)


class _Record:
    """A JSON object that says which field of which file is missing or of the wrong type."""

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, dict):
            raise RuntimeProgramError(f"{where}: expected an object, found {type(values).__name__}")
        self._values = values
        self.where = where

    def get(self, key: str, kind: type | tuple[type, ...]) -> Any:
        if key not in self._values:
            raise RuntimeProgramError(f"{self.where}: the field {key!r} is missing")
        value = self._values[key]
        if not isinstance(value, kind):
            raise RuntimeProgramError(f"{self.where}: the field {key!r} is {value!r}, which is of the wrong type")
        return value

    def optional(self, key: str, kind: type | tuple[type, ...], default: Any) -> Any:
        return self.get(key, kind) if self._values.get(key) is not None else default

    def record(self, key: str) -> _Record:
        return _Record(self.get(key, dict), f"{self.where}, {key}")

    def records(self, key: str) -> list[_Record]:
        return [_Record(item, f"{self.where}, {key}[{i}]") for i, item in enumerate(self.get(key, list))]

    def strings(self, key: str) -> tuple[str, ...]:
        return tuple(str(item) for item in self.optional(key, list, []))

    def dtype(self) -> torch.dtype:
        found = getattr(torch, self.get("dtype", str), None)
        if not isinstance(found, torch.dtype):
            raise RuntimeProgramError(f"{self.where}: {self.get('dtype', str)!r} is no torch dtype")
        return found

    def shape(self) -> tuple[int, ...]:
        return tuple(int(size) for size in self.get("shape", list))


def load_manifest(folder: str | Path) -> Manifest:
    """Read ``plan.json`` of an emitted folder.

    Raises:
        RuntimeProgramError: there is no such file, or it is no plan of this version.
    """
    path = Path(folder) / "plan.json"
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise RuntimeProgramError(f"{folder} is no emitted folder: it has no plan.json") from None
    except json.JSONDecodeError as error:
        raise RuntimeProgramError(f"{path} is not valid JSON: {error}") from None
    plan = _Record(values, str(path))
    version = plan.get("version", int)
    if version != VERSION:
        raise RuntimeProgramError(f"{path} has version {version}; this runtime reads version {VERSION}. Emit it again.")
    interface = plan.record("interface")
    counts = interface.record("counts")
    manifest = Manifest(
        folder=Path(folder).resolve(),
        mode=plan.get("mode", str),
        mesh={axis: int(degree) for axis, degree in plan.get("mesh", dict).items()},
        schedule=plan.get("schedule", str),
        microbatches=plan.get("microbatches", int),
        microbatch_size=plan.get("microbatch_size", int),
        global_batch=plan.get("global_batch", int),
        actions=_actions(plan.optional("actions", dict, None)),
        stages=_stages(plan.records("stages"), interface.records("stages")),
        inputs=tuple(_input(record) for record in interface.records("inputs")),
        count_names=counts.strings("names"),
        count_inputs=counts.strings("inputs"),
        outputs=tuple(_output(record) for record in interface.records("outputs")),
        ties=tuple(tuple(group) for group in interface.optional("ties", list, [])),
    )
    _check(manifest, str(path))
    return manifest


def _actions(table: dict[str, Sequence[str | None]] | None) -> Mapping[int, tuple[str | None, ...]] | None:
    if table is None:
        return None
    return {int(rank): tuple(row) for rank, row in sorted(table.items(), key=lambda item: int(item[0]))}


def _stages(placements: list[_Record], interfaces: list[_Record]) -> tuple[StageInterface, ...]:
    if len(placements) != len(interfaces):
        raise RuntimeProgramError(
            f"{interfaces[0].where if interfaces else 'plan.json'}: {len(placements)} stages are placed, "
            f"but {len(interfaces)} have an interface"
        )
    return tuple(
        StageInterface(
            index=placement.get("index", int),
            rank=placement.get("rank", int),
            modules=placement.strings("modules"),
            class_name=interface.get("class", str),
            file=interface.get("file", str),
            inputs=interface.strings("inputs"),
            counts=interface.strings("counts"),
            receives=tuple(_tensor(record) for record in interface.records("receives")),
            sends=tuple(_tensor(record) for record in interface.records("sends")),
        )
        for placement, interface in zip(placements, interfaces)
    )


def _tensor(record: _Record) -> TensorInterface:
    return TensorInterface(
        record.get("name", str), record.shape(), record.dtype(), record.get("requires_grad", bool)
    )


def _input(record: _Record) -> InputInterface:
    return InputInterface(
        record.get("name", str),
        record.shape(),
        record.dtype(),
        record.optional("batch_dim", int, None),
        record.get("role", str),
    )


def _output(record: _Record) -> OutputInterface:
    return OutputInterface(
        record.get("name", str), record.shape(), record.dtype(), record.optional("batch_dim", int, None)
    )


def _check(plan: Manifest, where: str) -> None:
    """What must hold between the fields of a plan; a violation is a broken or edited ``plan.json``."""
    known = {spec.name for spec in plan.inputs}
    used = {name for stage in plan.stages for name in stage.inputs} | set(plan.count_inputs)
    broken: list[str] = []
    if plan.mode not in ("train", "infer"):
        broken.append(f"mode {plan.mode!r} is neither 'train' nor 'infer'")
    if plan.microbatches * plan.microbatch_size != plan.global_batch:
        broken.append(
            f"{plan.microbatches} microbatches of {plan.microbatch_size} are not a global batch of {plan.global_batch}"
        )
    if used - known:
        broken.append(f"stages use the inputs {sorted(used - known)}, which the program does not have")
    if [stage.index for stage in plan.stages] != list(range(len(plan.stages))):
        broken.append("the stages are not numbered 0, 1, 2, ...")
    if {stage.rank for stage in plan.stages} != set(range(plan.pp)):
        broken.append(f"the stages are not placed on each of the {plan.pp} pipeline ranks")
    for spec in plan.inputs:
        if spec.role not in ROLES:
            broken.append(f"the role of input {spec.name!r} is {spec.role!r}, not one of {', '.join(ROLES)}")
        if spec.batch_dim is not None and spec.shape[spec.batch_dim] % plan.microbatches:
            broken.append(
                f"input {spec.name!r} has size {spec.shape[spec.batch_dim]} along dim {spec.batch_dim}, "
                f"which {plan.microbatches} microbatches do not divide"
            )
    for before, after in zip(plan.stages, plan.stages[1:]):
        if before.sends != after.receives:
            broken.append(f"stage {after.index} does not receive what stage {before.index} sends")
    if broken:
        raise RuntimeProgramError(f"{where} is broken: " + "; ".join(broken))
