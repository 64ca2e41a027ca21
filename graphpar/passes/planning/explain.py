"""Explanations: what another value of each decision costs, what lets a program fit where no plan does, and formulas of stages.

Plan ──one decision forbidden to be as it is──► candidates that are left ──searched──► NextBest
    └─one block, or one cut, changed──────────────────────────────────────priced────► NextBest

no plan fits ──pins given up one by one, else all; state in the hosts' memory; other hardware──► "recompute='auto' (3.21 s a step)"

units ──► polynomials in the rows of a microbatch (b) ──the same at four lengths──► polynomials in b and the sequence length (s)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import sympy  # type: ignore[import-untyped]

from graphpar.cost_models.estimates import Estimate, Layout
from graphpar.cost_models.pipeline_units import JoinedUnits, Unit
from graphpar.cost_models.pricing import Pricing
from graphpar.cost_models.work import Work
from graphpar.errors import GraphparError
from graphpar.hardware.cluster import Cluster
from graphpar.hardware.devices import DEVICES
from graphpar.ir.program import Program
from graphpar.passes.kernel_dropout import writes_out_dropout
from graphpar.passes.planning.candidates import Candidate, Priced, mesh_text
from graphpar.passes.planning.constraints import PlanConstraints, check_offload, free_axes
from graphpar.passes.planning.planned import Planned
from graphpar.passes.planning.prices import estimate_plan, pricing_of
from graphpar.passes.planning.recomputation import least_first, recomputed_blocks
from graphpar.passes.planning.search import Planner
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.option_kinds import AUTO, OFFLOADS, Recompute, on_host
from graphpar.runtime.options import check_decisions
from graphpar.runtime.stages.dropout import KERNEL
from graphpar.text import bytes_text, seconds_text

# ---- what another value of a decision costs ------------------------------------------------------------------------

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
    """The decisions of ``plan`` for ``program`` on ``cluster``, and their next best values. ``constraints``: what the user asked for."""

    def __init__(self, program: Program, plan: Planned, cluster: Cluster, constraints: PlanConstraints | None) -> None:
        self.program, self.plan, self.cluster = program, plan, cluster
        self.pins = PlanConstraints() if constraints is None else constraints
        self.given, self.by_default = constraints is None, constraints is not None and not constraints.searched

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

    def _about(self, decision: str, value: str, constrained: bool) -> NextBest:
        pinned = self.given or constrained
        return NextBest(decision, value, pinned=pinned, by_default=self.by_default and not pinned)

    # ---- searched ----

    def _mesh(self) -> NextBest:
        plan, found = self.plan, self.plan.found
        about = self._about("mesh", mesh_text(plan.mesh), bool(self.pins.mesh))
        if plan.mesh.size == 1:
            return replace(about, note="there is one device")
        if not about.pinned and found is not None and found.best is not None and found.alternatives:
            other = found.alternatives[0]
            return self._of(about, other, mesh_text(other.candidate.mesh))
        return self._searched(about, self._open({}), lambda each: each.mesh != plan.mesh)

    def _schedule(self) -> NextBest:
        plan, taken = self.plan, (self.plan.schedule, self.plan.stages_per_rank)
        pinned = self.pins.schedule is not None or self.pins.table is not None
        about = self._about("schedule", _schedule_text(*taken), pinned)
        if plan.mesh.pp == 1:
            return replace(about, value="none", note="there is no pipeline")
        return self._searched(
            about,
            replace(self._open(plan.mesh.degrees()), schedule=None, zero=plan.zero or None),
            lambda each: (each.schedule, each.stages_per_rank) != taken,
        )

    def _microbatches(self) -> NextBest:
        plan = self.plan
        value = f"{plan.microbatches} of {plan.microbatch_size}"
        about = self._about("microbatches", value, self.pins.microbatch_size is not None)
        return self._searched(
            about,
            replace(self._open(plan.mesh.degrees()), microbatch_size=None, zero=plan.zero or None),
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
        open_pins = replace(
            self._open(axes), zero=None, zero1_by=None, reshard=None, units=None, prefetch=None, prefetch_distance=None
        )
        return self._searched(about, open_pins, lambda each: each.zero != plan.zero)

    def _open(self, mesh: Mapping[str, int]) -> PlanConstraints:
        """The user's pins on ``mesh``, with what a search decides by default left to it."""
        recompute = self.pins.recompute
        return replace(
            self.pins,
            recompute=AUTO if recompute is None else recompute,
            global_batch=self.plan.global_batch,
            cluster=self.cluster,
            mesh=mesh,
            allow_batch_coupling=self.plan.allow_batch_coupling,
            top=0,
            time_limit=LIMIT_S,
        )

    def _searched(self, about: NextBest, pins: PlanConstraints, keep: Callable[[Candidate], bool]) -> NextBest:
        """Search the candidates that ``keep`` takes; a table of the user's is no candidate, so it is only left for a schedule."""
        if pins.table is not None and about.decision != "schedule":
            return replace(about, note="the schedule table is pinned, and nothing else is searched")
        try:
            found = Planner(self.program, replace(pins, table=None)).search(keep=keep)
        except GraphparError as error:
            return replace(about, note=str(error))
        if (other := found.best) is None:
            return replace(about, note="no plan with another value is possible and fits")
        open_ones = found.tried is not None and found.tried.open
        note = f"the best that a search of {LIMIT_S:.0f} s found" if open_ones else ""
        return replace(self._of(about, other, _decision_texts(about.decision, other)), note=note)

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


