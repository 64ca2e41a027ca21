"""Losses with a ``reduction``, and numbers that become tensors: helpers of the passes that rewrite means and sums."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.ir.batch_sizes import batch_coefficients, is_unknown
from graphpar.ir.program import operator_name, value_of
from graphpar.passes.normalize.functional import infer

_aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2

# Arithmetic on sizes, and the same on tensors that hold counts.
ARITHMETIC = {
    operator.add: _aten.add.Tensor,
    operator.sub: _aten.sub.Tensor,
    operator.mul: _aten.mul.Tensor,
    operator.truediv: _aten.div.Tensor,
    operator.floordiv: _aten.floor_divide.default,
    operator.pow: _aten.pow.Tensor_Tensor,
}


def reduction_place(node: fx.Node) -> int | None:
    """Return the position of a loss's ``reduction`` argument; None for other operators."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    names = [argument.name for argument in node.target._schema.arguments]
    return names.index("reduction") if "reduction" in names else None


def with_reduction(graph: fx.Graph, node: fx.Node, given: list[Any], place: int, reduction: int) -> fx.Node:
    """Add the loss ``node`` on the arguments ``given``, with another reduction."""
    arguments = [*given[:place], reduction, *given[place + 1 :]]
    kwargs = {key: value for key, value in node.kwargs.items() if key != "reduction"}
    positional = len(node.args) if len(node.args) > place else place + 1
    arguments = arguments[: max(positional, place + 1)]
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    for name in names[: len(arguments)]:
        kwargs.pop(name, None)
    return infer(graph.call_function(node.target, tuple(arguments), kwargs), node)  # type: ignore[arg-type]


def elements(node: fx.Node) -> int:
    """Return the elements of ``node`` for each example, or each row that a mask selects."""
    count = 1
    for size, coefficient in zip(value_of(node).shape, batch_coefficients(node)):
        if not is_unknown(size):
            count *= int(size) if coefficient is None else coefficient
    return count


def dtype_now(node: fx.Node) -> torch.dtype | None:
    """Return the dtype that ``node`` gives on its present arguments; None where it can't run on them."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    assert callable(node.target)
    try:
        with next(v.fake_mode for n in node.all_input_nodes if hasattr(v := value_of(n), "fake_mode")):
            return node.target(*args, **kwargs).dtype  # type: ignore[no-any-return]
    except (RuntimeError, TypeError):
        return None


def tensor_overload(node: fx.Node) -> None:
    """Make ``div.Scalar`` by something that is now a tensor ``div.Tensor``."""
    tensor = len(node.args) > 1 and isinstance(node.args[1], fx.Node) and isinstance(value_of(node.args[1]), Tensor)
    if tensor and isinstance(node.target, torch._ops.OpOverload) and node.target._overloadname == "Scalar":
        packet = getattr(_aten, operator_name(node))
        if hasattr(packet, "Tensor"):
            node.target = packet.Tensor
