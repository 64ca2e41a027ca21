"""Models whose examples depend on each other: contrastive losses, statistics of the batch, shares of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tools.equality import Case

ROWS = 8


class Residual(nn.Module):
    """Two convolutions with BatchNorm around a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.conv2, self.bn2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer, momentum=0.3)
        self.short = nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.short(x))


class ResNet(nn.Module):
    """BatchNorm in training: with running statistics, and without."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8, affine=False)
        self.blocks = nn.ModuleList([Residual(8, 8, 1), Residual(8, 16, 2)])
        self.head, self.last = nn.Linear(16, 12), nn.BatchNorm1d(12, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.last(self.head(x.mean((2, 3))))


class Mobile(nn.Module):
    """Convolutions of single channels between two of all channels: a rank keeps its channels through BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.bn1 = nn.Conv2d(3, 64, 1, bias=False), nn.BatchNorm2d(64, affine=False)
        self.places, self.bn2 = nn.Conv2d(64, 64, 3, 1, 1, groups=64, bias=False), nn.BatchNorm2d(64, momentum=0.3)
        self.narrow, self.last = nn.Conv2d(64, 8, 1), nn.Linear(8, 12)
        self.unused = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.bn2(self.places(F.relu6(self.bn1(self.widen(x))))))
        return self.last(self.narrow(x).mean((2, 3)))


def _tower(features: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 32), nn.GELU(), nn.Linear(32, 16))


class Clip(nn.Module):
    """Each image against each text, both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = _tower(24), _tower(12)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        a = F.normalize(self.image(images), dim=-1)
        b = F.normalize(self.text(texts), dim=-1)
        logits = self.logit_scale.exp() * a @ b.T
        labels = torch.arange(logits.shape[0], device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


class SimClr(nn.Module):
    """Two views of each example in one batch; every other row is a negative."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _tower(24)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        z = F.normalize(self.net(torch.cat([first, second])), dim=-1)
        count = z.shape[0]
        similar = (z @ z.T / 0.5).masked_fill(torch.eye(count, dtype=torch.bool, device=z.device), -1e9)
        return F.cross_entropy(similar, torch.arange(count, device=z.device).roll(count // 2))


class Largest(nn.Module):
    """A penalty on the largest output of the batch, and on the largest of each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _tower(24)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        found = self.net(x)
        return F.mse_loss(found, wanted) + found.max() + found.amax(0).square().sum()


class Bag(nn.Module):
    """EmbeddingBag, under a loss that compares all pairs of examples."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(50, 16), nn.Linear(16, 10)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.head(self.bag(ids))
        return (found @ found.T).logsumexp(-1).mean()


class Codebook(nn.Module):
    """Vector quantisation: the nearest code by ``cdist``, and a penalty on codes that the batch uses unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(24, 16), nn.Linear(16, 24)
        self.codes = nn.Parameter(torch.randn(11, 16))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        distances = torch.cdist(z, self.codes)
        nearest = self.codes[distances.argmin(-1)]
        found = self.decoder(z + (nearest - z).detach())
        usage = distances.softmax(-1).mean(0)
        return F.mse_loss(found, x) + F.mse_loss(nearest, z.detach()) + (usage * (usage + 1e-9).log()).sum()


class Hardest(nn.Module):
    """Triplets of each example, its other view, and the nearest of the rest; ``cdist`` is traced at a fixed batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _tower(12)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        distances = torch.cdist(self.net(first), self.net(second))
        others = distances + 1e4 * torch.eye(distances.shape[0], device=distances.device)
        nearest = others.topk(2, dim=1, largest=False).values.mean(1)
        return F.relu(torch.diagonal(distances) - nearest + 1).mean() + distances.std(0).mean()


class Router(nn.Module):
    """HF Mixtral with the auxiliary loss of its router, which multiplies two means over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import MixtralConfig, MixtralForCausalLM

        config = MixtralConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
            output_router_logits=True, router_aux_loss_coef=0.1, use_cache=False,
        )  # fmt: skip
        self.model = MixtralForCausalLM(config)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=labels).loss
        return loss


def _labels() -> Tensor:
    """As many labels that don't count on each replica as differ."""
    labels = torch.randint(0, 64, (ROWS, 12))
    labels[0, 3:] = -100
    labels[5] = -100
    return labels


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Tensor]]]] = {
    "resnet": (ResNet, lambda: [torch.randn(ROWS, 3, 32, 32)]),
    "mobile": (Mobile, lambda: [torch.randn(ROWS, 3, 16, 16)]),
    "clip": (Clip, lambda: [torch.randn(ROWS, 24), torch.randn(ROWS, 12)]),
    "simclr": (SimClr, lambda: [torch.randn(ROWS, 24), torch.randn(ROWS, 24)]),
    "largest": (Largest, lambda: [torch.randn(ROWS, 24), torch.randn(ROWS, 16)]),
    "bag": (Bag, lambda: [torch.randint(0, 50, (ROWS, 5))]),
    "codebook": (Codebook, lambda: [torch.randn(ROWS, 24)]),
    "hardest": (Hardest, lambda: [torch.randn(ROWS, 12), torch.randn(ROWS, 12)]),
    "router": (Router, lambda: [torch.randint(0, 64, (ROWS, 12)), _labels()]),
}


def case(name: str) -> Case:
    """The model with its batch; a loss where the model returns none."""
    torch.manual_seed(0)
    build, inputs = MODELS[name]
    options: dict[str, Any] = {}
    if name in ("resnet", "mobile"):
        options = {
            "loss_fn": lambda found, label: F.cross_entropy(found, label),
            "targets": (torch.randint(0, 12, (ROWS,)),),
        }
    return Case(build(), inputs(), **options)
