"""Lay out lines of Python: comments behind statements, long calls broken over lines."""

from __future__ import annotations

WIDTH = 120


def commented(line: str, indent: str, comment: str, column: int = 0) -> list[str]:
    """Write ``line`` with a comment behind it from ``column`` on, or above it where there is no room."""
    if not comment:
        return wrapped(line, indent)
    code = wrapped(line, indent)
    text = f"{code[0]:<{column}}  # {comment}"
    if len(code) == 1 and len(text) <= WIDTH:
        return [text]
    return [f"{indent}# {comment}", *code]


def wrapped(line: str, indent: str) -> list[str]:
    """Write ``indent + line``, broken inside its outermost brackets where it is too long."""
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
    return [*lines, *wrapped(line[closing:], indent)]


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
