"""A timeline as a Chrome trace, for chrome://tracing and ui.perfetto.dev.

One row for each pp group with a slice for each span of :func:`graphpar.report.spans.step_spans`, which are those of the page, waits
included, so that the slices of a row add up to the step; and an arrow from an action to the one on another row that uses its
result (Trace Event Format: complete events ``X``, flow events ``s`` and ``f``, metadata ``M``; times in microseconds).
What runs beside these and costs no time has a row of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphpar.errors import GraphparError
from graphpar.report.spans import COLLECTIVE, IDLE, TRANSFER, StepSpan, beside, step_spans
from graphpar.schedules.simulation import Timeline
from graphpar.schedules.table import KINDS, STATE


def chrome_trace(timeline: Timeline, names: Sequence[str] | None = None, scale: float | None = None) -> dict[str, Any]:
    """Convert ``timeline`` to the Trace Event Format, for ``json.dump``.

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
    name = span.name if category != "wait" else {IDLE: "idle", TRANSFER: "waits for a transfer"}[kind]
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
