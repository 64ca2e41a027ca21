"""How many bytes one rank holds at the peak of a training step, by what they are for.

    program, plan, stages ──what the rank holds──► parameters, gradients, optimizer, boundaries
                          ──a run on fake tensors──► what a microbatch keeps, what a forward and a backward take on top
                                 │
                     action table of the schedule ──walk the rank's actions──► activations and transient at the peak

Nothing of it is a formula for a kind of model: sizes are those of the lowered program, what autograd keeps is measured
(:mod:`graphpar.cost_models.activation_memory`), the order is the one that the runtime runs, and buffers are those that the runtime
and torch's pipeline stages make.

The parts are added up, though they are not all there at the same moment: gradients are counted whole, as they are from the second
microbatch on, and so are the buckets in which they are summed. What the optimizer's own step takes is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from graphpar.cost_models.activation_memory import Activations, attributes
from graphpar.cost_models.execution import OPTIMIZERS, Execution
from graphpar.cost_models.flops import tensor_bytes
from graphpar.errors import GraphparError
from graphpar.ir.plan import Plan
from graphpar.ir.program import Program, TensorInfo
from graphpar.runtime.gradients import buckets
from graphpar.runtime.layout import R
from graphpar.schedules.registry import ActionTable, action_table, in_flight, parse_table

if TYPE_CHECKING:
    from graphpar.ir.stage import Stage

MAIN_DTYPE = torch.float32
"""Of the copies of low-precision parameters that an optimizer may update in their place."""
ALLOCATOR_SLACK = 0.05
"""Share of the memory that comes and goes in a step which the allocator takes besides: it rounds every tensor up to 512 bytes and
every segment to 2 MiB, and keeps pieces between live tensors that fit nothing else (assumed)."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        buffers: and constants.
        buckets: of the sums of gradients over ranks: gradients move into them, so one is there twice.
        inputs: the rows of this rank's replica of the inputs that its stages name.
        boundaries: what stages receive and the gradients of what they send; torch has a buffer for each microbatch.
        activations: of the microbatches in flight, where together with ``transient`` they are the most.
        transient: what the forward or backward that runs then takes on top; of the loss its logits and their gradient.
        slack: of the allocator.
    """

    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    main_copies: int = 0
    optimizer: int = 0
    buckets: int = 0
    inputs: int = 0
    boundaries: int = 0
    activations: int = 0
    transient: int = 0
    slack: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True)
class StageCost:
    """Of one microbatch of a stage.

    Attributes:
        kept: from its forward to its backward.
        forward, backward: what each of them takes on top.
        for_weight: kept from the input half of a split backward to the weight half; None is all that is ``kept``.
        sent: what of ``kept`` stays to the end of the step, because it is being sent.
        returned: the gradients that are sent back, which stay to the end of the step.
    """

    kept: int
    forward: int = 0
    backward: int = 0
    for_weight: int | None = None
    sent: int = 0
    returned: int = 0

    @property
    def left_for_weight(self) -> int:
        return self.kept if self.for_weight is None else self.for_weight


def saved_bytes(program: Program, plan: Plan, stage: Stage, rows: int | None = None, *, device: str = "cpu") -> int:
    """What one microbatch of ``stage`` keeps from its forward to its backward; ``rows`` defaults to the plan's."""
    activations = Activations(program, plan.mesh.degrees(), device=device)
    return activations.saved(stage, plan.microbatch_size if rows is None else rows).total


