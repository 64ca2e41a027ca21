"""``PlanRecord``: the part of a plan that planner and runtime share, and its form in ``plan.json``.

    Plan ──PlanRecord.to_json──► plan.json ──PlanRecord.read──► Plan, Manifest

The planner adds split points and placements, code generation the interfaces of the stages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphpar.runtime.errors import GraphparError, RuntimeProgramError
from graphpar.runtime.layout import Type
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.option_kinds import ZERO1_BY
from graphpar.runtime.options import Decisions, options_of
from graphpar.runtime.records import Record, degrees_of, kept, read, types_of, unpacked, what_is, written
from graphpar.runtime.schedule_records import canonical_name

VERSION = 2
"""The version of ``plan.json``. Since 2, placements are keyed by module path, operator and occurrence
(:mod:`graphpar.passes.sharding.keys`)."""

_NEEDED = ("schedule", "global_batch", "microbatch_size")
"""The decisions that no plan goes without."""
_ALWAYS = ("zero", "recompute", "dtype", "param_dtype")
"""The decisions that are written even where they are as usual, since scripts read them."""

PROGRAM_FIELDS = ("interface", "model_file", "torch")
"""The fields of ``plan.json`` that an emitted program has besides those of its plan."""

REPORT = "report.json"
"""The file beside ``plan.json`` that holds the report, with the hash of the decisions that it is of."""


@dataclass(frozen=True)
class StageRecord:
    """A stage: its index in the chain, the pp rank that holds it, and the modules in it."""

    index: int
    rank: int
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Adapter:
    """A low-rank adapter: ``scale * b @ a`` is added to ``weight``.

    Attributes:
        layer: path of the module that it adapts.
        weight, a, b: names of parameters: weight [out, in], a [rank, in], b [out, rank].
        transposed: the weight is [in, out].
        stacked: all three have the experts in front: [experts, ...].
        shared: something else reads the weight, too, such as a tied embedding, so the product can't be merged into it.
    """

    layer: str
    weight: str
    a: str
    b: str
    rank: int
    alpha: float
    scale: float
    transposed: bool = kept(False, always=True)
    stacked: bool = kept(False, always=True)
    shared: bool = kept(False, always=True)


@dataclass(frozen=True)
class PlanRecord:
    """What a run depends on. ``actions``: the cells of each rank's schedule table, None where it is idle."""

    mode: str
    mesh: Mesh
    microbatches: int
    stages: tuple[StageRecord, ...]
    parameters: Mapping[str, Mapping[str, Type]]
    actions: tuple[tuple[str | None, ...], ...] | None
    decisions: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data; :meth:`read` is its inverse."""
        table = None if self.actions is None else {str(rank): list(row) for rank, row in enumerate(self.actions)}
        return {
            "version": VERSION,
            "mode": self.mode,
            "mesh": self.mesh.degrees(),
            "microbatches": self.microbatches,
            **{name: list(value) if isinstance(value, tuple) else value for name, value in self.decisions.items()},
            "stages": [written(stage) for stage in self.stages],
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
        if not plan.has("version"):
            raise RuntimeProgramError(
                f"{plan.where}: the field 'version' is missing; it is not a plan, or a damaged one. Compile the model again."
            )
        version = plan.get("version", int)
        if version != VERSION:
            raise RuntimeProgramError(
                f"{plan.where} has version {version!r}; this graphpar reads version {VERSION}. Compile the model again."
            )
        actions, decisions = _actions(plan), _decisions(plan)
        if actions is None:
            try:
                canonical_name(decisions["schedule"])
            except GraphparError as error:
                raise RuntimeProgramError(f"{plan.where}: {error}") from None
        return PlanRecord(
            mode=plan.get("mode", str),
            mesh=Mesh(**degrees_of(plan, "mesh")),
            microbatches=plan.get("microbatches", int),
            stages=tuple(read(StageRecord, each) for each in plan.records("stages")),
            parameters=types_of(dict(sorted(unpacked(plan.get("parameters", dict)).items())), plan.where),
            actions=actions,
            decisions=decisions,
        )


def _decisions(plan: Record) -> dict[str, Any]:
    """Read the decisions, each by its kind; one that is missing has its usual value."""
    found: dict[str, Any] = {}
    for name, known in options_of(Decisions).items():
        kept = (
            plan.get(name, known.kind.types) if name in _NEEDED else plan.optional(name, known.kind.types, known.usual)
        )
        try:
            found[name] = known.usual if kept is None or kept == known.usual else known.kind.check(name, kept)
        except GraphparError as error:
            raise RuntimeProgramError(f"{plan.where}: {error}") from None
    if found["zero"] != 1 and found["zero1_by"] == ZERO1_BY[0]:  # as plans said it before they left it open
        found["zero1_by"] = None
    return found


def without_usual(record: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what a reader takes where it is missing: options at their usual values, and what is null or an empty list."""
    usual = {name: known.usual for name, known in options_of(Decisions).items() if name not in (*_NEEDED, *_ALWAYS)}
    return {
        name: value
        for name, value in record.items()
        if value not in (None, []) and not (name in usual and value == usual[name])
    }


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object, such as ``plan.json``.

    Raises:
        RuntimeProgramError: it holds something else, or is no JSON.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RuntimeProgramError(f"{path} is not JSON: {error}; compile the model again") from None
    if not isinstance(found, dict):
        raise RuntimeProgramError(f"{path} holds no plan: it is {what_is(found)}, not an object")
    return found


def decisions_of(record: Mapping[str, Any]) -> str:
    """Return a hash of the decisions of a ``plan.json``: of all but what an emitted program has besides those of its plan."""
    decisions = {name: value for name, value in record.items() if name not in PROGRAM_FIELDS}
    decisions = without_usual(decisions) | {"parameters": unpacked(record.get("parameters", {}))}
    return hashlib.sha256(json.dumps(decisions, sort_keys=True).encode()).hexdigest()


def kept_report(file: Path, record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the report that lies beside the plan ``record`` in ``file``; None where there is none of these decisions.

    Raises:
        RuntimeProgramError: it can't be read.
    """
    path = file.parent / REPORT
    if file.name != "plan.json" or not path.is_file():
        return None
    kept = Record(read_object(path), str(path))
    return kept.get("report", dict) if kept.get("decisions", str) == decisions_of(record) else None


def _actions(plan: Record) -> tuple[tuple[str | None, ...], ...] | None:
    """Read the table of a schedule: the cells of rank "0", "1", ..."""
    if plan.optional("actions", dict, None) is None:
        return None
    rows = plan.listings("actions", (str, type(None)))
    ranks = [str(rank) for rank in range(len(rows))]
    if set(rows) != set(ranks):
        raise RuntimeProgramError(
            f"{plan.where}, actions: it has rows for the ranks {', '.join(map(repr, rows))}; they must be {', '.join(ranks)}"
        )
    return tuple(rows[rank] for rank in ranks)
