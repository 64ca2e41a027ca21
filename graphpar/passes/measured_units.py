"""``RankUnits``: a lowered program, split at every legal split point into units, each with its work and its memory."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, fx

from graphpar.cost_models.activation_memory import Activations, attributes, widest_window
from graphpar.cost_models.execution import Execution
from graphpar.cost_models.flops import cached_bytes, tensor_bytes
from graphpar.cost_models.kept_results import Recomputations
from graphpar.cost_models.offloaded_units import offloaded
from graphpar.cost_models.pipeline_units import ROWS, Bytes, Held, Reach, Repeated, Unit, UnitClass, UnitMemory
from graphpar.cost_models.repeated_work import repeated_work
from graphpar.cost_models.work import Size
from graphpar.cost_models.workload import Works
from graphpar.errors import GraphparError
from graphpar.ir.batch_sizes import batch_coefficients
from graphpar.ir.program import Program, value_of
from graphpar.ir.recomputation import Recomputation
from graphpar.ir.split_points import SplitAt, SplitPoint
from graphpar.ir.stage import Stage
from graphpar.operators.gradients import blocks_without_backward, is_read_in_backward
from graphpar.operators.parameter_casts import cast_parameters, working_dtypes
from graphpar.passes.fsdp_units import unit_of_each
from graphpar.passes.normalize.applications import placed_with
from graphpar.passes.parallel_products import with_joined
from graphpar.passes.split import position_of, positions_of, split, split_candidates
from graphpar.runtime.axes import AXIS
from graphpar.runtime.layout import R, Shard
from graphpar.runtime.option_kinds import GENERATE, INFER, TRAIN

_SplitPoints = tuple[tuple[int, SplitAt], ...]
_Signature = tuple[int, tuple[str | None, ...]]
"""The number of a stage's :func:`_operators`, and how each block that it calls is recomputed."""
_Memories = dict[_Signature, Callable[[], UnitMemory]]


def unit_split_points(program: Program, required: Sequence[SplitAt] = ()) -> list[tuple[int, SplitAt]]:
    """Return every split point at which a stage may begin, and those that are ``required``, each with its position in the root graph."""
    nodes, placed = list(program.graph.nodes), placed_with(program)
    blocks: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        if node.op == "call_module" and node not in placed:
            blocks.setdefault(str(node.target), []).append(index)
    if len(blocks) < 2:
        found = [(index, SplitAt(path)) for index, path in split_candidates(program, len(nodes))]
    else:
        found = [(places[0], SplitAt(path)) for path, places in blocks.items()]
        end = SplitAt(max(blocks, key=lambda path: blocks[path][-1]), SplitPoint.END)
        found.append((position_of(program, end, placed), end))  # after what redistributes its result
    work = [index for index, node in enumerate(nodes) if node not in placed and _has_work(node)]
    pinned = {positions_of(program, [point])[0]: point for point in required}
    if pinned:
        split(program, sorted(pinned))  # so that an error speaks of the user's stages, not of units
    legal: list[tuple[int, SplitAt]] = []
    begin = 0
    for position, point in sorted((dict(found) | pinned).items()):
        if position in pinned or (any(begin <= index < position for index in work) and work[-1] >= position):
            legal.append((position, point))
            begin = position
    if _can_split(program, [position for position, _ in legal]):
        return legal
    return [(position, point) for position, point in legal if position in pinned or _can_split(program, [position])]


def _has_work(node: fx.Node) -> bool:
    return node.op == "call_module" or (
        node.op == "call_function" and any(a.op == "get_attr" for a in node.all_input_nodes)
    )


def _can_split(program: Program, positions: Sequence[int]) -> bool:
    try:
        split(program, positions)
    except GraphparError:
        return False
    return True


class _How(NamedTuple):
    """What the work and memory of units depend on besides the program and which blocks recompute, as :class:`Execution` has it."""

    device: str
    fused: bool
    compiled: bool
    recasts: bool
    gradient_bytes: int | None
    rings: bool
    joined: bool
    travelling: bool
    units: tuple[str, ...] | None


