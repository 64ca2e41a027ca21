"""What another value of each decision of a plan would cost, at the prices of the plan.

Plan ──one decision forbidden to be as it is──► candidates that are left ──searched──► NextBest
    └─one block, or one cut, changed──────────────────────────────────────priced────► NextBest

A mesh is compared with every other; a schedule, microbatches and ZeRO levels with those of the same stages and tp, cp and ep degrees. What
was pinned stays pinned, but for the decision that is asked about.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from graphpar.cost_models.estimates import Estimate, Layout
from graphpar.cost_models.pricing import Pricing
from graphpar.errors import GraphparError
from graphpar.hardware.cluster import Cluster
from graphpar.ir.plan import Plan
from graphpar.ir.program import Program
from graphpar.passes.planning.candidates import Candidate, Priced
from graphpar.passes.planning.constraints import PlanConstraints
from graphpar.passes.planning.planning import estimate_plan, planner_for, pricing_of
from graphpar.passes.planning.recomputation import least_first, recomputed_blocks
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.option_kinds import AUTO, Recompute

DECISIONS = ("mesh", "schedule", "microbatches", "zero", "recompute", "cuts")
"""What can be asked about by name; recomputation and cuts also by the paths of blocks and of modules where stages begin."""
LIMIT_S = 20.0
"""After so many seconds the search for another mesh takes the best so far."""


@dataclass(frozen=True)
class NextBest:
    """The fastest plan with another value of a decision.

    Attributes:
        decision: what differs: one of :data:`DECISIONS`, or the path of a block or a cut.
        value: what it is in this plan, and in the plan of ``estimate``, in words.
        pinned: whether the user decided it, or the plan file that was given.
        by_default: whether nothing was searched for it, since the user gave the whole mesh.
        estimate: of the other plan, which fits wherever one that fits was found; None where there is none.
        candidate: the other plan as plain data, where it was searched.
        note: why there is no other plan, or what was not searched.
    """

    decision: str
    value: str
    other: str = ""
    pinned: bool = False
    by_default: bool = False
    estimate: Estimate | None = None
    candidate: Mapping[str, Any] | None = None
    note: str = ""


class Alternatives:
    """The decisions of ``plan`` for ``program`` on ``cluster``, and their next best values. ``asked``: what the user asked for."""

    def __init__(self, program: Program, plan: Plan, cluster: Cluster, asked: PlanConstraints | None) -> None:
        self.program, self.plan, self.cluster = program, plan, cluster
        self.pins = PlanConstraints() if asked is None else asked
        self.pinned_axes = dict(self.pins.mesh)
        self.given, self.by_default = asked is None, asked is not None and not asked.searched

    @cached_property
    def estimate(self) -> Estimate:
        """A step of the plan itself."""
        return estimate_plan(self.program, self.plan, self.cluster)

    def next_best(self, decision: str) -> list[NextBest]:
        """Return what another value of ``decision`` would cost; one entry a cut for ``cuts``."""
        if decision == "cuts":
            return [self.cut(number) for number in range(len(self.plan.split_points))]
        ways: dict[str, Callable[[], NextBest]] = {
            "mesh": self._mesh,
            "schedule": self._schedule,
            "microbatches": self._microbatches,
            "zero": self._zero,
            "recompute": self._recompute,
        }
        return [ways[decision]()]

    def _about(self, decision: str, value: str, wished: bool) -> NextBest:
        pinned = self.given or wished
        return NextBest(decision, value, pinned=pinned, by_default=self.by_default and not pinned)

    # ---- searched ----

    def _mesh(self) -> NextBest:
        plan, found = self.plan, self.plan.found
        about = self._about("mesh", _mesh_text(plan.mesh), bool(self.pinned_axes))
        if plan.mesh.size == 1:
            return replace(about, note="there is one device")
        if not about.pinned and found is not None and found.best is not None and found.alternatives:
            other = found.alternatives[0]
            return self._of(about, other, _mesh_text(other.candidate.mesh))
        return self._searched(about, self._open(), {}, lambda each: each.mesh != plan.mesh)

    def _schedule(self) -> NextBest:
        plan, taken = self.plan, (self.plan.schedule, self.plan.stages_per_rank)
        pinned = self.pins.schedule is not None or self.pins.table is not None
        about = self._about("schedule", _schedule_text(*taken), pinned)
        if plan.mesh.pp == 1:
            return replace(about, value="none", note="there is no pipeline")
        return self._searched(
            about,
            replace(self._open(), schedule=None, zero=plan.zero or None),
            plan.mesh.degrees(),
            lambda each: (each.schedule, each.stages_per_rank) != taken,
        )

    def _microbatches(self) -> NextBest:
        plan = self.plan
        value = f"{plan.microbatches} of {plan.microbatch_size}"
        about = self._about("microbatches", value, self.pins.microbatch_size is not None)
        return self._searched(
            about,
            replace(self._open(), microbatch_size=None, zero=plan.zero or None),
            plan.mesh.degrees(),
            lambda each: each.microbatches != plan.microbatches,
        )

    def _zero(self) -> NextBest:
        plan = self.plan
        about = self._about("zero", str(plan.zero), self.pins.zero is not None)
        if plan.mode != "train":
            return replace(about, note="inference has no state to shard")
        if plan.mesh.replicas * plan.mesh.cp == 1:
            return replace(about, note="there is one replica, so no state that could be sharded")
        axes = {axis: degree for axis, degree in plan.mesh.degrees().items() if not axis.startswith("dp_")}
        open_pins = replace(self._open(), zero=None, reshard=None, prefetch=None, prefetch_distance=None)
        return self._searched(about, open_pins, axes, lambda each: each.zero != plan.zero)

    def _open(self) -> PlanConstraints:
        """The user's pins, with what a search decides by default left to it."""
        recompute = self.pins.recompute
        return replace(
            self.pins,
            recompute=AUTO if recompute is None else recompute,
            global_batch=self.plan.global_batch,
            cluster=self.cluster,
            allow_batch_coupling=self.plan.allow_batch_coupling,
        )

    def _searched(
        self,
        about: NextBest,
        pins: PlanConstraints,
        axes: Mapping[str, int],
        keep: Callable[[Candidate], bool],
    ) -> NextBest:
        """Search the candidates that ``keep`` takes; a table of the user's is no candidate, so it is only left for a schedule."""
        if pins.table is not None and about.decision != "schedule":
            return replace(about, note="the schedule table is given, and nothing is searched around it")
        try:
            planner = planner_for(
                self.program,
                self.cluster,
                axes,
                replace(pins, table=None, overlap_tp=self.plan.overlap_tp, top=0, time_limit=LIMIT_S),
            )
            other, complete = planner.fastest(keep)
        except GraphparError as error:
            return replace(about, note=str(error))
        if other is None:
            return replace(about, note="no plan with another value is possible and fits")
        note = "" if complete else f"the best that a search of {LIMIT_S:.0f} s found"
        return replace(self._of(about, other, _values(about.decision, other)), note=note)

    @staticmethod
    def _of(about: NextBest, other: Priced, value: str) -> NextBest:
        return replace(about, other=value, estimate=other.estimate, candidate=other.to_json())

    # ---- priced ----

    def _recompute(self) -> NextBest:
        """Compare with other kinds for all blocks."""
        taken = self.plan.recompute
        value = taken if isinstance(taken, str) else "by block"
        pinned = self.pins.recompute not in (None, AUTO)
        others: list[tuple[str, Recompute]] = [
            (kind, kind)
            for kind in least_first(self.program, overlap_tp=self.plan.overlap_tp, offload=self.plan.offload)
        ]
        return self._best_of(self._about("recompute", value, pinned), others)

    def block(self, path: str) -> NextBest | None:
        """Compare with other recomputation of the block at ``path`` alone; None where that is no block."""
        paths = [each for block in self.program.blocks.values() for each in block.instances]
        if path not in paths or self.plan.mode != "train":
            return None
        kinds = recomputed_blocks(self.program, self.plan.recompute)
        now = kinds.get(path, "none")
        others = [
            (kind, kinds | {path: kind})
            for kind in least_first(self.program, overlap_tp=self.plan.overlap_tp, offload=self.plan.offload)
            if kind != now
        ]
        return self._best_of(NextBest(path, f"recompute {now}"), others)

    def _best_of(self, about: NextBest, others: Sequence[tuple[str, Recompute]]) -> NextBest:
        """Price the plan with each of ``others``, and take the fastest that fits, or else the one nearest to fitting."""
        taken = recomputed_blocks(self.program, self.plan.recompute)
        now = self.plan.predicted or estimate_plan(self.program, self.plan, self.cluster)
        found: list[tuple[str, Estimate]] = []
        for name, recompute in others:
            try:
                if recomputed_blocks(self.program, recompute) != taken:
                    plan = replace(self.plan, recompute=recompute)
                    other = estimate_plan(self.program, plan, self.cluster)
                    if (other.step_time_s, other.peak_memory_bytes) != (now.step_time_s, now.peak_memory_bytes):
                        found.append((name, other))
            except GraphparError:  # a block that can't run again
                continue
        if not found:
            return replace(about, note="nothing else is possible")
        name, estimate = min(found, key=lambda each: (max(0, each[1].missing_bytes), each[1].step_time_s))
        return replace(about, other=f"recompute {name}", estimate=estimate)

    @cached_property
    def _prices(self) -> tuple[Pricing, Layout]:
        return pricing_of(self.program, self.plan, self.cluster)

    def cut(self, number: int) -> NextBest:
        """Compare with the cut after stage ``number`` a unit earlier and a unit later."""
        pricing, layout = self._prices
        point = self.plan.split_points[number]
        pins = self.pins
        pinned = any(each is not None for each in (pins.split_points, pins.stages)) or pins.by_layers
        about = self._about(str(point.path), f"stage {number + 1} begins there", pinned)
        found = []
        for starts, name in self._moved(pricing, layout.starts, number + 1):
            found.append((name, pricing.estimate(replace(layout, starts=starts))))
        if not found:
            return replace(about, note="no stage may begin elsewhere between its neighbours")
        name, estimate = min(found, key=lambda each: (max(0, each[1].missing_bytes), each[1].step_time_s))
        return replace(about, other=name, estimate=estimate)

    @staticmethod
    def _moved(pricing: Pricing, starts: tuple[int, ...], stage: int) -> Iterator[tuple[tuple[int, ...], str]]:
        """Yield the starts with that of ``stage`` at the nearest unit before and after it where a stage may begin, and its path."""
        last = starts[stage + 1] if stage + 1 < len(starts) else len(pricing.units)
        ways = range(starts[stage] - 1, starts[stage - 1], -1), range(starts[stage] + 1, last)
        for units in ways:
            for unit in units:
                point = pricing.units[unit].split_point
                if point is not None:
                    yield (*starts[:stage], unit, *starts[stage + 1 :]), f"it begins at {point.path}"
                    break


