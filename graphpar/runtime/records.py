"""Records of ``plan.json``: dataclasses written as JSON objects and read again, and names of equal layers written once.

    written(record) ──► {"name": ..., "shape": [...], "dtype": "float32"}      read(type, Record(values, "plan.json")) ──► record
    {"layers.0.q": a, "layers.1.q": a, "layers.2.q": b}     <-->     {"layers.{0-1}.q": a, "layers.2.q": b}
    ["layers.0.q", "layers.0.k", "layers.1.q", "layers.1.k"]  <-->   {"layers.{0-1}": ["q", "k"]} in a list

The types of fields say how they are read. A field whose value is its default is left out. A brace of a name itself is written twice.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import torch

from graphpar.runtime.axes import AXES
from graphpar.runtime.errors import RuntimeProgramError, near_match
from graphpar.runtime.layout import Type, parse_type

T = TypeVar("T")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtypes in which a program computes, stores parameters and sums gradients, by their names on the command line and in plans."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""The names of these dtypes."""

_SHOWN = 60
"""How many characters of a value an error shows."""


def kept(default: Any = MISSING, *, make: Any = MISSING, key: str = "", **how: bool) -> Any:
    """Declare a field of a record.

    Args:
        key: its name in JSON, if that is another.
        how: ``always``: it is written even if it is its default; ``never``: it is not in JSON; ``packed``: its names are written once for
            equal layers; ``short``: its dtypes go by :data:`NAMES`.
    """
    metadata = {"key": key, **how}
    return (
        field(default_factory=make, metadata=metadata)
        if make is not MISSING
        else field(default=default, metadata=metadata)
    )


def written(record: Any) -> dict[str, Any]:
    """Return the JSON object of a record, with names as they are: see :func:`packed_fields`."""
    found = {}
    for each in fields(record):
        value, how = getattr(record, each.name), each.metadata
        usual = each.default if each.default_factory is MISSING else each.default_factory()
        if not how.get("never") and (how.get("always") or value != usual):
            found[how.get("key") or each.name] = _plain(value, bool(how.get("short")))
    return found


def _plain(value: Any, short: bool) -> Any:
    if isinstance(value, torch.dtype):
        return NAMES[value] if short else str(value).removeprefix("torch.")
    if isinstance(value, Type):
        return str(value)
    if is_dataclass(value):
        return written(value)
    if isinstance(value, Mapping):
        return {key: _plain(each, short) for key, each in value.items()}
    return [_plain(each, short) for each in value] if isinstance(value, tuple | list) else value


def packed_fields(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Write names of equal layers once in the JSON object of a ``kind`` of record; :func:`read` takes both forms."""
    found = dict(values)
    for each in fields(kind):
        if each.metadata.get("packed") and each.name in found:
            value = found[each.name]
            found[each.name] = packed(value) if isinstance(value, Mapping) else packed_names(value)
    return found


_hints = functools.cache(get_type_hints)


def read(kind: type[T], record: Record) -> T:
    """Read what :func:`written` returned; a field that is missing or null has its default.

    Raises:
        RuntimeProgramError: a field without a default is missing, or one is of a wrong type.
    """
    found, described = {}, cast(Any, kind)
    for each in fields(described):
        how, key = each.metadata, each.metadata.get("key") or each.name
        usual = each.default is not MISSING or each.default_factory is not MISSING
        if not how.get("never") and not (usual and record.optional(key, object, None) is None):
            found[each.name] = _value(_hints(described)[each.name], record.get(key, object), record.where, key, how)
    return kind(**found)


def _value(hint: Any, value: Any, where: str, key: str, how: Mapping[str, Any]) -> Any:
    """Read a value of a type; ``where`` and ``key`` name it in errors."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, UnionType):
        others = [each for each in parts if each is not NoneType]
        if len(others) == 1:
            return None if value is None else _value(others[0], value, where, key, how)
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return read(hint, Record(value, f"{where}, {key}"))
    if hint is torch.dtype:
        return _dtype(_checked(str, value, where, key), where, key, bool(how.get("short")))
    if origin is tuple:
        items = _checked(list, value, where, key)
        items = unpacked_names(items) if how.get("packed") else items
        return tuple(_value(parts[0], item, where, f"{key}[{place}]", how) for place, item in enumerate(items))
    if origin is Mapping:
        rows = _checked(dict, value, where, key)
        rows = unpacked(rows) if how.get("packed") else rows
        if parts[1] == Type:
            return types_of({key: rows}, where)[key]
        inner = {**how, "packed": False}
        return {name: _value(parts[1], row, where, f"{key}.{name}", inner) for name, row in rows.items()}
    return _checked(parts or hint, value, where, key)


def _checked(kind: type | tuple[type, ...], value: Any, where: str, key: str) -> Any:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if type(value) not in kinds and not (type(value) is int and float in kinds):  # true and false are no numbers
        raise RuntimeProgramError(
            f"{where}: the field {key!r} is {_short(value)}; it must be {' or '.join(_KINDS[each] for each in kinds)}"
        )
    return float(value) if kind is float else value


def _dtype(name: str, where: str, key: str, short: bool) -> torch.dtype:
    found = DTYPES.get(name) if short else getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise RuntimeProgramError(
            f"{where}: {key} is {name!r}, not " + (f"one of {', '.join(DTYPES)}" if short else "a torch dtype")
        )
    return found


# ---- JSON objects ------------------------------------------------------------------------------------------------


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
        return self._values[key] if kind is object else _checked(kind, self._values[key], self.where, key)

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
        return tuple(_checked(kind, item, self.where, f"{key}[{place}]") for place, item in enumerate(found))


_KINDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    type(None): "null",
}
"""What JSON calls a value of a type."""


