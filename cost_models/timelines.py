"""Priced stages in time: what a step's simulation needs besides the order of actions. Reports read it without torch.

actions, stages ──Conditions.timeline──► the pipeline ──whole_step(closings)──► the step, as long as the predicted one
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from graphpar.schedules.core_sharing import Turns
from graphpar.schedules.order import Order
from graphpar.schedules.simulation import Segment, Span, Timeline, Transfers, simulate
from graphpar.schedules.table import ActionTable


@dataclass(frozen=True)
class StageEstimate:
    """A stage in a report. Seconds of one microbatch; those of what it sends on, and of the gradients that it is sent back.

    ``forward_exposed_s``, ``backward_exposed_s``: of the forward and the backward, the seconds of collectives by axis that nothing
    hides. The weight half of a backward has none.
    """

    index: int
    rank: int
    units: tuple[int, int]
    forward_s: float
    backward_s: float
    weight_s: float
    parameters: int
    sent_s: float
    returned_s: float
    forward_exposed_s: Mapping[str, float] = field(default_factory=dict)
    backward_exposed_s: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> StageEstimate:
        """The inverse of ``dataclasses.asdict``."""
        return StageEstimate(**{**data, "units": tuple(data["units"])})

    def exposed_s(self, kind: str) -> Mapping[str, float]:
        """Of an action of this kind."""
        return self.forward_exposed_s if kind == "F" else {} if kind == "W" else self.backward_exposed_s


@dataclass(frozen=True)
class StepEnd:
    """What a pp rank does once a step, in seconds: its gradients are summed over ``axis``, its optimizer runs, parameters are gathered.

    ``exposed`` and ``gather_exposed``: what of the sums and the gathers neither its last backwards nor its next forwards hide.
    """

    reduce: float
    exposed: float
    gather: float
    gather_exposed: float
    optimizer: float
    axis: str | None


@dataclass(frozen=True)
class Conditions:
    """Under which ranks run their actions.

    Attributes:
        sender_waits: until what it sends has arrived.
        action_s: what an action takes besides its stage's work.
        turns: of ranks that share cores.
    """

    sender_waits: bool = False
    action_s: float = 0.0
    turns: Turns | None = None

    def timeline(self, order: Order | ActionTable, stages: Sequence[StageEstimate], *, spans: bool) -> Timeline:
        """The actions of ``order`` in time; what the last stage would send on does not count."""
        forward, backward, weight = (
            [getattr(stage, name) for stage in stages] for name in ("forward_s", "backward_s", "weight_s")
        )
        inward = [max(0.0, whole - part) for whole, part in zip(backward, weight)]
        costs = [[cost + self.action_s for cost in own] for own in (forward, backward, weight, inward)]
        there, back = ([getattr(stage, name) for stage in stages[:-1]] for name in ("sent_s", "returned_s"))
        transfers = Transfers(there, back, one_at_a_time=True, sender_waits=self.sender_waits)
        return simulate(
            order,
            costs[0],
            costs[1],
            costs[2],
            input_backward=costs[3],
            transfers=transfers,
            turns=self.turns,
            spans=spans,
        )

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Conditions:
        """The inverse of ``dataclasses.asdict``."""
        turns = data["turns"]
        return Conditions(data["sender_waits"], data["action_s"], None if turns is None else Turns(**turns))


def whole_step(pipeline: Timeline, stages: Sequence[StageEstimate], closings: Sequence[StepEnd]) -> Timeline:
    """The pipeline with the collectives inside its actions, and with what comes after it.

    A rank sums its gradients when it has done its last action. The optimizers start when all have: a norm of all gradients is between.
    """
    summed = max((end + closing.exposed for end, closing in zip(pipeline.ends, closings)), default=0.0)
    rows = []
    for end, closing in zip(pipeline.ends, closings):
        updated = summed + closing.optimizer
        segments = (
            Segment("gradients", end, end + closing.exposed),
            Segment("optimizer", summed, updated),
            Segment("parameters", updated, updated + closing.gather_exposed),
        )
        rows.append(tuple(segment for segment in segments if segment.end > segment.start))

    def with_collectives(span: Span) -> Span:
        exposed = stages[span.action.stage].exposed_s(span.action.kind)
        return replace(span, collectives=tuple((axis, seconds) for axis, seconds in exposed.items() if seconds > 0))

    spans = tuple(tuple(map(with_collectives, row)) for row in pipeline.spans)
    return replace(pipeline, spans=spans, closing=tuple(rows))
