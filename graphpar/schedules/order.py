"""The order of a table: what each action waits for, found once for any number of simulations.

::

    rank 0   F0 ──────► F1 ──────► ...            ──►  a rank runs its actions in order
              └─transfer─┐                        └─►  a result goes to the rank of the next stage
    rank 1               F0 ──────► ...

A table becomes a list of nodes, each behind the nodes that it needs: actions, the transfers between ranks, and gates, which
take no time and only let a pair wait for two transfers. A node starts when its ``previous`` and its ``needs`` have
ended. Stages on one rank pass their results without a transfer. Pairs are as in torch's runtime: both parts can run
when it starts, and their results are sent when the whole pair has ended.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from graphpar.errors import GraphparError
from graphpar.schedules.action_table import COMPUTATIONS, STATE, Action, ActionTable, Pair

# What an action sends to other stages: an activation ("F") or the gradient of its stage's input ("B", from B or I).
_Result: TypeAlias = tuple[int, Literal["F", "B"], int]

Nodes: TypeAlias = NDArray[np.int64]

KIND_ORDER = (*COMPUTATIONS, *STATE)  # an action's price is number kind * stages + stage
_SENDING = ("F", "B", "I")
_FORWARD = KIND_ORDER.index("F")
_BACKWARDS = [KIND_ORDER.index(kind) for kind in ("B", "I", "W")]
START = 0  # the node that has always ended


@dataclass(frozen=True, eq=False)
class Order:
    """A table as nodes, node 0 being the start of the step. Made by :func:`order_of`.

    ``price`` numbers what a node costs: ``kind * stages + stage`` for an action, then as many for the activations that
    a stage sends, as many for the gradients, and one for a gate. ``link`` is the transfer before a transfer on its
    link, from one rank to another; ``sent`` is ``previous`` for ranks that wait until what they sent has arrived, and
    ``second_sent`` the other transfer that such a rank waits for after a pair.
    """

    table: ActionTable
    homes: tuple[int, ...]  # the rank of each stage
    previous: Nodes
    needs: Nodes
    link: Nodes
    sent: Nodes
    second_sent: dict[int, int]
    price: Nodes
    rank: Nodes  # the rank whose time a node takes; -1 for a transfer, and for the start
    actions_of: tuple[Nodes, ...]  # the nodes of each rank's actions
    steps_of: tuple[list[int], ...]
    carried: tuple[Action, ...]  # for each transfer, in the order of the nodes, the action whose result it carries

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.homes)

    @property
    def splits_backwards(self) -> bool:
        """Whether weight halves of backwards run apart."""
        return bool((self.price // self.stages == KIND_ORDER.index("W")).any())

    @cached_property
    def windows_of(self) -> tuple[dict[int, tuple[int, int]], ...]:
        """For each rank, by stage: the places among its actions of the first forward and of the last backward."""
        found = []
        for actions in self.actions_of:
            kinds, stages = np.divmod(self.price[actions], self.stages)
            forwards, backwards = np.flatnonzero(kinds == _FORWARD), np.flatnonzero(np.isin(kinds, _BACKWARDS))
            first = dict(zip(stages[forwards[::-1]].tolist(), forwards[::-1].tolist()))  # of several the last counts
            last = dict(zip(stages[backwards].tolist(), backwards.tolist()))
            found.append({stage: (begin, last[stage]) for stage, begin in sorted(first.items()) if stage in last})
        return tuple(found)

    @property
    def first_transfer_price(self) -> int:
        """The price number of the first transfer, after those of all actions."""
        return len(KIND_ORDER) * self.stages

    @property
    def gate_price(self) -> int:
        """The price number of a gate, the last one."""
        return (len(KIND_ORDER) + 2) * self.stages


def check_deadlock(table: ActionTable) -> None:
    """Check that no rank waits forever.

    Raises:
        GraphparError: a rank waits for one of its later actions, or ranks wait for each other in a circle.
    """
    order_of(table)


def order_of(table: ActionTable) -> Order:
    """Order the actions of ``table`` and their transfers.

    Raises:
        GraphparError: a rank waits forever, or a stage is on several ranks.
    """
    builder = _Builder(table, _homes(table))
    queue = deque(range(table.ranks))
    while queue:
        queue.extend(builder.advance(queue.popleft()))
    if any(step < len(row) for step, row in zip(builder.step_of, table.rows)):
        raise GraphparError(_deadlock(table, builder))
    return builder.finish()


def _homes(table: ActionTable) -> list[int]:
    """Find the rank of each stage; -1 for a stage that no rank runs."""
    found: dict[int, int] = {}
    for rank, row in enumerate(table.rows):
        for stage in {action.stage for cell in row if cell is not None for action in cell.parts}:
            if found.setdefault(stage, rank) != rank:
                raise GraphparError(f"stage {stage} is on ranks {found[stage]} and {rank}; a stage has one rank")
    return [found.get(stage, -1) for stage in range(max(found, default=-1) + 1)]


class _Builder:
    """Runs every rank's actions in order, each as soon as its inputs are there, and notes the nodes."""

    def __init__(self, table: ActionTable, homes: list[int]) -> None:
        self.table, self.homes, self.stages = table, homes, len(homes)
        self.step_of = [0] * table.ranks
        self.gate_price = (len(KIND_ORDER) + 2) * self.stages
        self.nodes = [START, START, START, START, self.gate_price, -1]  # six numbers a node, in the order of _add
        self.count = 1
        self.second_sent: dict[int, int] = {}
        self.last, self.last_sent = [START] * table.ranks, [START] * table.ranks
        self.last_on_link: dict[tuple[int, int], int] = {}
        self.made: dict[_Result, int] = {}  # the node after which a result is where it is needed
        self.carried: list[Action] = []
        self.waiting: dict[_Result, list[int]] = {}
        self.nodes_of: list[list[int]] = [[] for _ in table.rows]
        self.steps_of: list[list[int]] = [[] for _ in table.rows]

    def advance(self, rank: int) -> list[int]:
        """Run ``rank`` until it waits, and return the ranks that waited for its results."""
        row, step, woken = self.table.rows[rank], self.step_of[rank], list[int]()
        while step < len(row):
            cell = row[step]
            if cell is not None:
                arrivals = self._arrivals(cell, rank)
                if arrivals is None:
                    break
                self._run(cell, rank, step, arrivals, woken)
            step += 1
        self.step_of[rank] = step
        return woken

    def _arrivals(self, cell: Action | Pair, rank: int) -> list[int] | None:
        """Return the transfers that ``cell`` waits for; None when a result does not exist yet, for which ``rank`` then waits."""
        arrivals = []
        for need in needs_of(cell, self.stages - 1):
            node = self.made.get(need)
            if node is None:
                self.waiting.setdefault(need, []).append(rank)
                return None
            if self.homes[need[0]] != rank:
                arrivals.append(node)
        return arrivals

    def _run(self, cell: Action | Pair, rank: int, step: int, arrivals: list[int], woken: list[int]) -> None:
        for arrival in arrivals[1:]:
            self._gate(rank, arrival)
        need = arrivals[0] if arrivals else START
        for action in cell.parts:
            node = self._node(rank, need, KIND_ORDER.index(action.kind) * self.stages + action.stage)
            self.nodes_of[rank].append(node)
            self.steps_of[rank].append(step)
            need = START
        end, transfers = self.last[rank], list[int]()
        for action in cell.parts:
            if action.kind in _SENDING:
                self._leave(action, rank, end, transfers, woken)
        if len(transfers) == 1:
            self.last_sent[rank] = transfers[0]
        elif transfers:  # the rank waits for both, if it waits for what it sends
            gate = self._gate(rank, START)
            self.nodes[6 * gate + 3], self.second_sent[gate] = transfers

    def _leave(self, action: Action, rank: int, end: int, transfers: list[int], woken: list[int]) -> None:
        """Send the result of ``action`` to the rank of the next stage, where that is another one."""
        forward = action.kind == "F"
        result: _Result = (action.stage, "F" if forward else "B", action.microbatch)
        to = action.stage + (1 if forward else -1)
        other = self.homes[to] if 0 <= to < self.stages else rank
        if other not in (rank, -1):
            price = (len(KIND_ORDER) + (not forward)) * self.stages + action.stage
            transfers.append(self._add(START, end, self.last_on_link.get((rank, other), START), START, price, -1))
            self.last_on_link[rank, other] = end = transfers[-1]
            self.carried.append(action)
        self.made[result] = end
        if result in self.waiting:
            woken += self.waiting.pop(result)

    def _gate(self, rank: int, need: int) -> int:
        return self._node(rank, need, self.gate_price)

    def _node(self, rank: int, need: int, price: int) -> int:
        """Add the next node of ``rank``."""
        node = self._add(self.last[rank], need, START, self.last_sent[rank], price, rank)
        self.last[rank] = self.last_sent[rank] = node
        return node

    def _add(self, previous: int, need: int, link: int, sent: int, price: int, rank: int) -> int:
        self.nodes += (previous, need, link, sent, price, rank)
        self.count += 1
        return self.count - 1

    def finish(self) -> Order:
        """Return the order of all nodes so far."""
        previous, needs, link, sent, price, rank = np.array(self.nodes).reshape(-1, 6).T.copy()
        return Order(
            table=self.table,
            homes=tuple(self.homes),
            previous=previous,
            needs=needs,
            link=link,
            sent=sent,
            second_sent=self.second_sent,
            price=price,
            rank=rank,
            actions_of=tuple(np.array(nodes, dtype=np.int64) for nodes in self.nodes_of),
            steps_of=tuple(self.steps_of),
            carried=tuple(self.carried),
        )


