"""Attention that is written out, causal masks that are tensors, and keys and values that are repeated for groups of heads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.ir.program import value_of
from graphpar.operators.placement import literal
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.normalize.causal_masks import HIDES, Masks
from graphpar.passes.normalize.graph_matching import (
    Number,
    Value,
    call,
    follows_parameters,
    insert_call,
    insert_helper,
    is_call,
    matches,
    number,
    sizes,
)
from graphpar.passes.normalize.mask_conditions import conditions_of, constant, shows_itself

_aten = torch.ops.aten
_ATTENTION = _aten.scaled_dot_product_attention.default


@dataclass(frozen=True)
class Written:
    """Attention in products: ``softmax(scale * query @ keys + mask) @ value``, with a ``cap`` of ``cap * tanh(scores / cap) + mask``.

    ``keys`` are as the product takes them: [.., width, length].
    """

    query: fx.Node
    keys: fx.Node
    value: fx.Node
    mask: fx.Node | None
    scale: float
    cap: float | None

    def call(self, node: fx.Node) -> fx.Node:
        """Let a call of torch's attention, which knows no cap, take the place of ``node``."""
        usual = math.isclose(self.scale, value_of(self.query).shape[-1] ** -0.5, rel_tol=1e-12)
        options = {} if usual else {"scale": self.scale}
        return insert_call(node, _ATTENTION, (self.query, _turned(node, self.keys), self.value, self.mask), options)


def plain_attention(node: fx.Node, found: dict[str, Any], masks: Masks) -> bool:
    """``softmax(scale * q @ k.mT + mask) @ v``: one call."""
    written = written_attention(node, masks)
    if written is None or written.cap is not None:
        return False
    written.call(node)
    return True


def written_attention(node: fx.Node, masks: Masks) -> Written | None:
    """Return the attention that a product of weights and values ends."""
    weights, value = node.args[0], node.args[1]
    softmax = _softmax(weights)
    if softmax is None or not isinstance(value, fx.Node):
        return None
    found = _scores(softmax.args[0], masks)
    if found is None:
        return None
    query, keys, mask, scale, cap = found
    shapes = [sizes(operand) for operand in (query, keys, value)]
    (*lead, _, width), (*others, above, length), (*third, rows, _) = shapes
    if (
        len(shapes[0]) < 3
        or not isinstance(width, int)
        or lead != others
        or lead != third
        or above != width
        or length != rows
    ):
        return None
    if sizes(node) != [*lead, shapes[0][-2], shapes[2][-1]]:  # a mask of more heads or examples repeats the scores
        return None
    dtypes = {value_of(operand).dtype for operand in (query, keys, value, node)}
    if len(dtypes) > 1 or not dtypes.pop().is_floating_point:
        return None
    if mask is not None and (
        value_of(mask).dtype not in (torch.bool, value_of(query).dtype) or value_of(mask).ndim < 2
    ):
        return None
    return Written(query, keys, value, mask, scale, cap)


def _softmax(weights: Any) -> fx.Node | None:
    """Return the softmax over the last dim of which ``weights`` are a copy; none where they have other users, and are made anyway."""
    while _is_rounding(weights) and len(weights.users) == 1:
        weights = weights.args[0]
    if not is_call(weights, "softmax", "_softmax", "_safe_softmax"):
        return None
    dim = literal(weights, "dim")
    return weights if len(weights.users) == 1 and dim in (-1, value_of(weights).ndim - 1) else None


def _is_rounding(node: Any) -> bool:
    """Whether ``node`` is a copy, in whatever floating-point dtype."""
    copies = isinstance(node, fx.Node) and node.op == "call_function" and record_of(node).kind is Kind.COPY
    return copies and bool(value_of(node).is_floating_point() and value_of(node.args[0]).is_floating_point())


