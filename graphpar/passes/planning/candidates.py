"""The records of a plan search.

PlannerConstraints ──Planner──► Candidate ──price──► Priced ──search──► SearchResult
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphpar.cost_models.estimates import Estimate, Layout
from graphpar.ir.split_points import SplitAt
from graphpar.passes.planning.why_not import why_not
from graphpar.passes.sharding.shard import Sharded
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.option_kinds import Recompute
from graphpar.schedules.registry import SCHEDULES
from graphpar.text import plural

_PLACES = {name: place for place, name in enumerate(SCHEDULES)}
POINTS = 2000
"""How many priced plans a search's JSON lists at most."""


@dataclass(frozen=True)
class PlannerConstraints:
    """The user's pins; what is None is searched.

    Attributes:
        split_points: gives the split points for a mesh and a schedule, or raises GraphparError with why there are none.
        one_microbatch: the batch can't be split into microbatches.
        zero, reshard: how state is sharded over dp_shard and cp, and when gathered parameters are freed.
        prefetch, prefetch_distance: when parameters are gathered for a backward.
        recompute: what blocks may recompute, the least first.
        whole_backwards: no schedule that splits backwards in two.
        check: raises GraphparError for a mesh, a ZeRO level and a reshard policy with which something that is pinned can't be done.
    """

    schedule: str | None = None
    microbatch_size: int | None = None
    split_points: Callable[[Mesh, str], tuple[SplitAt, ...]] | None = None
    one_microbatch: bool = False
    zero: int | None = None
    reshard: str | int | None = None
    prefetch: str | None = None
    prefetch_distance: int | None = None
    recompute: tuple[Recompute, ...] = ("none",)
    whole_backwards: bool = False
    check: Callable[[Mesh, int, str | int], None] | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mesh, a schedule, microbatches and how state is sharded; ``bound`` is a lower bound of its step time in seconds."""

    mesh: Mesh
    schedule: str
    stages_per_rank: int
    microbatch_size: int
    microbatches: int
    split_points: tuple[SplitAt, ...] | None = None
    zero: int = 0
    reshard: str | int = "default"
    bound: float = field(default=0.0, compare=False)

    @property
    def key(self) -> tuple[Any, ...]:
        """The order of candidates that are equally fast: fewer dependent ranks, state whole, simpler schedules, larger microbatches
        first."""
        mesh = self.mesh
        state = mesh.dp_shard, self.zero, str(self.reshard)
        return (
            mesh.pp,
            mesh.tp,
            mesh.cp,
            mesh.ep,
            mesh.dp_expert,
            *state,
            _PLACES[self.schedule],
            self.stages_per_rank,
            self.microbatches,
        )


@dataclass(frozen=True)
class Priced:
    """A candidate with its stages, the placements of its tensors, what is recomputed, and its estimate.

    Attributes:
        choices: of each unit, which of the search's kinds of recomputation.
        recompute: the same as a plan has it.
    """

    candidate: Candidate
    layout: Layout
    sharded: Sharded
    split_points: tuple[SplitAt, ...]
    estimate: Estimate
    choices: tuple[int, ...] = ()
    recompute: Recompute = "none"

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
            "zero": candidate.zero,
            "reshard": candidate.reshard,
            "recompute": self.recompute if isinstance(self.recompute, str) else dict(self.recompute),
            "step_time_s": self.estimate.step_time_s,
            "peak_memory_bytes": list(self.estimate.peak_memory_bytes),
            "fits": self.fits,
        }

    @property
    def rank_key(self) -> tuple[Any, ...]:
        """The sort key: fastest first."""
        return self.estimate.step_time_s, *self.candidate.key


@dataclass(frozen=True)
class Point:
    """A priced plan in short: its step time in seconds, and the peak of its fullest rank in bytes."""

    candidate: Candidate
    recompute: str
    step_time_s: float
    peak_memory_bytes: int
    fits: bool

    @staticmethod
    def of(priced: Priced) -> Point:
        """Shorten a priced plan; where blocks recompute differently, it says how many do what."""
        kinds = priced.recompute
        if not isinstance(kinds, str):
            kinds = (
                ", ".join(f"{kind} of {plural(count, 'block')}" for kind, count in Counter(kinds.values()).items())
                or "none"
            )
        estimate = priced.estimate
        return Point(
            priced.candidate, kinds, estimate.step_time_s, max(estimate.peak_memory_bytes), estimate.missing_bytes <= 0
        )

    @property
    def row(self) -> list[Any]:
        """The values of :data:`COLUMNS`."""
        each = self.candidate
        mesh = list(each.mesh.degrees().values())
        run = [each.zero, each.reshard, self.recompute, each.schedule, each.stages_per_rank]
        batch = [each.microbatches, each.microbatch_size]
        return [*mesh, *run, *batch, self.step_time_s, self.peak_memory_bytes, self.fits]


COLUMNS = (
    *Mesh().degrees(), "zero", "reshard", "recompute", "schedule", "stages_per_rank", "microbatches", "microbatch_size", "step_time_s",
    "peak_memory_bytes", "fits",
)  # fmt: skip
"""What a row of a search's priced plans holds."""


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the plans that fit and than which no other that fits is both faster and smaller, the fastest first."""
    front: list[Point] = []
    for point in sorted(points, key=lambda each: (each.step_time_s, each.peak_memory_bytes, each.candidate.key)):
        if point.fits and (not front or point.peak_memory_bytes < front[-1].peak_memory_bytes):
            front.append(point)
    return front


@dataclass(frozen=True)
class Tried:
    """What a search tried, and what became of it.

    Attributes:
        values: of each decision the values of its candidates.
        no_faster: candidates that were left out since their tp is no faster than a smaller one.
        impossible: those that can't be sharded so, or have more stages than the model can be split into.
        too_large: those whose memory is too much by a lower bound of it, without being priced.
        slower: those whose lower bound of the step time is above plans that were found, without being priced.
        open: those for which there was no time.
    """

    values: Mapping[str, tuple[Any, ...]]
    no_faster: int
    impossible: int
    too_large: int
    slower: int
    open: int = 0

    @staticmethod
    def of(
        every: Sequence[Candidate],
        able: Sequence[Candidate],
        hopeless: Sequence[Candidate],
        priced: Collection[Candidate],
        useless: Collection[int],
        unsolved: Collection[int] = (),
        unpriced: int = 0,
    ) -> Tried:
        """Count ``every`` candidate: those ``able`` to run, those of them that are ``hopeless``, ``priced``, or ``unpriced`` for want of
        time, ``useless`` ones, and ``unsolved`` ones, whose placements there was no time for."""
        names = "schedule", "stages_per_rank", "microbatch_size", "microbatches", "zero", "reshard"
        values: dict[str, set[Any]] = {axis: {getattr(each.mesh, axis) for each in able} for axis in Mesh().degrees()}
        values |= {name: {getattr(each, name) for each in able} for name in names}
        too_large = sum(each not in priced for each in hopeless)
        return Tried(
            {name: tuple(sorted(found, key=lambda each: (str(type(each)), each))) for name, found in values.items()},
            len(useless),
            len(every) - len(able) - len(useless) - len(unsolved),
            too_large,
            len(able) + len(unsolved) - len(priced) - too_large - unpriced,
            unpriced,
        )


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        best: the fastest candidate that fits; None where none does.
        alternatives: the best candidates of other meshes, fastest first; those nearest to fitting where ``best`` is None.
        priced: how many candidates were simulated.
        infeasible: how many candidates are illegal or don't fit.
        refused: the errors of meshes that can't be sharded or split.
        lower_bound_s: no candidate takes fewer seconds a step.
        left_out: what was not tried, in words.
        misfits: on meshes on which nothing fits, the candidate nearest to fitting, where it is faster than ``best``.
        points: every candidate that was priced, the fastest first.
        tried: the values that were tried, and how many candidates were not priced, and why.
    """

    best: Priced | None
    alternatives: tuple[Priced, ...]
    considered: int
    priced: int
    infeasible: int
    refused: tuple[str, ...]
    misfits: tuple[Priced, ...] = ()
    lower_bound_s: float = 0.0
    left_out: tuple[str, ...] = ()
    points: tuple[Point, ...] = ()
    tried: Tried | None = None

    @property
    def gap(self) -> float | None:
        """By which share the best plan is at most slower than the fastest that there is, at these prices; None where nothing fits."""
        if self.best is None:
            return None
        best = self.best.estimate.step_time_s
        return max(0.0, best / min(best, self.lower_bound_s) - 1) if self.lower_bound_s else None

    def why_not(self, other: Priced) -> str:
        """Return in words why ``other`` was not chosen."""
        return why_not(None if self.best is None else self.best.estimate, other.estimate)

    def to_json(self) -> dict[str, Any]:
        """Return the search as plain data. The optimality gap is relative to this cost model."""
        shown = sorted((*self.alternatives, *self.misfits), key=lambda each: each.rank_key)
        return {
            "considered": self.considered,
            "priced": self.priced,
            "infeasible": self.infeasible,
            "optimality_gap": self.gap,
            "alternatives": [each.to_json() | {"why_not": self.why_not(each)} for each in shown],
            "refused": list(self.refused),
            "left_out": list(self.left_out),
            "points": self._points(),
            "tried": None if self.tried is None else self._tried(self.tried),
        }

    def _tried(self, tried: Tried) -> dict[str, Any]:
        data = {name: getattr(tried, name) for name in ("no_faster", "impossible", "too_large", "slower", "open")}
        return {"values": {name: list(values) for name, values in tried.values.items()}, **data}

    def _points(self) -> dict[str, Any]:
        """Return the priced plans as a table, with the rows of the chosen one and of the Pareto front; of more than :data:`POINTS`
        those and the fastest."""
        best = None if self.best is None else self.best.candidate
        front = pareto_front(self.points)[:POINTS]
        kept = {point.candidate for point in front} | {each.candidate for each in self.points if each.candidate == best}
        for point in self.points:
            if len(kept) >= POINTS:
                break
            kept.add(point.candidate)
        shown = [point for point in self.points if point.candidate in kept]
        places = {point.candidate: place for place, point in enumerate(shown)}
        return {
            "columns": list(COLUMNS),
            "rows": [point.row for point in shown],
            "chosen": None if best is None else places.get(best),
            "front": [places[point.candidate] for point in front],
            "left_out": len(self.points) - len(shown),
        }
