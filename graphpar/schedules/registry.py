"""What a pipeline schedule does with given numbers: whether they are legal, the ranks of its stages, and what every rank runs.

::

    Schedule ──check_legal──► (pp, stages a rank, microbatches)
       │                                    │
       └─stage_ranks: stage -> rank         └─action_table ─► validate, simulate, draw

The tables come from torch's own schedule classes, so the checked and drawn schedule is the one that runs; those that torch lacks
(:mod:`graphpar.schedules.zero_bubble`) run as tables. The user's own tables are in :mod:`graphpar.schedules.action_table`, what
they cost in :mod:`graphpar.schedules.simulation`.
"""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING

from graphpar.errors import GraphparError
from graphpar.runtime.schedule_records import SCHEDULES, Schedule, canonical_name, get_schedule
from graphpar.schedules.action_table import KINDS, Action, ActionTable, Cell, Pair, make_table, with_state_actions
from graphpar.schedules.order import Order, order_of
from graphpar.schedules.zero_bubble import handcrafted

if TYPE_CHECKING:
    from torch.distributed.pipelining.schedules import _Action


# -------------------------------------------------------------------------------------------- legality


def check_legal(schedule: str, pp: int, stages_per_rank: int, microbatches: int) -> None:
    """Check stages and microbatches before all ranks run, where torch's constructor would refuse (or overlook) them.

    Raises:
        GraphparError: they are not legal; the message proposes numbers that are.
    """
    row = _check_stages(schedule, pp, stages_per_rank)
    _check_count("microbatches", microbatches)
    stages = pp * stages_per_rank
    if not row.microbatches.accepts(pp, stages, microbatches):
        proposals = _nearest_counts(row, pp, stages, microbatches)
        raise GraphparError(
            f"{row.name} {row.microbatches.reason(pp, stages, microbatches)}. "
            f"Use {' or '.join(map(str, proposals))} microbatches."
        )


def legal_microbatches(schedule: str, pp: int, stages_per_rank: int, batch: int) -> list[int]:
    """List the microbatch counts that the schedule can run and that divide ``batch`` rows evenly, in rising order."""
    row = _check_stages(schedule, pp, stages_per_rank)
    _check_count("batch", batch)
    stages = pp * stages_per_rank
    return [count for count in _divisors(batch) if row.microbatches.accepts(pp, stages, count)]


@lru_cache(maxsize=512)
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in range(1, number + 1) if number % divisor == 0)


def bubble_warning(
    schedule: str, pp: int, stages_per_rank: int, microbatches: int, rows: int | None = None
) -> str | None:
    """Advise where a legal choice has fewer microbatches than stages, which cannot fill the pipeline; else ``None``.

    Args:
        rows: of the batch that is split; only a legal count that divides them is advised. None: no count is.
    """
    stages = pp * stages_per_rank
    if microbatches >= stages:
        return None
    more = [count for count in legal_microbatches(schedule, pp, stages_per_rank, rows or 1) if count > microbatches]
    better = min((count for count in more if count >= stages), default=max(more, default=None))
    advice = "" if better is None else f"; use {better} (--microbatch-size {(rows or 1) // better})"
    counted = "1 microbatch" if microbatches == 1 else f"{microbatches} microbatches"
    return f"{canonical_name(schedule)} with {counted} for {stages} stages leaves ranks idle (a bubble){advice}"


def stage_ranks(schedule: str, pp: int, stages_per_rank: int) -> list[int]:
    """List the rank of each stage, in the order of the stages."""
    row = _check_stages(schedule, pp, stages_per_rank)
    if row.placement == "loop":
        return [stage % pp for stage in range(pp * stages_per_rank)]
    return [*range(pp), *reversed(range(pp))]


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise GraphparError(f"{name} must be a whole number of at least 1, not {value!r}")


def _check_stages(schedule: str, pp: int, stages_per_rank: int) -> Schedule:
    row = get_schedule(schedule)
    _check_count("pp", pp)
    _check_count("stages_per_rank", stages_per_rank)
    most = row.max_stages
    if row.min_stages <= stages_per_rank and (most is None or stages_per_rank <= most):
        return row
    exactly = f"exactly {most} stage{'s' if most != 1 else ''}"
    needed = exactly if most == row.min_stages else f"at least {row.min_stages} stages"
    nearest = row.min_stages if most is None else min(max(stages_per_rank, row.min_stages), most)
    others = [
        other.name
        for other in SCHEDULES.values()
        if other.min_stages <= stages_per_rank <= (other.max_stages or stages_per_rank) and other != row
    ]
    raise GraphparError(
        f"{row.name} needs {needed} a rank, not {stages_per_rank}: {pp * stages_per_rank} stages on {pp} ranks. "
        f"Use {nearest} a rank ({pp * nearest} stages), or, for {stages_per_rank} a rank, one of {', '.join(others)}."
    )


