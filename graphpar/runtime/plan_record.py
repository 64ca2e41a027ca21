"""``PlanRecord``: the part of a plan that planner and runtime share, and its form in ``plan.json``.

    Plan ──PlanRecord.to_json──► plan.json ──PlanRecord.read──► Plan, Manifest

The planner adds split points and placements, code generation the interfaces of the stages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphpar.runtime.axes import AXES
from graphpar.runtime.errors import GraphparError, RuntimeProgramError, near_match
from graphpar.runtime.layout import Type, parse_type
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.name_runs import packed, packed_names, unpacked
from graphpar.runtime.option_kinds import ZERO1_BY
from graphpar.runtime.options import Decisions, options_of

VERSION = 2
"""The version of ``plan.json``. Since 2, placements are keyed by module path, operator and occurrence
(:mod:`graphpar.passes.sharding.keys`)."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtypes in which a program computes, stores parameters and sums gradients, by their names on the command line and in plans."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""The names of these dtypes."""

_NEEDED = ("schedule", "global_batch", "microbatch_size")
"""The decisions that no plan goes without."""

PROGRAM_FIELDS = ("interface", "model_file")
"""The fields of ``plan.json`` that an emitted program has besides those of its plan."""

REPORT = "report.json"
"""The file beside ``plan.json`` that holds the report, with the hash of the decisions that it is of."""

_SHOWN = 60
"""How many characters of a value an error shows."""


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
    transposed: bool = False
    stacked: bool = False
    shared: bool = False

    @staticmethod
    def read(record: Record) -> Adapter:
        """Read what ``dataclasses.asdict`` made of one."""
        return Adapter(
            layer=record.get("layer", str),
            weight=record.get("weight", str),
            a=record.get("a", str),
            b=record.get("b", str),
            rank=record.get("rank", int),
            alpha=float(record.get("alpha", (int, float))),
            scale=float(record.get("scale", (int, float))),
            transposed=record.get("transposed", bool),
            stacked=record.get("stacked", bool),
            shared=record.get("shared", bool),
        )


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
        if not plan.has("version"):
            raise RuntimeProgramError(
                f"{plan.where}: the field 'version' is missing; it is no plan, or a damaged one. Compile the model again."
            )
        version = plan.get("version", int)
        if version != VERSION:
            raise RuntimeProgramError(
                f"{plan.where} has version {version!r}; this graphpar reads version {VERSION}. Compile the model again."
            )
        return PlanRecord(
            mode=plan.get("mode", str),
            mesh=Mesh(**degrees_of(plan, "mesh")),
            microbatches=plan.get("microbatches", int),
            stages=tuple(
                StageRecord(each.get("index", int), each.get("rank", int), each.strings("modules"))
                for each in plan.records("stages")
            ),
            parameters=types_of(dict(sorted(unpacked(plan.get("parameters", dict)).items())), plan.where),
            actions=_actions(plan),
            decisions=_decisions(plan),
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


def packed_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``plan.json`` in which names of equal layers stand once; what reads a plan takes both."""
    interface = dict(record["interface"])
    interface |= {name: packed(interface[name]) for name in ("shapes", "owners", "casts") if name in interface}
    if "parameters" in interface:
        interface["parameters"] = packed_names(interface["parameters"])
    return {**record, "parameters": packed(record["parameters"]), "interface": interface}


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
        raise RuntimeProgramError(f"{path} holds no plan: it is {_NAMES[type(found)]}, not an object")
    return found


