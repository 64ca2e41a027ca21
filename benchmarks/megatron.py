"""The benchmark's GPT in tensor parallelism by hand, as Megatron-LM does it (Shoeybi et al. 2019, section 3;
Korthikanti et al. 2022).

    MegatronGPT(group, sequence)(ids, labels) -> loss        of one rank, sequence first inside: hidden is [s, b, width]
    load(model, weights)                                      this rank's shards of the whole weights
    finish_gradients(model)                                   once a step: all-reduces partial gradients where the sequence is sharded

            before a column-parallel linear        after a row-parallel linear
    whole   copy: backward all-reduce              all-reduce: backward copy
    shard   all-gather: backward reduce-scatter    reduce-scatter: backward all-gather

``sequence``: between the linears each rank has a part of the sequence (the second row); else all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import gpt

Group = dist.ProcessGroup
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _gathered(x: Tensor, group: Group) -> Tensor:
    whole = x.new_empty(x.size(0) * group.size(), *x.shape[1:])
    _all_gather(whole, x.contiguous(), group=group)
    return whole


def _summed_part(x: Tensor, group: Group) -> Tensor:
    part = x.new_empty(x.size(0) // group.size(), *x.shape[1:])
    _reduce_scatter(part, x.contiguous(), group=group)
    return part


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)  # in place: the linear has just made it
        return gradient, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed_part(gradient, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _summed_part(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradient, ctx.group), None


class _KeptShard(torch.autograd.Function):
    """A gather and a linear that keeps the shard: in the backward it is gathered again, and the gradient scattered, beside products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, group: Group) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight)
        return F.linear(_gathered(x, group), weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        whole, part = x.new_empty(x.size(0) * ctx.group.size(), *x.shape[1:]), torch.empty_like(x)
        gathering = _all_gather(whole, x, group=ctx.group, async_op=True)
        of_whole = gradient @ weight
        gathering.wait()
        scattering = _reduce_scatter(part, of_whole, group=ctx.group, async_op=True)
        rows = gradient.flatten(0, 1)
        of_weight, of_bias = rows.mT @ whole.flatten(0, 1), rows.sum(0)
        scattering.wait()
        return part, of_weight, of_bias, None


class _VocabularyLoss(torch.autograd.Function):
    """Losses [n] of logits [n, vocabulary / ranks] and labels [n]; an ignored label gives 0."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: Group) -> Tensor:
        largest = logits.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        logits = logits - largest.unsqueeze(-1)
        counted = labels != gpt.IGNORED
        local = labels - group.rank() * logits.size(-1)
        elsewhere = (local < 0) | (local >= logits.size(-1))
        local = local.masked_fill(elsewhere, 0)
        rows = torch.arange(len(local), device=local.device)
        picked = logits[rows, local].masked_fill(elsewhere, 0)
        exponentials = torch.exp(logits, out=logits)
        sums = exponentials.sum(-1)
        both = torch.stack([picked, sums])
        dist.all_reduce(both, group=group)
        picked, sums = both
        softmax = exponentials.div_(sums.unsqueeze(-1))
        ctx.save_for_backward(softmax, rows, local, elsewhere, counted)
        losses: Tensor = (sums.log() - picked).masked_fill(~counted, 0)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        softmax, rows, local, elsewhere, counted = ctx.saved_tensors
        softmax[rows, local] -= (~elsewhere).to(softmax.dtype)
        return softmax.mul_((gradient * counted).unsqueeze(-1)), None, None


class _Parallel(nn.Module):
    """The base of the layers: the group, the input of a column-parallel linear and the output of a row-parallel one."""

    def __init__(self, group: Group, sequence: bool) -> None:
        super().__init__()
        self.group, self.sequence, self.ranks = group, sequence, group.size()

    def enter(self, x: Tensor) -> Tensor:
        result: Tensor = (_Gather if self.sequence else _Copy).apply(x, self.group)
        return result

    def leave(self, x: Tensor) -> Tensor:
        result: Tensor = (_ReduceScatter if self.sequence else _Reduce).apply(x, self.group)
        return result


class Block(_Parallel):
    """One rank's share of a transformer layer; ``keeps`` shards of what is gathered."""

    def __init__(self, group: Group, sequence: bool, keeps: bool = False) -> None:
        super().__init__(group, sequence)
        self.keeps = keeps
        width, local = gpt.WIDTH, gpt.WIDTH // self.ranks
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * local), nn.Linear(local, width)
        self.up, self.down = nn.Linear(width, 4 * local), nn.Linear(4 * local, width)

    def entered(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """A column-parallel linear of what enters it."""
        result: Tensor = (
            _KeptShard.apply(x, linear.weight, linear.bias, self.group) if self.keeps else linear(self.enter(x))
        )
        return result

    def attention(self, x: Tensor) -> Tensor:
        """[s, b, width] -> [s, b, width / ranks]: this rank's heads"""
        qkv = self.entered(x, self.qkv).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, gpt.HEAD)).permute(1, 2, 0, 3) for part in qkv)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, width] -> [s, b, width], where s is this rank's part of the sequence with ``sequence``."""
        mixed = self.attention(self.norm1(x))
        x = x + (self.leave(F.linear(mixed, self.proj.weight)) + self.proj.bias)
        hidden = F.gelu(self.entered(self.norm2(x), self.up))
        return x + (self.leave(F.linear(hidden, self.down.weight)) + self.down.bias)


