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


@pytest.mark.costly
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


class Scaled(nn.Conv2d):
    """A convolution with a weight that it computes."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * 0.5, self.bias)


class Frozen(nn.BatchNorm2d):
    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


class Spatial(nn.Module):
    """Convolutions, norms over channels and others, with options."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, WIDTH, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(WIDTH, eps=1e-3, momentum=0.2)
        self.depthwise = nn.Conv2d(WIDTH, WIDTH, (3, 1), stride=(1, 2), padding="valid", groups=WIDTH)
        self.frozen, self.group, self.scaled = Frozen(WIDTH), nn.GroupNorm(2, WIDTH), Scaled(WIDTH, WIDTH, 1)
        self.up = nn.ConvTranspose2d(WIDTH, 4, 3, stride=2, output_padding=1)
        self.act, self.instance = nn.PReLU(4), nn.InstanceNorm2d(4, affine=True)
        self.plain, self.along = nn.BatchNorm1d(4, affine=False), nn.Conv1d(4, 5, 3, dilation=2)
        self.batch, self.both = nn.BatchNorm1d(5, track_running_stats=False), nn.Bilinear(5, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.group(self.frozen(self.depthwise(self.bn(self.conv(x)))))
        x = self.plain(self.instance(self.act(self.up(self.scaled(x)))).flatten(2))
        x = self.batch(self.along(x)).mean(-1)
        y: Tensor = self.both(x, x.tanh())
        return y


def _spatial(dtype: str = "fp32", **mesh: int) -> gp.Parts:
    program = gp.export(Spatial(), (torch.randn(4, 3, 6, 6),), loss_fn=_loss, dtype=dtype)
    return gp.partition(program, gp.plan(program, mesh=mesh))


def test_convolutions_and_norms_of_channels_are_the_modules_that_they_are() -> None:
    text = _spatial(pp=1).files["stage_0.py"]
    for line in (
        "self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)",
        "self.bn = nn.BatchNorm2d(8, eps=0.001, momentum=0.2)",
        "self.depthwise = nn.Conv2d(8, 8, (3, 1), stride=(1, 2), groups=8)",
        "self.frozen = nn.BatchNorm2d(8)",
        "self.group = nn.GroupNorm(2, 8)",
        "self.up = nn.ConvTranspose2d(8, 4, 3, stride=2, output_padding=1)",
        "self.act = nn.PReLU(4)",
        "self.instance = nn.InstanceNorm2d(4, affine=True)",
        "self.plain = nn.BatchNorm1d(4, affine=False)",
        "self.along = nn.Conv1d(4, 5, 3, dilation=2)",
        "self.batch = nn.BatchNorm1d(5, track_running_stats=False)",
        "self.both = nn.Bilinear(5, 5, 3)",
        "self.depthwise(self.bn(self.conv(x)))",
        "self.batch(self.along(",
        "self.frozen.running_mean",  # whatever mode the stage is in, its statistics stay
    ):
        assert line in text, line
    for call in ("self.scaled(", "self.frozen(", "num_batches_tracked"):
        assert call not in text, call


@pytest.mark.parametrize(("dtype", "axis"), [("fp32", "pp"), ("bf16", "pp"), ("fp32", "tp"), ("fp32", "dp_replicate")])
def test_spatial_layers_have_the_models_parameters_and_statistics(dtype: str, axis: str, tmp_path: Path) -> None:
    model, parts = Spatial(), _spatial(dtype, **{axis: 2})
    stored = {name for stage in range(2 if axis == "pp" else 1) for name in parts.stage(stage).state_dict()}
    assert stored == set(model.state_dict())
    assert gp.check(parts.save(tmp_path / "out")).ok
    assert gp.verify(parts, steps=2).ok
