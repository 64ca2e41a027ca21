"""The models of published runs as plain modules, built from their dims alone.

    Shape(hidden, heads, ...) ──GPT(shape, layers)──► tokens -> blocks -> norm -> head

Products are merged as in Megatron-LM: one for q, k and v, one for the gate and the feed-forward part. Attention is one kernel
(``flash``), or its scores are a tensor: scaled, masked and normalised by one kernel (``softmax``), or by three
(``composed``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.published_kernels import dropped

ATTENTIONS = ("flash", "softmax", "composed")


@dataclass(frozen=True)
class Experts:
    """``count`` of width ``ffn``, ``topk`` of which see a token; ``shared`` more see every token.

    A rank has ``here`` of them (0: all), which see as many rows as it has tokens times ``topk``.
    """

    count: int
    topk: int
    ffn: int
    shared: int = 0
    here: int = 0


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: ranks of the low-rank q and of the joint low-rank k and v, and widths of a head's parts."""

    q_rank: int
    kv_rank: int
    plain: int
    rotary: int
    value: int


@dataclass(frozen=True)
class Shape:
    """What a block and the ends of a model are made of, whatever the number of blocks.

    Attributes:
        gated: the feed-forward part is ``silu(gate) * up``, else ``gelu(up)``.
        rotary: positions turn q and k, else there is a table of them.
        rms: the norms are RMSNorm, else LayerNorm; ``composed_norm``: of plain operators, not one kernel; ``upcast_norm``: these are
            on a copy in 32 bits.
        biases: of the products of a block.
        attention: of :data:`ATTENTIONS`.
        dropout: of attention's softmax (where it is a tensor), of what a block adds, and of the embedding.
        loss: of :data:`benchmarks.published_kernels.LOSSES`.
        merged: one product makes q, k and v, and one the gate and the feed-forward part; else each has its own.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    seq: int
    gated: bool = False
    rotary: bool = False
    rms: bool = False
    composed_norm: bool = False
    upcast_norm: bool = False
    biases: bool = True
    tied: bool = True
    experts: Experts | None = None
    latent: Latent | None = None
    attention: str = "flash"
    dropout: float = 0.0
    loss: str = "plain"
    merged: bool = True


class ComposedNorm(nn.Module):
    """RMSNorm in single operators, as written before there were kernels for it (Aleph-Alpha/scaling, core/nn/norm/rms_norm.py)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]"""
        normal = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normal.float().to(x.dtype) * self.weight


class UpcastNorm(nn.Module):
    """RMSNorm in single operators on a copy in 32 bits, as Llama's own code has it, and torchtitan's of 2024 (models/norms.py)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]"""
        wide = x.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normal.to(x.dtype) * self.weight


def _norm(shape: Shape, width: int | None = None) -> nn.Module:
    width = width or shape.hidden
    if shape.composed_norm:
        return UpcastNorm(width) if shape.upcast_norm else ComposedNorm(width)
    return nn.LayerNorm(width, bias=not shape.rms)  # a kernel of RMSNorm keeps and moves what one of LayerNorm does


def turning(seq: int, dim: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the positions' angles: [s, dim] each"""
    inverse = 10000.0 ** (-torch.arange(0, dim, 2, device=device) / dim)
    half = torch.arange(seq, device=device)[:, None] * inverse
    angles = torch.cat([half, half], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [b, heads, s, d] by its positions' angles"""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    """Attention with one product for q, k and v, or three."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.sizes = [heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
        if shape.merged:
            self.qkv = nn.Linear(shape.hidden, sum(self.sizes), bias=shape.biases)
        else:
            self.q, self.k, self.v = (nn.Linear(shape.hidden, size, bias=shape.biases) for size in self.sizes)
        self.out = nn.Linear(self.sizes[0], shape.hidden, bias=shape.biases)

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        """[b, s, hidden] -> [b, s, hidden]"""
        parts = self.qkv(x).split(self.sizes, -1) if self.shape.merged else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2) for part in parts)
        if cos is not None and sin is not None:
            q, k = turned(q, cos, sin), turned(k, cos, sin)
        projected: Tensor = self.out(mixed(self.shape, q, k, v).transpose(1, 2).flatten(2))
        return projected


