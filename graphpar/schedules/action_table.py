"""A pipeline schedule as a table: a row for each rank, a cell for each step, and in each cell what the rank computes.

::

    2 ranks, 2 microbatches, 1F1B             as text, which torch's runtime loads
      rank 0   F0 F1 .. .. B0 -- B1 --        0F0,0F1,0B0,0B1
      rank 1   .. F0 B0 -- F1 B1 --           1F0,1B0,1F1,1B1
      with sharded state                      0UNSHARD,0F0,0F1,0B0,0B1,0REDUCE_GRAD,0RESHARD

An action is stage, kind, microbatch: ``2F0`` is stage 2's forward of microbatch 0. The kinds are ``F`` forward,
``B`` full backward, ``I`` backward for the input alone, and ``W`` backward for the weights alone (``I`` then ``W``
stand for one ``B``). ``(0F3;3B1)OVERLAP_F_B`` is a pair that the runtime may interleave. An empty cell is idle time
in a drawing: each rank runs its actions in order, as soon as what they need has arrived. Sends and receives aren't
written: they follow from the order. What a stage does with state that is sharded over dp_shard is: ``UNSHARD`` gathers its
parameters, ``RESHARD`` frees them, ``REDUCE_GRAD`` reduce-scatters the gradients of all microbatches.

Ranks, steps, stages and microbatches count from 0 throughout.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from graphpar.errors import GraphparError, near_match

Kind = Literal["F", "B", "I", "W", "UNSHARD", "RESHARD", "REDUCE_GRAD"]

KINDS: dict[str, tuple[Kind, str]] = {
    "F": ("F", "forward"),
    "B": ("B", "full backward"),
    "I": ("I", "input backward"),
    "W": ("W", "weight backward"),
    "UNSHARD": ("UNSHARD", "gather of parameters"),
    "RESHARD": ("RESHARD", "release of parameters"),
    "REDUCE_GRAD": ("REDUCE_GRAD", "reduction of gradients"),
}
COMPUTATIONS: tuple[Kind, ...] = ("F", "B", "I", "W")
STATE: tuple[Kind, ...] = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
"""The kinds that are of a stage's state and of no microbatch."""
LETTERS: dict[Kind, str] = {"UNSHARD": "U", "RESHARD": "-", "REDUCE_GRAD": "R"}
"""How these are written in drawings; the others are letters."""
WHOLE = -1
"""The microbatch of an action that is of none."""
_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})|([0-9]{1,9})(UNSHARD|RESHARD|REDUCE_GRAD)")
_COMMUNICATION = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)[0-9]*")
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True)
class Action:
    """One computation of one stage on one microbatch, or a collective on the stage's state (microbatch :data:`WHOLE`)."""

    stage: int
    kind: Kind
    microbatch: int

    @property
    def parts(self) -> tuple[Action, ...]:
        """The action alone, as a pair has two."""
        return (self,)

    def label(self, several: bool) -> str:
        """Return its name in a drawing, with the stage where a rank has ``several``."""
        text = LETTERS.get(self.kind, self.kind) if self.microbatch == WHOLE else f"{self.kind}{self.microbatch}"
        return f"{self.stage}{text}" if several else text

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch == WHOLE else self.microbatch}"


@dataclass(frozen=True, slots=True)
class Pair:
    """A forward and a backward that a rank starts only when both can run, and may interleave."""

    parts: tuple[Action, ...]

    def __str__(self) -> str:
        return f"({';'.join(map(str, self.parts))})OVERLAP_F_B"


Cell: TypeAlias = Action | Pair | None


@dataclass(frozen=True, slots=True)
class ActionTable:
    """What each rank runs at each step; ``rows[rank][step]`` is None where the rank idles. Rows differ in length."""

    rows: tuple[tuple[Cell, ...], ...]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """The number of stages: one more than the highest that an action names."""
        return 1 + max((action.stage for _, _, _, action in self.actions()), default=-1)

    @property
    def microbatches(self) -> int:
        """The number of microbatches: one more than the highest that an action names."""
        return 1 + max((action.microbatch for _, _, _, action in self.actions()), default=-1)

    def actions(self) -> Iterator[tuple[int, int, Action | Pair, Action]]:
        """Yield (rank, step, cell, action) of every action, in each rank's order; a pair yields its parts one by one."""
        for rank, row in enumerate(self.rows):
            for step, cell in enumerate(row):
                for action in cell.parts if cell is not None else ():
                    assert cell is not None
                    yield rank, step, cell, action

    def __str__(self) -> str:
        return format_table(self)


