"""A pipeline schedule as a table: a row a rank, a cell a step, and in each cell what the rank computes.

::

    2 ranks, 2 microbatches, 1F1B             as text, which torch's runtime loads
      rank 0   F0 F1 .. .. B0 -- B1 --        0F0,0F1,0B0,0B1
      rank 1   .. F0 B0 -- F1 B1 --           1F0,1B0,1F1,1B1

An action is stage, kind, microbatch: ``2F0`` is stage 2's forward of microbatch 0. The kinds are ``F`` forward,
``B`` full backward, ``I`` backward for the input alone, and ``W`` backward for the weights alone (``I`` then ``W``
stand for one ``B``). ``(0F3;3B1)OVERLAP_F_B`` is a pair that the runtime may interleave. An empty cell is idle time
in a drawing: each rank runs its actions in order, as soon as what they need has arrived. Communication isn't written:
it follows from the order.

Ranks, steps, stages and microbatches count from 0 throughout.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from graphpar.errors import GraphparError, near_match

Kind = Literal["F", "B", "I", "W"]

KINDS: dict[str, tuple[Kind, str]] = {
    "F": ("F", "forward"),
    "B": ("B", "full backward"),
    "I": ("I", "input backward"),
    "W": ("W", "weight backward"),
}
_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
_COMMUNICATION = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)[0-9]*")
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")

# What an action leaves behind for others: an activation ("F") or the gradient of its stage's input ("B", from B or I).
_Result: TypeAlias = tuple[int, Literal["F", "B"], int]


@dataclass(frozen=True, slots=True)
class Action:
    """One computation of one stage on one microbatch."""

    stage: int
    kind: Kind
    microbatch: int

    @property
    def parts(self) -> tuple[Action, ...]:
        return (self,)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Pair:
    """A forward and a backward that a rank starts only when both can run, and may interleave."""

    parts: tuple[Action, ...]

    def __str__(self) -> str:
        return f"({';'.join(map(str, self.parts))})OVERLAP_F_B"


Cell: TypeAlias = Action | Pair | None


@dataclass(frozen=True, slots=True)
class ActionTable:
    """What each rank does at each step; ``rows[rank][step]`` is None where the rank idles. Rows differ in length."""

    rows: tuple[tuple[Cell, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        return 1 + max((action.stage for _, _, _, action in self.actions()), default=-1)

    @property
    def microbatches(self) -> int:
        return 1 + max((action.microbatch for _, _, _, action in self.actions()), default=-1)

    def actions(self) -> Iterator[tuple[int, int, Action | Pair, Action]]:
        """(rank, step, cell, action) of every action, in each rank's order; a pair gives its parts one by one."""
        for rank, row in enumerate(self.rows):
            for step, cell in enumerate(row):
                for action in cell.parts if cell is not None else ():
                    assert cell is not None
                    yield rank, step, cell, action

    def __str__(self) -> str:
        return format_table(self)


def make_table(rows: Sequence[Sequence[Cell]]) -> ActionTable:
    """A table without the idle cells at the end of a row, which mean nothing."""
    trimmed = []
    for row in rows:
        cells = list(row)
        while cells and cells[-1] is None:
            cells.pop()
        trimmed.append(tuple(cells))
    return ActionTable(tuple(trimmed))


# ------------------------------------------------------------------------------------------------ text


def format_table(table: ActionTable) -> str:
    """CSV, a line a rank, as torch's ``_PipelineScheduleRuntime._load_csv`` reads it."""
    return "".join(",".join("" if cell is None else str(cell) for cell in row) + "\n" for row in table.rows)


def parse_table(text: str) -> ActionTable:
    """The inverse of :func:`format_table`; spaces around a token and blank lines at the end are allowed."""
    rows = [
        [parse_cell(token, rank, step) for step, token in enumerate(line)]
        for rank, line in enumerate(csv.reader(io.StringIO(text.rstrip() + "\n"), strict=False))
    ]
    table = make_table(rows)
    if not any(table.rows):
        raise GraphparError("the schedule is empty: give a line for each rank, with tokens such as 0F0,0B0")
    return table


def parse_cell(token: str, rank: int, step: int) -> Cell:
    """One token of the row of ``rank``; the position is only for the message."""
    token = token.strip()
    if not token:
        return None
    pair = _PAIR.fullmatch(token)
    if pair is None:
        return _parse_action(token, token, rank, step)
    parts = tuple(_parse_action(part.strip(), token, rank, step) for part in pair[1].split(";"))
    if len(parts) != 2:
        raise GraphparError(
            f"rank {rank}, step {step}: {token!r} overlaps {len(parts)} action(s); "
            "it must be two, as (0F3;3B1)OVERLAP_F_B"
        )
    return Pair(parts)


