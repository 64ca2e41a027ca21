"""Products with the collectives of tensor parallelism before or after them, and in the backward beside the gradients of
weights.

                         forward                         backward
    gathered_products    all_gather, then products       all_gather again where shards are kept, beside the gradient
                                                         of the whole; reduce_scatter of that beside the gradients of
                                                         weights
    scattered_product    a product, then reduce_scatter  all_gather
    shared_products      products                        all_reduce beside the gradients of weights

Where a sequence is sharded, its dim is moved to the front, so that shards are joined and divided as they lie in memory:
for that a shard is copied, and not the whole. Results have the dim where it was, and lie in memory as they were made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from graphpar.emitted.collectives import (
    _apply,
    _axes,
    _done,
    _gather,
    _joined,
    _operators,
    _pieces,
    _watched,
    rank,
    size,
)

Parameters = Sequence[Tensor | None]


def gathered_products(
    x: Tensor,
    weights: Sequence[Tensor],
    axis: str,
    dim: int,
    biases: Parameters | None = None,
    in_order: bool = False,
) -> tuple[Tensor, ...]:
    """x S(dim) -> all_gather, then ``F.linear`` by each weight: whole on the axis in ``dim``.

    x [.., n, .., d], each weight [e, d], each bias [e] -> each [.., n * k, .., e]; in memory in order with
    ``in_order``, which copies the whole of x
    """
    return _entering(x, weights, biases, axis, dim, in_order)


def gathered_product(
    x: Tensor, weight: Tensor, axis: str, dim: int, bias: Tensor | None = None, in_order: bool = False
) -> Tensor:
    """x S(dim) -> all_gather, then ``F.linear``. x [.., n, .., d], weight [e, d], bias [e] -> [.., n * k, .., e]"""
    return gathered_products(x, [weight], axis, dim, [bias], in_order)[0]


def scattered_product(x: Tensor, weight: Tensor, axis: str, dim: int) -> Tensor:
    """x, weight S(1) -> ``F.linear``, then reduce_scatter: S(dim). x [.., n * k, .., d], weight [e, d]
    -> [.., n, .., e]"""
    made = _Product.apply(x, weight, dim)  # by itself, so that recomputation can end with it
    scattered = _apply(made, lambda x: _done(_summed(x, axis, 0)), lambda g: _done(_gathered(g.contiguous(), axis, 0)))
    return scattered.movedim(0, dim)


def shared_products(
    x: Tensor, weights: Sequence[Tensor], axis: str, biases: Parameters | None = None
) -> tuple[Tensor, ...]:
    """x I -> ``F.linear`` by each weight: R; backward sums the gradients of the ranks. x [.., d], each weight [e, d]
    -> each [.., e]"""
    return _entering(x, weights, biases, axis, None, True)


def shared_product(x: Tensor, weight: Tensor, axis: str, bias: Tensor | None = None) -> Tensor:
    """x I -> ``F.linear``: R; backward sums the gradients of the ranks. x [.., d], weight [e, d], bias [e]
    -> [.., e]"""
    return shared_products(x, [weight], axis, [bias])[0]


def ring_gathered_products(
    x: Tensor, weights: Sequence[Tensor], axis: str, dim: int, biases: Parameters | None = None
) -> tuple[Tensor, ...]:
    """x S(dim) -> all_gather, then ``F.linear`` by each weight: whole on the axis in ``dim``.

    x [.., n, .., d], each weight [e, d], each bias [e] -> each [.., n * k, .., e]
    """
    biases = _all(biases, weights)
    if size(axis) == 1:
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases))
    if not torch.is_grad_enabled():
        return _ring_entered(x, weights, biases, axis, dim)[1]
    results: tuple[Tensor, ...] = _RingEntering.apply(x, axis, dim, len(weights), *weights, *biases)
    return results


def ring_gathered_product(x: Tensor, weight: Tensor, axis: str, dim: int, bias: Tensor | None = None) -> Tensor:
    """x S(dim) -> all_gather, then ``F.linear``. x [.., n, .., d], weight [e, d], bias [e] -> [.., n * k, .., e]"""
    return ring_gathered_products(x, [weight], axis, dim, [bias])[0]


def ring_scattered_product(x: Tensor, weight: Tensor, axis: str, dim: int) -> Tensor:
    """x, weight S(1) -> ``F.linear``, then reduce_scatter: S(dim). x [.., n * k, .., d], weight [e, d]
    -> [.., n, .., e]"""
    if size(axis) == 1:
        return F.linear(x, weight)
    result: Tensor = _RingLeaving.apply(x, weight, axis, dim)
    return result


def _entering(
    x: Tensor, weights: Sequence[Tensor], biases: Parameters | None, axis: str, dim: int | None, in_order: bool
) -> tuple[Tensor, ...]:
    """Products of what is gathered in ``dim``, or without it of what all ranks have alike."""
    biases = _all(biases, weights)
    if not torch.is_grad_enabled():  # there torch.compile passes a function of any number of arguments the wrong ones
        return _entered(x, weights, biases, axis, dim, in_order)[1]
    results: tuple[Tensor, ...] = _Entering.apply(x, axis, dim, in_order, len(weights), *weights, *biases)
    return results


def _entered(
    x: Tensor, weights: Sequence[Tensor], biases: Parameters, axis: str, dim: int | None, in_order: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return what is gathered, and the products."""
    whole = x
    if dim is not None:
        shard = x if in_order else x.movedim(dim, 0).contiguous()
        join = functools.partial(_gathered, axis=axis, dim=dim if in_order else 0)
        whole = _watched(shard, _done(join(shard)), join)
    results = [F.linear(whole, weight, bias) for weight, bias in zip(weights, biases)]
    return whole, tuple(results if dim is None or in_order else (result.movedim(0, dim) for result in results))


