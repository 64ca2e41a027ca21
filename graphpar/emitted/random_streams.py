"""Dropout whose masks depend on the example, not on how the program is split.

Every example of the global batch has a key, a function of (seed, step, index of the example). A dropout draws from
the key, its own stream number and the position in the example, by a counter-based hash (SplitMix64). So the masks are
the same for any number of stages and microbatches, and when a block is recomputed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def stream(keys: Tensor, number: int) -> Tensor:
    """Derive the keys of the random operator of this ``number``. keys [b] -> [b]"""
    return keys + number * 0x1F123BB5


def _hash(counter: Tensor) -> Tensor:
    """SplitMix64's finalizer; int64 with wrap-around, right shifts made logical by a mask."""
    counter = (counter ^ ((counter >> 30) & 0x3FFFFFFFF)) * _MIX_1
    counter = (counter ^ ((counter >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return counter ^ ((counter >> 31) & 0x1FFFFFFFF)


ShardedDim = tuple[int, int, int] | tuple[int, int, int, tuple[int, ...]]
"""A sharded dim: (dim, this rank, ranks), and the parts of each run of elements that are sharded by themselves."""


def keep_mask(shape: list[int], p: float, keys: Tensor, batch_dim: int, sharded: Sequence[ShardedDim] = ()) -> Tensor:
    """True with probability ``1 - p``, for a tensor of ``shape`` whose dim ``batch_dim`` has the examples of ``keys``.

    ``sharded``: the sharded dims, where the tensor is a rank's shard; every element is numbered as in the whole tensor.
    """
    position = torch.zeros([1] * len(shape), dtype=torch.int64, device=keys.device)
    stride = 1
    for dim in reversed(range(len(shape))):
        if dim == batch_dim:
            continue
        index, size = torch.arange(shape[dim], device=keys.device), shape[dim]
        for _, rank, ranks, *parts in (entry for entry in sharded if entry[0] == dim):
            index, size = _whole_index(index, size, rank, ranks, parts[0] if parts else ()), size * ranks
        position = position + (index * stride).view([-1 if d == dim else 1 for d in range(len(shape))])
        stride *= size
    along = [1] * len(shape)
    along[batch_dim] = -1
    bits = _hash(_hash(keys).view(along) + position * _GOLDEN)
    return ((bits >> 40) & 0xFFFFFF) >= round(p * 0x1000000)


def _whole_index(index: Tensor, size: int, rank: int, ranks: int, parts: tuple[int, ...]) -> Tensor:
    """The indices in the whole dim (runs of ``parts``) of the elements ``index`` of a shard of ``size``."""
    if not parts:
        return index + rank * size
    begins = [sum(parts[:number]) for number in range(len(parts))]
    pieces = [begin + rank * (part // ranks) + torch.arange(part // ranks) for begin, part in zip(begins, parts)]
    period = torch.cat(pieces).to(index.device)
    return index // len(period) * sum(parts) + period[index % len(period)]


def dropout(
    x: Tensor, p: float, keys: Tensor, batch_dim: int = 0, training: bool = True, sharded: Sequence[ShardedDim] = ()
) -> Tensor:
    """Compute ``F.dropout`` with masks from ``keys`` [b], one for each index of ``x``'s dim ``batch_dim``."""
    if not training or p == 0.0:
        return x
    keep = keep_mask(list(x.shape), p, keys, batch_dim, sharded)
    return torch.where(keep, x / (1.0 - p), torch.zeros((), dtype=x.dtype, device=x.device))


def channel_dropout(
    x: Tensor, p: float, keys: Tensor, batch_dim: int = 0, training: bool = True, sharded: Sequence[ShardedDim] = ()
) -> Tensor:
    """Compute ``F.dropout1d``, ``2d`` or ``3d``: drop whole channels, for ``x`` [b, channels, ...]."""
    if not training or p == 0.0:
        return x
    keep = keep_mask(list(x.shape[:2]), p, keys, batch_dim, [c for c in sharded if c[0] < 2]).view(
        list(x.shape[:2]) + [1] * (x.ndim - 2)
    )
    return torch.where(keep, x / (1.0 - p), torch.zeros((), dtype=x.dtype, device=x.device))


def dropout_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    training: bool = True,
    sharded: Sequence[ShardedDim] = (),
) -> Tensor:
    """Compute ``F.scaled_dot_product_attention`` with dropout from ``keys``.

    query [b, h, q, e], key [b, h, k, e] -> [b, h, q, e]
    """
    if enable_gqa:
        key = key.repeat_interleave(query.size(1) // key.size(1), 1)
        value = value.repeat_interleave(query.size(1) // value.size(1), 1)
    scores = query @ key.transpose(-2, -1) * (query.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        rows = torch.arange(query.size(-2), device=query.device).unsqueeze(-1)
        scores = scores.masked_fill(torch.arange(key.size(-2), device=query.device) > rows, float("-inf"))
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else scores + attn_mask
    return dropout(scores.softmax(-1), dropout_p, keys, 0, training, sharded) @ value
