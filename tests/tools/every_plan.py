"""Every plan of a small program on a small cluster, enumerated and priced a second time: an oracle for the search.

    meshes x ZeRO levels x schedules x microbatches ──► every run of units that can be a stage ──► every choice of what they recompute
                                                                  └──► those that fit in memory ──► the fastest

Placements and what a unit alone takes are the search's; where stages begin, what is recomputed, which plans there are, what they cost
and what they hold is not. Nothing is left out by a bound, but plans whose work on a rank alone takes longer than one that was found.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from graphpar.cost_models.pipeline_units import Unit
from graphpar.ir.split_points import SplitAt
from graphpar.passes.planning.candidates import Candidate
from graphpar.passes.planning.search import Planner
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.option_kinds import AUTO, Recompute
from graphpar.runtime.schedule_records import SCHEDULES
from tests.tools.plan_prices import (
    Halves,
    StepPrices,
    arriving,
    halves_bytes,
    kept_bytes,
    most_kept,
    on_top_bytes,
    returned,
)

KINDS = (
    "none",
    "pointwise",
    "gathers",
    "gathers+pointwise",
    "budget:0.8",
    "budget:0.6",
    "budget:0.4",
    "budget:0.2",
    "full",
)
DEPTHS = dict.fromkeys(("LoopedBFS", "InterleavedZeroBubble"), (2, 3, 4)) | {"Interleaved1F1B": (2, 3, 4, 6, 8, 16)}
Starts = tuple[int, ...]


@dataclass(frozen=True)
class Way:
    """A mesh, a schedule, microbatches and how state is sharded."""

    mesh: Mesh
    zero: int
    reshard: str
    schedule: str
    depth: int
    rows: int
    microbatches: int
    split_points: tuple[SplitAt, ...] | None = None

    @property
    def stages(self) -> int:
        return self.mesh.pp * self.depth

    @property
    def candidate(self) -> Candidate:
        """The candidate of the search that is this plan."""
        return Candidate(
            self.mesh,
            self.schedule,
            self.depth,
            self.rows,
            self.microbatches,
            self.split_points,
            self.zero,
            self.reshard,
        )


@dataclass(frozen=True)
class Choice:
    """What a stage's units recompute: by kind, and what that makes of a microbatch's seconds and bytes."""

    kinds: tuple[int, ...]
    more: float
    splits: bool
    kept: int
    on_top: int
    halves: Halves


@dataclass(frozen=True)
class Found:
    """A plan: seconds of a step, the bytes of its fullest rank, where its stages begin, and what each unit recomputes."""

    step_s: float
    nbytes: int
    way: Way
    starts: Starts
    kinds: tuple[int, ...] = ()


class EveryPlan:
    """The plans of ``planner``'s program, batch and cluster, with what is pinned: ``mesh`` and ``pins``, as a user gives them.

    ``any_cp``: sequences may be divided where rows suffice, too.
    """

    def __init__(
        self,
        planner: Planner,
        mesh: Mapping[str, int],
        *,
        zero: int | None = None,
        reshard: str | None = None,
        schedule: str | None = None,
        microbatch_size: int | None = None,
        recompute: Recompute = AUTO,
        split_points: tuple[SplitAt, ...] | None = None,
        experts: int = 1,
        any_cp: bool = False,
    ) -> None:
        self.planner, self.mesh, self.batch, self.cluster = planner, dict(mesh), planner.space.batch, planner.cluster
        self.zero, self.reshard, self.schedule, self.size = zero, reshard, schedule, microbatch_size
        self.kinds = KINDS if recompute == AUTO else (recompute,)
        self.split_points, self.experts, self.any_cp = split_points, experts, any_cp
        self._prices: dict[object, StepPrices] = {}
        self._choices: dict[object, list[Choice]] = {}
        self._equal: dict[object, Starts] = {}

    # ---- which plans there are ----

    @cached_property
    def ways(self) -> list[Way]:
        """Every way that is legal and that the program can be run in."""
        return [way for way in self._legal() if (units := self.units(way)) is not None and len(units) >= way.stages]

    def _legal(self) -> Iterator[Way]:
        for mesh in self._meshes():
            each = self.batch // mesh.replicas
            for (zero, reshard), (name, row) in itertools.product(self._states(mesh), SCHEDULES.items()):
                if row.torch_class is None or self.schedule not in (None, name):
                    continue
                if mesh.pp == 1 and (name != "1F1B" or self.schedule is not None or self.split_points is not None):
                    continue
                if mesh.pp > 1 and row.splits_backward and reshard == "always":
                    continue
                for depth, number in itertools.product(self._depths(name, mesh.pp), range(1, each + 1)):
                    size = each // number
                    if each % number == 0 and self.size in (None, size) and _runs(name, mesh.pp, depth, number):
                        yield Way(mesh, zero, reshard, name, depth, size, number, self.split_points)

    def _meshes(self) -> Iterator[Mesh]:
        axes = ("pp", "dp_replicate", "dp_shard", "dp_expert", "cp", "ep", "tp")
        pinned_replicas = "dp_replicate" in self.mesh and not self.zero
        able = [degree for degree in range(1, self.cluster.size + 1) if self.cluster.size % degree == 0]
        for degrees in itertools.product(able, repeat=len(axes)):
            mesh = Mesh(**dict(zip(axes, degrees)))
            if mesh.size != self.cluster.size or self.batch % mesh.replicas or self.experts % mesh.ep:
                continue
            if any(mesh.degrees()[axis] != degree for axis, degree in self.mesh.items()):
                continue
            if mesh.dp_shard > 1 and "dp_shard" not in self.mesh and (pinned_replicas or self.zero == 0):
                continue
            if (mesh.dp_shard * mesh.cp == 1 and self.zero) or (mesh.ep * mesh.dp_expert > 1 and self.experts == 1):
                continue
            if self.experts % mesh.dp_expert or (mesh.ep > 1 and mesh.dp_expert > 1):
                continue
            if mesh.cp == 1 or "cp" in self.mesh or self.any_cp or not self._more_rows(mesh):
                yield mesh

    def _more_rows(self, mesh: Mesh) -> bool:
        """Whether there are rows for more replicas among a mesh's ranks of cp."""
        if {"dp_replicate", "dp_shard"} <= set(self.mesh):
            return False
        most = mesh.replicas * mesh.cp
        return any(most % count == 0 and self.batch % count == 0 for count in range(mesh.replicas + 1, most + 1))

    def _states(self, mesh: Mesh) -> list[tuple[int, str]]:
        levels = [1, 2, 3] if mesh.dp_shard > 1 else [0]
        if mesh.dp_shard == 1 and mesh.cp > 1 and self.mesh.get("dp_replicate", 1) == 1:
            levels = [0, 1, 2, 3]  # ranks with parts of one sequence share state too
        levels = levels if self.zero is None else [self.zero]
        if self.reshard is not None:
            return [(level, self.reshard) for level in levels if level == 3 or self.reshard == "default"]
        return [
            (level, reshard)
            for level in levels
            for reshard in ("default", "always")[: 1 + (level == 3 and mesh.pp > 1)]
        ]

    def _depths(self, name: str, pp: int) -> tuple[int, ...]:
        if self.split_points is not None:
            depth, rest = divmod(len(self.split_points) + 1, pp)
            row = SCHEDULES[name]
            able = pp > 1 and not rest and row.min_stages <= depth <= (row.max_stages or depth)
            return (depth,) if able else ()
        return (1,) if pp == 1 else DEPTHS.get(name, (SCHEDULES[name].default_stages,))

    # ---- where stages begin ----

    def units(self, way: Way, kind: int = 0) -> list[Unit] | None:
        """The units of a rank, all with one kind of recomputation."""
        return self.planner.prices.units(way.candidate, kind=kind)

    def starts(self, way: Way, *, every: bool = True) -> list[Starts]:
        """Where stages may begin: anywhere where a rank has one (if ``every``), else so that they are as equal as can be."""
        units = self.units(way)
        assert units is not None
        if way.split_points is not None:
            return [
                tuple(place for place, unit in enumerate(units) if not place or unit.split_point in way.split_points)
            ]
        anywhere = [(0, *rest) for rest in itertools.combinations(range(1, len(units)), way.stages - 1)]
        return anywhere if way.mesh.pp == 1 or (way.depth == 1 and every) else [self._as_equal(way, units, anywhere)]

    def _as_equal(self, way: Way, units: Sequence[Unit], anywhere: Sequence[Starts]) -> Starts:
        """Of the starts whose slowest stage is the fastest those with the earliest last start."""
        key = way.mesh, way.zero, way.reshard, way.rows, way.stages
        if key not in self._equal:
            prices = self.prices(way)
            alone = [prices.stage([unit], way.rows, place == 0) for place, unit in enumerate(units)]
            slowest = {
                starts: max(
                    math.fsum(cost.forward + cost.backward for cost in alone[a:b]) for a, b in _runs_of(starts, units)
                )
                for starts in anywhere
            }
            least = min(slowest.values()) * (1 + 1e-11)
            self._equal[key] = min((each for each in anywhere if slowest[each] <= least), key=lambda each: each[::-1])
        return self._equal[key]

    # ---- what they cost ----

    def prices(self, way: Way) -> StepPrices:
        """The prices of a mesh and its sharded state."""
        key = way.mesh, way.zero, way.reshard
        if key not in self._prices:
            priced = map(self.planner.prices.pricing, self.planner.space.all)
            own = next(pricing for pricing in priced if pricing is not None)
            self._prices[key] = StepPrices(way.mesh, own.compute, own.network, way.zero, way.reshard == "always")
        return self._prices[key]

    def choices(self, way: Way, first: int, after: int) -> list[Choice]:
        """What the units of a stage may recompute, without choices that are no better than another one in anything."""
        own = [self.units(way, kind) for kind in range(len(self.kinds))]
        units = [kind[first:after] for kind in own if kind is not None]
        apart = way.mesh.pp > 1 and SCHEDULES[way.schedule].splits_backward
        key = tuple(id(unit.kind) for kind in units for unit in kind), way.mesh, way.rows, first == 0, apart
        if key not in self._choices:
            prices, able = self.prices(way), []
            for place in range(after - first):
                seen = {id(kind[place].kind): number for number, kind in reversed(list(enumerate(units)))}
                able.append(sorted(seen.values()))
            found = []
            for kinds in itertools.product(*able):
                mixed = [units[kind][place] for place, kind in enumerate(kinds)]
                costs = [prices.unit(unit, way.rows) for unit in mixed]
                splits = first == 0 or not any(again for _, _, again in costs)
                more, kept, top = (
                    sum(cost[1] for cost in costs),
                    kept_bytes(mixed, way.rows),
                    on_top_bytes(mixed, way.rows),
                )
                halves = halves_bytes(mixed, way.rows, first == 0, apart)
                found.append(Choice(kinds, more, splits, kept, top, halves))
            self._choices[key] = (
                found if way.mesh.pp == 1 else _not_worse(found)
            )  # it matters which of its units keeps what
        return self._choices[key]

    def fitting(self, way: Way, room: float, below: float = math.inf, *, every: bool = True) -> Found | None:
        """The fastest plan of ``way`` that needs at most ``room`` bytes a rank and takes fewer than ``below`` seconds."""
        best: Found | None = None
        for starts in self.starts(way, every=every):
            for found in self._with_stages(way, starts, room, below):
                best, below = found, found.step_s
        return best

    def _with_stages(self, way: Way, starts: Starts, room: float, below: float) -> Iterator[Found]:
        """Plans with given stages, each faster than the one before."""
        units, prices = self.units(way), self.prices(way)
        assert units is not None
        runs = _runs_of(starts, units)
        plain = [units[a:b] for a, b in runs]
        shortest = [prices.stage(stage, way.rows, place == 0) for place, stage in enumerate(plain)]
        ranks, options = prices.actions(len(runs), way.microbatches, way.schedule), []
        for row in ranks:
            own = sorted({action.stage for cell in row for action in cell})
            if way.microbatches * sum(shortest[place].forward + shortest[place].backward for place in own) >= below:
                return
            fixed = prices.fixed_bytes(plain, own, way.rows, way.microbatches)
            messages = {place: arriving(plain, place, way.rows) if place - 1 not in own else 0 for place in own}
            whole = prices.whole_bytes(plain, own)
            able = []
            for chosen in itertools.product(*(self.choices(way, *runs[place]) for place in own)):
                kept = {place: each.kept + messages[place] for place, each in zip(own, chosen)}
                halves = {place: each.halves for place, each in zip(own, chosen)}
                left = {
                    place: each.halves.left and each.halves.left + messages[place] + returned(plain, place, way.rows)
                    for place, each in zip(own, chosen)
                }
                if len(runs) == 1:
                    kinds_units = [self.units(way, kind) or [] for kind in range(len(self.kinds))]
                    mixed = [kinds_units[kind][place] for place, kind in enumerate(chosen[0].kinds)]
                    nbytes = prices.only_bytes(mixed, way.rows, way.microbatches)
                else:
                    one = max(each.kept for each in chosen)
                    nbytes = fixed.most(most_kept(kept, left, halves, row, whole), one)
                if nbytes <= room:
                    able.append((nbytes, dict(zip(own, chosen))))
            options.append(_fastest(able))
        for each in itertools.product(*options):
            kinds = tuple(kind for _, choice in sorted(_joined(each).items()) for kind in choice.kinds)
            own_units = [self.units(way, kind) for kind in range(len(self.kinds))]
            mixed = [(own_units[kind] or [])[place] for place, kind in enumerate(kinds)]
            seconds = prices.step_s([mixed[a:b] for a, b in runs], way.rows, way.microbatches, way.schedule)
            if seconds < below:
                below = seconds
                yield Found(seconds, max(nbytes for nbytes, _ in each), way, starts, kinds)

    def best(self, room: float = math.inf, *, every: bool = True) -> Found | None:
        """The fastest plan that needs at most ``room`` bytes a rank."""
        best: Found | None = None
        for way in self.ways:
            best = self.fitting(way, room, math.inf if best is None else best.step_s, every=every) or best
        return best


