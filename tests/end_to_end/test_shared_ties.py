"""Stages of one rank that have a parameter in common: one tensor, and the numbers of an eager loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import graphpar as gp
from tests.ranks import shared_ties_script as script
from tests.tools.rank_pool import RankPool

WIDTH = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """The embedding is the head, too, and is read in the middle; layers that are four apart share a product."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(script.VOCAB, WIDTH), nn.ModuleList(Layer() for _ in range(8))
        self.head = nn.Linear(WIDTH, script.VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.layers[4].up.weight = self.layers[0].up.weight  # type: ignore[union-attr, assignment]
        self.layers[7].up.weight = self.layers[1].up.weight  # type: ignore[union-attr, assignment]

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for place, layer in enumerate(self.layers):
            x = layer(x)
            if place == 4:
                x = x + F.linear(torch.tanh(F.linear(x, self.embed.weight)), self.embed.weight.t())
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "more"),
    [
        ("ZBV", {}),
        ("Interleaved1F1B", {"dp_replicate": 2}),
        ("InterleavedZeroBubble", {"dp_shard": 2}),
    ],
)
def test_stages_of_a_rank_share_what_they_have_in_common(
    schedule: str, more: dict[str, int], tmp_path: Path, pool: RankPool
) -> None:
    torch.manual_seed(0)
    model = Model().double()
    program = gp.export(model, tuple(script.batch(0).values()))
    asked: dict[str, Any] = {"zero": 1} if "dp_shard" in more else {}
    plan = gp.plan(
        program,
        mesh={"pp": 2, **more},
        schedule=schedule,
        microbatch_size=2 // (len(more) + 1),
        global_batch=8,
        **asked,
    )
    gp.partition(program, plan).save(tmp_path / "out")
    save_file({name: value.clone() for name, value in model.state_dict().items()}, tmp_path / "weights.safetensors")
    size = 2 * (len(more) + 1)
    pool.torchrun(Path(script.__file__), [str(tmp_path / "out"), str(tmp_path)], nproc=size, timeout_s=120)
    ranks = [torch.load(tmp_path / f"rank_{rank}.pt") for rank in range(size)]

    first: dict[nn.Parameter, str] = {}
    tied = {name: first.setdefault(parameter, name) for name, parameter in _named(model)}
    shared = 0
    for rank in ranks:
        tensors: dict[str, set[int]] = {}
        for name, place in rank["places"]:
            tensors.setdefault(tied[name], set()).add(place)
        assert all(len(places) == 1 for places in tensors.values()), "a stage keeps its own copy"
        shared += len(rank["places"]) - len(tensors)
        assert asked or rank["updated"] == len(tensors)
    assert shared

    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    for step in range(script.STEPS):
        model.embed.requires_grad_(step != script.FROZEN)
        loss = model(**script.batch(step))
        loss.backward()
        gradients = {name: each.grad.clone() for name, each in _named(model) if each.grad is not None}
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for found in (rank["steps"][step] for rank in ranks):
            torch.testing.assert_close(found["loss"], loss.detach())
            torch.testing.assert_close(found["norm"], norm)
            torch.testing.assert_close(found["gradients"], {name: gradients[name] for name in found["gradients"]})
        assert {name for rank in ranks for name in rank["steps"][step]["gradients"]} == set(gradients)
        optimizer.step()
        optimizer.zero_grad()
    values = dict(_named(model))
    for rank in ranks:
        for name, value in rank["values"].items():
            torch.testing.assert_close(value, values[name].detach())


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))
