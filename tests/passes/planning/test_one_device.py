"""The batch on one device, beside which a plan is reported."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpar as gp
from graphpar.passes.planning.plan_request import on_one_device


class _Placed(nn.Module):
    """Adds a table of positions, of which there are as many as rows, so no other batch can be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.out(self.table(ids) + positions)


def test_rows_that_cannot_be_traced_at_another_batch_run_whole_there() -> None:
    ids = torch.arange(64).view(8, 8) % 12
    program = gp.export(
        _Placed(),
        (ids, torch.randn(8, 8)),
        loss_fn=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
        targets=(ids,),
    )
    plan = gp.plan(program, mesh={"dp_replicate": 2})

    assert program.of_one_size and plan.microbatch_size == 4
    assert on_one_device(program, plan, gp.Cluster.parse("2xCPU")).microbatch_size == 8
