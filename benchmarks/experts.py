"""The benchmark's GPT with a mixture of experts in place of each MLP, and its experts divided over ranks by hand, as torchtitan does.

    ExpertGPT(length)(ids)                                 8 experts a layer, 2 of them for each token: what graphpar is given
    stepping(weights, learning_rate)(batch) -> loss        of the whole batch: other rows and other experts on each rank

By hand, tokens are sorted by expert, ranks tell each other how many they send, ``all_to_all_single`` with splits brings them to the rank
of their expert, they are sorted again there, ``grouped_mm`` applies the experts, and all goes back the same way. All other parameters are
replicated by DistributedDataParallel, which leaves those of experts alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.nn.parallel import DistributedDataParallel

from benchmarks import gpt

EXPERTS, TOP, HIDDEN = 8, 2, 512


def _product(rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    if (
        torch.compiler.is_exporting()
    ):  # torch traces grouped_mm of bfloat16 alone; transformers' operator is the same of any type
        importlib.import_module("transformers.integrations.moe")
        y: Tensor = torch.ops.transformers.grouped_mm_fallback(rows, weight, offs)
        return y
    return F.grouped_mm(rows, weight, offs=offs)


class Experts(nn.Module):
    """Rows sorted by expert, and how many each expert has -> rows: [n, width], [experts] -> [n, width]"""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Parameter(torch.empty(experts, *size).normal_(std=0.02))
            for size in ((HIDDEN, gpt.WIDTH), (HIDDEN, gpt.WIDTH), (gpt.WIDTH, HIDDEN))
        )

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Apply each expert to its rows."""
        offs = counts.cumsum(0, dtype=torch.int32)
        gated = F.silu(_product(rows, self.gate.mT, offs))
        return _product(gated * _product(rows, self.up.mT, offs), self.down.mT, offs)


class SharedExperts(Experts):
    """The same of a rank that has some of the experts, for rows of its own."""

    def __init__(self) -> None:
        super().__init__(EXPERTS // dist.get_world_size())

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Send the rows to their experts' ranks, and take back what they make of them."""
        group, ranks = dist.group.WORLD, dist.get_world_size()
        assert group is not None
        with torch.no_grad():
            received = all_to_all_single(counts, None, None, group).view(ranks, -1)
            to_ranks, from_ranks = torch.stack([counts.view(ranks, -1).sum(1), received.sum(1)]).long().tolist()
            expert = torch.arange(received.size(1)).repeat(ranks).repeat_interleave(received.flatten().long())
            order = expert.argsort(stable=True)
        arrived: Tensor = all_to_all_single_autograd(rows, from_ranks, to_ranks, group)
        y = super().forward(arrived[order], received.sum(0))
        unsorted = torch.empty_like(y).index_copy(0, order, y)
        returned: Tensor = all_to_all_single_autograd(unsorted, to_ranks, from_ranks, group)
        return returned


class Mixture(nn.Module):
    """Each token is what two experts make of it, weighed by the router."""

    def __init__(self, experts: Callable[[], Experts]) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(gpt.WIDTH, EXPERTS, bias=False), experts()

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, width] -> [b, s, width]"""
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(TOP)
        chosen, order = chosen.flatten().sort(stable=True)
        counts = chosen.float().histc(EXPERTS, 0, EXPERTS - 1)
        y = self.experts(rows[order // TOP], counts)
        y = torch.empty_like(y).index_copy(0, order, y).unflatten(0, (-1, TOP))
        summed: Tensor = (y * weights.unsqueeze(-1)).sum(1)
        return summed.view_as(x)


class ExpertBlock(gpt.Block):
    """A transformer layer whose MLP is a mixture of experts."""

    def __init__(self, experts: Callable[[], Experts]) -> None:
        super().__init__()
        del self.up, self.down
        self.mixture = Mixture(experts)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, width] -> [b, s, width]"""
        x = x + self.attention(self.norm1(x))
        return x + self.mixture(self.norm2(x))  # type: ignore[no-any-return]


class ExpertGPT(gpt.GPT):
    """The whole model."""

    def __init__(self, length: int = gpt.LENGTH, experts: Callable[[], Experts] = Experts) -> None:
        super().__init__(length)
        self.blocks = nn.ModuleList(ExpertBlock(experts) for _ in range(gpt.LAYERS))


def _summed(bucket: Tensor) -> Any:
    """Sum gradients, as those of experts are, where DDP would average them."""
    work = dist.all_reduce(bucket, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def stepping(weights: Mapping[str, Tensor], learning_rate: float) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """Make a rank's part of the model, and return what takes one step of it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = ExpertGPT(experts=SharedExperts)
    model.load_state_dict(
        {name: value.chunk(ranks)[rank] if ".experts." in name else value for name, value in weights.items()}
    )
    experts = [name for name, _ in model.named_parameters() if ".experts." in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)  # type: ignore[no-untyped-call]
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    replica.register_comm_hook(None, lambda _, bucket: _summed(bucket.buffer()))  # type: ignore[no-untyped-call]
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)

    def step(batch: Mapping[str, Tensor]) -> Tensor:
        ids, labels = (batch[name].chunk(ranks)[rank] for name in ("ids", "labels"))
        valid = (labels != gpt.IGNORED).sum()
        dist.all_reduce(valid)
        total = F.cross_entropy(replica(ids).flatten(0, 1), labels.flatten(), ignore_index=gpt.IGNORED, reduction="sum")
        loss = total / valid
        loss.backward()  # type: ignore[no-untyped-call]
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        optimizer.step()
        optimizer.zero_grad()
        return shown

    return step
