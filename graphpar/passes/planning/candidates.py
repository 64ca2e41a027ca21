"""The records of a plan search.

PlanConstraints ──Space──► Candidate ──Fitting──► Priced ──Planner──► SearchResult
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from graphpar.cost_models.estimates import Estimate, Layout
from graphpar.cost_models.kept_plans import KeptPlans
from graphpar.cost_models.spread import of_difference
from graphpar.ir.split_points import SplitAt
from graphpar.passes.sharding.shard import Sharded
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.option_kinds import SHOWN, Recompute
from graphpar.runtime.options import Decisions, options_of
from graphpar.runtime.records import unpacked
from graphpar.runtime.schedule_records import SCHEDULES
from graphpar.text import bytes_text, listed, plural, seconds_text, share_text

_PLACES = {name: place for place, name in enumerate(SCHEDULES)}
POINTS, BOUNDED = 2000, 200
"""How many priced plans a search's JSON lists at most, and of those that a bound ruled out how many, one of a mesh."""


def mesh_text(mesh: Mesh) -> str:
    """Return ``pp=2, tp=4``, or ``one device``."""
    return ", ".join(f"{axis}={degree}" for axis, degree in mesh.degrees().items() if degree > 1) or "one device"


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a search decides before it prices; ``bound`` is a lower bound of the step time in seconds."""

    mesh: Mesh
    schedule: str
    stages_per_rank: int
    microbatch_size: int
    microbatches: int
    split_points: tuple[SplitAt, ...] | None = None
    zero: int = 0
    reshard: str | int = "default"
    overlap_tp: bool = False
    compile: bool = False
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
            self.overlap_tp,
        )

    @property
    def compute(self) -> tuple[int, ...]:
        """The degrees of the axes other than tp that a rank's program depends on."""
        return self.mesh.dp_expert, self.mesh.cp, self.mesh.ep

    @property
    def decisions(self) -> dict[str, Any]:
        """The values of :data:`DECIDED`."""
        return {name: getattr(self, name) for name in DECIDED}


DECIDED = tuple(each.name for each in fields(Candidate) if each.name in options_of(Decisions))
"""The options of a plan that its candidate decides."""
SHOWN_FIELDS = ("stages_per_rank", "microbatches", *DECIDED)
"""What is told of a candidate besides its mesh."""


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
        return {
            "mesh": self.candidate.mesh.degrees(),
            **{name: getattr(self.candidate, name) for name in SHOWN_FIELDS},
            "recompute": self.recompute if isinstance(self.recompute, str) else dict(self.recompute),
            "step_time_s": self.estimate.step_time_s,
            "spread_s": self.estimate.spread_s,
            "peak_memory_bytes": list(self.estimate.peak_memory_bytes),
            "fits": self.fits,
        }

    @property
    def rank_key(self) -> tuple[Any, ...]:
        """The sort key: fastest first."""
        return self.estimate.step_time_s, *self.candidate.key


def surest_first(ranked: Sequence[Priced]) -> list[Priced]:
    """Return plans, the fastest first, but before them the one that takes the least where its price is off by its spread, of those that
    are as fast as the first within what prices are known to. Only the best few count, which a search has whatever it shows."""
    if not ranked:
        return []
    first = ranked[0].estimate
    equal = [
        each
        for each in ranked[: SHOWN + 1]
        if each.estimate.step_time_s - first.step_time_s <= of_difference(each.estimate.spreads_s, first.spreads_s)
    ]
    surest = min(equal, key=lambda each: (each.estimate.step_time_s + each.estimate.spread_s, *each.rank_key))
    return [surest, *(each for each in ranked if each is not surest)]


@dataclass(frozen=True, slots=True)
class Brief:
    """What of an estimate says why its plan was not chosen.

    Attributes:
        parts_s: as in :class:`~graphpar.cost_models.estimates.Estimate`.
        compute_s: of the busiest rank.
        evenness: the mean work of ranks divided by that of the busiest.
        rate: the share of the devices' peak that is reached while they compute.
        misfit: what it needs where that is too much, in words.
    """

    step_time_s: float
    spread_s: float
    parts_s: Mapping[str, float]
    compute_s: float
    evenness: float
    rate: float
    misfit: str

    @staticmethod
    def of(estimate: Estimate) -> Brief:
        """Read it off an estimate."""
        work = [0.0] * len(estimate.memory)
        for stage in estimate.stages:
            work[stage.rank] += stage.forward_s + stage.backward_s
        even = sum(work) / len(work) / max(work) if max(work) else 1.0
        step, compute = estimate.step_time_s, estimate.compute_s
        rate = estimate.mfu * step / compute if compute else 0.0
        too_much = misfit(estimate) if estimate.missing_bytes > 0 else ""
        return Brief(step, estimate.spread_s, estimate.parts_s, compute, even, rate, too_much)

    @property
    def even_parts_s(self) -> dict[str, float]:
        """The parts of the busiest rank's step; its work above the mean is ``uneven``."""
        busy = ("bubble", "pp", "gradients", "optimizer")
        parts = {part: took if part in busy else self.evenness * took for part, took in self.parts_s.items()}
        return parts | {"uneven": self.step_time_s - sum(parts.values())}