def _scores(scores: Any, masks: Masks) -> tuple[fx.Node, fx.Node, fx.Node | None, float, float | None] | None:
    """Return query, turned keys, mask, scale and cap of scores, undone step by step: casts, masks, the cap, factors, the product.

    Scores that are replaced by a number other than -inf count only where a row has others: the mask must show each row itself.
    """
    node, mask, to_prove = scores, None, False
    cap: float | None = None
    scale, scaled = 1.0, False
    while isinstance(node, fx.Node) and node.op == "call_function":
        if is_call(node, "matmul", "bmm"):
            query, keys = node.args
            fits = isinstance(query, fx.Node) and isinstance(keys, fx.Node) and _is_scale(scale)
            if not fits or (to_prove and not _proven(mask, scores, masks)):
                return None
            return query, keys, mask, scale * (cap or 1.0), cap  # type: ignore[return-value]
        if _is_rounding(node):
            node = node.args[0]
        elif is_call(node, "mul", "div"):
            factor = number(node.args[1])
            if not factor or literal(node, "rounding_mode", default=""):
                return None
            scale, scaled = scale * factor if is_call(node, "mul") else scale / factor, True
            node = node.args[0]
        elif is_call(node, "tanh") and cap is None and _is_scale(scale):
            cap, scale, scaled = scale, 1.0, True
            node = node.args[0]
        elif not scaled:
            found = _masked(node, masks)
            if found is None:
                return None
            node, own, finite = found
            mask, to_prove = own if mask is None else _both(scores, own, mask), to_prove or finite
        else:
            return None
    return None


def _masked(node: fx.Node, masks: Masks) -> tuple[fx.Node, fx.Node, bool] | None:
    """Return scores and mask of ``scores + mask``, ``scores.masked_fill(hidden, -inf)``, ``where(shown, scores, -inf)`` or ``where(hidden,
    -inf, scores)``, and whether scores are replaced by another number than -inf."""
    if not is_call(node, "add", "masked_fill", "where") or len(node.args) < 2:
        return None
    first, second, *rest = node.args
    if not isinstance(first, fx.Node):
        return None
    if is_call(node, "add"):
        plain = literal(node, "alpha", default=1) == 1 and isinstance(second, fx.Node)
        return (first, second, False) if plain and _is_mask(second, node, masks) else None  # type: ignore[arg-type,return-value]
    scores: Any
    mask: Any
    if is_call(node, "masked_fill"):
        scores, mask, shows, by = first, second, False, rest[0]
    elif len(rest) == 1 and constant(second, masks) is None:
        scores, mask, shows, by = second, first, True, rest[0]
    else:
        scores, mask, shows, by = rest[0] if rest else None, first, False, second
    replaced = constant(by, masks)
    if replaced is None or replaced > HIDES or not isinstance(scores, fx.Node) or not isinstance(mask, fx.Node):
        return None
    if value_of(mask).dtype != torch.bool:
        return None
    shown = mask if shows else insert_helper(node, _aten.logical_not.default, (mask,), ~value_of(mask))
    return scores, shown, replaced != -math.inf


def _both(node: fx.Node, first: fx.Node, second: fx.Node) -> fx.Node:
    """Return the mask that shows scores before ``node`` what two masks show."""
    values = value_of(first), value_of(second)
    truths = [value.dtype == torch.bool for value in values]
    if all(truths):
        return insert_helper(node, _aten.logical_and.default, (first, second), values[0] & values[1])
    if not any(truths):
        return insert_helper(node, _aten.add.Tensor, (first, second), values[0] + values[1])
    shown, added = (first, second) if truths[0] else (second, first)
    made = torch.where(value_of(shown), value_of(added), -math.inf)
    return insert_helper(node, _aten.where.ScalarOther, (shown, added, -math.inf), made)


def _is_mask(mask: fx.Node, node: fx.Node, masks: Masks) -> bool:
    """Whether ``mask`` has a number for each row and column, and no gradient; booleans are added as 0 and 1, and hide nothing."""
    value = value_of(mask)
    if follows_parameters(mask, masks.program) or not isinstance(value, Tensor) or value.dtype == torch.bool:
        return False
    return value.ndim >= 2 and sizes(mask)[-2:] == sizes(node)[-2:]


def _proven(mask: fx.Node | None, scores: fx.Node, masks: Masks) -> bool:
    """Whether a mask lets each row see itself."""
    queries, keys = sizes(scores)[-2:]
    return mask is not None and queries == keys and shows_itself(mask, queries, masks)


def _is_scale(scale: float) -> bool:
    """Kernels hide before they scale: -inf times a number that is not positive hides nothing."""
    return 0 < scale < math.inf


