"""Attention over a sequence that is sharded over the ranks of an axis: keys and values travel round a ring.

    rank r, step i:   its queries x the keys and values of rank r - i, while these are on their way to rank r + 1
    forward           the parts are merged by their logsumexp
    backward          the same again; gradients of keys and values travel behind them, and end at their own rank

Each rank saves its queries, keys, values, result and logsumexp, nothing of other ranks. With ``is_causal`` contiguous
shards would give the last rank the most work. So while attention runs, rank r of k has chunks r and 2k - 1 - r of the
2k halves of all shards: one all-to-all brings them, another takes the result back. Then each rank has the same work in
each step, and what the mask hides is never computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from graphpar.emitted.collectives import _axes, _done, _operators, rank, size

_aten: Any = torch.ops.aten


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    axis: str,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    length: int | None = None,
) -> Tensor:
    """query, key, value S(2) -> S(2): ``F.scaled_dot_product_attention`` of the whole sequence.

    query [b, h, q, e], key [b, g, n, e], value [b, g, n, f] -> [b, h, q, f]. ``length``: the keys of all ranks, where
    shards are padded. With ``is_causal`` queries are sharded as keys are.
    """
    if size(axis) == 1:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    result: Tensor = _RingAttention.apply(query, key, value, axis, is_causal, scale, length)
    return result


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        axis: str,
        is_causal: bool,
        scale: float | None,
        length: int | None,
    ) -> Tensor:
        dtype, shapes = query.dtype, (key.shape, value.shape)
        if is_causal:
            query, own = _split(_balanced((query, key, value), axis), query.shape)
        else:
            own = _packed(key, value)
        travelling, last = own, size(axis) - 1
        result: Tensor | None = None
        logsumexp: Tensor | None = None
        for step in range(size(axis)):
            sent = _passed_on(travelling, axis) if step < last else travelling
            first, keys, masked = _visible(step, axis, shapes[0][2], is_causal, length)
            if keys:
                queries = query.narrow(2, first, query.size(2) - first)
                key, value = _unpacked(travelling, shapes, keys)
                part, part_logsumexp = _attend(queries, key, value, masked, scale)
                part = part.to(part_logsumexp.dtype)
                if result is None or logsumexp is None:
                    result, logsumexp = part, part_logsumexp
                else:
                    result, logsumexp = _merged(result, logsumexp, part, part_logsumexp, first)
            travelling = _done(sent) if step < last else travelling
        assert result is not None and logsumexp is not None
        result = result.to(dtype)
        if is_causal:
            (result,) = _unpacked(_contiguous((result,), axis), (result.shape,))
        ctx.axis, ctx.is_causal, ctx.scale, ctx.length, ctx.shapes = axis, is_causal, scale, length, shapes
        ctx.save_for_backward(query, own, result, logsumexp)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, travelling, result, logsumexp = ctx.saved_tensors
        axis, shapes, last = ctx.axis, ctx.shapes, size(ctx.axis) - 1
        rows = shapes[0][2]
        if ctx.is_causal:
            gradient, result = _unpacked(_balanced((gradient, result), axis), (gradient.shape, result.shape))
        of_query: Tensor | None = None
        own: Sequence[Tensor] = ()
        behind = travelling
        for step in range(size(axis)):
            sent = _passed_on(travelling, axis) if step < last else travelling
            first, keys, masked = _visible(step, axis, rows, ctx.is_causal, ctx.length)
            parts: Sequence[Tensor] = ()
            if keys:
                key, value = _unpacked(travelling, shapes, keys)
                seen = [x.narrow(2, first, x.size(2) - first) for x in (gradient, query, result, logsumexp)]
                parts = _attend_backward(seen[0], seen[1], seen[2], seen[3], key, value, masked, ctx.scale)
                if of_query is None:
                    of_query = parts[0].to(logsumexp.dtype)
                else:
                    of_query.narrow(2, first, parts[0].size(2)).add_(parts[0])
            if step == 0:
                own = parts[1:]
            else:
                behind = torch.zeros_like(travelling) if step == 1 else _done(behind)
                for whole, part in zip(_unpacked(behind, shapes, keys), parts[1:]):
                    whole.add_(part)
                behind = _passed_on(behind, axis)
            travelling = _done(sent) if step < last else travelling
        of_keys = _unpacked(_done(behind), shapes)
        for whole, part in zip(of_keys, own):
            whole.narrow(2, 0, part.size(2)).add_(part)
        assert of_query is not None
        gradients = (of_query.to(query.dtype), *of_keys)
        if ctx.is_causal:
            gradients = tuple(_unpacked(_contiguous(gradients, axis), (query.shape, *shapes)))
        return (*gradients, None, None, None, None)


def _visible(step: int, axis: str, rows: int, is_causal: bool, length: int | None) -> tuple[int, int, bool]:
    """Return which block of ``rows`` x ``rows`` a step computes: from which query on, how many keys, whether with a
    causal mask."""
    source = (rank(axis) - step) % size(axis)
    if not is_causal:
        return 0, rows if length is None else min(max(length - source * rows, 0), rows), False
    if step == 0:
        return 0, rows, True
    if source < rank(axis):
        return 0, _chunk(source, rows), False
    first = _chunk(rank(axis), rows)
    return first, rows if first < rows else 0, False


def _merged(
    result: Tensor, logsumexp: Tensor, part: Tensor, part_logsumexp: Tensor, first: int
) -> tuple[Tensor, Tensor]:
    """Return what attention to the keys of both would have given; ``part`` has the rows from ``first`` on.

    Nothing is written in place: recomputation may keep what the kernels returned.
    """
    rest, rest_logsumexp = (x.narrow(2, first, part.size(2)) for x in (result, logsumexp))
    part = rest.lerp(part, (part_logsumexp - rest_logsumexp).sigmoid().unsqueeze(3))
    part_logsumexp = torch.logaddexp(rest_logsumexp, part_logsumexp)
    if first == 0:
        return part, part_logsumexp
    result, logsumexp = result.clone(), logsumexp.clone()
    result.narrow(2, first, part.size(2)).copy_(part)
    logsumexp.narrow(2, first, part.size(2)).copy_(part_logsumexp)
    return result, logsumexp


# What is sent: tensors [b, h, rows, e] as one flat tensor, row by row.


def _packed(*tensors: Tensor) -> Tensor:
    """Copy tensors to one flat tensor."""
    flat = tensors[0].new_empty(sum(x.numel() for x in tensors))
    for place, x in zip(_unpacked(flat, [x.shape for x in tensors]), tensors):
        place.copy_(x)
    return flat


def _unpacked(flat: Tensor, shapes: Sequence[torch.Size], rows: int | None = None) -> list[Tensor]:
    """Return views of a packed tensor, of their first ``rows``."""
    pieces = flat.split([shape.numel() for shape in shapes])
    whole = [x.view(b, n, h, e).transpose(1, 2) for x, (b, h, n, e) in zip(pieces, shapes)]
    return whole if rows is None else [x.narrow(2, 0, rows) for x in whole]


def _split(flat: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Return a view of the first of several packed tensors, and the others, packed."""
    (first,) = _unpacked(flat.narrow(0, 0, shape.numel()), (shape,))
    return first, flat.narrow(0, shape.numel(), flat.numel() - shape.numel())


