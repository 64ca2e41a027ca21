"""State that is sharded over dp_shard (ZeRO levels 2 and 3): torch's FSDP2 on the units that the emitted program names.

    stage_0.py: fully_shard_units(stage, ...)   each block is a unit: gathered for its forward and its backward, then freed
    gradients                                   reduce-scattered once a microbatch, summed, never divided

The parameters of such a stage are DTensors over dp_shard. What a rank computes with on the other axes (its tp shard) is
the whole of such a DTensor; this module is where local tensors are taken out and put back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from graphpar.runtime.double import current
from graphpar.runtime.groups import Groups
from graphpar.runtime.manifest import Manifest

AXIS = "dp_shard"


def fully_shard_stage(
    stage: nn.Module, units: Callable[..., None], groups: Groups, device: torch.device, program: Manifest
) -> None:
    """Shard the parameters of ``stage``, still without memory, over dp_shard.

    Args:
        units: the emitted function that calls ``fully_shard`` on each unit.
        program: at ZeRO level 2 gathered parameters are kept until the backward is done, at 3 they are gathered again for it.
    """
    group = groups[AXIS]
    assert group is not None
    units(
        stage,
        mesh=DeviceMesh.from_group(group, device.type, mesh_dim_names=(AXIS,)),
        reshard_after_forward=None if program.zero == 3 else False,
        mp_policy=_precision(stage, program),
        ignored_params={parameter for parameter in stage.parameters() if parameter.ndim == 0},
    )
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # each replica returns its share of the loss
            module.set_force_sum_reduction_for_comms(True)


def _precision(stage: nn.Module, program: Manifest) -> MixedPrecisionPolicy:
    """Gather parameters in the dtype in which all of them are read, if there is one; sum gradients in that of the plan, or in
    their own."""
    stored = next((parameter.dtype for parameter in stage.parameters()), None)
    gathered, reduced = current(program.gather_dtype), current(program.reduce_dtype or stored)
    return MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=reduced, cast_forward_inputs=False)


def hold_new_memory(stage: nn.Module) -> None:
    """Let FSDP2 take over parameters that were replaced by others on a device."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module._apply(lambda tensor: tensor)


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
