"""Input and weight halves of a stage's backward against its whole backward."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from graphpar.runtime.stages.split_backward import guard, is_whole
from graphpar.runtime.torch_versions import SPLITS_BACKWARD

WIDTH = 4
OPERATORS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "m": lambda x, other, w: x @ w,
    "a": lambda x, other, w: x + other,
    "t": lambda x, other, w: torch.tanh(x),
    "s": lambda x, other, w: torch.sigmoid(x) * other,
    "x": lambda x, other, w: x * other,
    "r": lambda x, other, w: torch.relu(x) + other.detach(),
    "l": lambda x, other, w: nn.functional.layer_norm(x, (WIDTH,), w[0], w[1]),
    "g": lambda x, other, w: x @ torch.tanh(w) + other,
}


class Drawn(nn.Module):
    """A stage of random operators on what it receives and on parameters; it returns some of what it computes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        numbers = random.Random(seed)
        torch.manual_seed(seed)
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 2 for _ in range(9))
        used = [place if numbers.random() < 0.95 else 0 for place in range(9)]
        self.steps = [(numbers.choice("mmmatsxrlg"), numbers.random(), place) for place in used]
        self.sent = [numbers.random() for _ in range(numbers.randint(0, 2))]

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        values = [first, second]
        for kind, place, weight in self.steps:
            x, other, w = values[-1], values[int(place * len(values))], self.weights[weight]
            values.append(OPERATORS[kind](x, other, w))
        computed = values[2:]
        again = [computed[int(place * (len(computed) - 1))] for place in self.sent]
        return tuple({id(value): value for value in (computed[-1], *again)}.values())


def _gradients(stage: nn.Module, *, halves: bool) -> tuple[list[Tensor | None], bool]:
    """The gradients of what the stage receives and of its parameters over two microbatches, and whether it was split."""
    held: Any = SimpleNamespace(stage_index=1, submod=stage, dw_builder=None)
    found: list[Tensor | None] = []
    stage.zero_grad()
    if halves:
        guard(held)
    for seed in range(2):
        numbers = torch.Generator().manual_seed(seed)
        received = [torch.randn(3, WIDTH, generator=numbers, dtype=torch.float64).requires_grad_() for _ in range(2)]
        outputs = stage(*received)
        grads = [torch.randn(output.shape, generator=numbers, dtype=torch.float64) for output in outputs]
        if halves and not is_whole(held):
            given, groups = stage_backward_input(list(outputs), grads, received, stage.parameters())
            stage_backward_weight(stage.parameters(), groups)
            found += given
        else:
            trained = [(output, grad) for output, grad in zip(outputs, grads) if output.requires_grad]
            torch.autograd.backward([output for output, _ in trained], [grad for _, grad in trained])
            found += [tensor.grad for tensor in received]
    return [*found, *(parameter.grad for parameter in stage.parameters())], halves and not is_whole(held)


@pytest.mark.costly
@pytest.mark.parametrize("begin", range(0, 200, 50))
def test_halves_are_exact(begin: int) -> None:
    split = 0
    for seed in range(begin, begin + 50):
        expected, _ = _gradients(Drawn(seed), halves=False)
        found, was_split = _gradients(Drawn(seed), halves=True)
        split += was_split
        for one, other in zip(expected, found, strict=True):
            if one is None or other is None:
                assert (one is None or not one.any()) and (other is None or not other.any()), seed
            else:
                torch.testing.assert_close(one, other)
    assert split > 20 if SPLITS_BACKWARD else split == 0  # else nothing was tried


def test_a_parameter_that_is_trained_later_is_looked_at() -> None:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.up(x), self.up.weight.square().sum()

    stage = Penalised()
    held: Any = SimpleNamespace(stage_index=1, submod=stage, dw_builder=None)
    guard(held)
    stage.up.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))  # as where sharded state is gathered
    whole = []
    for trained in (False, True, False):
        stage.up.weight.requires_grad_(trained)
        stage(torch.randn(2, WIDTH, requires_grad=True))
        whole.append(is_whole(held))
    assert whole == ([False, True, False] if SPLITS_BACKWARD else [True] * 3)
