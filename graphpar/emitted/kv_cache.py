"""Generation with a key-value cache: a stage computes a window of a sequence's positions; attention sees those before.

    positions   0 .. p - 1              p .. p + n - 1
                keys and values of      the window: its tokens go through the stage, and
                each attention, kept    their keys and values are appended

A prompt is a wide window; then each new token is a window of one position. The runtime says with :func:`bind` which
sequences the next call of a stage is for. Without a cache the window is the whole sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


class KeyValueCache:
    """The keys and values that a stage keeps of a group of sequences: a pair for each attention, in the order of calls.

    Attributes:
        position: the first position of the window.
        last: whether only the window's last position is asked for.
    """

    def __init__(self) -> None:
        self.position, self.last = 0, False
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._next = 0

    def begin(self, position: int, last: bool) -> None:
        """The next window begins at ``position``; what the cache has from there on is overwritten."""
        self.position, self.last, self._next = position, last, 0

    def append(self, key: Tensor, value: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keep the window's keys and values [..., n, e]; return those of all positions so far [..., p + n, e]."""
        if self._next == len(self._kept):
            self._kept.append((_empty(key, length), _empty(value, length)))
        kept, window = self._kept[self._next], key.size(-2)
        self._next += 1
        for whole, part in zip(kept, (key, value)):
            whole.narrow(-2, self.position, window).copy_(part)
        return kept[0].narrow(-2, 0, self.position + window), kept[1].narrow(-2, 0, self.position + window)

    @property
    def nbytes(self) -> int:
        """The bytes that it takes."""
        return sum(tensor.nbytes for pair in self._kept for tensor in pair)


_bound: KeyValueCache | None = None


def bind(cache: KeyValueCache | None) -> None:
    """Use ``cache`` from now on."""
    global _bound
    _bound = cache


def window(x: Tensor, dim: int, size: int) -> Tensor:
    """The positions of the window from a table of all: [.., length, ..] -> [.., size, ..]"""
    return x.narrow(dim, 0 if _bound is None else _bound.position, size)


def last(x: Tensor, dim: int) -> Tensor:
    """The last position of the window, where no other is asked for: [.., n, ..] -> [.., 1 or n, ..]"""
    return x if _bound is None or not _bound.last else x.narrow(dim, x.size(dim) - 1, 1)


def cached_attention(
    query: Tensor, key: Tensor, value: Tensor, length: int, scale: float | None = None, enable_gqa: bool = False
) -> Tensor:
    """Causal attention of a window to all positions up to its own.

    query [..., n, e], key [..., n, e], value [..., n, f] -> [..., n, f]

    Args:
        length: of the longest sequence, for which the cache has room.
    """
    key, value, mask, causal = seen(query, key, value, length)
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=enable_gqa)


def seen(query: Tensor, key: Tensor, value: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor | None, bool]:
    """The keys and values that the window's queries see, a mask where they need one, and whether they see what is before them alone."""
    first, rows = 0 if _bound is None else _bound.position, query.size(-2)
    if _bound is not None:
        key, value = _bound.append(key, value, length)
    mask = None
    if first and rows > 1:
        mask = torch.ones(rows, first + rows, dtype=torch.bool, device=query.device).tril_(first)
    return key, value, mask, not first


def _empty(like: Tensor, length: int) -> Tensor:
    *lead, _, width = like.shape
    return like.new_empty(*lead, length, width)