class LatentAttention(nn.Module):
    """DeepSeek-V2 (arXiv 2405.04434, section 2.1): q, and k with v, come from low-rank products; one rotary key serves
    all heads."""

    def __init__(self, shape: Shape, latent: Latent) -> None:
        super().__init__()
        self.shape, self.latent = shape, latent
        key = latent.plain + latent.rotary
        self.q_down = nn.Linear(shape.hidden, latent.q_rank, bias=False)
        self.q_norm, self.kv_norm = _norm(shape, latent.q_rank), _norm(shape, latent.kv_rank)
        self.q_up = nn.Linear(latent.q_rank, shape.heads * key, bias=False)
        self.kv_down = nn.Linear(shape.hidden, latent.kv_rank + latent.rotary, bias=False)
        self.kv_up = nn.Linear(latent.kv_rank, shape.heads * (latent.plain + latent.value), bias=False)
        self.out = nn.Linear(shape.heads * latent.value, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        """[b, s, hidden] -> [b, s, hidden]"""
        latent, heads = self.latent, (-1, self.shape.heads)
        q = self.q_up(self.q_norm(self.q_down(x))).unflatten(-1, (self.shape.heads, -1)).transpose(1, 2)
        joint, key = self.kv_down(x).split([latent.kv_rank, latent.rotary], -1)
        both = self.kv_up(self.kv_norm(joint)).unflatten(-1, (self.shape.heads, -1)).transpose(1, 2)
        plain, v = both.split([latent.plain, latent.value], -1)
        q_plain, q_turned = q.split([latent.plain, latent.rotary], -1)
        key = key.unsqueeze(1)
        if cos is not None and sin is not None:
            q_turned, key = turned(q_turned, cos, sin), turned(key, cos, sin)
        k = torch.cat([plain, key.expand(-1, heads[1], -1, -1)], dim=-1)
        q = torch.cat([q_plain, q_turned], dim=-1)
        projected: Tensor = self.out(mixed(self.shape, q, k, v).transpose(1, 2).flatten(2))
        return projected


def mixed(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention: q [b, h, s, d], k [b, g, s, d], v [b, g, s, e] -> [b, h, s, e]"""
    if shape.attention == "flash":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.size(1) < q.size(1))
    scores = q @ k.transpose(2, 3)  # the softmax kernel scales and masks them too
    if shape.attention == "composed":
        future = torch.ones(q.size(2), q.size(2), dtype=torch.bool, device=q.device).triu(1)
        scores = (scores * q.size(-1) ** -0.5).masked_fill(future, -10000.0)
    return dropped(scores.softmax(-1), shape.dropout) @ v


class MLP(nn.Module):
    """The feed-forward part, gated or not."""

    def __init__(self, shape: Shape, ffn: int) -> None:
        super().__init__()
        self.gated, self.merged = shape.gated, shape.merged or not shape.gated
        if not self.merged:
            self.gate = nn.Linear(shape.hidden, ffn, bias=shape.biases)
        self.up = nn.Linear(shape.hidden, ffn * (2 if shape.gated and shape.merged else 1), bias=shape.biases)
        self.down = nn.Linear(ffn, shape.hidden, bias=shape.biases)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]"""
        within = activated(self.up(x), self.gated) if self.merged else F.silu(self.gate(x)) * self.up(x)
        result: Tensor = self.down(within)
        return result


def activated(x: Tensor, gated: bool) -> Tensor:
    """[..., ffn] -> [..., ffn] by GELU, or gated [..., 2 ffn] -> [..., ffn] by SiLU"""
    if not gated:
        return F.gelu(x)
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


class Mixture(nn.Module):
    """Rows sorted by expert, each expert's multiplied by its own weights, and put back."""

    def __init__(self, shape: Shape, experts: Experts) -> None:
        super().__init__()
        self.experts, self.gated = experts, shape.gated
        width = experts.ffn * (2 if shape.gated else 1)
        self.router = nn.Linear(shape.hidden, experts.count, bias=False)
        self.here = experts.here or experts.count
        self.up = nn.Parameter(torch.empty(self.here, width, shape.hidden))
        self.down = nn.Parameter(torch.empty(self.here, shape.hidden, experts.ffn))
        self.shared = MLP(shape, experts.ffn * experts.shared) if experts.shared else None

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, hidden] -> [b, s, hidden]"""
        count, topk = self.here, self.experts.topk
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).float().softmax(-1).topk(topk, dim=-1)
        if count < self.experts.count:
            chosen = chosen % count  # in place of the rows that come for these experts from other ranks
        order, which = torch.sort(chosen.flatten())
        ends = torch.histc(order.float(), bins=count, min=0, max=count - 1).cumsum(0, dtype=torch.int32)
        hidden = activated(F.grouped_mm(rows[which // topk], self.up.transpose(1, 2), offs=ends), self.gated)
        given = F.grouped_mm(hidden, self.down.transpose(1, 2), offs=ends)
        weighted = given * weights.flatten()[which].unsqueeze(-1).to(x.dtype)
        back = torch.empty_like(which)
        back[which] = torch.arange(which.size(0), device=x.device)
        result: Tensor = weighted[back].view(rows.size(0), topk, rows.size(1)).sum(dim=1).view(x.shape)
        return result if self.shared is None else result + self.shared(x)


class Block(nn.Module):
    """A layer: attention, then an MLP or a mixture of experts."""

    def __init__(self, shape: Shape, dense: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(shape), _norm(shape)
        self.attention = Attention(shape) if shape.latent is None else LatentAttention(shape, shape.latent)
        self.mlp = MLP(shape, shape.ffn) if dense or shape.experts is None else Mixture(shape, shape.experts)
        self.dropout = shape.dropout

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        """[b, s, hidden] -> [b, s, hidden]"""
        x = x + dropped(self.attention(self.norm1(x), cos, sin), self.dropout)
        return x + dropped(self.mlp(self.norm2(x)), self.dropout)


class Shares(nn.Module):
    """Log-softmax in 32 bits: logits [b, s, v] -> [b s, v]"""

    def forward(self, logits: Tensor) -> Tensor:
        """[b, s, v] -> [b s, v]"""
        return F.log_softmax(logits.flatten(0, 1).float(), dim=-1)


class GPT(nn.Module):
    """``dense`` blocks without experts, then ``others``."""

    def __init__(self, shape: Shape, dense: int, others: int) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = None if shape.rotary else nn.Embedding(shape.seq, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape, number < dense) for number in range(dense + others))
        self.norm, self.head = _norm(shape), nn.Linear(shape.hidden, shape.vocab, bias=False)
        self.shares = Shares() if shape.loss == "gathered" else None
        if shape.tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [b, s] -> logits [b, s, vocabulary], or what a loss of gathered logits takes"""
        x, shape = self.tokens(ids), self.shape
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        width = shape.head_dim if shape.latent is None else shape.latent.rotary
        cos, sin = turning(shape.seq, width, x.device, x.dtype) if shape.rotary else (None, None)
        x = dropped(x, shape.dropout)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits if self.shares is None else self.shares(logits)