def _schedule_text(schedule: str, per_rank: int) -> str:
    return schedule if per_rank == 1 else f"{schedule} with {per_rank} stages a rank"


def _decision_texts(decision: str, other: Priced) -> str:
    each = other.candidate
    return {
        "mesh": mesh_text(each.mesh),
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


# ---- what lets a program fit ---------------------------------------------------------------------------------------

GROWTH = (2, 4, 8, 16)
"""Factors by which the number of devices is multiplied."""
Fits = Callable[[PlanConstraints], Priced | None]
"""Returns a plan that fits; None where there is none."""


@dataclass(frozen=True)
class Remedy:
    """A change, and a plan that fits with it."""

    change: str
    priced: Priced

    @property
    def text(self) -> str:
        """The change and the seconds of a step."""
        return f"{self.change} ({seconds_text(self.priced.estimate.step_time_s)} a step)"


@dataclass(frozen=True)
class _Change:
    """Pins with which more may fit; ``says`` writes what the plan that was found has instead."""

    pins: PlanConstraints
    says: Callable[[Candidate], str]


def misfit_text(program: Program, pins: PlanConstraints, nearest: Priced, planner: Planner) -> str:
    """Say by how much the nearest plan does not fit, on which stage, and the smallest changes that would help."""
    estimate, cluster, candidate = nearest.estimate, planner.cluster, nearest.candidate
    fullest, on = estimate.fullest
    needed, room = estimate.peak_memory_bytes[fullest], estimate.room_text
    text = (
        f"No plan for {program.name} fits {cluster}. The nearest ({mesh_text(candidate.mesh)}, {candidate.schedule}, microbatches of "
        f"{candidate.microbatch_size}) needs {bytes_text(needed)} on stage {'/'.join(map(str, on))}, but a device has {room}: "
        f"{bytes_text(nearest.missing)} too much."
    )

    def fits(changed: PlanConstraints) -> Priced | None:
        other = Planner(program, changed, like=planner)
        return other.search().best if changed.cluster == cluster else other.any_that_fits()

    changes = [each.text for each in remedies(program, pins, fits)]
    memory = f"devices with {bytes_text(needed)}"
    if not changes:
        return f"{text} It would take {memory}; {GROWTH[-1]} times as many of these would not suffice."
    return f"{text} What would fit: {'; '.join(changes)}; {memory}."


def remedies(program: Program, pins: PlanConstraints, fits: Fits) -> list[Remedy]:
    """Return changes with each of which ``program`` fits ``pins.cluster``.

    Changes of the plan come first, the fastest first; then more of the same devices, as few as do, and devices with more memory, as
    little as does.

    Args:
        fits: looks for a plan.
    """
    changes = list(_given_up(program, pins))
    found = [*_found(changes, fits), *_offloaded(program, pins, fits)]
    if not found and len(changes) > 1:
        found = _found([_all_given_up(program, pins)], fits)
    return [*sorted(found, key=lambda each: each.priced.rank_key), *_other_hardware(pins, fits)]


def _offloaded(program: Program, pins: PlanConstraints, fits: Fits) -> list[Remedy]:
    """Return what lets ``program`` fit in the memory of the hosts as well, as little of it as does."""
    assert pins.cluster is not None
    if program.mode != "train" or pins.cluster.device.host_link is None:
        return []
    for count in range(1, len(OFFLOADS) + 1):
        wider = [
            each
            for each in itertools.combinations(OFFLOADS, count)
            if on_host((*each, *(pins.offload or ()))) == each != pins.offload
        ]
        changes = [
            _Change(offloading, lambda _, each=each: f"offload={','.join(each)!r}")  # type: ignore[misc]
            for each in wider
            if _can(offloading := replace(pins, offload=each), program)
        ]
        found = [each for each in _found(changes, fits) if each.priced.estimate.host_missing_bytes <= 0]
        if found:
            return found
    return []


def _can(pins: PlanConstraints, program: Program) -> bool:
    try:
        mesh = Mesh.resolve(pins.mesh, pins.devices) if pins.complete else Mesh(**pins.mesh)
        given = PlanConstraints(offload=pins.offload, recompute=pins.recompute, zero=pins.zero)
        check_decisions(given, mesh, program.mode, () if pins.complete else free_axes(pins.mesh, pins.zero))
        check_offload(pins, program)
    except GraphparError:
        return False
    return True


def _found(changes: list[_Change], fits: Fits) -> list[Remedy]:
    tried = [(change, fits(change.pins)) for change in changes]
    found = [Remedy(change.says(priced.candidate), priced) for change, priced in tried if priced is not None]
    return list({each.change: each for each in found}.values())


def _given_up(program: Program, pins: PlanConstraints) -> Iterator[_Change]:
    """Yield the changes that each give up one thing that the user pinned, or one that is not searched unasked."""
    assert pins.cluster is not None
    train, mesh = program.mode == "train", pins.mesh
    if train and pins.recompute != AUTO:
        yield _Change(replace(pins, recompute=AUTO), lambda _: f"recompute={AUTO!r}")
    if not pins.compile and pins.cluster.device.kind != "cpu" and writes_out_dropout(program):
        yield _Change(replace(pins, dropout=KERNEL), lambda _: f"dropout={KERNEL!r}")
    if pins.microbatch_size is not None:
        yield _Change(
            replace(pins, microbatch_size=None),
            lambda found: f"microbatches of {found.microbatch_size} instead of {pins.microbatch_size}",
        )
    if pins.schedule is not None:
        yield _Change(
            replace(pins, schedule=None),
            lambda found: f"{mesh_text(found.mesh)} with {found.schedule} instead of {pins.schedule}",
        )
    if train and pins.zero is not None and pins.zero < 3:
        without = replace(pins, zero=None, zero1_by=None)
        yield _Change(without, lambda found: f"zero={found.zero} with {mesh_text(found.mesh)}")
    if train and not pins.zero and mesh.get("dp_replicate", 1) > 1 and "dp_shard" not in mesh:
        others = {axis: degree for axis, degree in mesh.items() if axis != "dp_replicate"}
        yield _Change(
            replace(pins, zero=None, mesh=others | {"dp_shard": mesh["dp_replicate"]}),
            lambda found: f"dp_shard={found.mesh.dp_shard} instead of dp_replicate={mesh['dp_replicate']}",
        )
    if pins.cluster.headroom:
        full = replace(pins, memory_headroom=0.0, cluster=replace(pins.cluster, headroom=0.0))
        yield _Change(full, lambda _: "memory_headroom=0")
    for axis, degree in mesh.items():
        yield _Change(
            replace(pins, mesh={other: value for other, value in mesh.items() if other != axis}),
            lambda found, axis=axis, degree=degree: f"{mesh_text(found.mesh)} instead of {axis}={degree}",  # type: ignore[misc]
        )


def _all_given_up(program: Program, pins: PlanConstraints) -> _Change:
    free = replace(
        pins, mesh={}, recompute=AUTO if program.mode == "train" else "none", microbatch_size=None, schedule=None, zero=None,
        zero1_by=None, reshard=None, prefetch=None, prefetch_distance=None,
    )  # fmt: skip
    return _Change(free, lambda found: f"nothing pinned, such as {mesh_text(found.mesh)}")


def _other_hardware(pins: PlanConstraints, fits: Fits) -> Iterator[Remedy]:
    cluster = pins.cluster
    assert cluster is not None
    if cluster.groups:
        return
    larger = [cluster.grown(times) for times in GROWTH]
    device = cluster.device
    others = sorted(
        (
            each for each in DEVICES.values()
            if each.kind == device.kind and each.memory_bytes > device.memory_bytes and each.peak("bf16") >= device.peak("bf16")
        ),
        key=lambda each: (each.memory_bytes, each.peak("bf16")),
    )  # fmt: skip
    with_more = [
        replace(Cluster.of(each, cluster.nodes, cluster.devices_per_node), headroom=cluster.headroom) for each in others
    ]
    for kind in (larger, with_more):
        for each in kind:
            priced = fits(replace(pins, cluster=each))
            if priced is not None:
                yield Remedy(f"{each} with {mesh_text(priced.candidate.mesh)}", priced)
                break


# ---- formulas of stages --------------------------------------------------------------------------------------------

B, S = sympy.Symbol("b", positive=True), sympy.Symbol("s", positive=True)
KEPT = "kept bytes"
Formulas = Mapping[str, sympy.Expr]
PARTS = (Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(3, 4))
"""The sequence lengths to sample, as fractions of the example's; the last one is the check."""
_ROWS = (2, 3, 5, 64)
"""Microbatch sizes at which kept bytes are sampled: a line through the first two, checked with the others."""


def formulas(pricing: Pricing, layout: Layout) -> list[Formulas]:
    """Return for each stage and one microbatch of b rows: flops, bytes moved by memory-bound kernels, bytes of collectives by axis,
    and bytes kept for the backward where those are linear in b."""
    found: list[Formulas] = []
    for first, after in pricing.stages_of(layout):
        units = pricing.units[first:after]
        work = sum((unit.kind.work for unit in units), Work())
        kept = _kept(units)
        found.append(work.formula(B) | ({} if kept is None else {KEPT: kept}))
    return found


def _kept(units: Sequence[Unit]) -> sympy.Expr | None:
    kept = {rows: JoinedUnits(units, rows).stage(0, len(units)).kept for rows in _ROWS}
    slope = kept[_ROWS[1]] - kept[_ROWS[0]]
    fixed = kept[_ROWS[0]] - _ROWS[0] * slope
    rounding = len(units)  # sizes of units are whole bytes
    linear = all(abs(fixed + slope * rows - nbytes) <= rounding for rows, nbytes in kept.items())
    return fixed + slope * B if linear else None


def in_sequence(samples: Mapping[int, Sequence[Formulas]]) -> list[Formulas] | None:
    """Fit formulas in b and s to those in b at several lengths; the last length checks, and a formula that fails is left out.

    Returns:
        None where the stages or the kinds of work differ between lengths.
    """
    *lengths, checked = samples
    if len({tuple(tuple(sorted(stage)) for stage in stages) for stages in samples.values()}) > 1:
        return None
    found: list[Formulas] = []
    for place, stage in enumerate(samples[checked]):
        fitted = {name: _fitted({length: samples[length][place][name] for length in lengths}) for name in stage}
        found.append(
            {name: fit for name, fit in fitted.items() if sympy.expand(fit.subs(S, checked) - stage[name]) == 0}
        )
    return found


def _fitted(samples: Mapping[int, sympy.Expr]) -> sympy.Expr:
    """Interpolate in s, for each coefficient of b."""
    powers = {power for sample in samples.values() for (power,) in sympy.Poly(sample, B).monoms()}
    terms = []
    for power in sorted(powers, reverse=True):
        points = [(length, sympy.Poly(sample, B).coeff_monomial(B**power)) for length, sample in samples.items()]
        terms.append(sympy.interpolate(points, S) * B**power)
    return sympy.expand(sum(terms))
