"""Events of a step, for timelines and tests: one JSON line each, in one file a rank.

    GRAPHPAR_EVENTS=events.jsonl      rank 1 writes events.jsonl.rank1
    {"time": 1.25, "rank": 1, "event": "gather", "unit": "layers.2", "step": 0, "microbatch": 1}

``time`` is in seconds, as this machine's clock has it. A unit is a module path; ``stage_0`` is what is around the blocks
of a stage. Times are those of the host, which runs ahead of an accelerator. Pipelines read the variable when they are
built; all of a process write into one file, which the first of them empties.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any, TextIO

from graphpar.runtime.errors import RuntimeProgramError

VARIABLE = "GRAPHPAR_EVENTS"
EVENTS = {
    "forward": "a unit's forward begins to compute",
    "forward_done": "... has computed",
    "backward": "a unit's backward begins to compute",
    "backward_done": "... has computed",
    "gather": "the all-gather of a unit's parameters starts",
    "gather_wait": "the unit waits for it",
    "free": "gathered parameters are freed",
    "reduce": "a reduction of gradients over ranks starts",
    "reduce_done": "... is waited for",
    "broadcast": "a broadcast of updated parameters starts",
    "broadcast_wait": "a unit waits for it",
}
"""The events, and what they say."""

_file: TextIO | None = None
_now: dict[str, Any] = {}


def read_events(rank: int) -> bool:
    """Open the file that the environment names, and return whether there is one.

    Raises:
        RuntimeProgramError: it cannot be written.
    """
    global _file
    name = os.environ.get(VARIABLE)
    path = f"{name}.rank{rank}" if name else None
    if _file is not None and _file.name != path:
        _file.close()
        _file = None
    if path is not None and _file is None:
        try:
            _file = open(path, "w", buffering=1)  # noqa: SIM115  it stays open
        except OSError as error:
            raise RuntimeProgramError(f"{VARIABLE} is {name}, and {path} cannot be written: {error.strerror}") from None
    _now.clear()
    _now.update(rank=rank)
    return _file is not None


def event(name: str, unit: str | None = None) -> None:
    """Write an event of this step and microbatch."""
    if _file is not None:
        assert name in EVENTS
        line = {"time": time.time(), "rank": _now["rank"], "event": name, "unit": unit}
        _file.write(json.dumps({**line, "step": _now.get("step"), "microbatch": _now.get("microbatch")}) + "\n")


def at(**place: int | None) -> None:
    """Say to which step, and which microbatch of it, the events belong that follow."""
    if _file is not None:
        _now.update(place)