@dataclass(frozen=True, slots=True)
class Bounded:
    """A candidate that was not priced: it takes at least ``bound_s`` seconds a step, and where it can't fit that is why."""

    candidate: Candidate
    bound_s: float
    fits: bool


@dataclass(frozen=True)
class Point:
    """A priced plan in short: its step time in seconds, by how much that may be off, and the peak of its fullest rank in bytes.

    Attributes:
        exact: whether every microbatch was simulated, and not a few of them.
        brief: what says why it was not chosen.
    """

    candidate: Candidate
    recompute: str
    step_time_s: float
    peak_memory_bytes: int
    fits: bool
    spread_s: float = 0.0
    exact: bool = True
    brief: Brief | None = field(default=None, compare=False)

    @staticmethod
    def of(priced: Priced) -> Point:
        """Shorten a priced plan; where blocks recompute differently, it says how many do what."""
        kinds = priced.recompute
        if not isinstance(kinds, str):
            counts = Counter(unpacked(kinds).values())
            kinds = ", ".join(f"{kind} of {plural(count, 'block')}" for kind, count in counts.items()) or "none"
        brief = Brief.of(priced.estimate)
        return Point(
            priced.candidate, kinds, brief.step_time_s, max(priced.estimate.peak_memory_bytes), priced.fits,
            brief.spread_s, priced.estimate.exact, brief,
        )  # fmt: skip

    @property
    def row(self) -> list[Any]:
        """The values of :data:`COLUMNS`, but for the last."""
        return [*_decided(self.candidate), *(getattr(self, name) for name in _PRICED)]


def _decided(candidate: Candidate) -> list[Any]:
    """Return a candidate's degrees and :data:`SHOWN_FIELDS`."""
    return [*candidate.mesh.degrees().values(), *(getattr(candidate, name) for name in SHOWN_FIELDS)]


_PRICED = tuple(each.name for each in fields(Point))[1:-1]
BOUNDED_COLUMNS = (*Mesh().degrees(), *SHOWN_FIELDS, "bound_s", "fits")
"""What a row of the plans that were ruled out by a bound holds."""
COLUMNS = (*Mesh().degrees(), *SHOWN_FIELDS, *_PRICED, "why_not")
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
        values: dict[str, set[Any]] = {axis: {getattr(each.mesh, axis) for each in able} for axis in Mesh().degrees()}
        values |= {name: {getattr(each, name) for each in able} for name in SHOWN_FIELDS}
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
        best: the fastest candidate that fits, or one that is as fast within what prices are known to, and known better; None where none
            does.
        alternatives: the best candidates of other meshes, fastest first; those nearest to fitting where ``best`` is None.
        priced: how many candidates were simulated.
        infeasible: how many candidates are illegal or don't fit.
        refused: the errors of meshes that can't be sharded or split.
        lower_bound_s: no candidate takes fewer seconds a step.
        left_out: what was not tried, in words.
        misfits: on meshes on which nothing fits, the candidate nearest to fitting, where it is faster than ``best``.
        points: every candidate that was priced, the fastest first.
        bounded: of those that were not priced, as a bound of their time, or of their memory, ruled them out, the one of each mesh with the
            lowest bound of its time, ascending.
        tried: the values that were tried, and how many candidates were not priced, and why.
        kept: the best plans with what their prices need; None where no plan fits.
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
    bounded: tuple[Bounded, ...] = ()
    tried: Tried | None = None
    kept: KeptPlans | None = None

    @property
    def nearest(self) -> Priced | None:
        """The best candidate, or where none fits the one nearest to fitting; None where none is legal."""
        return self.best or next(iter(self.alternatives), None)

    @property
    def gap(self) -> float | None:
        """By which share the best plan is at most slower than the fastest that there is, at these prices; None where nothing fits."""
        if self.best is None:
            return None
        best = self.best.estimate.step_time_s
        return max(0.0, best / min(best, self.lower_bound_s) - 1) if self.lower_bound_s else None

    def why_not(self, other: Priced) -> str:
        """Return in words why ``other`` was not chosen."""
        return why_not(None if self.best is None else Brief.of(self.best.estimate), Brief.of(other.estimate))

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
        taken = None if self.best is None else Brief.of(self.best.estimate)
        why = ["" if each.candidate == best or not each.brief else why_not(taken, each.brief) for each in shown]
        return {
            "columns": list(COLUMNS),
            "rows": [[*point.row, reason] for point, reason in zip(shown, why)],
            "bounded_columns": list(BOUNDED_COLUMNS),
            "bounded": [[*_decided(each.candidate), each.bound_s, each.fits] for each in self.bounded[:BOUNDED]],
            "chosen": None if best is None else places.get(best),
            "front": [places[point.candidate] for point in front],
            "left_out": len(self.points) - len(shown),
        }