def _parse_action(text: str, token: str, rank: int, step: int) -> Action:
    match = _ACTION.fullmatch(text)
    if match is not None:
        stage, kind, microbatch = match.groups()
        return Action(int(stage), KINDS[kind][0], int(microbatch))
    if _COMMUNICATION.fullmatch(text):
        raise GraphparError(
            f"rank {rank}, step {step}: {token!r} is communication, which follows from the order of the computation; "
            "leave only F, B, I and W actions in the schedule"
        )
    raise GraphparError(
        f"rank {rank}, step {step}: {token!r} isn't an action: expected stage, kind (F, B, I or W) and microbatch, "
        "such as 2F0, a pair such as (0F3;3B1)OVERLAP_F_B, or nothing"
    )


def load_table(path: str | Path) -> ActionTable:
    """The table in a CSV file, parsed but not validated: see :func:`validate_table` and :func:`check_deadlock`."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise GraphparError(f"schedule file {path} doesn't exist.{near_match(path.name, siblings)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise GraphparError(f"schedule file {path} can't be read: {error}") from None
    try:
        return parse_table(text)
    except GraphparError as error:
        raise GraphparError(f"schedule file {path}: {error}") from None


# ------------------------------------------------------------------------------------------ validation


def validate_table(table: ActionTable, stages: int, microbatches: int) -> None:
    """Every stage on one rank; each microbatch forward once and backward once, in an order that a rank can run.

    The same rules as torch's ``_validate_schedule``, and those it leaves out (repeats, B beside I and W). Whether
    ranks wait for one another for ever is :func:`check_deadlock`'s question.
    """
    rank_of: dict[int, int] = {}
    seen: set[Action] = set()
    for rank, step, cell, action in table.actions():
        stage, microbatch = action.stage, action.microbatch
        where = f"rank {rank}, step {step}: {cell}" + ("" if cell == action else f", in it {action}")
        if not 0 <= stage < stages:
            raise GraphparError(f"{where} names stage {stage}; the last stage of the program is {stages - 1}")
        if not 0 <= microbatch < microbatches:
            raise GraphparError(f"{where} names microbatch {microbatch}; the last of them is {microbatches - 1}")
        if rank_of.setdefault(stage, rank) != rank:
            raise GraphparError(f"{where} runs stage {stage}, which is on rank {rank_of[stage]}; a stage has one rank")
        if action in seen:
            raise GraphparError(f"{where} repeats {action}; a stage runs each action once")
        _check_local_order(action, seen, where)
        seen.add(action)
    _check_complete(table, stages, microbatches, rank_of, seen)


def _check_local_order(action: Action, seen: set[Action], where: str) -> None:
    forward, full, split, weight = (Action(action.stage, kind, action.microbatch) for kind, _ in KINDS.values())
    clashing = {"B": (split, weight), "I": (full,), "W": (full,)}.get(action.kind, ())
    for other in clashing:
        if other in seen:
            raise GraphparError(
                f"{where} follows {other}: a microbatch goes back through a stage as one B, or as I and W, not both"
            )
    if action.kind in ("B", "I") and forward not in seen:
        raise GraphparError(f"{where} runs before {forward}: {KINDS[action.kind][1]} without its forward")
    if action.kind == "W" and split not in seen:
        raise GraphparError(f"{where} runs before {split}: weight backward without its input backward")


def _check_complete(
    table: ActionTable, stages: int, microbatches: int, rank_of: dict[int, int], seen: set[Action]
) -> None:
    for rank, row in enumerate(table.rows):
        if not any(row):
            raise GraphparError(f"rank {rank} has no actions; every rank of a pipeline runs at least one stage")
    for stage in range(stages):
        if stage not in rank_of:
            raise GraphparError(f"stage {stage} is on no rank; the program has stages 0 to {stages - 1}")
        done = {kind: [Action(stage, kind, m) in seen for m in range(microbatches)] for kind, _ in KINDS.values()}
        where = f"rank {rank_of[stage]}, stage {stage}"
        if not all(done["F"]):
            missing = Action(stage, "F", done["F"].index(False))
            raise GraphparError(f"{where}: {sum(done['F'])} of {microbatches} forwards; {missing} is missing")
        backward = [full or split for full, split in zip(done["B"], done["I"])]
        if not all(backward):
            microbatch = backward.index(False)
            raise GraphparError(
                f"{where}: {sum(backward)} of {microbatches} backwards; "
                f"{Action(stage, 'B', microbatch)} (or {Action(stage, 'I', microbatch)}) is missing"
            )
        if done["I"] != done["W"]:
            microbatch = next(m for m in range(microbatches) if done["I"][m] and not done["W"][m])
            raise GraphparError(
                f"{where}: {sum(done['I'])} input backwards but {sum(done['W'])} weight backwards; "
                f"{Action(stage, 'W', microbatch)} is missing, and with it a part of the weight gradient"
            )


# ------------------------------------------------------------------------------------------ simulation


@dataclass(frozen=True, slots=True)
class Span:
    """When one action runs, in the unit of the costs. The parts of a pair run one after the other."""

    action: Action
    step: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A schedule in time.

    ``bubble`` is the share of ranks x makespan in which a rank idles. ``peak_in_flight`` counts, for each rank, the
    (stage, microbatch) pairs whose activations are alive at once: from F to the end of B, or of W where the
    backward is split.
    """

    spans: tuple[tuple[Span, ...], ...]
    makespan: float
    bubble: float
    peak_in_flight: tuple[int, ...]


