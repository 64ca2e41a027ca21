"""Weights that move from the ranks of one program to those of another: which rank sends which box of which tensor to which.

    senders    pp 2 x tp 2   rank 0: weight [0:4, 0:4], rank 1: weight [4:8, 0:4]      fp32
    receivers  tp 4          rank 0: weight [0:2, 0:4], rank 1: weight [2:4, 0:4], ... bf16
    moves      0 ──[0:2]──► 0 (a copy, where it is one process), 0 ──[2:4]──► 1, 1 ──[4:6]──► 2, 1 ──[6:8]──► 3

Each process receives each element that it needs and does not have once, in the narrower of the two dtypes: no plan moves fewer bytes. Of
several ranks that have it, one on the receiver's own node sends it, and these take turns. Nobody has a whole tensor meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from graphpar.runtime.checkpoints.saved_state import may_become
from graphpar.runtime.checkpoints.tensor_chunks import Box, Entry
from graphpar.runtime.checkpoints.weights import listed
from graphpar.runtime.errors import RuntimeProgramError

BUCKET_BYTES = 64 * 2**20
"""The most bytes that a message has."""


class Region(NamedTuple):
    """A box of a whole tensor, without its values: where it begins, and its sizes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return math.prod(self.sizes)

    def common(self, other: Region) -> Region | None:
        """Return what is in both; None where nothing is."""
        begins = tuple(map(max, self.offsets, other.offsets))
        ends = [
            min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        ]
        sizes = tuple(end - begin for begin, end in zip(begins, ends))
        return Region(begins, sizes) if all(size > 0 for size in sizes) else None

    def without(self, inner: Region) -> Iterator[Region]:
        """Yield the rest of it in boxes, without one inside it."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        for dim, (begin, size) in enumerate(zip(inner.offsets, inner.sizes)):
            before, after = begin - offsets[dim], offsets[dim] + sizes[dim] - begin - size
            for at, length in ((offsets[dim], before), (begin + size, after)):
                if length:
                    rest = Region(tuple(offsets), tuple(sizes))
                    yield Region(_with(rest.offsets, dim, at), _with(rest.sizes, dim, length))
            offsets[dim], sizes[dim] = begin, size

    def outside(self, other: Region) -> Iterator[Region]:
        """Yield what of it is not in another one, in boxes."""
        common = self.common(other)
        yield from [self] if common is None else self.without(common)

    def pieces(self, most: int) -> Iterator[Region]:
        """Yield it in pieces of at most so many elements, in order."""
        dim = next((dim for dim, size in enumerate(self.sizes) if size > 1), None)
        if self.numel <= most or dim is None:
            yield self
            return
        each = max(1, most // (self.numel // self.sizes[dim]))
        for begin in range(0, self.sizes[dim], each):
            length = min(each, self.sizes[dim] - begin)
            part = Region(_with(self.offsets, dim, self.offsets[dim] + begin), _with(self.sizes, dim, length))
            yield from part.pieces(most)

    def of(self, box: Box) -> Tensor:
        """Return a view of the values of a box that it is inside."""
        view = box.values
        for dim, (begin, start, size) in enumerate(zip(self.offsets, box.offsets, self.sizes)):
            view = view.narrow(dim, begin - start, size)
        return view


def _with(values: Sequence[int], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


@dataclass(frozen=True)
class Held:
    """What one process has, or needs, of a tensor: disjoint regions of it.

    Attributes:
        names: all names of the tensor, of a program's model and of files of it.
        rounds: whether values may be rounded to ``dtype``: not those of a parameter that is trained.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    regions: tuple[Region, ...]
    rounds: bool = True

    @staticmethod
    def of(entry: Entry, names: Sequence[str]) -> Held:
        """Describe a rank's boxes of a tensor, of equal ones the first."""
        regions = dict.fromkeys(region_of(box) for box in entry.boxes)
        own = tuple(each for each in regions if each.numel)
        return Held(tuple(names), entry.shape, entry.dtype, own)


class Layout(Mapping[str, Held]):
    """What a process has, or needs, by name, in plain values: of many processes these are read faster, and few are asked for."""

    def __init__(self, held: Mapping[str, Held]) -> None:
        self._plain = {
            name: (
                each.names,
                each.shape,
                _dtype(each),
                each.rounds,
                [(*part.offsets, *part.sizes) for part in each.regions],
            )
            for name, each in held.items()
        }

    def __getitem__(self, name: str) -> Held:
        names, shape, dtype, rounds, parts = self._plain[name]
        dims = len(shape)
        regions = tuple(Region(part[:dims], part[dims:]) for part in parts)
        return Held(names, shape, getattr(torch, dtype), regions, rounds)

    def __contains__(self, name: object) -> bool:
        return name in self._plain

    def __iter__(self) -> Iterator[str]:
        return iter(self._plain)

    def __len__(self) -> int:
        return len(self._plain)


