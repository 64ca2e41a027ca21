"""Comments on values: their shapes and types, and what a redistribution makes of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, fx

from graphpar.ir.program import batch_coefficients, operator_name, value_of
from graphpar.runtime.layout import ExpertRows, R
from graphpar.runtime.modes import GENERATE, INFER, TRAIN

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
    for size, coefficient in list(zip(value.shape, batch_coefficients(node)))[len(parts) :]:
        parts.append(
            str(int(size)) if coefficient is None else letter if coefficient == 1 else f"{coefficient} {letter}"
        )
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
