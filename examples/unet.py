"""A U-Net: skip connections that jump over several levels, and hence over several pipeline stages."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS, IMAGE, BATCH = (16, 32, 64), 32, 8


class ConvBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm1 = nn.GroupNorm(8, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm2 = nn.GroupNorm(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm2(self.conv2(F.silu(self.norm1(self.conv1(x))))))


class Up(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(inputs, outputs, 2, stride=2)
        self.block = ConvBlock(2 * outputs, outputs)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.block(torch.cat((self.up(x), skip), dim=1))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(ConvBlock(i, o) for i, o in pairwise((3, *WIDTHS)))
        self.bottleneck = ConvBlock(WIDTHS[-1], 2 * WIDTHS[-1])
        self.up = nn.ModuleList(Up(2 * w, w) for w in reversed(WIDTHS))
        self.out = nn.Conv2d(WIDTHS[0], 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        x, skips = images, []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottleneck(x)
        for up in self.up:
            x = up(x, skips.pop())
        return self.out(x)


def model() -> nn.Module:
    return UNet()


def example_inputs() -> dict[str, Tensor]:
    return {"images": torch.randn(BATCH, 3, IMAGE, IMAGE, generator=torch.Generator().manual_seed(0))}


def example_targets() -> Tensor:
    return torch.randn(BATCH, 3, IMAGE, IMAGE, generator=torch.Generator().manual_seed(1))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)