def what_is(value: Any) -> str:
    """Say what JSON calls a value of this type."""
    return _KINDS[type(value)]


def _short(value: Any) -> str:
    """Return how ``value`` is written in the file; of a list or object, only what it is."""
    if isinstance(value, dict | list):
        return what_is(value)
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


# ---- names of equal layers ---------------------------------------------------------------------------------------

_MOST = 100_000
"""Layers that a run may have."""
_RUN = re.compile(r"(?<!\{)\{(\d+)-(\d+)\}(?!\})")


def packed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Join names that differ in their first number alone, where the numbers follow each other and the values are equal."""
    found: dict[str, Any] = {}
    runs: dict[tuple[str, str], list[tuple[int, str, Any]]] = {}
    for name, value in values.items():
        head, number, tail = _numbered(name)
        if number is None:
            found[_escaped(name)] = value
        else:
            runs.setdefault((head, tail), []).append((number, name, value))
    for (head, tail), members in runs.items():
        for run in _number_runs(members):
            first, last = run[0][0], run[-1][0]
            key = _escaped(run[0][1]) if first == last else f"{_escaped(head)}{{{first}-{last}}}{_escaped(tail)}"
            found[key] = run[0][2]
    return found


def unpacked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Undo :func:`packed`; of two values of one name the later counts.

    Raises:
        RuntimeProgramError: a run has no numbers, or too many.
    """
    return {name: value for key, value in values.items() for name in _expanded(key)}


def packed_names(names: Sequence[str]) -> list[Any]:
    """Join neighbouring runs of names that are the same but for their first number."""
    found: list[Any] = []
    place = 0
    while place < len(names):
        head, first, _ = _numbered(names[place])
        tails = [] if first is None else [tail for _, _, tail in _of_layer(names[place:], head, first)]
        last = first
        after = place + len(tails)
        while tails and last is not None and [t for *_, t in _of_layer(names[after:], head, last + 1)] == tails:
            last, after = last + 1, after + len(tails)
        if first is None or last == first:
            found.append(_escaped(names[place]))
            place += 1
        else:
            found.append({f"{_escaped(head)}{{{first}-{last}}}": tails})
            place = after
    return found


def unpacked_names(names: Iterable[Any]) -> tuple[str, ...]:
    """Undo :func:`packed_names`."""
    found: list[str] = []
    for entry in names:
        if isinstance(entry, Mapping):
            for key, tails in entry.items():
                found += [f"{name}{tail}" for name in _expanded(key) for tail in tails]
        else:
            found += _expanded(entry)
    return tuple(found)


def _numbered(name: str) -> tuple[str, int | None, str]:
    """``layers.``, 3, ``.q`` of ``layers.3.q``; None where no part is a number."""
    match = re.search(r"(?:^|(?<=\.))(0|[1-9]\d*)(?=\.|$)", name)
    return (name, None, "") if match is None else (name[: match.start()], int(match[1]), name[match.end() :])


def _of_layer(names: Sequence[str], head: str, number: int) -> list[tuple[str, int | None, str]]:
    found = []
    for name in names:
        parts = _numbered(name)
        if parts[:2] != (head, number):
            break
        found.append(parts)
    return found


def _number_runs(members: Sequence[tuple[int, str, Any]]) -> Iterator[list[tuple[int, str, Any]]]:
    run: list[tuple[int, str, Any]] = []
    for member in sorted(members, key=lambda each: each[0]):
        if run and (member[0] != run[-1][0] + 1 or member[2] != run[-1][2]):
            yield run
            run = []
        run.append(member)
    yield run


def _expanded(key: str) -> list[str]:
    match = _RUN.search(key)
    if match is None:
        return [key.replace("{{", "{").replace("}}", "}")]
    head, tail = (part.replace("{{", "{").replace("}}", "}") for part in (key[: match.start()], key[match.end() :]))
    numbers = range(int(match[1]), int(match[2]) + 1)
    if not 0 < len(numbers) <= _MOST:
        raise RuntimeProgramError(
            f"{key!r} stands for {len(numbers)} names; write numbers from the smaller to the larger"
        )
    return [f"{head}{number}{tail}" for number in numbers]


def _escaped(name: str) -> str:
    return name.replace("{", "{{").replace("}", "}}")