def check_deadlock(table: ActionTable) -> None:
    """Raise if some rank waits for ever: for its own later action, or in a circle of ranks."""
    _run(table, lambda action: 0.0)


def simulate(
    table: ActionTable,
    forward: Sequence[float],
    backward: Sequence[float],
    weight: Sequence[float] | None = None,
) -> Timeline:
    """Run the table with these costs per stage, transfers free.

    ``backward`` is the whole backward, the cost of ``B``. ``weight`` is the part of it that ``W`` does (half, when
    not given); ``I`` does the rest. Any unit of time. Raises on a table that deadlocks.
    """
    weight = [cost / 2 for cost in backward] if weight is None else weight
    for name, costs in (("forward", forward), ("backward", backward), ("weight", weight)):
        if len(costs) != table.stages:
            raise GraphparError(f"{name} has {len(costs)} costs for {table.stages} stages; give one a stage")
        for stage, cost in enumerate(costs):
            if not (math.isfinite(cost) and cost >= 0):
                raise GraphparError(f"the {name} cost of stage {stage} is {cost}; it must be finite and not negative")
    for stage, (whole, part) in enumerate(zip(backward, weight)):
        if part > whole:
            raise GraphparError(
                f"the weight cost of stage {stage}, {part}, is more than its whole backward, {whole}, "
                "which holds both the weight and the input part"
            )
    cost_of = {
        "F": list(forward),
        "B": list(backward),
        "I": [whole - part for whole, part in zip(backward, weight)],
        "W": list(weight),
    }
    spans = _run(table, lambda action: cost_of[action.kind][action.stage])
    makespan = max((span.end for row in spans for span in row), default=0.0)
    busy = math.fsum(cost_of[action.kind][action.stage] for _, _, _, action in table.actions())
    capacity = makespan * table.ranks
    return Timeline(
        spans=tuple(tuple(row) for row in spans),
        makespan=makespan,
        bubble=max(0.0, 1 - busy / capacity) if capacity > 0 else 0.0,
        peak_in_flight=peak_in_flight(table),
    )


def peak_in_flight(table: ActionTable, sizes: Sequence[int] | None = None) -> tuple[int, ...]:
    """Per rank, the most activations alive at once: (stage, microbatch) pairs, or bytes with ``sizes`` a stage.

    Depends on the order alone, not on costs. Split backwards hold their activations until W.
    """
    split = {(action.stage, action.microbatch) for _, _, _, action in table.actions() if action.kind == "W"}
    live, peak = [0] * table.ranks, [0] * table.ranks
    for rank, _, _, action in table.actions():
        size = 1 if sizes is None else sizes[action.stage]
        if action.kind == "F":
            live[rank] += size
            peak[rank] = max(peak[rank], live[rank])
        elif action.kind == "W" or (action.stage, action.microbatch) not in split:
            live[rank] -= size
    return tuple(peak)


