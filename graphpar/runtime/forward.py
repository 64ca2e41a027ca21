"""The forward pass alone, over a pipeline's ranks.

Every rank goes through its stages microbatch by microbatch, so that two ranks with several stages each
send to and receive from each other in the same order (nccl needs that), while other microbatches of the
same stage overlap with the neighbours' work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphpar.runtime.distributed import gather_tensors
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.groups import Groups
from graphpar.runtime.manifest import Manifest, OutputInterface
from graphpar.runtime.schedules import microbatch
from graphpar.runtime.stages import StageAdapter, example, keywords


def forward_only(
    program: Manifest, stages: Sequence[StageAdapter], values: Mapping[str, Tensor], groups: Groups
) -> dict[str, Tensor] | None:
    """Run every microbatch through this rank's stages.

    Args:
        program: the plan.
        stages: this rank's stages, first to last.
        values: the inputs and counts that they name, for the rows of this replica.
        groups: of the mesh; stages send to and receive from their neighbours along pp.

    Returns:
        The outputs by name, joined over microbatches and replicas, on the ranks of the last stage; else ``None``.
    """
    counts = {name: value for name, value in values.items() if name in program.count_names}
    inputs = {name: value for name, value in values.items() if name not in counts}
    device = next((value.device for value in values.values()), _device_of(stages))
    for stage in stages:
        stage.begin()
    sent: list[tuple[dist.Work | None, Tensor]] = []
    finished: list[tuple[Tensor, ...]] = []
    for i in range(program.microbatches):
        given = keywords({**microbatch(program, inputs, i), **counts})
        local: tuple[Tensor, ...] = ()
        for stage in stages:
            received = _receive(program, stage, local, device, groups)
            output = stage(*received, **given)
            local = output if isinstance(output, tuple) else (output,)
            if stage.interface.sends:
                sent += _send(program, stage, local, groups)
            else:
                finished.append(local)
    for work, _ in sent:
        if work is not None:
            work.wait()
    if not finished:
        return None
    outputs = {spec.name: _join(program, spec, parts) for spec, parts in zip(program.outputs, zip(*finished))}
    replicas = groups["batch"]
    if replicas is None:
        return outputs
    return {
        spec.name: _join(program, spec, tuple(gather_tensors(outputs[spec.name], replicas))) for spec in program.outputs
    }


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


def _receive(
    program: Manifest, stage: StageAdapter, local: tuple[Tensor, ...], device: torch.device, groups: Groups
) -> tuple[Tensor, ...]:
    index, rank = stage.interface.index, stage.interface.rank
    if index == 0 or program.stages[index - 1].rank == rank:
        return local if index else ()
    received = tuple(example(spec, device).detach() for spec in stage.interface.receives)
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


def _join(program: Manifest, spec: OutputInterface, parts: tuple[Tensor, ...]) -> Tensor:
    """One output of all microbatches (or replicas): joined along the batch dim, or the sum of the loss shares."""
    if spec.batch_dim is not None:
        return torch.cat(parts, dim=spec.batch_dim)
    if program.mode == "train":
        return torch.stack(parts).sum(0)
    if any(not torch.equal(part, parts[0]) for part in parts[1:]):
        raise RuntimeProgramError(
            f"the output {spec.name} has no batch dim and differs between microbatches or replicas: emit the program with one"
        )
    return parts[0]


def _device_of(stages: Sequence[StageAdapter]) -> torch.device:
    return next((p.device for stage in stages for p in stage.parameters()), torch.device("cpu"))
