"""Pipeline schedules: a record each, and their names.

    name ──canonical_name──► Schedule ──► the schedule of torch that runs it, when it is legal, on which ranks its stages are

What every rank runs is in :mod:`graphpar.schedules`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from graphpar.runtime.errors import GraphparError, near_match


@dataclass(frozen=True, slots=True)
class MicrobatchRule:
    """A rule for microbatch counts, from (pp, stages, microbatches), with its reason."""

    accepts: Callable[[int, int, int], bool]
    reason: Callable[[int, int, int], str]


def _rounds(pp: int, microbatches: int) -> int:
    return max(1, microbatches // pp)


ANY_COUNT = MicrobatchRule(lambda pp, stages, microbatches: True, lambda pp, stages, microbatches: "")
AS_MANY_AS_STAGES = MicrobatchRule(
    lambda pp, stages, microbatches: microbatches >= stages,
    lambda pp, stages, microbatches: (
        f"needs at least as many microbatches as stages, to fill the pipeline: {microbatches} microbatches "
        f"for {stages} stages ({pp} ranks with {stages // pp} each)"
    ),
)
WHOLE_ROUNDS = MicrobatchRule(
    lambda pp, stages, microbatches: microbatches % _rounds(pp, microbatches) == 0,
    lambda pp, stages, microbatches: (
        f"runs in equal rounds, microbatches // ranks of them: {microbatches} microbatches on {pp} ranks are "
        f"{_rounds(pp, microbatches)} rounds, and {microbatches} isn't a multiple of {_rounds(pp, microbatches)}"
    ),
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """One schedule. ``name`` is also what torch's ``get_schedule_class`` takes, where torch has the schedule.

    A schedule without a class in torch runs as a table, which the plan stores.

    ``placement``: ``loop`` gives rank r the stages r, r + pp, ...; ``v`` gives it r and 2 pp - 1 - r.
    ``splits_backward``: whether some backwards run as input part and weight part.
    ``published_stages``: numbers of stages a rank of published runs, which a search tries besides small ones.
    """

    name: str
    torch_class: str | None
    placement: Literal["loop", "v"]
    min_stages: int  # a rank
    max_stages: int | None  # a rank; None is no limit
    default_stages: int  # a rank
    splits_backward: bool
    microbatches: MicrobatchRule
    aliases: tuple[str, ...] = ()
    lead: int | None = None  # for our own tables: how many forwards a rank runs ahead of the next
    published_stages: tuple[int, ...] = ()

    @property
    def searched_stages(self) -> tuple[int, ...]:
        """The numbers of stages a rank that a search tries."""
        return (self.default_stages,) if self.max_stages is not None else (*_FEW, *self.published_stages)


_FEW = (2, 3, 4)
"""Stages a rank to try for schedules that take any number of them."""

# fmt: off
_ROWS = (
    # name, torch's class, placement, stages a rank: least, most, default; split backward; microbatches; aliases; lead
    Schedule("GPipe", "ScheduleGPipe", "loop", 1, 1, 1, False, ANY_COUNT, ("filldrain",)),
    Schedule("1F1B", "Schedule1F1B", "loop", 1, 1, 1, False, AS_MANY_AS_STAGES, ("pipedream",)),
    Schedule("Interleaved1F1B", "ScheduleInterleaved1F1B", "loop", 2, None, 2, False, WHOLE_ROUNDS, ("interleaved",),
             published_stages=(6, 8, 16)),
    Schedule("LoopedBFS", "ScheduleLoopedBFS", "loop", 2, None, 2, False, ANY_COUNT, ("bfs", "breadthfirst")),
    Schedule("InterleavedZeroBubble", "ScheduleInterleavedZeroBubble", "loop", 2, None, 2, True, WHOLE_ROUNDS,
             ("interleavedzb", "izb")),
    Schedule("ZBVZeroBubble", "ScheduleZBVZeroBubble", "v", 2, 2, 2, True, ANY_COUNT, ("zbv",)),
    Schedule("DualPipeV", "ScheduleDualPipeV", "v", 2, 2, 2, True, AS_MANY_AS_STAGES, ("dpv",)),
    Schedule("ZB-H1", None, "loop", 1, 1, 1, True, ANY_COUNT, (), 1),
    Schedule("ZB-H2", None, "loop", 1, 1, 1, True, ANY_COUNT, (), 2),
)
# fmt: on

SCHEDULES: dict[str, Schedule] = {row.name: row for row in _ROWS}


def _fold(name: str) -> str:
    return "".join(character for character in name.lower() if character not in "-_ ")


_SPELLINGS: dict[str, str] = {
    _fold(spelling): row.name for row in _ROWS for spelling in (row.name, row.torch_class or row.name, *row.aliases)
}


def canonical_name(name: str) -> str:
    """Return the name as in :data:`SCHEDULES`, from any case, with or without ``-``, ``_`` and spaces, or an alias."""
    if name in SCHEDULES:
        return name
    folded = _fold(name)
    if folded in _SPELLINGS:
        return _SPELLINGS[folded]
    closest = near_match(folded, [spelling for row in _ROWS for spelling in (_fold(row.name), *row.aliases)])
    for known in SCHEDULES:  # as it is written, not folded
        closest = closest.replace(repr(_fold(known)), repr(known))
    listing = ", ".join(SCHEDULES)
    raise GraphparError(f"There is no schedule {name!r}; the schedules are {listing}.{closest}")


def get_schedule(name: str) -> Schedule:
    """Find a schedule by any of its names.

    Raises:
        GraphparError: there is none; the message has the nearest name.
    """
    return SCHEDULES[canonical_name(name)]