def rank_memory(
    program: Program,
    plan: Plan,
    stages: Sequence[Stage],
    rank: int,
    execution: Execution | None = None,
    *,
    activations: Activations | None = None,
) -> Memory:
    """The memory of the ranks at place ``rank`` on pp, which all have the same.

    Args:
        program, stages: lowered and split, as :class:`graphpar.api.Parts` has them.
        activations: measures ``program``, also for other calls; by default for the CPU.

    Raises:
        GraphparError: there is no such rank, or its memory depends on the values of inputs.
    """
    own = [stages[entry.index] for entry in plan.stages if entry.rank == rank]
    if not own:
        raise GraphparError(f"There is no rank {rank}; the plan has ranks 0 to {plan.mesh.pp - 1}.")
    measured = activations or Activations(program, plan.mesh.degrees())
    held = Memory(
        inputs=_input_bytes(program, plan, own), **_held(program, plan, stages, own, execution or Execution())
    )
    boundaries = _boundary_bytes(program, plan, stages, own)
    if program.mode == "train":
        table = table_of(plan)
        split = {action.stage for _, _, _, action in table.actions() if action.kind == "W"}
        costs = {stage.index: _stage_cost(plan, stage, measured, own, stage.index in split) for stage in own}
        kept, transient = activation_peak(table, rank, costs, holds_messages=_holds_messages(plan))
        if not _holds_messages(plan) and len(stages) > 1:
            boundaries += max(max(cost.sent, cost.returned) for cost in costs.values())  # the last message on its way
    else:
        passes = [measured.passes(stage, plan.microbatch_size) for stage in own]
        kept = plan.microbatches * sum(each.kept for each in passes)  # what is sent lives until all of it is
        transient = max(each.forward - each.kept for each in passes)
    slack = math.ceil(ALLOCATOR_SLACK * (kept + transient + held.buckets))
    parts = {part.name: getattr(held, part.name) for part in fields(held)}
    return Memory(**parts | {"boundaries": boundaries, "activations": kept, "transient": transient, "slack": slack})


# ---- what is there all the time ----------------------------------------------------------------------------------


def _held(
    program: Program, plan: Plan, stages: Sequence[Stage], own: Sequence[Stage], execution: Execution
) -> dict[str, int]:
    """Parameters and what follows from them; a tied one is there once in each stage."""
    parameters: list[tuple[str, TensorInfo]] = []
    buffered = 0
    for stage in own:
        for name in _distinct(program, stage):
            if name in program.parameters:
                parameters.append((name, program.parameters[name]))
            else:
                buffered += program.tensor_info(name).nbytes
    total = sum(info.nbytes for _, info in parameters)
    if program.mode != "train":
        return {"parameters": execution.divided(total, 3), "buffers": buffered}
    trained = [(name, info) for name, info in parameters if info.requires_grad]
    copied = [info for _, info in trained if execution.main_copies and info.dtype.itemsize < MAIN_DTYPE.itemsize]
    main = sum(info.numel * MAIN_DTYPE.itemsize for info in copied)
    gradients = sum(info.numel * (execution.gradient_bytes or info.dtype.itemsize) for _, info in trained)
    updated = sum(info.nbytes for _, info in trained) - sum(info.nbytes for info in copied) + main
    return {
        "parameters": execution.divided(total, 3),
        "buffers": buffered,
        "gradients": execution.divided(gradients, 2),
        "main_copies": execution.divided(main, 1),
        "optimizer": execution.divided(updated * OPTIMIZERS[execution.optimizer], 1),
        "buckets": _bucket_bytes(program, plan, stages, trained),
    }


def _distinct(program: Program, stage: Stage) -> Iterator[str]:
    """The names of a stage's tensors, a tied one under its first name."""
    return iter(dict.fromkeys(program.tie_of(name)[0] for name in attributes(program, stage)))


def _bucket_bytes(
    program: Program, plan: Plan, stages: Sequence[Stage], trained: Sequence[tuple[str, TensorInfo]]
) -> int:
    """The largest bucket: while it is filled, its gradients are there twice."""
    holders: dict[str, set[int]] = {}
    for entry in plan.stages:
        for name in _distinct(program, stages[entry.index]):
            holders.setdefault(name, set()).add(entry.rank)
    degrees = plan.mesh.degrees()
    groups: dict[tuple[tuple[str, ...], tuple[int, ...]], list[torch.Tensor]] = {}
    for name, info in reversed(dict(trained).items()):
        axes = [axis for axis, kind in info.spec if kind == R and degrees[axis] > 1]
        axes += ["dp_replicate"] if degrees["dp_replicate"] > 1 else []
        shared = tuple(sorted(holders[name])) if len(holders[name]) > 1 else ()
        if axes or shared:
            tensor = torch.empty(info.shape, dtype=info.dtype, device="meta")
            groups.setdefault((tuple(sorted(axes)), shared), []).append(tensor)
    sizes = [sum(group[i].nbytes for i in indices) for group in groups.values() for indices in buckets(group)]
    return max(sizes, default=0)