class RankUnits:
    """The units of a rank's program, made and measured once for each way to run it.

    Args:
        program: the result of :func:`graphpar.passes.sharding.shard.shard`.
        degrees: ranks by axis.
        like: those of a program with the same blocks.
    """

    def __init__(self, program: Program, degrees: Mapping[str, int], like: RankUnits | None = None) -> None:
        self.program, self.degrees = program, degrees
        self._split_points: dict[tuple[SplitAt, ...], _SplitPoints] = {}
        self._memories: dict[tuple[str, bool], _Memories] = (
            {} if like is None else like._memories
        )  # equal units have equal ones, whatever else there is
        self._numbers: dict[tuple[Hashable, ...], int] = {} if like is None else like._numbers
        self._parts: dict[tuple[str, bool, tuple[str, ...] | None, _SplitPoints], _Parts] = {}
        self._measured: dict[tuple[_How, _SplitPoints], _Measured] = {}
        self._units: dict[tuple[_How, tuple[SplitAt, ...], tuple[tuple[str, str], ...], bool], list[Unit]] = {}

    def of(
        self, execution: Execution | None = None, *, device: str = "cpu", required: Sequence[SplitAt] = ()
    ) -> list[Unit]:
        """Return the units, in order.

        Args:
            execution: whether kernels are fused or blocks compiled, the dtype of gradients, which blocks recompute, and what is offloaded.
            device: ``cpu`` or ``cuda``, as :class:`Activations` takes it.
            required: further split points at which a unit begins.
        """
        run = execution or Execution()
        how = _How(
            device,
            run.fused,
            run.compiled,
            run.recasts,
            run.gradient_bytes,
            run.rings,
            run.joined,
            run.travelling,
            run.units,
        )
        key = how, tuple(required), run.blocks, "activations" in run.offload
        if key not in self._units:
            if "activations" in run.offload:
                found = offloaded(self.of(replace(run, offload=()), device=device, required=required))
            else:
                found = self._made(how, tuple(required)).units(run.blocks)
            self._units[key] = found
        return self._units[key]

    def _made(self, how: _How, required: tuple[SplitAt, ...]) -> _Measured:
        if required not in self._split_points:
            self._split_points[required] = tuple(unit_split_points(self.program, required))
        key = how, self._split_points[required]  # pinned split points may be among those found anyway
        if key not in self._measured:
            memories = self._memories.setdefault((how.device, how.recasts), {})
            of_parts = how.device, how.recasts, how.units, key[1]
            if of_parts not in self._parts:
                like = next((parts for (device, *_), parts in self._parts.items() if device == how.device), None)
                self._parts[of_parts] = _Parts(self.program, self.degrees, how, key[1], self._numbers, like)
            self._measured[key] = _Measured(self.program, self.degrees, how, self._parts[of_parts], memories)
        return self._measured[key]


class _Parts:
    """The stages of a lowered program between ``split_points``, and what they hold and send, however products and collectives run.

    Args:
        numbers: those that are known of stages' operators.
        like: parts of the same program, whose blocks are recomputed in the same ways.
    """

    def __init__(
        self,
        program: Program,
        degrees: Mapping[str, int],
        how: _How,
        split_points: _SplitPoints,
        numbers: dict[tuple[Hashable, ...], int],
        like: _Parts | None,
    ) -> None:
        positions = [position for position, _ in split_points]
        self.begins = list(zip([0, *positions], [None, *(point for _, point in split_points)]))
        self.units = how.units
        same = like if like is not None and (like.begins, like.units) == (self.begins, self.units) else None
        self.stages: list[Stage] = split(program, positions) if same is None else same.stages
        self.casts = cast_parameters(program) if program.mode == "train" and not how.recasts else {}
        working = working_dtypes(program) if program.mode == "train" else {}
        self.recomputations: Recomputations = (
            Recomputations(program, degrees, how.device) if like is None else like.recomputations
        )
        names = [{program.tie_of(name)[0] for name in attributes(program, stage)} for stage in self.stages]
        holders = Counter(name for each in names for name in each)
        several = {name for name, count in holders.items() if count > 1}
        self.together: Mapping[str, object] = (
            unit_of_each(program, split(program, [])[0], how.units) if same is None else same.together
        )
        read = _read_in_backward(program)
        self.held = [
            _held(program, degrees, stage, several, self.casts, working, read, self.together) for stage in self.stages
        ]
        gathered = [{self.together.get(name) for name in each} - {None} for each in names]
        self.joins = [False, *(bool(before & after) for before, after in itertools.pairwise(gathered))]
        self.inputs = [_inputs(program, stage) for stage in self.stages]
        self.sends = [_sends(program, stage) for stage in self.stages]
        ends = _sizes(program.graph.output_node().all_input_nodes) if program.mode == INFER else None
        self.results = [*[None] * (len(self.stages) - 1), ends]
        self.caches = [_cache(program, stage) for stage in self.stages]
        self.calls = [
            [str(node.target) for node in stage.graph.nodes if node.op == "call_module"] for stage in self.stages
        ]
        self.numbers: list[int] = (
            [numbers.setdefault(_operators(program, stage), len(numbers)) for stage in self.stages]
            if same is None
            else same.numbers
        )


