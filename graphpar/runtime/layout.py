"""How a tensor is placed on a mesh axis: the types R, I, P, S(dim) and E, sharding a tensor, and joining its shards.

    weight [n, k]   S(0) over 2 ranks            rank 0: rows [0, n/2)      rank 1: rows [n/2, n)
    fused  [3m, k]  S(0:m) over 2 ranks          each rank: its half of every m rows (q, k and v)
    fused  [n, k]   S(0:q+k+v) over 2 ranks      each rank: its half of the q rows, of the k rows, of the v rows
    table  [7, d]   S(0) over 2 ranks, uneven    4 rows each; the last rank's last row is padding
    rows   [t, d]   E(offs) over 2 ranks         each rank: the rows of its half of the experts, however many they are

``plan.json`` holds these as text. The compiler uses the same functions, so sharding has one definition.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphpar.runtime.axes import AXES, SHARDING_ORDER


@dataclass(frozen=True)
class Whole:
    """A type under which every rank holds a tensor of the full shape: ``R``, ``I`` or ``P``."""

    letter: str

    def __str__(self) -> str:
        return self.letter

    __repr__ = __str__


R = Whole("R")
"""Replicate: the same value on every rank, used differently on each. Its gradient is P."""
I = Whole("I")  # noqa: E741 (the type's name)
"""Invariant: the same value on every rank, used the same way on each. Its gradient is I."""
P = Whole("P")
"""Partial: a partial sum over the axis. Its gradient is R."""


@dataclass(frozen=True)
class Shard:
    """``S(dim)``: the tensor's ``dim`` is divided over the axis. Its gradient is sharded alike.

    ``parts``: the dim consists of runs of ``sum(parts)`` elements, and each part of each run is sharded by itself (fused
    projections, a sequence dim that was flattened into the rows). Empty: the whole dim is one part. A whole dim that the degree
    does not divide is sharded by ``ceil(size / degree)`` elements; the last shards are padded with zeros.
    """

    dim: int
    parts: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"S({self.dim}{':' + '+'.join(map(str, self.parts)) if self.parts else ''})"

    __repr__ = __str__


@dataclass(frozen=True)
class ExpertRows(Shard):
    """``E(offsets)``: dim 0 holds rows that are sorted by expert, and each rank has those of its experts. Its gradient has the same type.

    ``offsets`` names the value [experts] that says where each expert's rows end, so how many rows a rank has depends on the data.
    Only values inside a block have this type: no parameter, no input, no result of a block.
    """

    dim: int = 0
    offsets: str = ""

    def __str__(self) -> str:
        return f"E({self.offsets})"

    __repr__ = __str__


@dataclass(frozen=True)
class Stored(Shard):
    """A shard of a parameter that is computed with whole, as ZeRO-2 and 3 store it.

    All axes of this type divide ``dim`` together, the outermost first, after every other axis: [7, d] over two axes of two ranks gives
    2 rows to each of the first three ranks and 1, with padding, to the last.
    """

    __repr__ = Shard.__str__


Type = Whole | Shard
_LETTERS = {"R": R, "I": I, "P": P}
_SHARD = re.compile(r"S\((\d+)(?::(\d+(?:\+\d+)*))?\)")
_ROWS = re.compile(r"E\(([^()]+)\)")


def parse_type(text: str) -> Type:
    """Parse ``R``, ``I``, ``P``, ``S(0)``, ``S(0:768)``, ``S(0:4096+1024+1024)`` or ``E(offs)``.

    Raises:
        ValueError: the text is none of these.
    """
    if text in _LETTERS:
        return _LETTERS[text]
    rows = _ROWS.fullmatch(text)
    if rows is not None:
        return ExpertRows(offsets=rows[1])
    found = _SHARD.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a type of a tensor on an axis; the types are R, I, P and S(dim)")
    parts = tuple(int(part) for part in found[2].split("+")) if found[2] else ()
    return Shard(int(found[1]), parts)


def local_size(size: int, shard: Shard, degree: int) -> int:
    """Return how many of ``size`` elements a rank holds, padding included; for ``ExpertRows``, as if every expert had as many rows."""
    if not shard.parts:
        return -(-size // degree)
    period = sum(shard.parts)
    assert size % period == 0 and all(part % degree == 0 for part in shard.parts), (size, shard, degree)
    return size // degree


@dataclass(frozen=True)
class Division:
    """One of the divisions that make a shard: ``axes`` divide a dim together."""

    axes: tuple[str, ...]
    shard: Shard

    def degree(self, degrees: Mapping[str, int]) -> int:
        """Return into how many shards it divides."""
        return math.prod(degrees[axis] for axis in self.axes)

    def index(self, degrees: Mapping[str, int], place: Mapping[str, int]) -> int:
        """Return which of them is at the mesh coordinates ``place``."""
        found = 0
        for axis in self.axes:
            found = found * degrees[axis] + place[axis]
        return found


def divisions(spec: Mapping[str, Type]) -> list[Division]:
    """Return how a tensor is divided, in this order: by each axis of ``SHARDING_ORDER``, then by all that store shards."""
    found = [
        Division((axis,), kind)
        for axis in SHARDING_ORDER
        if isinstance(kind := spec.get(axis), Shard) and not isinstance(kind, Stored)
    ]
    stored = {axis: kind for axis in AXES if isinstance(kind := spec.get(axis), Stored)}
    return [*found, Division(tuple(stored), next(iter(stored.values())))] if stored else found


def local_shape(shape: Sequence[int], spec: Mapping[str, Type], degrees: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of a rank's shard of a tensor of ``shape``."""
    sizes = list(shape)
    for each in divisions(spec):
        sizes[each.shard.dim] = local_size(sizes[each.shard.dim], each.shard, each.degree(degrees))
    return tuple(sizes)


