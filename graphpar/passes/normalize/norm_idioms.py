"""Norms and softmax that are written out.

weight * (x * rsqrt(x.pow(2).mean(-1) + eps))           F.rms_norm(x, [n], weight, eps)
(x - mean) * rsqrt(var + eps) * weight + bias           F.layer_norm(x, [n], weight, bias, eps)
exp(x - max) / sum                                      F.softmax(x, dim)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from graphpar.ir.program import operator_name, value_of
from graphpar.operators.placement import literal
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.normalize.causal_masks import Masks
from graphpar.passes.normalize.graph_matching import cast_from, insert_call, is_call, number, sizes

_aten = torch.ops.aten


def softmax(node: fx.Node, masks: Masks) -> bool:
    """``exp(x - max) / sum``; what is subtracted changes nothing, so that its gradient is zero."""
    exponentials: Any = node.args[0]
    total: Any = node.args[1]
    if literal(node, "rounding_mode", default="") or not is_call(exponentials, "exp") or not is_call(total, "sum"):
        return False
    shifted: Any = exponentials.args[0]
    if total.args[0] is not exponentials or set(exponentials.users) != {node, total}:
        return False
    if not is_call(shifted, "sub") or literal(shifted, "alpha", default=1) != 1:
        return False
    x: Any = shifted.args[0]
    most = _undetached(shifted.args[1])
    if operator_name(most) == "getitem" and most.args[1] == 0 and is_call(most.args[0], "max"):
        most = most.args[0]
    if (
        not is_call(most, "max", "amax")
        or _undetached(most.args[0]) is not _undetached(x)
        or not isinstance(x, fx.Node)
    ):
        return False
    dims = [_dims(each) for each in (total, most)]
    alike = {value_of(each).dtype for each in (x, exponentials, total, node)}
    over = dims[0] or []
    if len(alike) > 1 or over != dims[1] or len(over) != 1:
        return False
    insert_call(node, _aten.softmax.int, (x, over[0]))
    return True


def _undetached(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.op == "call_function" and record_of(node).kind is Kind.ALIAS:
        node = node.args[0]
    return node


def _dims(node: Any) -> list[int] | None:
    """Return the dims over which ``node`` reduces, in order; none where it does not keep them, as dims of size 1."""
    rank, dims = value_of(node.args[0]).ndim, literal(node, "dim")
    if not literal(node, "keepdim") or dims is None:
        return None
    return sorted(int(dim) % rank for dim in (dims if isinstance(dims, list | tuple) else [dims]))


def layer_norm(node: fx.Node, masks: Masks) -> bool:
    """``(x - mean) * rsqrt(var + eps)``, times a weight, plus a bias."""
    found = _divided_by_root(node)
    if found is None:
        return False
    centered, (variance, eps) = found[0], _sum_with_number(found[1])
    x = _centered(centered)
    if x is None or variance is None or eps is None or not _is_variance(variance, x):
        return False
    dims = _dims(variance)
    rank = value_of(x).ndim
    if not dims or dims != list(range(rank - len(dims), rank)) or dims != _dims(centered.args[1]):
        return False
    shape, dtype = [sizes(x)[dim] for dim in dims], value_of(x).dtype
    if not all(isinstance(size, int) for size in shape) or {value_of(e).dtype for e in (centered, variance, node)} != {
        dtype
    }:
        return False
    last, weight = _weighted(node, dtype, shape)
    last, bias = _combined(last, "add", shape)
    insert_call(last, _aten.layer_norm.default, (x, shape, weight, bias, eps))
    return True


def _centered(node: Any) -> fx.Node | None:
    """Return x of ``x - x.mean(dims)``."""
    if not is_call(node, "sub") or literal(node, "alpha", default=1) != 1:
        return None
    x: Any = node.args[0]
    mean: Any = node.args[1]
    if not is_call(mean, "mean") or not literal(mean, "keepdim") or mean.args[0] is not x:
        return None
    return x if isinstance(x, fx.Node) else None


def _is_variance(node: fx.Node, x: fx.Node) -> bool:
    """Whether ``node`` is the mean of the squares of centered x, or torch's variance without Bessel's correction."""
    if is_call(node, "mean"):
        square: Any = node.args[0]
        squared: Any = _squared(square) if isinstance(square, fx.Node) else None
        same: bool = _centered(squared) is x and squared is not None and _dims(squared.args[1]) == _dims(node)
        return same and value_of(square).dtype == value_of(x).dtype
    if not is_call(node, "var"):
        return False
    plain = literal(node, "correction", default=1) == 0 or literal(node, "unbiased", default=True) is False
    given: Any = node.args[0]
    return plain and (given is x or (_centered(given) is x and _dims(given.args[1]) == _dims(node)))


def rms_norm(node: fx.Node, masks: Masks) -> bool:
    """``x * rsqrt(mean(x * x) + eps)``, cast, and times a weight: ``F.rms_norm``."""
    found = _divided_by_root(node)
    if found is None:
        return False
    x, root = found
    total, eps = _sum_with_number(root)
    if total is None or eps is None or not is_call(total, "mean") or not literal(total, "keepdim"):
        return False
    square, rank = total.args[0], value_of(x).ndim
    dims = sorted(int(dim) % rank for dim in literal(total, "dim") or ())
    if not isinstance(square, fx.Node) or not dims or dims != list(range(rank - len(dims), rank)):
        return False
    source, squared = cast_from(x), _squared(square)
    if squared is None or cast_from(squared) is not source or value_of(total).dtype != value_of(square).dtype:
        return False
    shape = [sizes(x)[dim] for dim in dims]
    if not all(isinstance(size, int) for size in shape):
        return False
    if value_of(node).dtype == torch.float64 != value_of(source).dtype:
        return False  # torch computes the norm of fp32 in fp32
    last, weight = _weighted(node, value_of(source).dtype, shape)
    given = source if value_of(last).dtype == value_of(source).dtype else x
    if value_of(given).dtype != value_of(last).dtype:
        return False
    insert_call(last, _aten.rms_norm.default, (given, shape, weight, eps))
    return True


def _divided_by_root(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return x and v of ``x * rsqrt(v)``, ``x / sqrt(v)``, or ``x * v ** -0.5``."""
    first, second = node.args[0], node.args[1]
    if not (isinstance(first, fx.Node) and isinstance(second, fx.Node)) or literal(node, "rounding_mode", default=""):
        return None
    if is_call(node, "div"):
        return (first, second.args[0]) if is_call(second, "sqrt") and isinstance(second.args[0], fx.Node) else None
    for x, root in ((first, second), (second, first)):
        below = root.args[0] if root.op == "call_function" and root.args else None
        if is_call(root, "rsqrt") or (is_call(root, "pow") and number(root.args[1]) == -0.5):
            return (x, below) if isinstance(below, fx.Node) else None
        if is_call(root, "reciprocal") and isinstance(below, fx.Node) and is_call(below, "sqrt"):
            inner = below.args[0]
            return (x, inner) if isinstance(inner, fx.Node) else None
    return None


def _sum_with_number(node: fx.Node) -> tuple[fx.Node | None, float | None]:
    """Return x and e of ``x + e``."""
    if not is_call(node, "add") or literal(node, "alpha", default=1) != 1:
        return None, None
    for x, other in ((node.args[0], node.args[1]), (node.args[1], node.args[0])):
        if isinstance(x, fx.Node) and number(other) is not None:
            return x, number(other)
    return None, None


def _squared(node: fx.Node) -> fx.Node | None:
    """Return x of ``x ** 2``, ``x.square()`` or ``x * x``."""
    square = is_call(node, "square") or (is_call(node, "pow") and number(node.args[1]) == 2)
    square |= is_call(node, "mul") and node.args[0] is node.args[1]
    operand = node.args[0] if square else None
    return operand if isinstance(operand, fx.Node) else None


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
