"""``units_of``: a lowered program, split at every legal split point into units, each with its work and its memory."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.cost_models.activation_memory import Activations, Reach, attributes, widest_window
from graphpar.cost_models.execution import Execution
from graphpar.cost_models.flops import cached_bytes, tensor_bytes
from graphpar.cost_models.kept_results import Recomputations
from graphpar.cost_models.offloaded_units import offloaded
from graphpar.cost_models.pipeline_units import ROWS, Bytes, Held, Repeated, Unit, UnitClass, UnitMemory
from graphpar.cost_models.repeated_work import repeated_work
from graphpar.cost_models.work import Size
from graphpar.cost_models.workload import Works
from graphpar.errors import GraphparError
from graphpar.ir.program import Program, batch_coefficients, value_of
from graphpar.ir.recomputation import GATHERS, Recomputation
from graphpar.ir.split_points import SplitAt, SplitPoint
from graphpar.ir.stage import Stage
from graphpar.operators.gradients import blocks_without_backward
from graphpar.operators.parameter_casts import cast_parameters
from graphpar.passes.normalize.frozen_networks import placed_with
from graphpar.passes.sharding.shard import Sharded
from graphpar.passes.split import positions_of, split, split_candidates
from graphpar.runtime.axes import AXIS
from graphpar.runtime.layout import R, Shard
from graphpar.runtime.modes import GENERATE, TRAIN


def unit_split_points(program: Program, wanted: Sequence[SplitAt] = ()) -> list[tuple[int, SplitAt]]:
    """Return every split point at which a stage may begin, and those that are ``wanted``, each with its position in the root graph."""
    nodes, placed = list(program.graph.nodes), placed_with(program)
    blocks: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        if node.op == "call_module" and node not in placed:
            blocks.setdefault(str(node.target), []).append(index)
    if len(blocks) < 2:
        found = [(index, SplitAt(path)) for index, path in split_candidates(program, len(nodes))]
    else:
        found = [(places[0], SplitAt(path)) for path, places in blocks.items()]
        last, places = max(blocks.items(), key=lambda entry: entry[1][-1])
        found.append((places[-1] + 1, SplitAt(last, SplitPoint.END)))
    work = [index for index, node in enumerate(nodes) if node not in placed and _has_work(node)]
    pinned = {positions_of(program, [point])[0]: point for point in wanted}
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


def units_of_ranks(
    sharded: Sharded, execution: Execution | None = None, *, device: str = "cpu", wanted: Sequence[SplitAt] = ()
) -> list[Unit]:
    """Return :func:`units_of` the program that a rank runs, cached on ``sharded`` with what was measured of them."""
    run = execution or Execution()
    measured = device, run.fused, run.compiled, run.recasts, run.gradient_bytes, run.rings, run.joined
    asked: tuple[Any, ...] = *measured, run.blocks, tuple(wanted)
    if asked not in sharded.units:
        if ("split points", *wanted) not in sharded.units:
            sharded.units["split points", *wanted] = unit_split_points(sharded.local, wanted)
        split_points = sharded.units["split points", *wanted]
        key = *measured, tuple(split_points)  # pinned split points may be among those found anyway
        if key not in sharded.units:
            made = _Measured(sharded.local, sharded.sharding.all_degrees, run, device, split_points)
            made.memories = sharded.units.setdefault(("memories", device), made.memories)  # whatever is beside what
            sharded.units[key] = made
        sharded.units[asked] = sharded.units[key].units(run.blocks)
    if "activations" in run.offload:
        if ("offloaded", *asked) not in sharded.units:
            sharded.units["offloaded", *asked] = offloaded(sharded.units[asked])
        asked = "offloaded", *asked
    found: list[Unit] = sharded.units[asked]
    return found


def units_of(
    program: Program,
    degrees: Mapping[str, int],
    execution: Execution | None = None,
    *,
    device: str = "cpu",
    wanted: Sequence[SplitAt] = (),
) -> list[Unit]:
    """Return the units of a lowered program, in order.

    Args:
        program: the result of :func:`graphpar.passes.sharding.shard.shard`.
        degrees: ranks by axis.
        execution: whether kernels are fused or blocks compiled, the dtype of gradients, and which blocks are recomputed.
        device: ``cpu`` or ``cuda``, as :class:`Activations` takes it.
        wanted: further split points at which a unit begins.
    """
    run = execution or Execution()
    return _Measured(program, degrees, run, device, unit_split_points(program, wanted)).units(run.blocks)


class _Measured:
    """The units of a lowered program between ``split_points``, and what was measured of them, however their blocks are recomputed."""

    def __init__(
        self,
        program: Program,
        degrees: Mapping[str, int],
        execution: Execution,
        device: str,
        split_points: Sequence[tuple[int, SplitAt]],
    ) -> None:
        positions = [position for position, _ in split_points]
        self.program, self.degrees, self.device = program, degrees, device
        self.stages = split(program, positions)
        self.begins = list(zip([0, *positions], [None, *(point for _, point in split_points)]))
        self.works = Works(
            program, degrees, fused=execution.fused, gradient_bytes=execution.gradient_bytes, rings=execution.rings,
            joined=execution.joined, compiled=execution.compiled, recasts=execution.recasts,
        )  # fmt: skip
        self.python = not (execution.fused or execution.compiled)
        self.casts = cast_parameters(program) if program.mode == "train" and not execution.recasts else {}
        self.recomputations = Recomputations(program, degrees, device)
        self.kinds: dict[Any, UnitClass] = {}
        self.memories: dict[Any, Callable[[], UnitMemory]] = {}
        names = [{program.tie_of(name)[0] for name in attributes(program, stage)} for stage in self.stages]
        holders = Counter(name for each in names for name in each)
        several = {name for name, count in holders.items() if count > 1}
        once = tuple(f"{path}." for path in blocks_without_backward(program))
        self.held = [_held(program, degrees, stage, several, self.casts, once) for stage in self.stages]
        self.inputs = [_inputs(program, stage) for stage in self.stages]
        self.sends = [_sends(program, stage) for stage in self.stages]
        self.caches = [_cache(program, stage) for stage in self.stages]

    def units(self, blocks: Iterable[tuple[str, str]]) -> list[Unit]:
        """Return the units, in order, where ``blocks`` says how blocks are recomputed; equal ones are of one class."""
        recomputed = self.recomputations.of(dict(blocks))
        activations = Activations(
            self.program, self.degrees, device=self.device, even_experts=True, recomputed=recomputed, casts=self.casts
        )
        shared: set[str] = set()
        units = []
        for number, (stage, (position, point)) in enumerate(zip(self.stages, self.begins)):
            again = shared & set(stage.recomputed)
            signature = _signature(self.program, stage, recomputed)
            key = signature, frozenset(again)
            if key not in self.kinds:
                measure = self.memories.setdefault(signature, functools.cache(partial(_memory, activations, stage)))
                work = self.works.of(stage.graph, without=again)
                self.kinds[key] = UnitClass(work, self.sends[number], measure, self._repeated(stage, recomputed))
            shared |= set(stage.recomputed)
            held, buffers = self.held[number]
            kind, inputs, cache = self.kinds[key], self.inputs[number], self.caches[number]
            units.append(Unit(point, position, stage.modules, kind, held, buffers, inputs, cache, stage))
        return units

    def _repeated(self, stage: Stage, recomputed: Mapping[str, Recomputation]) -> Repeated:
        """Return what the blocks of ``stage`` run again; fused operators have no Python around them."""
        found = Repeated(repeated_work(self.works, stage.graph, recomputed))
        for node in stage.graph.nodes:
            how = recomputed.get(str(node.target)) if node.op == "call_module" else None
            if how is not None and how.kind != GATHERS and self.python:
                counts = self.recomputations.dispatched(self.program.block_of(node))
                found += Repeated(hooked=counts[1], watched=counts if how.keeps is not None else (0, 0))
        return found


def _signature(program: Program, stage: Stage, recomputed: Mapping[str, Recomputation]) -> Any:
    """Return a key that is equal for stages that do the same work: their operators, shapes, and data flow."""
    places = {node: place for place, node in enumerate(stage.graph.nodes)}
    rows = []
    for node in stage.graph.nodes:
        target = {"call_module": node.meta.get("block"), "call_function": node.target}.get(node.op, "")
        value = value_of(node)
        shape = (tuple(map(str, value.shape)), str(value.dtype)) if isinstance(value, Tensor) else ()
        info = program.parameters.get(str(node.target)) if node.op == "get_attr" else None
        frozen = node.op == "get_attr" and not (info is not None and info.requires_grad)
        how = recomputed.get(str(node.target)) if node.op == "call_module" else None
        rows.append((node.op, target, how and how.kind, shape, frozen, tuple(places[a] for a in node.all_input_nodes)))
    return tuple(rows), tuple(b.requires_grad for b in stage.receives), tuple(b.requires_grad for b in stage.sends)


def _memory(activations: Activations, stage: Stage) -> UnitMemory:
    program = activations.program
    sizes = ROWS if program.symbolic else [program.batch]
    if program.mode == GENERATE:  # a step is one position, but a prompt comes before
        sizes = [widest_window(program)]
    first, *more = activations.reaches(stage, sizes)
    line = {
        name: Bytes.through(getattr(first, name), getattr(more[-1], name)) if more else Bytes(getattr(first, name))
        for name in Reach.__dataclass_fields__
        if name != "held"
    }
    if program.mode != TRAIN:  # nothing is kept but what the running unit received, and that while it runs
        line["forward"] = (
            Bytes.through(*((reach.forward + reach.received) for reach in (first, more[-1])))
            if more
            else (Bytes(first.forward + first.received))
        )
        line["received"] = Bytes(0.0)
    return UnitMemory(held=first.held, **line)  # type: ignore[arg-type]


def _sends(program: Program, stage: Stage) -> tuple[tuple[Size, bool], ...]:
    """Return for each sent value its size, and whether its gradient comes back."""
    found = []
    for boundary in stage.sends:
        scales = any(c is not None for c in batch_coefficients(boundary.node))
        size = Size(float(tensor_bytes(boundary.node, 1)), 1 if scales else 0)
        found.append((size, boundary.requires_grad and program.mode == "train"))
    return tuple(found)


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
    once: tuple[str, ...],
) -> tuple[tuple[Held, ...], dict[str, int]]:
    """Return the parameters of a unit, grouped by how their gradients are reduced, and the bytes of its buffers and constants.

    ``several``: the parameters that other units hold too, under this name or a tied one; ``casts``: those that are read in one other dtype;
    ``once``: prefixes of those in blocks without a backward.
    """
    train = program.mode == "train"
    groups: dict[tuple[tuple[str, ...], int, bool, int, tuple[str, ...], bool], list[int]] = {}
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
        if name in several:
            tied.append(Held(axes, info.numel, info.nbytes, itemsize, trained, name, copied, apart))
        else:
            backward = not (name.startswith(once) and not trained)
            groups.setdefault((axes, itemsize, trained, copied, apart, backward), []).append(info.numel)
    alone = [
        Held(
            axes,
            sum(sizes),
            sum(sizes) * itemsize,
            itemsize,
            trained,
            copied=copied,
            apart=apart,
            backward=backward,
            largest=max(sizes),
        )
        for (axes, itemsize, trained, copied, apart, backward), sizes in groups.items()
    ]
    return (*alone, *tied), buffers
