"""Units: the smallest parts that stages can be made of, each with its work and its memory, symbolic in the batch.

    lowered program ──every legal split point──► units ──equal ones share a kind──► Work, Memory of a kind
                                                   │
                        stage = a run of units ◄───┘    embedding | layer 0 | layer 1 | ... | norm and head

A unit begins where a stage may begin: before and after blocks, or where there are few, before other modules with parameters. The work
and memory of a stage are the sum over its units, except for values that every stage recomputes (masks, rotary tables), which a stage
has once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from graphpar.cost_models.work import Size, Work
from graphpar.ir.split_points import SplitAt
from graphpar.ir.stage import Stage

ROWS = (2, 3)
"""Microbatch sizes that lines are fitted through; not 1, since torch makes fewer copies where a dim has one element."""


@dataclass(frozen=True)
class Bytes:
    """``fixed + per_row * rows``."""

    fixed: float = 0.0
    per_row: float = 0.0

    def at(self, rows: int) -> int:
        """Return the bytes for ``rows``."""
        return max(0, round(self.fixed + self.per_row * rows))

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.fixed + other.fixed, self.per_row + other.per_row)

    @staticmethod
    def through(first: float, second: float) -> Bytes:
        """Return the line through the bytes at both of ``ROWS``."""
        slope = (second - first) / (ROWS[1] - ROWS[0])
        return Bytes(first - slope * ROWS[0], slope)


@dataclass(frozen=True)
class UnitMemory:
    """A :class:`Reach` for every microbatch size."""

    inside: Bytes
    shared: Bytes
    given: Bytes
    received: Bytes
    sent: Bytes
    passed: Bytes
    held: bool
    forward: Bytes
    backward: Bytes
    growth: Bytes = Bytes()
    splits: bool = False
    for_weights: Bytes = Bytes()
    outer: Bytes = Bytes()
    freed: Bytes = Bytes()
    input_half: Bytes = Bytes()
    weight_half: Bytes = Bytes()
    moved: Bytes = Bytes()


@dataclass(frozen=True)
class Held:
    """Parameters of a unit whose gradients are partial on the same ``axes``, or one that is ``tied`` to another unit's: a stage holds
    that once.

    ``copied``: the bytes of an element of the copy that a step makes of them, in another dtype; 0: none. ``working``: those in which they
    are stored whole where ranks update pieces of main values; 0: as they are updated. ``apart``: the axes of replicas
    that hold different experts, over which these gradients are not summed. ``backward``: False for those that no backward reads.
    ``count``: how many they are. ``largest``: the elements of the largest of them. ``rest``: these are gathered with the stage, not with
    a unit.
    """

    axes: tuple[str, ...]
    elements: int
    nbytes: int
    itemsize: int
    trained: bool
    tied: str | None = None
    copied: int = 0
    apart: tuple[str, ...] = ()
    backward: bool = True
    largest: int = 0
    working: int = 0
    rest: bool = False
    count: int = 1

    def summed_over(self, replicas: Sequence[str]) -> tuple[str, ...]:
        """Return the axes over which these gradients are summed, where ``replicas`` have several ranks."""
        return (*(axis for axis in replicas if axis not in self.apart), *self.axes)


class Reach(NamedTuple):
    """The memory of one microbatch of a unit, in bytes.

    Attributes:
        inside: not freed between forward and backward, except for the following.
        shared: kept of values that every stage recomputes; a stage has them once, however many of its units need them.
        given: kept of what it receives; where the sender is in the same stage and ``held``, that keeps it already.
        received: all that it receives.
        sent: new storages that it sends.
        passed: the same without those that only relay what it received, which are not copied inside a stage.
        held: whether autograd keeps what is sent.
        forward, backward: needed on top of what is kept, while it runs.
        growth: how much more than ``backward`` that is with the gradients of parameters that it has made so far, in their dtype.
        splits: whether its backward can run in halves, for inputs and later for weights. Then these are there:
        for_weights: gradients that the first half makes and keeps for the second.
        outer: kept, too, of the gradients that it is given.
        freed: of what the forward kept, by the first half.
        input_half: needed on top of what is kept, with ``for_weights``; ``weight_half``: on top of what is left then.
        moved: kept in the memory of the host instead, see :mod:`graphpar.cost_models.offloaded_units`.
    """

    inside: int
    shared: int
    given: int
    received: int
    sent: int
    passed: int
    held: bool
    forward: int
    backward: int
    growth: int = 0
    splits: bool = False
    for_weights: int = 0
    outer: int = 0
    freed: int = 0
    input_half: int = 0
    weight_half: int = 0
    moved: int = 0


@dataclass(frozen=True)
class Repeated:
    """What the blocks of a unit run again in the backward.

    Attributes:
        work: of their forwards.
        hooked: operators, as torch dispatches them, of the repetitions.
        watched: operators of blocks that keep some results, in the forward and in the repetition.
    """

    work: Work = field(default_factory=Work)
    hooked: int = 0
    watched: tuple[int, int] = (0, 0)

    def __add__(self, other: Repeated) -> Repeated:
        first, again = (own + others for own, others in zip(self.watched, other.watched))
        return Repeated(self.work + other.work, self.hooked + other.hooked, (first, again))


class UnitClass:
    """The work and memory that equal units share.

    Attributes:
        sends: for each value that crosses to the next unit, its bytes, and whether a gradient comes back.
        again: what its blocks repeat in the backward.
        moves: whether its blocks keep in the memory of the host what they keep.
    """

    def __init__(
        self,
        work: Work,
        sends: tuple[tuple[Size, bool], ...],
        measure: Callable[[], UnitMemory],
        again: Repeated | None = None,
        moves: bool = False,
    ) -> None:
        self.moves = moves
        self.work, self.sends, self._measure, self.again = work, sends, measure, again or Repeated()
        self._at: dict[int, Reach] = {}

    @cached_property
    def memory(self) -> UnitMemory:
        """The memory, measured on first use."""
        return self._measure()

    @property
    def is_measured(self) -> bool:
        """Whether its memory was measured."""
        return "memory" in self.__dict__

    def bytes_at(self, rows: int) -> Reach:
        """Return the memory for microbatches of ``rows``."""
        if rows not in self._at:
            values = (getattr(self.memory, name) for name in Reach._fields)
            self._at[rows] = Reach._make(each.at(rows) if isinstance(each, Bytes) else each for each in values)
        return self._at[rows]


@dataclass(frozen=True, eq=False)
class Unit:
    """A part of a program between two split points."""

    split_point: SplitAt | None
    """Where it begins; None for the first."""
    position: int
    """The index of its first node in the root graph."""
    modules: tuple[str, ...]
    kind: UnitClass
    held: tuple[Held, ...]
    buffers: Mapping[str, int]
    """Bytes of each buffer and constant."""
    inputs: Mapping[str, Bytes]
    """Bytes of each of the program's inputs that it takes."""
    cache: int
    """Bytes of the keys and values that it keeps of a group of sequences in generation."""
    stage: Stage = field(repr=False)
    joins: bool = False
    """Whether its parameters are gathered with those of the unit before it."""
    has_blocks: bool = False
    """Whether it calls a block."""
    results: tuple[Size, ...] | None = None
    """Bytes of each output of a program for inference that replicas and microbatches are joined in; None but for its last unit."""

    def returned(self, rows: int) -> int:
        """Return the bytes of the gradients of what a microbatch sends to the next unit."""
        return sum(round(size.at(rows)) for size, gradient in self.kind.sends if gradient)


