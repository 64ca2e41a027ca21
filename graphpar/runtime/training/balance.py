"""How rows spread over experts and over the ranks that hold them, counted in a step of the emitted program.

    exchange_of, rank_ends ──rows of each expert, once a layer and microbatch──► Balance ──end_step──► [layers, experts], on the device

A program says where it divides rows by expert (``expert_rows.counters``); nothing is computed that it had not, but the sums here, and
nothing waits for the device before the step's loss is read. Where rows are sent (``dp_expert``) ranks know those of their own experts,
and tell each other once a step, also those of another axis that divides the experts first. What a backward computes again is not counted.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphpar.runtime.axes import AXIS
from graphpar.runtime.distributed import gather_tensors
from graphpar.runtime.groups import Groups


@dataclass(frozen=True)
class Counted:
    """``rows`` [calls, experts]: how many rows each expert had, in each layer and microbatch; ``ranks`` hold equally many experts."""

    rows: Tensor
    ranks: int

    def to_json(self) -> dict[str, Any]:
        """Sum up: rows of each expert and rank, and the most rows of an expert, and of a rank, over the mean, as a mean over layers."""
        rows = self.rows.double()
        by_rank = rows.unflatten(1, (self.ranks, -1)).sum(2)
        return {
            "rows": [int(count) for count in rows.sum(0).tolist()],
            "rank_rows": [int(count) for count in by_rank.sum(0).tolist()],
            "max_over_mean": _max_over_mean(rows),
            "rank_max_over_mean": _max_over_mean(by_rank),
        }


def _max_over_mean(rows: Tensor) -> float:
    """[calls, n]: the largest over the mean of each call that has rows, and the mean of these."""
    some = rows[rows.sum(1) > 0]
    return float((some.amax(1) / some.mean(1)).mean()) if len(some) else 1.0


class Balance:
    """Counts what the experts of this rank's stages get, from now on until it is closed; ``package``: of the emitted program."""

    def __init__(self, groups: Groups, package: str) -> None:
        self._groups = groups
        self._rows: dict[str, list[Tensor]] = {}  # by axis
        self._before: dict[str, int] = {}
        module = sys.modules.get(f"{package}.expert_rows")
        self._counters: list[Any] = [] if module is None else module.counters
        self._counters.append(self._count)

    def begin_step(self) -> None:
        """Forget what was counted since the last step, as in an evaluation."""
        self._rows = {}

    def begin_batch(self) -> None:
        """Note that a batch begins, which may be computed again."""
        self._before = {axis: len(rows) for axis, rows in self._rows.items()}

    def forget_batch(self) -> None:
        """Forget what was counted since the batch began."""
        self._rows = {axis: rows[: self._before.get(axis, 0)] for axis, rows in self._rows.items()}

    def _count(self, axis: str, rows: Tensor) -> None:
        if torch._C._current_graph_task_id() == -1:  # not in a backward, which computes again
            self._rows.setdefault(axis, []).append(rows.detach())

    def end_step(self) -> Counted | None:
        """Return what was counted since the last time; None where this rank's stages divide no rows by expert.

        Layers with different numbers of experts are not counted together: None as well. Ranks of a group call it together.
        """
        found, self._rows = self._rows, {}
        sending = [axis for axis in found if AXIS[axis].exchanges]
        rows = found[(sending or list(found))[0]] if found else []
        if not rows or any(each.shape != rows[0].shape for each in rows):
            return None
        counts, ranks = torch.stack(rows), 1
        for axis in (*sending, *(axis for axis in found if axis not in sending)):
            group = self._groups[axis]
            if group is not None:
                counts = torch.cat(gather_tensors(counts, group), 1) if sending else counts
                ranks *= group.size()
        return Counted(counts, ranks)

    def close(self) -> None:
        """Count no more."""
        if self._count in self._counters:
            self._counters.remove(self._count)
