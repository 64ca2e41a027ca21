"""State that is sharded over dp_shard and cp (ZeRO levels 2 and 3): torch's FSDP2 on the units that the emitted program names.

    stage_0.py: fully_shard_units(stage, ...)   each block is a unit: gathered for its forward and its backward, then freed
    gradients                                   reduce-scattered once a microbatch, summed, never divided

    under a pipeline, actions of its table      UNSHARD gathers all units of a stage, REDUCE_GRAD reduce-scatters the gradients of
                                                all microbatches, RESHARD frees the units: each once a step

FSDP2's own hooks would gather and reduce in every microbatch, and at wrong times where a backward is split. So a stage that
the table gathers has none. (With a policy that frees parameters after each forward it keeps them, and the table only reduces.)

With ``offload=params`` shards and their gradients live on the host (``CPUOffloadPolicy``): a shard is copied to the device when its unit is
gathered, a gradient to the host when it is reduced, and the optimizer steps there.

The parameters of such a stage are DTensors over the ranks that share state. What a rank computes with on the other axes (its tp shard) is
the whole of such a DTensor; this module is where local tensors are taken out and put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor, Shard

from graphpar.runtime.debugging.fp64 import current
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.groups import Groups
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.torch_versions import parameter_groups

MESH_DIM = "fsdp"


def fully_shard_stage(
    stage: nn.Module,
    units: Callable[..., Sequence[nn.Module] | None],
    groups: Groups,
    device: torch.device,
    program: Manifest,
    on_host: bool = False,
) -> None:
    """Shard the parameters of ``stage``, still without memory, over the ranks that share state.

    Args:
        units: the emitted function that calls ``fully_shard`` on each unit.
        on_host: whether shards and their gradients live in the memory of the host of ``device``.

    Raises:
        RuntimeProgramError: it can't, since the function puts a parameter into two units.
    """
    group, dims = groups[MESH_DIM], program.fully_sharded
    assert group is not None
    named = list(stage.named_parameters(remove_duplicate=False))
    placed = {parameter: Shard(dims.get(name, 0)) for name, parameter in named}
    try:
        order = units(
            stage,
            mesh=DeviceMesh.from_group(group, device.type, mesh_dim_names=(MESH_DIM,)),
            reshard_after_forward=reshard_after_forward(program),
            shard_placement_fn=placed.get,
            ignored_params={parameter for name, parameter in named if name not in dims},
            **({"offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu")} if on_host else {}),
        )
    except (AssertionError, RuntimeError, ValueError) as error:
        twice = [name for name, parameter in stage.named_parameters() if isinstance(parameter, DTensor)]
        raise RuntimeProgramError(
            f"{units.__name__} can't shard {type(stage).__name__}, {len(twice)} of whose parameters are in a unit already, the last "
            f"{twice[-1] if twice else 'none'}: {str(error).splitlines()[0]} A parameter is in one unit, and inner units come first."
        ) from error
    for module in _units(stage):
        for sharded in groups_of(module):
            sharded.mp_policy = _precision(sharded, program)
        module.set_gradient_divide_factor(1.0)  # each replica returns its share of the loss
        module.set_force_sum_reduction_for_comms(True)
        if program.gathers_by_table:
            state = module._get_fsdp_state()
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()
        elif hasattr(module, "evaluated"):
            register_fsdp_forward_method(cast(nn.Module, module), "evaluated")
    if order is not None and program.prefetch == "post":
        _gather_after_backwards(order, program.prefetch_distance)


def reshard_after_forward(program: Manifest) -> bool | int | None:
    """Return what FSDP2 is told: whether units are freed after their forward (None: all but the unit around the others)."""
    if isinstance(program.reshard, int) or program.reshard == "always":
        return program.reshard if isinstance(program.reshard, int) else True
    return None if program.reshard == "default" and program.zero == 3 and program.pp == 1 else False


def gather(stage: nn.Module) -> None:
    """Gather the parameters of all units of ``stage``; a collective call."""
    _root(stage)._lazy_init()
    for pending in [module.unshard(async_op=True) for module in _units(stage)]:
        assert pending is not None
        pending.wait()


def free(stage: nn.Module) -> None:
    """Free what is gathered of ``stage``, which keeps its gradients that are not reduced yet.

    A unit that was gathered ahead and did not run would keep what arrives, and compute with it after the optimizer's step.
    """
    for module in _units(stage):
        for group in groups_of(module):
            group.wait_for_unshard()
        module.reshard()


def reduce_gradients(stage: nn.Module) -> None:
    """Reduce-scatter the gradients that ``stage`` has added up, a unit at a time, into those of its shards; a collective call."""
    for module in _units(stage):
        module.set_requires_gradient_sync(True, recurse=False)
        module.set_reshard_after_backward(False, recurse=False)
    _root(stage)._root_post_backward_final_callback()


def begin_microbatch(stage: nn.Module, *, reduces: bool, frees: bool) -> None:
    """Say what the units of ``stage`` do at the end of the next backward."""
    for module in _units(stage):
        for group in groups_of(module):
            group._init_mp_dtypes()  # those of a unit that is trained, which may have been frozen so far
        module.set_requires_gradient_sync(reduces, recurse=False)
        module.set_reshard_after_backward(frees, recurse=False)


def add_up(stage: nn.Module) -> None:
    """Add the gradients of a microbatch to those before it, in the dtype in which they are reduced."""
    for parameter in shards_of(stage):
        if hasattr(parameter, "_unsharded_param"):
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def drop_gradients(stage: nn.Module) -> None:
    """Drop the gradients that were added up and not reduced."""
    for parameter in shards_of(stage):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def _units(stage: nn.Module) -> list[FSDPModule]:
    """Return a module of each unit; several may share one."""
    modules = [module for module in stage.modules() if isinstance(module, FSDPModule)]
    return list({id(module._get_fsdp_state()): module for module in modules}.values())


def _root(stage: nn.Module) -> Any:
    assert isinstance(stage, FSDPModule)
    return stage._get_fsdp_state()


def shards_of(stage: nn.Module) -> Iterator[Any]:
    """Yield FSDP2's records of the parameters."""
    for module in _units(stage):
        for group in groups_of(module):
            yield from group.fsdp_params