def _nearest_counts(row: Schedule, pp: int, stages: int, microbatches: int) -> list[int]:
    """Return the nearest legal counts below and above; above there always is one."""
    legal = row.microbatches.accepts
    below = next((count for count in range(microbatches - 1, 0, -1) if legal(pp, stages, count)), None)
    above = microbatches + 1
    while not legal(pp, stages, above):
        above += 1
    return [above] if below is None else [below, above]


# ---------------------------------------------------------------------------------------------- tables


def action_table(schedule: str, pp: int, stages_per_rank: int, microbatches: int) -> ActionTable:
    """Make the table of what every rank runs; for schedules of torch this imports torch.

    Raises:
        GraphparError: the numbers are not legal for the schedule, or torch refuses them.
    """
    check_legal(schedule, pp, stages_per_rank, microbatches)
    return _action_table(canonical_name(schedule), pp, stages_per_rank, microbatches)


@lru_cache(maxsize=64)
def _action_table(name: str, pp: int, stages_per_rank: int, microbatches: int) -> ActionTable:
    if name == "1F1B":
        # Not torch's listing: in 2.13 it numbers the forwards of the last rank from 1, while its step() runs
        # them from 0.
        return make_table([_one_forward_one_backward(rank, pp, microbatches) for rank in range(pp)])

    lead = SCHEDULES[name].lead
    if lead is not None:
        return handcrafted(pp, microbatches, lead)

    import torch

    try:
        rows = _listed_by_torch(name, pp, microbatches, stages_per_rank)
    except (AssertionError, RuntimeError, ValueError) as error:
        raise GraphparError(
            f"torch {torch.__version__} refuses {name} with {pp} ranks, {stages_per_rank} stages a rank "
            f"and {microbatches} microbatches: {error}"
        ) from error
    return make_table([[_from_torch(cell) for cell in row if not _reduces_gradients(cell)] for row in rows])


def action_order(schedule: str, pp: int, stages_per_rank: int, microbatches: int, gathers: bool | None = None) -> Order:
    """Return the order of :func:`action_table`, cached for callers that price one schedule many times.

    With ``gathers`` it has the actions on sharded state, see :func:`~graphpar.schedules.action_table.with_state_actions`.
    """
    check_legal(schedule, pp, stages_per_rank, microbatches)
    return _action_order(canonical_name(schedule), pp, stages_per_rank, microbatches, gathers)


@lru_cache(maxsize=512)
def _action_order(name: str, pp: int, stages_per_rank: int, microbatches: int, gathers: bool | None) -> Order:
    table = _action_table(name, pp, stages_per_rank, microbatches)
    return order_of(table if gathers is None else with_state_actions(table, gathers=gathers))


def _one_forward_one_backward(rank: int, pp: int, microbatches: int) -> list[Cell]:
    """Return the actions of ``Schedule1F1B``: warm-up forwards, alternating backwards and forwards, the remaining backwards."""
    warm_up = min(microbatches, pp - rank)
    cells: list[Cell] = [Action(rank, "F", microbatch) for microbatch in range(warm_up)]
    for microbatch in range(microbatches):
        cells.append(Action(rank, "B", microbatch))
        if microbatch + warm_up < microbatches:
            cells.append(Action(rank, "F", microbatch + warm_up))
    return cells


def _listed_by_torch(name: str, pp: int, microbatches: int, stages_per_rank: int) -> list[list[_Action | None]]:
    """Return the actions of each rank, from the constructor of torch's class.

    It asks stages only for their number and index. (``torch.distributed.pipelining._schedule_visualizer`` does the same
    with mocks of whole stages, and adds sends and receives, which takes ten times as long.)
    """
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    kind = get_schedule_class(name)
    place = SimpleNamespace(
        group_rank=0, group_size=pp, num_stages=pp * stages_per_rank, stage_index=0, submod=None, has_backward=True, is_first=True,
        is_last=False, stage_index_to_group_rank=dict.fromkeys(range(pp * stages_per_rank), 0),
    )  # fmt: skip
    listing = type(kind.__name__, (kind,), {"_prepare_schedule_with_comms": lambda self, *args, **options: None})
    schedule = listing(place if issubclass(kind, PipelineScheduleSingle) else [place] * stages_per_rank, microbatches)
    return [list(schedule.pipeline_order[rank]) for rank in range(pp)]


def _reduces_gradients(cell: _Action | None) -> bool:
    """Return whether a cell is the data-parallel reduction, which only torch's single-stage schedules list."""
    return cell is not None and cell.computation_type.value == "REDUCE_GRAD"


def _from_torch(cell: _Action | None) -> Cell:
    if cell is None:
        return None
    if cell.sub_actions is not None:
        return Pair(tuple(_leaf(part) for part in cell.sub_actions))
    return _leaf(cell)


def _leaf(action: _Action) -> Action:
    assert action.microbatch_index is not None, action
    return Action(action.stage_index, KINDS[action.computation_type.value][0], action.microbatch_index)
