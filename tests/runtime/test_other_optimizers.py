"""Optimizers that would not train a program are refused; those of something else beside it are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.state.optimizers import OtherOptimizers

PROGRAM = cast(Manifest, SimpleNamespace(spec=lambda name: {}))


def model(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))


@pytest.fixture
def stage() -> Iterator[nn.Module]:
    """A program's only stage, which has gradients that no optimizer has used."""
    made = model()
    made(torch.ones(1, 3)).sum().backward()
    others = OtherOptimizers([made], made.parameters(), PROGRAM)
    yield made
    others.close()


def step(*parameters: Tensor, **options: Any) -> None:
    torch.optim.SGD(parameters, lr=0.1).step(**options)


def test_an_optimizer_of_the_model_on_one_device_is_refused(stage: nn.Module) -> None:
    with pytest.raises(RuntimeProgramError, match=r"none of this program's parameters"):
        step(*model().parameters())
    with pytest.raises(RuntimeProgramError, match=r"build it over pipeline.named_parameters"):
        step(*nn.Sequential(model(), model()).parameters())  # this rank has one of its stages


def _trained(width: int) -> list[nn.Parameter]:
    other = model(width)
    other(torch.ones(1, 3)).sum().backward()
    return list(other.parameters())


OTHERS: dict[str, Callable[[], list[nn.Parameter]]] = {
    "of another shape, without gradients": lambda: list(model(5).parameters()),
    "trained": lambda: _trained(4),
    "one parameter more": lambda: [nn.Parameter(torch.zeros(4))],
}


@pytest.mark.parametrize("name", OTHERS)
def test_an_optimizer_of_something_else_is_not(stage: nn.Module, name: str) -> None:
    step(*OTHERS[name]())
    step(*stage.parameters(), *OTHERS[name]())
    step(*stage[0].parameters())


def test_one_whose_closure_computes_gradients_is_not(stage: nn.Module) -> None:
    other = model()

    def closure() -> float:
        loss = other(torch.ones(1, 3)).sum()
        loss.backward()
        return float(loss)

    step(*other.parameters(), closure=closure)


def test_one_of_another_program_is_not(stage: nn.Module) -> None:
    other = model()
    others = OtherOptimizers([other], other.parameters(), PROGRAM)
    step(*other.parameters())  # its step was skipped
    others.close()


def test_one_over_what_the_rank_updates_pieces_of_is_refused_until_the_program_is_closed() -> None:
    made, piece = model(), nn.Parameter(torch.zeros(5))
    others = OtherOptimizers([made], [piece], PROGRAM)
    step(piece)
    optimizer = torch.optim.SGD([piece], lr=0.1)
    optimizer.step()
    optimizer.add_param_group({"params": list(made.parameters())})
    with pytest.raises(RuntimeProgramError, match=r"has 0.weight, of which this rank updates a piece"):
        optimizer.step()
    others.close()
    optimizer.step()
