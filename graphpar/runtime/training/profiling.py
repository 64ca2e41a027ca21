"""What a loop is watched with: a trace of some steps, a record of a GPU's allocations, and garbage collected at chosen steps.

--profile 10-12             profile/rank0.json, ...      torch.profiler's, for Perfetto or chrome://tracing
--memory-snapshot FOLDER    FOLDER/rank0.pickle, ...     for pytorch.org/memory_viz; also where a step fails
--gc-every N                no other collections, so that ranks don't pause at different times
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from graphpar.runtime.errors import RuntimeProgramError

RECORDED = 100_000
"""How many of the last allocations and frees a snapshot has at most."""


class Instruments:
    """Those that the arguments of a script name, from the first step of its loop until it ends.

    Raises:
        RuntimeProgramError: a memory snapshot of a CPU.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self._steps: tuple[int, int] | None = args.profile
        self._traces: Path = args.profile_folder
        self._snapshots: Path | None = args.memory_snapshot
        self._every: int | None = args.gc_every
        self._on_gpu = device.type == "cuda"
        if self._snapshots is not None and not self._on_gpu:
            raise RuntimeProgramError("--memory-snapshot records allocations on GPUs, but these ranks are on CPUs")
        self._profile: Any = None
        self._collects = False

    def open(self) -> None:
        """Begin."""
        if self._snapshots is not None:
            torch.cuda.memory._record_memory_history(max_entries=RECORDED)  # type: ignore[no-untyped-call]
        if self._every is not None and gc.isenabled():
            self._collects = True
            gc.disable()

    def begin(self, step: int) -> None:
        """Begin a step."""
        if self._steps is None or not self._steps[0] <= step <= self._steps[1]:
            return
        if self._profile is None:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
            self._profile = profile(activities=activities)
            self._profile.start()
        else:
            self._profile.step()

    def end(self, step: int) -> None:
        """End a step."""
        if self._steps is not None and step == self._steps[1]:
            self._write_trace()
        if self._every is not None and (step + 1) % self._every == 0:
            gc.collect()

    def _write_trace(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile.export_chrome_trace(str(_file(self._traces, "json")))
            self._profile = self._steps = None

    def close(self) -> None:
        """Write what there is, also after an error."""
        self._write_trace()
        if self._snapshots is not None:
            torch.cuda.memory._dump_snapshot(str(_file(self._snapshots, "pickle")))
            torch.cuda.memory._record_memory_history(enabled=None)  # type: ignore[no-untyped-call]
        if self._collects:
            gc.enable()


def _file(folder: Path, suffix: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"rank{dist.get_rank()}.{suffix}"
