"""How long the phases of a command take."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Seconds of each phase, and of all phases together."""

    seconds: dict[str, float] = field(default_factory=lambda: {"capture": 0.0, "plan": 0.0, "emit": 0.0, "total": 0.0})
    started: float = field(default_factory=time.perf_counter)

    def phase(self, name: str) -> None:
        """Note the end of a phase."""
        now = time.perf_counter()
        self.seconds[name] = now - self.started - self.seconds["total"]
        self.seconds["total"] = now - self.started
