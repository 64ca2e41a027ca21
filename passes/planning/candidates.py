"""The records of a plan search.

PlannerConstraints ──Planner──► Candidate ──price──► Priced ──search──► SearchResult
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from graphpar.cost_models.estimates import Estimate, Layout
from graphpar.ir.mesh import Mesh
from graphpar.ir.split_points import SplitAt
from graphpar.passes.planning.why_not import why_not
from graphpar.passes.sharding.shard import Sharded
from graphpar.schedules.registry import SCHEDULES

SHOWN = 4
"""How many alternatives (the best of other meshes) are shown beside the chosen plan by default."""


@dataclass(frozen=True)
class PlannerConstraints:
    """The user's pins; what is None is searched.

    Attributes:
        split_points: gives the split points for a mesh and a schedule, or raises GraphparError with why there are none.
        one_microbatch: the batch can't be split into microbatches.
        check: raises GraphparError for a mesh on which something that is pinned can't be done.
    """

    schedule: str | None = None
    microbatch_size: int | None = None
    split_points: Callable[[Mesh, str], tuple[SplitAt, ...]] | None = None
    one_microbatch: bool = False
    check: Callable[[Mesh], None] | None = None


@dataclass(frozen=True)
class Candidate:
    """A mesh, a schedule and microbatches; ``bound`` is a lower bound of its step time in seconds."""

    mesh: Mesh
    schedule: str
    stages_per_rank: int
    microbatch_size: int
    microbatches: int
    split_points: tuple[SplitAt, ...] | None = None
    bound: float = field(default=0.0, compare=False)

    @property
    def key(self) -> tuple[Any, ...]:
        """The order of candidates that are equally fast: fewer dependent ranks, simpler schedules, larger microbatches first."""
        schedules = list(SCHEDULES)
        return self.mesh.pp, self.mesh.tp, schedules.index(self.schedule), self.stages_per_rank, self.microbatches


@dataclass(frozen=True)
class Priced:
    """A candidate with its stages, the placements of its tensors, and its estimate."""

    candidate: Candidate
    layout: Layout
    sharded: Sharded
    split_points: tuple[SplitAt, ...]
    estimate: Estimate

    @property
    def missing(self) -> int:
        """Bytes by which its fullest rank exceeds the device's memory; not positive where it fits."""
        return self.estimate.missing_bytes

    @property
    def fits(self) -> bool:
        """Whether every rank fits in its device's memory."""
        return self.missing <= 0

    def to_json(self) -> dict[str, Any]:
        """Return the candidate, its step time in seconds and peak memory in bytes a rank, as plain data."""
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
        """The sort key: fastest first."""
        return self.estimate.step_time_s, *self.candidate.key


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        best: the fastest candidate that fits; None where none does.
        alternatives: the best candidates of other meshes, fastest first; those nearest to fitting where ``best`` is None.
        priced: how many candidates were simulated.
        infeasible: how many candidates are illegal or don't fit.
        refused: the errors of meshes that can't be sharded or split.
        misfits: on meshes on which nothing fits, the candidate nearest to fitting, where it is faster than ``best``.
    """

    best: Priced | None
    alternatives: tuple[Priced, ...]
    considered: int
    priced: int
    infeasible: int
    refused: tuple[str, ...]
    misfits: tuple[Priced, ...] = ()

    def why_not(self, other: Priced) -> str:
        """Return in words why ``other`` was not chosen."""
        return why_not(None if self.best is None else self.best.estimate, other.estimate)

    def to_json(self) -> dict[str, Any]:
        """Return the search as plain data.

        The optimality gap is 0: every candidate whose bound is below the best was priced. It is relative to this cost model.
        """
        shown = sorted((*self.alternatives, *self.misfits), key=lambda each: each.rank_key)
        return {
            "considered": self.considered,
            "priced": self.priced,
            "infeasible": self.infeasible,
            "optimality_gap": 0.0,
            "alternatives": [each.to_json() | {"why_not": self.why_not(each)} for each in shown],
            "refused": list(self.refused),
        }
