"""In which mode a model is traced: what trains, as its own ``train()`` leaves it; what is for inference, as it was built."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphpar as gp
from graphpar.frontend.capture import capture
from graphpar.ir.program import ModelSource, Program, operator_name

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


class Normed(nn.Module):
    """Two norms, the first of which stays in evaluation mode if ``frozen``; it returns its loss if ``own_loss``."""

    def __init__(self, frozen: bool = False, own_loss: bool = False) -> None:
        super().__init__()
        self.frozen, self.own_loss = frozen, own_loss
        self.back, self.head = (
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        )

    def train(self, mode: bool = True) -> Normed:
        super().train(mode)
        if self.frozen:
            self.back.eval()
        return self

    def forward(self, x: Tensor) -> Any:
        y = self.head(self.back(x))
        return {"loss": y.square().mean()} if self.own_loss else y


def factory(built: Callable[[nn.Module], nn.Module], frozen: bool, own_loss: bool) -> nn.Module:
    return built(Normed(frozen, own_loss))


def square(y: Tensor) -> Tensor:
    return y.square().mean()


def norms(program: Program) -> list[bool]:
    """Whether each BatchNorm is by the batch's statistics."""
    calls = [node for node in program.graph.nodes if node.op == "call_function" and operator_name(node) == "batch_norm"]
    return [bool(node.args[5]) for node in calls]


@pytest.mark.costly
@pytest.mark.parametrize("own_loss", [False, True])
@pytest.mark.parametrize("mode", [None, "train"])
@pytest.mark.parametrize("built", [lambda model: model.eval(), lambda model: model])
def test_what_trains_is_in_the_mode_that_its_train_gives(
    own_loss: bool, mode: str | None, built: Callable[..., nn.Module]
) -> None:
    loss = None if own_loss else square
    plain, frozen = (
        capture(ModelSource(functools.partial(factory, built, kept, own_loss), (X,), loss_fn=loss, mode=mode))
        for kept in (False, True)
    )
    assert plain.mode == frozen.mode == "train"
    assert norms(plain) == [True, True] and norms(frozen) == [False, True]
    assert not any("evaluation mode" in line for line in plain.warnings)
    assert any("leaves back (Sequential) in evaluation mode" in line for line in frozen.warnings)


@pytest.mark.parametrize(
    ("mode", "built", "by_batch"), [(None, True, True), (None, False, False), ("infer", False, False)]
)
def test_what_is_for_inference_is_as_it_was_built(mode: str | None, built: bool, by_batch: bool) -> None:
    model = nn.Module.train(Normed(), built)
    program = capture(ModelSource(model, (X,), mode=mode))
    assert program.mode == "infer" and norms(program) == [by_batch] * 2
    assert all(module.training == built for module in model.modules()), "the user's model is as it was"


def test_a_part_that_was_built_in_evaluation_mode_is_named() -> None:
    def half() -> nn.Module:
        model = Normed()
        model.back.eval()
        return model

    program = capture(ModelSource(half, (X,), loss_fn=square))
    assert norms(program) == [True, True]
    assert any(
        "back (Sequential) was built in evaluation mode, and model.train(), which a training program calls, ends that"
        in line
        for line in program.warnings
    )


@pytest.mark.costly
@pytest.mark.parametrize("frozen", [False, True])
def test_the_reference_trains_in_the_same_mode(frozen: bool) -> None:
    program = gp.export(lambda: Normed(frozen).eval(), (X,), loss_fn=square)
    assert gp.verify(gp.partition(program, gp.plan(program, mesh={"tp": 1})), steps=1).ok
