"""Short spellings for a report: numbers with units, runs of module names, lists; and how objects such as plans are shown."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import singledispatch
from html import escape
from typing import Any

_NUMBERED = re.compile(r"(?P<head>(?:.*\.)?)(?P<number>\d+)(?:-(?P<last>\d+))?")
_LAST_NUMBER = re.compile(r"(?P<head>(?:.*\.)?)(?P<number>\d+)(?P<tail>(?:\.[^\d.][^.]*)*)")
"""A path, with the last of its levels that is a number, such as that of a layer."""
_RANGE = re.compile(r"\{(\d+)-(\d+)\}")


_TIMES, _FLOPS = ("ns", "us", "ms", "s"), ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_KEPT = "\N{NO-BREAK SPACE}"
_UNITS = "|".join((*_TIMES, *_BYTES, *_FLOPS))
_UNIT = re.compile(rf"(?<=\d) (?=(?:{_UNITS})\b)")
_OF = re.compile(rf"(?<!\S{{15}})(?<=\w) (?=[\d.,]+{_KEPT}(?:{_UNITS})\b)")
"""The space between a number and its unit, and the one before them, after a short word."""


def _scaled(value: float, steps: Sequence[str], base: int = 1000) -> tuple[str, str]:
    """``value`` in the largest unit in which it is at least 1, with three significant digits."""
    index = 0
    while value >= (999.5 if base == 1000 or index else base) and index < len(steps) - 1:
        value /= base
        index += 1
    digits = 0 if value >= 99.95 or index == 0 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f}", steps[index]


def count_text(value: int) -> str:
    """``1.98 B``; exact below a thousand."""
    return " ".join(filter(None, _scaled(value, ("", "K", "M", "B", "T"))))


def bytes_text(value: float) -> str:
    """Binary units, as torch and nvidia-smi have them: ``32.0 MiB``."""
    return " ".join(_scaled(value, _BYTES, 1024))


def seconds_text(value: float) -> str:
    """``612 ms``, ``0.09 ms``, ``8.2 us``."""
    return " ".join(_scaled(value * 1e9, _TIMES)) if value else "0 s"


def spread_text(value: float, spread: float) -> str:
    """``7.64 ± 0.91 s``: seconds, and by how many they may be off."""
    number, unit = seconds_text(value).split(" ")
    if not spread:
        return f"{number} {unit}"
    decimals = len(number.partition(".")[2])
    return f"{number} ± {spread * 1e9 / 1000 ** _TIMES.index(unit):,.{decimals}f} {unit}"


def rate_text(value: float, digits: int = 4) -> str:
    """``9,302``, ``18,580``, ``0.07291``: significant digits, and no exponent for many."""
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if rounded >= 10 ** (digits - 1) else f"{rounded:.{digits}g}"


def share_text(value: float) -> str:
    """``43.1%``, ``0.152%``: three significant digits."""
    return f"{100 * value:.3g}%"


def flops_text(value: float) -> str:
    """``5.2 TFLOP``."""
    return " ".join(_scaled(value, _FLOPS))


def kept(text: str) -> str:
    """Make ``text`` one word, which :func:`wrapped` does not break."""
    return text.replace(" ", _KEPT)


def wrapped(text: str, width: int, first: str = "", then: str = "") -> list[str]:
    """Wrap to lines of at most ``width``, unless one word is longer. Names, and numbers with their units, are not broken.

    Args:
        first, then: what the first line and the others begin with.
    """
    whole = _OF.sub(_KEPT, _UNIT.sub(_KEPT, text)).replace(" · ", f"{_KEPT}· ")
    lines = textwrap.wrap(
        whole, width, initial_indent=first, subsequent_indent=then, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(_KEPT, " ").rstrip() for line in lines or [first]]


def shortened(name: str, room: int) -> str:
    """Shorten ``name`` to ``room`` columns by leaving out its middle, since both ends tell names apart."""
    if len(name) <= room:
        return name
    head = (room - 1) // 2
    return f"{name[:head]}…{name[len(name) - (room - 1 - head) :]}"


def indices_text(values: Sequence[int]) -> str:
    """``0-3, 5`` for a rising sequence."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def listed(names: Sequence[str], most: int) -> str:
    """List the first ``most`` names, and how many more there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def place_text(data: Mapping[str, Any]) -> str:
    """Name the cluster of a plan, or its number of devices where the report names no cluster."""
    return data.get("cluster") or plural(data["devices"], "device")


def plural(count: int, singular: str, several: str | None = None) -> str:
    """``1 device``, ``2 devices``."""
    return f"{count} {singular if count == 1 else several or singular + 's'}"


def compressed(stages: Sequence[Sequence[str]]) -> list[list[str]]:
    """Shorten the module paths of each stage: a module that is wholly on one stage stands for all modules in it,
    and consecutive numbers become one run (``layers.4-7``)."""
    holders: dict[str, set[int]] = {}
    for index, paths in enumerate(stages):
        for path in paths:
            for ancestor in _ancestors(path):
                holders.setdefault(ancestor, set()).add(index)
    shortened = []
    for paths in stages:
        whole = [next((a for a in _ancestors(path) if len(holders[a]) == 1), path) for path in paths]
        shortened.append(numbered_runs(list(dict.fromkeys(whole))))
    return shortened


def short_names(parameters: Sequence[str]) -> dict[str, str]:
    """Shorten parameter names as far as they stay distinct: ``q, k, o`` for ``self_attn.q_proj.weight`` and its like.

    An ending that three of them share is left out.
    """

    def last(name: str) -> str:
        parts = name.split(".")
        parts = parts[:-1] if len(parts) > 1 and parts[-1] == "weight" else parts
        return ".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:])

    shown = {name: last(name) for name in parameters}
    taken = list(shown.values())
    shown = {name: short if taken.count(short) == 1 else name.removesuffix(".weight") for name, short in shown.items()}
    endings = [short.rpartition("_")[2] for short in shown.values()]
    bare = {
        name: short.rpartition("_")[0] for name, short in shown.items() if endings.count(short.rpartition("_")[2]) > 2
    }
    bare = {name: short for name, short in bare.items() if short and not short.endswith(".")}
    taken = [*bare.values(), *shown.values()]
    return shown | {name: short for name, short in bare.items() if taken.count(short) == 1}


def is_below(name: str, path: str) -> bool:
    """Whether a module or parameter is in the module ``path``: ``layers.1.weight`` in ``layers.1``, which ``layers.11`` is not."""
    return name.startswith(f"{path}.")


def paths_above(name: str) -> Iterator[str]:
    """Yield the paths of the modules that a module or parameter is in, the innermost first."""
    while name := name.rpartition(".")[0]:
        yield name


def is_at_or_below(name: str, path: str) -> bool:
    """Whether ``name`` is the module ``path``, or in it."""
    return name == path or is_below(name, path)


def _ancestors(path: str) -> list[str]:
    """``a``, ``a.b``, ``a.b.c`` for ``a.b.c``."""
    parts = path.split(".")
    return [".".join(parts[: length + 1]) for length in range(len(parts))]


def matching(pattern: str, paths: Iterable[str]) -> list[str]:
    """List the paths that a pattern matches, in their order.

    Dots separate levels. Within a level ``*``, ``?`` and ``[...]`` are as in ``fnmatch``; a level ``**`` stands for any number
    of levels, none included, and a level ``{4-7}`` for these numbers. A pattern that is itself one of the paths matches only that one.
    """
    known = list(paths)
    if pattern in known:
        return [pattern]
    tokens = levels_of(pattern)
    return [path for path in known if levels_match(tokens, levels_of(path))]


def levels_of(path: str) -> list[str]:
    """Split a path, or a pattern, at its dots."""
    return path.split(".") if path else []


def levels_match(tokens: Sequence[str], levels: Sequence[str]) -> bool:
    """Whether the levels of a pattern match those of a path."""
    reached = _skipping(tokens, {0})  # how many tokens may have been used up
    for level in levels:
        step = {at for at in reached if at < len(tokens) and tokens[at] == "**"}
        step |= {at + 1 for at in reached if at < len(tokens) and tokens[at] != "**" and _matches(level, tokens[at])}
        reached = _skipping(tokens, step)
    return len(tokens) in reached


def _matches(level: str, token: str) -> bool:
    between = _RANGE.fullmatch(token)
    inside = between is not None and level.isdecimal() and int(between[1]) <= int(level) <= int(between[2])
    return inside or fnmatchcase(level, token)


def _skipping(tokens: Sequence[str], reached: set[int]) -> set[int]:
    """``reached`` and what follows from it when ``**`` stands for no level."""
    for at, token in enumerate(tokens):
        if token == "**" and at in reached:
            reached = reached | {at + 1}
    return reached


def numbered_runs(paths: Sequence[str]) -> list[str]:
    """``layers.0, layers.1, norm`` -> ``layers.0-1, norm``; runs are continued, too."""
    runs: list[tuple[str, int, int] | str] = []
    for path in paths:
        match = _NUMBERED.fullmatch(path)
        if match is None:
            runs.append(path)
            continue
        head, number, end = match["head"], int(match["number"]), int(match["last"] or match["number"])
        last = runs[-1] if runs else ""
        if isinstance(last, tuple) and last[0] == head and last[2] + 1 == number:
            runs[-1] = (head, last[1], end)
        else:
            runs.append((head, number, end))
    return [run if isinstance(run, str) else f"{run[0]}{indices_text(range(run[1], run[2] + 1))}" for run in runs]


def joined(entries: Iterable[tuple[str, Hashable]]) -> list[tuple[str, Any]]:
    """Join names that have equal values and differ in a number alone, of consecutive ones, in the order of their first:
    ``(a.0.w, x), (a.1.w, x)`` -> ``(a.0-1.w, x)``."""
    runs: list[tuple[str, int, int, str, Any]] = []
    places: dict[Hashable, int] = {}
    for name, value in entries:
        match = _LAST_NUMBER.fullmatch(name)
        if match is None:
            runs.append((name, 0, -1, "", value))
            continue
        head, number, tail = match["head"], int(match["number"]), match["tail"]
        place = places.get((head, tail, value))
        if place is not None and runs[place][2] + 1 == number:
            runs[place] = (head, runs[place][1], number, tail, value)
        else:
            places[head, tail, value] = len(runs)
            runs.append((head, number, number, tail, value))
    return [(f"{head}{indices_text(range(first, last + 1))}{tail}", value) for head, first, last, tail, value in runs]


def json_text(value: Any, indent: int = 0, width: int = 120) -> str:
    """Write JSON with a line for each value that fits in one, and lists of texts and numbers in filled lines."""
    flat = json.dumps(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    deep = any(isinstance(y, dict | list) for x in inner if isinstance(x, dict | list) for y in _values(x))
    if not isinstance(value, dict | list) or (len(flat) + indent <= width and not deep):
        return flat
    pad = " " * (indent + 1)
    if isinstance(value, dict):
        rows = [f"{json.dumps(name)}: {json_text(each, indent + 1, width)}" for name, each in value.items()]
    elif any(isinstance(each, dict | list) for each in value):
        rows = [json_text(each, indent + 1, width) for each in value]
    else:
        filled = textwrap.fill(flat[1:-1], width - indent - 1, break_long_words=False, break_on_hyphens=False)
        rows = (
            [filled.replace("\n", f"\n{pad}")] if " " not in "".join(map(str, value)) else list(map(json.dumps, value))
        )
    begin, end = "{}" if isinstance(value, dict) else "[]"
    joined = f",\n{pad}".join(rows)
    return f"{begin}\n{pad}{joined}\n{' ' * indent}{end}"


def _values(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value


# ---- objects ---------------------------------------------------------------------------------------------------
# graphpar.api registers the functions here, so that ``ir`` need not import the report.


@singledispatch
def as_text(value: object) -> str:
    """Return the text that ``str`` returns."""
    return repr(value)


@singledispatch
def as_page(value: object) -> str:
    """Return the HTML that a notebook shows."""
    return f"<pre>{escape(repr(value))}</pre>"
