"""Models that compute something else in evaluation, in more than dropout and BatchNorm, each with its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, POSITIONS, WIDTH, WORDS = 8, 8, 16, 32


class Layer(nn.Module):
    """Attention and a feed-forward network; training leaves some examples out of the latter (stochastic depth)."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), drop

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.down(F.gelu(self.up(x)))
        if self.training and self.drop:
            kept = torch.rand(x.shape[0], 1, 1, device=x.device) >= self.drop
            y = y * kept / (1 - self.drop)
        return x + y


class Language(nn.Module):
    """A loss of its own, in training with that of an auxiliary head; logits are scaled in evaluation."""

    def __init__(self, drop: float = 0.2) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Layer(drop) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.auxiliary, self.scale = nn.Linear(WIDTH, WORDS), nn.Parameter(torch.full((WORDS,), 0.7))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, middle = self.embed(x), None
        for i, layer in enumerate(self.layers):
            x = layer(x)
            middle = x if i == 1 else middle
        logits = self.head(self.norm(x))
        logits = logits if self.training else logits * self.scale
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if self.training:
            loss = loss + 0.3 * F.cross_entropy(self.auxiliary(middle).flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class Noisy(Language):
    """Dropout that is always on, and noise in evaluation alone."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(x)
        for layer in self.layers:
            x = F.dropout(layer(x), 0.2)
        x = x if self.training else x + 0.1 * torch.randn_like(x)
        logits = self.head(self.norm(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Averaged(Language):
    """Evaluation predicts with an average of the head's weights, which training updates, and without layers' noise."""

    def __init__(self) -> None:
        super().__init__(drop=0.0)
        self.register_buffer("average", torch.zeros(WORDS, WIDTH))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        if self.training:
            with torch.no_grad():
                self.average.lerp_(self.head.weight, 0.5)
        logits = F.linear(self.norm(x), self.head.weight if self.training else self.average)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Scaled(Language):
    """Evaluation divides logits by a temperature that training does not read."""

    def __init__(self) -> None:
        super().__init__(drop=0.0)
        self.register_buffer("temperature", torch.linspace(0.5, 2.0, WORDS))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        logits = logits if self.training else logits / self.temperature
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Early(Language):
    """Evaluation leaves out the last layer, and the head's own name of the tied weight."""

    def __init__(self) -> None:
        super().__init__(drop=0.0)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(x)
        for layer in self.layers if self.training else self.layers[:3]:
            x = layer(x)
        logits = self.head(x) if self.training else F.linear(x, self.embed.weight)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Routed(nn.Module):
    """Experts whose router has noise in training, a sum of squares of its scores in the loss, and a choice of one in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        scores = self.router(x)
        noisy = scores + 0.1 * torch.randn_like(scores)
        gates = noisy.softmax(-1) if self.training else F.one_hot(scores.argmax(-1), 4).to(x.dtype)
        mixed = sum(gates[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        logits = self.head(x + mixed)
        return (logits, scores.square().mean()) if self.training else logits


def routed_loss(output: Any, labels: Tensor) -> Tensor:
    logits, penalty = output if isinstance(output, tuple) else (output, None)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss if penalty is None else loss + 0.01 * penalty


class Residual(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), norm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class Pooled(nn.Module):
    """Convolutions with running statistics; training takes the mean of positions, evaluation the largest, by a module of its own."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Residual(norm) for _ in range(2))
        self.head, self.calibrate = nn.Linear(WIDTH, WORDS), nn.Linear(WORDS, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(-1)) if self.training else self.calibrate(self.head(x.amax(-1)))


def pooled_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels[:, 0])


def instance_norm(width: int) -> nn.Module:
    return nn.InstanceNorm1d(width, affine=True, track_running_stats=True)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor] | None]] = {
    "language": (Language, None),
    "noisy": (Noisy, None),
    "averaged": (Averaged, None),
    "scaled": (Scaled, None),
    "early": (Early, None),
    "routed": (Routed, routed_loss),
    "batch_norm": (lambda: Pooled(nn.BatchNorm1d), pooled_loss),
    "instance_norm": (lambda: Pooled(instance_norm), pooled_loss),
}
"""How each is built, and a loss where it does not return its own."""


def example() -> dict[str, Tensor]:
    """Return a batch, some of whose labels are ignored."""
    torch.manual_seed(0)
    batch = {name: torch.randint(WORDS, (ROWS, POSITIONS)) for name in ("x", "labels")}
    batch["labels"][:3, 2:] = -100
    return batch
