"""Simulates a schedule: when each action and transfer runs, what each rank waits for, and what it holds in memory.

::

    table ──order_of──► Order ──simulate(costs, transfers)──► Timeline ──► draw, chrome_trace
                          └─────in_flight(bytes a stage)────► Memory of each rank

The order of a table doesn't depend on costs: callers that price one table many times keep its :class:`Order`. Times are in
the unit of the costs. Every stage is one action after another on its rank: the result of an action is there for
others when the action has ended, and crosses ranks as :class:`Transfers` says.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from graphpar.errors import GraphparError
from graphpar.schedules.action_table import COMPUTATIONS, STATE, Action, ActionTable, Kind
from graphpar.schedules.core_sharing import SharedCores, ends_on_shared_cores
from graphpar.schedules.order import KIND_ORDER, Order, order_of

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Transfers:
    """The time of sending a result to a stage on another rank; between stages of one rank it is free.

    ``forward[i]`` is the time of stage i's activations to stage i + 1, ``backward[i]`` that of the gradients from stage
    i + 1 back to stage i: one fewer than there are stages. The receiver waits for them; the sender continues, unless
    ``sender_waits``. ``one_at_a_time``: a link from one rank to another carries one transfer after the other, in the
    order in which they were sent; both directions work at the same time.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    one_at_a_time: bool = False
    sender_waits: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """When one action runs, in the unit of the costs. The parts of a pair run one after the other.

    ``collectives``: by axis, the part of its time that collectives inside of it take, spread over it.
    """

    action: Action
    step: int
    start: float
    end: float
    collectives: tuple[tuple[str, float], ...] = ()

    @property
    def drawn(self) -> bool:
        """Whether it is drawn: an action on state is, where it takes time."""
        return self.action.kind not in STATE or self.end > self.start


@dataclass(frozen=True, slots=True)
class Segment:
    """What a rank does after its last action: ``gradients`` are summed, the ``optimizer`` runs, ``parameters`` are
    gathered. ``axis``: of the mesh, over which it communicates."""

    kind: str
    start: float
    end: float
    axis: str = ""


