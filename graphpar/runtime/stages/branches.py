"""Branches on values: a program has one of each, that of its example inputs, and the buffers in which its stages note another.

self.other_branch_0.logical_or_(padding_mask.any())      in each microbatch, on the device, on each rank by its own rows
step ──► one maximum over all ranks ──► an error on all of them, before an optimizer steps
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphpar.runtime.debugging import lone_group
from graphpar.runtime.errors import AgreedError
from graphpar.runtime.manifest import Manifest

SHOWN = 3
"""How many branches an error names."""


class Branches:
    """The flags of this rank's stages."""

    def __init__(self, program: Manifest, stages: Sequence[nn.Module], device: torch.device) -> None:
        self._asked, self._device = list(program.branches.values()), device
        place = {name: i for i, name in enumerate(program.branches)}
        self._flags: list[tuple[int, Tensor]] = [
            (place[name], buffer) for stage in stages for name, buffer in stage.named_buffers() if name in place
        ]

    def check(self) -> None:
        """Look whether a branch was another one on any rank since the last look; a collective call, which waits for the device.

        Raises:
            AgreedError: on all ranks, where one was.
        """
        if not self._asked:
            return
        others = torch.zeros(len(self._asked), dtype=torch.int32, device=self._device)
        for i, flag in self._flags:
            others[i] = flag
        if not lone_group.is_alone():
            dist.all_reduce(others, dist.ReduceOp.MAX)
        found = [asked for asked, other in zip(self._asked, others.tolist()) if other]
        if not found:
            return
        for _, flag in self._flags:
            flag.zero_()
        more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise AgreedError(
            f"a branch on values is not that of the example inputs: {'; '.join(found[:SHOWN])}{more}. The program has no other branch, so "
            "the step ends before a parameter changes. Leave such batches out, or write both branches with torch.where and compile again."
        )
