"""The benchmark's GPT in tensor parallelism by torch's DTensor: ``parallelize_module`` with sequence and loss parallelism.

parallelized(mesh, weights) -> model                  every parameter is a DTensor, sharded as in the emitted program
loss_and_backward(model, ids, labels) -> loss
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks import gpt


def parallelized(mesh: DeviceMesh, weights: Mapping[str, Tensor]) -> gpt.GPT:
    """Make the model with its parameters sharded over ``mesh``."""
    model = gpt.GPT()
    model.load_state_dict({name: _by_rank(name, value, mesh.size()) for name, value in weights.items()})
    whole, sharded = Replicate(), Shard(1)
    plan: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=whole, output_layouts=sharded),
        "positions": RowwiseParallel(input_layouts=whole, output_layouts=Shard(0)),
        "blocks.*.norm1": SequenceParallel(),
        "blocks.*.qkv": ColwiseParallel(input_layouts=sharded),
        "blocks.*.proj": RowwiseParallel(output_layouts=sharded),
        "blocks.*.norm2": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=sharded),
        "blocks.*.down": RowwiseParallel(output_layouts=sharded),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=sharded, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    return model


def _by_rank(name: str, value: Tensor, ranks: int) -> Tensor:
    """The rows of q, k and v, reordered so that a rank's shard has its heads of each."""
    if ".qkv." not in name:
        return value
    return torch.cat(list(value.unflatten(0, (3, ranks, -1)).unbind(1))).flatten(0, 1)


def loss_and_backward(model: gpt.GPT, ids: Tensor, labels: Tensor) -> Tensor:
    """Run one forward and backward; returns the loss, whole on every rank."""
    with loss_parallel():
        loss = gpt.loss_fn(model(ids), labels)
        loss.backward()  # type: ignore[no-untyped-call]
    result: Tensor = loss.detach().full_tensor()  # type: ignore[attr-defined]
    return result
