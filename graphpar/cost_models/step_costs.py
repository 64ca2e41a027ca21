"""The parts of a step: seconds of units, of stages, and of a whole step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphpar.cost_models.compute import PhaseSeconds
from graphpar.cost_models.timelines import Conditions, StageEstimate, StepEnd
from graphpar.schedules.simulation import Timeline


@dataclass(frozen=True)
class UnitSeconds:
    """One microbatch of a unit: seconds of each phase, of its collectives by axis, and of those that what runs beside them does not hide.

    ``apart``: more of these, where a schedule runs the halves of a backward apart.
    """

    phases: tuple[PhaseSeconds, PhaseSeconds, PhaseSeconds]
    sent: tuple[Mapping[str, float], Mapping[str, float], Mapping[str, float]]
    exposed: tuple[Mapping[str, float], Mapping[str, float], Mapping[str, float]]
    apart: Mapping[str, float]


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one microbatch of a stage.

    Attributes:
        backward: both halves, and the recomputation of the forward.
        weight: the weight half of the backward.
        forward_sent, backward_sent: collectives by axis, hidden or not.
        forward_exposed, backward_exposed: those that computation does not hide.
        compute: of the device, recomputation included.
    """

    forward: float
    backward: float
    weight: float
    forward_sent: Mapping[str, float]
    backward_sent: Mapping[str, float]
    forward_exposed: Mapping[str, float]
    backward_exposed: Mapping[str, float]
    compute: float

    @property
    def sent(self) -> dict[str, float]:
        """Collectives by axis, forward and backward."""
        return summed_by_axis([self.forward_sent, self.backward_sent])

    @property
    def exposed(self) -> dict[str, float]:
        """Exposed collectives by axis, forward and backward."""
        return summed_by_axis([self.forward_exposed, self.backward_exposed])


@dataclass(frozen=True)
class StepCosts:
    """A step: its stages, their costs, the stages of each pp rank, the pipeline, and the end of the step on each rank."""

    staged: tuple[StageEstimate, ...]
    costs: Sequence[StageSeconds]
    own: Sequence[Sequence[int]]
    conditions: Conditions
    timeline: Timeline
    closings: tuple[StepEnd, ...]

    @property
    def pipeline(self) -> float:
        """Seconds until the last action."""
        return max(self.timeline.ends)

    @property
    def summed(self) -> float:
        """Seconds until all gradients are reduced."""
        return max(end + closing.exposed for end, closing in zip(self.timeline.ends, self.closings))

    @property
    def after(self) -> float:
        """Seconds of the slowest optimizer, with the exposed gathers after it."""
        return max(closing.optimizer + closing.gather_exposed for closing in self.closings)

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.summed + self.after


def summed_by_axis(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Add up the seconds of each axis."""
    found: dict[str, float] = {}
    for part in parts:
        for axis, value in part.items():
            found[axis] = found.get(axis, 0.0) + value
    return found


def continued(first: Timeline, second: Timeline, rounds: float) -> Timeline:
    """Extrapolate a timeline: ``first`` plus ``rounds`` times the difference from ``first`` to ``second``."""

    def on(a: float, b: float) -> float:
        return a + (b - a) * rounds

    def each(name: str) -> tuple[float, ...]:
        return tuple(on(a, b) for a, b in zip(getattr(first, name), getattr(second, name)))

    makespan, busy = on(first.makespan, second.makespan), each("busy")
    bubble = max(0.0, 1 - sum(busy) / (makespan * len(busy))) if makespan else 0.0
    period, peaks = on(first.period, second.period), second.peak_in_flight
    return Timeline((), (), makespan, period, bubble, busy, each("waiting"), each("idle"), each("ends"), peaks)
