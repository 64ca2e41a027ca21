"""A residual convnet with BatchNorm in training mode: each row's output depends on the whole batch."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, BLOCKS, CLASSES, IMAGE, BATCH = 16, 6, 10, 16, 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(WIDTH) for _ in range(BLOCKS)))
        self.fc = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.blocks(self.stem(images)).mean((2, 3)))


def model() -> nn.Module:
    return ConvNet()


def example_inputs() -> dict[str, Tensor]:
    return {"images": torch.randn(BATCH, 3, IMAGE, IMAGE, generator=torch.Generator().manual_seed(0))}


def example_targets() -> Tensor:
    return torch.randint(CLASSES, (BATCH,), generator=torch.Generator().manual_seed(1))


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)