@dataclass(frozen=True, slots=True)
class Transfer:
    """The transfer of the result of ``action`` to another rank; it may wait for its link before ``start``."""

    action: Action
    sender: int
    receiver: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A schedule in time.

    Each rank's ``busy``, ``waiting`` and ``idle`` time add up to ``makespan``: ``waiting`` is time in which its next
    input is on its way (or its last result, where senders wait), ``idle`` is the rest. ``bubble`` is
    the share of ranks x makespan in which a rank computes nothing: waiting and idle. ``period`` is the longest time
    from a rank's first start to its last end: the time of a step where ranks don't wait for each other between steps.
    ``ends`` is when each rank has done its last action.
    ``peak_in_flight`` counts, for each rank, the (stage, microbatch) pairs whose activations are alive at once: from F
    to the end of B, or of W where the backward is split. Without spans, ``spans`` and ``transfers`` are empty.
    ``closing`` is what each rank does after its actions, where that is known (:func:`graphpar.cost_models.timelines.whole_step`);
    none of the figures above counts it. ``beside`` is the part of it that runs beside actions and costs no time: sums of gradients
    before the last action ends, and gathers of parameters in the first forwards of the next step, drawn in this one.
    """

    spans: tuple[tuple[Span, ...], ...]
    transfers: tuple[Transfer, ...]
    makespan: float
    period: float
    bubble: float
    busy: tuple[float, ...]
    waiting: tuple[float, ...]
    idle: tuple[float, ...]
    ends: tuple[float, ...]
    peak_in_flight: tuple[int, ...]
    closing: tuple[tuple[Segment, ...], ...] = ()
    beside: tuple[tuple[Segment, ...], ...] = ()

    @property
    def length(self) -> float:
        """The time from the first action to the end of everything that is drawn."""
        return max((segment.end for row in self.closing for segment in row), default=self.makespan)


def simulate(
    table: ActionTable | Order,
    forward: Sequence[float],
    backward: Sequence[float],
    weight: Sequence[float] | None = None,
    *,
    input_backward: Sequence[float] | None = None,
    gather: Sequence[float] | None = None,
    reduce: Sequence[float] | None = None,
    transfers: Transfers | None = None,
    cores: SharedCores | None = None,
    spans: bool = True,
) -> Timeline:
    """Simulate the table with these costs per stage; transfers are free unless given.

    ``backward`` is the whole backward, the cost of ``B``. ``weight`` is the cost of ``W`` (half of the backward, when
    not given), ``input_backward`` that of ``I`` (the backward minus ``weight``), ``gather`` that of ``UNSHARD`` and ``reduce`` that
    of ``REDUCE_GRAD`` (nothing). Any unit of time. With ``cores`` an
    action takes longer where ranks outnumber cores. Without ``spans`` only the sums are computed, which is faster.

    Raises:
        GraphparError: the table deadlocks, or a cost is missing, negative or infinite.
    """
    order = table if isinstance(table, Order) else order_of(table)
    weight = [cost / 2 for cost in backward] if weight is None else weight
    free = [0.0] * order.stages
    gather, reduce = gather or free, reduce or free
    costs: dict[str, Sequence[float]] = {
        "forward": forward, "backward": backward, "weight": weight, "gather": gather, "reduce": reduce,
    }  # fmt: skip
    if input_backward is not None:
        costs["input backward"] = input_backward
    for name, values in costs.items():
        _check_costs(name, values, order.stages)
    if input_backward is None:
        for stage, (whole, part) in enumerate(zip(backward, weight)):
            if part > whole:
                raise GraphparError(
                    f"the weight cost of stage {stage}, {part}, is more than its full backward, {whole}, "
                    "which holds both the weight and the input part"
                )
        input_backward = [whole - part for whole, part in zip(backward, weight)]
    prices: dict[Kind, Sequence[float]] = {
        "F": forward, "B": backward, "I": input_backward, "W": weight, "UNSHARD": gather, "RESHARD": free, "REDUCE_GRAD": reduce,
    }  # fmt: skip
    price = np.zeros(order.gate_price + 1)
    price[: order.first_transfer_price] = [cost for kind in KIND_ORDER for cost in prices[kind]]
    return _timeline(order, price[order.price], transfers, spans, cores)


def _check_costs(name: str, values: Sequence[float], count: int, unit: str = "stage", units: str = "stages") -> None:
    if len(values) != count:
        raise GraphparError(f"{name} has {len(values)} costs for {count} {units}; give one a {unit}")
    for index, value in enumerate(values):
        if not (math.isfinite(value) and value >= 0):
            raise GraphparError(f"the {name} cost of {unit} {index} is {value}; it must be finite and not negative")


def _timeline(
    order: Order, durations: Array, transfers: Transfers | None, spans: bool, cores: SharedCores | None = None
) -> Timeline:
    """Run the nodes: each starts when the node before it and the node it needs have ended."""
    is_transfer = order.rank < 0
    before, needs = order.previous, order.needs
    if transfers is not None:
        _price_transfers(order, durations, transfers)
        if transfers.sender_waits:
            before = order.sent
            needs = needs.copy()
            needs[list(order.second_sent)] = list(order.second_sent.values())
        if transfers.one_at_a_time:
            before = np.where(is_transfer, order.link, before)
    if cores is None:
        ends = _ends(durations, before, needs)
    else:
        on_core = np.zeros(order.gate_price + 1)
        on_core[: len(COMPUTATIONS) * order.stages] = np.tile(cores.shares, len(COMPUTATIONS))
        shares = np.where(is_transfer, 0.0, on_core[order.price])
        ends = ends_on_shared_cores(durations.tolist(), shares.tolist(), before.tolist(), needs.tolist(), cores)

    end = np.array(ends)
    start = np.maximum(end[before], end[needs])
    if cores is not None:
        durations = end - start
    busy = np.bincount(order.rank[~is_transfer], durations[~is_transfer], order.table.ranks)
    # A rank waits for its input from when both the action that computes it and its own last action have ended.
    ready = np.maximum(end[order.previous], end[order.needs][order.needs])
    waiting = np.bincount(order.rank[~is_transfer], (start - ready)[~is_transfer], order.table.ranks)
    makespan = float(end.max(initial=0.0, where=~is_transfer))
    capacity = makespan * order.table.ranks
    own = [(start[nodes[0]], end[nodes[-1]]) for nodes in order.actions_of if len(nodes)]
    return Timeline(
        spans=_spans(order, start, end) if spans else (),
        transfers=_transfers(order, start, end) if spans else (),
        makespan=makespan,
        period=float(max((last - first for first, last in own), default=0.0)),
        bubble=max(0.0, 1 - math.fsum(busy) / capacity) if capacity > 0 else 0.0,
        busy=tuple(busy.tolist()),
        waiting=tuple(waiting.tolist()),
        idle=tuple(np.maximum(0.0, makespan - busy - waiting).tolist()),
        ends=tuple(float(end[nodes[-1]]) if len(nodes) else 0.0 for nodes in order.actions_of),
        peak_in_flight=peak_in_flight(order),
    )


def _ends(durations: Array, before: Array, needs: Array) -> list[float]:
    ends = [0.0]
    add = ends.append
    for previous, need, duration in zip(before[1:].tolist(), needs[1:].tolist(), durations[1:].tolist()):
        free, arrived = ends[previous], ends[need]
        add((free if free > arrived else arrived) + duration)
    return ends


def _price_transfers(order: Order, durations: Array, transfers: Transfers) -> None:
    for name, values in (("forward", transfers.forward), ("backward", transfers.backward)):
        _check_costs(f"{name} transfer", values, max(0, order.stages - 1), "boundary", "boundaries")
    price = np.zeros(2 * order.stages)
    price[: order.stages - 1] = transfers.forward  # by the stage that sends
    price[order.stages + 1 :] = transfers.backward
    nodes = _transfer_nodes(order)
    durations[nodes] = price[order.price[nodes] - order.first_transfer_price]


def _actions(order: Order) -> list[list[Action]]:
    """Return each rank's actions in order, the parts of a pair one by one."""
    return [[action for cell in row if cell is not None for action in cell.parts] for row in order.table.rows]