def _input_bytes(program: Program, plan: Plan, own: Sequence[Stage]) -> int:
    total = 0
    for name in dict.fromkeys(name for stage in own for name in stage.inputs):
        spec = program.input(name)
        shape = list(spec.shape)
        if spec.batch_dim is not None:
            shape[spec.batch_dim] = plan.microbatch_size * plan.microbatches
        total += math.prod(shape) * spec.dtype.itemsize
    return total


def _boundary_bytes(program: Program, plan: Plan, stages: Sequence[Stage], own: Sequence[Stage]) -> int:
    """In a forward alone a buffer lives while its stage runs; torch's pipeline stages keep one for each microbatch."""
    rows = plan.microbatch_size
    received = sum(tensor_bytes(value.node, rows) for stage in own for value in stage.receives)
    if program.mode != "train":
        return received
    gradients = sum(tensor_bytes(value.node, rows) for stage in own for value in stage.sends if value.requires_grad)
    return plan.microbatches * (received + gradients)


# ---- what comes and goes -----------------------------------------------------------------------------------------


def _stage_cost(plan: Plan, stage: Stage, measured: Activations, own: Sequence[Stage], split: bool) -> StageCost:
    rows = plan.microbatch_size
    saved, passes = measured.saved(stage, rows), measured.passes(stage, rows)
    places = {other.index for other in own}
    local = saved.sent if stage.index + 1 in places else 0  # what it sends is what the other one's buffer holds
    returned = sum(tensor_bytes(value.node, rows) for value in stage.receives if value.requires_grad)
    return StageCost(
        saved.total - local,
        max(0, passes.forward - passes.kept),
        max(0, passes.backward - passes.kept),
        max(0, measured.for_weight(stage, rows) - local) if split else None,
        saved.sent - local if stage.sends else 0,
        0 if stage.index - 1 in places else returned,
    )


def _holds_messages(plan: Plan) -> bool:
    """Whether torch waits for what a rank sends only at the end of a step: where it runs a table, and not one stage a rank."""
    return plan.actions is not None or plan.stages_per_rank > 1


def table_of(plan: Plan) -> ActionTable:
    """The actions of the plan's ranks: its own, those of its schedule, or without a pipeline one microbatch after the other."""
    if plan.actions is not None:
        return parse_table("\n".join(",".join(row) for row in plan.actions))
    if plan.mesh.pp == 1:
        return parse_table(",".join(f"0F{number},0B{number}" for number in range(plan.microbatches)))
    return action_table(plan.schedule, plan.mesh.pp, plan.stages_per_rank, plan.microbatches)


def activation_peak(
    table: ActionTable, rank: int, costs: Mapping[int, StageCost], *, holds_messages: bool = False
) -> tuple[int, int]:
    """(activations kept, what the running action takes on top) where their sum is the most, over the actions of ``rank``.

    Either half of a split backward is taken to need what a whole one does on top. With ``holds_messages``, what is sent
    stays to the end of the step.
    """
    memory = in_flight(
        table,
        [costs[stage].kept if stage in costs else 0 for stage in range(table.stages)],
        [costs[stage].left_for_weight if stage in costs else 0 for stage in range(table.stages)],
    )[rank]
    held, peak = 0, (0, 0)
    actions = [action for place, _, _, action in table.actions() if place == rank]
    for number, action in enumerate(actions):
        cost, forward = costs[action.stage], action.kind == "F"
        kept = int(memory.after[number if forward else number - 1]) + held  # a backward frees only when it is done
        peak = max(peak, (kept, cost.forward if forward else cost.backward), key=sum)
        if holds_messages and action.kind in ("B", "I"):
            held += cost.sent + cost.returned
    return peak
