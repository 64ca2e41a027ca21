"""Programs without a loss: their outputs, joined over microbatches, are the model's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import graphpar as gp
from graphpar.verification import verify_all
from tests.tools.programs import example_file


class _Scores(nn.Module):
    """Two outputs in a dict, one with the batch on dim 1, and one that no example has a part in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor | tuple[Tensor, ...]]:
        for layer in self.layers:
            x = x + layer(x)
        scores = self.head(x)
        return {"scores": scores, "states": (x.transpose(0, 1), self.head.weight.sum())}


def test_outputs_equal_the_models() -> None:
    torch.manual_seed(0)
    program = gp.export(_Scores(), (torch.randn(8, 5, 8),))
    assert program.mode == "infer"
    plan = gp.plan(program, mesh={"pp": 2}, microbatch_size=2)

    file = example_file("gpt_dropout")
    evaluated = gp.export(file.model, file.args, file.kwargs, mode="infer")
    results = verify_all([gp.partition(program, plan), gp.partition(evaluated, gp.plan(evaluated, mesh={"pp": 2}))])

    assert all(result.ok for result in results), [result.to_json() for result in results]
    assert results[0].max_error.keys() == {"output", "buffer"}
