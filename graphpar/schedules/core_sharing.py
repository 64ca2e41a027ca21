"""Ranks that share the cores of a machine with fewer cores than ranks.

    work of each node ──all ranks that compute at the same time share the cores evenly──► when each node ends

That is what the scheduler of an operating system does: no process waits while a core is free, and time slices are short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SharedCores:
    """The cores of a machine that its ranks share.

    Attributes:
        cores: shared by the ranks that compute.
        ranks: how many ranks each rank of the simulation represents; they do the same at the same time.
        shares: for each stage, the share of an action's time that needs a core; the rest (collectives) needs none.
    """

    cores: float
    ranks: float
    shares: Sequence[float]

    def speed(self, computing: int) -> float:
        """Return the speed of each rank, at most 1, when ``computing`` ranks of the simulation compute at the same time."""
        return min(1.0, self.cores / (self.ranks * computing)) if computing else 1.0


def ends_on_shared_cores(
    durations: Sequence[float], shares: Sequence[float], before: Sequence[int], needs: Sequence[int], cores: SharedCores
) -> list[float]:
    """Compute when each node ends. Node 0 is the start; a node starts when the nodes ``before`` it and those that it
    ``needs`` have ended.

    Args:
        durations: of each node, alone on the machine.
        shares: the share of each node's duration that needs a core, at its beginning.
        cores: how the nodes that need a core share them.
    """
    count = len(durations)
    followers: list[list[int]] = [[] for _ in range(count)]
    missing = [0] * count
    for node in range(1, count):
        for other in {before[node], needs[node]}:
            followers[other].append(node)
            missing[node] += 1
    ends = [0.0] * count
    now = 0.0
    computing: dict[int, float] = {}  # seconds left
    others: dict[int, float] = {0: 0.0}
    while computing or others:
        speed = cores.speed(len(computing))
        passed = min(
            min((left / speed for left in computing.values()), default=float("inf")),
            min(others.values(), default=float("inf")),
        )
        now += passed
        done = []
        for running, rate in ((computing, speed), (others, 1.0)):
            for node in list(running):
                running[node] -= passed * rate
                if running[node] <= 1e-12 * (1 + now):
                    del running[node]
                    done.append((node, running is computing))
        for node, computed in done:
            rest = durations[node] * (1 - shares[node])
            if computed and rest > 0:
                others[node] = rest
                continue
            ends[node] = now
            for follower in followers[node]:
                missing[follower] -= 1
                if not missing[follower]:
                    own = durations[follower] * shares[follower]
                    if own > 0:
                        computing[follower] = own
                    else:
                        others[follower] = durations[follower]
    return ends