def _spans(order: Order, start: Array, end: Array) -> tuple[tuple[Span, ...], ...]:
    return tuple(
        tuple(map(Span, actions, steps, start[nodes].tolist(), end[nodes].tolist()))
        for actions, steps, nodes in zip(_actions(order), order.steps_of, order.actions_of)
    )


def _transfers(order: Order, start: Array, end: Array) -> tuple[Transfer, ...]:
    nodes, homes = _transfer_nodes(order), order.homes
    return tuple(
        Transfer(action, homes[action.stage], homes[action.stage + (1 if action.kind == "F" else -1)], sent, arrived)
        for action, sent, arrived in zip(order.carried, start[nodes].tolist(), end[nodes].tolist())
    )


def _transfer_nodes(order: Order) -> Array:
    return np.flatnonzero(order.rank < 0)[1:]  # the start is on no rank either


@dataclass(frozen=True, slots=True)
class Memory:
    """The activations that a rank keeps after each of its actions, and their peak, first reached after action ``at``."""

    after: tuple[float, ...]
    peak: float
    at: int


def in_flight(
    table: ActionTable | Order, saved: Sequence[float] | None = None, for_weight: Sequence[float] | None = None
) -> tuple[Memory, ...]:
    """Compute for each rank what its forwards keep for backwards that have yet to run: bytes, or a count without ``saved``.

    ``saved[stage]`` is kept from a forward until B. Where the backward is split, ``for_weight[stage]`` of it stays from I
    to the end of W: all, when not given; more than ``saved`` where I also keeps gradients for W. The result depends on the
    order, not on costs: action ``n`` of a rank is also its span ``n`` in a :class:`Timeline`.
    """
    order = table if isinstance(table, Order) else order_of(table)
    whole = [1] * order.stages if saved is None else list(saved)
    kept = whole if for_weight is None else list(for_weight)
    for name, values in (("saved", whole), ("for_weight", kept)):
        _check_costs(name, values, order.stages)
    changes = np.array([*whole, *(-s for s in whole), *(k - s for k, s in zip(kept, whole)), *(-k for k in kept)])
    changes = np.append(changes, np.zeros(len(STATE) * order.stages, dtype=changes.dtype))
    memories = []
    for nodes in order.actions_of:
        after = np.cumsum(changes[order.price[nodes]])
        at = int(after.argmax()) if len(after) else 0
        memories.append(Memory(tuple(after.tolist()), after[at].item() if len(after) else 0, at))
    return tuple(memories)


def peak_in_flight(table: ActionTable | Order, sizes: Sequence[int] | None = None) -> tuple[int, ...]:
    """Compute for each rank the most activations kept at the same time: (stage, microbatch) pairs, or bytes with
    ``sizes`` a stage.

    Split backwards hold their activations until W.
    """
    order = table if isinstance(table, Order) else order_of(table)
    whole = [1] * order.stages if sizes is None else list(sizes)
    _check_costs("saved", whole, order.stages)
    twice, found = np.array([whole, whole]), []
    for stages, *kinds in _fullest(order, False):
        own = twice[:, stages].ravel()
        found.append(max((int((rows @ own).max()) for rows in kinds if len(rows)), default=0))
    return tuple(found)


