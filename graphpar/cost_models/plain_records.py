"""Records of prices as plain data, and back: what appears several times is written once.

units, layouts ──encode──► {"records": [[type, field, ...], ...], "value": ...} ──decode──► equal ones, without graphs
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from graphpar.cost_models.estimates import Layout
from graphpar.cost_models.execution import Execution
from graphpar.cost_models.pipeline_units import Bytes, Held, Repeated, Unit, UnitClass, UnitMemory
from graphpar.cost_models.work import Attention, Collective, Phase, Product, Size, Traffic, Work
from graphpar.errors import GraphparError
from graphpar.ir.program import OptimizerState
from graphpar.runtime.mesh import Mesh

TYPES: dict[str, Any] = {
    each.__name__: each
    for each in (
        Attention, Bytes, Collective, Execution, Held, Layout, Mesh, OptimizerState, Phase, Product, Repeated, Size, Traffic, Unit,
        UnitClass, UnitMemory, Work,
    )
}  # fmt: skip
"""What is written as a record."""
_NOT_KEPT = {Unit: ("split_point", "stage"), Layout: ("order",)}
"""Fields that prices don't read, which graphs hang on; they are None afterwards."""


def encode(value: Any) -> dict[str, Any]:
    """Write ``value``: records of :data:`TYPES`, tuples, mappings, numbers and text."""
    writer = _Writer()
    written = writer.plain(value)
    return {"records": writer.records, "value": written}


def decode(data: Mapping[str, Any]) -> Any:
    """Read what :func:`encode` wrote; lists are tuples then.

    Raises:
        GraphparError: it was written by another version.
    """
    made: list[Any] = []
    try:
        for name, *values in data["records"]:
            made.append(_made(TYPES[name], [_value(each, made) for each in values]))
        return _value(data["value"], made)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise GraphparError(f"what a search kept can't be read ({error}); compile the model again.") from error


class _Writer:
    def __init__(self) -> None:
        self.records: list[list[Any]] = []
        self._places: dict[Any, int] = {}
        self._seen: list[Any] = []  # so that no other object gets the id of one

    def plain(self, value: Any) -> Any:
        if type(value).__name__ in TYPES:
            return {"r": self._record(value)}
        if isinstance(value, Mapping):
            return {"m": [[self.plain(key), self.plain(each)] for key, each in value.items()]}
        if isinstance(value, tuple | list):
            return [self.plain(each) for each in value]
        assert value is None or isinstance(value, bool | int | float | str), (
            f"a {type(value).__name__} is no plain data"
        )
        return value

    def _record(self, value: Any) -> int:
        own = id(value)
        if own not in self._places:
            written = [type(value).__name__, *map(self.plain, _fields(value))]
            key = repr(written)
            if key not in self._places:
                self._places[key] = len(self.records)
                self.records.append(written)
            self._places[own] = self._places[key]
            self._seen.append(value)
        return self._places[own]


def _fields(value: Any) -> list[Any]:
    if isinstance(value, enum.Enum):
        return [value.value]
    if isinstance(value, UnitClass):
        return [value.work, value.sends, value.memory, value.again, value.moves]
    if is_dataclass(value):
        left = _NOT_KEPT.get(type(value), ())
        return [None if each.name in left else getattr(value, each.name) for each in fields(value)]
    return list(value)  # a named tuple


def _made(kind: Any, values: list[Any]) -> Any:
    if kind is UnitClass:
        work, sends, memory, again, moves = values
        return UnitClass(work, sends, lambda: memory, again, moves)
    return kind(*values)


def _value(data: Any, made: list[Any]) -> Any:
    if isinstance(data, dict):
        if "r" in data:
            return made[data["r"]]
        return {_value(key, made): _value(each, made) for key, each in data["m"]}
    return tuple(_value(each, made) for each in data) if isinstance(data, list) else data
