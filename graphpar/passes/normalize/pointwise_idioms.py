"""Activations that are spelled out, such as GELU by ``tanh``, and those that scale another value.

    0.5 * x * (1 + tanh(0.79788 * (x + 0.044715 * x ** 3)))     F.gelu(x, approximate="tanh")
    x * sigmoid(x)                                              F.silu(x)
    F.silu(gate) * up                                           swiglu(gate, up)

They are found by what they compute, not by how they are written: a product whose operators all follow from one value is a function of that
value's elements. It runs on many numbers in fp64, and is an activation of torch's if it agrees with that on all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.emitted.gated import geglu, swiglu
from graphpar.ir.program import value_of
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.normalize.causal_masks import Masks
from graphpar.passes.normalize.graph_matching import insert_call, is_call, number, sizes

_aten = torch.ops.aten
_ACTIVATIONS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (_aten.gelu.default, {}),
    (_aten.gelu.default, {"approximate": "tanh"}),
    (_aten.silu.default, {}),
    (_aten.mish.default, {}),
)
_MOST = 14
"""Operators of an activation."""
_OFF = 1e-8
"""Constants are written with ten digits."""
_SURE = 80.0
"""Numbers up to which a written activation must not overflow; beyond, ``x * exp(x) / (1 + exp(x))`` does."""


def activation(node: fx.Node, masks: Masks) -> bool:
    """A product that computes an activation of one value: one call."""
    for x, region in _regions(node):
        same = len(region) > 1 and all(value_of(each).dtype == value_of(x).dtype for each in region)
        found = _named(_written(x, region)) if same else None
        if found is not None:
            target, options = _ACTIVATIONS[found]
            insert_call(node, target, (x,), dict(options))
            return True
    return False


def gated(node: fx.Node, masks: Masks) -> bool:
    """``silu(gate) * up``, where nothing else uses the activated gate: one call, which keeps gate and up alone."""
    for activated, up in (node.args[:2], node.args[1::-1]):
        if not is_call(activated, "silu", "gelu") or set(activated.users) != {node} or activated is up:  # type: ignore[union-attr]
            continue
        (gate, *_), options = activated.args, activated.kwargs  # type: ignore[union-attr]
        if not (isinstance(gate, fx.Node) and isinstance(up, fx.Node) and isinstance(value_of(up), Tensor)):
            continue
        tensors = [value_of(each) for each in (gate, up, node)]
        alike = sizes(gate) == sizes(up) == sizes(node) and len({(each.dtype, each.device) for each in tensors}) == 1
        if alike and not node.kwargs and tensors[0].is_floating_point():
            insert_call(node, swiglu if is_call(activated, "silu") else geglu, (gate, up), dict(options))
            return True
    return False


def _regions(node: fx.Node) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Yield values from which ``node`` follows by pointwise operators of one tensor or two, and these operators in order."""
    region, left = [node], set(node.all_input_nodes) if _is_pointwise(node) else set()
    while left and len(region) <= _MOST:
        if len(left) == 1:
            yield next(iter(left)), region[::-1]
        last = max(left)  # by their places in the graph
        if not _is_pointwise(last):
            return
        left.discard(last)
        left.update(last.all_input_nodes)
        region.append(last)


def _is_pointwise(node: fx.Node) -> bool:
    """Whether an operator computes each element from those at its place, and from numbers."""
    if node.op != "call_function" or record_of(node).kind is not Kind.POINTWISE or node.kwargs:
        return False
    operands = node.all_input_nodes
    alike = all(isinstance(value_of(each), Tensor) and sizes(each) == sizes(node) for each in operands)
    plain = all(isinstance(each, fx.Node) or number(each) is not None for each in node.args)
    return bool(operands) and alike and plain and value_of(node).is_floating_point()


Written = tuple[tuple[Any, tuple[Any, ...]], ...]
"""Operators in order, each with its arguments: numbers, and (place,) of a result, of which the first is the value itself."""


def _written(x: fx.Node, region: list[fx.Node]) -> Written:
    places = {x: 0} | {each: place for place, each in enumerate(region, 1)}
    return tuple(
        (each.target, tuple((places[item],) if isinstance(item, fx.Node) else item for item in each.args))
        for each in region
    )


@cache
def _named(written: Written) -> int | None:
    """Return which activation ``written`` computes; layers share the answer."""
    large = torch.logspace(1, 30, 291, dtype=torch.float64)  # where a bound, as of clamp(max=100), would show
    numbers = torch.cat([torch.linspace(-12, 12, 4001, dtype=torch.float64), -large, large])
    results = [numbers]
    for target, args in written:
        results.append(target(*(results[item[0]] if isinstance(item, tuple) else item for item in args)))
    for place, (target, options) in enumerate(_ACTIVATIONS):
        off = (results[-1] - target(numbers, **options)).abs()
        overflows = ~results[-1].isfinite() & (numbers.abs() > _SURE)
        if bool(((off <= _OFF * (1 + numbers.abs())) | overflows).all()):
            return place
    return None