class Fullest(NamedTuple):
    """(activations, sharded state that is whole) of a rank where their sum is the most, in bytes: while whole forwards and backwards run,
    input halves of backwards, and weight halves."""

    whole: tuple[int, int]
    inputs: tuple[int, int]
    weights: tuple[int, int]


def most_of(
    order: Order,
    saved: Sequence[int],
    left: Sequence[int],
    gathered: Sequence[int] = (),
    gradients: Sequence[int] = (),
) -> tuple[Fullest, ...]:
    """Compute for each rank the most bytes that it has at the same time.

    Args:
        saved: of a microbatch of each stage, until its backward or the input half of it ends.
        left: of one whose weight half is to come.
        gathered: the parameters of each stage, which are there from its first action to its last.
        gradients: those of each stage, which are there from its first backward until they are reduced after its last.
    """
    whole = len(gathered) > 0
    sizes, found = np.array([saved, left, *([gathered, gradients] if whole else [])]), []
    for stages, *kinds in _fullest(order, whole):
        own, most = sizes[:, stages], []
        for rows in kinds:
            if not len(rows):
                most.append((0, 0))
                continue
            best = rows[int((rows @ own.ravel()).argmax())].reshape(own.shape)
            parts = (best * own).sum(axis=1).tolist()
            most.append((sum(parts[:2]), sum(parts[2:])))
        found.append(Fullest(*most))
    return tuple(found)


def most_in_flight(table: ActionTable | Order) -> tuple[int, ...]:
    """Compute for each stage the most microbatches that it surely keeps at the same time. A split backward holds its own until I ends, as
    where that does all; in the first stage until W."""
    order = table if isinstance(table, Order) else order_of(table)
    most = [0] * order.stages
    for stages, *kinds in _fullest(order, False):
        for rows in kinds:
            kept, waiting = rows.reshape(-1, 2, len(stages)).swapaxes(0, 1)
            counts = (kept + waiting * (stages == 0)).max(axis=0, initial=0)
            for stage, count in zip(stages.tolist(), counts.tolist()):
                most[stage] = max(most[stage], count)
    return tuple(most)


@lru_cache(maxsize=1024)
def _fullest(order: Order, whole: bool) -> tuple[tuple[Array, ...], ...]:
    """Return for each rank its stages and, while actions run, [time, 2 x stage]: how many microbatches of each it keeps, and how many wait
    for the weight half of their backward; with ``whole`` [time, 4 x stage], also whether parameters are gathered, and whether there are
    gradients that are not reduced. Those of :class:`Fullest` are apart; no row that another one reaches is there."""
    found = []
    for nodes in order.actions_of:
        kind, stage = np.divmod(order.price[nodes], order.stages)
        computes = kind < len(COMPUTATIONS)
        kind, (stages, place) = kind[computes], np.unique(stage[computes], return_inverse=True)
        one = np.zeros((len(kind), len(stages)), dtype=np.int64)
        one[np.arange(len(kind)), place] = 1
        counts = [(one * change[kind][:, None]).cumsum(axis=0) for change in (_KEEPS, _WAITS)]
        running = np.arange(len(kind)) - (kind > 0)  # what backwards free is there while they run
        columns = [each[running] for each in counts]
        if whole:
            begun, left = one.cumsum(axis=0) > 0, one[::-1].cumsum(axis=0)[::-1] > 0
            columns += [begun & left, (one * (kind > 0)[:, None]).cumsum(axis=0).astype(bool) & left]
        rows, apart = np.hstack(columns), np.maximum(kind, 1)  # F is as B
        found.append((stages, *(_most_rows(rows[apart == COMPUTATIONS.index(each)]) for each in ("B", "I", "W"))))
    return tuple(found)


def _most_rows(rows: Array) -> Array:
    """Return the rows that no other one reaches in all columns, sorted; of equal ones one."""
    left, found = np.array(list(set(map(tuple, rows.tolist())))), list[tuple[int, ...]]()
    while len(left):
        most = left[left.sum(axis=1).argmax()]
        found.append(tuple(most.tolist()))
        left = left[(left > most).any(axis=1)]
    return np.array(sorted(found), dtype=rows.dtype).reshape(-1, rows.shape[1])


_KEEPS, _WAITS = np.array([1, -1, -1, 0]), np.array([0, 0, 1, -1])  # of F, B, I and W


