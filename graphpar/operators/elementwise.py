"""Pointwise operators: any dim can be sharded, broadcast dims of size 1 stay whole, and linear ones carry partial sums through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from graphpar.emitted import gated, rotary
from graphpar.ir.program import operator_name, value_of
from graphpar.operators import spelling as write
from graphpar.operators.composite import Composite
from graphpar.operators.notation import Factors, Rule, labelled
from graphpar.operators.placement import (
    Context,
    Placement,
    Size,
    averaged,
    from_rule,
    literal,
    operands_of,
    results_of,
    sizes_of,
)
from graphpar.operators.record import EACH, FIRST, TOGETHER, Kernel, Kind, Reads, Record, each


def elementwise(node: fx.Node) -> Rule | None:
    """Return the rule of a pointwise operator; None where it gives no tensor."""
    name, info = operator_name(node), RECORDS.get(operator_name(node), PLAIN)
    if not isinstance(value_of(node), Tensor):
        return None
    result = sizes_of(node)
    labels = labelled(len(result))
    operands = [aligned(sizes_of(operand), result, labels) for operand in operands_of(node)]
    if name in ("type_as", "to") and len(operands) > 1:  # the second gives its dtype alone
        operands[1] = tuple(f"like{dim}" for dim in range(len(sizes_of(operands_of(node)[1]))))
    slopes = operands[1] if name in ("prelu", "_prelu_kernel") else ()
    if len(slopes) == 1 and len(result) > 1:  # one slope a channel
        operands[1] = labels[1:2] if sizes_of(operands_of(node)[1])[0] == result[1] else ("1",)
    fixed = frozenset(label for factors in operands for label in factors if label.startswith("like"))
    tame = info.tame or (name == "div" and len(operands) == 1)
    padded = frozenset(labels) if tame else frozenset()
    return Rule(tuple(operands), (labels,), fixed, padded, _linear(node, info, len(operands)), uneven=True)


def aligned(sizes: tuple[Size, ...], result: tuple[Size, ...], labels: Factors) -> Factors:
    """Return an operand's labels: those of the result, from the right; 1 where it is broadcast."""
    offset = len(result) - len(sizes)
    return tuple(
        labels[offset + dim] if size == result[offset + dim] and size != (1, 0) else "1"
        for dim, size in enumerate(sizes)
    )


def _linear(node: fx.Node, info: Record, operands: int) -> tuple[frozenset[int], ...]:
    if node.kwargs.get("rounding_mode") or not info.linear:
        return ()
    if info.kind is Kind.COPY:
        before, after = value_of(operands_of(node)[0]), value_of(node)
        widens = before.is_floating_point() and after.is_floating_point() and after.itemsize >= before.itemsize
        return FIRST if widens or before.dtype == after.dtype else ()
    if operator_name(node) == "masked_fill":
        return FIRST if operands == 2 and len(node.args) > 2 and node.args[2] == 0 else ()
    if operator_name(node) == "where" and operands < 3:
        return ()
    return tuple(group for group in info.linear if max(group) < operands)


def _dropout(node: fx.Node) -> Rule | None:
    """``random_streams.dropout(x, p, keys [b], batch_dim)``; torch's dropout has no keys.

    It is linear, but the rule does not say so: ``spmd_types`` can't know that of a ``where``, and partial sums would need masks of
    whole tensors, which cost more than those of shards.
    """
    if isinstance(node.target, torch._ops.OpOverload):
        return elementwise(node)
    rank = value_of(node).ndim
    labels = labelled(rank)
    batch_dim = int(literal(node, "batch_dim", 3, 0)) % rank
    return Rule((labels, (labels[batch_dim],)), (labels,), padded=frozenset(labels))


def _drawn(node: fx.Node) -> Rule | None:
    """``random_streams.normal(keys [b], size of a row, batch_dim)``; torch's functions of these names have no keys, and mix nothing."""
    labels = labelled(value_of(node).ndim)
    if isinstance(node.target, torch._ops.OpOverload):
        return elementwise(node)
    batch_dim: Any = node.kwargs.get("batch_dim", 0)
    return Rule((("1",) if batch_dim is None else (labels[int(batch_dim)],),), (labels,), padded=frozenset(labels))


