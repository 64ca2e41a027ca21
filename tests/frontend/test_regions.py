"""State written in a region of ``torch.utils.checkpoint``, which the backward runs again: as eager training leaves it, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphpar as gp
from graphpar.verification import verify_all
from tests.tools.equality import Case, assert_same, eager, near, run

X = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))
T = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.convolution, self.norm, self.drop = nn.Conv2d(3, 3, 3, padding=1), norm, nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.drop(self.convolution(x))))


class Counter(nn.Module):
    def __init__(self, write: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        self.write(self)
        return x.sin()


class Model(nn.Module):
    """Blocks in regions; ``nested``: of one region more; ``frozen``: without a gradient through the first region."""

    def __init__(
        self, norm: Callable[[], nn.Module], reentrant: bool = False, nested: bool = False, frozen: bool = False
    ):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(norm()) for _ in range(3))
        self.head = nn.Linear(3, 5)
        self.region = partial(checkpoint, use_reentrant=reentrant)
        self.nested = nested
        self.layers[0].requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        x = (
            x
            if not self.layers[0].convolution.weight.requires_grad
            else x * self.layers[0].convolution.bias[:, None, None]
        )
        for layer in self.layers:
            inner = partial(self.region, layer) if self.nested else layer
            x = self.region(inner, x)
        return self.head(x.mean((2, 3)))


def plain(norm: Callable[[], nn.Module], **options: bool) -> gp.Program:
    return gp.export(partial(Model, norm, **options), (X,), loss_fn=F.mse_loss, targets=(T,))


@pytest.mark.costly
@pytest.mark.parametrize(
    "options",
    [{}, {"reentrant": True}, {"nested": True}, {"nested": True, "reentrant": True}, {"frozen": True}],
    ids=str,
)
def test_statistics_in_regions_are_those_of_eager_training(options: dict[str, bool]) -> None:
    norm = partial(nn.BatchNorm2d, 3, momentum=0.3)
    model = Model(norm, **options)
    for layer in model.layers:
        layer.drop.p = 0.0
    case = Case(model, (X,), {}, F.mse_loss, (T,))
    expected, found = eager(case), run(case.export(), case)

    assert_same(found, expected)
    for name, value in expected.buffers.items():
        near(found.buffers[name], value, 1e-6, name)


@pytest.mark.costly
def test_programs_with_regions_verify_with_dropout() -> None:
    parts = []
    for reentrant in (False, True):
        program = plain(partial(nn.BatchNorm2d, 3), reentrant=reentrant)
        parts.append(gp.partition(program, gp.plan(program, mesh={"dp_replicate": 2}, recompute="full")))

    for outcome in verify_all(parts, 2):
        assert outcome.ok, (outcome.problems, outcome.max_error)


def _assigned(module: nn.Module) -> None:
    module.calls = module.calls + 1


@pytest.mark.parametrize(
    "write",
    [
        lambda module: module.calls.add_(1),
        lambda module: module.calls.__iadd__(1),
        torch.no_grad()(_assigned),
        _assigned,
    ],
    ids=["in place", "by an operator", "without a gradient", "assigned"],
)
def test_other_writes_are_refused_by_name(write: Callable[[nn.Module], None]) -> None:
    with pytest.raises(gp.GraphparError, match=r"buffer 'layers\.0\.norm\.calls' is written in a region of torch"):
        plain(lambda: Counter(write))


def test_batch_norm_that_several_regions_share_is_refused() -> None:
    norm = nn.BatchNorm2d(3)

    with pytest.raises(gp.GraphparError, match=r"buffer 'layers\.0\.norm\.running_mean' is written in a region"):
        plain(lambda: norm)
