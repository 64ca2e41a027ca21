"""Modules and classes of a model may have the names of the files and classes that are emitted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpar as gp
from graphpar.verification import verify_all

NAMES = (
    "optimizer", "plan", "streams", "random_streams", "stage_0", "stage_1", "stage", "blocks", "collectives", "operators", "runtime",
    "graphpar", "torch", "fully_shard_units", "optimizer_units", "pipeline",
)  # fmt: skip


class Stage0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.optimizer, self.stage = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, blocks: Tensor) -> Tensor:
        return blocks + F.dropout(self.stage(torch.relu(self.optimizer(blocks))), 0.1, self.training)


class Optimizer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            setattr(self, name, Stage0())

    def forward(self, stage: Tensor) -> Tensor:
        for name in NAMES:
            stage = getattr(self, name)(stage)
        return stage


@pytest.fixture(scope="module")
def program() -> gp.Program:
    return gp.export(Optimizer(), (torch.randn(8, 8),), loss_fn=lambda output: output.square().mean())


@pytest.mark.costly
def test_names_of_files_may_be_those_of_modules(program: gp.Program) -> None:
    asked = [{"pp": 2}, {"tp": 2}, {"dp_shard": 2}]
    parts = [gp.partition(program, gp.plan(program, mesh=mesh)) for mesh in asked]
    parts.append(gp.partition(program, gp.plan(program, mesh={"dp_shard": 2}, zero=1)))
    for each, outcome in zip(parts, verify_all(parts, 2)):
        assert outcome.ok, (each.plan, outcome.problems)