# ---- why a plan is slower than another -----------------------------------------------------------------------------

_LEAST = 1e-4
"""Losses below this share of the step count as none."""


def why_not(best: Brief | None, other: Brief) -> str:
    """Return why ``other`` was not chosen: it does not fit, or which part of its step loses most against ``best``."""
    if other.misfit:
        return other.misfit
    if best is None:
        return ""
    if other.step_time_s < best.step_time_s and other.spread_s > best.spread_s:
        return f"known to {seconds_text(other.spread_s)} only, not to {seconds_text(best.spread_s)}"
    mine, theirs = other.even_parts_s, best.even_parts_s
    losses = {part: mine.get(part, 0.0) - theirs.get(part, 0.0) for part in mine | theirs}
    part = max(losses, key=losses.__getitem__)
    if losses[part] <= _LEAST * other.step_time_s:
        return "as fast; the simpler of the two was taken"
    return _WORDS[part](best, other) if part in _WORDS else _part(best, other, part)


def misfit(estimate: Estimate) -> str:
    """Return ``does not fit: stage 0 needs 91.2 GiB of 77.6 GiB``."""
    rank, stages = estimate.fullest
    where = (
        f"stage{'s' if len(stages) > 1 else ''} {listed(list(map(str, stages)), 8)}"
        if len(estimate.stages) > 1
        else "a device"
    )
    need = "need" if len(stages) > 1 and len(estimate.stages) > 1 else "needs"
    needed = bytes_text(estimate.peak_memory_bytes[rank])
    by = f", {bytes_text(estimate.missing_bytes)} too much" if estimate.room_text.startswith(needed) else ""
    return f"does not fit: {where} {need} {needed} of {estimate.room_text}{by}"


def _compute(best: Brief, other: Brief) -> str:
    rates = (
        f": {share_text(other.rate)} of the peak, not {share_text(best.rate)}" if other.rate < 0.99 * best.rate else ""
    )
    return f"computes {seconds_text(other.compute_s)}, not {seconds_text(best.compute_s)}{rates}"


def _uneven(best: Brief, other: Brief) -> str:
    return f"uneven stages: the slowest rank has {1 / other.evenness:.2f}x the mean to do, not {1 / best.evenness:.2f}x"


def _bubble(best: Brief, other: Brief) -> str:
    shares = [estimate.parts_s.get("bubble", 0.0) / estimate.step_time_s for estimate in (other, best)]
    against = f", not {share_text(shares[1])}" if shares[1] else ""
    return f"bubble of {seconds_text(other.parts_s['bubble'])}: {share_text(shares[0])} of the step{against}"


def _part(best: Brief, other: Brief, part: str) -> str:
    """Return ``tp traffic 96 ms exposed, not 29 ms``, or what the part is called in ``_PHRASES``."""
    seconds = best.parts_s.get(part, 0.0)
    against = f", not {seconds_text(seconds)}" if seconds else ""
    return (
        _PHRASES.get(part, f"{part} traffic {{}} exposed").format(seconds_text(other.parts_s.get(part, 0.0))) + against
    )


_WORDS = {"compute": _compute, "uneven": _uneven, "bubble": _bubble}
_PHRASES = {
    "host": "devices wait {} for the host to start operators",
    "pp": "waits {} for transfers between stages",
    "gradients": "sums of gradients {} exposed",
    "optimizer": "optimizer step of {}",
}
