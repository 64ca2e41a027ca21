"""The benchmark's GPT in context parallelism by torch's ring attention, with the heads and tails of the sequence on each rank.

    stepping(weights, learning_rate)(batch) -> loss       of the whole batch, the same on every rank

``torch.distributed.tensor.experimental.context_parallel`` knows the kernels of CUDA alone. So this calls the ring that it calls, with
the kernel for CPUs, and does by hand what it does around that: tokens, labels and positions are sharded once, in the balanced order.
Gradients are summed by DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring
from torch.nn.parallel import DistributedDataParallel

from benchmarks import gpt

_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_ring: Any = torch_ring._templated_ring_attention
_ring_backward: Any = torch_ring._templated_ring_attention_backward


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result, logsumexp, *_ = _ring(dist.group.WORLD, 2, _flash, query, key, value, is_causal=True)
        ctx.save_for_backward(query, key, value, result, logsumexp)
        made: Tensor = result
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        operands = ctx.saved_tensors
        found = _ring_backward(
            dist.group.WORLD, 2, _flash_backward, gradient, "grad_out", *operands, is_causal=True, dropout_p=0.0
        )
        return tuple(found[:3])


class _Sharded(nn.Module):
    """The model on this rank's tokens, at their places in the sequence."""

    def __init__(self, model: gpt.GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        x = self.model.tokens(ids) + self.model.positions(places)
        for block in self.model.blocks:
            x = block(x)
        logits: Tensor = self.model.head(self.model.norm(x))
        return logits


def _causal(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    assert is_causal
    result: Tensor = _Ring.apply(query, key, value)
    return result


@contextmanager
def _ring_everywhere() -> Iterator[None]:
    plain = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _causal  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain


def stepping(weights: Mapping[str, Tensor], learning_rate: float) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """Make the model, and return what takes one step of it."""
    model = gpt.GPT(weights["positions.weight"].size(0))
    model.load_state_dict(weights)
    replica = DistributedDataParallel(_Sharded(model), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def step(batch: Mapping[str, Tensor]) -> Tensor:
        chunks = torch.arange(batch["ids"].size(1)).chunk(2 * ranks)
        places = torch.cat([chunks[rank], chunks[-1 - rank]])
        labels = batch["labels"][:, places]
        with _ring_everywhere():
            logits = replica(batch["ids"][:, places], places)
            total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=gpt.IGNORED, reduction="sum")
            loss = total / (batch["labels"] != gpt.IGNORED).sum()
            (loss * ranks).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach()
        dist.all_reduce(whole)
        return whole

    return step
