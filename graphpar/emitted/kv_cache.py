"""Generation with a key-value cache: a stage computes a window of a sequence's positions; attention sees those before.

    positions   0 .. p - 1              p .. p + n - 1
                keys and values of      the window: its tokens go through the stage, and
                each attention, kept    their keys and values are appended

A prompt is a wide window; then each new token is a window of one position. The runtime says with :func:`bind` which
sequences the next call of a stage is for. Without a cache the window is the whole sequence. Attention that sees no more
than the last ``sliding_window`` positions keeps no others: position p takes the place of p - ``sliding_window``.
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
        """The next window begins at ``position``: 0, or where the one before ended."""
        self.position, self.last, self._next = position, last, 0

    def append(
        self, key: Tensor, value: Tensor, length: int, sliding_window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keep the window's keys and values [..., n, e]; return those of all positions that it sees [..., m + n, e].

        They are in order, but for a window of one position that sees ``sliding_window``, of which the order means
        nothing.
        """
        room = length if sliding_window is None else min(length, sliding_window)
        if self._next == len(self._kept):
            self._kept.append((_empty(key, room), _empty(value, room)))
        kept, window = self._kept[self._next], key.size(-2)
        self._next += 1
        if self.position + window > length:
            raise ValueError(f"the cache has room for {length} positions")
        keys, values = (_keep(whole, part, self.position) for whole, part in zip(kept, (key, value)))
        return keys, values

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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    length: int,
    scale: float | None = None,
    enable_gqa: bool = False,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of a window to all positions up to its own.

    query [..., n, e], key [..., n, e], value [..., n, f] -> [..., n, f]

    Args:
        length: of the longest sequence, for which the cache has room.
        sliding_window: each position sees no more than so many, its own and those just before it.
        softcap: scores s are ``softcap * tanh(s / softcap)`` before they are hidden.
    """
    key, value, mask, causal = seen(query, key, value, length, sliding_window)
    if softcap is not None:
        rows = query.size(-2)
        shown = _shown(rows, key, sliding_window) if causal and rows > 1 else mask
        return _capped_attention(query, key, value, shown, scale, enable_gqa, softcap)
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=enable_gqa)


def seen(
    query: Tensor, key: Tensor, value: Tensor, length: int, sliding_window: int | None = None
) -> tuple[Tensor, Tensor, Tensor | None, bool]:
    """The keys and values that the window's queries see, a mask where they need one, and whether they see what is
    before them alone."""
    first, rows = 0 if _bound is None else _bound.position, query.size(-2)
    if _bound is not None:
        key, value = _bound.append(key, value, length, sliding_window)
    plain = not first and (sliding_window is None or rows <= sliding_window)
    mask = None
    if rows > 1 and not plain:
        mask = _shown(rows, key, sliding_window)
    return key, value, mask, plain


def _shown(rows: int, key: Tensor, sliding_window: int | None) -> Tensor:
    """Which keys the last ``rows`` positions see: bool [rows, keys]"""
    before = key.size(-2) - rows
    mask = torch.ones(rows, before + rows, dtype=torch.bool, device=key.device).tril_(before)
    return mask if sliding_window is None else mask.triu_(before - sliding_window + 1)


def _capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    enable_gqa: bool,
    softcap: float,
) -> Tensor:
    if enable_gqa:
        key, value = (each.repeat_interleave(query.size(-3) // each.size(-3), -3) for each in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.size(-1) ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return weights.to(value.dtype) @ value


def _keep(kept: Tensor, part: Tensor, position: int) -> Tensor:
    """Write ``part`` [..., n, e] from ``position`` on, around the end of ``kept``; return what it sees, itself
    included."""
    room, rows = kept.size(-2), part.size(-2)
    if position + rows <= room:
        kept.narrow(-2, position, rows).copy_(part)
        return kept.narrow(-2, 0, position + rows)
    if rows == 1:
        kept.narrow(-2, position % room, 1).copy_(part)
        return kept
    places = torch.arange(max(0, position - room + 1), position + rows, device=part.device) % room
    before = places.size(0) - rows
    whole = torch.cat((kept.index_select(-2, places[:before]), part), -2)
    kept.index_copy_(-2, places[-room:], whole[..., -room:, :])
    return whole


def _empty(like: Tensor, length: int) -> Tensor:
    *lead, _, width = like.shape
    return like.new_empty(*lead, length, width)
