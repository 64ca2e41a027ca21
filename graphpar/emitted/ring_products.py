"""Products beside the collectives of a sequence that is sharded over the ranks of an axis: one piece is multiplied while the next is sent.

    ring_gathered_products    all_gather, then products         rank r, step i: multiplies the piece of rank r - i, on its way to rank r + 1
    ring_scattered_product    a product, then reduce_scatter    rank r, step i: makes the piece of rank r - 1 - i, and adds what came to it

Each is the backward of the other, as its two collectives are. k ranks send k - 1 pieces each way, as many bytes as the collectives
send. The gradient of a weight takes whole operands: of these, what was gathered is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from graphpar.emitted.collectives import _axes, _done, _gather, _operators, _watched, rank, size


def ring_gathered_products(
    x: Tensor, weights: Sequence[Tensor], axis: str, dim: int, biases: Sequence[Tensor | None] | None = None
) -> tuple[Tensor, ...]:
    """x S(dim) -> all_gather, then ``F.linear`` by each weight: whole on the axis in ``dim``.

    x [.., n, .., d], each weight [e, d], each bias [e] -> each [.., n * k, .., e]
    """
    biases = biases or [None] * len(weights)
    if size(axis) == 1:
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases))
    results: tuple[Tensor, ...] = _GatheredProducts.apply(x, axis, dim, len(weights), *weights, *biases)
    return results


def ring_gathered_product(x: Tensor, weight: Tensor, axis: str, dim: int, bias: Tensor | None = None) -> Tensor:
    """x S(dim) -> all_gather, then ``F.linear``. x [.., n, .., d], weight [e, d], bias [e] -> [.., n * k, .., e]"""
    return ring_gathered_products(x, [weight], axis, dim, [bias])[0]


def ring_scattered_product(x: Tensor, weight: Tensor, axis: str, dim: int) -> Tensor:
    """x, weight S(1) -> ``F.linear``, then reduce_scatter: S(dim). x [.., n * k, .., d], weight [e, d] -> [.., n, .., e]"""
    if size(axis) == 1:
        return F.linear(x, weight)
    result: Tensor = _ScatteredProduct.apply(x, weight, axis, dim)
    return result


class _GatheredProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: str, dim: int, count: int, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = [w for w in parameters[:count] if w is not None], parameters[count:]
        whole = _widened(x, axis, dim)
        results = [whole.new_empty((*whole.shape[:-1], weight.size(0))) for weight in weights]
        for source, piece in _travelling(x, axis):
            _part(whole, axis, dim, source).copy_(piece)
            for result, weight, bias in zip(results, weights, biases):
                _part(result, axis, dim, source).copy_(F.linear(piece, weight, bias))
        ctx.axis, ctx.dim = axis, dim
        _watched(x, whole, lambda x: _gather(x, axis, dim, (), None))
        ctx.save_for_backward(whole, *weights)
        return tuple(results)

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
            of_weights = [_of_weight(g, whole) if needs else None for g, needs in zip(gradients, needed)]
            of_biases = [_rows(g).sum(0) if needs else None for g, needs in zip(gradients, needed[len(weights) :])]
            return [*of_weights, *of_biases]

        if not ctx.needs_input_grad[0]:
            return None, None, None, None, *of_parameters()
        of_x, rest = _summed(of_piece, axis, of_parameters)
        return of_x, None, None, None, *rest


class _ScatteredProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: str, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        ctx.save_for_backward(x, weight)
        result, _ = _summed(lambda place: F.linear(_part(x, axis, dim, place), weight), axis)
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
        return of_x, _of_weight(whole, x) if ctx.needs_input_grad[1] else None, None, None


def _travelling(x: Tensor, axis: str) -> Iterator[tuple[int, Tensor]]:
    """Yield the pieces of all ranks, with the ranks that they are of; each is sent on while the caller uses it."""
    piece, last = x.contiguous(), size(axis) - 1
    for step in range(size(axis)):
        sent = _passed_on(piece, axis) if step < last else piece
        yield (rank(axis) - step) % size(axis), piece
        piece = _done(sent) if step < last else piece


def _summed(
    made: Callable[[int], Tensor], axis: str, meanwhile: Callable[[], Sequence[Tensor | None]] = tuple
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Return the sum over ranks of what each makes for this rank, and what is made ``meanwhile``, before the last piece is waited for.

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
    """Begin to send a tensor to the next rank, and to receive one as large from the one before; :func:`_done` waits for it."""
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


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.size(-1))


def _of_weight(gradient: Tensor, x: Tensor) -> Tensor:
    return _rows(gradient).mT @ _rows(x)