class _Entering(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: str, dim: int | None, in_order: bool, count: int, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.axis, ctx.dim, ctx.in_order = axis, dim, in_order
        weights = [weight for weight in parameters[:count] if weight is not None]
        whole, results = _entered(x, weights, parameters[count:], axis, dim, in_order)
        ctx.save_for_backward(whole, *weights)
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        whole, *weights = ctx.saved_tensors  # on its way, where it is gathered again
        axis, dim, needed = ctx.axis, ctx.dim, ctx.needs_input_grad[5:]
        if dim is not None and not ctx.in_order:
            gradients = tuple(gradient.movedim(dim, 0) for gradient in gradients)
        rows = [_rows(gradient) for gradient in gradients]
        of_x, sent = None, None
        if ctx.needs_input_grad[0]:
            total = rows[0] @ weights[0]
            for gradient, weight in zip(rows[1:], weights[1:]):
                total.addmm_(gradient, weight)
            sent = _summed(total.view(whole.shape), axis, dim if ctx.in_order else 0)
        entered = _rows(_done(whole))
        of_weights = [_of_weight(g, entered, w) if needs else None for g, w, needs in zip(rows, weights, needed)]
        of_biases = [gradient.sum(0) if needs else None for gradient, needs in zip(rows, needed[len(weights) :])]
        if sent is not None:
            of_x = _done(sent)
            of_x = of_x if dim is None or ctx.in_order else of_x.movedim(0, dim)
        return of_x, None, None, None, None, *of_weights, *of_biases


class _Product(torch.autograd.Function):
    """A product with ``dim`` at the front; ``x`` is kept as it came, and copied again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        ctx.save_for_backward(x, weight)
        return F.linear(x.movedim(dim, 0).contiguous(), weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        x, rows = x.movedim(ctx.dim, 0), _rows(gradient)
        of_x = (rows @ weight).view(x.shape).movedim(0, ctx.dim) if ctx.needs_input_grad[0] else None
        return of_x, _of_weight(rows, _rows(x), weight) if ctx.needs_input_grad[1] else None, None


def _gathered(shard: Tensor, axis: str, dim: int) -> Tensor:
    """Join shards: [.., n, ..] -> [.., n * k, ..]. In dim 0 that only begins, and :func:`_done` waits for it."""
    group, count, _ = _axes[axis]
    if count == 1:
        return shard
    if dim:
        return _joined(
            _done(_operators.all_gather_into_tensor(shard.contiguous().unsqueeze(0), count, group)), dim, (), None
        )
    joined: Tensor = _operators.all_gather_into_tensor(shard, count, group)
    return joined


def _summed(x: Tensor, axis: str, dim: int | None) -> Tensor:
    """Begin to sum ``x``, which nothing else reads, over the ranks, and to scatter it in ``dim``; :func:`_done` waits
    for it."""
    group, count, _ = _axes[axis]
    if count == 1:
        return x
    if dim is None:
        return _operators.all_reduce(x, "sum", group)  # type: ignore[no-any-return]
    pieces = _pieces(x, dim, (), count).contiguous()
    scattered: Tensor = _operators.reduce_scatter_tensor(pieces, "sum", count, group)
    return scattered.squeeze(0)


def _all(biases: Parameters | None, weights: Sequence[Tensor]) -> Parameters:
    return biases if biases is not None else [None] * len(weights)


def _of_weight(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of ``weight``, which lies in memory as the weight does, or may lie transposed."""
    return gradient.mT @ x if weight.is_contiguous() else (x.mT @ gradient).mT


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.size(-1))


# In pieces.