class StageBytes(NamedTuple):
    """The bytes of a microbatch of a stage; ``forward`` and ``backward`` are needed on top of ``kept`` while they run."""

    kept: int
    forward: int
    backward: int
    sent: int
    received: int


class HalvesBytes(NamedTuple):
    """The bytes of a microbatch of a stage whose backward runs in halves: ``left`` from the first to the second, none where the first does
    all, else never fewer than are kept; and what is needed on top while a forward or a whole backward runs, the first half, and the
    second."""

    left: int
    on_top: tuple[int, int, int]


class JoinedUnits:
    """The bytes of any run of ``units`` for microbatches of ``rows``.

    Attributes:
        at: of each unit.
        between: kept of the values between each unit and the next: all if the first needs them, else what the next needs.
    """

    def __init__(self, units: Sequence[Unit], rows: int) -> None:
        self.at = [unit.kind.bytes_at(rows) for unit in units]
        self.between = [
            before.passed if before.held else min(before.passed, after.given)
            for before, after in itertools.pairwise(self.at)
        ]
        columns = list(zip(*self.at))
        self._shared, self._forward, self._backward = (
            columns[Reach._fields.index(name)] for name in ("shared", "forward", "backward")
        )
        self._inside = [0, *itertools.accumulate(each.inside for each in self.at)]
        self._between = [0, *itertools.accumulate(self.between)]
        self._moved = [0, *itertools.accumulate(each.moved for each in self.at)]

    def moved(self, first: int, after: int) -> int:
        """Return the bytes that the units from ``first`` up to ``after``, exclusive, keep in the memory of the host."""
        return self._moved[after] - self._moved[first]

    def freed(self, place: int, inputs_only: bool = False) -> int:
        """Return the bytes that the backward of a unit frees where all are in one stage; ``inputs_only``: of what a unit receives."""
        at, last = self.at[place], place + 1 == len(self.at)
        after = at.sent if last else self.between[place] if at.held else 0
        if inputs_only:
            return (at.received if place else 0) + (at.sent if last else 0)
        return at.inside + after + (self.between[place - 1] if place and not self.at[place - 1].held else 0)

    def stage(self, first: int, after: int) -> StageBytes:
        """Return the bytes of the units from ``first`` up to ``after``, exclusive."""
        run, sent = slice(first, after), self.at[after - 1].sent
        inside = self._inside[after] - self._inside[first]
        between = self._between[after - 1] - self._between[first]
        return StageBytes(
            kept=inside + max(self._shared[run]) + between + sent,
            forward=max(self._forward[run]),
            backward=max(self._backward[run]),
            sent=sent,
            received=self.at[first].received,
        )

    def halves(self, first: int, after: int) -> HalvesBytes:
        """Return the bytes of these units where the backward runs in halves; where torch can't split it, the first does all, but in the
        first stage the second."""
        stage, units = self.stage(first, after), self.at[first:after]
        whole = max(stage.forward, stage.backward)
        if not first or not all(unit.splits for unit in units):
            return HalvesBytes(0 if first else stage.kept, (whole, stage.backward, stage.backward))
        *others, last = units
        inputs, more = max(stage.backward, last.input_half), last.for_weights - last.freed
        for unit in reversed(others):
            inputs = max(inputs, more + unit.outer + unit.input_half)
            more += unit.outer + unit.for_weights
        return HalvesBytes(stage.kept + max(0, more), (whole, inputs, max(unit.weight_half for unit in units)))