def _runs(name: str, pp: int, depth: int, microbatches: int) -> bool:
    """Whether a schedule runs so many microbatches."""
    if pp == 1:
        return True
    if name in ("1F1B", "DualPipeV"):
        return microbatches >= pp * depth
    return microbatches % max(1, microbatches // pp) == 0 or name not in ("Interleaved1F1B", "InterleavedZeroBubble")


def _runs_of(starts: Starts, units: Sequence[Unit]) -> list[tuple[int, int]]:
    return list(zip(starts, (*starts[1:], len(units))))


def _not_worse(found: Sequence[Choice]) -> list[Choice]:
    """The choices than which no other is as good in seconds, bytes and in being split."""
    kept: list[Choice] = []
    for each in sorted(found, key=lambda each: (each.more, each.kept, each.on_top, each.halves, not each.splits)):
        sizes = each.kept, each.on_top, *each.halves
        if not any(
            o.splits >= each.splits and all(a <= b for a, b in zip((o.kept, o.on_top, *o.halves), sizes)) for o in kept
        ):
            kept.append(each)
    return kept


def _fastest(able: Sequence[tuple[int, dict[int, Choice]]]) -> list[tuple[int, dict[int, Choice]]]:
    """Of the choices of a rank those than which no other is as fast in each of its stages."""
    kept: list[tuple[int, dict[int, Choice]]] = []
    for nbytes, each in sorted(able, key=lambda entry: (sum(choice.more for choice in entry[1].values()), entry[0])):
        if not any(
            all(o[place].more <= c.more and o[place].splits >= c.splits for place, c in each.items()) for _, o in kept
        ):
            kept.append((nbytes, each))
    return kept


def _joined(options: Sequence[tuple[int, dict[int, Choice]]]) -> dict[int, Choice]:
    return {place: choice for _, own in options for place, choice in own.items()}