def _ring_entered(
    x: Tensor, weights: Sequence[Tensor], biases: Parameters, axis: str, dim: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return what is gathered, and the products, a piece at a time."""
    whole = _widened(x, axis, dim)
    results = tuple(whole.new_empty((*whole.shape[:-1], weight.size(0))) for weight in weights)
    for source, piece in _travelling(x, axis):
        _part(whole, axis, dim, source).copy_(piece)
        for result, weight, bias in zip(results, weights, biases):
            _part(result, axis, dim, source).copy_(F.linear(piece, weight, bias))
    return whole, results


class _RingEntering(torch.autograd.Function):
    """The functions that begin with ``ring_`` send pieces, and one is multiplied while the next is sent:

        ring_gathered_products    rank r, step i: multiplies the piece of rank r - i, on its way to rank r + 1
        ring_scattered_product    rank r, step i: makes the piece of rank r - 1 - i, and adds what came to it

    Each is the backward of the other, as its two collectives are. k ranks send k - 1 pieces each way, as many bytes as
    the collectives send. The gradient of a weight takes whole operands: of these, what was gathered is kept.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: str, dim: int, count: int, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weights = [weight for weight in parameters[:count] if weight is not None]
        whole, results = _ring_entered(x, weights, parameters[count:], axis, dim)
        ctx.axis, ctx.dim = axis, dim
        _watched(x, whole, lambda x: _gather(x, axis, dim, (), None))
        ctx.save_for_backward(whole, *weights)
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        whole, *weights = ctx.saved_tensors
        axis, dim, needed = ctx.axis, ctx.dim, ctx.needs_input_grad[4:]

        def of_piece(place: int) -> Tensor:
            terms = [_part(g, axis, dim, place) @ weight for g, weight in zip(gradients, weights)]
            total: Tensor = functools.reduce(torch.add, terms)
            return total

        def of_parameters() -> list[Tensor | None]:
            of_weights = [
                _of_weight(_rows(g), _rows(whole), weight) if needs else None
                for g, weight, needs in zip(gradients, weights, needed)
            ]
            of_biases = [_rows(g).sum(0) if needs else None for g, needs in zip(gradients, needed[len(weights) :])]
            return [*of_weights, *of_biases]

        if not ctx.needs_input_grad[0]:
            return None, None, None, None, *of_parameters()
        of_x, rest = _summed_round(of_piece, axis, of_parameters)
        return of_x, None, None, None, *rest


class _RingLeaving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: str, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        ctx.save_for_backward(x, weight)
        result, _ = _summed_round(lambda place: F.linear(_part(x, axis, dim, place), weight), axis)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        axis, dim = ctx.axis, ctx.dim
        whole = _widened(gradient, axis, dim)
        of_x = torch.empty_like(x, memory_format=torch.contiguous_format) if ctx.needs_input_grad[0] else None
        for source, piece in _travelling(gradient, axis):
            _part(whole, axis, dim, source).copy_(piece)
            if of_x is not None:
                _part(of_x, axis, dim, source).copy_(piece @ weight)
        of_weight = _of_weight(_rows(whole), _rows(x), weight) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, None, None


def _travelling(x: Tensor, axis: str) -> Iterator[tuple[int, Tensor]]:
    """Yield the pieces of all ranks, with the ranks that they are of; each is sent on while the caller uses it."""
    piece, last = x.contiguous(), size(axis) - 1
    for step in range(size(axis)):
        sent = _passed_on(piece, axis) if step < last else piece
        yield (rank(axis) - step) % size(axis), piece
        piece = _done(sent) if step < last else piece


def _summed_round(
    made: Callable[[int], Tensor], axis: str, meanwhile: Callable[[], Sequence[Tensor | None]] = tuple
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Return the sum over ranks of what each makes for this rank, and what is made ``meanwhile``, before the last piece
    is waited for.

    The sum for a rank travels round to it, and each rank adds what it made while the sum was on its way.
    """
    count, own = size(axis), rank(axis)
    sent = _passed_on(made((own - 1) % count), axis)
    for step in range(1, count - 1):
        part = made((own - 1 - step) % count)
        sent = _passed_on(part + _done(sent), axis)
    part, rest = made(own), meanwhile()
    return part + _done(sent), rest


def _passed_on(x: Tensor, axis: str) -> Tensor:
    """Begin to send a tensor to the next rank, and to receive one as large from the one before; :func:`_done` waits for
    it."""
    count, own = size(axis), rank(axis)
    to, of = [0] * count, [0] * count
    to[(own + 1) % count] = of[(own - 1) % count] = x.numel()
    result: Tensor = _operators.all_to_all_single(x.flatten(), of, to, _axes[axis][0])
    return result.view(x.shape)


def _part(whole: Tensor, axis: str, dim: int, place: int) -> Tensor:
    """Return a view of the piece of the rank ``place``."""
    rows = whole.size(dim) // size(axis)
    return whole.narrow(dim, place * rows, rows)


def _widened(x: Tensor, axis: str, dim: int) -> Tensor:
    """Return a new tensor, as large as the pieces of all ranks."""
    return x.new_empty((*x.shape[:dim], x.size(dim) * size(axis), *x.shape[dim + 1 :]))
