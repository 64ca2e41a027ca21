"""The collectives of this program: each turns one type of tensor into another, and has exactly one gradient.

    R      the same value on every rank, used differently on each      its gradient is P
    I      the same value on every rank, used the same way on each     its gradient is I
    S(d)   dim d is sharded over the ranks                             its gradient is S(d)
    P      partial: the value is the sum over the ranks                its gradient is R

A dim of n elements is sharded over k ranks by ceil(n / k), the last shards padded with zeros. With ``parts``, the dim
consists of runs of ``sum(parts)`` elements, and each part of each run is sharded by itself: ``parts=(q, k, v)`` for the
rows of a fused projection. ``dim`` counts from 0, and an axis of one rank makes every function the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers the operators below
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

_operators = torch.ops._c10d_functional

_axes: dict[str, tuple[str, int, int]] = {}
"""The group's name, its size and this rank in it. Compiled code takes a group by its name."""

_groups: dict[str, ProcessGroup] = {}
"""The groups by name, for calls that nothing traces."""

watchers: list[Callable[[Tensor, Tensor, Callable[[Tensor], Tensor]], None]] = []
"""Called with the shard and the result of each all-gather, and the function between them."""

_round_apart = False
"""Whether kernels may give ranks that compute the same other last bits, as those of GPUs do."""


def bind(groups: Mapping[str, ProcessGroup | None], round_apart: bool = False) -> None:
    """Give every axis its process group (``None``: one rank), in place of what was bound before."""
    global _round_apart
    _round_apart = round_apart
    _axes.clear()
    _groups.clear()
    for axis, group in groups.items():
        _axes[axis] = ("", 1, 0) if group is None else (group.group_name, group.size(), group.rank())
        if group is not None:
            _groups[group.group_name] = group


def size(axis: str) -> int:
    """Return the number of ranks on an axis."""
    return _axes[axis][1]


def rank(axis: str) -> int:
    """Return the index of this rank on an axis."""
    return _axes[axis][2]


# Redistributions: forward, backward.


def all_reduce(x: Tensor, axis: str) -> Tensor:
    """P -> I: the sum over the ranks; backward nothing. [...] -> [...]"""
    if _runs_plainly() and (group := _groups.get(_axes[axis][0])) is not None:
        total = x.clone(memory_format=torch.contiguous_format)
        group.allreduce([total]).wait()  # less work for the host than two operators
        return total
    return _apply(x, lambda x: _all_reduce(x, axis), lambda g: g)


def all_reduce_both(x: Tensor, axis: str) -> Tensor:
    """P -> R: the sum over the ranks; backward the same. [...] -> [...]"""
    return _apply(x, lambda x: _all_reduce(x, axis), lambda g: _all_reduce(g, axis))


def sum_gradient(x: Tensor, axis: str) -> Tensor:
    """I -> R: nothing; backward sums the gradients of the ranks. [...] -> [...]"""
    return _apply(x, lambda x: x.view_as(x), lambda g: _all_reduce(g, axis))


def reduce_scatter(x: Tensor, axis: str, dim: int, parts: Sequence[int] = ()) -> Tensor:
    """P -> S(dim): this rank's shard of the sum; backward gathers. [.., n, ..] -> [.., ceil(n / k), ..]"""
    whole = x.size(dim)
    return _apply(x, lambda x: _sum_piece(x, axis, dim, parts), lambda g: _gather(g, axis, dim, parts, whole))


def all_gather(x: Tensor, axis: str, dim: int, parts: Sequence[int] = (), size: int | None = None) -> Tensor:
    """S(dim) -> R: the whole; backward sums and keeps its shard. [.., n, ..] -> [.., size or n * k, ..]"""
    result = _apply(x, lambda x: _gather(x, axis, dim, parts, size), lambda g: _sum_piece(g, axis, dim, parts))
    return _watched(x, result, lambda x: _gather(x, axis, dim, parts, size))


def all_gather_invariant(x: Tensor, axis: str, dim: int, parts: Sequence[int] = (), size: int | None = None) -> Tensor:
    """S(dim) -> I: the whole; backward keeps its shard. [.., n, ..] -> [.., size or n * k, ..]"""
    result = _apply(x, lambda x: _gather(x, axis, dim, parts, size), lambda g: _piece(g, axis, dim, parts))
    return _watched(x, result, lambda x: _gather(x, axis, dim, parts, size))


def shard(x: Tensor, axis: str, dim: int, parts: Sequence[int] = ()) -> Tensor:
    """R -> S(dim): this rank's shard; backward pads with zeros. [.., n, ..] -> [.., ceil(n / k), ..]"""
    return _piece(x, axis, dim, parts)


