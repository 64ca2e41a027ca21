"""Names of equal layers, written once in ``plan.json``.

    {"layers.0.q": a, "layers.1.q": a, "layers.2.q": b}     <-->     {"layers.{0-1}.q": a, "layers.2.q": b}
    ["layers.0.q", "layers.0.k", "layers.1.q", "layers.1.k"]  <-->   {"layers.{0-1}": ["q", "k"]} in a list

A brace of a name itself is written twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from graphpar.runtime.errors import RuntimeProgramError

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
        for run in _runs(members):
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


def _runs(members: Sequence[tuple[int, str, Any]]) -> Iterator[list[tuple[int, str, Any]]]:
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