class MegatronGPT(_Parallel):
    """One rank's share of :class:`benchmarks.gpt.GPT` with its loss, under the same names."""

    def __init__(self, group: Group, sequence: bool, keeps: bool = False) -> None:
        super().__init__(group, sequence)
        self.rows, self.length = gpt.VOCAB // self.ranks, gpt.LENGTH // self.ranks if sequence else gpt.LENGTH
        self.tokens, self.positions = nn.Embedding(self.rows, gpt.WIDTH), nn.Embedding(self.length, gpt.WIDTH)
        self.blocks = nn.ModuleList(Block(group, sequence, keeps) for _ in range(gpt.LAYERS))
        self.norm, self.head = nn.LayerNorm(gpt.WIDTH), nn.Linear(gpt.WIDTH, self.rows, bias=False)

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [s, b] -> hidden states [s, b, width]: a vocabulary-parallel embedding."""
        local = ids - self.group.rank() * self.rows
        elsewhere = (local < 0) | (local >= self.rows)
        partial = self.tokens(local.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0)
        positions = self.positions(torch.arange(self.length, device=ids.device))  # those of this rank's tokens
        hidden: Tensor = self.leave(partial) + positions.unsqueeze(1)
        return hidden

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """[b, s], [b, s] -> []"""
        x = self.embed(ids.t())
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.enter(self.norm(x)))
        losses: Tensor = _VocabularyLoss.apply(logits.flatten(0, 1), labels.t().flatten(), self.group)
        return losses.sum() / (labels != gpt.IGNORED).sum()


def load(model: MegatronGPT, weights: Mapping[str, Tensor]) -> None:
    """Copy each rank's shards: columns of proj and down, heads of q, k and v, and rows of the other sharded weights."""
    rank, own = model.group.rank(), {}
    for name, parameter in model.named_parameters():
        whole = weights[name]
        if ".qkv." in name:  # this rank's heads of each of the three
            own[name] = whole.unflatten(0, (3, model.ranks, -1))[:, rank].flatten(0, 1)
            continue
        sharded = [dim for dim, size in enumerate(parameter.shape) if size != whole.size(dim)]
        own[name] = whole.chunk(model.ranks, sharded[0])[rank] if sharded else whole
    model.load_state_dict(own)


def finish_gradients(model: MegatronGPT) -> None:
    """All-reduce the gradients of norms and of biases after row-parallel linears, which saw only a part of the sequence."""
    if not model.sequence:
        return
    ends = (".proj.bias", ".down.bias")
    partial = [p.grad for name, p in model.named_parameters() if "norm" in name or name.endswith(ends)]
    gradients = [gradient for gradient in partial if gradient is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=model.group)
    for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(total.view_as(gradient))
