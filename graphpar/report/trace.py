"""A timeline as a Chrome trace, for chrome://tracing and ui.perfetto.dev.

One row for each rank with a slice for each action, and an arrow from an action to the one on another rank that uses its
result (Trace Event Format: complete events ``X``, flow events ``s`` and ``f``, metadata ``M``; times in microseconds).
Collectives inside of an action are slices below its end, one an axis, though they are spread over it. After the actions
come all-reduces of gradients and the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from graphpar.errors import GraphparError
from graphpar.schedules.simulation import CLOSINGS, Segment, Span, Timeline
from graphpar.schedules.table import KINDS, STATE


def chrome_trace(timeline: Timeline, names: Sequence[str] | None = None, scale: float | None = None) -> dict[str, Any]:
    """Convert ``timeline`` to the Trace Event Format, for ``json.dump``.

    Args:
        names: of the ranks' rows; ``rank 0`` and so on by default.
        scale: microseconds a unit of the timeline's times, so 1e6 for seconds. Without it the times are only relative:
            the step is drawn as one second long, and the metadata say so.
    """
    if not timeline.spans and timeline.makespan > 0:
        raise GraphparError("a timeline without spans has nothing to trace; simulate it with spans=True")
    names = [f"rank {rank}" for rank in range(len(timeline.spans))] if names is None else names
    if len(names) != len(timeline.spans):
        raise GraphparError(f"{len(names)} names for the rows of {len(timeline.spans)} ranks; give one a rank")
    factor = scale if scale is not None else 1e6 / timeline.length if timeline.length > 0 else 1.0
    events: list[dict[str, Any]] = []
    for rank, (name, row) in enumerate(zip(names, timeline.spans)):
        place = {"ph": "M", "pid": 0, "tid": rank}
        events.append({"name": "thread_name", "args": {"name": name}, **place})
        events.append({"name": "thread_sort_index", "args": {"sort_index": rank}, **place})
        for span in row:
            events += [_action(span, rank, factor), *_collectives(span, rank, factor)]
    for rank, closing in enumerate(timeline.closing):
        events += [_segment(segment, rank, factor) for segment in closing]
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


def _slice(rank: int, name: str, category: str, start: float, seconds: float) -> dict[str, Any]:
    """Return a slice in the row of ``rank``; ``start`` and ``seconds`` are in microseconds."""
    return {"name": name, "cat": category, "ph": "X", "ts": start, "dur": seconds, "pid": 0, "tid": rank}


def _action(span: Span, rank: int, factor: float) -> dict[str, Any]:
    action, seconds = span.action, (span.end - span.start) * factor
    event = _slice(rank, str(action), KINDS[action.kind][1], span.start * factor, seconds)
    whose = {} if action.kind in STATE else {"microbatch": action.microbatch}
    return event | {"args": {"stage": action.stage, **whose, "step": span.step}}


def _collectives(span: Span, rank: int, factor: float) -> Iterator[dict[str, Any]]:
    """Yield the collectives inside of an action, drawn at its end."""
    start = span.end - sum(seconds for _, seconds in span.collectives)
    for axis, seconds in span.collectives:
        event = _slice(rank, f"{axis} collectives", "collective", start * factor, seconds * factor)
        yield event | {"args": {"axis": axis, "action": str(span.action)}}
        start += seconds


def _segment(segment: Segment, rank: int, factor: float) -> dict[str, Any]:
    seconds = (segment.end - segment.start) * factor
    return _slice(rank, CLOSINGS[segment.kind][1], segment.kind, segment.start * factor, seconds)


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
