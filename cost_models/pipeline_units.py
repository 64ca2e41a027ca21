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

from graphpar.cost_models.workload import Size, Work
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

    @staticmethod
    def through(first: float, second: float) -> Bytes:
        """Return the line through the bytes at both of ``ROWS``."""
        slope = (second - first) / (ROWS[1] - ROWS[0])
        return Bytes(first - slope * ROWS[0], slope)


@dataclass(frozen=True)
class UnitMemory:
    """The fields of :class:`graphpar.cost_models.activation_memory.Reach`, for every microbatch size."""

    inside: Bytes
    shared: Bytes
    given: Bytes
    received: Bytes
    sent: Bytes
    passed: Bytes
    held: bool
    forward: Bytes
    backward: Bytes


@dataclass(frozen=True)
class Held:
    """Parameters of a unit whose gradients are partial on the same ``axes``, or one that is ``tied`` to another unit's: a stage holds
    that once.

    ``copied``: the bytes of an element of the copy that a step makes of them, in another dtype; 0: none.
    """

    axes: tuple[str, ...]
    elements: int
    nbytes: int
    itemsize: int
    trained: bool
    tied: str | None = None
    copied: int = 0


class UnitClass:
    """The work and memory that equal units share.

    Attributes:
        sends: for each value that crosses to the next unit, its bytes, and whether a gradient comes back.
        again: the forward work that its blocks repeat in the backward.
    """

    def __init__(
        self,
        work: Work,
        sends: tuple[tuple[Size, bool], ...],
        measure: Callable[[], UnitMemory],
        again: Work | None = None,
    ) -> None:
        self.work, self.sends, self._measure, self.again = work, sends, measure, again or Work()

    @cached_property
    def memory(self) -> UnitMemory:
        """The memory, measured on first use."""
        return self._measure()


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
    stage: Stage = field(repr=False)


def joined(units: Sequence[Unit], rows: int) -> tuple[int, int, int, int, int]:
    """Return the bytes of a microbatch of a stage of ``units``: (kept, forward, backward, sent, received).

    ``forward`` and ``backward`` are needed on top of ``kept`` while they run.
    """
    inside = sum(unit.kind.memory.inside.at(rows) for unit in units)
    shared = max((unit.kind.memory.shared.at(rows) for unit in units), default=0)
    between = sum(joint(before.kind.memory, after.kind.memory, rows) for before, after in itertools.pairwise(units))
    sent = units[-1].kind.memory.sent.at(rows)
    forward = max(unit.kind.memory.forward.at(rows) for unit in units)
    backward = max(unit.kind.memory.backward.at(rows) for unit in units)
    return inside + shared + between + sent, forward, backward, sent, units[0].kind.memory.received.at(rows)


def joint(before: UnitMemory, after: UnitMemory, rows: int) -> int:
    """Return the bytes kept of the values between two units of a stage: all if the first needs them, else what the next needs."""
    sent = before.passed.at(rows)
    return sent if before.held else min(sent, after.given.at(rows))
