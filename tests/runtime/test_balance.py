"""How rows spread over experts: what is counted in a step, what is not, and what the log says of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from graphpar.emitted import collectives, expert_rows
from graphpar.runtime.training.balance import Balance, Counted

ENDS = torch.tensor([3, 3, 6, 10], dtype=torch.int32)


@pytest.fixture
def balance() -> Iterator[Balance]:
    collectives.bind({"ep": None, "dp_expert": None})
    groups: Any = {"ep": None, "dp_expert": None}
    made = Balance(groups, "graphpar.emitted")
    yield made
    made.close()
    collectives.bind({})


def test_the_most_rows_are_compared_with_the_mean_in_each_layer() -> None:
    found = Counted(torch.tensor([[8, 0, 0, 0], [2, 2, 2, 2], [0, 0, 0, 0]]), ranks=2).to_json()

    assert found == {
        "rows": [10, 2, 2, 2],
        "rank_rows": [12, 4],
        "max_over_mean": (4 + 1) / 2,
        "rank_max_over_mean": (2 + 1) / 2,
    }


@pytest.mark.parametrize("divide", [expert_rows.rank_ends, expert_rows.exchange_of])
@pytest.mark.parametrize("axis", ["ep", "dp_expert"])
def test_each_division_of_rows_is_counted(balance: Balance, divide: Any, axis: str) -> None:
    divide(ENDS, axis)
    divide(ENDS, axis)

    counted = balance.end_step()
    assert counted is not None and counted.ranks == 1
    assert counted.rows.tolist() == [[3, 0, 3, 4], [3, 0, 3, 4]]
    assert balance.end_step() is None


def test_what_a_backward_computes_again_is_not_counted(balance: Balance) -> None:
    calls = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        calls.append(expert_rows.rank_ends(ENDS, "ep"))
        return x.sin()

    y = checkpoint(layer, torch.ones(10, requires_grad=True), use_reentrant=False)
    y.sum().backward()

    counted = balance.end_step()
    assert len(calls) == 2 and counted is not None and len(counted.rows) == 1


def test_evaluations_and_closed_counts_leave_nothing(balance: Balance) -> None:
    expert_rows.rank_ends(ENDS, "ep")
    balance.begin_step()
    assert balance.end_step() is None

    balance.close()
    expert_rows.rank_ends(ENDS, "ep")
    assert balance.end_step() is None and not expert_rows.counters
