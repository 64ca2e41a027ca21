"""What ``torch.compile`` needs to take a block whole: operators that it must not look into, or knows too little of.

keep_mask(shape, p, keys)   ──►  graphpar::keep_mask   opaque: its whole numbers wrap around, which inductor's bounds don't know
grouped_mm in fp32          ──►  shapes of its results; torch 2.13 has them for bf16 alone
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import torch
from torch import Tensor

ShardedDim = tuple[int, int, int] | tuple[int, int, int, tuple[int, ...]]
Masks = Callable[[list[int], float, Tensor, int, Sequence[ShardedDim]], Tensor]

_MASKS: dict[str, Masks] = {}
"""The emitted ``keep_mask`` of each ``random_streams``, by the module's name."""


@torch.library.custom_op("graphpar::keep_mask", mutates_args=())
def _keep_mask(
    streams: str, shape: Sequence[int], p: float, keys: Tensor, batch_dim: int, sharded: Sequence[int]
) -> Tensor:
    return _MASKS[streams](list(shape), p, keys, batch_dim, list(_read(sharded)))


@_keep_mask.register_fake
def _(streams: str, shape: Sequence[int], p: float, keys: Tensor, batch_dim: int, sharded: Sequence[int]) -> Tensor:
    return keys.new_empty(shape, dtype=torch.bool)


def hide_masks(streams: ModuleType) -> None:
    """Make the emitted ``random_streams`` draw its masks in an operator of its own, which computes as before."""
    name = streams.__name__
    if not hasattr(streams, "keep_mask") or streams.keep_mask.__module__ == __name__:
        return
    _MASKS[name] = streams.keep_mask

    def keep_mask(
        shape: list[int], p: float, keys: Tensor, batch_dim: int, sharded: Sequence[ShardedDim] = ()
    ) -> Tensor:
        mask: Tensor = _keep_mask(name, shape, p, keys, batch_dim, _written(sharded))
        return mask

    streams.keep_mask = keep_mask  # type: ignore[attr-defined]


def _written(sharded: Sequence[ShardedDim]) -> list[int]:
    """Sharded dims as an operator takes them: dim, rank, ranks, number of parts, parts."""
    numbers: list[int] = []
    for dim, rank, ranks, *runs in sharded:
        parts = runs[0] if runs else ()
        numbers += [dim, rank, ranks, len(parts), *parts]
    return numbers


def _read(numbers: Sequence[int]) -> Iterator[ShardedDim]:
    at = 0
    while at < len(numbers):
        dim, rank, ranks, count = numbers[at : at + 4]
        at += 4 + count
        yield (dim, rank, ranks, tuple(numbers[at - count : at])) if count else (dim, rank, ranks)


def know_grouped_products() -> None:
    """Tell torch the shapes of ``grouped_mm`` in every dtype that it multiplies; it refuses all but bf16 where it traces."""
    from torch._meta_registrations import _create_grouped_mm_output_tensor, meta_grouped_mm

    def shaped(
        rows: Tensor,
        weights: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        if rows.dtype is torch.bfloat16:
            known: Tensor = meta_grouped_mm(rows, weights, offs, bias, out_dtype)
            return known
        made: Tensor = _create_grouped_mm_output_tensor(rows, weights, offs, out_dtype)
        return made

    torch.library.register_fake("aten::_grouped_mm", shaped, allow_override=True)
