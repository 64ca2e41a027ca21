"""The memory of a rank counted exactly, stage by stage: what the sums of units that plans are priced by are held against.

    program, plan, stages ──what the rank holds──► parameters, gradients, optimizer, boundaries
                          ──a run on fake tensors──► what a microbatch keeps, what a forward and a backward take on top
                                 │
                     action table of the schedule ──walk the rank's actions──► activations and transient at the peak

Whole stages are run, a block once for each kind of arguments and replayed for its other instances, and the rank's own actions are walked
in the order of its schedule. The parts are added up, though they are not all there at the same moment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.pipelining._backward import stage_backward_input

from graphpar.cost_models import activation_memory
from graphpar.cost_models.activation_memory import attributes
from graphpar.cost_models.execution import Execution
from graphpar.cost_models.flops import tensor_bytes
from graphpar.cost_models.memory import ALLOCATOR_SLACK, MAIN_DTYPE, Memory
from graphpar.cost_models.storage_tracker import Live, storage_of, unseen
from graphpar.errors import GraphparError
from graphpar.ir.plan import Plan
from graphpar.ir.program import Block, Program, TensorInfo
from graphpar.ir.stage import Stage
from graphpar.passes.planning.prices import table_of
from graphpar.runtime.layout import R
from graphpar.runtime.stages.split_backward import splits_exactly
from graphpar.runtime.state.gradient_buckets import buckets
from graphpar.schedules.action_table import ActionTable
from graphpar.schedules.simulation import in_flight

_SIZES = (2, 3, 5)
"""Microbatch sizes of a line and of its check. A size of 1 is off the line: torch makes fewer copies where a dim has one element."""


@dataclass(frozen=True)
class Saved:
    """Bytes that one microbatch keeps between its forward and its backward: ``inside`` autograd's, ``sent`` the stage's outputs.

    A storage that is both is in ``sent`` alone.
    """

    inside: int
    sent: int

    @property
    def total(self) -> int:
        return self.inside + self.sent


@dataclass(frozen=True)
class Line:
    """Bytes for a microbatch of ``rows``: ``fixed + per_row * rows``."""

    fixed: Saved
    per_row: Saved

    def at(self, rows: int) -> Saved:
        return Saved(
            self.fixed.inside + self.per_row.inside * rows,
            self.fixed.sent + self.per_row.sent * rows,
        )


@dataclass(frozen=True)
class Passes:
    """The highest bytes of a forward, what is left after it, and the highest of a backward, in which gradients are added to older ones.

    All without parameters, their gradients, and what the stage is given.
    """

    forward: int
    kept: int
    backward: int


class Activations(activation_memory.Activations):
    """Measures the stages of one lowered program; each stage, size and distinct block once."""

    def __init__(
        self, program: Program, degrees: Mapping[str, int], *, device: str = "cpu", even_experts: bool = False
    ) -> None:
        super().__init__(program, degrees, device=device, even_experts=even_experts)
        self.own: set[int] = set()
        self.templates: dict[Any, Template] = {}
        self._saved: dict[tuple[int, int], Saved] = {}
        self._lines: dict[int, Line | None] = {}
        self._passes: dict[tuple[int, int], Passes] = {}
        self._for_weight: dict[tuple[int, int], int] = {}

    def tensor(self, name: str) -> Tensor:
        made = super().tensor(name)
        self.own.add(storage_of(made))
        return made

    def saved(self, stage: Stage, rows: int) -> Saved:
        """For a microbatch of ``rows``: on the stage's line where it has one, else measured at this size."""
        self._check_size(rows)
        if rows in _SIZES or rows == 1 or not self.program.symbolic:
            return self._measured(stage, rows)
        line = self.line(stage)
        return self._measured(stage, rows) if line is None else line.at(rows)

    def line(self, stage: Stage) -> Line | None:
        """The line on which all sizes above 1 lie; None where they don't, or the program has one size only."""
        if not self.program.symbolic:
            return None
        if stage.index not in self._lines:
            (a, b, c), (first, second, third) = _SIZES, (self._measured(stage, rows) for rows in _SIZES)
            slope = Saved((second.inside - first.inside) // (b - a), (second.sent - first.sent) // (b - a))
            line = Line(Saved(first.inside - slope.inside * a, first.sent - slope.sent * a), slope)
            self._lines[stage.index] = line if (line.at(b), line.at(c)) == (second, third) else None
        return self._lines[stage.index]

    def passes(self, stage: Stage, rows: int) -> Passes:
        """The highest points of one forward and one backward of a microbatch; a run of the whole stage."""
        self._check_size(rows)
        key = stage.index, rows
        if key not in self._passes:
            with self.ready():
                self._passes[key] = _measure_passes(self, stage, rows)
        return self._passes[key]

    def for_weight(self, stage: Stage, rows: int) -> int:
        """What a microbatch keeps from the input half of its backward (``I``) to the weight half (``W``), outputs included.

        The first stage does all of it in W, a stage that torch can't split in I (:mod:`graphpar.runtime.stages.split_backward`).
        """
        self._check_size(rows)
        if stage.index == 0:
            return self.saved(stage, rows).total
        key = stage.index, rows
        if key not in self._for_weight:
            with self.ready():
                self._for_weight[key] = _measure_for_weight(self, stage, rows)
        return self._for_weight[key]

    def _measured(self, stage: Stage, rows: int) -> Saved:
        key = stage.index, rows
        if key not in self._saved:
            with self.ready():
                self._saved[key] = _measure_saved(self, stage, rows)
        return self._saved[key]


class _Forward(activation_memory.Forward):
    """With ``kept``, blocks are replayed, and what they keep is noted there."""

    activations: Activations

    def __init__(self, activations: Activations, kept: Kept | None) -> None:
        super().__init__(activations)
        self.kept = kept

    def block(self, block: Block, prefix: str, args: tuple[Any, ...]) -> Any:
        if self.kept is None:
            return self.run_graph(block.graph, prefix, args)
        key = block.name, signature(args), self._frozen(block, prefix)
        template = self.activations.templates.get(key)
        if template is not None:
            return template.replay(args, self.kept)
        outer, self.kept = self.kept, Kept(self.activations.own)
        with self.kept.noting():
            result = self.run_graph(block.graph, prefix, args)
        inner, self.kept = self.kept, outer
        template = Template.of(args, result, inner)
        if template is not None:
            self.activations.templates[key] = template
        outer.include(inner)
        return result

    def _frozen(self, block: Block, prefix: str) -> tuple[str, ...]:
        names = [str(node.target) for node in block.graph.nodes if node.op == "get_attr"]
        parameters = [name for name in names if prefix + name in self.program.parameters]
        return tuple(name for name in parameters if not self.program.parameters[prefix + name].requires_grad)


def _measure_saved(activations: Activations, stage: Stage, rows: int) -> Saved:
    given = activations.given(stage, rows)
    kept = Kept(activations.own)
    with kept.noting():
        result = _Forward(activations, kept).run_graph(stage.graph, "", given)
        outputs = activation_memory._outputs(stage, result, given)
    others = activations.own | {storage_of(tensor) for tensor in given}
    sent = {storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in outputs}
    inside = sum(storage.nbytes() for key, storage in kept.storages.items() if key not in others and key not in sent)
    return Saved(inside + kept.inside, sum(nbytes for key, nbytes in sent.items() if key not in others))


def _measure_passes(activations: Activations, stage: Stage, rows: int) -> Passes:
    given = activations.given(stage, rows)
    for name in attributes(activations.program, stage):
        value = activations.tensor(name)
        if value.requires_grad:
            value.grad = torch.zeros_like(value)
    with Live() as live:
        outputs = activation_memory._outputs(
            stage, _Forward(activations, None).run_graph(stage.graph, "", given), given
        )
        forward, kept = live.mark()
        if activations.program.mode == "train":
            roots = [tensor for tensor in outputs if tensor.requires_grad]
            with unseen(live):
                gradients = [torch.ones_like(tensor) for tensor in roots] if stage.sends else None
            torch.autograd.backward(roots, gradients)
        backward, _ = live.mark()
    for value in activations.state.values():
        value.grad = None
    return Passes(int(forward), int(kept), int(backward))


def _measure_for_weight(activations: Activations, stage: Stage, rows: int) -> int:
    given = activations.given(stage, rows)
    values = [activations.tensor(name) for name in attributes(activations.program, stage)]
    distinct = {id(value): value for value in values if value.requires_grad}
    trained = cast(list[nn.Parameter], list(distinct.values()))
    received = [tensor for tensor in given if tensor.requires_grad]
    with Live() as live:
        outputs = activation_memory._outputs(
            stage, _Forward(activations, None).run_graph(stage.graph, "", given), given
        )
        if not splits_exactly(outputs, received, trained):
            return 0
        roots = [tensor for tensor in outputs if tensor.requires_grad]
        with unseen(live):
            gradients = [torch.ones_like(tensor) for tensor in roots] if stage.sends else None
        inputs, groups = stage_backward_input(roots, gradients, received, iter(trained))
        del inputs
        for tensor in received:
            tensor.grad = None
        kept, _ = live.now, groups
    return int(kept)


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
    held = Memory(inputs=_input_bytes(program, plan, own), **_held(program, own, execution or Execution()))
    boundaries = _boundary_bytes(program, plan, stages, own)
    if program.mode == "train":
        table = table_of(plan)
        split = {action.stage for _, _, _, action in table.actions() if action.kind == "W"}
        costs = {stage.index: _stage_cost(plan, stage, measured, own, stage.index in split) for stage in own}
        kept, transient = activation_peak(table, rank, costs, holds_messages=_holds_messages(plan))
        one = max(cost.kept for cost in costs.values()) if plan.mesh.pp > 1 else 0  # the last microbatch may be there
        transient = max(transient, _bucket_bytes(program, plan, stages, own) + one - kept)
        if not _holds_messages(plan) and len(stages) > 1:
            boundaries += max(max(cost.sent, cost.returned) for cost in costs.values())  # the last message on its way
    else:
        passes = [measured.passes(stage, plan.microbatch_size) for stage in own]
        kept = plan.microbatches * sum(each.kept for each in passes)  # what is sent lives until all of it is
        transient = max(each.forward - each.kept for each in passes)
    slack = math.ceil(ALLOCATOR_SLACK * (kept + transient))
    parts = {part.name: getattr(held, part.name) for part in fields(held)}
    return Memory(**parts | {"boundaries": boundaries, "activations": kept, "transient": transient, "slack": slack})


# ---- what is there all the time ----------------------------------------------------------------------------------


def _held(program: Program, own: Sequence[Stage], execution: Execution) -> dict[str, int]:
    """Parameters and what follows from them; a tied one is there once, or in each stage where these are sharded."""
    parameters: list[tuple[str, TensorInfo]] = []
    buffered = 0
    for stage in own:
        for name in _distinct(program, stage):
            if name in program.parameters:
                if execution.zero < 2 and any(name == known for known, _ in parameters):
                    continue
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
        "optimizer": execution.divided(round(updated * execution.optimizer.tensors), 1),
    }


