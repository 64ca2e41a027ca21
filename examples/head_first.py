"""Modules registered in another order than they run in (the head first), and one that never runs."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES, WIDTH, LAYERS, CLASSES, BATCH = 32, 64, 8, 10, 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.Linear(2 * width, width)
        self.up = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class HeadFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.spare = nn.Softmax(dim=-1)
        self.body = nn.ModuleList(Block(WIDTH) for _ in range(LAYERS))
        self.stem = nn.Linear(FEATURES, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.body:
            x = block(x)
        return self.head(x)


def model() -> nn.Module:
    return HeadFirst()


def example_inputs() -> tuple[Tensor, ...]:
    return (torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(0)),)


def example_targets() -> Tensor:
    return torch.randint(CLASSES, (BATCH,), generator=torch.Generator().manual_seed(1))


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)
