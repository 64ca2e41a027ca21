"""A model file with what a training loop asks of it: dropout, BatchNorm, an optimizer with groups by name, and a schedule."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

DECAY = 0.1
WARM_UP = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


model = Net
loss_fn = nn.CrossEntropyLoss()


def example_inputs() -> dict[str, Tensor]:
    return {"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(0))}


def example_targets() -> Tensor:
    return torch.randint(0, 5, (8,), generator=torch.Generator().manual_seed(1))


def optimizer(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    pairs = list(named)
    weights = {"params": [p for name, p in pairs if name.endswith("weight")], "weight_decay": DECAY}
    others = {"params": [p for name, p in pairs if not name.endswith("weight")], "weight_decay": 0.0}
    return torch.optim.AdamW([weights, others], lr=1e-2)


def lr_schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
