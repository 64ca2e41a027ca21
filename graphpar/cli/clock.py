"""How long the phases of a command take, and the steps of a compilation."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Seconds of each phase and of all together, and of each step."""

    seconds: dict[str, float] = field(default_factory=lambda: {"capture": 0.0, "plan": 0.0, "emit": 0.0, "total": 0.0})
    steps: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    def step(self, name: str) -> None:
        """Note the end of a step; it began where the last one ended."""
        self.steps[name] = time.perf_counter() - self.started - math.fsum(self.steps.values())

    def within(self, name: str, parts: Mapping[str, float]) -> None:
        """Count ``parts`` of the step ``name`` as separate steps."""
        self.steps[name] -= math.fsum(parts.values())
        self.steps |= parts

    def phase(self, name: str) -> None:
        """Note the end of a phase."""
        now = time.perf_counter()
        self.seconds[name] = now - self.started - self.seconds["total"]
        self.seconds["total"] = now - self.started
