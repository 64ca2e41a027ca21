"""Zero-bubble schedules with one stage a rank, which torch lacks; they run as tables.

A backward is split into ``I`` (the gradient of the stage's input, for which the rank before waits) and ``W`` (the
gradients of its weights, for which no rank waits), so that W runs where the rank would wait (Qi et al., Zero Bubble
Pipeline Parallelism, arXiv 2401.10241).

::

    ZB-H1, 3 ranks    rank 0   F0 F1 F2 .. .. I0 W0 F3 I1 W1 ...       rank r: 3 - r forwards ahead, W is r behind I
                      rank 2   .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 ...

H1 keeps as many activations as 1F1B, H2 up to twice as many. :func:`automatic` places all actions by their costs
under a limit of memory; the paper's ZB-1p and ZB-2p are its results at 1 and 2 times the memory of 1F1B.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product
from typing import Literal

from graphpar.errors import GraphparError
from graphpar.schedules.action_table import Action, ActionTable, Cell, make_table
from graphpar.schedules.simulation import Timeline, Transfers, in_flight, simulate


def handcrafted(pp: int, microbatches: int, lead: int) -> ActionTable:
    """Make the tables of ZB-H1 (``lead`` 1) and ZB-H2 (``lead`` 2): section 2.3 of the paper.

    Rank r runs 1 + lead (p - 1 - r) forwards ahead; then input backwards and forwards alternate, and the W of a microbatch
    runs lead r input backwards after its own, so that every rank holds at most 1 + lead (p - 1) activations.
    """
    return make_table([list(_handcrafted_rank(rank, pp, microbatches, lead)) for rank in range(pp)])


def _handcrafted_rank(rank: int, pp: int, microbatches: int, lead: int) -> Iterator[Cell]:
    ahead = min(microbatches, 1 + lead * (pp - 1 - rank))
    behind = lead * rank
    for microbatch in range(ahead):
        yield Action(rank, "F", microbatch)
    for microbatch in range(microbatches + behind):
        if microbatch < microbatches:
            yield Action(rank, "I", microbatch)
        if 0 <= microbatch - behind < microbatches:
            yield Action(rank, "W", microbatch - behind)
        if microbatch + ahead < microbatches:
            yield Action(rank, "F", microbatch + ahead)


# ------------------------------------------------------------------------------------------ automatic


@dataclass(frozen=True, slots=True)
class StageCosts:
    """The time of every stage's actions, and of the transfers between stages (one fewer), in one unit."""

    forward: Sequence[float]
    input_backward: Sequence[float]
    weight: Sequence[float]
    transfers: Transfers

    def simulated(self, table: ActionTable, *, spans: bool = False) -> Timeline:
        """Simulate a table with these costs."""
        whole = [split + weight for split, weight in zip(self.input_backward, self.weight)]
        return simulate(
            table,
            self.forward,
            whole,
            self.weight,
            input_backward=self.input_backward,
            transfers=self.transfers,
            spans=spans,
        )


def automatic(microbatches: int, costs: StageCosts, limit: float, for_weight: float = 1.0) -> ActionTable:
    """Search the table of the shortest period for these costs in which no rank keeps more than ``limit`` activations.

    ``for_weight`` is the part of a microbatch's activations that stays between I and W, at most 1. Ranks take actions
    greedily, by a few rules that differ in how far forwards run ahead, in what goes first, and in how large a gap W
    fills (section 3.1 of the paper); the best of the results and of the handcrafted schedules is taken. Not an optimum.

    Raises:
        GraphparError: no rank could hold even one microbatch, or costs are wrong.
    """
    pp = len(costs.forward)
    if not limit >= 1:
        raise GraphparError(f"the limit is {limit} activations; a rank must hold at least that of one microbatch")
    if not 0 <= for_weight <= 1:
        raise GraphparError(f"the part of the activations that stays for W is {for_weight}; it must be from 0 to 1")
    costs.simulated(handcrafted(pp, microbatches, 1))  # wrong costs are refused here
    memory = [1.0] * pp, [for_weight] * pp
    tables = [handcrafted(pp, microbatches, lead) for lead in (1, 2)]
    for lead, backward_first, patience in product((1, 1.5, 2, 3, microbatches), (True, False), (0.0, 0.5, 1.0)):
        rules = _Rules(lead, backward_first, patience, limit, for_weight)
        tables.append(_Greedy(microbatches, costs, rules).table())
    fitting = [table for table in tables if all(held.peak <= limit + 1e-9 for held in in_flight(table, *memory))]
    return min(fitting, key=lambda table: _length(costs.simulated(table)))


