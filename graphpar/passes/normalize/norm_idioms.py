"""Norms and softmax that are written out: patterns, and what a match must fulfil besides.

weight * (x * rsqrt(x.pow(2).mean(-1) + eps))           F.rms_norm(x, [n], weight, eps)
(x - mean) * rsqrt(var + eps) * weight + bias           F.layer_norm(x, [n], weight, bias, eps)
exp(x - max) / sum                                      F.softmax(x, dim)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.ir.program import value_of
from graphpar.operators.placement import literal
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.normalize.causal_masks import Masks
from graphpar.passes.normalize.graph_matching import (
    Call,
    Number,
    Pattern,
    Value,
    call,
    cast_from,
    insert_call,
    is_call,
    sizes,
)

_aten = torch.ops.aten
_X, _EPS = Value("x"), Number("eps")


def _divided_by_root(x: Pattern, value: Pattern) -> Pattern:
    """``x / sqrt(value)``, as people write it."""
    root = call("rsqrt", value), call("pow", value, -0.5), call("reciprocal", call("sqrt", value))
    return call("div", x, call("sqrt", value)), call("mul", x, root)


def _square(x: Pattern) -> Pattern:
    return call("square", x), call("pow", x, 2), call("mul", x, x)


def _centered(name: str) -> Call:
    """``x`` minus its mean, which is ``{name}_mean``."""
    return call("sub", _X, call("mean", _X, keepdim=True, name=f"{name}_mean"), name=name)


_AGAIN = _centered("again")
_VARIANCE = (
    call("mean", _square(_AGAIN), name="variance"),
    call("var", (_X, _AGAIN), correction=0, name="variance"),
    call("var", (_X, _AGAIN), unbiased=False, name="variance"),
)
_MEAN_SQUARE = call("mean", _square(Value("squared")), keepdim=True, name="mean")
_EXPONENTIALS = call("exp", call("sub", _X, Value("subtracted")), name="exponentials")

LAYER_NORM = _divided_by_root(_centered("centered"), call("add", _VARIANCE, _EPS))
RMS_NORM = _divided_by_root(_X, call("add", _MEAN_SQUARE, _EPS))
SOFTMAX = call("div", _EXPONENTIALS, call("sum", Value("exponentials"), name="total"))


def softmax(node: fx.Node, found: dict[str, Any], masks: Masks) -> bool:
    """``exp(x - max) / sum``; what is subtracted changes nothing, so that its gradient is zero."""
    x, exponentials, total = (found[name] for name in ("x", "exponentials", "total"))
    most = _undetached(found["subtracted"])
    if most.target is operator.getitem and most.args[1] == 0:  # of torch.max, the values
        most = most.args[0]
    if not is_call(most, "max", "amax") or _undetached(most.args[0]) is not _undetached(x):
        return False
    over = _dims(total)
    same_dtype = len({value_of(each).dtype for each in (x, exponentials, total, node)}) == 1
    if set(exponentials.users) != {node, total} or not same_dtype or over != _dims(most) or len(over or ()) != 1:
        return False
    insert_call(node, _aten.softmax.int, (x, over[0]))  # type: ignore[index]
    return True


def _undetached(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.op == "call_function" and record_of(node).kind is Kind.ALIAS:
        node = node.args[0]
    return node


def _dims(node: fx.Node) -> list[int] | None:
    """Return the dims over which ``node`` reduces, in order; none where it does not keep them, as dims of size 1."""
    rank, dims = value_of(node.args[0]).ndim, literal(node, "dim")  # type: ignore[arg-type]
    if not literal(node, "keepdim") or dims is None:
        return None
    return sorted(int(dim) % rank for dim in (dims if isinstance(dims, list | tuple) else [dims]))


def _last_shape(x: fx.Node, dims: list[int] | None) -> list[int] | None:
    """Return the sizes of ``dims``, where they are the last of ``x``, and fixed."""
    rank = value_of(x).ndim
    shape = [size for size in sizes(x)[rank - len(dims or ()) :] if isinstance(size, int)]
    return shape if dims and dims == list(range(rank - len(shape), rank)) else None


def layer_norm(node: fx.Node, found: dict[str, Any], masks: Masks) -> bool:
    """``(x - mean) * rsqrt(var + eps)``, times a weight, plus a bias."""
    x, centered, variance = (found[name] for name in ("x", "centered", "variance"))
    means = [found[name] for name in ("centered_mean", "again_mean") if name in found]
    dims, dtype = _dims(variance), value_of(x).dtype
    shape = _last_shape(x, dims)
    alike = {value_of(each).dtype for each in (centered, variance, variance.args[0], node)} == {dtype}
    if shape is None or not alike or any(_dims(mean) != dims for mean in means):
        return False
    last, weight = _weighted(node, dtype, shape)
    last, bias = _combined(last, "add", shape)
    insert_call(last, _aten.layer_norm.default, (x, shape, weight, bias, found["eps"]))
    return True


def rms_norm(node: fx.Node, found: dict[str, Any], masks: Masks) -> bool:
    """``x * rsqrt(mean(x * x) + eps)``, cast, and times a weight."""
    x, mean = found["x"], found["mean"]
    source, shape = cast_from(x), _last_shape(x, _dims(mean))
    dtype = value_of(source).dtype
    if (
        shape is None
        or cast_from(found["squared"]) is not source
        or value_of(mean).dtype != value_of(mean.args[0]).dtype
    ):
        return False
    if value_of(node).dtype == torch.float64 != dtype:
        return False  # torch computes the norm of fp32 in fp32
    last, weight = _weighted(node, dtype, shape)
    given = source if value_of(last).dtype == dtype else x
    if value_of(given).dtype != value_of(last).dtype:
        return False
    insert_call(last, _aten.rms_norm.default, (given, shape, weight, found["eps"]))
    return True


def _weighted(norm: fx.Node, dtype: torch.dtype, shape: list[Any]) -> tuple[fx.Node, fx.Node | None]:
    """Return what a normalised value becomes, and the weight: it is cast back to ``dtype``, and multiplied, where nothing else uses it."""
    last, (only,) = norm, list(norm.users) if len(norm.users) == 1 else [None]
    if only is not None and record_of(only).kind is Kind.COPY and value_of(only).dtype == dtype != value_of(norm).dtype:
        last = only
    return _combined(last, "mul", shape)


def _combined(last: fx.Node, name: str, shape: list[Any]) -> tuple[fx.Node, fx.Node | None]:
    """Return the product or sum of ``last`` with a tensor of ``shape``, and that tensor; ``last`` alone where it has other users."""
    only = next(iter(last.users)) if len(last.users) == 1 else None
    if only is None or not is_call(only, name) or literal(only, "alpha", default=1) != 1:
        return last, None
    for given, other in ((only.args[0], only.args[1]), (only.args[1], only.args[0])):
        if other is last and isinstance(given, fx.Node) and isinstance(value_of(given), Tensor):
            alike = value_of(given).dtype == value_of(last).dtype == value_of(only).dtype
            if alike and sizes(given) == shape:
                return only, given
    return last, None
