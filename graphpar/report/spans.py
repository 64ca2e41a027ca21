"""The spans of a step: what each pp group does at every moment of it, one span after the other.

Timeline ──step_spans──► spans that fill the step of each row ──► the page's timeline, the Chrome trace
         └─beside──────► communication that runs beside them and costs no time

A row is a pp group: the ranks that run the same stages. Their spans are of any one of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphpar.errors import GraphparError
from graphpar.schedules.simulation import CLOSINGS, Segment, Span, Timeline
from graphpar.schedules.table import KINDS, STATE, Action

_SENDING = ("F", "B", "I")
COLLECTIVE, TRANSFER, IDLE = "collective", "transfer", "idle"
"""Kinds of spans besides those of actions (:data:`graphpar.schedules.table.KINDS`) and of the end of a step (:data:`CLOSINGS`)."""


@dataclass(frozen=True, slots=True)
class StepSpan:
    """One thing that the ranks of a pp group do, or wait for, in the unit of the timeline.

    Attributes:
        kind: of an action, of a part of the end of the step, or one of the three above.
        action: what runs, or what the collective is part of; None at the end of the step and for waits.
        axis: of the mesh, for communication.
        step: the place of the action in the schedule's table.
    """

    kind: str
    start: float
    end: float
    action: Action | None = None
    axis: str = ""
    step: int = 0

    @property
    def length(self) -> float:
        """How long it takes."""
        return self.end - self.start

    @property
    def name(self) -> str:
        """What it is called in a trace: ``0F1``, ``tp collectives``, ``optimizer``."""
        if self.kind == COLLECTIVE:
            return f"{self.axis} collectives"
        return str(self.action) if self.action is not None else self.words

    @property
    def words(self) -> str:
        """Say what it is: ``stage 0, forward of microbatch 1``, ``tp collectives of 0F1``, ``sum of gradients over dp_shard``."""
        if self.kind == COLLECTIVE:
            return f"{self.axis} collectives, in all, of {self.action}"
        if self.action is not None:
            whose = "" if self.kind in STATE else f" of microbatch {self.action.microbatch}"
            return f"stage {self.action.stage}, {KINDS[self.action.kind][1]}{whose}"
        waits = {TRANSFER: "waits for a transfer between stages", IDLE: "idle: nothing to do yet"}
        over = f" over {self.axis}" if self.axis else ""
        return waits[self.kind] if self.kind in waits else f"{CLOSINGS[self.kind][1]}{over}"


def step_spans(timeline: Timeline) -> tuple[tuple[StepSpan, ...], ...]:
    """Return for each row spans without gaps or overlaps, from 0 to the timeline's length, which is the step's.

    Collectives inside of an action stand after its computation, one span for each axis, though they are spread over it.

    Raises:
        GraphparError: the timeline was simulated without spans.
    """
    if not timeline.spans and timeline.makespan > 0:
        raise GraphparError("a timeline without spans has nothing to show; simulate it with spans=True")
    homes = {span.action.stage: row for row, spans in enumerate(timeline.spans) for span in spans}
    cells = _cells(timeline)  # the parts of a pair wait, and send, together
    ends = {
        _result(span.action): spans[-1].end
        for spans in cells.values()
        for span in spans
        if span.action.kind in _SENDING
    }
    rows = []
    for number, row in enumerate(timeline.spans):
        found: list[StepSpan] = []
        now = 0.0
        for span in row:
            needed = [_needed(each.action) for each in cells[number, span.step]]
            ready = max([now, *(ends[each] for each in needed if each in ends and homes[each[0]] != number)])
            found += _waits(now, min(ready, span.start), span.start)  # a sender may wait for its own message
            found += _parts(span)
            now = span.end
        for segment in timeline.closing[number] if timeline.closing else ():
            found += _waits(now, segment.start, segment.start)
            found.append(_closing(segment))
            now = segment.end
        rows.append((*found, *_waits(now, timeline.length, timeline.length)))
    return tuple(rows)


def beside(timeline: Timeline) -> tuple[tuple[StepSpan, ...], ...]:
    """Return for each row the communication that runs beside its spans and costs no time, where that is known."""
    return tuple(tuple(map(_closing, row)) for row in timeline.beside)


def _cells(timeline: Timeline) -> dict[tuple[int, int], list[Span]]:
    """Return the spans of each cell of the schedule's table, by row and step."""
    found: dict[tuple[int, int], list[Span]] = {}
    for number, row in enumerate(timeline.spans):
        for span in row:
            found.setdefault((number, span.step), []).append(span)
    return found


def _result(action: Action) -> tuple[int, bool, int]:
    return action.stage, action.kind == "F", action.microbatch


def _needed(action: Action) -> tuple[int, bool, int]:
    """Return which result of another stage an action needs."""
    forward = action.kind == "F"
    if action.kind not in _SENDING:
        return -1, forward, -1
    return action.stage + (-1 if forward else 1), forward, action.microbatch


def _waits(start: float, ready: float, end: float) -> list[StepSpan]:
    """Return idle time up to ``ready``, and then the wait for a transfer."""
    waits = StepSpan(IDLE, start, ready), StepSpan(TRANSFER, ready, end)
    return [span for span in waits if span.length > 0]


def _parts(span: Span) -> list[StepSpan]:
    """Return an action's own time, and then its collectives."""
    action, kind = span.action, span.action.kind
    if kind in STATE:
        axis = next((axis for axis, _ in span.collectives), "")
        return [StepSpan(kind, span.start, span.end, action, axis, span.step)]
    start = max(span.start, span.end - sum(seconds for _, seconds in span.collectives))
    found = [StepSpan(kind, span.start, start, action, "", span.step)]
    for place, (axis, seconds) in enumerate(span.collectives):
        end = span.end if place == len(span.collectives) - 1 else min(span.end, start + seconds)
        found.append(StepSpan(COLLECTIVE, start, end, action, axis, span.step))
        start = end
    return found


def _closing(segment: Segment) -> StepSpan:
    return StepSpan(segment.kind, segment.start, segment.end, None, segment.axis)
