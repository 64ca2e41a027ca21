"""A model whose head is tied to its embedding, with an optimizer that groups by names, shapes and depth, and OneCycleLR."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

DEPTH, TOTAL = 2, 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(24, 16)
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.emb.weight
        self.layers[0].norm.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


model = Net


def batch(step: int) -> dict[str, Tensor]:
    drawn = torch.randint(24, (2, 8, 4), generator=torch.Generator().manual_seed(step))
    return {"ids": drawn[0], "labels": drawn[1]}


def example_inputs() -> tuple[Tensor, ...]:
    return (batch(0)["ids"],)


def example_targets() -> Tensor:
    return batch(0)["labels"]


def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def groups_of(named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """The embedding without decay, then a layer after the other, weights and the rest apart."""
    named = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    assert "emb.weight" in dict(named) and "head.weight" not in dict(named)
    assert sum(parameter.numel() for _, parameter in named) == 24 * 16 + DEPTH * (2 * 16 * 32 + 16 + 32) + 2 * 16
    groups: list[dict[str, Any]] = [{"params": [p for n, p in named if "emb" in n], "lr": 0.02, "weight_decay": 0.0}]
    for index in range(DEPTH):
        own = [(n, p) for n, p in named if n.startswith(f"layers.{index}.")]
        groups.append({"params": [p for _, p in own if p.ndim > 1], "lr": 0.1 * 0.5 ** (DEPTH - index)})
        groups.append({"params": [p for _, p in own if p.ndim < 2], "lr": 0.1, "weight_decay": 0.0})
    return groups


def optimizer(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups_of(named), lr=1.0, momentum=0.9, weight_decay=0.1)


def lr_schedule(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, [group["lr"] for group in optimizer.param_groups], total_steps=TOTAL)
