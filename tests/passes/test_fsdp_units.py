"""Units of networks whose modules don't repeat: large ones are called, small ones stay together."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import graphpar as gp
from graphpar.verification import verify_all


class Network(nn.Module):
    """Convolutions and a classifier with two large layers; one more layer that is read by others, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8), nn.Conv2d(8, 16, 3, 2))
        self.classifier = nn.Sequential(nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, 144), nn.Linear(144, 10))
        self.penalized = nn.Linear(10, 300)

    def forward(self, x: Tensor) -> Tensor:
        found = self.penalized(self.classifier(self.features(x).flatten(1)))
        return found + self.penalized.weight.square().sum()


def _parts(**asked: object) -> gp.Parts:
    x = torch.randn(8, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    program = gp.export(Network(), (x,), loss_fn=lambda found: found.square().mean())
    return gp.partition(program, gp.plan(program, **asked))  # type: ignore[arg-type]


@pytest.mark.costly
def test_large_modules_are_units() -> None:
    parts = [_parts(mesh={"dp_shard": 2}, zero=2), _parts(mesh={"dp_shard": 2, "tp": 2})]
    for each in parts:
        units = re.findall(r"fully_shard\((.*), \*\*options\)", each.files["stage_0.py"])
        assert units == ['stage.classifier["0"]', 'stage.classifier["2"]', "stage"]
    for outcome in verify_all(parts, 3):
        assert outcome.ok, outcome.problems


class Residual(nn.Module):
    """Three alike parts of a large layer and a small one; a stage may begin between the two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)

        def part() -> nn.Sequential:
            large, small = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
            return nn.Sequential(large, nn.BatchNorm2d(8), small, nn.BatchNorm2d(8))

        self.blocks = nn.ModuleList(part() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_a_module_that_two_stages_share_is_no_unit() -> None:
    program = gp.export(Residual(), (torch.randn(8, 8, 4, 4),), loss_fn=lambda found: found.square().mean())
    expected = set(Residual().state_dict())
    parts = gp.partition(program, gp.plan(program, mesh={"pp": 2, "dp_shard": 2}, zero=3, split=["blocks.1.2"]))
    held = [set(parts.stage(rank).state_dict()) for rank in range(2)]
    assert held[0] | held[1] == expected and not held[0] & held[1]


@pytest.mark.costly
def test_elsewhere_they_are_not() -> None:
    for asked in ({"mesh": {"dp_replicate": 2}}, {"mesh": {"dp_shard": 2}, "zero": 1}):
        assert "blocks.py" not in _parts(**asked).files
