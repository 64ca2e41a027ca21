"""Tables of an edited ``plan.json`` that would lose a gradient are refused before they run."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import _Action

from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.stages.schedules import _check_gathers, _check_gradients
from graphpar.schedules.action_table import with_state_actions
from graphpar.schedules.registry import action_table

MICROBATCHES = 4


def cells_of(schedule: str, stages_per_rank: int) -> tuple[Any, list[_Action]]:
    table = with_state_actions(action_table(schedule, 2, stages_per_rank, MICROBATCHES), gathers=True)
    cells = [_Action.from_str(str(cell)) for row in table.rows for cell in row if cell is not None]
    program = SimpleNamespace(
        microbatches=MICROBATCHES,
        stages=range(2 * stages_per_rank),
        mode="train",
        fully_sharded={"weight"},
        gathers_by_table=True,
    )
    return program, cells


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank"), [("1F1B", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2), ("DualPipeV", 2)]
)
def test_each_gradient_is_computed_and_reduced_once(schedule: str, stages_per_rank: int) -> None:
    program, cells = cells_of(schedule, stages_per_rank)

    _check_gradients(program, cells)
    _check_gathers(program, cells)
    for lost in ("0REDUCE_GRAD", "0B3", "0W2", "0F0"):
        left = [cell for cell in cells if str(cell) != lost]
        if len(left) < len(cells):
            with pytest.raises(RuntimeProgramError, match="of stage 0"):
                _check_gradients(program, left)


def test_a_reduction_before_the_last_backward_is_refused() -> None:
    program, cells = cells_of("1F1B", 1)
    place = next(i for i, cell in enumerate(cells) if str(cell) == "0REDUCE_GRAD")
    early = [cells[place], *cells[:place], *cells[place + 1 :]]

    with pytest.raises(RuntimeProgramError, match="after the last backward of stage 0, since gradients would be lost"):
        _check_gradients(program, early)


@pytest.mark.parametrize(
    ("lost", "message"), [("0UNSHARD", "where stage 0 is not gathered"), ("1RESHARD", "no 1RESHARD after stage 1")]
)
def test_a_stage_that_computes_with_shards_is_refused(lost: str, message: str) -> None:
    program, cells = cells_of("1F1B", 1)

    with pytest.raises(RuntimeProgramError, match=message):
        _check_gathers(program, [cell for cell in cells if str(cell) != lost])
    with pytest.raises(RuntimeProgramError, match=r"is gathered already|is not gathered"):
        _check_gathers(program, [cell for cell in cells for _ in range(1 + (str(cell) == lost))])