def _rotary(node: fx.Node) -> Rule:
    """``rotary.apply_rotary(x, cos, sin)``: the features of a row stay together; tables are broadcast to other dims."""
    sizes = sizes_of(node)
    labels = labelled(len(sizes))
    operands = tuple(aligned(sizes_of(operand), sizes, labels) for operand in operands_of(node))
    return Rule(operands, (labels,), frozenset(labels[-1:]), frozenset(labels[:-1]), FIRST)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Turn pairs of features, (a, b) -> (a cos - b sin, b cos + a sin), by tables with one number a feature or a pair."""
    width, dim = x.size(-1), -1 if interleaved else -2

    def pairs(each: Tensor) -> Tensor:
        count = min(2, 2 * each.size(-1) // width)
        made: Tensor = each.unflatten(-1, (-1, count) if interleaved else (count, -1))
        return made

    (a, b), cos, sin = pairs(x).unbind(dim), pairs(cos), pairs(sin)
    first, second = (a * cos.select(dim, 0) - b * sin.select(dim, 0), b * cos.select(dim, -1) + a * sin.select(dim, -1))
    return torch.stack([first, second], dim).flatten(-2)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    return F.gelu(gate, approximate=approximate) * up


def pointwise_loss(node: fx.Node, free: bool = False) -> Rule:
    """Element by element; a sum is partial where a dim is sharded, a mean is over whole dims, unless ``free``."""
    operands = [sizes_of(operand) for operand in operands_of(node)]
    rank = max(len(sizes) for sizes in operands)
    whole = tuple(
        max((sizes[dim - rank + len(sizes)] for sizes in operands if dim >= rank - len(sizes)), key=_extent)
        for dim in range(rank)
    )
    labels = labelled(rank)
    rows = tuple(aligned(sizes, whole, labels) for sizes in operands)
    reduction = literal(node, "reduction")
    if reduction == 0:
        return Rule(rows, (labels,))
    fixed = frozenset(labels) if reduction == 1 and not free else frozenset()
    return Rule(rows, ((),) * len(results_of(node)), fixed)


def averaged_loss(node: fx.Node, context: Context) -> list[Placement]:
    """A mean is the mean over equal shards."""
    mean = literal(node, "reduction") == 1
    found = from_rule(node, pointwise_loss(node, free=True), context)
    return averaged(found, "mean_of_pieces") if mean else found


def _extent(size: Size) -> tuple[int, int]:
    return size[1], size[0]


# ---- records ---------------------------------------------------------------------------------------------------


def pointwise(*spelling: write.Spelling, **facts: Any) -> Record:
    """Make the record of a pointwise operator."""
    return Record(Kind.POINTWISE, elementwise, spelling=spelling, **facts)


def _comparison(symbol: str) -> Record:
    return pointwise(write.infix(symbol, write.COMPARE), tame=True)


def _error(function: str, keywords: str = "", functions: bool = False) -> Record:
    return replace(_LOSS, functions=functions, spelling=(write.loss(function, keywords),))


def _gate(function: Callable[..., Tensor], parts: Callable[..., Tensor], *options: dict[str, Any]) -> Record:
    return Record(
        Kind.POINTWISE,
        elementwise,
        linear=(frozenset({1}),),
        tame=True,
        functions=True,
        kernels=(Kernel(2, True), Kernel(3)),
        # the activation's slope by a product, and the activation again times the gradient
        backward=(Kernel(3), Kernel(3, True), Kernel(2, True), Kernel(3)),
        composite=Composite(
            function,
            parts,
            fuses=True,
            title="activated gates times values",
            samples=tuple(lambda draw, own=own: ((draw(2, 3), draw(2, 3)), own) for own in options or ({},)),  # type: ignore[misc]
        ),
    )


_LOSS = Record(Kind.LOSS, pointwise_loss, averaged_loss)
PLAIN = Record(Kind.POINTWISE, elementwise)
"""The record of pointwise operators of which no more is known."""
_SUM: dict[str, Any] = {"linear": TOGETHER, "adds": True, "tame": True, "saves": Reads.NOTHING, "passes": True}
_COPY = Record(Kind.COPY, elementwise, linear=FIRST, tame=True)
_ALIAS = Record(Kind.ALIAS, elementwise, linear=FIRST, tame=True)
_LIKE = Record(Kind.FACTORY, elementwise, tame=True)
_QUOTIENT = pointwise(write.infix("/", write.PRODUCT), linear=FIRST, neutral=1)

COMPARISONS = frozenset(
    ["eq", "ne", "lt", "le", "gt", "ge", "less", "less_equal", "greater", "greater_equal", "not_equal"]
)
"""Operators that say whether two numbers are equal, or which is larger."""

RECORDS: dict[str, Record] = {
    "add": pointwise(write.infix("+", write.SUM), neutral=0, **_SUM),
    "sub": pointwise(write.infix("-", write.SUM), neutral=0, **_SUM),
    "subtract": pointwise(neutral=0, **_SUM),
    "rsub": pointwise(tame=True, adds=True, saves=Reads.NOTHING),
    "mul": pointwise(write.infix("*", write.PRODUCT), linear=EACH, tame=True, neutral=1),
    "multiply": pointwise(linear=EACH, neutral=1),
    **each("div true_divide", _QUOTIENT),
    "divide": pointwise(linear=FIRST, neutral=1),
    "floor_divide": pointwise(write.infix("//", write.PRODUCT), saves=Reads.NOTHING),
    "remainder": pointwise(write.infix("%", write.PRODUCT)),
    "neg": pointwise(write.prefix("-"), linear=FIRST, tame=True, saves=Reads.NOTHING),
    "negative": pointwise(linear=FIRST, saves=Reads.NOTHING),
    "pow": pointwise(write.power, write.method),
    # comparisons and bits
    "eq": _comparison("=="),
    "ne": _comparison("!="),
    "lt": _comparison("<"),
    "le": _comparison("<="),
    "gt": _comparison(">"),
    "ge": _comparison(">="),
    **each("greater greater_equal less less_equal not_equal isclose isreal isnan isfinite isinf logical_xor", PLAIN),
    **each("__and__ bitwise_and", pointwise(write.infix("&", write.AND))),
    **each("__or__ bitwise_or", pointwise(write.infix("|", write.OR))),
    **each("__xor__ bitwise_xor", pointwise(write.infix("^", write.XOR))),
    **each("__lshift__ bitwise_left_shift", pointwise(write.infix("<<", write.SHIFT))),
    **each("__rshift__ bitwise_right_shift", pointwise(write.infix(">>", write.SHIFT))),
    "__invert__": pointwise(write.prefix("~")),
    "bitwise_not": pointwise(write.prefix("~"), write.method),
    **each("logical_and logical_or", pointwise(tame=True)),
    "logical_not": pointwise(write.method, tame=True),
    # functions
    "relu": pointwise(tame=True, saves=Reads.RESULT),
    "leaky_relu": pointwise(write.function("F.leaky_relu", "self", "negative_slope"), tame=True),
    "gelu": pointwise(write.function("F.gelu", "self", "approximate"), tame=True, functions=True),
    **each("silu softplus elu mish", pointwise(tame=True, functions=True)),
    **each("selu celu erfc erfinv log2 log10 log1p asin acos atan atan2 sinh cosh logaddexp", pointwise(functions=True)),
    **each("tanh sigmoid", pointwise(write.method, tame=True, functions=True, saves=Reads.RESULT)),
    **each("sin cos erf", pointwise(write.method, tame=True, functions=True)),
    "exp": pointwise(write.method, functions=True, saves=Reads.RESULT),
    "log": pointwise(write.method, functions=True),
    "log_sigmoid": pointwise(write.renamed("F.logsigmoid"), tame=True, functions=True),
    **each("special_expit expm1 tan", pointwise(functions=True, saves=Reads.RESULT)),
    **each("abs square", pointwise(write.method, tame=True)),
    **each("sqrt rsqrt", pointwise(write.method, saves=Reads.RESULT)),
    "round": pointwise(write.method, saves=Reads.NOTHING),
    "clamp": pointwise(write.method, tame=True),
    **each("maximum minimum hardtanh relu6 hardswish", pointwise(tame=True)),
    "prelu": Record(Kind.POINTWISE, elementwise, module="PReLU"),
    **each("_prelu_kernel absolute ldexp float_power special_ndtr special_polygamma", PLAIN),
    # choosing
    "where": pointwise(linear=(frozenset({1, 2}),), tame=True, saves=Reads.NOTHING),
    "masked_fill": pointwise(write.method, linear=FIRST, tame=True, saves=Reads.NOTHING),
    "fill": pointwise(saves=Reads.NOTHING),
    # the same elements
    "to": replace(_COPY, spelling=(write.cast, write.method)),
    "type_as": replace(_COPY, spelling=write.METHOD),
    "clone": replace(_COPY, passes=True, spelling=write.METHOD),
    **each("_to_copy", _COPY),
    "lift_fresh_copy": replace(_COPY, linear=()),
    **each("contiguous detach", replace(_ALIAS, spelling=write.METHOD)),
    "alias": _ALIAS,
    "lift_fresh": Record(Kind.ALIAS),
    **each("resolve_conj resolve_neg", pointwise(linear=FIRST, tame=True, saves=Reads.NOTHING)),
    "real": Record(Kind.VIEW, elementwise, linear=FIRST, tame=True, spelling=(write.attribute("real"),)),
    "imag": Record(Kind.VIEW, elementwise, linear=FIRST, tame=True, spelling=(write.attribute("imag"),)),
    "nan_to_num": pointwise(tame=True),
    "complex": PLAIN,
    "conj": replace(PLAIN, kind=Kind.VIEW),
    "polar": pointwise(saves=Reads.RESULT),
    "chalf": pointwise(saves=Reads.NOTHING),
    **each("zeros_like ones_like empty_like full_like", _LIKE),
    # random numbers
    "dropout": Record(Kind.RANDOM, _dropout, linear=FIRST, tame=True, spelling=(write.stream_function("dropout"),)),
    **each("uniform normal exponential integers", Record(Kind.RANDOM, _drawn, spelling=(write.drawn,))),
    "channel_dropout": Record(Kind.RANDOM, _dropout, spelling=(write.stream_function("channel_dropout"),)),
    # a product, and two that each read three halves and write one
    "apply_rotary": Record(
        Kind.POINTWISE, _rotary, linear=FIRST, in_place=True, kernels=(Kernel(2), Kernel(1.5), Kernel(1.5)),
        composite=Composite(rotary.apply_rotary, _rotated, samples=(
            lambda draw: ((draw(2, 3, 4, 6), draw(4, 6), draw(4, 6)), {}),
            lambda draw: ((draw(2, 4, 3, 6), draw(4, 1, 3), draw(4, 1, 3)), {"interleaved": True}),
        )),
    ),
    "swiglu": _gate(gated.swiglu, _swiglu),
    "geglu": _gate(gated.geglu, _geglu, {}, {"approximate": "tanh"}),
    "feature_dropout": Record(Kind.RANDOM, _dropout),
    "stream": Record(Kind.RANDOM, elementwise),
    # losses, element by element
    "mse_loss": _error("F.mse_loss"),
    "l1_loss": _error("F.l1_loss"),
    "smooth_l1_loss": _error("F.smooth_l1_loss", "beta"),
    "huber_loss": _error("F.huber_loss", "delta"),
    "kl_div": _error("F.kl_div", "log_target", functions=True),
    "binary_cross_entropy": _error("F.binary_cross_entropy", "weight", functions=True),
    "binary_cross_entropy_with_logits": _error("F.binary_cross_entropy_with_logits", "weight pos_weight", functions=True),
    **each("soft_margin_loss poisson_nll_loss", replace(_LOSS, functions=True)),
    **each("hinge_embedding_loss margin_ranking_loss", _LOSS),
}  # fmt: skip
