"""Loss scaling for fp16: small gradients would be rounded to zero in the backward, so the loss is multiplied first.

loss * scale ──backward──► gradients ──summed──► / scale ──► finite on all ranks: .grad, and after 2000 steps a larger scale
                                                        └──► else: no .grad at all, and half of the scale
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

FIRST, GROWTH, SMALLEST = 2.0**16, 2000, 2.0**-24
"""The first scale, after how many finite steps it doubles, and the smallest one."""


@dataclass
class LossScale:
    """The factor of the loss, a power of two; 1 where nothing is scaled. All ranks have the same."""

    value: float = 1.0
    skipped: int = 0
    finite: int = 0  # steps since the scale has changed

    def take(self, other: LossScale) -> None:
        """Go on as ``other``."""
        self.value, self.skipped, self.finite = other.value, other.skipped, other.finite

    def scaled(self, loss: Tensor) -> Tensor:
        """Return ``loss`` as the backward takes it."""
        return loss if self.value == 1.0 else loss * self.value

    def share_of_loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Serve as torch's loss function: the last stage already returns the microbatch's share of the loss."""
        return self.scaled(output)

    def update(self, finite: bool) -> None:
        """Take note of a step, whose gradients were ``finite`` on all ranks or are left out."""
        self.finite = self.finite + 1 if finite else 0
        if not finite:
            self.value, self.skipped = max(self.value / 2, SMALLEST), self.skipped + 1
        elif self.finite == GROWTH:
            self.value, self.finite = self.value * 2, 0
