"""What hides the reduction of gradients and the gathering of parameters on a rank with several stages, by hand."""

from __future__ import annotations

import pytest

from graphpar.cost_models.overlapped_state import StageWindow, exposed_gather, exposed_reduce, windows
from graphpar.cost_models.step_costs import StageSeconds
from graphpar.schedules.action_table import parse_table
from graphpar.schedules.order import order_of


def costs(*each: tuple[float, float]) -> list[StageSeconds]:
    return [StageSeconds(forward, backward, 0.0, {}, {}, {}, {}, 0.0) for forward, backward in each]


def test_windows_are_what_the_rank_computes_before_the_first_forward_and_after_the_last_backward() -> None:
    order = order_of(parse_table("0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,3F0,3F1,3B0,3B1,1B0,1B1"))
    found = windows(order, 0, costs((1, 2), (1, 2), (3, 5), (1, 2)))
    assert found == {0: StageWindow(0.0, 0.0), 2: StageWindow(2.0, 4.0)}


def test_one_stage_hides_all_but_its_last_bucket_behind_its_last_backward() -> None:
    around = {0: StageWindow(0.0, 0.0)}
    assert exposed_reduce({0: 1.5}, costs((1, 2)), 0.25, around) == 0.25
    assert exposed_reduce({0: 3.0}, costs((1, 2)), 0.25, around) == 1.0
    assert exposed_gather({0: 3.0}, costs((1, 2)), around) == 2.0


@pytest.mark.parametrize(("later", "exposed"), [(0.0, 4.0), (4.0, 1.0), (40.0, 1.0)])
def test_what_runs_later_hides_the_reductions_of_deeper_stages(later: float, exposed: float) -> None:
    around = {0: StageWindow(0.0, 0.0), 1: StageWindow(2.0, later)}
    # stage 1 takes 3 s from 2 s before its end on; stage 0 takes 3 s from 2 s before the end on, and not before stage 1 is done
    assert exposed_reduce({0: 3.0, 1: 3.0}, costs((1, 2), (1, 2)), 0.5, around) == exposed


def test_gathers_are_late_by_the_one_that_is_latest() -> None:
    around = {0: StageWindow(0.0, 0.0), 1: StageWindow(2.0, 0.0)}
    assert exposed_gather({0: 0.5, 1: 4.0}, costs((1, 2), (1, 2)), around) == 1.5
    assert exposed_gather({0: 0.5, 1: 2.0}, costs((1, 2), (1, 2)), around) == 0.0
