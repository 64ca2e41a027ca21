"""``PlanRecord``: the part of a plan that planner and runtime share, and its form in ``plan.json``.

    Plan ──PlanRecord.to_json──► plan.json ──PlanRecord.read──► Plan, Manifest

The planner adds split points and placements, code generation the interfaces of the stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.layout import Type, parse_type

VERSION = 2
"""The version of ``plan.json``. Since 2, placements are keyed by module path, operator and occurrence
(:mod:`graphpar.passes.sharding.keys`)."""


@dataclass(frozen=True)
class StageRecord:
    """A stage: its index in the chain, the pp rank that holds it, and the modules in it."""

    index: int
    rank: int
    modules: tuple[str, ...]


@dataclass(frozen=True)
class PlanRecord:
    """The decisions that a run depends on. ``actions``: the cells of each rank's schedule table, None where it is idle."""

    mode: str
    mesh: Mapping[str, int]
    schedule: str
    microbatches: int
    microbatch_size: int
    global_batch: int
    stages: tuple[StageRecord, ...]
    parameters: Mapping[str, Mapping[str, Type]]
    actions: tuple[tuple[str | None, ...], ...] | None

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data; :meth:`read` is its inverse."""
        table = None if self.actions is None else {str(rank): list(row) for rank, row in enumerate(self.actions)}
        return {
            "version": VERSION,
            "mode": self.mode,
            "mesh": dict(self.mesh),
            "schedule": self.schedule,
            "microbatches": self.microbatches,
            "microbatch_size": self.microbatch_size,
            "global_batch": self.global_batch,
            "stages": [{"index": s.index, "rank": s.rank, "modules": list(s.modules)} for s in self.stages],
            "parameters": {
                name: {axis: str(kind) for axis, kind in types.items()} for name, types in self.parameters.items()
            },
            "actions": table,
        }

    @staticmethod
    def read(plan: Record) -> PlanRecord:
        """Read what :meth:`to_json` returned.

        Raises:
            RuntimeProgramError: it is of another version, or a field is missing or of a wrong type.
        """
        version = plan.get("version", (int, type(None))) if plan.has("version") else None
        if version != VERSION:
            raise RuntimeProgramError(
                f"{plan.where} has version {version!r}; this graphpar reads version {VERSION}. Compile the model again."
            )
        table: dict[str, Sequence[str | None]] | None = plan.optional("actions", dict, None)
        return PlanRecord(
            mode=plan.get("mode", str),
            mesh={axis: int(degree) for axis, degree in plan.get("mesh", dict).items()},
            schedule=plan.get("schedule", str),
            microbatches=plan.get("microbatches", int),
            microbatch_size=plan.get("microbatch_size", int),
            global_batch=plan.get("global_batch", int),
            stages=tuple(
                StageRecord(each.get("index", int), each.get("rank", int), each.strings("modules"))
                for each in plan.records("stages")
            ),
            parameters=types_of(plan.optional("parameters", dict, {}), plan.where),
            actions=None if table is None else tuple(tuple(table[rank]) for rank in sorted(table, key=int)),
        )


class Record:
    """A JSON object whose errors name the file and field; every method raises ``RuntimeProgramError`` for a missing or wrong field."""

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, dict):
            raise RuntimeProgramError(f"{where}: expected an object, found {type(values).__name__}")
        self._values = values
        self.where = where

    def has(self, key: str) -> bool:
        """Whether the field is there."""
        return key in self._values

    def get(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """Return a field, which must be of the type ``kind``."""
        if key not in self._values:
            raise RuntimeProgramError(f"{self.where}: the field {key!r} is missing")
        value = self._values[key]
        if not isinstance(value, kind):
            raise RuntimeProgramError(f"{self.where}: the field {key!r} is {value!r}, which is of the wrong type")
        return value

    def optional(self, key: str, kind: type | tuple[type, ...], default: Any) -> Any:
        """Return a field, or ``default`` where it is missing or null."""
        return self.get(key, kind) if self._values.get(key) is not None else default

    def record(self, key: str) -> Record:
        """Return an object."""
        return Record(self.get(key, dict), f"{self.where}, {key}")

    def records(self, key: str) -> list[Record]:
        """Return a list of objects."""
        return [Record(item, f"{self.where}, {key}[{i}]") for i, item in enumerate(self.get(key, list))]

    def strings(self, key: str) -> tuple[str, ...]:
        """Return a list of strings, empty where it is missing."""
        return tuple(str(item) for item in self.optional(key, list, []))

    def dtype(self) -> torch.dtype:
        """Return the torch dtype that the field ``dtype`` names."""
        found = getattr(torch, self.get("dtype", str), None)
        if not isinstance(found, torch.dtype):
            raise RuntimeProgramError(f"{self.where}: {self.get('dtype', str)!r} is not a torch dtype")
        return found

    def shape(self) -> tuple[int, ...]:
        """Return the field ``shape``."""
        return tuple(int(size) for size in self.get("shape", list))


def types_of(listed: Mapping[str, Mapping[str, str]], where: str) -> dict[str, dict[str, Type]]:
    """Parse types by name and axis; ``where`` names them in errors.

    Raises:
        RuntimeProgramError: a text is not a type.
    """
    found: dict[str, dict[str, Type]] = {}
    for name, spec in listed.items():
        try:
            found[name] = {axis: parse_type(text) for axis, text in spec.items()}
        except ValueError as error:
            raise RuntimeProgramError(f"{where}, types of {name}: {error}") from None
    return found