def _length(timeline: Timeline) -> tuple[float, float]:
    return timeline.period, timeline.makespan


@dataclass(frozen=True, slots=True)
class _Rules:
    lead: float  # rank r starts at most 1 + lead (p - 1 - r) forwards before its first input backward
    backward_first: bool  # else forwards and input backwards alternate where both can run
    patience: float  # W fills gaps of at least this part of its length, and gaps of unknown length
    limit: float
    for_weight: float


class _Greedy:
    """A simulation of all ranks: whenever one is free or a result arrives, it takes the next action by the rules."""

    def __init__(self, microbatches: int, costs: StageCosts, rules: _Rules) -> None:
        pp = len(costs.forward)
        self.count, self.costs, self.rules, self.last = microbatches, costs, rules, pp - 1
        self.cells: list[list[Cell]] = [[] for _ in range(pp)]
        self.done = {kind: [0] * pp for kind in "FIW"}
        self.arrivals: dict[str, list[list[float]]] = {"F": [[] for _ in range(pp)], "I": [[] for _ in range(pp)]}
        self.arrivals["F"][0] = [0.0] * microbatches
        self.free = [0.0] * pp
        self.following = ["I"] * pp  # the kind that is preferred next
        self.events = [(0.0, rank) for rank in range(pp)]

    def table(self) -> ActionTable:
        """Run all ranks, and return what they ran."""
        while self.events:
            time, rank = heappop(self.events)
            if time < self.free[rank]:
                continue
            kind = self._next(rank, time)
            if kind is not None:
                self._run(rank, kind, time)
        return make_table(self.cells)

    def _arrival(self, kind: str, rank: int) -> float | None:
        """Return when the next action of ``kind`` can start; None where that is not known yet."""
        known, number = self.arrivals[kind][rank], self.done[kind][rank]
        return known[number] if number < len(known) else None

    def _next(self, rank: int, time: float) -> Literal["F", "I", "W"] | None:
        rules, done = self.rules, self.done
        forwards, inputs, weights = done["F"][rank], done["I"][rank], done["W"][rank]
        held = forwards - inputs + (inputs - weights) * rules.for_weight
        open_ = forwards - inputs < 1 + rules.lead * (self.last - rank)
        fits = held + 1 <= rules.limit + 1e-9
        backward = self._arrival("I", rank)
        forward = self._arrival("F", rank) if open_ else None
        forward_now = forward is not None and forward <= time
        if backward is not None and backward <= time:
            prefers_forward = not rules.backward_first and self.following[rank] == "F" and forward_now and fits
            return "F" if prefers_forward else "I"
        if forward_now and fits:
            return "F"
        if weights == inputs:
            return None
        coming = [arrival for arrival in (backward, forward if fits else None) if arrival is not None]
        gap = min(coming, default=math.inf) - time
        blocked = forward_now and not fits  # what W frees lets the forward run
        return "W" if blocked or gap >= rules.patience * self.costs.weight[rank] else None

    def _run(self, rank: int, kind: Literal["F", "I", "W"], time: float) -> None:
        costs = self.costs
        duration = {"F": costs.forward, "I": costs.input_backward, "W": costs.weight}[kind][rank]
        self.cells[rank].append(Action(rank, kind, self.done[kind][rank]))
        self.done[kind][rank] += 1
        self.free[rank] = end = time + duration
        if kind != "W":
            self.following[rank] = "I" if kind == "F" else "F"
        heappush(self.events, (end, rank))
        if kind == "F" and rank == self.last:
            self.arrivals["I"][rank].append(end)
        elif kind == "F":
            self._arrive("F", rank + 1, end + costs.transfers.forward[rank])
        elif kind == "I" and rank > 0:
            self._arrive("I", rank - 1, end + costs.transfers.backward[rank - 1])

    def _arrive(self, kind: str, rank: int, time: float) -> None:
        self.arrivals[kind][rank].append(time)
        heappush(self.events, (max(time, self.free[rank]), rank))