def decisions_of(record: Mapping[str, Any]) -> str:
    """Return a hash of the decisions of a ``plan.json``: of all but the interface and the model file of its program."""
    decisions = {name: value for name, value in record.items() if name not in PROGRAM_FIELDS}
    decisions |= {"parameters": unpacked(record.get("parameters", {}))}
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
        if not _is(value, kind):
            raise RuntimeProgramError(f"{self.where}: the field {key!r} is {_short(value)}; it must be {_named(kind)}")
        return value

    def optional(self, key: str, kind: type | tuple[type, ...], default: Any) -> Any:
        """Return a field, or ``default`` where it is missing or null."""
        return self.get(key, kind) if self._values.get(key) is not None else default

    def only(self, known: Iterable[str]) -> None:
        """Refuse a field that is not ``known``."""
        names = list(known)
        unknown = next((name for name in self._values if name not in names), None)
        if unknown is not None:
            hint = near_match(unknown, names) or f" The fields are {', '.join(names)}."
            raise RuntimeProgramError(f"{self.where}: there is no field {unknown!r}.{hint}")

    def record(self, key: str) -> Record:
        """Return an object."""
        return Record(self.get(key, dict), f"{self.where}, {key}")

    def records(self, key: str) -> list[Record]:
        """Return a list of objects."""
        return [Record(item, f"{self.where}, {key}[{i}]") for i, item in enumerate(self.get(key, list))]

    def strings(self, key: str) -> tuple[str, ...]:
        """Return a list of strings, empty where it is missing."""
        return self.items(key, str) if self._values.get(key) is not None else ()

    def items(self, key: str, kind: type | tuple[type, ...]) -> tuple[Any, ...]:
        """Return a list whose items are of the type ``kind``."""
        return self._items(key, self.get(key, list), kind)

    def lists(self, key: str, kind: type | tuple[type, ...]) -> tuple[tuple[Any, ...], ...]:
        """Return a list of lists, whose items are of the type ``kind``."""
        return tuple(self._items(f"{key}[{place}]", inner, kind) for place, inner in enumerate(self.items(key, list)))

    def listings(self, key: str, kind: type | tuple[type, ...]) -> dict[str, tuple[Any, ...]]:
        """Return an object of lists, whose items are of the type ``kind``."""
        return {name: self._items(f"{key}.{name}", inner, kind) for name, inner in self.values(key, list).items()}

    def values(self, key: str, kind: type | tuple[type, ...]) -> dict[str, Any]:
        """Return an object whose values are of the type ``kind``."""
        record = self.record(key)
        return {name: record.get(name, kind) for name in record.names()}

    def names(self) -> tuple[str, ...]:
        """Return the names of the fields."""
        return tuple(self._values)

    def _items(self, key: str, found: list[Any], kind: type | tuple[type, ...]) -> tuple[Any, ...]:
        for place, item in enumerate(found):
            if not _is(item, kind):
                raise RuntimeProgramError(
                    f"{self.where}: the field '{key}[{place}]' is {_short(item)}; it must be {_named(kind)}"
                )
        return tuple(found)

    def dtype(self) -> torch.dtype:
        """Return the torch dtype that the field ``dtype`` names."""
        found = getattr(torch, self.get("dtype", str), None)
        if not isinstance(found, torch.dtype):
            raise RuntimeProgramError(f"{self.where}: {self.get('dtype', str)!r} is not a torch dtype")
        return found

    def shape(self) -> tuple[int, ...]:
        """Return the field ``shape``."""
        return self.items("shape", int)


_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    type(None): "null",
}
"""What JSON calls a value of a type."""


def _is(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Return whether ``value`` is of the type; true and false are no numbers."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return type(value) in kinds or (type(value) is int and float in kinds)


def _named(kind: type | tuple[type, ...]) -> str:
    return " or ".join(_NAMES[each] for each in (kind if isinstance(kind, tuple) else (kind,)))


def _short(value: Any) -> str:
    """Return how ``value`` is written in the file; of a list or object, only what it is."""
    if isinstance(value, dict | list):
        return _NAMES[type(value)]
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def check_axes(names: Iterable[str], where: str) -> None:
    """Check that there are mesh axes of these names.

    Raises:
        RuntimeProgramError: there is none of some name; the message names the nearest.
    """
    for axis in names:
        if axis not in AXES:
            raise RuntimeProgramError(
                f"{where}: there is no mesh axis {axis!r}; the axes are {', '.join(AXES)}.{near_match(axis, AXES)}"
            )


def degrees_of(plan: Record, key: str) -> dict[str, int]:
    """Read the degrees of mesh axes.

    Raises:
        RuntimeProgramError: there is no such axis, or a degree is no whole number from 1.
    """
    degrees: dict[str, int] = plan.values(key, int)
    where = f"{plan.where}, {key}"
    check_axes(degrees, where)
    for axis, degree in degrees.items():
        if degree < 1:
            raise RuntimeProgramError(f"{where}: the degree of {axis} is {degree}; it must be at least 1")
    return degrees


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


def types_of(listed: Mapping[str, Mapping[str, str]], where: str) -> dict[str, dict[str, Type]]:
    """Parse types by name and axis; ``where`` names them in errors.

    Raises:
        RuntimeProgramError: a text is not a type.
    """
    found: dict[str, dict[str, Type]] = {}
    for name, spec in listed.items():
        about = f"{where}, types of {name}"
        texts = Record(spec, about)
        check_axes(texts.names(), about)
        try:
            found[name] = {axis: parse_type(texts.get(axis, str)) for axis in texts.names()}
        except RuntimeProgramError:
            raise
        except ValueError as error:
            raise RuntimeProgramError(f"{about}: {error}") from None
    return found