def shard_invariant(x: Tensor, axis: str, dim: int, parts: Sequence[int] = ()) -> Tensor:
    """I -> S(dim): this rank's shard; backward gathers. [.., n, ..] -> [.., ceil(n / k), ..]"""
    whole = x.size(dim)
    return _apply(x, lambda x: _piece(x, axis, dim, parts), lambda g: _gather(g, axis, dim, parts, whole))


def all_to_all(
    x: Tensor,
    axis: str,
    from_dim: int,
    to_dim: int,
    from_parts: Sequence[int] = (),
    to_parts: Sequence[int] = (),
    size: int | None = None,
) -> Tensor:
    """S(from_dim) -> S(to_dim), two dims: all-to-all both ways.

    [.., a, .., b, ..] -> [.., size or a * k, .., ceil(b / k), ..]
    """
    whole = x.size(to_dim)
    return _apply(
        x,
        lambda x: _exchange(x, axis, to_dim, to_parts, from_dim, from_parts, size),
        lambda g: _exchange(g, axis, from_dim, from_parts, to_dim, to_parts, whole),
    )


def first_only(x: Tensor, axis: str) -> Tensor:
    """R -> P: zero on all ranks but the first; backward the same. [...] -> [...]"""
    # A mask rather than a branch: every rank compiles the same graph, else their collectives fall out of order.
    return x.masked_fill(torch.full((), rank(axis) != 0, device=x.device), 0)


def agree_on(x: Tensor, axis: str) -> Tensor:
    """R -> R, I -> I: what the first rank computed, where kernels may round apart; backward nothing. [...] -> [...]"""
    return _apply(x, lambda x: _broadcast(x, axis), lambda g: g) if _round_apart else x


# Operators whose vocabulary is sharded.


def vocab_embedding(ids: Tensor, weight: Tensor, axis: str, padding_idx: int | None = None) -> Tensor:
    """weight S(0), ids R -> P: the rows that this rank has, else zeros.

    ids [...], weight [ceil(vocab / k), d] -> [..., d]. The row ``padding_idx`` gets no gradient.
    """
    row = ids - rank(axis) * weight.size(0)
    elsewhere = (row < 0) | (row >= weight.size(0))
    rows = F.embedding(row.masked_fill(elsewhere, 0), weight)
    if padding_idx is not None:
        rows = torch.where((ids == padding_idx).unsqueeze(-1), rows.detach(), rows)
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0)


def vocab_cross_entropy(
    logits: Tensor,
    target: Tensor,
    axis: str,
    vocab: int,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> Tensor:
    """logits S(1), target R -> I: ``F.cross_entropy`` by two small all-reduces; backward is local.

    logits [n, ceil(vocab / k), ...], target [n, ...], weight [vocab] -> [], or [n, ...] for the reduction "none"

    Computed in float32 at least. A label that is no class and not ``ignore_index`` makes the loss NaN.
    """
    counted = target != ignore_index
    losses = _vocab_losses(logits, target, axis, vocab).masked_fill(~counted, 0)
    factor = counted.to(losses.dtype)
    if weight is not None:
        factor = factor * weight.to(losses.dtype)[target.masked_fill(~counted, 0)]
        losses = losses * factor
    if reduction == "sum":
        losses = losses.sum()
    elif reduction == "mean":
        losses = losses.sum() / factor.sum()
    return losses.to(logits.dtype)


def sync_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    axes: Sequence[str],
    *,
    training: bool,
    momentum: float,
    eps: float,
    channels: str = "",
) -> Tensor:
    """x S(0), weight, bias R -> S(0): ``F.batch_norm`` with the statistics of the rows of all ranks. [n, c, ...]
    -> [n, c, ...]

    The running statistics [c] are written alike on all ranks. Computed in float32 at least. ``channels``: x, weight and
    bias have this rank's channels of those of an axis; the running statistics are those of all.
    """
    if not training and running_mean is not None and running_var is not None:
        if channels:
            running_mean, running_var = (shard(each, channels, 0) for each in (running_mean, running_var))
        return F.batch_norm(x, running_mean, running_var, weight, bias, training=False, eps=eps)
    count = x.numel() // x.size(1)
    for axis in axes:
        count *= size(axis)
    if count == 1:  # known to every rank alike, before any waits for another
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(x.shape)}")
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    columns = [-1] + [1] * (x.ndim - 2)
    var, mean = torch.var_mean(wide, [dim for dim in range(x.ndim) if dim != 1], correction=0)
    pieces = torch.stack([mean, var]).unsqueeze(0)
    for axis in axes:
        pieces = all_gather(pieces, axis, 0)
    means, variances = pieces.unbind(1)
    mean = means.mean(0)
    var = variances.mean(0) + (means - mean).square().mean(0)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            fresh = torch.stack([mean, var * (count / (count - 1))])
            fresh_mean, fresh_var = all_gather(fresh, channels, 1) if channels else fresh
            running_mean.lerp_(fresh_mean.to(running_mean.dtype), momentum)
            running_var.lerp_(fresh_var.to(running_var.dtype), momentum)
    result = (wide - mean.view(columns)) * torch.rsqrt(var + eps).view(columns)
    if weight is not None:
        result = result * weight.view(columns)
    if bias is not None:
        result = result + bias.view(columns)
    return result.to(x.dtype)