def make_table(rows: Sequence[Sequence[Cell]]) -> ActionTable:
    """Remove the idle cells at the end of rows, which mean nothing."""
    trimmed = []
    for row in rows:
        cells = list(row)
        while cells and cells[-1] is None:
            cells.pop()
        trimmed.append(tuple(cells))
    return ActionTable(tuple(trimmed))


def forwards(table: ActionTable) -> ActionTable:
    """Keep the forwards alone, as inference runs them."""
    return make_table([[cell for cell in row if isinstance(cell, Action) and cell.kind == "F"] for row in table.rows])


# ------------------------------------------------------------------------------------------------ text


def format_table(table: ActionTable) -> str:
    """Write the table as CSV, a line for each rank, as torch's ``_PipelineScheduleRuntime._load_csv`` reads it."""
    return "".join(",".join("" if cell is None else str(cell) for cell in row) + "\n" for row in table.rows)


def parse_table(text: str) -> ActionTable:
    """Read what :func:`format_table` writes; spaces around a token and blank lines at the end are allowed.

    Raises:
        GraphparError: the text is empty, or a token is no action.
    """
    rows = [
        [parse_cell(token, rank, step) for step, token in enumerate(line)]
        for rank, line in enumerate(csv.reader(io.StringIO(text.rstrip() + "\n"), strict=False))
    ]
    table = make_table(rows)
    if not any(table.rows):
        raise GraphparError("the schedule is empty: give a line for each rank, with tokens such as 0F0,0B0")
    return table


def parse_cell(token: str, rank: int, step: int) -> Cell:
    """Parse one token; ``rank`` and ``step`` are for the message.

    Raises:
        GraphparError: the token is no action and no pair of actions.
    """
    token = token.strip()
    if not token:
        return None
    pair = _PAIR.fullmatch(token)
    if pair is None:
        return _parse_action(token, token, rank, step)
    parts = tuple(_parse_action(part.strip(), token, rank, step) for part in pair[1].split(";"))
    if len(parts) != 2 or any(part.kind in STATE for part in parts):
        raise GraphparError(
            f"rank {rank}, step {step}: {token!r} overlaps {len(parts)} action(s); "
            "it must be two computations, as (0F3;3B1)OVERLAP_F_B"
        )
    return Pair(parts)