def _distinct(program: Program, stage: Stage) -> Iterator[str]:
    """The names of a stage's tensors, a tied one under its first name."""
    return iter(dict.fromkeys(program.tie_of(name)[0] for name in attributes(program, stage)))


def _bucket_bytes(program: Program, plan: Plan, stages: Sequence[Stage], own: Sequence[Stage]) -> int:
    """The largest bucket: while it is filled, its gradients are there twice."""
    names = [name for stage in own for name in _distinct(program, stage) if name in program.parameters]
    trained = {name: program.parameters[name] for name in names if program.parameters[name].requires_grad}
    holders: dict[str, set[int]] = {}
    for entry in plan.stages:
        for name in _distinct(program, stages[entry.index]):
            holders.setdefault(name, set()).add(entry.rank)
    degrees = plan.mesh.degrees()
    groups: dict[tuple[tuple[str, ...], tuple[int, ...]], list[torch.Tensor]] = {}
    for name, info in reversed(trained.items()):
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
    """Of one message to each stage in each direction, which arrives ahead of time; others are counted with what is in flight."""
    rows = plan.microbatch_size
    received = sum(tensor_bytes(value.node, rows) for stage in own for value in stage.receives)
    gradients = sum(tensor_bytes(value.node, rows) for stage in own for value in stage.sends if value.requires_grad)
    return received + (gradients if program.mode == "train" else 0)


