"""Comments on values: their shapes and types, and what a redistribution makes of them."""

from __future__ import annotations

from torch import Tensor, fx

from graphpar.ir.program import batch_coefficients, operator_name, value_of
from graphpar.runtime.layout import ExpertRows, R


def describe_shape(node: fx.Node) -> str:
    """Write a shape as ``[b, 16, 768]``, with ``b`` for the (micro)batch, and ``own`` for the rows of a rank's experts."""
    value = value_of(node)
    if not isinstance(value, Tensor):
        return ""
    parts = []
    if any(isinstance(kind, ExpertRows) for kind in node.meta.get("types", {}).values()):
        parts.append("own")
    for size, coefficient in list(zip(value.shape, batch_coefficients(node)))[len(parts) :]:
        parts.append(str(int(size)) if coefficient is None else "b" if coefficient == 1 else f"{coefficient} b")
    return f"[{', '.join(parts)}]" if parts else "scalar"


def describe_types(node: fx.Node) -> str:
    """Write a spec as ``S(1)@tp``, without the axes on which the value is R."""
    types = node.meta.get("types", {})
    return ", ".join(f"{kind}@{axis}" for axis, kind in types.items() if kind is not R)


def note_of(node: fx.Node) -> tuple[str, str]:
    """Return the call of a redistribution and the comment on it: ``all_gather(`` and ``S(1) -> R  [b, 16, 64]``."""
    source, target = node.meta["transition"]
    return f"{operator_name(node)}(", f"{source} -> {target}  {describe_shape(node)}".rstrip()
