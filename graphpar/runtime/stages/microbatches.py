"""Forward and backward over the microbatches of a step: with a pipeline as torch's schedule orders them, else one after the other.

values of a replica's rows ──► microbatch 0, 1, ... ──► their losses, which add up to this replica's share of the loss

In the forward alone every rank goes through its stages microbatch by microbatch, so that two ranks with several stages each send to and
receive from each other in the same order (nccl needs that), while other microbatches of the same stage overlap with the neighbours' work.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from graphpar.runtime.debugging.events import at, watch_actions
from graphpar.runtime.debugging.idle import left_in_schedule
from graphpar.runtime.distributed import gather_tensors
from graphpar.runtime.groups import Groups
from graphpar.runtime.manifest import Manifest, StageInterface
from graphpar.runtime.stages.cast_once import CastOnce
from graphpar.runtime.stages.lengths import cropped
from graphpar.runtime.stages.loss_scale import LossScale
from graphpar.runtime.stages.model_outputs import join
from graphpar.runtime.stages.modules import StageAdapter, example, keywords
from graphpar.runtime.stages.schedules import Schedule, ShardedStage, Stage, build_schedule, microbatch
from graphpar.runtime.stages.split_backward import guard
from graphpar.runtime.state.parameters import Replicated

KEPT = 4
"""For how many lengths of sequences, besides the longest, torch's stages are kept."""


class Microbatches:
    """Runs this rank's stages, first to last, in training.

    Args:
        casts: of each stage, the parameters that it casts.

    Attributes:
        stages: as they were given.
        torch_stages: torch's, one for each; none without a pipeline.

    Raises:
        RuntimeProgramError: torch refuses the plan's schedule.
    """

    def __init__(
        self,
        stages: Sequence[StageAdapter],
        casts: Sequence[CastOnce],
        parameters: Replicated,
        device: torch.device,
        scale: LossScale,
    ) -> None:
        self._program, self.stages, self._casts = parameters.program, stages, casts
        self._interfaces = tuple(self._program.stages[stage.interface.index] for stage in stages)
        self._others: OrderedDict[tuple[StageInterface, ...], Microbatches] = OrderedDict()
        self._parameters, self._device, self._scale = parameters, device, scale
        self.torch_stages: list[PipelineStage] = []
        self._schedule: Schedule | None = None
        if self._program.mode == "train" and self._program.pp > 1:
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
                group=self._parameters.groups["pp"],
            )
            for stage in self.stages
        ]
        for torch_stage, stage in zip(self.torch_stages, self.stages):
            guard(torch_stage, whole=stage.interface.recomputes or "activations" in self._program.offload)
        return build_schedule(self._program, self.torch_stages, self._scale.share_of_loss)

    def at(self, program: Manifest) -> Microbatches:
        """Return what runs these stages in a ``program`` of another length. What was made for the lengths of late is kept, since torch's
        stages have memory for what they receive."""
        own = tuple(program.stages[stage.interface.index] for stage in self.stages)
        if own == self._interfaces:
            return self
        if own not in self._others:
            stages = [stage.at(interface) for stage, interface in zip(self.stages, own)]
            made = Microbatches(stages, self._casts, self._parameters, self._device, self._scale)
            watch_actions(made.torch_stages)
            self._others[own] = made
        self._others.move_to_end(own)
        while len(self._others) > KEPT:
            self._others.popitem(last=False)
        return self._others[own]

    def _output_example(self, stage: StageAdapter) -> tuple[Tensor, ...]:
        if stage.interface.sends:
            return tuple(example(tensor, self._device) for tensor in stage.interface.sends)
        loss = self._program.outputs[0]
        return (torch.empty(loss.shape, dtype=loss.dtype, device=self._device, requires_grad=True),)

    def begin(self) -> None:
        """Begin a step, of one batch or several."""
        for stage in self.stages:
            stage.begin()

    def run(self, values: Mapping[str, Tensor], accumulate: bool) -> Tensor | None:
        """Run all of them; returns the loss of each on the ranks of the last stage, else ``None``.

        Args:
            values: the inputs and counts of this replica's rows.
            accumulate: leave gradients of sharded state unreduced.
        """
        with ExitStack() as step:
            for casts in self._casts:
                step.enter_context(casts.step())
            return (self._alone if self._schedule is None else self._scheduled)(values, accumulate)

    def left(self) -> Iterator[str]:
        """Say what torch's schedule has not finished."""
        yield from left_in_schedule(self._schedule, self.torch_stages)
        for casts in self._casts:
            yield from casts.left()
        for other in self._others.values():
            yield from left_in_schedule(other._schedule, other.torch_stages)

    def _alone(self, values: Mapping[str, Tensor], accumulate: bool) -> Tensor:
        """All microbatches one after the other, with nothing to send."""
        (stage,) = self.stages
        counts = {name: values[name] for name in values if name in self._program.count_names}
        inputs = {name: values[name] for name in values if name not in counts}
        losses: list[Tensor] = []
        last = self._program.microbatches - 1
        for i in range(self._program.microbatches):
            at(microbatch=i)
            self._parameters.begin_microbatch(stage.stage, accumulate=accumulate, last=i == last)
            loss: Tensor = stage(**keywords({**microbatch(self._program, inputs, i), **counts}))
            if loss.requires_grad:
                self._scale.scaled(loss).backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    def _scheduled(self, values: Mapping[str, Tensor], accumulate: bool) -> Tensor | None:
        """torch's schedule. It wants a target that it can split; the targets are keyword inputs here."""
        assert self._schedule is not None
        for stage in self.torch_stages:
            if isinstance(stage, ShardedStage):
                stage.begin(reduces=not accumulate)
        losses: list[Tensor] = []
        target = torch.zeros(self._program.microbatches, device=self._device)
        self._schedule.step(target=target, losses=losses, return_outputs=False, **keywords(values))
        if self.stages[-1].interface.sends:
            return None
        return torch.stack([loss.detach() for loss in losses]) / self._scale.value


