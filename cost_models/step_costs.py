"""What a step is made of: seconds of units, of stages, and of the step of a layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphpar.cost_models.compute import PhaseSeconds
from graphpar.cost_models.timelines import Conditions, StageEstimate, StepEnd
from graphpar.schedules.simulation import Timeline


@dataclass(frozen=True)
class UnitSeconds:
    """One microbatch of a unit: device and host, and its collectives by axis, in each phase."""

    phases: tuple[PhaseSeconds, PhaseSeconds, PhaseSeconds]
    sent: tuple[Mapping[str, float], Mapping[str, float], Mapping[str, float]]


@dataclass(frozen=True)
class StageSeconds:
    """One microbatch of a stage. ``backward`` has both halves, and the forward again where it is recomputed.

    ``sent``: seconds of collectives by axis, forward and backward; of each, ``forward_exposed`` and ``backward_exposed`` are what of
    them nothing hides.
    """

    forward: float
    backward: float
    weight: float
    sent: Mapping[str, float]
    forward_exposed: Mapping[str, float]
    backward_exposed: Mapping[str, float]
    compute: float

    @property
    def exposed(self) -> dict[str, float]:
        return summed_by_axis([self.forward_exposed, self.backward_exposed])


@dataclass(frozen=True)
class StepCosts:
    """A step in time: its stages, their costs, the stages of each pp rank, the pipeline, and what each rank does after it."""

    staged: tuple[StageEstimate, ...]
    costs: Sequence[StageSeconds]
    own: Sequence[Sequence[int]]
    conditions: Conditions
    timeline: Timeline
    closings: tuple[StepEnd, ...]

    @property
    def pipeline(self) -> float:
        return max(self.timeline.ends)

    @property
    def summed(self) -> float:
        """When all gradients are."""
        return max(end + closing.exposed for end, closing in zip(self.timeline.ends, self.closings))

    @property
    def after(self) -> float:
        """What the slowest optimizer takes, with the gathers that it leaves."""
        return max(closing.optimizer + closing.gather_exposed for closing in self.closings)

    @property
    def seconds(self) -> float:
        return self.summed + self.after


def summed(phases: Sequence[PhaseSeconds]) -> PhaseSeconds:
    """One after the other."""
    return PhaseSeconds(
        sum(each.products for each in phases), sum(each.attention for each in phases), sum(each.traffic for each in phases),
        sum(each.operators for each in phases),
    )  # fmt: skip


def summed_by_axis(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Seconds of each axis, added up."""
    found: dict[str, float] = {}
    for part in parts:
        for axis, value in part.items():
            found[axis] = found.get(axis, 0.0) + value
    return found


def continued(first: Timeline, second: Timeline, rounds: float) -> Timeline:
    """What goes on after ``first`` for ``rounds`` times as long as from there to ``second``."""

    def on(a: float, b: float) -> float:
        return a + (b - a) * rounds

    def each(name: str) -> tuple[float, ...]:
        return tuple(on(a, b) for a, b in zip(getattr(first, name), getattr(second, name)))

    makespan, busy = on(first.makespan, second.makespan), each("busy")
    bubble = max(0.0, 1 - sum(busy) / (makespan * len(busy))) if makespan else 0.0
    return Timeline(
        (),
        (),
        makespan,
        on(first.period, second.period),
        bubble,
        busy,
        each("waiting"),
        each("idle"),
        each("ends"),
        second.peak_in_flight,
    )