def _needs(action: Action, last_stage: int) -> list[_Result]:
    """What must exist before ``action`` runs."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F":
        return [(stage - 1, "F", microbatch)] if stage > 0 else []
    if action.kind == "W":
        return [(stage, "B", microbatch)]
    incoming: list[_Result] = [(stage + 1, "B", microbatch)] if stage < last_stage else []
    return [(stage, "F", microbatch), *incoming]


def _result(action: Action) -> _Result | None:
    if action.kind == "W":
        return None
    return (action.stage, "F" if action.kind == "F" else "B", action.microbatch)


def _unmet(cell: Action | Pair, last_stage: int, done: dict[_Result, float]) -> tuple[list[_Result], float]:
    """What ``cell`` still waits for, and when the latest of the rest arrived.

    A pair starts when both parts can: torch posts its sends after the whole pair, so a part can use what another
    part of its own stage left, but not what the pair would have to send.
    """
    missing: list[_Result] = []
    arrived = 0.0
    inside: list[_Result | None] = []
    for action in cell.parts:
        for need in _needs(action, last_stage):
            if need in done:
                arrived = max(arrived, done[need])
            elif not (need in inside and need[0] == action.stage):
                missing.append(need)
        inside.append(_result(action))
    return missing, arrived


def _run(table: ActionTable, cost: Callable[[Action], float]) -> list[list[Span]]:
    """Run every rank's actions in order, each as soon as its needs are met."""
    last_stage = table.stages - 1
    done: dict[_Result, float] = {}
    step_of, clock = [0] * table.ranks, [0.0] * table.ranks
    spans: list[list[Span]] = [[] for _ in table.rows]
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(table.rows):
            while step_of[rank] < len(row):
                cell = row[step_of[rank]]
                if cell is not None:
                    missing, arrived = _unmet(cell, last_stage, done)
                    if missing:
                        break
                    clock[rank] = max(clock[rank], arrived)
                    for action in cell.parts:
                        end = clock[rank] + cost(action)
                        spans[rank].append(Span(action, step_of[rank], clock[rank], end))
                        clock[rank] = end
                    done.update({left: clock[rank] for left in map(_result, cell.parts) if left is not None})
                step_of[rank] += 1
                progress = True
    if any(step < len(row) for step, row in zip(step_of, table.rows)):
        raise GraphparError(_deadlock(table, step_of, done))
    return spans


def _deadlock(table: ActionTable, step_of: list[int], done: dict[_Result, float]) -> str:
    maker = {_result(action): (rank, step, action) for rank, step, _, action in table.actions()}
    stuck = []
    for rank, row in enumerate(table.rows):
        cell = row[step_of[rank]] if step_of[rank] < len(row) else None
        if cell is None:
            continue
        stage, kind, microbatch = need = _unmet(cell, table.stages - 1, done)[0][0]
        if need in maker:
            other, step, action = maker[need]
            place = f"{action}, which rank {other} runs at step {step}"
            place += " in the same pair" if (other, step) == (rank, step_of[rank]) else ""
        else:
            place = f"{stage}{kind}{microbatch}, which no rank runs"
        stuck.append(f"\n  rank {rank}, step {step_of[rank]}: {cell} waits for {place}")
    return "schedule deadlocks at" + "".join(stuck)


# ------------------------------------------------------------------------------------------------ drawing


def draw(timeline: Timeline, width: int = 100) -> list[str]:
    """A line a rank, time from left to right: ``rank 0  F0 F1 .. .. B0 -- B1 --``.

    ``..`` is idle, ``--`` the rest of a longer action. Columns are as long as the shortest action, or a quarter of
    the longest if that is more, so that times are approximate and the order is exact. The stage is named where a
    rank has more than one. Wider than ``width``, the middle is left out (``…``), at the same time on every rank;
    the first and last column always stay.
    """
    lengths = [span.end - span.start for row in timeline.spans for span in row if span.end > span.start]
    quantum = max(min(lengths), max(lengths) / 4) if lengths else 1.0
    several = any(len({span.action.stage for span in row}) > 1 for row in timeline.spans)
    lines = [_columns(row, quantum, several) for row in timeline.spans]
    total = max((len(line) for line in lines), default=0)
    column = max((len(label) for line in lines for label in line), default=2)
    names = [f"rank {rank}" for rank in range(len(lines))]
    margin = max((len(name) for name in names), default=0) + 1

    room = max(3, (width - margin) // (column + 1))
    cut = total > room
    head, tail = (room // 2, (room - 1) // 2) if cut else (total, 0)
    drawing = []
    for name, line in zip(names, lines):
        padded = line + [".."] * (total - len(line))
        shown = padded[:head] + (["…", *padded[total - tail :]] if cut else [])
        drawing.append((name.ljust(margin) + "".join(" " + label.ljust(column) for label in shown)).rstrip())
    return drawing


def _columns(row: Sequence[Span], quantum: float, several: bool) -> list[str]:
    columns: list[str] = []
    for span in row:
        start = max(len(columns), math.floor(span.start / quantum + 0.5))
        columns += [".."] * (start - len(columns))
        action = span.action
        columns.append(str(action) if several else f"{action.kind}{action.microbatch}")
        columns += ["--"] * (math.floor(span.end / quantum + 0.5) - len(columns))
    return columns
