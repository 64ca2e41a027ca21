"""A model of one function of x, for tests of idioms: which there are, and that loss and gradients are the model's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import graphpar as gp
from graphpar.ir.program import Program

WIDTH, LENGTH = 8, 6


class Model(nn.Module):
    """``function(x, self.weight, self.bias)`` of x [b, s, WIDTH]."""

    def __init__(self, function: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.rand(WIDTH, dtype=dtype) + 0.5)
        self.bias = nn.Parameter(torch.rand(LENGTH, LENGTH, dtype=dtype))
        self.register_buffer("table", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self)


def _squares(y: Tensor) -> Tensor:
    return y.to(torch.promote_types(y.dtype, torch.float32)).square().sum()


def exported(
    function: Callable[..., Tensor], dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Model, Program]:
    model = Model(function, dtype)
    x = torch.randn(2, LENGTH, WIDTH, dtype=dtype)
    return model, gp.export(model, (x,), loss_fn=_squares, **options)


def check_idioms(function: Callable[..., Tensor], found: dict[str, int], dtype: torch.dtype = torch.float32) -> None:
    """Check which idioms there are, and that loss and gradients are the model's own."""
    model, program = exported(function, dtype)
    assert dict(program.idioms) == found
    x = torch.randn(4, LENGTH, WIDTH, dtype=dtype)
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    made = program.run(state, {"x": x})
    loss = (made[0] if isinstance(made, tuple | list) else made).sum()
    expected = _squares(model(x))
    used = [
        each
        for each in model.parameters()
        if torch.autograd.grad(expected, each, retain_graph=True, allow_unused=True)[0] is not None
    ]
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(torch.autograd.grad(loss, used), torch.autograd.grad(expected, used)):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
