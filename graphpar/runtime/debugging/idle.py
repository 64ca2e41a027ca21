"""What a step left behind: between two steps nothing may be pending, gathered or set aside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.state.fully_sharded import groups_of, shards_of
from graphpar.runtime.torch_versions import waits_for_reduce_scatter

_QUEUES = {
    "fwd_cache": "activations that wait for their backward",
    "bwd_cache": "gradients to be sent",
    "backward_state": "postponed backwards of weights",
    "dw_runner": "postponed backwards of weights",
}
"""What torch's stage keeps by microbatch between two actions, by attribute."""
_OPERATIONS = {
    "fwd_recv_ops": "activations to be received",
    "bwd_recv_ops": "gradients to be received",
    "unshard_ops": "gathers of stages",
    "unsharded_stages": "gathered stages",
}
"""What torch's runtime of tables keeps by stage and microbatch."""


def left_in_stage(name: str, stage: nn.Module) -> Iterator[str]:
    """Say what FSDP2 has not finished on the units of a stage."""
    for path, module in stage.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        unit = path or name
        for group in groups_of(module):
            state = group._training_state.name
            if state != "IDLE":
                yield f"{unit} is in the state {state}"
            if group._all_gather_result is not None:
                yield f"a gather of {unit} has not been waited for"
            if not group.is_sharded:
                yield f"the parameters of {unit} are gathered"
            if group._partial_reduce_output is not None or any(
                parameter.unsharded_accumulated_grad is not None for parameter in group.fsdp_params
            ):
                yield f"gradients of {unit} are not reduced"
            if not path and waits_for_reduce_scatter(group):  # what is waited for is known to all units of the stage
                yield f"a reduce-scatter of {unit} or of another unit has not been waited for"


def left_in_schedule(schedule: Any, stages: Sequence[PipelineStage]) -> Iterator[str]:
    """Say what torch's schedule has not finished."""
    for stage in stages:
        for attribute, what in _QUEUES.items():
            kept = getattr(stage, attribute, None)
            if kept and not _never_removed(stage, attribute):
                yield f"stage {stage.stage_index} keeps {what}: microbatches {', '.join(map(str, sorted(kept)))}"
    for attribute, what in _OPERATIONS.items():
        if kept := getattr(schedule, attribute, None):
            yield f"the schedule keeps {what}: {', '.join(map(str, sorted(kept)))}"


def _never_removed(stage: PipelineStage, attribute: str) -> bool:
    """Tell whether torch keeps these for good: gradients of the first stage's inputs, and runners that run nothing."""
    return stage.is_first if attribute == "bwd_cache" else attribute == "dw_runner" and stage.dw_builder is None


class Places:
    """Where the tensors of these stages are kept, found once, so that each step can check their device.

    Args:
        home: where shards of parameters and their gradients live between uses. Where it is given they are looked at before a step gathers
            any, after each forward of a stage, and whenever a caller says so.
    """

    def __init__(self, stages: Sequence[nn.Module], device: torch.device, home: torch.device | None = None) -> None:
        self._device, self._home = device, home or device
        self._slots = [
            (f"{path}.{name}" if path else name, slots, name)
            for stage in stages
            for path, module in stage.named_modules()
            for slots in cast(tuple[dict[str, Any], ...], (module._parameters, module._buffers))
            for name in slots
        ]
        self._shards: list[tuple[str, Any]] = []
        for stage in stages if home is not None else ():
            names = {parameter: name for name, parameter in stage.named_parameters()}
            self._shards += [(names[shard.sharded_param], shard) for shard in shards_of(stage)]
            stage.register_forward_hook(lambda *_: self.check_shards("after a forward"))

    def check(self) -> None:
        """Check that no parameter or buffer was moved.

        Raises:
            RuntimeProgramError: one is on another device.
        """
        self.check_shards("before a gather")
        for name, slots, key in self._slots:
            if (tensor := slots.get(key)) is None:
                continue
            expected = self._home if isinstance(tensor, DTensor) else self._device
            if not _is_on(tensor, expected):
                raise RuntimeProgramError(
                    f"{name} is on the device {tensor.device}, but the program was built for {expected}; leave its stages where they are"
                )

    def check_shards(self, when: str) -> None:
        """Check that shards of parameters and their gradients are at home.

        Raises:
            RuntimeProgramError: one is on another device.
        """
        for name, shard in self._shards:
            for what, tensor in (("shard", shard.sharded_param), ("gradient", shard.sharded_param.grad)):
                if tensor is not None and not _is_on(tensor, self._home):
                    raise RuntimeProgramError(
                        f"the {what} of {name} is on the device {tensor.device} {when}; with offload=params leave it on {self._home}"
                    )


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)
