"""Measure while other processes use little of the machine, as the kernel counts (``/proc/stat``)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from graphpar.runtime.distributed import Ranks, gather_objects

OTHERS = 0.12
"""The share of the cores that other processes may use while something is measured."""
PEEK_S = 0.1
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
"""In which the kernel counts what a core did: as much of each is not held against others."""
_Result = TypeVar("_Result")


class Disturbed(Exception):
    """Others use the machine, and there is no time left to wait."""


class Watch:
    """Repeats measurements during which other processes used more than ``OTHERS`` of the cores, for ``patience_s`` seconds in all.

    After that the least disturbed result counts, or with ``gives_up`` :class:`Disturbed` is raised. Every method is a
    collective call of all ranks, all on one machine.
    """

    def __init__(self, ranks: Ranks, patience_s: float, gives_up: bool = False) -> None:
        self.ranks, self.patience_s, self.gives_up = ranks, patience_s, gives_up
        self.measured = self.disturbed = 0

    def undisturbed(self, call: Callable[[], _Result]) -> _Result:
        """Return the result of the least disturbed run of ``call``, of the same run on every rank."""
        self.measured += 1
        began = time.monotonic()
        least, best = float("inf"), None
        while True:
            result, others, patient = self._watched(call)
            if others < least:
                least, best = others, result
            if least > OTHERS and patient:
                self._until_quiet(began)
                self.patience_s -= time.monotonic() - began
                began = time.monotonic()
                continue
            self.disturbed += least > OTHERS
            if least > OTHERS and self.gives_up:
                raise Disturbed
            return best  # type: ignore[return-value]

    def _watched(self, call: Callable[[], _Result]) -> tuple[_Result, float, bool]:
        """Return the result, the share of the cores that others used meanwhile, and whether there is patience left."""
        dist.barrier()
        began, worked, busy = time.perf_counter(), time.process_time(), busy_s()
        result = call()
        dist.barrier()
        taken = time.perf_counter() - began
        found = gather_objects((time.process_time() - worked, busy_s() - busy, taken, self.patience_s > 0))
        _, everyone, taken, patient = found[0]
        return result, (everyone - sum(own for own, *_ in found)) / (taken * _cores()) - _TICK_S / taken, patient

    def _until_quiet(self, began: float) -> None:
        if self.ranks.rank == 0:
            while time.monotonic() - began < self.patience_s:
                before = busy_s()
                time.sleep(PEEK_S)
                if busy_s() - before <= OTHERS * PEEK_S * _cores():
                    break
        dist.barrier()


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def busy_s() -> float:
    """Return the seconds that this process's cores have been busy since boot; 0 where the kernel doesn't say."""
    file = Path("/proc/stat")
    if not file.is_file():
        return 0.0
    ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    for name, *counts in (line.split() for line in file.read_text(encoding="utf-8").splitlines()):
        if name in ours:
            user, nice, system, _, _, interrupts, soft, *_ = map(int, counts)
            ticks += user + nice + system + interrupts + soft
    return ticks * _TICK_S
