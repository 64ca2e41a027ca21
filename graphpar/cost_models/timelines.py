"""Simulate a step from priced stages and the order of actions. Reports use this without torch.

actions, stages ──Conditions.timeline──► the pipeline ──whole_step(closings)──► the step, as long as the predicted one
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from graphpar.schedules.action_table import STATE, ActionTable
from graphpar.schedules.core_sharing import SharedCores
from graphpar.schedules.order import Order
from graphpar.schedules.simulation import Segment, Span, Timeline, Transfers, simulate


@dataclass(frozen=True)
class StageEstimate:
    """A stage in a report, in seconds of one microbatch.

    Attributes:
        units: the first, and the one after the last.
        weight_s: the weight half of the backward; it has no collectives.
        sent_s, returned_s: transfer of its result to the next stage, and of the gradient back.
        forward_exposed_s, backward_exposed_s: collectives by axis that computation does not hide.
        forward_sent_s, backward_sent_s: all of them.
        gather_s, reduce_s: of its sharded state, once a step, where the schedule's table says when.
        state_axis: under which axis these are counted.
        kept_bytes: of activations, from a microbatch's forward to its backward; ``left_bytes``: from the first half of that to the second.
        gathered_bytes, gradient_bytes: of sharded state, what is whole from its first action to its last, and from its first backward on.
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
    gather_s: float = 0.0
    reduce_s: float = 0.0
    state_axis: str = "dp_shard"
    kept_bytes: int = 0
    left_bytes: int = 0
    gathered_bytes: int = 0
    gradient_bytes: int = 0
    forward_sent_s: Mapping[str, float] = field(default_factory=dict)
    backward_sent_s: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> StageEstimate:
        """Return the inverse of ``dataclasses.asdict``."""
        return StageEstimate(**{**data, "units": tuple(data["units"])})

    def exposed_s(self, kind: str) -> Mapping[str, float]:
        """Return the exposed collectives by axis of an action, by its kind."""
        if kind in STATE:
            return {self.state_axis: {"UNSHARD": self.gather_s, "REDUCE_GRAD": self.reduce_s}.get(kind, 0.0)}
        return self.forward_exposed_s if kind == "F" else {} if kind == "W" else self.backward_exposed_s

    def collectives_s(self, kind: str) -> Mapping[str, float]:
        """Return all collectives by axis of an action, by its kind."""
        if kind in STATE:
            return self.exposed_s(kind)
        return self.forward_sent_s if kind == "F" else {} if kind == "W" else self.backward_sent_s


@dataclass(frozen=True)
class StepEnd:
    """The end of the step on a pp rank, in seconds: gradients are reduced over ``axis``, the optimizer runs, parameters are gathered.

    ``exposed`` and ``gather_exposed`` are the parts of reduce and gather that neither backwards nor the next forwards hide;
    ``reduced_bytes`` and ``gathered_bytes`` are of the gradients and the parameters.
    """

    reduce: float
    exposed: float
    gather: float
    gather_exposed: float
    optimizer: float
    axis: str | None
    reduced_bytes: int = 0
    gathered_bytes: int = 0


@dataclass(frozen=True)
class Conditions:
    """How ranks run their actions.

    Attributes:
        sender_waits: the sender waits until its message has arrived.
        action_s: overhead of an action besides its stage's work.
        turns: how ranks share cores, where they outnumber them.
    """

    sender_waits: bool = False
    action_s: float = 0.0
    turns: SharedCores | None = None

    def timeline(self, order: Order | ActionTable, stages: Sequence[StageEstimate], *, spans: bool) -> Timeline:
        """Simulate the actions of ``order``."""
        forward = [stage.forward_s + self.action_s for stage in stages]
        backward = [stage.backward_s + self.action_s for stage in stages]
        weight = [stage.weight_s + self.action_s for stage in stages]
        inward = [max(0.0, stage.backward_s - stage.weight_s) + self.action_s for stage in stages]
        there, back = [stage.sent_s for stage in stages[:-1]], [stage.returned_s for stage in stages[:-1]]
        transfers = Transfers(there, back, one_at_a_time=True, sender_waits=self.sender_waits)
        gather, reduce = [stage.gather_s for stage in stages], [stage.reduce_s for stage in stages]
        return simulate(
            order, forward, backward, weight, input_backward=inward, gather=gather, reduce=reduce, transfers=transfers,
            cores=self.turns, spans=spans,
        )  # fmt: skip

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Conditions:
        """Return the inverse of ``dataclasses.asdict``."""
        turns = data["turns"]
        return Conditions(data["sender_waits"], data["action_s"], None if turns is None else SharedCores(**turns))


def whole_step(pipeline: Timeline, stages: Sequence[StageEstimate], closings: Sequence[StepEnd]) -> Timeline:
    """Add to the pipeline the collectives inside its actions, and the end of the step.

    A rank reduces its gradients after its last action. Optimizers start when all ranks have, since the norm of all gradients is needed.
    """
    summed = max((end + closing.exposed for end, closing in zip(pipeline.ends, closings)), default=0.0)
    rows: list[tuple[Segment, ...]] = []
    beside: list[tuple[Segment, ...]] = []
    for end, closing in zip(pipeline.ends, closings):
        updated, axis = summed + closing.optimizer, closing.axis or ""
        segments = (
            Segment("gradients", end, end + closing.exposed, axis),
            Segment("optimizer", summed, updated),
            Segment("parameters", updated, updated + closing.gather_exposed, axis),
        )
        hidden = (
            Segment("parameters", 0.0, closing.gather - closing.gather_exposed, axis),  # of the step before
            Segment("gradients", max(0.0, end - (closing.reduce - closing.exposed)), end, axis),
        )
        for found, shown in ((rows, segments), (beside, hidden)):
            found.append(tuple(segment for segment in shown if segment.end > segment.start))

    def with_collectives(span: Span) -> Span:
        exposed = stages[span.action.stage].exposed_s(span.action.kind)
        return replace(span, collectives=tuple((axis, seconds) for axis, seconds in exposed.items() if seconds > 0))

    spans = tuple(tuple(map(with_collectives, row)) for row in pipeline.spans)
    return replace(pipeline, spans=spans, closing=tuple(rows), beside=tuple(beside))