def shard_of(tensor: Tensor, shard: Shard, degree: int, index: int) -> Tensor:
    """Return shard ``index`` of ``degree`` of a whole tensor; padded with zeros where the degree does not divide the dim."""
    assert not isinstance(shard, ExpertRows), "rows of experts are sharded by the program itself"
    size = tensor.shape[shard.dim]
    if not shard.parts:
        each = -(-size // degree)
        begin = min(index * each, size)
        piece = tensor.narrow(shard.dim, begin, min(each, size - begin))
        missing = each - piece.shape[shard.dim]
        if missing:
            filler = list(piece.shape)
            filler[shard.dim] = missing
            piece = torch.cat([piece, piece.new_zeros(filler)], shard.dim)
        return piece
    periods = tensor.unflatten(shard.dim, (-1, sum(shard.parts)))
    pieces = [part.narrow(shard.dim + 1, index * (part.shape[shard.dim + 1] // degree), part.shape[shard.dim + 1] // degree)
              for part in periods.split(list(shard.parts), shard.dim + 1)]  # fmt: skip
    return torch.cat(pieces, shard.dim + 1).flatten(shard.dim, shard.dim + 1)


def joined(pieces: Sequence[Tensor], shard: Shard, size: int) -> Tensor:
    """Join all shards of a tensor, in order; ``size`` is that of the whole along the sharded dim, and padding is dropped."""
    degree = len(pieces)
    if not shard.parts:
        return torch.cat(list(pieces), shard.dim).narrow(shard.dim, 0, size)
    local = [part // degree for part in shard.parts]
    split = [piece.unflatten(shard.dim, (-1, sum(local))).split(local, shard.dim + 1) for piece in pieces]
    columns = [split[rank][part] for part in range(len(local)) for rank in range(degree)]
    return torch.cat(columns, shard.dim + 1).flatten(shard.dim, shard.dim + 1)


def local_shard(
    tensor: Tensor, spec: Mapping[str, Type], degrees: Mapping[str, int], place: Mapping[str, int]
) -> Tensor:
    """Return the shard of ``tensor`` at the mesh coordinates ``place``, divided as :func:`divisions` says."""
    for each in divisions(spec):
        tensor = shard_of(tensor, each.shard, each.degree(degrees), each.index(degrees, place))
    return tensor


def coordinates(rank: int, degrees: Mapping[str, int]) -> dict[str, int]:
    """Return the coordinate of a rank on each axis; the last axis varies fastest."""
    place = {}
    for axis in reversed(AXES):
        place[axis] = rank % degrees.get(axis, 1)
        rank //= degrees.get(axis, 1)
    return place


def rank_at(place: Mapping[str, int], degrees: Mapping[str, int]) -> int:
    """Return the rank at mesh coordinates; an axis that ``place`` leaves out counts as 0. The inverse of ``coordinates``."""
    rank = 0
    for axis in AXES:
        rank = rank * degrees.get(axis, 1) + place.get(axis, 0)
    return rank


def shard_places(spec: Mapping[str, Type], degrees: Mapping[str, int]) -> list[dict[str, int]]:
    """List the coordinates of every shard of a tensor on the axes that shard it, in order: the last axis varies fastest."""
    axes = [axis for each in divisions(spec) for axis in each.axes]
    return [dict(zip(axes, at)) for at in itertools.product(*(range(degrees[axis]) for axis in axes))]


def joined_all(
    pieces: Sequence[Tensor], shape: Sequence[int], spec: Mapping[str, Type], degrees: Mapping[str, int]
) -> Tensor:
    """Join the shards of a tensor of ``shape``, given in the order of ``shard_places``: the inverse of ``local_shard``."""
    before: list[tuple[Shard, int, int]] = []  # each sharding, its degree, and the size of its dim before it
    sizes = list(shape)
    for each in divisions(spec):
        kind, degree = each.shard, each.degree(degrees)
        before.append((kind, degree, sizes[kind.dim]))
        sizes[kind.dim] = local_size(sizes[kind.dim], kind, degree)
    found = list(pieces)
    for kind, degree, size in reversed(before):
        found = [joined(found[i : i + degree], kind, size) for i in range(0, len(found), degree)]
    (whole,) = found
    return whole