def kept_before_backward(table: ActionTable) -> tuple[int, ...]:
    """Compute for each rank how many microbatches it keeps, of each of its stages at least, when its first backward begins."""
    found = []
    for row in table.rows:
        actions = [action for cell in row if cell is not None for action in cell.parts]
        first = next((place for place, action in enumerate(actions) if action.kind in "BI"), len(actions))
        run = Counter(action.stage for action in actions[:first] if action.kind == "F")
        found.append(min((run[own] for own in {action.stage for action in actions}), default=0))
    return tuple(found)


# ------------------------------------------------------------------------------------------------ drawing


CLOSINGS = {
    "gradients": ("G", "sum of gradients"),
    "optimizer": ("O", "optimizer"),
    "parameters": ("A", "gather of parameters"),
}
"""For each kind of :class:`Segment`, its letter in a drawing and its description."""
_MOST = 4
"""The most columns of a segment after the actions: the drawing shows the order, the report's figures the lengths."""


def draw(timeline: Timeline, width: int = 100, names: Sequence[str] | None = None) -> list[str]:
    """Draw one line for each rank, time from left to right: ``rank 0  F0 F1 .. .. B0 -- B1 -- G O --``.

    ``..`` is idle, ``--`` the rest of a longer action; after the actions ``G`` is the all-reduce of gradients, ``O``
    the optimizer's step, ``A`` the all-gather of parameters.
    ``U`` and ``R`` gather and reduce sharded state. Columns are as long as the shortest action, or a quarter
    of the longest if that is more, so that times are approximate and the order is exact; what follows the actions has
    four at most. Of columns in which all ranks wait, one after the other, the first alone is drawn. The stage is named
    where a rank has more than one. Wider than ``width``, the middle is left out (``…``), at the same time on every
    rank; the first and last column always stay. ``names``: of the lines, instead of ``rank 0`` and so on.
    """
    assert timeline.spans or timeline.makespan == 0, "a timeline without spans can't be drawn"
    lengths = [span.end - span.start for row in timeline.spans for span in row if span.end > span.start]
    quantum = max(min(lengths), max(lengths) / 4) if lengths else 1.0
    several = any(len({span.action.stage for span in row}) > 1 for row in timeline.spans)
    rows = [_columns(row, quantum, several) for row in timeline.spans]
    lines = _with_closings(_without_long_waits(rows), timeline, quantum)
    total = max((len(line) for line in lines), default=0)
    column = max((len(label) for line in lines for label in line), default=2)
    names = [f"rank {rank}" for rank in range(len(lines))] if names is None else names
    margin = max((len(name) for name in names), default=0) + 1

    room = max(3, (width - margin) // (column + 1))
    shortened = total > room
    head, tail = (room // 2, (room - 1) // 2) if shortened else (total, 0)
    drawing = []
    for name, line in zip(names, lines):
        shown = line[:head] + (["…", *line[total - tail :]] if shortened else [])
        drawing.append((name.ljust(margin) + "".join(" " + label.ljust(column) for label in shown)).rstrip())
    return drawing


def _with_closings(lines: Sequence[Sequence[str]], timeline: Timeline, quantum: float) -> list[list[str]]:
    """Draw what ranks do after their actions: the gradients' all-reduce as soon as each can, the rest when all have
    ended theirs."""
    drawn = [list(line) for line in lines]
    if not any(timeline.closing):
        return drawn
    for line in drawn:
        while line and line[-1] == "..":
            line.pop()
    for kinds in (("gradients",), ("optimizer", "parameters")):
        for line, row in zip(drawn, timeline.closing):
            for segment in row:
                if segment.kind in kinds:
                    columns = max(1, min(_MOST, math.floor((segment.end - segment.start) / quantum + 0.5)))
                    line += [CLOSINGS[segment.kind][0], *["--"] * (columns - 1)]
        total = max(map(len, drawn))
        drawn = [[*line, *[".."] * (total - len(line))] for line in drawn]
    return drawn


def _without_long_waits(lines: Sequence[Sequence[str]]) -> list[list[str]]:
    total = max(map(len, lines), default=0)
    padded = [[*line, *[".."] * (total - len(line))] for line in lines]
    waits = [all(line[column] == ".." for line in padded) for column in range(total)]
    kept = [column for column in range(total) if not (waits[column] and column and waits[column - 1])]
    return [[line[column] for column in kept] for line in padded]


def _columns(row: Sequence[Span], quantum: float, several: bool) -> list[str]:
    columns: list[str] = []
    for span in (span for span in row if span.drawn):
        start = max(len(columns), math.floor(span.start / quantum + 0.5))
        columns += [".."] * (start - len(columns))
        columns.append(span.action.label(several))
        columns += ["--"] * (math.floor(span.end / quantum + 0.5) - len(columns))
    return columns
