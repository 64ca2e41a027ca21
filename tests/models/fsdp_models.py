"""Models such as the suites of sharded data parallelism use: nested and shared modules, some used twice, late, or not at all.

An encoder and a decoder under one embedding, a chain of nested layers, a dense mixture of experts, outputs that no loss takes, sizes that
no degree divides. Each has a batch by seed, so that every step has other data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 8


class SharedTransformer(nn.Module):
    """``nn.Transformer`` between an embedding and a projection with the same weight; batches are on dim 1.

    Args:
        norm: a BatchNorm whose channels are the examples, so that each example has a scale of its own, and statistics of its own.
        trained: it is in the mode of the model; else in eval mode.
    """

    def __init__(self, dropout: float = 0.1, norm: bool = False, trained: bool = False) -> None:
        super().__init__()
        self.trained = trained
        vocabulary, width = 23, 16
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.transformer = nn.Transformer(width, 8, 2, 2, 8, dropout)
        self.output_proj = nn.Linear(width, vocabulary)
        self.output_proj.weight = self.embed_tokens.weight
        self.register_buffer("vocab_bias", torch.ones(width))
        self.register_buffer("long_buffer", torch.zeros(width, dtype=torch.long))
        self.bn = nn.BatchNorm1d(ROWS) if norm else nn.Identity()

    def train(self, mode: bool = True) -> SharedTransformer:
        super().train(mode)
        self.bn.train(mode and self.trained)
        return self

    def forward(self, src_ids: Tensor, tgt_ids: Tensor) -> Tensor:
        src = self.embed_tokens(src_ids)
        src = src + self.vocab_bias + self.long_buffer.type_as(src)
        tgt = self.bn(self.embed_tokens(tgt_ids))
        found: Tensor = self.output_proj(self.transformer(src, tgt))
        return found


class Nested(nn.Module):
    """Layers inside of a chain inside of a chain."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(
            nn.Linear(8, 4),
            nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 16)),
            nn.Linear(16, 4),
            nn.Linear(4, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.module(x)
        return found


class Mixture(nn.Module):
    """Every expert on every row, weighed by one gate; a shared layer before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(8, 12), nn.Linear(12, 23)
        self.gate = nn.Linear(23, 4)
        self.experts = nn.ModuleList([nn.Linear(23, 12) for _ in range(4)])
        self.last = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.shared(self.first(x))
        weights = self.gate(h).softmax(-1)
        mixed = sum(weights[:, i : i + 1] * expert(h) for i, expert in enumerate(self.experts))
        found: Tensor = self.last(mixed)
        return found


class DoubleLinear(nn.Module):
    """Two branches; the second is left out, or its result is."""

    def __init__(self, width: int, second: bool) -> None:
        super().__init__()
        self.lin1, self.lin2, self.second = nn.Linear(width, width), nn.Linear(width, width), second

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = F.relu(self.lin1(x))
        return first, F.relu(self.lin2(x)) if self.second else first


class Branches(nn.Module):
    """Both branches, one whose result goes nowhere, and one that is not run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DoubleLinear(7, True), DoubleLinear(7, True), DoubleLinear(7, False)])

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.layers[0](x)
        three, _ = self.layers[1](one + two)
        found: Tensor = self.layers[2](three)[0]
        return found


class Twice(nn.Module):
    """A layer that runs twice in a forward, another between its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for place in (0, 1, 0, 2):
            x = x + self.layers[place](x)
        return x


class NotInTheBackward(nn.Module):
    """A layer whose result is detached, and one that the loss does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 8)) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layers[0](x)
        x = x + self.layers[1](x).detach()
        self.layers[2](x)
        found: Tensor = self.layers[3](x)
        return found


class Uneven(nn.Module):
    """Sizes that two do not divide, one row, and a parameter without dims; parameters of the root beside nested ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 7)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(7, 3), nn.GELU(), nn.Linear(3, 7)) for _ in range(2)])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.randn(1, 7))
        self.mixing = nn.Parameter(torch.randn(5, 7))
        self.frozen = nn.Parameter(torch.randn(3, 7), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * self.scale
        for layer in self.layers:
            h = h + layer(h + self.shift)
        return h @ self.mixing.t() + (h @ self.frozen.t()).sum(-1, keepdim=True)


def of_tokens(output: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(output.reshape(-1, output.shape[-1]), wanted.reshape(-1), reduction="sum")


def added(output: Tensor) -> Tensor:
    return output.sum()


def squared(output: Tensor) -> Tensor:
    return output.square().mean()


@dataclass(frozen=True)
class Entry:
    """A model, its loss, and its inputs by name with their shapes; ids where ``ids``.

    Attributes:
        mean: whether the loss of all rows is the mean of those of equal parts, not their sum.
    """

    build: Callable[[], nn.Module]
    loss: Callable[..., Tensor] = added
    mean: bool = False
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: {"x": (ROWS, 8)})
    batch_dim: int = 0
    targets: int = 0

    @property
    def ids(self) -> bool:
        return self.batch_dim == 1

    def batch(self, seed: int) -> dict[str, Tensor]:
        """Return a global batch."""
        generator = torch.Generator().manual_seed(seed)
        if self.ids:
            return {name: torch.randint(23, shape, generator=generator) for name, shape in self.shapes.items()}
        return {name: torch.randn(shape, generator=generator) for name, shape in self.shapes.items()}

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()

    def exported(self) -> Any:
        import graphpar as gp

        values = list(self.batch(0).values())
        args, targets = values[: len(values) - self.targets], values[len(values) - self.targets :]
        dims = dict.fromkeys(self.shapes, self.batch_dim) if self.batch_dim else None
        return gp.export(self.model(), tuple(args), loss_fn=self.loss, targets=tuple(targets), batch_dims=dims)

    def loss_of(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of a batch, with the model as it is."""
        values = list(batch.values())
        count = len(values) - self.targets
        return self.loss(model(*values[:count]), *values[count:])


_TOKENS: dict[str, Any] = {
    "loss": of_tokens,
    "shapes": {"src_ids": (6, ROWS), "tgt_ids": (4, ROWS), "wanted": (4, ROWS)},
    "batch_dim": 1,
    "targets": 1,
}
MODELS = {
    "shared transformer": Entry(lambda: SharedTransformer(0.0), **_TOKENS),
    "dropout": Entry(SharedTransformer, **_TOKENS),
    "norm over examples": Entry(lambda: SharedTransformer(0.0, norm=True), **_TOKENS),
    "shared parameters": Entry(lambda: SharedTransformer(norm=True, trained=True), **_TOKENS),
    "nested": Entry(Nested),
    "mixture": Entry(Mixture, squared, mean=True),
    "branches": Entry(Branches, squared, mean=True, shapes={"x": (ROWS, 7)}),
    "twice": Entry(Twice, squared, mean=True),
    "not in the backward": Entry(NotInTheBackward),
    "uneven": Entry(Uneven, squared, mean=True),
}
