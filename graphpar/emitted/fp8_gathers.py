"""Gathers of rows that products round to 8 bits (``fp8.py``): rows are rounded first, and sent in 8 bits with scales.

    shard [.., n, .., d]  ──►  rows in 8 bits, with scales in 16 behind them  ──gather──►  whole [.., n * k, .., d]

A row, or each block of it, has its scale by itself, and rounding it again changes nothing, so products have the same
numbers as of rows that were gathered first. A gradient of a weight reads rows that are not rounded. So a whole that is
kept for it is gathered in its dtype; where shards are kept instead (``gathering.py``), or none is asked for, in 8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphpar.emitted.collectives import (
    _apply,
    _axes,
    _gather,
    _sum_piece,
    _watched,
    all_gather,
    watchers,
)
from graphpar.emitted.fp8 import FP8, _rounded, _values


def all_gather_rounded(
    x: Tensor,
    axis: str,
    dim: int,
    parts: Sequence[int] = (),
    size: int | None = None,
    block: int = 0,
    for_weights: bool = True,
) -> Tensor:
    """S(dim) -> R, for products in 8 bits alone: the whole; backward sums and keeps its shard. [.., n, .., d]
    -> [.., size or n * k, .., d]

    ``block`` values of d have a scale, or all of them (0); ``for_weights``: gradients of weights read the whole."""
    if _axes[axis][1] == 1 or (for_weights and torch.is_grad_enabled() and not watchers):
        return all_gather(x, axis, dim, parts, size)
    result = _apply(
        x, lambda x: _in_8_bits(x, axis, dim, parts, size, block), lambda g: _sum_piece(g, axis, dim, parts)
    )
    return _watched(x, result, lambda x: _gather(x, axis, dim, parts, size))


def _in_8_bits(x: Tensor, axis: str, dim: int, parts: Sequence[int], size: int | None, block: int) -> Tensor:
    """Gather rounded rows, each with its scales behind it; in the dtype of ``x`` they are exact."""
    rows, scale = _rounded(x.reshape(-1, x.size(-1)), block)
    pieces = [each.flatten(1).view(torch.uint8) for each in (rows, scale.bfloat16())]
    sent = torch.cat(pieces, 1).view(*x.shape[:-1], -1)
    rows, scales = _gather(sent, axis, dim, parts, size).tensor_split([pieces[0].size(1)], -1)
    scale = scales.contiguous().view(torch.bfloat16).to(x.dtype)
    return _values(rows.view(FP8).unflatten(-1, (scale.size(-1), -1)), scale.unsqueeze(-1))