def _passed_on(x: Tensor, axis: str) -> Tensor:
    """Begin to send a flat tensor to the next rank, and to receive one as large from the one before."""
    count, own = size(axis), rank(axis)
    to, of = [0] * count, [0] * count
    to[(own + 1) % count] = of[(own - 1) % count] = x.numel()
    return _all_to_all(x, of, to, axis)


def _all_to_all(x: Tensor, of: list[int], to: list[int], axis: str) -> Tensor:
    """Begin to send ``to`` elements to each rank and to receive ``of`` of each; :func:`_done` waits for them."""
    result: Tensor = _operators.all_to_all_single(x, of, to, _axes[axis][0])
    return result


def _chunk(number: int, rows: int) -> int:
    """Return the rows of a chunk: the first half of a shard is the larger one."""
    return rows // 2 if number % 2 else rows - rows // 2


def _holder(number: int, count: int) -> int:
    """Return the rank that computes a chunk."""
    return min(number, 2 * count - 1 - number)


def _balanced(tensors: Sequence[Tensor], axis: str) -> Tensor:
    """From contiguous shards to chunks r and 2k - 1 - r, packed."""
    count, own = size(axis), rank(axis)
    to = [(number, _holder(number, count)) for number in (2 * own, 2 * own + 1)]
    of = [(number, number // 2) for number in (own, 2 * count - 1 - own)]
    return _exchanged(tensors, axis, to, of)


def _contiguous(tensors: Sequence[Tensor], axis: str) -> Tensor:
    """From chunks r and 2k - 1 - r to contiguous shards, packed."""
    count, own = size(axis), rank(axis)
    to = [(number, number // 2) for number in (own, 2 * count - 1 - own)]
    of = [(number, _holder(number, count)) for number in (2 * own, 2 * own + 1)]
    return _exchanged(tensors, axis, to, of)


def _exchanged(
    tensors: Sequence[Tensor], axis: str, to: Sequence[tuple[int, int]], of: Sequence[tuple[int, int]]
) -> Tensor:
    """Send two chunks of each tensor and receive two, each (number, rank), in the order of rows; packed."""
    own, rows = rank(axis), tensors[0].size(2)
    width = sum(x.numel() for x in tensors) // rows
    sends, receives = [0] * size(axis), [0] * size(axis)
    for chunks, splits in ((to, sends), (of, receives)):
        for number, other in chunks:
            splits[other] += _chunk(number, rows) * width if other != own else 0
    result = torch.empty(rows * width, dtype=tensors[0].dtype, device=tensors[0].device)
    joined = _unpacked(result, [x.shape for x in tensors])
    leaving = [half for place in _order(to, own) for half in _halves(tensors, to, place)]
    coming = [half for place in _order(of, own) for half in _halves(joined, of, place)]
    sent = _all_to_all(_packed(*leaving), receives, sends, axis)
    for place, (number, other) in enumerate(to):
        if other == own:  # it stays
            for half, kept in zip(_halves(joined, of, of.index((number, own))), _halves(tensors, to, place)):
                half.copy_(kept)
    for half, piece in zip(coming, _unpacked(_done(sent), [half.shape for half in coming])):
        half.copy_(piece)
    return result


def _order(chunks: Sequence[tuple[int, int]], own: int) -> list[int]:
    """Return which chunk is sent first, that of the lower rank; one that stays is not sent."""
    order = [0, 1] if chunks[0][1] <= chunks[1][1] else [1, 0]
    return [place for place in order if chunks[place][1] != own]


def _halves(tensors: Sequence[Tensor], chunks: Sequence[tuple[int, int]], place: int) -> list[Tensor]:
    """Return the rows of the first or of the second chunk."""
    rows = tensors[0].size(2)
    lengths = [_chunk(number, rows) for number, _ in chunks]
    return [x.narrow(2, place * lengths[0], lengths[place]) for x in tensors]


# Attention to a block of keys, by the kernels of torch that give the logsumexp of each query.


def _kernel(query: Tensor, value: Tensor) -> str:
    """Return which kernel a device has for these operands."""
    same = query.size(3) == value.size(3)
    if query.device.type == "cpu":
        return "cpu" if same else "math"
    if query.device.type != "cuda" or query.dtype == torch.float64:
        return "math"
    if query.size(3) % (16 // query.itemsize) or value.size(3) % (16 // value.itemsize):
        return "math"  # both kernels load 16 bytes at a time
    return "flash" if query.itemsize == 2 and same and query.size(3) <= 256 else "efficient"


def _attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """[b, h, q, f], and the logsumexp of each query [b, h, q], in float32 at least."""
    kernel = _kernel(query, value)
    if kernel == "cpu":
        flash = _aten._scaled_dot_product_flash_attention_for_cpu
        result, logsumexp = flash(query, key, value, 0.0, is_causal, scale=scale)
        return result, logsumexp.to(
            torch.promote_types(query.dtype, torch.float32)
        )  # torch 2.11 traces float64's as float32
    if kernel == "flash":
        result, logsumexp, *_ = _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, False, scale=scale
        )
        return result, logsumexp
    if kernel == "efficient":
        heads = _of_each_head(key, query), _of_each_head(value, query)
        efficient = _aten._scaled_dot_product_efficient_attention
        result, logsumexp, *_ = efficient(query, *heads, None, True, 0.0, is_causal, scale=scale)
        return result, logsumexp.narrow(2, 0, query.size(2))  # its rows are padded
    scores, value = _scores(query, key, is_causal, scale), _of_each_head(value, query)
    logsumexp = scores.logsumexp(3)
    return (scores - logsumexp.unsqueeze(3)).exp().to(value.dtype) @ value, logsumexp


def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    result: Tensor,
    logsumexp: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by these keys; ``result`` and ``logsumexp`` are those of all keys."""
    kernel, operands = _kernel(query, value), (gradient, query, key, value, result, logsumexp)
    if kernel == "cpu":
        flash = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        of_query, of_key, of_value = flash(*operands, 0.0, is_causal, scale=scale)
        return of_query, of_key, of_value
    if kernel == "flash":
        operands = (*operands[:5], logsumexp.contiguous())  # the kernel takes rows to be dense
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
        lengths = (None, None, query.size(2), key.size(2))
        of_query, of_key, of_value = _aten._scaled_dot_product_flash_attention_backward(
            *operands, *lengths, 0.0, is_causal, no_dropout, no_dropout, scale=scale
        )
        return of_query, of_key, of_value
    if kernel == "efficient":
        heads = _of_each_head(key, query), _of_each_head(value, query)
        padded = F.pad(logsumexp, (0, -query.size(2) % 32))
        no_dropout = torch.zeros((), dtype=torch.int64, device=query.device)
        efficient = _aten._scaled_dot_product_efficient_attention_backward
        of_query, of_key, of_value, _ = efficient(
            gradient, query, *heads, None, result, padded, no_dropout, no_dropout, 0.0, (True, True, True, False),
            is_causal, scale=scale,
        )  # fmt: skip
        return of_query, _of_each_group(of_key, key), _of_each_group(of_value, value)
    wide = logsumexp.dtype
    gradient, result, keys = gradient.to(wide), result.to(wide), _of_each_head(key, query).to(wide)
    shares = (_scores(query, key, is_causal, scale) - logsumexp.unsqueeze(3)).exp()
    changes = gradient @ _of_each_head(value, query).to(wide).mT - (gradient * result).sum(3, keepdim=True)
    changes = shares * changes * (query.size(3) ** -0.5 if scale is None else scale)
    of_keys = _of_each_group(changes.mT @ query.to(wide), key)
    return changes @ keys, of_keys, _of_each_group(shares.mT @ gradient, value)


def _scores(query: Tensor, key: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (
        query.to(wide) @ _of_each_head(key, query).to(wide).mT * (query.size(3) ** -0.5 if scale is None else scale)
    )
    if is_causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def _of_each_head(x: Tensor, query: Tensor) -> Tensor:
    """[b, g, n, e] -> [b, h, n, e]"""
    return x if x.size(1) == query.size(1) else x.repeat_interleave(query.size(1) // x.size(1), 1)


def _of_each_group(gradient: Tensor, x: Tensor) -> Tensor:
    """[b, h, n, e] -> [b, g, n, e], as ``x`` is"""
    gradient = gradient if x.size(1) == gradient.size(1) else gradient.unflatten(1, (x.size(1), -1)).sum(2)
    return gradient.to(x.dtype)
