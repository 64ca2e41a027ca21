"""Units: the smallest pieces that stages can be made of, each with its work and its memory, symbolic in the batch.

    lowered program ──every legal split point──► units ──alike ones are one kind──► Work, Memory of a kind
                                                   │
                        stage = a run of units ◄───┘    embedding | layer 0 | layer 1 | ... | norm and head

Where a unit begins is where a stage may begin: before and after blocks, or where there are few, before other modules with parameters.
What units do and keep adds up to what a stage does and keeps, but for values that all stages compute for themselves (masks, rotary
tables), which are there once in a stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from graphpar.cost_models.workload import Size, Work
from graphpar.ir.plan import Cut
from graphpar.ir.stage import Stage

ROWS = (2, 3)
"""Microbatch sizes that lines are drawn through. 1 is off the lines: torch makes fewer copies where a dim has one element."""


@dataclass(frozen=True)
class Bytes:
    """``fixed + per_row * rows``."""

    fixed: float = 0.0
    per_row: float = 0.0

    def at(self, rows: int) -> int:
        return max(0, round(self.fixed + self.per_row * rows))

    @staticmethod
    def through(first: float, second: float) -> Bytes:
        """The line through what ``ROWS`` have."""
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
    """The parameters of a unit whose gradients are partial on the same ``axes``, or one that is ``tied`` to other units: a stage holds
    it once, however many of its units have it."""

    axes: tuple[str, ...]
    elements: int
    nbytes: int
    itemsize: int
    trained: bool
    tied: str | None = None


class UnitClass:
    """What alike units have in common.

    Attributes:
        sends: of each value that crosses to the next unit: bytes, and whether a gradient comes back.
    """

    def __init__(self, work: Work, sends: tuple[tuple[Size, bool], ...], measure: Callable[[], UnitMemory]) -> None:
        self.work, self.sends, self._measure = work, sends, measure

    @cached_property
    def memory(self) -> UnitMemory:
        """Measured when it is first asked for."""
        return self._measure()


@dataclass(frozen=True, eq=False)
class Unit:
    """One piece."""

    split_point: Cut | None
    """Where it begins; None for the first."""
    position: int
    """The same as an index into the nodes of the root graph."""
    modules: tuple[str, ...]
    kind: UnitClass
    held: tuple[Held, ...]
    buffers: Mapping[str, int]
    """Bytes of each buffer and constant."""
    inputs: Mapping[str, Bytes]
    """Of each of the program's inputs that it takes."""
    stage: Stage = field(repr=False)


def joined(units: Sequence[Unit], rows: int) -> tuple[int, int, int, int, int]:
    """Of units joined to a stage, bytes of a microbatch: (kept, forward, backward, sent, received), the middle two on top of ``kept``."""
    inside = sum(unit.kind.memory.inside.at(rows) for unit in units)
    shared = max((unit.kind.memory.shared.at(rows) for unit in units), default=0)
    between = sum(joint(before.kind.memory, after.kind.memory, rows) for before, after in itertools.pairwise(units))
    sent = units[-1].kind.memory.sent.at(rows)
    forward = max(unit.kind.memory.forward.at(rows) for unit in units)
    backward = max(unit.kind.memory.backward.at(rows) for unit in units)
    return inside + shared + between + sent, forward, backward, sent, units[0].kind.memory.received.at(rows)


def joint(before: UnitMemory, after: UnitMemory, rows: int) -> int:
    """What is kept of the values that one unit of a stage gives to the next: all, if the first wants it, else what the next wants."""
    sent = before.passed.at(rows)
    return sent if before.held else min(sent, after.given.at(rows))
