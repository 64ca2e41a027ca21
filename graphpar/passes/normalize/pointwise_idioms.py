"""Activations that are spelled out, such as GELU by ``tanh``, and the parts of composite operators.

    0.5 * x * (1 + tanh(0.79788 * (x + 0.044715 * x ** 3)))     F.gelu(x, approximate="tanh")
    x * sigmoid(x)                                              F.silu(x)
    F.silu(gate) * up                                           swiglu(gate, up)

Activations are found by what they compute, not by how they are written: a product whose operators all follow from one value is a function
of that value's elements. It runs on many numbers in fp64, and is an activation of torch's if it agrees with that on all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from graphpar.ir.program import operator_name, value_of
from graphpar.operators.composite import Composite
from graphpar.operators.placement import literal
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.normalize.causal_masks import Masks
from graphpar.passes.normalize.graph_matching import Pattern, Value, call, insert_call, number, sizes

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


def activation(node: fx.Node, found: dict[str, Any], masks: Masks) -> bool:
    """A product that computes an activation of one value: one call."""
    for x, region in _regions(node):
        same = len(region) > 1 and all(value_of(each).dtype == value_of(x).dtype for each in region)
        place = _named(_region_key(x, region)) if same else None
        if place is not None:
            target, options = _ACTIVATIONS[place]
            insert_call(node, target, (x,), dict(options))
            return True
    return False


@cache
def composite_patterns(operator: Composite) -> tuple[Pattern, ...]:
    """Return what a composite operator is in operators of torch, with the options of each sample: the traces of its parts."""
    found = []
    for place, sample in enumerate(operator.samples):
        operands, options = sample(lambda *shape: torch.randn(shape))
        traced = make_fx(lambda *given, own=options: operator.parts(*given, **own), pre_dispatch=True)(*operands)  # type: ignore[misc]
        found.append(_pattern(traced.graph.output_node().args[0], f"sample {place}"))
    return tuple(found)


def _pattern(traced: Any, name: str = "") -> Pattern:
    if not isinstance(traced, fx.Node):
        return float(traced)
    if traced.op == "placeholder":
        return Value(str(traced.target).removesuffix("_1"))
    options = {each.name: literal(traced, each.name) for each in traced.target._schema.arguments[len(traced.args) :]}  # type: ignore[union-attr]
    return call(operator_name(traced), *map(_pattern, traced.args), name=name or f"between {traced.name}", **options)


def composite(operator: Composite, node: fx.Node, found: dict[str, Any], masks: Masks) -> bool:
    """The parts of a composite operator, of tensors of one shape, of which nothing else uses what is in between: one call."""
    between = [value for name, value in found.items() if name.startswith("between ")]
    sample = next(name for name, value in found.items() if value is node and name.startswith("sample "))
    operands = [value for name, value in sorted(found.items()) if not name.startswith(("between ", "sample "))]
    if {*between} & {*operands} or any(set(each.users) - {node, *between} for each in between):
        return False
    tensors = [value_of(each) for each in (*operands, node)]
    alike = all(isinstance(each, Tensor) for each in tensors) and all(sizes(each) == sizes(node) for each in operands)
    if not alike or len({(each.dtype, each.device) for each in tensors}) > 1 or not tensors[0].is_floating_point():
        return False
    _, options = operator.samples[int(sample.removeprefix("sample "))](lambda *shape: torch.empty(shape))
    insert_call(node, operator.function, tuple(operands), dict(options))
    return True


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


def _region_key(x: fx.Node, region: list[fx.Node]) -> Written:
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
