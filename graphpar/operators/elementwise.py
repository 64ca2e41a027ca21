"""Pointwise operators: any dim can be cut, broadcast dims of size 1 stay whole, and linear ones carry partial sums through."""

from __future__ import annotations

from torch import Tensor, fx

from graphpar.emitted import random_streams
from graphpar.ir.program import operator_name, value_of
from graphpar.operators.batch_states import is_pointwise
from graphpar.operators.notation import Factors, Rule
from graphpar.operators.placement import Size, literal, operands_of, results_of, sizes_of

# Operands in which an operator is linear while the others are held.
_LINEAR: dict[str, tuple[frozenset[int], ...]] = {
    "mul": (frozenset({0}), frozenset({1})),
    "multiply": (frozenset({0}), frozenset({1})),
    **dict.fromkeys(
        ("neg", "negative", "div", "divide", "true_divide", "clone", "contiguous", "detach", "alias", "dropout", "real", "imag",
         "resolve_conj", "resolve_neg"),
        (frozenset({0}),),
    ),
    "where": (frozenset({1, 2}),),
}  # fmt: skip
_SUMS = ("add", "sub", "subtract")
_CASTS = ("to", "_to_copy", "type_as")
_SAME_SHAPE = {"to", "_to_copy", "clone", "contiguous", "detach", "alias", "lift_fresh_copy", "zeros_like", "ones_like",
               "empty_like", "full_like", "nan_to_num", "resolve_conj", "resolve_neg", "real", "imag", "type_as"}  # fmt: skip

_FORGOTTEN = {"chalf", "special_ndtr", "special_polygamma", "fill"}  # torch does not tag them as pointwise

# Those that give finite numbers and finite slopes wherever the operands are finite: what padding holds stays harmless.
_TAME = {
    "add", "sub", "mul", "neg", "relu", "gelu", "silu", "sigmoid", "tanh", "softplus", "elu", "leaky_relu", "mish", "sin", "cos",
    "erf", "abs", "square", "maximum", "minimum", "clamp", "where", "masked_fill", "rsub", "hardtanh", "relu6", "hardswish", "log_sigmoid",
    "dropout", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", *_SAME_SHAPE,
}  # fmt: skip
# Reductions to one number of a pointwise loss: none, mean, sum.
POINTWISE_LOSSES = {
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "soft_margin_loss", "poisson_nll_loss", "hinge_embedding_loss", "margin_ranking_loss",
}  # fmt: skip


def elementwise(node: fx.Node) -> Rule | None:
    """The rule of a pointwise operator; None for any other."""
    name = operator_name(node)
    if name in POINTWISE_LOSSES:
        return pointwise_loss(node)
    if node.target in (random_streams.dropout, random_streams.channel_dropout):
        return _dropout(node)
    both = name in ("max", "min") and len(operands_of(node)) == 2
    if not (is_pointwise(node) or name in _SAME_SHAPE | _FORGOTTEN or both) or not isinstance(value_of(node), Tensor):
        return None
    result = sizes_of(node)
    labels = tuple(f"d{dim}" for dim in range(len(result)))
    operands = [aligned(sizes_of(operand), result, labels) for operand in operands_of(node)]
    if name in ("type_as", "to") and len(operands) > 1:  # the second gives its dtype alone
        operands[1] = tuple(f"like{dim}" for dim in range(len(sizes_of(operands_of(node)[1]))))
    if name in ("prelu", "_prelu_kernel") and len(result) > 1:  # one slope a channel
        operands[1] = (
            labels[1:2] if len(operands[1]) == 1 and sizes_of(operands_of(node)[1])[0] == result[1] else ("1",)
        )
    fixed = frozenset(label for factors in operands for label in factors if label.startswith("like"))
    tame = name in _TAME or (name == "div" and len(operands) == 1)
    padded = frozenset(labels) if tame else frozenset()
    return Rule(tuple(operands), (labels,), fixed, padded, _linear(node, name, len(operands)), uneven=True)


def aligned(sizes: tuple[Size, ...], result: tuple[Size, ...], labels: Factors) -> Factors:
    """An operand's labels: the result's, from the right; 1 where it is broadcast."""
    offset = len(result) - len(sizes)
    return tuple(
        labels[offset + dim] if size == result[offset + dim] and size != (1, 0) else "1"
        for dim, size in enumerate(sizes)
    )


def _linear(node: fx.Node, name: str, operands: int) -> tuple[frozenset[int], ...]:
    if node.kwargs.get("rounding_mode"):
        return ()
    if name in _SUMS:
        return (frozenset({0, 1}),) if operands == 2 else ()
    if name in _CASTS:
        before, after = value_of(operands_of(node)[0]), value_of(node)
        widens = before.is_floating_point() and after.is_floating_point() and after.itemsize >= before.itemsize
        return (frozenset({0}),) if widens else ()
    if name == "masked_fill":
        return (frozenset({0}),) if operands == 2 and len(node.args) > 2 and node.args[2] == 0 else ()
    if name == "where":
        return _LINEAR[name] if operands == 3 else ()
    return tuple(group for group in _LINEAR.get(name, ()) if max(group) < operands)


def _dropout(node: fx.Node) -> Rule:
    """``random_streams.dropout(x, p, keys [b], batch_dim)``: every element knows its place in the whole tensor.

    Linear, but ``spmd_types`` can't know that of a ``where``; and masks of whole tensors are dearer than those of pieces.
    """
    rank = value_of(node).ndim
    labels = tuple(f"d{dim}" for dim in range(rank))
    batch_dim = int(literal(node, "batch_dim", 3, 0)) % rank
    return Rule((labels, (labels[batch_dim],)), (labels,), padded=frozenset(labels))


def pointwise_loss(node: fx.Node, free: bool = False) -> Rule:
    """Element by element; a sum is partial where a dim is sharded, a mean is over whole dims, unless ``free``."""
    operands = [sizes_of(operand) for operand in operands_of(node)]
    rank = max(len(sizes) for sizes in operands)
    whole = tuple(
        max((sizes[dim - rank + len(sizes)] for sizes in operands if dim >= rank - len(sizes)), key=_extent)
        for dim in range(rank)
    )
    labels = tuple(f"d{dim}" for dim in range(rank))
    rows = tuple(aligned(sizes, whole, labels) for sizes in operands)
    reduction = literal(node, "reduction")
    if reduction == 0:
        return Rule(rows, (labels,))
    fixed = frozenset(labels) if reduction == 1 and not free else frozenset()
    return Rule(rows, ((),) * len(results_of(node)), fixed)


def _extent(size: Size) -> tuple[int, int]:
    return size[1], size[0]