def _parse_action(text: str, token: str, rank: int, step: int) -> Action:
    match = _ACTION.fullmatch(text)
    if match is not None:
        stage, kind, microbatch, whose, state = match.groups()
        if state is not None:
            return Action(int(whose), KINDS[state][0], WHOLE)
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
    """Read the table in a CSV file; it is not validated: see :func:`validate_table` and
    :func:`~graphpar.schedules.order.check_deadlock`.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise GraphparError(f"Schedule file {path} doesn't exist.{near_match(path.name, siblings)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise GraphparError(f"schedule file {path} can't be read: {error}") from None
    try:
        return parse_table(text)
    except GraphparError as error:
        raise GraphparError(f"schedule file {path}: {error}") from None


# ------------------------------------------------------------------------------------------ validation


def validate_table(table: ActionTable, stages: int, microbatches: int) -> None:
    """Check that each stage is on one rank and runs each microbatch forward once and backward once, in a possible order.

    These are the rules of torch's ``_validate_schedule``, and those it leaves out (repeats, B together with I and W).
    Deadlocks are found by :func:`~graphpar.schedules.order.check_deadlock`.

    Raises:
        GraphparError: a rule is broken; the message has the rank and the step.
    """
    rank_of: dict[int, int] = {}
    seen: set[Action] = set()
    for rank, step, cell, action in table.actions():
        stage, microbatch = action.stage, action.microbatch
        where = f"rank {rank}, step {step}: {cell}" + ("" if cell == action else f", in it {action}")
        if not 0 <= stage < stages:
            raise GraphparError(f"{where} names stage {stage}; the last stage of the program is {stages - 1}")
        if action.kind not in STATE and not 0 <= microbatch < microbatches:
            raise GraphparError(f"{where} names microbatch {microbatch}; the last of them is {microbatches - 1}")
        if rank_of.setdefault(stage, rank) != rank:
            raise GraphparError(f"{where} runs stage {stage}, which is on rank {rank_of[stage]}; a stage has one rank")
        if action.kind in STATE:
            continue
        if action in seen:
            raise GraphparError(f"{where} repeats {action}; a stage runs each action once")
        _check_local_order(action, seen, where)
        seen.add(action)
    _check_complete(table, stages, microbatches, rank_of, seen)
    if has_state_actions(table):
        _check_state(table)


def _check_local_order(action: Action, seen: set[Action], where: str) -> None:
    forward, full, split, weight = (Action(action.stage, kind, action.microbatch) for kind in COMPUTATIONS)
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
        done = {kind: [Action(stage, kind, m) in seen for m in range(microbatches)] for kind in COMPUTATIONS}
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


# ------------------------------------------------------------------------------------------ sharded state


def has_state_actions(table: ActionTable) -> bool:
    """Tell whether the table says when state is gathered and reduced."""
    return any(action.kind in STATE for _, _, _, action in table.actions())


def with_state_actions(table: ActionTable, *, gathers: bool) -> ActionTable:
    """Add when each stage reduces its gradients: once, after its last weight gradient.

    With ``gathers`` its parameters are gathered before its first action and freed after the reduction; else the stage gathers
    them itself, for each forward and each backward.
    """
    return make_table([_row_with_state(row, gathers) for row in table.rows])


def _row_with_state(row: Sequence[Cell], gathers: bool) -> list[Cell]:
    last = {action.stage: step for step, cell in enumerate(row) for action in (cell.parts if cell is not None else ())}
    found: list[Cell] = []
    gathered: set[int] = set()
    for step, cell in enumerate(row):
        stages = dict.fromkeys(action.stage for action in (cell.parts if cell is not None else ()))
        found += [Action(stage, "UNSHARD", WHOLE) for stage in stages if gathers and stage not in gathered]
        gathered |= set(stages)
        found.append(cell)
        for stage in (stage for stage in stages if last[stage] == step):
            found.append(Action(stage, "REDUCE_GRAD", WHOLE))
            found += [Action(stage, "RESHARD", WHOLE)] if gathers else []
    return found


def _check_state(table: ActionTable) -> None:
    """Check that stages compute while their parameters are gathered, and reduce once, after their last weight gradient."""
    gathers = any(action.kind == "UNSHARD" for _, _, _, action in table.actions())
    last = {action.stage: (step, action) for _, step, _, action in table.actions() if action.kind in ("B", "W")}
    gathered: set[int] = set()
    reduced: set[int] = set()
    for rank, step, cell, action in table.actions():
        where, stage = f"rank {rank}, step {step}: {cell}", action.stage
        if action.kind == "UNSHARD":
            if stage in gathered:
                raise GraphparError(f"{where} gathers the parameters of stage {stage}, which are gathered already")
            gathered.add(stage)
        elif gathers and stage not in gathered:
            raise GraphparError(
                f"{where} needs the parameters of stage {stage}, which no {stage}UNSHARD before it gathers"
            )
        elif action.kind == "RESHARD":
            if not gathers:
                raise GraphparError(f"{where} frees parameters that no {stage}UNSHARD gathers")
            gathered.remove(stage)
        elif action.kind == "REDUCE_GRAD":
            if step < last[stage][0]:
                raise GraphparError(
                    f"{where} reduces the gradients of stage {stage} before {last[stage][1]} at step {last[stage][0]}, its last "
                    "weight gradient, which would be lost"
                )
            if stage in reduced:
                raise GraphparError(f"{where} reduces the gradients of stage {stage} a second time")
            reduced.add(stage)
    for stage in range(table.stages):
        if stage not in reduced:
            raise GraphparError(f"stage {stage} has no {stage}REDUCE_GRAD, so its gradients stay on their ranks")
        if stage in gathered:
            raise GraphparError(f"stage {stage} has no {stage}RESHARD after its last {stage}UNSHARD")