class _Measured:
    """The units of a lowered program, and what was measured of them, however their blocks are recomputed."""

    def __init__(
        self, program: Program, degrees: Mapping[str, int], how: _How, parts: _Parts, memories: _Memories
    ) -> None:
        self.program, self.degrees, self.how, self.parts, self.memories = program, degrees, how, parts, memories
        # Seconds are those of the program that is printed; its memory is that of the collectives and products by themselves.
        noted, self.noted = with_joined(program, parts.stages, whole=how.joined, rings=how.rings)
        self.works = Works(
            noted, degrees, fused=how.fused, gradient_bytes=how.gradient_bytes, compiled=how.compiled, recasts=how.recasts,
            travelling=how.travelling,
        )  # fmt: skip
        self.kinds: dict[tuple[_Signature, frozenset[str]], UnitClass] = {}

    def units(self, blocks: Iterable[tuple[str, str]]) -> list[Unit]:
        """Return the units, in order, where ``blocks`` says how blocks are recomputed; equal ones are of one class."""
        parts = self.parts
        recomputed = parts.recomputations.of(dict(blocks))
        activations = Activations(
            self.program,
            self.degrees,
            device=self.how.device,
            even_experts=True,
            recomputed=recomputed,
            casts=parts.casts,
        )
        kinds = {path: how.kind for path, how in recomputed.items()}
        shared: set[str] = set()
        units = []
        for number, (stage, (position, point)) in enumerate(zip(parts.stages, parts.begins)):
            noted, again = self.noted[number], shared & set(stage.recomputed)
            signature = parts.numbers[number], tuple(map(kinds.get, parts.calls[number]))
            key = signature, frozenset(again)
            if key not in self.kinds:
                measure = self.memories.setdefault(signature, functools.cache(partial(_memory, activations, stage)))
                plain = {path for path, how in recomputed.items() if not how.compiles}
                shards = {path for path, how in recomputed.items() if how.gathers}
                work = self.works.of(noted.graph, again, plain, shards)
                self.kinds[key] = UnitClass(work, parts.sends[number], measure, self._repeated(noted, recomputed))
            shared |= set(stage.recomputed)
            held, buffers = parts.held[number]
            kind, inputs, cache = self.kinds[key], parts.inputs[number], parts.caches[number]
            how = parts.joins[number], bool(parts.calls[number]), parts.results[number]
            units.append(Unit(point, position, stage.modules, kind, held, buffers, inputs, cache, stage, *how))
        return units

    def _repeated(self, stage: Stage, recomputed: Mapping[str, Recomputation]) -> Repeated:
        """Return what the blocks of ``stage`` run again; fused operators have no Python around them."""
        found = Repeated(repeated_work(self.works, stage.graph, recomputed))
        for node in stage.graph.nodes:
            how = recomputed.get(str(node.target)) if node.op == "call_module" else None
            fused = self.how.fused or (self.how.compiled and how is not None and how.compiles)
            if how is None or fused:
                continue
            if (
                how.pointwise
            ):  # a third of what selective recomputation does around each operator, and less in the backward
                block = self.program.block_of(node)
                again = sum(each.op == "call_function" and each.name not in how.nodes for each in block.graph.nodes)
                found += Repeated(hooked=again, watched=(self.parts.recomputations.dispatched(block)[0] // 3, 0))
            elif not how.by_hooks:
                counts = self.parts.recomputations.dispatched(self.program.block_of(node))
                found += Repeated(hooked=counts[1], watched=counts if how.keeps is not None else (0, 0))
        return found


def _read_in_backward(program: Program) -> set[str]:
    """Return the parameters that a backward reads; those of blocks that have one count as read."""
    once = tuple(f"{path}." for path in blocks_without_backward(program))
    own = {name for name, info in program.parameters.items() if info.requires_grad or not name.startswith(once)}
    read = {str(node.target): is_read_in_backward(node) for node in program.graph.nodes if node.op == "get_attr"}
    return {name for name in own if read.get(name, True)}


def _operators(program: Program, stage: Stage) -> tuple[Hashable, ...]:
    """Return a key that is equal for stages that do the same work: their operators, shapes, and data flow."""
    places = {node: place for place, node in enumerate(stage.graph.nodes)}
    rows = []
    for node in stage.graph.nodes:
        target = {"call_module": node.meta.get("block"), "call_function": node.target}.get(node.op, "")
        value = value_of(node)
        shape = (tuple(map(str, value.shape)), str(value.dtype)) if isinstance(value, Tensor) else ()
        info = program.parameters.get(str(node.target)) if node.op == "get_attr" else None
        frozen = node.op == "get_attr" and not (info is not None and info.requires_grad)
        rows.append((node.op, target, shape, frozen, tuple(places[a] for a in node.all_input_nodes)))
    sides = [tuple(boundary.requires_grad for boundary in side) for side in (stage.receives, stage.sends)]
    return tuple(rows), *sides


def _memory(activations: Activations, stage: Stage) -> UnitMemory:
    program = activations.program
    sizes = ROWS if program.symbolic else [program.batch]
    if program.mode == GENERATE:  # a step is one position, but a prompt comes before
        sizes = [widest_window(program)]
    first, *more = activations.reaches(stage, sizes)
    line = {
        name: Bytes.through(getattr(first, name), getattr(more[-1], name)) if more else Bytes(getattr(first, name))
        for name in Reach._fields
        if name not in ("held", "splits")
    }
    if program.mode != TRAIN:  # nothing is kept but what the running unit received, and that while it runs
        line["forward"] = (
            Bytes.through(*((reach.forward + reach.received) for reach in (first, more[-1])))
            if more
            else (Bytes(first.forward + first.received))
        )
        line["received"] = Bytes(0.0)
    return UnitMemory(held=first.held, splits=first.splits, **line)  # type: ignore[arg-type]


def _sends(program: Program, stage: Stage) -> tuple[tuple[Size, bool], ...]:
    """Return for each sent value its size, and whether its gradient comes back."""
    sizes = _sizes([boundary.node for boundary in stage.sends])
    gradients = [boundary.requires_grad and program.mode == TRAIN for boundary in stage.sends]
    return tuple(zip(sizes, gradients))


def _sizes(nodes: Iterable[fx.Node]) -> tuple[Size, ...]:
    """Return the bytes of the value of each node."""
    return tuple(
        Size(float(tensor_bytes(node, 1)), int(any(each is not None for each in batch_coefficients(node))))
        for node in nodes
    )


def _inputs(program: Program, stage: Stage) -> dict[str, Bytes]:
    """Return the bytes of each root input that ``stage`` takes."""
    found = {}
    for name in stage.inputs:
        spec = program.input(name)
        others = math.prod(size for dim, size in enumerate(spec.shape) if dim != spec.batch_dim) * spec.dtype.itemsize
        if program.mode == GENERATE:
            found[name] = Bytes(float(others * widest_window(program)))
            continue
        found[name] = Bytes(float(others)) if spec.batch_dim is None else Bytes(0.0, float(others))
    return found


def _cache(program: Program, stage: Stage) -> int:
    """Return the bytes of the cache of all attention of ``stage``."""
    blocks = [program.block_of(node).graph for node in stage.graph.nodes if node.op == "call_module"]
    return sum(cached_bytes(node) or 0 for graph in (stage.graph, *blocks) for node in graph.nodes)


def _held(
    program: Program,
    degrees: Mapping[str, int],
    stage: Stage,
    several: Collection[str],
    casts: Mapping[str, torch.dtype],
    working: Mapping[str, torch.dtype],
    read: Collection[str],
    together: Mapping[str, object],
) -> tuple[tuple[Held, ...], dict[str, int]]:
    """Return the parameters of a unit, grouped by how their gradients are reduced, and the bytes of its buffers and constants.

    ``several``: the parameters that other units hold too, under this name or a tied one; ``casts``: those that are read in one other dtype;
    ``working``: those that are stored in it where ranks update pieces; ``read``: those that a backward reads; ``together``: the unit of
    ZeRO-3 of each that is not gathered with the stage.
    """
    train = program.mode == "train"
    groups: dict[tuple[tuple[str, ...], int, bool, int, int, tuple[str, ...], bool, bool], list[int]] = {}
    tied: list[Held] = []
    buffers: dict[str, int] = {}
    for name in dict.fromkeys(program.tie_of(name)[0] for name in attributes(program, stage)):
        if name not in program.parameters:
            buffers[name] = program.tensor_info(name).nbytes
            continue
        info = program.parameters[name]
        axes = tuple(
            sorted(axis for axis, kind in info.spec if kind == R and AXIS[axis].compute and degrees.get(axis, 1) > 1)
        )
        apart = tuple(axis for axis, kind in info.spec if AXIS[axis].exchanges and isinstance(kind, Shard))
        trained, itemsize = train and info.requires_grad, info.dtype.itemsize
        copied = max((casts[each].itemsize for each in program.tie_of(name) if each in casts), default=0)
        whole = working[name].itemsize if name in working else 0
        if name in several:
            rest = name not in together
            tied.append(
                Held(axes, info.numel, info.nbytes, itemsize, trained, name, copied, apart, working=whole, rest=rest)
            )
        else:
            key = axes, itemsize, trained, copied, whole, apart, name in read, name not in together
            groups.setdefault(key, []).append(info.numel)
    alone = [
        Held(
            axes,
            sum(sizes),
            sum(sizes) * itemsize,
            itemsize,
            trained,
            copied=copied,
            working=whole,
            apart=apart,
            backward=backward,
            largest=max(sizes),
            rest=rest,
            count=len(sizes),
        )
        for (axes, itemsize, trained, copied, whole, apart, backward, rest), sizes in groups.items()
    ]
    return (*alone, *tied), buffers