# ---- what comes and goes -----------------------------------------------------------------------------------------


def _stage_cost(plan: Plan, stage: Stage, measured: Activations, own: Sequence[Stage], split: bool) -> StageCost:
    rows = plan.microbatch_size
    saved, passes = measured.saved(stage, rows), measured.passes(stage, rows)
    places = {other.index for other in own}
    local = saved.sent if stage.index + 1 in places else 0  # what it sends is what the other one's buffer holds
    returned = sum(tensor_bytes(value.node, rows) for value in stage.receives if value.requires_grad)
    arriving = sum(tensor_bytes(value.node, rows) for value in stage.receives if stage.index - 1 not in places)
    gradients = sum(tensor_bytes(value.node, rows) for value in stage.sends if value.requires_grad)
    return StageCost(
        saved.total - local + arriving,
        max(0, passes.forward - passes.kept),
        max(0, passes.backward - passes.kept),
        max(0, measured.for_weight(stage, rows) - local) + arriving + gradients if split else None,
        saved.sent - local if stage.sends else 0,
        0 if stage.index - 1 in places else returned,
    )


def _holds_messages(plan: Plan) -> bool:
    """Whether torch waits for what a rank sends only at the end of a step: where it runs a table, and not one stage a rank."""
    return plan.actions is not None or plan.stages_per_rank > 1


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


# ---- storages ----------------------------------------------------------------------------------------------------