def _turned(node: fx.Node, keys: fx.Node) -> fx.Node:
    """Return the keys of which ``keys`` is the transpose; of others, the transpose."""
    rank = value_of(keys).ndim
    if is_call(keys, "transpose") and {int(dim) % rank for dim in keys.args[1:]} == {rank - 2, rank - 1}:  # type: ignore[arg-type]
        return keys.args[0]  # type: ignore[return-value]
    if is_call(keys, "mT", "t") and isinstance(keys.args[0], fx.Node):
        return keys.args[0]
    return insert_helper(node, _aten.transpose.int, (keys, -2, -1), value_of(keys).transpose(-2, -1))


def causal_attention(node: fx.Node, found: dict[str, Any], masks: Masks) -> bool:
    """A mask of which the values prove that it is causal is no operand."""
    if mask_window(node, masks) != masks.longest(sizes(node.args[0])[-2]):
        return False
    without_mask(node)
    return True


def mask_window(node: fx.Node, masks: Masks) -> int | None:
    """Return how many keys attention shows each query, its own the last (:meth:`Masks.window`); None where its mask shows others."""
    mask = literal(node, "attn_mask")
    scale = number(literal(node, "scale"))
    if not isinstance(mask, fx.Node) or literal(node, "is_causal") or (scale is not None and not _is_scale(scale)):
        return None
    length, keys = (sizes(operand)[-2] for operand in node.args[:2])
    return masks.window(conditions_of(mask, length, masks), length) if length == keys else None


def without_mask(node: fx.Node) -> fx.Node:
    """Let causal attention without a mask take the place of ``node``; return it."""
    options = {
        name: value for name, value in node.kwargs.items() if name not in ("attn_mask", "is_causal", "dropout_p")
    }
    dropout = literal(node, "dropout_p")
    return insert_call(node, _ATTENTION, (*node.args[:3], None, dropout, True), options)


def grouped_heads(node: fx.Node, found: dict[str, Any], masks: Masks) -> bool:
    """Keys and values that are repeated for each group of heads are given once; kernels that take a mask want them repeated."""
    return without_repeats(node) is not None


def without_repeats(node: fx.Node) -> fx.Node | None:
    """Let attention whose keys and values are given once for each group of heads take the place of ``node``; return it."""
    if isinstance(literal(node, "attn_mask"), fx.Node) or literal(node, "enable_gqa"):
        return None
    query, key, value = node.args[:3]
    groups = _unrepeated(key), _unrepeated(value)
    once = [each for each in groups if each is not None]
    if len(once) < 2 or not isinstance(query, fx.Node) or not isinstance(key, fx.Node):
        return None
    (*lead, heads, _, _), *shapes = (sizes(each) for each in (query, *once))
    if shapes[0][:-2] != shapes[1][:-2] or shapes[0][:-3] != lead or heads != sizes(key)[-3]:
        return None  # heads or examples are repeated in another way, too
    return insert_call(node, _ATTENTION, (query, *once, *node.args[3:]), dict(node.kwargs) | {"enable_gqa": True})


_INTERLEAVED = call("repeat_interleave", Value("once"), Number("times"))
_EXPANDED = call(Kind.RESHAPE, call("expand", call("unsqueeze", Value("once"), name="single"), name="repeated"))


def _unrepeated(node: Any) -> fx.Node | None:
    """Return x [b, groups, s, d] of x.unsqueeze(2).expand(b, groups, n, s, d).flatten(1, 2), or of x.repeat_interleave(n, 1)."""
    for found in matches(_INTERLEAVED, node):
        dim, rank = literal(node, "dim"), value_of(node).ndim
        return found["once"] if dim is not None and dim % rank == rank - 3 else None  # type: ignore[no-any-return]
    while is_call(node, "contiguous", "clone"):
        node = node.args[0]
    for found in matches(_EXPANDED, node):
        once, repeated, made = (sizes(each) for each in (found["once"], found["repeated"], node))
        if (len(once), len(repeated), len(made)) == (4, 5, 4) and literal(found["single"], "dim") in (2, -3):
            _, groups, times, *rest = repeated
            heads = groups * times if isinstance(groups, int) and isinstance(times, int) else None
            if once[1:] == [groups, *rest] and made[1:] == [heads, *rest]:
                return found["once"]  # type: ignore[no-any-return]
    return None
