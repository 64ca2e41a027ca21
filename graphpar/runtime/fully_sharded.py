"""State that is sharded over dp_shard (ZeRO levels 2 and 3): torch's FSDP2 on the units that the emitted program names.

    stage_0.py: fully_shard_units(stage, ...)   each block is a unit: gathered for its forward and its backward, then freed
    gradients                                   reduce-scattered once a microbatch, summed, never divided

The parameters of such a stage are DTensors over dp_shard. What a rank computes with on the other axes (its tp shard) is
the whole of such a DTensor; this module is where local tensors are taken out and put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from graphpar.runtime.groups import Groups

AXIS = "dp_shard"


def fully_shard_stage(
    stage: nn.Module, units: Callable[..., None], groups: Groups, device: torch.device, level: int
) -> None:
    """Shard the parameters of ``stage``, still without memory, over dp_shard.

    Args:
        units: the emitted function that calls ``fully_shard`` on each unit.
        level: 2 keeps gathered parameters until the backward is done, 3 gathers them again for it.
    """
    group = groups[AXIS]
    assert group is not None
    units(
        stage,
        mesh=DeviceMesh.from_group(group, device.type, mesh_dim_names=(AXIS,)),
        reshard_after_forward=None if level == 3 else False,
        ignored_params={parameter for parameter in stage.parameters() if parameter.ndim == 0},
    )
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # each replica returns its share of the loss
            module.set_force_sum_reduction_for_comms(True)


def hold_new_memory(stage: nn.Module) -> None:
    """Let FSDP2 take over parameters that were replaced by others on a device."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module._apply(lambda tensor: tensor)


def groups_of(module: FSDPModule) -> list[Any]:
    """Return FSDP2's parameter groups of a unit; one without parameters has none."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # before torch 2.13


def free_gathered(stages: Iterable[nn.Module]) -> None:
    """Free the parameters that a forward without a backward left gathered: they would miss the optimizer's next update."""
    for module in (module for stage in stages for module in stage.modules()):
        if isinstance(module, FSDPModule):
            module.reshard()


def local(tensor: Tensor) -> Tensor:
    """Return the part of ``tensor`` that this rank stores, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(parameter: Tensor, part: Tensor) -> Tensor:
    """Return ``part``, this rank's part of a tensor, as ``parameter`` is stored."""
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def padded(tensor: Tensor) -> Tensor:
    """Return the part of ``tensor`` that this rank stores, with zeros up to the size that all ranks have."""
    part = local(tensor)
    if not isinstance(tensor, DTensor):
        return part
    missing = -(-tensor.shape[0] // tensor.device_mesh.size()) - part.shape[0]
    return torch.cat([part, part.new_zeros((missing, *part.shape[1:]))]) if missing else part