def channel_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    axis: str,
    *,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """x S(1), weight, bias S(0) -> S(1): ``F.batch_norm`` of this rank's channels. [n, c / k, ...] -> [n, c / k, ...]

    The running statistics [c] of all channels are on all ranks, and are written alike.
    """
    if running_mean is None or running_var is None:
        return F.batch_norm(x, None, None, weight, bias, training, momentum, eps)
    own = shard(torch.stack([running_mean, running_var]), axis, 1)
    result = F.batch_norm(x, own[0], own[1], weight, bias, training, momentum, eps)
    if training:
        with torch.no_grad():
            mean, var = all_gather(own, axis, 1)
            running_mean.copy_(mean)
            running_var.copy_(var)
    return result


def own_group(x: Tensor, axis: str, dim: int) -> Tensor:
    """The one of fewer groups than ranks that this rank's heads belong to; backward pads with zeros. [.., n, ..]
    -> [.., 1, ..]"""
    return x.narrow(dim, rank(axis) * x.size(dim) // size(axis), 1)


def global_index(size: int, axis: str, parts: Sequence[int] = (), device: torch.device | None = None) -> Tensor:
    """Compute the indices in the whole dim of the ``size`` elements of this rank's shard: int64 [size]."""
    return _piece(torch.arange(size * _axes[axis][1], device=device), axis, 0, parts)


# How they work: a whole tensor is split into stacked shards [k, *shard], which the operators of torch send.


class _Transition(torch.autograd.Function):
    """One function for the value, one for the gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.turn_back = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.turn_back(gradient), None, None


class _VocabLosses(torch.autograd.Function):
    """The loss of each row, label or not: log(sum(exp(scores))) - scores[label], scores relative to the largest logit.

    Autograd would keep and pass through several tensors of the size of the logits; this keeps one and makes one.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, axis: str, vocab: int) -> Tensor:
        dim = min(1, logits.ndim - 1)
        width, first = logits.size(dim), rank(axis) * logits.size(dim)
        ctx.dim, ctx.dtype = dim, logits.dtype
        if width * size(axis) > vocab:
            column = torch.arange(first, first + width, device=logits.device)
            padding = (column >= vocab).view(-1, *[1] * (logits.ndim - dim - 1))
            logits = logits.masked_fill(padding, float("-inf"))
        largest = logits.amax(dim, keepdim=True).to(torch.promote_types(logits.dtype, torch.float32))
        scores = logits - _all_reduce(largest, axis, "max")

        label = (target - first).unsqueeze(dim)
        elsewhere = (label < 0) | (label >= width)
        label = label.masked_fill(elsewhere, 0)
        picked = scores.gather(dim, label).masked_fill(elsewhere, 0)
        exponentials = scores.exp_()
        total, picked = _all_reduce(torch.stack([exponentials.sum(dim, keepdim=True), picked]), axis).unbind(0)
        ctx.save_for_backward(exponentials, total, label, elsewhere)
        return (total.log() - picked).squeeze(dim)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        exponentials, total, label, elsewhere = ctx.saved_tensors
        gradient = gradient.unsqueeze(ctx.dim)
        result = exponentials * (gradient / total)
        result.scatter_add_(ctx.dim, label, gradient.masked_fill(elsewhere, 0).neg())
        return result.to(ctx.dtype), None, None, None


def _vocab_losses(logits: Tensor, target: Tensor, axis: str, vocab: int) -> Tensor:
    losses: Tensor = _VocabLosses.apply(logits, target, axis, vocab)
    return losses.masked_fill((target < 0) | (target >= vocab), float("nan"))


