"""Two inputs, one trunk, two heads with a target each: a dict as output and a weighted sum of two losses."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ITEMS, FEATURES, WIDTH, LAYERS, CLASSES, BATCH = 101, 32, 64, 8, 10, 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Linear(FEATURES, WIDTH)
        self.item = nn.Embedding(ITEMS, WIDTH)
        self.trunk = nn.Sequential(*(Block(WIDTH) for _ in range(LAYERS)))
        self.category = nn.Linear(WIDTH, CLASSES)
        self.rating = nn.Linear(WIDTH, 1)

    def forward(self, features: Tensor, items: Tensor) -> dict[str, Tensor]:
        x = self.trunk(self.user(features) + self.item(items))
        return {"category": self.category(x), "rating": self.rating(x).squeeze(-1)}


def model() -> nn.Module:
    return TwoTowers()


def example_inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(BATCH, FEATURES, generator=generator)
    return {"features": features, "items": torch.randint(ITEMS, (BATCH,), generator=generator)}


def example_targets() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(CLASSES, (BATCH,), generator=generator), torch.randn(BATCH, generator=generator)


def loss_fn(output: dict[str, Tensor], category: Tensor, rating: Tensor) -> Tensor:
    return F.cross_entropy(output["category"], category) + 0.5 * F.mse_loss(output["rating"], rating)
