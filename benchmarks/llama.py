"""A Llama in plain torch, of any size: what the GPU benchmark compiles where transformers is not installed, and compares with.

Llama(Size(...))(ids, labels) -> loss
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """The numbers of a Llama; ``groups``: heads of keys and values."""

    layers: int
    width: int
    heads: int
    groups: int
    hidden: int
    vocab: int
    length: int
    batch: int


TOY = Size(2, 64, 4, 2, 128, 512, 32, 4)
LLAMA_1B = Size(16, 2048, 32, 8, 8192, 128256, 4096, 4)
LLAMA_8B = Size(32, 4096, 32, 8, 14336, 128256, 8192, 8)
LLAMA_70B = Size(80, 8192, 64, 8, 28672, 128256, 8192, 64)
LLAMA_405B = Size(126, 16384, 128, 8, 53248, 128256, 8192, 32)


class Attention(nn.Module):
    """Causal attention with rotary positions and groups of heads."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head = size.width // size.heads
        self.q_proj = nn.Linear(size.width, size.width, bias=False)
        self.k_proj = nn.Linear(size.width, size.groups * self.head, bias=False)
        self.v_proj = nn.Linear(size.width, size.groups * self.head, bias=False)
        self.o_proj = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[b, s, width] -> [b, s, width]"""
        q, k, v = (p(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        projected: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return projected


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Block(nn.Module):
    """A layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.input_norm, self.post_norm = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.attention = Attention(size)
        self.gate, self.up = (nn.Linear(size.width, size.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[b, s, width] -> [b, s, width]"""
        x = x + self.attention(self.input_norm(x), cos, sin)
        y = self.post_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """The whole model, with its loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head = size.width // size.heads
        self.tokens = nn.Embedding(size.vocab, size.width)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.lm_head = nn.RMSNorm(size.width), nn.Linear(size.width, size.vocab, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Token ids [b, s], labels [b, s] -> []"""
        x = self.tokens(ids)
        frequencies = 500000.0 ** (-torch.arange(0, self.head, 2, device=ids.device).float() / self.head)
        angles = torch.arange(ids.size(1), device=ids.device).float().unsqueeze(1) * frequencies
        cos, sin = (f(torch.cat([angles, angles], dim=-1)).to(x.dtype) for f in (torch.cos, torch.sin))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), labels.flatten())


def example_batch(size: Size) -> dict[str, Tensor]:
    """Make random tokens and labels."""
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(size.vocab, (size.batch, size.length), generator=generator) for _ in range(2))
    return {"ids": ids, "labels": labels}