def _apply(x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    if _runs_plainly():
        return forward(x)
    result: Tensor = _Transition.apply(x, forward, backward)
    return result


def _runs_plainly() -> bool:
    """Whether no gradient is asked for, and nothing is compiled: as where tokens are generated, one after the other."""
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _watched(x: Tensor, result: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
    for watch in watchers:
        watch(x, result, gather)
    return result


def _all_reduce(x: Tensor, axis: str, operation: str = "sum") -> Tensor:
    group, count, _ = _axes[axis]
    return x if count == 1 else _done(_operators.all_reduce(x.contiguous(), operation, group))


def _broadcast(x: Tensor, axis: str) -> Tensor:
    group, count, _ = _axes[axis]
    return x if count == 1 else _done(_operators.broadcast(x.contiguous(), 0, group))


def _all_gather(x: Tensor, axis: str) -> Tensor:
    """[1, ...] -> [k, ...]"""
    group, count, _ = _axes[axis]
    return x if count == 1 else _done(_operators.all_gather_into_tensor(x.contiguous(), count, group))


def _reduce_scatter(x: Tensor, axis: str) -> Tensor:
    """[k, ...] -> [1, ...]"""
    group, count, _ = _axes[axis]
    return x if count == 1 else _done(_operators.reduce_scatter_tensor(x.contiguous(), "sum", count, group))


def _all_to_all(x: Tensor, axis: str, sent: Sequence[int] = (), received: Sequence[int] = ()) -> Tensor:
    """[k, ...] for each rank -> [k, ...] from each rank; with ``sent`` and ``received``, so many rows instead of one"""
    begun = _begin_all_to_all(x, axis, sent, received)
    return begun if begun is x else _done(begun)


def _begin_all_to_all(x: Tensor, axis: str, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """The same, which ``_done`` waits for."""
    group, count, _ = _axes[axis]
    if count == 1:
        return x
    begun: Tensor = _operators.all_to_all_single(x.contiguous(), received or [1] * count, sent or [1] * count, group)
    return begun


def _done(x: Tensor) -> Tensor:
    result: Tensor = _operators.wait_tensor(x)
    return result


def _gather(x: Tensor, axis: str, dim: int, parts: Sequence[int], size: int | None) -> Tensor:
    return _joined(_all_gather(x.unsqueeze(0), axis), dim, parts, size)


def _sum_piece(x: Tensor, axis: str, dim: int, parts: Sequence[int]) -> Tensor:
    return _reduce_scatter(_pieces(x, dim, parts, size(axis)), axis).squeeze(0)


def _exchange(
    x: Tensor,
    axis: str,
    sharded_dim: int,
    sharded_parts: Sequence[int],
    joined_dim: int,
    joined_parts: Sequence[int],
    joined_size: int | None,
) -> Tensor:
    pieces = _all_to_all(_pieces(x, sharded_dim, sharded_parts, size(axis)), axis)
    return _joined(pieces, joined_dim, joined_parts, joined_size)


def _piece(x: Tensor, axis: str, dim: int, parts: Sequence[int]) -> Tensor:
    columns = _shards(x, dim, parts, size(axis))
    return _cat([column.select(0, rank(axis)) for column in columns], dim + 1).flatten(dim, dim + 1).contiguous()


def _pieces(x: Tensor, dim: int, parts: Sequence[int], count: int) -> Tensor:
    """[.., n, ..] -> [count, .., ceil(n / count), ..]"""
    return _cat(_shards(x, dim, parts, count), dim + 2).flatten(dim + 1, dim + 2)


def _shards(x: Tensor, dim: int, parts: Sequence[int], count: int) -> list[Tensor]:
    """[.., n, ..] -> a view of each part: [count, .., periods, a rank's share of the part, ..]"""
    periods = x.size(dim) // sum(parts) if parts else 1
    if not parts:
        parts = [-(-x.size(dim) // count) * count]
        missing = parts[0] - x.size(dim)
        x = F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, missing]) if missing else x
    columns = x.unflatten(dim, (periods, sum(parts))).split(list(parts), dim + 1)
    return [column.unflatten(dim + 1, (count, column.size(dim + 1) // count)).movedim(dim + 1, 0) for column in columns]


def _joined(pieces: Tensor, dim: int, parts: Sequence[int], size: int | None) -> Tensor:
    """The shards joined, without their padding: [k, .., n, ..] -> [.., size or n * k, ..]"""
    local = [part // pieces.size(0) for part in parts] or [pieces.size(dim + 1)]
    periods = pieces.size(dim + 1) // sum(local) if parts else 1
    columns = pieces.unflatten(dim + 1, (periods, sum(local))).split(local, dim + 2)
    whole = _cat([column.movedim(0, dim + 1).flatten(dim + 1, dim + 2) for column in columns], dim + 1)
    whole = whole.flatten(dim, dim + 1)
    return (whole if size is None else whole.narrow(dim, 0, size)).contiguous()


def _cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)
