"""Delays at named points of a step, so that a race between ranks, or between streams, shows.

    GRAPHPAR_DELAY="after_loss:250,before_reduce:50@rank1"      milliseconds; on all ranks, or on one

A program that waits for what it uses computes the same numbers with any delays. Pipelines read the variable when they
are built; without it a point costs the look at an empty dictionary.
"""

from __future__ import annotations

import os
import re
import time

import torch

from graphpar.runtime.errors import RuntimeProgramError, near_match

VARIABLE = "GRAPHPAR_DELAY"
POINTS = {
    "after_loss": "a forward of the last stage has computed its loss",
    "before_reduce": "gradients are about to be reduced over ranks",
    "before_free": "gathered parameters are about to be freed",
    "before_gather": "parameters are about to be gathered",
    "before_broadcast": "updated parameters are about to be sent to the other ranks",
}
"""The points, and where they are."""

_seconds: dict[str, float] = {}
_device = torch.device("cpu")


def read_delays(rank: int, device: torch.device, ranks: int) -> bool:
    """Read the delays of this one of ``ranks``, which computes on ``device``, from the environment, and return whether there are any.

    Raises:
        RuntimeProgramError: the variable is not as this module says.
    """
    global _device
    _device = device
    _seconds.clear()
    for entry in filter(None, os.environ.get(VARIABLE, "").split(",")):
        found = re.fullmatch(r"\s*(\w+):(\d+(?:\.\d+)?)(?:@rank(\d+))?\s*", entry)
        if found is None or found[1] not in POINTS:
            hint = near_match(found[1], POINTS) if found else ""
            raise RuntimeProgramError(
                f"{VARIABLE} has {entry.strip()!r}; it must be POINT:MILLISECONDS or POINT:MILLISECONDS@rankN, and the points "
                f"are {', '.join(POINTS)}.{hint}"
            )
        if found[3] is not None and int(found[3]) >= ranks:
            raise RuntimeProgramError(f"{VARIABLE} has {entry.strip()!r}, but the ranks are 0 to {ranks - 1}")
        if found[3] is None or int(found[3]) == rank:
            _seconds[found[1]] = _seconds.get(found[1], 0.0) + float(found[2]) / 1000
    return bool(_seconds)


def delay(point: str) -> None:
    """Wait as long as was asked for at ``point``. On CUDA the current stream waits, about so long, and the host goes on: what
    does not wait for this stream runs earlier than it should.
    """
    seconds = _seconds.get(point)
    if seconds is None:
        return
    if _device.type == "cuda":
        rate = getattr(torch.cuda.get_device_properties(_device), "clock_rate", 1_500_000)  # in kHz
        torch.cuda._sleep(int(seconds * rate * 1000))
    else:
        time.sleep(seconds)