def region_of(box: Box) -> Region:
    """Return where a box is."""
    return Region(tuple(box.offsets), tuple(box.values.shape))


@dataclass(frozen=True)
class Move:
    """Values that go from one process to another; within one they are copied. Names are those of each side."""

    source: int
    target: int
    sent: str
    received: str
    region: Region
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of its values."""
        return self.region.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Resharding:
    """What moves from senders to receivers.

    Args:
        senders: of each process what it has, by name; nothing of those that only receive.
        receivers: of each process what it needs, by name.
        nodes: where each process is.
    """

    senders: Sequence[Mapping[str, Held]]
    receivers: Sequence[Mapping[str, Held]]
    nodes: Sequence[str]
    strict: bool = True
    _names: dict[str, str] = field(init=False, default_factory=dict)
    _known: dict[str, _Holders] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        found = _first(self.senders)
        known = {each: name for name, held in found.items() for each in held.names} | {name: name for name in found}
        needed = _first(self.receivers)
        for name, held in needed.items():
            sent = next((known[each] for each in (name, *held.names) if each in known), None)
            if sent is not None:
                self._names[name] = sent
        missing = [name for name in needed if name not in self._names]
        extra = sorted(found.keys() - set(self._names.values())) if self.strict else []
        if missing or extra:
            parts = [f"nobody sends {listed(missing)}"] if missing else []
            parts += [f"nobody receives {listed(extra)}; strict=False leaves that out"] if extra else []
            raise RuntimeProgramError(f"the two programs are not of one model: {' and '.join(parts)}")
        for name, sent in self._names.items():
            _check_same(name, needed[name], found[sent])

    def to(self, target: int, sender: int | None = None) -> Iterator[Move]:
        """Yield what a process receives or copies, in order: of all senders, or of one that has regions of the tensors."""
        own = None if sender is None else self.senders[sender]
        for place, (name, sent) in enumerate(self._needed(target)):
            if own is None or sent in own:
                needed = self.receivers[target][name]
                for region in needed.regions:
                    yield from self._moves(
                        target, name, needed, region, place, None if own is None else own[sent], sender
                    )

    def _needed(self, target: int) -> list[tuple[str, str]]:
        return [(name, self._names[name]) for name in sorted(self.receivers[target])]

    def _moves(
        self, target: int, name: str, needed: Held, region: Region, place: int, own: Held | None, sender: int | None
    ) -> Iterator[Move]:
        """Divide a region that a process needs among those that have it: each has all that is in none before it, in an order in which
        what the process has itself is first, then what its node has."""
        sent = self._names[name]
        holders, other = self._holders(sent), self._dtypes[sent]
        dtype = min(needed.dtype, other, key=lambda each: each.itemsize) if needed.dtype != other else other
        found = holders.touching(region) if own is None else [holders.numbers[each] for each in own.regions]
        order = self._ordered(target, holders, found)
        missing = region.numel
        for number in order:
            common = region.common(holders.regions[number])
            if common is None:
                continue
            parts = [common]
            before = self._ordered(target, holders, holders.touching(common))
            for earlier in before[: before.index(number)]:
                parts = [rest for part in parts for rest in part.outside(holders.regions[earlier])]
            source = self._sender(target, holders.processes[number], place)
            missing -= sum(part.numel for part in parts)
            if sender is None or source == sender:
                yield from (Move(source, target, sent, name, part, dtype) for part in parts)
        if missing and own is None:
            left = [region]
            for number in order:
                left = [rest for part in left for rest in part.outside(holders.regions[number])]
            raise RuntimeProgramError(f"nobody has {_text(left[0])} of {sent}, which process {target} needs")

    def _ordered(self, target: int, holders: _Holders, numbers: Sequence[int]) -> list[int]:
        if len(numbers) < 2:
            return list(numbers)
        return sorted(numbers, key=lambda each: (self._distance(target, holders.processes[each]), each))

    def _distance(self, target: int, processes: Sequence[int]) -> int:
        if target in processes:
            return 0
        return 1 if any(self.nodes[each] == self.nodes[target] for each in processes) else 2

    def _sender(self, target: int, processes: Sequence[int], place: int) -> int:
        """Choose who sends: the process itself, else one of its node, else one of all; each in its turn."""
        if target in processes:
            return target
        near = [each for each in processes if self.nodes[each] == self.nodes[target]] or processes
        return near[(target + place) % len(near)]

    def _holders(self, sent: str) -> _Holders:
        """Return who has which regions of a tensor."""
        if sent not in self._known:
            found: dict[Region, list[int]] = {}
            for process in self._processes[sent]:
                for region in self.senders[process][sent].regions:
                    found.setdefault(region, []).append(process)
            self._known[sent] = _Holders(list(found), list(found.values()))
        return self._known[sent]

    @cached_property
    def _processes(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for process, own in enumerate(self.senders):
            for name in own:
                found.setdefault(name, []).append(process)
        return found

    @cached_property
    def _dtypes(self) -> dict[str, torch.dtype]:
        return {name: held.dtype for name, held in _first(self.senders).items()}

    def of(self, process: int) -> tuple[list[Move], list[Move]]:
        """Return what a process sends, and what it receives and copies; both in an order that is the same on both sides."""
        targets = range(len(self.receivers)) if self.senders[process] else ()
        sent = [move for target in targets if target != process for move in self.to(target, process)]
        return sent, list(self.to(process))

    def least_bytes(self, process: int) -> int:
        """The fewest bytes that a process can receive: what it needs and does not have, in the narrower dtype."""
        total = 0
        for name, held in self.receivers[process].items():
            sent = self._names[name]
            had = self.senders[process].get(sent)
            common = [
                inside.numel
                for region in held.regions
                for other in (() if had is None else had.regions)
                if (inside := region.common(other)) is not None
            ]
            missing = sum(region.numel for region in held.regions) - sum(common)
            total += missing * min(held.dtype.itemsize, self._dtypes[sent].itemsize)
        return total


def _first(sides: Sequence[Mapping[str, Held]]) -> dict[str, Held]:
    """Return each tensor as the last process that has it describes it."""
    where = {name: own for own in sides for name in own}
    return {name: own[name] for name, own in where.items()}


class _Holders:
    """The distinct regions of a tensor that processes have, and these processes."""

    def __init__(self, regions: Sequence[Region], processes: Sequence[Sequence[int]]) -> None:
        self.regions, self.processes = regions, processes
        self.numbers = {region: number for number, region in enumerate(regions)}
        shape = len(regions), len(regions[0].offsets) if regions else 0
        self._begins = torch.tensor([region.offsets for region in regions], dtype=torch.int64).reshape(shape)
        sizes = torch.tensor([region.sizes for region in regions], dtype=torch.int64).reshape(shape)
        self._ends = self._begins + sizes

    def touching(self, region: Region) -> list[int]:
        """Return the numbers of the regions that have elements in common with one."""
        if not region.offsets or len(self.regions) < 2:
            return [number for number, each in enumerate(self.regions) if region.common(each) is not None]
        begin = torch.tensor(region.offsets)
        end = begin + torch.tensor(region.sizes)
        found: list[int] = ((self._begins < end) & (self._ends > begin)).all(1).nonzero().flatten().tolist()
        return found


def _text(region: Region) -> str:
    return f"[{', '.join(f'{begin}:{begin + size}' for begin, size in zip(*region))}]"


def _check_same(name: str, needed: Held, sent: Held) -> None:
    if needed.shape != sent.shape:
        raise RuntimeProgramError(
            f"{name} is {list(sent.shape)} where it is sent, and {list(needed.shape)} where it is received"
        )
    if not may_become(sent.dtype, needed.dtype, needed.rounds):
        raise RuntimeProgramError(
            f"{name} is {_dtype(sent)} where it is sent, and {_dtype(needed)} where it is received, and trained there: it would be rounded"
        )


def _dtype(held: Held) -> str:
    return str(held.dtype).removeprefix("torch.")


# ---- values ------------------------------------------------------------------------------------------------------

View = Callable[[str, Region], Tensor]
"""Returns the values that a process has of a region of a tensor, which is inside one of its boxes."""


def view_of(entries: Mapping[str, Entry]) -> View:
    """Return what views this process's entries."""

    def view(name: str, region: Region) -> Tensor:
        return region.of(next(box for box in entries[name].boxes if region.common(region_of(box)) == region))

    return view


def put(entry: Entry, region: Region, values: Tensor) -> None:
    """Give all of this process's copies of a region these values."""
    for box in entry.boxes:
        inside = region.common(region_of(box))
        if inside is not None:
            inside.of(box).copy_(inside.of(Box(region.offsets, values)))


@torch.no_grad()
def fill(entries: Mapping[str, Entry], moves: Iterable[Move], view: View) -> None:
    """Give this process's entries what it has itself of them; the padding next to their boxes becomes zero."""
    for entry in entries.values():
        for tensor in entry.tensors:
            if sum(box.values.numel() for box in entry.boxes) < sum(each.numel() for each in entry.tensors):
                tensor.zero_()
    for move in moves:
        put(entries[move.received], move.region, view(move.sent, move.region))
