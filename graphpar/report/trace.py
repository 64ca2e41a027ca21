"""The spans of a step, and as a Chrome trace: what each pp group does at every moment, one span after the other.

Timeline ──step_spans──► spans that fill the step of each row ──► the page's timeline
         └─beside──────► communication that runs beside them and costs no time ──chrome_trace──► ui.perfetto.dev, chrome://tracing

A row is a pp group: the ranks that run the same stages. Their spans are of any one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphpar.cost_models.timelines import StageEstimate
from graphpar.errors import GraphparError
from graphpar.schedules.action_table import KINDS, STATE, Action
from graphpar.schedules.simulation import CLOSINGS, Segment, Span, Timeline

_SENDING = ("F", "B", "I")
COLLECTIVE, TRANSFER, IDLE = "collective", "transfer", "idle"
"""Kinds of spans besides those of actions (:data:`graphpar.schedules.action_table.KINDS`) and of the end of a step (:data:`CLOSINGS`)."""


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
    cells: dict[tuple[int, int], list[Span]] = {}  # by row and step: the parts of a pair wait, and send, together
    for number, row in enumerate(timeline.spans):
        for span in row:
            cells.setdefault((number, span.step), []).append(span)
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


def lanes(timeline: Timeline, stages: Sequence[StageEstimate]) -> tuple[tuple[StepSpan, ...], ...]:
    """Return for each row all of its collectives, hidden or not: those of an action one after the other up to its end, though they are
    spread over it, and those around actions that :func:`beside` and the end of the step have."""
    rows = []
    for number, row in enumerate(timeline.spans):
        found: list[StepSpan] = []
        for span in row:
            inside = stages[span.action.stage].collectives_s(span.action.kind)
            start = span.end - sum(inside.values())
            for axis, seconds in inside.items():
                begin, end = max(span.start, start), start + seconds
                found += [StepSpan(COLLECTIVE, begin, end, span.action, axis, span.step)] if end > begin else []
                start = end
        around = (*timeline.beside[number], *timeline.closing[number]) if timeline.closing else ()
        found += [_closing(segment) for segment in around if segment.axis]
        rows.append(tuple(found))
    return tuple(rows)


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


# ---- Chrome trace ----------------------------------------------------------------------------------------------


def chrome_trace(timeline: Timeline, names: Sequence[str] | None = None, scale: float | None = None) -> dict[str, Any]:
    """Convert ``timeline`` to the Trace Event Format, for ``json.dump``: a slice for each span, and an arrow from an action to the one on
    another row that uses its result (complete events ``X``, flow events ``s`` and ``f``, metadata ``M``; times in microseconds). What
    runs beside these and costs no time has a row of its own.

    Args:
        names: of the ranks' rows; ``rank 0`` and so on by default.
        scale: microseconds a unit of the timeline's times, so 1e6 for seconds. Without it the times are only relative:
            the step is drawn as one second long, and the metadata say so.
    """
    rows = step_spans(timeline)
    names = [f"rank {rank}" for rank in range(len(rows))] if names is None else names
    if len(names) != len(rows):
        raise GraphparError(f"{len(names)} names for the rows of {len(rows)} ranks; give one a rank")
    factor = scale if scale is not None else 1e6 / timeline.length if timeline.length > 0 else 1.0
    events: list[dict[str, Any]] = []
    for row, (name, spans) in enumerate(zip(names, rows)):
        events += _named(row, name, 2 * row)
        events += [_slice(span, row, factor) for span in spans]
    for row, spans in enumerate(beside(timeline), len(rows)):
        if spans:
            number = row - len(rows)
            events += _named(row, f"{names[number]}, beside", 2 * number + 1)
            events += [_slice(span, row, factor) for span in spans]
    return {
        "traceEvents": events + _arrows(timeline, factor),
        "displayTimeUnit": "ms",
        "otherData": {
            "times": "relative" if scale is None else "seconds",
            "bubble": timeline.bubble,
            "makespan": timeline.makespan,
            "length": timeline.length,
        },
    }


def _named(row: int, name: str, place: int) -> list[dict[str, Any]]:
    """Return the metadata of a row: its name, and its place among the rows."""
    common = {"ph": "M", "pid": 0, "tid": row}
    return [
        {"name": "thread_name", "args": {"name": name}, **common},
        {"name": "thread_sort_index", "args": {"sort_index": place}, **common},
    ]


def _slice(span: StepSpan, row: int, factor: float) -> dict[str, Any]:
    kind, action = span.kind, span.action
    details: dict[str, Any] = {"axis": span.axis} if span.axis else {}
    if kind == COLLECTIVE:
        details["action"] = str(action)
    elif action is not None:
        whose = {} if kind in STATE else {"microbatch": action.microbatch}
        details |= {"stage": action.stage, **whose, "step": span.step}
    category = "wait" if kind in (IDLE, TRANSFER) else KINDS[kind][1] if kind in KINDS else kind
    name = {IDLE: "idle", TRANSFER: "waits for a transfer"}.get(kind, span.name)
    times = {"ts": span.start * factor, "dur": span.length * factor}
    return {"name": name, "cat": category, "ph": "X", **times, "pid": 0, "tid": row, "args": details}


def _arrows(timeline: Timeline, factor: float) -> list[dict[str, Any]]:
    """Return a flow for each transfer, from the start of the sending slice to the start of the receiving one, as viewers want."""
    starts = {
        (span.action.stage, span.action.kind == "F", span.action.microbatch): span.start
        for row in timeline.spans
        for span in row
        if span.action.kind in ("F", "B", "I")
    }
    events = []
    for number, sent in enumerate(timeline.transfers):
        action, forward = sent.action, sent.action.kind == "F"
        used = starts.get((action.stage + (1 if forward else -1), forward, action.microbatch))
        if used is None:
            continue
        common = {
            "name": "activations" if forward else "gradients",
            "cat": "transfer",
            "id": number,
            "pid": 0,
            "args": {"start": sent.start * factor, "dur": (sent.end - sent.start) * factor},
        }
        begin = starts[action.stage, forward, action.microbatch]
        events.append({**common, "ph": "s", "ts": begin * factor, "tid": sent.sender})
        events.append({**common, "ph": "f", "bp": "e", "ts": used * factor, "tid": sent.receiver})
    return events
