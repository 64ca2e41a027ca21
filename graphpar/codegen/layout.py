"""Lines of Python: comments at module boundaries, long calls broken over lines."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH = 120


def wrapped(line: str, indent: str) -> list[str]:
    """``indent + line``, broken inside its outermost brackets where it is too long."""
    if len(indent) + len(line) <= WIDTH:
        return [indent + line]
    span = _outer_brackets(line)
    if span is None:
        return [indent + line]
    opening, closing = span
    inner = indent + "    "
    pieces = _arguments(line[opening + 1 : closing])
    packed: list[str] = []
    for piece in pieces:
        if packed and len(inner) + len(packed[-1]) + len(piece) + 2 <= WIDTH:
            packed[-1] += f" {piece},"
        else:
            packed.append(f"{piece},")
    if len(pieces) == 1:
        packed = [pieces[0]]
    lines = [indent + line[: opening + 1]]
    for item in packed:
        lines += wrapped(item, inner)
    return [*lines, indent + line[closing:]]


def _outer_brackets(line: str) -> tuple[int, int] | None:
    """The widest bracket pair that is not empty: (opening, closing)."""
    stack: list[int] = []
    best: tuple[int, int] | None = None
    quoted = False
    for position, char in enumerate(line):
        if char == '"':
            quoted = not quoted
        if quoted:
            continue
        if char in "([{":
            stack.append(position)
        elif char in ")]}" and stack:
            opening = stack.pop()
            if not stack and position - opening > 1 and (best is None or position - opening > best[1] - best[0]):
                best = (opening, position)
    return best


def _arguments(text: str) -> list[str]:
    pieces, depth, start, quoted = [], 0, 0, False
    for position, char in enumerate(text):
        if char == '"':
            quoted = not quoted
        if quoted:
            continue
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            pieces.append(text[start:position].strip())
            start = position + 1
    last = text[start:].strip()
    return [*pieces, last] if last else pieces


def indices(values: Sequence[int]) -> str:
    """``0-3, 5`` for [0, 1, 2, 3, 5]."""
    parts: list[str] = []
    ordered = sorted(values)
    position = 0
    while position < len(ordered):
        end = position
        while end + 1 < len(ordered) and ordered[end + 1] == ordered[end] + 1:
            end += 1
        parts.append(str(ordered[position]) if end == position else f"{ordered[position]}-{ordered[end]}")
        position = end + 1
    return ", ".join(parts)


def compressed(paths: Sequence[str]) -> list[str]:
    """``layers.0, layers.1, norm`` -> ``layers.0-1, norm``."""
    shown: list[str] = []
    position = 0
    while position < len(paths):
        parent, _, last = paths[position].rpartition(".")
        run = [int(last)] if last.isdigit() else []
        end = position
        while run and end + 1 < len(paths) and paths[end + 1] == f"{parent}.{run[-1] + 1}":
            run.append(run[-1] + 1)
            end += 1
        prefix = f"{parent}." if parent else ""
        shown.append(f"{prefix}{run[0]}-{run[-1]}" if len(run) > 1 else paths[position])
        position = end + 1
    return shown