def _mesh_text(mesh: Mesh) -> str:
    return ", ".join(f"{axis}={degree}" for axis, degree in mesh.degrees().items() if degree > 1) or "one device"


def _schedule_text(schedule: str, per_rank: int) -> str:
    return schedule if per_rank == 1 else f"{schedule} with {per_rank} stages a rank"


def _values(decision: str, other: Priced) -> str:
    each = other.candidate
    return {
        "mesh": _mesh_text(each.mesh),
        "schedule": _schedule_text(each.schedule, each.stages_per_rank),
        "microbatches": f"{each.microbatches} of {each.microbatch_size}",
        "zero": str(each.zero),
    }[decision]


def parts_of(estimate: Estimate) -> tuple[dict[str, float], dict[str, int]]:
    """Return the parts of the busiest rank's step in seconds, and of the fullest rank's memory in bytes."""
    return dict(estimate.parts_s), asdict(estimate.memory[estimate.fullest[0]])


def costs(taken: Estimate, other: Estimate) -> dict[str, Any]:
    """Return by how much ``other`` takes more than ``taken``: seconds and bytes, in all and by part, as plain data."""
    (seconds, nbytes), (others, other_bytes) = parts_of(taken), parts_of(other)
    return {
        "step_time_s": other.step_time_s - taken.step_time_s,
        "parts_s": {
            name: more
            for name in dict.fromkeys((*seconds, *others))
            if (more := others.get(name, 0.0) - seconds.get(name, 0.0))
        },
        "peak_memory_bytes": max(other.peak_memory_bytes) - max(taken.peak_memory_bytes),
        "memory": {name: more for name, now in nbytes.items() if (more := other_bytes[name] - now)},
        "relative": other.step_time_s / taken.step_time_s - 1 if taken.step_time_s else math.nan,
    }
