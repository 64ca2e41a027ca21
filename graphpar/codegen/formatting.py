"""Lines of emitted Python: comments on values and behind statements, long calls broken over lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, fx

from graphpar.ir.batch_sizes import batch_coefficients
from graphpar.ir.lengths import SIZES
from graphpar.ir.program import operator_name, value_of
from graphpar.runtime.layout import ExpertRows, R
from graphpar.runtime.option_kinds import GENERATE, INFER, TRAIN

WIDTH = 120

LETTERS = {TRAIN: "b", INFER: "b", GENERATE: "n"}
"""What stands for the size that a program leaves open, by its mode: rows of a microbatch, or positions of a window."""
_EXPERT_ROWS = re.compile(r"\bE\(\w*\)")
_letter: ContextVar[str] = ContextVar("letter", default="b")


@contextmanager
def shapes_of(mode: str) -> Iterator[None]:
    """Write the shapes of a program of this mode inside."""
    token = _letter.set(LETTERS[mode])
    try:
        yield
    finally:
        _letter.reset(token)


def describe_shape(node: fx.Node) -> str:
    """Write a shape as ``[b, 16, 768]``, with ``b`` for the (micro)batch, and ``own`` for the rows of a rank's experts."""
    letter = _letter.get()
    value = value_of(node)
    if not isinstance(value, Tensor):
        return ""
    parts = []
    if any(isinstance(kind, ExpertRows) for kind in node.meta.get("types", {}).values()):
        parts.append("own")
    coefficients = batch_coefficients(node)
    of_length = node.meta.get(SIZES) or [None] * len(coefficients)
    for size, coefficient, follows in list(zip(value.shape, coefficients, of_length))[len(parts) :]:
        times = str(follows) if follows else "" if coefficient == 1 else str(coefficient or int(size))
        parts.append(times if coefficient is None else f"{times} {letter}".strip())
    return f"[{', '.join(parts)}]" if parts else "scalar"


def describe_types(node: fx.Node) -> str:
    """Write a spec as ``S(1)@tp``, without the axes on which the value is R."""
    types = node.meta.get("types", {})
    return ", ".join(f"{kind}@{axis}" for axis, kind in types.items() if kind is not R)


def note_of(node: fx.Node, names: Mapping[fx.Node, str]) -> tuple[str, str]:
    """Return the call of a redistribution and the comment on it: ``all_gather(`` and ``S(1) -> R  [b, 16, 64]``.

    ``E(ends)`` names the variable that the call takes, which says where the rows of each expert end.
    """
    source, target = node.meta["transition"]
    text = f"{source} -> {target}  {describe_shape(node)}".rstrip()
    if len(node.args) > 2 and isinstance(ends := node.args[2], fx.Node) and ends in names:
        text = _EXPERT_ROWS.sub(f"E({names[ends]})", text)
    return f"{operator_name(node)}(", text


# ---- lines -----------------------------------------------------------------------------------------------------


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
