"""Operators that merge, split and expand dims: how the result is sharded follows from the sizes.

view [b, s, h*e] -> [b, s, h, e]      S(2) -> S(2)           the heads are the outer factor
view [b, s, d] -> [b*s, d]            S(1) -> S(0:s)         in every period of s rows
expand [b, 1, s] -> [b, h, s]         R -> S(1)              each rank repeats less
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, fx

from graphpar.ir.program import operator_name, value_of
from graphpar.operators import spelling as write
from graphpar.operators.notation import Rule, labelled
from graphpar.operators.placement import Context, Placement, Size, can_shard, from_rule, operands_of, sizes_of, sums
from graphpar.operators.record import FIRST, Kind, Record, each
from graphpar.runtime.layout import P, R, Shard

# ---- reshaping -------------------------------------------------------------------------------------------------


def _product(sizes: Sequence[Size]) -> Size:
    return math.prod(size[0] for size in sizes), sum(size[1] for size in sizes)


def _quotient(size: Size, by: Size) -> Size | None:
    if by[0] == 0 or size[0] % by[0] or size[1] < by[1]:
        return None
    return size[0] // by[0], size[1] - by[1]


def normal(size: Size, parts: Sequence[int], dim: int) -> Shard:
    """Return the shortest ``Shard`` for a dim of ``size`` that is sharded by ``parts``."""
    kept = tuple(parts)
    for length in range(1, len(kept)):
        if len(kept) % length == 0 and kept == kept[:length] * (len(kept) // length):
            kept = kept[:length]
            break
    return Shard(dim) if kept == (size[0],) and size[1] == 0 else Shard(dim, kept)


def reshaped(before: Sequence[Size], after: Sequence[Size], shard: Shard, degree: int) -> Shard | None:
    """Return how the view of sizes ``after`` of a tensor of sizes ``before``, sharded by ``shard``, is sharded; None if it can't be."""
    if not can_shard(before[shard.dim], shard, degree):
        return _untouched(before, after, shard)
    inner = _product(before[shard.dim + 1 :])
    whole = not shard.parts
    lengths = [
        _product([part, inner]) for part in ([before[shard.dim]] if whole else [(part, 0) for part in shard.parts])
    ]
    period = _product([before[shard.dim] if whole else (sum(shard.parts), 0), inner])
    for dim, size in enumerate(after):
        behind = _product(after[dim + 1 :])
        repeat = _quotient(period, behind)
        scaled = [_quotient(length, behind) for length in lengths]
        if size == (1, 0) or repeat is None or None in scaled or _quotient(size, repeat) is None:
            continue
        if len(scaled) == 1 and scaled[0] == size:
            found = Shard(dim)
        elif all(length is not None and length[1] == 0 for length in scaled):
            found = normal(size, [length[0] for length in scaled if length is not None], dim)
        else:
            continue
        if can_shard(size, found, degree):
            return found
    return None


def _untouched(before: Sequence[Size], after: Sequence[Size], shard: Shard) -> Shard | None:
    """The same for a padded dim, which may only change its place, not be merged with another."""
    if shard.parts:
        return None
    for dim, size in enumerate(after):
        same = size == before[shard.dim] and _product(after[dim + 1 :]) == _product(before[shard.dim + 1 :])
        if same and _product(after[:dim]) == _product(before[: shard.dim]):
            return Shard(dim)
    return None


def view(node: fx.Node, context: Context) -> list[Placement]:
    """view, reshape, flatten, unflatten, squeeze, unsqueeze: the same elements in the same order.

    ``view_as`` and its like take the shape of a second operand, which must be sharded as the result is.
    """
    source, *shape_of = operands_of(node)
    if not isinstance(value_of(node), Tensor):
        return []
    if value_of(source).dtype != value_of(node).dtype:
        return from_rule(node, _bytes(node), context)
    before, after = sizes_of(source), sizes_of(node)
    found = [Placement((P, *(R for _ in shape_of)), (P,))] if sums(value_of(source)) else []
    forward = [*_even(before, context.degree), *context.known(source, 0)]
    backward = [*_even(after, context.degree), *context.known(node, 0)]
    pairs: list[tuple[Shard | None, Shard | None]] = [
        (shard, reshaped(before, after, shard, context.degree)) for shard in forward
    ]
    pairs += [(reshaped(after, before, shard, context.degree), shard) for shard in backward]
    for shard, moved in dict.fromkeys(pairs):
        if shard is not None and moved is not None:
            found.append(Placement((shard, *(moved for _ in shape_of)), (moved,), "local_shape"))
    return found + _rows_kept(node, context)


def _bytes(node: fx.Node) -> Rule:
    """view(dtype) reads the bytes anew: those of each element, or of the last dim where elements are wider or narrower."""
    before, after = sizes_of(operands_of(node)[0]), sizes_of(node)
    labels = tuple(f"d{dim}" for dim in range(len(before)))
    fixed = frozenset() if before == after else frozenset(labels[-1:])
    return Rule((labels,), (labels,), fixed)


def _rows_kept(node: fx.Node, context: Context) -> list[Placement]:
    """unsqueeze and squeeze behind dim 0 keep the rows of a rank's experts: no size of dim 0 is spelled out."""
    before, after = sizes_of(operands_of(node)[0]), sizes_of(node)
    if operator_name(node) not in ("unsqueeze", "squeeze") or before[:1] != after[:1] or before[:1] in ((), ((1, 0),)):
        return []
    rows = [*context.rows(operands_of(node)[0], 0), *context.rows(node, 0)]
    return [Placement((kind,), (kind,), "local_shape") for kind in dict.fromkeys(rows)]


def _even(sizes: Sequence[Size], degree: int) -> list[Shard]:
    return [Shard(dim) for dim, size in enumerate(sizes) if size[1] == 0 and size[0] > 0 and size[0] % degree == 0]


def expand(node: fx.Node, context: Context) -> list[Placement]:
    """A dim that was expanded from size 1 can be sharded: each rank expands less. ``expand_as`` takes the shape of a second operand."""
    source, *shape_of = operands_of(node)
    before, after = sizes_of(source), sizes_of(node)
    offset = len(after) - len(before)
    labels = labelled(len(after))
    taken = tuple(labels[offset + dim] if size == after[offset + dim] else "1" for dim, size in enumerate(before))
    rule = Rule((taken, *(labels for _ in shape_of)), (labels,), linear=FIRST)
    return [Placement(p.operands, p.results, "local_shape") for p in from_rule(node, rule, context)]


# ---- records ---------------------------------------------------------------------------------------------------


_RESHAPE = Record(Kind.RESHAPE, placements=view)
_EXPAND = Record(Kind.EXPAND, placements=expand)

RECORDS: dict[str, Record] = {
    "view": replace(_RESHAPE, sizes="size", spelling=(write.flattened, write.method)),
    "_unsafe_view": replace(_RESHAPE, sizes="size", spelling=(write.flattened,)),
    "reshape": replace(_RESHAPE, sizes="shape", spelling=(write.flattened, write.method)),
    "unflatten": replace(_RESHAPE, sizes="sizes", spelling=write.METHOD),
    **each("flatten squeeze unsqueeze view_as", replace(_RESHAPE, spelling=write.METHOD)),
    **each("reshape_as ravel atleast_1d atleast_2d atleast_3d", _RESHAPE),
    "expand": replace(_EXPAND, sizes="size", spelling=write.METHOD),
    "broadcast_to": replace(_EXPAND, sizes="size"),
    "expand_as": replace(_EXPAND, spelling=write.METHOD),
}
