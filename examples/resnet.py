"""A ResNet whose stages change shape, with BatchNorm frozen to its running statistics."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS, BLOCKS, CLASSES, IMAGE, BATCH = (16, 32, 64, 128), 2, 10, 32, 8


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d that stays in eval mode; its affine parameters still train."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.eval()

    def train(self, mode: bool = True) -> "FrozenBatchNorm2d":
        return super().train(False)


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = FrozenBatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = FrozenBatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), FrozenBatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True)))
        return F.relu(y + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, WIDTHS[0], 3, padding=1, bias=False)
        self.bn = FrozenBatchNorm2d(WIDTHS[0])
        stages, inputs = [], WIDTHS[0]
        for i, width in enumerate(WIDTHS):
            first = BasicBlock(inputs, width, stride=1 if i == 0 else 2)
            stages.append(nn.Sequential(first, *(BasicBlock(width, width) for _ in range(BLOCKS - 1))))
            inputs = width
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stages(F.relu(self.bn(self.conv(images)), inplace=True))
        return self.fc(torch.flatten(self.pool(x), 1))


def model() -> nn.Module:
    return ResNet()


def example_inputs() -> dict[str, Tensor]:
    return {"images": torch.randn(BATCH, 3, IMAGE, IMAGE, generator=torch.Generator().manual_seed(0))}


def example_targets() -> Tensor:
    return torch.randint(CLASSES, (BATCH,), generator=torch.Generator().manual_seed(1))


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)
