"""Small models of three kinds for the benchmark of regret: sized so that products are most of a step of a few tenths of
a second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpar as gp
from benchmarks import gpt
from graphpar.ir.program import Program

LENGTH = 64
"""Tokens of a row."""


class RMSNorm(nn.Module):
    """Normalise by the root mean square over the last dim."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]"""
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class LlamaLayer(nn.Module):
    """Grouped queries, rotary positions, a gated feed-forward network."""

    def __init__(self, width: int, head: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.head = head
        self.input_norm, self.post_norm = RMSNorm(width), RMSNorm(width)
        self.q_proj, self.o_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(width, groups * head, bias=False) for _ in range(2))
        self.gate_proj, self.up_proj = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[b, s, width] -> [b, s, width]"""
        normed = self.input_norm(x)
        q, k, v = (
            proj(normed).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(
            _rotated(q, cos, sin), _rotated(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        normed = self.post_norm(x)
        fed: Tensor = self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return x + fed


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Llama(nn.Module):
    """A Llama of a few layers, without a mask: attention is causal."""

    def __init__(
        self, vocab: int = 2048, width: int = 256, head: int = 32, groups: int = 4, hidden: int = 704, layers: int = 6
    ) -> None:
        super().__init__()
        self.head = head
        self.embed_tokens = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(LlamaLayer(width, head, groups, hidden) for _ in range(layers))
        self.norm, self.lm_head = RMSNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [b, s] -> logits [b, s, vocabulary]"""
        frequencies = 10000.0 ** (-torch.arange(0, self.head, 2, device=ids.device) / self.head)
        angles = torch.outer(torch.arange(ids.shape[1], device=ids.device), frequencies)
        cos, sin = (torch.cat((part, part), dim=-1) for part in (angles.cos(), angles.sin()))
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


class Residual(nn.Module):
    """A norm and two linear layers, added to the input."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """[b, width] -> [b, width]"""
        added: Tensor = self.down(F.relu(self.up(self.norm(x))))
        return x + added


class MLP(nn.Module):
    """Residual blocks between a stem and a head."""

    def __init__(
        self, inputs: int = 256, width: int = 512, hidden: int = 1024, layers: int = 10, classes: int = 100
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.layers = nn.ModuleList(Residual(width, hidden) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """[b, inputs] -> [b, classes]"""
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


@dataclass(frozen=True)
class Model:
    """``make`` builds the module; ``batch`` gives inputs and targets by the names that the program has for them."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Mapping[str, Tensor]]
    input: str
    target: str
    loss: Callable[[Tensor, Tensor], Tensor]

    def program(self) -> tuple[nn.Module, Program]:
        """Build the module and export it with its loss; returns both."""
        torch.manual_seed(0)
        module, batch = self.make(), self.batch()
        return module, gp.export(module, args=(batch[self.input],), loss_fn=self.loss, targets=(batch[self.target],))


def _tokens(vocab: int, rows: int, length: int) -> Callable[[], Mapping[str, Tensor]]:
    def batch() -> Mapping[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        ids, labels = (torch.randint(vocab, (rows, length), generator=generator) for _ in range(2))
        return {"ids": ids, "labels": labels}

    return batch


def _vectors(rows: int, inputs: int, classes: int) -> Callable[[], Mapping[str, Tensor]]:
    def batch() -> Mapping[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        return {
            "x": torch.randn(rows, inputs, generator=generator),
            "labels": torch.randint(classes, (rows,), generator=generator),
        }

    return batch


def _token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _class_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


MODELS = {
    "gpt": Model(gpt.GPT, _tokens(gpt.VOCAB, 8, LENGTH), "ids", "labels", gpt.loss_fn),
    "llama": Model(Llama, _tokens(2048, 8, LENGTH), "ids", "labels", _token_loss),
    "mlp": Model(MLP, _vectors(512, 256, 100), "x", "labels", _class_loss),
}