# ---- the forward alone -------------------------------------------------------------------------------------------


def forward_only(
    program: Manifest,
    stages: Sequence[StageAdapter],
    values: Mapping[str, Tensor],
    groups: Groups,
    take: Callable[[Manifest, Mapping[str, Tensor]], None],
) -> dict[str, Tensor] | None:
    """Run every microbatch through this rank's stages.

    Args:
        program: the plan, at the length of ``values``.
        stages: this rank's stages, first to last.
        values: the inputs and counts that they name, for the rows of this replica.
        groups: of the mesh; stages send to and receive from their neighbours along pp.
        take: called after each microbatch with the program and its inputs.

    Returns:
        The outputs by name, joined over microbatches and replicas, on the ranks of the last stage; else ``None``.
    """
    counts = {name: value for name, value in values.items() if name in program.count_names}
    inputs = {name: value for name, value in values.items() if name not in counts}
    for stage in stages:
        stage.begin()
    sent: list[tuple[dist.Work | None, Tensor]] = []
    finished: list[tuple[Tensor, ...]] = []
    for i in range(program.microbatches):
        batch = microbatch(program, inputs, i)
        given = keywords({**batch, **counts})
        local: tuple[Tensor, ...] = ()
        for stage in stages:
            received = _receive(program, stage, local, groups)
            output = stage(*received, **given)
            local = output if isinstance(output, tuple) else (output,)
            if stage.interface.sends:
                sent += _send(program, stage, local, groups)
            else:
                finished.append(local)
        take(program, batch)
    for work, _ in sent:
        if work is not None:
            work.wait()
    if not finished:
        return None
    adds, replicas = program.mode == "train", groups["batch"]
    outputs = {}
    for spec, parts in zip(program.outputs, zip(*finished)):
        value = join(spec.name, parts, spec.batch_dim, adds)
        if replicas is not None:
            value = join(spec.name, gather_tensors(value, replicas), spec.batch_dim, adds)
        outputs[spec.name] = cropped(value, spec.per_position, program)
    return outputs


def summed(outputs: Sequence[Mapping[str, Tensor] | None]) -> dict[str, Tensor] | None:
    """Add up the outputs of batches, of which all or none have some."""
    found = [each for each in outputs if each is not None]
    return {name: sum(each[name] for each in found[1:]) + found[0][name] for name in found[0]} if found else None


@contextmanager
def evaluating(stages: Sequence[nn.Module]) -> Iterator[None]:
    """Have all modules in evaluation mode, and then as they were."""
    modes = {module: module.training for stage in stages for module in stage.modules()}
    for stage in stages:
        stage.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _receive(program: Manifest, stage: StageAdapter, local: tuple[Tensor, ...], groups: Groups) -> tuple[Tensor, ...]:
    index, rank = stage.interface.index, stage.interface.rank
    if index == 0 or program.stages[index - 1].rank == rank:
        return local if index else ()
    received = tuple(example(spec, groups.device).detach() for spec in stage.interface.receives)
    for tensor in received:
        dist.recv(tensor, src=groups.rank_at(pp=program.stages[index - 1].rank), group=groups["pp"])
    return received


def _send(
    program: Manifest, stage: StageAdapter, outputs: tuple[Tensor, ...], groups: Groups
) -> list[tuple[dist.Work | None, Tensor]]:
    """Start sending; a tensor must live until its transfer ends."""
    to = program.stages[stage.interface.index + 1].rank
    if to == stage.interface.rank:
        return []
    after = groups.rank_at(pp=to)
    return [(dist.isend(tensor, dst=after, group=groups["pp"]), tensor) for tensor in outputs]
