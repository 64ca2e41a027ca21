"""The learning rate of each step as a part of ``--lr``, where no file of a model says it: a warm-up, then a decay until the last step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

STABLE = 0.8
"""The part of the steps at whose end the rate of ``wsd`` (warm-up, stable, decay) begins to fall."""
DECAYS: Mapping[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: (1.0 + math.cos(math.pi * progress)) / 2.0,
    "wsd": lambda progress: min(1.0, (1.0 - progress) / (1.0 - STABLE)),
}
"""From 1 to 0, by the part that was made of the steps after the warm-up."""


class Rates:
    """The factor of each step: it rises by ``1 / (warmup + 1)`` a step to 1, and falls to ``final`` after ``steps``.

    As ``LinearLR`` of torch, then ``CosineAnnealingLR`` or ``LinearLR``. An object, not a function: a checkpoint has its numbers, so that
    with other ``steps`` it is another schedule.
    """

    def __init__(self, decay: str, warmup: int, steps: int, final: float) -> None:
        self.decay, self.warmup, self.steps, self.final = decay, warmup, steps, final

    def __call__(self, step: int) -> float:
        """The factor of a step, counted from 0."""
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        progress = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.final + (1.0 - self.final) * DECAYS[self.decay](progress)
