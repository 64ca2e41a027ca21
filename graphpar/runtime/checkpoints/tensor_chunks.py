"""The tensors of a checkpoint: boxes of whole tensors, and where those of a rank are.

weight [8, 4]  S(0:4) over tp=2, rank 0         two boxes: rows [0, 2) and rows [4, 6)
weight [7, 4]  S(0) over tp=2, rank 1           one box: rows [4, 7); the padding behind them is in none
the same, elements [6, 13) of its 16 (ZeRO-1)   three boxes: half of row 5, row 6, a quarter of row 7
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphpar.runtime.layout import Type, divisions, shard_of

MODEL, STATE = ("model",), ("optimizer", "state")
"""What the paths of tensors begin with; a path's parts, joined by dots, are the key in the checkpoint."""

Key = tuple[str, ...]


@dataclass(frozen=True)
class Box:
    """A box of a whole tensor: where it begins, and a view of the rank's values of it."""

    offsets: tuple[int, ...]
    values: Tensor


@dataclass
class Entry:
    """A tensor of a checkpoint and this rank's boxes of it.

    Attributes:
        path: the parts of its key.
        shape: that of the whole tensor.
        tensors: what the boxes are views of.
        divided: the axes whose ranks hold other boxes.
        copies: how many ranks hold the same boxes, and which of them this one is.
        frozen: it is a parameter that is not trained.
    """

    path: Key
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: list[Box]
    tensors: list[Tensor]
    divided: frozenset[str] = frozenset()
    copies: tuple[int, int] = (1, 0)
    frozen: bool = False

    @property
    def key(self) -> str:
        """The key in the checkpoint."""
        return ".".join(self.path)


@dataclass(frozen=True)
class _Run:
    """Indices along a dim that follow one another in the whole and in the part."""

    whole: int
    part: int
    length: int


def boxes_of(
    part: Tensor,
    shape: Sequence[int],
    spec: Mapping[str, Type],
    degrees: Mapping[str, int],
    place: Mapping[str, int],
    *,
    of: Sequence[int] | None = None,
    start: int = 0,
) -> list[Box]:
    """Return the boxes of a tensor of ``shape`` that the rank at ``place`` stores in ``part``; padding is in none.

    Args:
        part: the rank's shard, or, where ``of`` is the shape of that, the elements from ``start`` on that it has of it.
    """
    runs = [
        _index_runs(size, dim, held, spec, degrees, place)
        for dim, (size, held) in enumerate(zip(shape, part.shape if of is None else of, strict=True))
    ]
    blocks = [((0,) * len(shape), part)] if of is None else _blocks(part, of, start)
    found = []
    for begin, block in blocks:
        for chosen in itertools.product(*(_within(*each) for each in zip(runs, begin, block.shape))):
            view = block
            for dim, run in enumerate(chosen):
                view = view.narrow(dim, run.part - begin[dim], run.length)
            found.append(Box(tuple(run.whole for run in chosen), view))
    return found


def part_of(whole: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return a view of a box of a whole tensor."""
    for dim, (begin, size) in enumerate(zip(offsets, sizes)):
        whole = whole.narrow(dim, begin, size)
    return whole


def flat_boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Divide the elements from ``begin`` to ``end`` of a tensor, in row-major order, into boxes: at most 2 k - 1 for k dims.

    Yields:
        The offsets and sizes of a box, in order.
    """
    if begin >= end:
        return
    if not shape:
        yield (), ()
        return
    each = math.prod(shape[1:])
    first, last = -(-begin // each), end // each  # the whole rows
    row, high = (last, end) if first > last else (first - 1, first * each)
    for offsets, sizes in flat_boxes(shape[1:], begin - row * each, high - row * each):
        yield (row, *offsets), (1, *sizes)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if first <= last:
        for offsets, sizes in flat_boxes(shape[1:], 0, end - last * each):
            yield (last, *offsets), (1, *sizes)


def _blocks(part: Tensor, of: Sequence[int], start: int) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yield views of ``part`` as blocks of the shard whose elements it has from ``start`` on, and where they begin in it."""
    flat, done = part.reshape(-1) if part.numel() == 0 else part.view(-1), 0
    for offsets, sizes in flat_boxes(of, start, start + part.numel()):
        yield offsets, flat[done : done + math.prod(sizes)].view(sizes)
        done += math.prod(sizes)


def _index_runs(
    size: int, dim: int, held: int, spec: Mapping[str, Type], degrees: Mapping[str, int], place: Mapping[str, int]
) -> list[_Run]:
    """Return the runs of a dim, of which the rank holds the first ``held`` of its indices."""
    index: Tensor | None = None  # counted from 1, since 0 is padding
    for each in divisions(spec):
        if each.shard.dim == dim:
            index = torch.arange(1, size + 1) if index is None else index
            along = dataclasses.replace(each.shard, dim=0)
            index = shard_of(index, along, each.degree(degrees), each.index(degrees, place))
    if index is None:
        return [_Run(0, 0, size)]
    index = index[:held]
    ends = [*((index.diff() != 1).nonzero().flatten() + 1).tolist(), len(index)]
    begins = [0, *ends[:-1]]
    return [
        _Run(int(index[begin]) - 1, begin, end - begin)
        for begin, end in zip(begins, ends)
        if end > begin and index[begin]
    ]


def _within(runs: Sequence[_Run], begin: int, size: int) -> list[_Run]:
    """Return the parts of ``runs`` that lie at ``begin`` to ``begin + size`` of the shard."""
    found = []
    for run in runs:
        low, high = max(begin, run.part), min(begin + size, run.part + run.length)
        if low < high or run.length == 0:
            found.append(_Run(run.whole + low - run.part, low, high - low))
    return found
