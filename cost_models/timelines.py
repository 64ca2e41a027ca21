"""Priced stages in time: what a step's simulation needs besides the order of actions. Reports read it without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphpar.schedule_order import Order
from graphpar.schedule_table import ActionTable
from graphpar.simulation import Timeline, Transfers, simulate
from graphpar.turns import Turns


@dataclass(frozen=True)
class StageEstimate:
    """A stage in a report. Seconds of one microbatch; those of what it sends on, and of the gradients that it is sent back."""

    index: int
    rank: int
    units: tuple[int, int]
    forward_s: float
    backward_s: float
    weight_s: float
    parameters: int
    sent_s: float
    returned_s: float


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
        forward, backward, weight = ([getattr(stage, name) for stage in stages] for name in ("forward_s", "backward_s", "weight_s"))
        inward = [max(0.0, whole - part) for whole, part in zip(backward, weight)]
        costs = [[cost + self.action_s for cost in own] for own in (forward, backward, weight, inward)]
        there, back = ([getattr(stage, name) for stage in stages[:-1]] for name in ("sent_s", "returned_s"))
        transfers = Transfers(there, back, one_at_a_time=True, sender_waits=self.sender_waits)
        return simulate(
            order, costs[0], costs[1], costs[2], input_backward=costs[3], transfers=transfers, turns=self.turns, spans=spans
        )

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Conditions:
        """The inverse of ``dataclasses.asdict``."""
        turns = data["turns"]
        return Conditions(data["sender_waits"], data["action_s"], None if turns is None else Turns(**turns))