class Kept:
    """The storages that autograd keeps, each once; they live as long as this does, so that no other gets their identity."""

    def __init__(self, own: set[int]) -> None:
        self.own = own  # of parameters, buffers and constants, which are not counted
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.inside = 0  # bytes of storages that only replayed blocks know

    def noting(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.add, lambda tensor: tensor)

    def add(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.own:
            self.storages[storage._cdata] = storage
        return tensor

    def include(self, other: Kept) -> None:
        self.storages |= other.storages
        self.inside += other.inside


@dataclass(frozen=True)
class _Result:
    """A block's output: a view of its argument ``source``, or of the new storage ``-1 - source``; ``same``: that argument itself."""

    source: int
    same: bool
    view: bool
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Template:
    """What a block does to memory, for arguments of one kind."""

    inside: int  # bytes kept that nobody else sees
    taken: tuple[int, ...]  # arguments that are kept
    made: tuple[tuple[int, bool], ...]  # each new storage of the outputs: bytes, whether it is kept
    results: tuple[_Result, ...]
    alone: bool

    @staticmethod
    def of(args: Sequence[Any], result: Any, kept: Kept) -> Template | None:
        """None for what can't be made again, of which a block hardly ever returns any.

        That is an output that is no tensor, has another dtype than what it views, or lies in a storage in no usual way.
        """
        outputs = result if isinstance(result, tuple | list) else (result,)
        if not all(isinstance(output, Tensor) for output in outputs):
            return None
        known: dict[int, int] = {}
        for index, argument in enumerate(args):
            if isinstance(argument, Tensor):
                known.setdefault(storage_of(argument), index)
        made: list[tuple[int, bool]] = []
        results: list[_Result] = []
        for output in outputs:
            storage = output.untyped_storage()
            if storage._cdata not in known:
                known[storage._cdata] = -1 - len(made)
                made.append((storage.nbytes(), storage._cdata in kept.storages))
            source = known[storage._cdata]
            same = source >= 0 and output is args[source]
            view = output._is_view()
            if not same and not (
                _is_view_of(args[source], output) if source >= 0 else _is_first(output, source, results)
            ):
                return None
            results.append(
                _Result(
                    source, same, view, tuple(output.shape), output.stride(), int(output.storage_offset()),
                    output.dtype, output.requires_grad,
                )
            )  # fmt: skip
        inside = sum(storage.nbytes() for key, storage in kept.storages.items() if key not in known)
        taken = tuple(index for key, index in known.items() if index >= 0 and key in kept.storages)
        return Template(inside + kept.inside, taken, tuple(made), tuple(results), isinstance(result, Tensor))

    def replay(self, args: Sequence[Any], kept: Kept) -> Any:
        kept.inside += self.inside
        for index in self.taken:
            kept.add(args[index])
        bases: dict[int, Tensor] = {}
        outputs = [args[r.source] if r.same else self._output(r, args, bases) for r in self.results]
        for index, (_, is_kept) in enumerate(self.made):
            if is_kept:
                kept.add(bases[-1 - index])
        return outputs[0] if self.alone else tuple(outputs)

    def _output(self, result: _Result, args: Sequence[Any], bases: dict[int, Tensor]) -> Tensor:
        with torch.no_grad():
            if result.source < 0 and not result.view:
                value = torch.empty_strided(result.shape, result.stride, dtype=result.dtype)
                bases[result.source] = value
            else:
                if result.source < 0 and result.source not in bases:
                    elements = self.made[-1 - result.source][0] // result.dtype.itemsize
                    bases[result.source] = torch.empty(elements, dtype=result.dtype)
                base = args[result.source] if result.source >= 0 else bases[result.source]
                value = base.detach().as_strided(result.shape, result.stride, result.offset)
        return value.requires_grad_(result.requires_grad)


def _is_view_of(argument: Tensor, output: Tensor) -> bool:
    return output._is_view() and output.dtype == argument.dtype


def _is_first(output: Tensor, source: int, results: Sequence[_Result]) -> bool:
    """Whether ``output`` can be made with its new storage: a view of elements of its dtype, or a tensor that fills it."""
    others = [result for result in results if result.source == source]
    nbytes, itemsize = output.untyped_storage().nbytes(), output.dtype.itemsize
    if output._is_view():
        return nbytes % itemsize == 0 and all(result.dtype == output.dtype for result in others)
    last = sum((size - 1) * stride for size, stride in zip(output.shape, output.stride()))
    filled = (last + 1) * itemsize if output.numel() else 0
    return not others and output.storage_offset() == 0 and nbytes == filled


def signature(args: Sequence[Any]) -> tuple[Any, ...]:
    """All of a block's arguments that its memory depends on."""
    first: dict[int, int] = {}
    parts: list[Any] = []
    for index, argument in enumerate(args):
        if isinstance(argument, Tensor):
            alias = first.setdefault(storage_of(argument), index)
            layout = tuple(argument.shape), argument.stride(), int(argument.storage_offset())
            parts.append((alias, layout, argument.dtype, argument.requires_grad))
        else:
            parts.append(argument)
    return tuple(parts)