def _gather_after_backwards(order: Sequence[nn.Module], distance: int) -> None:
    """Gather the next ``distance`` units of ``order`` when a unit's backward has computed and its own parameters are freed.

    Nothing has computed before the first of them, which are gathered when the backward of the stage, ``order[0]``, begins.
    """
    running = False

    def gather(after: int) -> None:
        for unit in order[after + 1 : after + 1 + distance] if running else ():
            assert isinstance(unit, FSDPModule)
            for group in reversed(groups_of(unit)):
                group._prefetch_unshard(group, "backward")

    def begin(_: Tensor) -> None:
        nonlocal running
        if not running:
            running = True
            # Before FSDP2's own callback, which finishes units that had no backward.
            torch.autograd.Variable._execution_engine.queue_callback(end)
            gather(0)

    def end() -> None:
        nonlocal running
        running = False

    def watch_outputs(module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(begin)

    def gathers_then(group: Any, after: int) -> None:
        reshard = group.reshard

        def call() -> None:
            reshard()
            if group._training_state is TrainingState.POST_BACKWARD:
                gather(after)

        group.reshard = call

    order[0].register_forward_hook(watch_outputs, prepend=True)
    for place, unit in enumerate(order[1:], 1):
        assert isinstance(unit, FSDPModule)
        gathers_then(groups_of(unit)[0], place)


def _precision(group: Any, program: Manifest) -> MixedPrecisionPolicy:
    """Gather the parameters of a unit in the dtype in which all of the program are read, if there is one; sum gradients in that of
    the plan, or in their own, which may differ between units."""
    stored = group.fsdp_params[0].sharded_param.dtype
    gathered, reduced = current(program.gather_dtype), current(program.reduced or stored)
    return MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=reduced, cast_forward_inputs=False)


def hold_new_memory(stage: nn.Module) -> None:
    """Let FSDP2 take over parameters that were replaced by others on a device."""
    for module in _units(stage):
        module._apply(lambda tensor: tensor)


def groups_of(module: FSDPModule) -> list[Any]:
    """Return FSDP2's parameter groups of a unit; one without parameters has none."""
    return parameter_groups(module._get_fsdp_state())


def local(tensor: Tensor) -> Tensor:
    """Return the part of ``tensor`` that this rank stores, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(parameter: Tensor, part: Tensor) -> Tensor:
    """Return ``part``, this rank's part of a tensor, as ``parameter`` is stored."""
    if not isinstance(parameter, DTensor):
        return part
    return DTensor(part, parameter._spec, requires_grad=False)  # type: ignore[call-arg]  # from_local would move it to the mesh's devices


def padded(tensor: Tensor) -> Tensor:
    """Return the part of ``tensor`` that this rank stores, with zeros up to the size that all ranks have."""
    part = local(tensor)
    if not isinstance(tensor, DTensor):
        return part
    if tensor.placements[0] != Shard(0):
        return part  # other dims divide evenly
    missing = -(-tensor.shape[0] // tensor.device_mesh.size()) - part.shape[0]
    return torch.cat([part, part.new_zeros((missing, *part.shape[1:]))]) if missing else part
