"""The model of the runtime benchmark, and its two-stage split as an engineer would write it by hand.

    GPT(ids)                          tokens + positions -> blocks -> norm -> head: what graphpar is given
    FirstStage(gpt), LastStage(gpt)   the same modules, split in the middle: what torch's PipelineStage is given

The head has a weight of its own: torch's ``PipelineStage`` alone gets tied weights wrong.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, HEAD, LAYERS, LENGTH = 4096, 256, 64, 8, 128
IGNORED = -100


class Mix(nn.Module):
    """Causal attention: q, k, v [b, h, s, head] -> [b, h, s, head]; a module, so that a shard plan can name it."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Let each token see those before it."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Block(nn.Module):
    """A transformer layer with norms before attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.mix = Mix()

    def attention(self, x: Tensor) -> Tensor:
        """Causal attention: [b, s, width] -> [b, s, width]"""
        q, k, v = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        projected: Tensor = self.proj(self.mix(q, k, v).transpose(1, 2).flatten(2))
        return projected

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, width] -> [b, s, width]"""
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """The whole model."""

    def __init__(self, length: int = LENGTH) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(length, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [b, s] -> logits [b, s, vocabulary]"""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy over labels that are not ignored."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class FirstStage(nn.Module):
    """Token ids [b, s] -> hidden states [b, s, width], through the first half of the blocks."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.tokens, self.positions = gpt.tokens, gpt.positions
        self.blocks = nn.ModuleList(list(gpt.blocks)[: LAYERS // 2])

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [b, s] -> hidden states [b, s, width]"""
        x: Tensor = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return x


class LastStage(nn.Module):
    """Hidden states [b, s, width] -> logits [b, s, vocabulary], through the second half."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(list(gpt.blocks)[LAYERS // 2 :])
        self.norm, self.head = gpt.norm, gpt.head

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [b, s, width] -> logits [b, s, vocabulary]"""
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def example_batch(rows: int, length: int = LENGTH) -> dict[str, Tensor]:
    """Make random tokens; labels are ignored after a length that differs from row to row."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (rows, length), generator=generator)
    labels = torch.randint(VOCAB, (rows, length), generator=generator)
    lengths = torch.randint(length // 2, length + 1, (rows,), generator=generator)
    return {"ids": ids, "labels": labels.masked_fill(torch.arange(length) >= lengths[:, None], IGNORED)}
