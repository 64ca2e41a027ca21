"""Programs with ``expert_room``: a batch is computed without a wait in each layer, and again with one if rows had no room.

expert_rows.note_lacking(flag) ──► forward and backward ──► the flag's maximum over all ranks, read once
                                                              0: that is the batch
                                                              1: buffers as before, gradients dropped, note_lacking(None), once more
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphpar.runtime.debugging import lone_group
from graphpar.runtime.manifest import Manifest

T = TypeVar("T")


class ExpertRoom:
    """Runs batches; those of a program without ``expert_room`` once, as usual.

    Attributes:
        repeated: how many batches were computed again.
    """

    def __init__(self, program: Manifest, package: str, stages: Sequence[nn.Module], device: torch.device) -> None:
        self.repeated = 0
        self._room, self._stages = program.expert_room, stages
        self._lacking: Tensor | None = None
        if program.expert_room is not None:
            self._expert_rows: Any = importlib.import_module(f"{package}.expert_rows")
            self._lacking = torch.zeros((), dtype=torch.int32, device=device)
            self._expert_rows.note_lacking(self._lacking)

    def run(self, compute: Callable[[], T], forget: Callable[[], None]) -> T:
        """Compute a batch, and once more with room for all rows if a rank had too little; a collective call, which waits for the device.

        Args:
            forget: is called before the second time; it forgets all that the first has left but buffers.
        """
        if self._lacking is None:
            return compute()
        buffers = [buffer for stage in self._stages for buffer in stage.buffers()]
        before = [buffer.clone() for buffer in buffers]
        found = compute()
        if not lone_group.is_alone():
            dist.all_reduce(self._lacking, dist.ReduceOp.MAX)
        if not self._lacking.item():
            return found
        self._lacking.zero_()
        del found
        with torch.no_grad():
            for buffer, value in zip(buffers, before):
                buffer.copy_(value)
        forget()
        if not self.repeated and (lone_group.is_alone() or dist.get_rank() == 0):
            warnings.warn(
                f"a rank had more rows of its experts than expert_room={self._room} times the mean, so the batch is computed again, with a "
                "wait for the device in each layer; a larger room avoids it. pipeline.repeated_steps counts such batches",
                stacklevel=2,
            )
        self.repeated += 1
        with self.waiting():
            return compute()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Have each layer wait for the device, and make room for all rows."""
        if self._lacking is None:
            yield
            return
        self._expert_rows.note_lacking(None)
        try:
            yield
        finally:
            self._expert_rows.note_lacking(self._lacking)
