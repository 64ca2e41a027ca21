"""Which operators are printed as calls of layers, ``self.q(x)``, and that such layers have the model's own parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpar as gp

WIDTH = 8


class OneBias(nn.Module):
    """A product with one number for all of its columns, which no ``nn.Linear`` has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Tripled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * F.linear(x * 2, self.weight, self.bias)


class Turned(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)


class RMSNorm(nn.Module):
    """A norm of the user's, with an epsilon for each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor, eps: float = 1e-6) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


class layers(nn.Module):
    """Names that emitted files have a use for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.weight, self.given = nn.Linear(WIDTH, WIDTH), Tripled(WIDTH, WIDTH), Turned(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.given(self.weight(self.layers(x).tanh()).tanh()).tanh()
        return y


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one_bias, self.twice, self.read = OneBias(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two_eps, self.one_eps, self.bare = RMSNorm(), RMSNorm(), nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.fine, self.unbiased = nn.LayerNorm(WIDTH, eps=1e-12), nn.LayerNorm(WIDTH, bias=False)
        self.blocks = nn.ModuleList(layers() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        x = self.one_bias(x) + self.twice(self.twice(x).tanh()) + self.read(x) @ self.read.weight
        x = self.two_eps(x) + self.two_eps(x, 0.1) + self.one_eps(x, 0.01)
        y: Tensor = self.bare(x) + self.fine(x).sin() + self.unbiased(x)
        return y


def _loss(y: Tensor) -> Tensor:
    return y.float().square().mean()


def _parts(dtype: str = "fp32", **mesh: int) -> gp.Parts:
    program = gp.export(Odd(), (torch.randn(4, 3, WIDTH),), loss_fn=_loss, dtype=dtype)
    return gp.partition(program, gp.plan(program, mesh=mesh, microbatch_size=2))


def test_what_is_a_call_of_a_layer() -> None:
    text = _parts(pp=1).files["stage_0.py"] + _parts(pp=1).files.get("blocks.py", "")
    assert text.count("self.twice(") == 2
    for line in (
        "self.one_eps(",
        "self.one_eps = nn.RMSNorm(8, eps=0.01)",
        "self.fine = nn.LayerNorm(8, eps=1e-12)",
        "self.unbiased = nn.LayerNorm(8, bias=False)",
        "self.layers(",
        "self.weight(",
        "self.read(",
    ):
        assert line in text, line
    for call in ("self.one_bias(", "self.two_eps(", "self.given(", "self.bare("):
        assert call not in text, call


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_layers_have_the_models_parameters(dtype: str, tmp_path: Path) -> None:
    """A layer of torch's has the shapes that its constructor is given: parameters of other shapes are no layer's."""
    model, parts = Odd(), _parts(dtype, pp=2)
    stored = {name: value.shape for index in range(2) for name, value in parts.stage(index).state_dict().items()}
    assert stored == {name: value.shape for name, value in model.state_dict().items()}
    assert gp.check(parts.save(tmp_path / "out")).ok
    assert gp.verify(parts, steps=2).ok
