"""What all ranks decide together between steps: whether to update, whether a held-out loss is the best, whether to end.

    values of the rank that reports ──shared──► the same numbers on every rank ──► the same decision in the same step

The state of each is in the checkpoints of the loop, so a resumed run decides as it would have without the interruption.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphpar.runtime.errors import AgreedError

if TYPE_CHECKING:
    from graphpar.runtime.pipeline import Pipeline

WINDOW = 128
"""How many updates a spike is compared with, and half of them before any is one: those of OLMo-core's SkipStepOptimizer."""
STEADY = 0.01
"""The least standard deviation, in parts of the mean: values that hardly change have no spikes of rounding."""


def shared(pipeline: Pipeline, *values: Tensor | None) -> list[float]:
    """Return on every rank the values that the reporting rank has; a collective call, which waits for the device."""
    own = torch.zeros(len(values), dtype=torch.float64, device=pipeline.device)
    if pipeline.reports:
        for place, value in enumerate(values):
            assert value is not None
            own[place] = value.detach()
    dist.all_reduce(own)
    found: list[float] = own.tolist()
    return found


class SpikeGuard:
    """Refuses updates whose loss or gradient norm is a spike.

    Args:
        deviations: how many standard deviations above the mean of the last ``WINDOW`` updates a value may be; inf: any finite one.
        most: how many updates in a row may be refused.
    """

    def __init__(self, deviations: float, most: int) -> None:
        self._deviations, self._most = deviations, most
        self._recent = {name: deque[float](maxlen=WINDOW) for name in ("loss", "gradient norm")}
        self.skipped = self._in_a_row = 0

    def refuses(self, step: int, loss: float, norm: float) -> str | None:
        """Return why the update of a step is to be skipped, or None.

        Raises:
            AgreedError: too many in a row are.
        """
        values = {"loss": loss, "gradient norm": norm}
        reason = next((why for name, value in values.items() if (why := self._spike(name, value))), None)
        if reason is None:
            self._in_a_row = 0
            for name, value in values.items():
                if norm:  # 0 is no norm of an update: in fp16 it overflowed
                    self._recent[name].append(value)
            return None
        self.skipped, self._in_a_row = self.skipped + 1, self._in_a_row + 1
        if self._in_a_row > self._most:
            raise AgreedError(
                f"the updates of {self._in_a_row} steps in a row were spikes (step {step}: {reason}), and --max-skips is {self._most}. "
                "Resume from an earlier checkpoint with a lower learning rate, look at the data of these steps, or allow more"
            )
        return reason

    def _spike(self, name: str, value: float) -> str | None:
        recent = self._recent[name]
        if not math.isfinite(value):
            return f"the {name} is {value}"
        if len(recent) < WINDOW // 2 or math.isinf(self._deviations):
            return None
        mean = statistics.fmean(recent)
        deviation = max(statistics.pstdev(recent, mean), STEADY * abs(mean))
        limit = mean + self._deviations * deviation
        return f"the {name} is {value:.4g}, and {limit:.4g} is the limit" if value > limit else None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON has it."""
        recent = {name: list(values) for name, values in self._recent.items()}
        return {"recent": recent, "skipped": self.skipped, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what a checkpoint has kept."""
        self._recent = {name: deque(values, WINDOW) for name, values in state["recent"].items()}
        self.skipped, self._in_a_row = state["skipped"], state["in_a_row"]


class BestLoss:
    """The lowest held-out loss so far, and how many evaluations came since; ``patience``: after how many training ends."""

    def __init__(self, patience: int | None) -> None:
        self._patience = patience
        self.value, self.since = math.inf, 0

    def improves(self, value: float) -> bool:
        """Note an evaluation, and return whether it is the best so far."""
        better = value < self.value
        self.value, self.since = (value, 0) if better else (self.value, self.since + 1)
        return better

    @property
    def ends(self) -> bool:
        """Whether training is to end."""
        return self._patience is not None and self.since >= self._patience

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON has it."""
        return {"value": None if self.value == math.inf else self.value, "since": self.since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what a checkpoint has kept."""
        self.value, self.since = math.inf if state["value"] is None else state["value"], state["since"]
