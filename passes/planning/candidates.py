"""What a planner is asked for, what it prices, and what it gives: wishes, candidates, priced ones, the result of a search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from graphpar.cost_models.estimates import Estimate, Layout
from graphpar.ir.mesh import Mesh
from graphpar.ir.plan import SplitAt
from graphpar.passes.planning.why_not import why_not
from graphpar.passes.sharding.shard import Sharded
from graphpar.schedules.registry import SCHEDULES

SHOWN = 4
"""How many other meshes are priced to the end by default, to be shown beside the chosen plan."""


@dataclass(frozen=True)
class PlannerConstraints:
    """What the user pinned; None is searched.

    ``cuts``: the split points for a mesh and a schedule; what it raises says why there is no such plan.
    ``one_microbatch``: the batch can't be split into microbatches.
    """

    schedule: str | None = None
    microbatch_size: int | None = None
    cuts: Callable[[Mesh, str], tuple[SplitAt, ...]] | None = None
    one_microbatch: bool = False


@dataclass(frozen=True)
class Candidate:
    """A mesh, a schedule and microbatches; ``bound`` is a time that it can't be faster than."""

    mesh: Mesh
    schedule: str
    stages_per_rank: int
    microbatch_size: int
    microbatches: int
    cuts: tuple[SplitAt, ...] | None = None
    bound: float = field(default=0.0, compare=False)

    @property
    def key(self) -> tuple[Any, ...]:
        """Which of two that take the same time is taken: fewer ranks that depend on each other, simpler schedules, larger microbatches."""
        schedules = list(SCHEDULES)
        return self.mesh.pp, self.mesh.tp, schedules.index(self.schedule), self.stages_per_rank, self.microbatches


@dataclass(frozen=True)
class Priced:
    """A candidate with its stages, how its tensors lie, and what it takes."""

    candidate: Candidate
    layout: Layout
    sharded: Sharded
    cuts: tuple[SplitAt, ...]
    estimate: Estimate

    @property
    def missing(self) -> int:
        """Bytes by which its fullest rank is above the device's memory."""
        return self.estimate.missing_bytes

    @property
    def fits(self) -> bool:
        return self.missing <= 0

    def to_json(self) -> dict[str, Any]:
        candidate = self.candidate
        return {
            "mesh": candidate.mesh.degrees(),
            "schedule": candidate.schedule,
            "stages_per_rank": candidate.stages_per_rank,
            "microbatches": candidate.microbatches,
            "microbatch_size": candidate.microbatch_size,
            "step_time_s": self.estimate.step_time_s,
            "peak_memory_bytes": list(self.estimate.peak_memory_bytes),
            "fits": self.fits,
        }

    @property
    def rank_key(self) -> tuple[Any, ...]:
        return self.estimate.step_time_s, *self.candidate.key


@dataclass(frozen=True)
class SearchResult:
    """What a search gives.

    ``alternatives``: the best of each other mesh among the fastest, and those nearest to fit where ``best`` is None.
    ``misfits``: those that would be faster than ``best`` on meshes on which nothing fits, the nearest to fit of each.
    ``priced``: how many candidates the simulator ran; ``infeasible``: how many are illegal or don't fit.
    """

    best: Priced | None
    alternatives: tuple[Priced, ...]
    considered: int
    priced: int
    infeasible: int
    refused: tuple[str, ...]
    misfits: tuple[Priced, ...] = ()

    def why_not(self, other: Priced) -> str:
        """What ``other`` loses against the best, in words."""
        return why_not(None if self.best is None else self.best.estimate, other.estimate)

    def to_json(self) -> dict[str, Any]:
        """What was searched, as plain data. The gap is to the best there is, under this cost model and of what is searched: 0, as all
        that could have been faster was priced."""
        shown = sorted((*self.alternatives, *self.misfits), key=lambda each: each.rank_key)
        return {
            "considered": self.considered,
            "priced": self.priced,
            "infeasible": self.infeasible,
            "optimality_gap": 0.0,
            "alternatives": [each.to_json() | {"why_not": self.why_not(each)} for each in shown],
            "refused": list(self.refused),
        }