def needs_of(cell: Action | Pair, last_stage: int) -> list[_Result]:
    """List the results that must exist before ``cell`` runs.

    A pair starts when both parts can: torch posts its sends after the whole pair, so a part can use the result of the other
    part within its own stage, but not one that the pair would have to send.
    """
    if isinstance(cell, Action):
        return _needs(cell, last_stage)
    outside: list[_Result] = []
    inside: list[_Result] = []
    for action in cell.parts:
        outside += [n for n in _needs(action, last_stage) if not (n in inside and n[0] == action.stage)]
        if action.kind in _SENDING:
            inside.append((action.stage, "F" if action.kind == "F" else "B", action.microbatch))
    return outside


def _needs(action: Action, last_stage: int) -> list[_Result]:
    stage, microbatch = action.stage, action.microbatch
    if action.kind in STATE:
        return []
    if action.kind == "F":
        return [(stage - 1, "F", microbatch)] if stage > 0 else []
    if action.kind == "W":
        return [(stage, "B", microbatch)]
    own: _Result = (stage, "F", microbatch)
    return [own, (stage + 1, "B", microbatch)] if stage < last_stage else [own]


def _deadlock(table: ActionTable, builder: _Builder) -> str:
    maker: dict[_Result, tuple[int, int, Action]] = {
        (action.stage, "F" if action.kind == "F" else "B", action.microbatch): (rank, step, action)
        for rank, step, _, action in table.actions()
        if action.kind in _SENDING
    }
    stuck = []
    for rank, (row, step) in enumerate(zip(table.rows, builder.step_of)):
        cell = row[step] if step < len(row) else None
        if cell is None:
            continue
        need = next(need for need in needs_of(cell, builder.stages - 1) if need not in builder.made)
        if need in maker:
            other, at, action = maker[need]
            place = f"{action}, which rank {other} runs at step {at}"
            place += " in the same pair" if (other, at) == (rank, step) else ""
        else:
            place = f"{need[0]}{need[1]}{need[2]}, which no rank runs"
        stuck.append(f"\n  rank {rank}, step {step}: {cell} waits for {place}")
    return "schedule deadlocks at" + "".join(stuck)
