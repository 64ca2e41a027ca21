"""Forward and backward over the microbatches of a step: with a pipeline as torch's schedule orders them, else one after the other.

values of a replica's rows ──► microbatch 0, 1, ... ──► losses ──summed──► this replica's share of the loss
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from graphpar.runtime.cast_once import CastOnce
from graphpar.runtime.events import at
from graphpar.runtime.fully_sharded import begin_microbatch
from graphpar.runtime.groups import Groups
from graphpar.runtime.idle import left_in_schedule
from graphpar.runtime.loss_scale import LossScale
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.schedules import Schedule, ShardedStage, Stage, build_schedule, microbatch
from graphpar.runtime.split_backward import guard
from graphpar.runtime.stages import StageAdapter, example, keywords


class Microbatches:
    """Runs this rank's stages, first to last, in training.

    Args:
        casts: of each stage, the parameters that it casts.

    Attributes:
        torch_stages: torch's, one for each; none without a pipeline.

    Raises:
        RuntimeProgramError: torch refuses the plan's schedule.
    """

    def __init__(
        self,
        program: Manifest,
        stages: Sequence[StageAdapter],
        casts: Sequence[CastOnce],
        groups: Groups,
        device: torch.device,
        scale: LossScale,
    ) -> None:
        self._program, self._stages, self._casts = program, stages, casts
        self._groups, self._device, self._scale = groups, device, scale
        self.torch_stages: list[PipelineStage] = []
        self._schedule: Schedule | None = None
        if program.mode == "train" and program.pp > 1:
            self._schedule = self._build_schedule()

    def _build_schedule(self) -> Schedule:
        kind = ShardedStage if self._program.fully_sharded else Stage
        self.torch_stages = [
            kind(
                stage,
                stage.interface.index,
                len(self._program.stages),
                self._device,
                input_args=tuple(example(tensor, self._device) for tensor in stage.interface.receives),
                output_args=self._output_example(stage),
                group=self._groups["pp"],
            )
            for stage in self._stages
        ]
        for torch_stage, stage in zip(self.torch_stages, self._stages):
            guard(torch_stage, whole=stage.interface.recomputes or "activations" in self._program.offload)
        return build_schedule(self._program, self.torch_stages, self._scale.share_of_loss)

    def _output_example(self, stage: StageAdapter) -> tuple[Tensor, ...]:
        if stage.interface.sends:
            return tuple(example(tensor, self._device) for tensor in stage.interface.sends)
        loss = self._program.outputs[0]
        return (torch.empty(loss.shape, dtype=loss.dtype, device=self._device, requires_grad=True),)

    def run(self, values: Mapping[str, Tensor], accumulate: bool) -> Tensor | None:
        """Run all of them; returns the sum of their losses on the ranks of the last stage, else ``None``.

        Args:
            values: the inputs and counts of this replica's rows.
            accumulate: leave gradients of sharded state unreduced.
        """
        for stage in self._stages:
            stage.begin()
        with ExitStack() as step:
            for casts in self._casts:
                step.enter_context(casts.step())
            return (self._alone if self._schedule is None else self._scheduled)(values, accumulate)

    def left(self) -> Iterator[str]:
        """Say what torch's schedule has not finished."""
        yield from left_in_schedule(self._schedule, self.torch_stages)
        for casts in self._casts:
            yield from casts.left()

    def _alone(self, values: Mapping[str, Tensor], accumulate: bool) -> Tensor:
        """All microbatches one after the other, with nothing to send."""
        (stage,) = self._stages
        counts = {name: values[name] for name in values if name in self._program.count_names}
        inputs = {name: values[name] for name in values if name not in counts}
        losses: list[Tensor] = []
        last = self._program.microbatches - 1
        for i in range(self._program.microbatches):
            at(microbatch=i)
            if self._program.fully_sharded:
                begin_microbatch(stage.stage, reduces=not accumulate, frees=self._program.zero == 3 or i == last)
            loss: Tensor = stage(**keywords({**microbatch(self._program, inputs, i), **counts}))
            if loss.requires_grad:
                self._scale.scaled(loss).backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def _scheduled(self, values: Mapping[str, Tensor], accumulate: bool) -> Tensor | None:
        """torch's schedule. It wants a target that it can split; the targets are keyword inputs here."""
        assert self._schedule is not None
        for stage in self.torch_stages:
            if isinstance(stage, ShardedStage):
                stage.begin(reduces=not accumulate)
        losses: list[Tensor] = []
        target = torch.zeros(self._program.microbatches, device=self._device)
        self._schedule.step(target=target, losses=losses, return_outputs=False, **keywords(values))
        if self._stages[-1].interface.sends:
            return None
        return torch.stack([loss.detach() for loss in losses]).sum() / self._scale.value
