"""The benchmark's GPT on data-parallel ranks with torch's own tools: DDP, FSDP2, ZeroRedundancyOptimizer.

    stepper = ddp(weights, ranks)
    loss = stepper(batch)          # forward and backward of this rank's rows, an optimizer's step; the loss of the whole batch

Losses are sums over the labels of all ranks, over their number, as the emitted programs compute them. Ranks average gradients, so that
the loss is multiplied by the number of ranks.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks import gpt

Stepper = Callable[[Mapping[str, Tensor]], Tensor]


def ddp(weights: Mapping[str, Tensor], device: torch.device, lr: float, *, compiled: bool = False) -> Stepper:
    """Replicas with DDP, AdamW on each; ``compiled``: their blocks, each whole."""
    model = DistributedDataParallel(_compiled(_model(weights).to(device), compiled))
    return _stepper(model, torch.optim.AdamW(model.parameters(), lr=lr))


def recomputing(weights: Mapping[str, Tensor], device: torch.device, lr: float, *, selective: bool) -> Stepper:
    """Replicas with DDP, whose blocks run under ``torch.utils.checkpoint``; ``selective``: attention and every second product are kept."""
    model = _model(weights).to(device)
    for block in model.blocks:
        contexts: dict[str, Any] = {"context_fn": _selective} if selective else {}
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **contexts)  # type: ignore[method-assign]
    replicated = DistributedDataParallel(model)
    return _stepper(replicated, torch.optim.AdamW(replicated.parameters(), lr=lr))


def _selective() -> Any:
    products = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = operator is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        if operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            kept = products[context.is_recompute] % 2 == 0
            products[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def zero_redundancy(weights: Mapping[str, Tensor], device: torch.device, lr: float) -> Stepper:
    """Replicas with DDP, whose optimizer state is sharded by torch's ZeroRedundancyOptimizer."""
    model = DistributedDataParallel(_model(weights).to(device))
    return _stepper(model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=lr))  # type: ignore[no-untyped-call]


def fsdp2(weights: Mapping[str, Tensor], device: torch.device, lr: float, *, compiled: bool = False) -> Stepper:
    """All state sharded by ``fully_shard`` on each block and the root; ``compiled``: the blocks, each whole."""
    return _stepper(*_fully_sharded(weights, device, lr, compiled=compiled))


def _compiled(model: gpt.GPT, compiled: bool) -> gpt.GPT:
    for block in model.blocks if compiled else ():
        block.compile(fullgraph=True)  # type: ignore[operator]
    return model


def saving(
    weights: Mapping[str, Tensor], device: torch.device, lr: float, batch: Mapping[str, Tensor], folder: Path
) -> Callable[[], Tensor]:
    """Train one step of :func:`fsdp2`, and return what saves its state by ``dcp.save``; only the last one is kept, as in training."""
    model, optimizer = _fully_sharded(weights, device, lr)
    loss = _stepper(model, optimizer)(batch)
    numbers = itertools.count()

    def save() -> Tensor:
        number = next(numbers)
        state, of_optimizer = get_state_dict(model, optimizer)
        dcp_save({"model": state, "optimizer": of_optimizer}, checkpoint_id=folder / str(number))
        if dist.get_rank() == 0:
            shutil.rmtree(folder / str(number - 1), ignore_errors=True)
        return loss

    return save


def _fully_sharded(
    weights: Mapping[str, Tensor], device: torch.device, lr: float, *, compiled: bool = False
) -> tuple[nn.Module, Optimizer]:
    model = _compiled(_model(weights).to(device), compiled)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def _model(weights: Mapping[str, Tensor]) -> gpt.GPT:
    model = gpt.GPT()
    model.load_state_dict(weights)
    return model


def _stepper(model: nn.Module, optimizer: Optimizer) -> Stepper:
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def step(batch: Mapping[str, Tensor]) -> Tensor:
        ids, labels = (batch[name].chunk(ranks)[rank] for name in ("ids", "labels"))
        valid = (labels != gpt.IGNORED).sum()
        dist.all_reduce(valid)
        logits = model(ids)
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=gpt.IGNORED, reduction="sum")
        loss = total / valid
        (loss * ranks).backward()  # type: ignore[no-untyped-call]
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        optimizer.step()
        optimizer.zero_grad()
        return shown

    return step
