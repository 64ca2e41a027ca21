"""``split``: the root graph becomes stages, one after the other, at split points.

    root graph ──split points──► stage of each node ──liveness──► what crosses each boundary ──► one graph a stage

How a value reaches other stages:
- root inputs and counts go straight to the stages that use them;
- values that depend on no parameter (masks, rotary tables) are recomputed on each stage that needs them;
- everything else is sent to the next stage, and relayed by the stages between.

A module that is applied several times is placed by its first application: later ones run on the stages that hold its weights, as
soon as their inputs are there. A frozen network is placed by the trained one beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.errors import GraphparError, near_match
from graphpar.ir.batch_sizes import batch_coefficients
from graphpar.ir.program import Helper, Program, operator_name, value_of, where
from graphpar.ir.split_points import SplitAt, SplitPoint
from graphpar.ir.stage import Boundary, Stage
from graphpar.operators.gradients import differentiable_nodes, gradients_back
from graphpar.operators.naming import unique_names, value_name
from graphpar.passes.normalize.applications import followed, placed_with
from graphpar.passes.normalize.buffer_uses import BufferUses, written_buffers_of
from graphpar.passes.normalize.functional import is_inplace, written_buffers
from graphpar.passes.normalize.outline import local_size
from graphpar.passes.normalize.simplify import remove_dead_code
from graphpar.runtime.layout import ExpertRows
from graphpar.text import is_at_or_below, is_below

# ---- split points ----------------------------------------------------------------------------------------------


def positions_of(program: Program, split_points: Sequence[SplitAt]) -> list[int]:
    """Return the index in the root graph's node list at which each stage after the first begins.

    Raises:
        GraphparError: a split point names no module between blocks, or a stage would be empty.
    """
    nodes, placed = list(program.graph.nodes), placed_with(program)
    found: dict[int, SplitAt] = {}
    for point in split_points:
        position = position_of(program, point, placed)
        if position in found:
            first = found[position]
            raise GraphparError(
                f"Split points {first.path!r} ({first.where.value}) and {point.path!r} ({point.where.value}) are the same place, "
                "so the stage between them would be empty."
            )
        found[position] = point
    work = [
        index
        for index, node in enumerate(nodes)
        if node not in placed and (node.op == "call_module" or _has_parameters(node))
    ]
    ordered = sorted(found)
    for stage, (begin, end) in enumerate(zip([0, *ordered], [*ordered, len(nodes)])):
        if found and not any(begin <= index < end for index in work):
            point = found.get(begin) or found[end]
            raise GraphparError(
                f"Stage {stage} would be empty: no module with parameters is between its split points "
                f"(near {point.path!r}, {point.where.value})."
            )
    return ordered


def position_of(program: Program, point: SplitAt, placed: Mapping[fx.Node, fx.Node]) -> int:
    """Return the index in the root graph's node list of the first node after ``point``; ``placed``: of :func:`placed_with`.

    Raises:
        GraphparError: it names no module between blocks.
    """
    nodes = list(program.graph.nodes)
    inside = [index for index, node in enumerate(nodes) if node not in placed and _belongs(node, point.path)]
    if not inside:  # it may be a part of a network beside another
        inside = sorted({nodes.index(followed(placed, node)) for node in nodes if _belongs(node, point.path)})
    if not inside:
        raise GraphparError(_no_such_module(program, point.path))
    position = inside[0] if point.where is SplitPoint.BEGINNING else inside[-1] + 1
    while "transition" in nodes[position - 1].meta and _of_parameter(nodes[position - 1]):
        position -= 1  # a collective on a parameter belongs to the operator that uses its result
    return position


def _belongs(node: fx.Node, path: str) -> bool:
    if node.op not in ("call_function", "call_module"):
        return False
    return any(is_at_or_below(entry[0], path) for entry in node.meta.get("module_stack", ()))


def _no_such_module(program: Program, path: str) -> str:
    used = sorted({entry[0] for node in program.graph.nodes for entry in node.meta.get("module_stack", ()) if entry[0]})
    enclosing = next(
        (name for block in program.blocks.values() for name in block.instances if is_below(path, name)), None
    )
    if enclosing is not None:
        return f"Split point {path!r} is inside the block {enclosing!r}; split points must be between blocks."
    if path in program.module_classes:
        return f"Split point {path!r} names a module that has no operators in the traced program."
    return f"Split point {path!r} names no module.{near_match(path, used)}"


def _has_parameters(node: fx.Node) -> bool:
    return node.op == "call_function" and any(map(_of_parameter, (node, *node.all_input_nodes)))


def _of_parameter(node: fx.Node) -> bool:
    """Return whether ``node`` is a parameter, or the result of a collective on one."""
    return node.op == "get_attr" or ("transition" in node.meta and node.meta["origin"].op == "get_attr")


def split_candidates(program: Program, stages: int = 2) -> list[tuple[int, str]]:
    """Return where a stage may begin by default, as (position, module path), without the model's own beginning.

    That is before blocks, and where these are too few, before modules with parameters at the coarsest level with two for each stage; not
    where a buffer that is written would be used on both sides.
    """
    order = {node: position for position, node in enumerate(program.graph.nodes)}
    spans = [sorted(order[node] for node in uses.nodes) for uses in written_buffers_of(program).uses]

    def allowed(position: int) -> bool:
        if not any(span[0] < position <= span[-1] for span in spans):
            return True
        try:
            placement = _Placement(program, [position])
            _check_buffers(placement, [_needed_on(placement, stage) for stage in range(2)])
        except GraphparError:
            return False
        return True

    return [(position, path) for position, path in _beginnings(program, stages) if allowed(position)]


def _beginnings(program: Program, stages: int) -> list[tuple[int, str]]:
    nodes, placed = list(program.graph.nodes), placed_with(program)
    blocks: dict[str, int] = {}
    for index, node in enumerate(nodes):
        if node.op == "call_module" and node not in placed:
            blocks.setdefault(str(node.target), index)
    found = sorted((index, path) for path, index in blocks.items())
    if len(found) >= max(stages, 2):
        return found[1:]
    depths = max((len(node.meta.get("module_stack", ())) for node in nodes), default=0)
    for depth in range(2, depths + 1):
        found = sorted({*((index, path) for path, index in blocks.items()), *_starts_at(nodes, placed, depth)})
        if len(found) > 2 * stages:
            break
    return found[1:]


def _starts_at(nodes: Sequence[fx.Node], placed: Collection[fx.Node], depth: int) -> list[tuple[int, str]]:
    """Return where modules with parameters begin whose calls are nested at most ``depth`` deep, as :func:`position_of` says: a module
    begins with what is in it. Of several that begin together the outermost is returned."""
    first: dict[str, int] = {}
    owning: set[str] = set()
    for index, node in enumerate(nodes):
        stack = [path for path, *_ in node.meta.get("module_stack", ())[:depth] if path]
        if stack and node.op in ("call_function", "call_module") and node not in placed:
            for path in stack:
                first.setdefault(path, index)
            if _has_parameters(node):
                owning.add(stack[-1])
    begins: dict[int, str] = {}
    for path in sorted(owning, key=len):
        begins.setdefault(first[path], path)
    return sorted(begins.items())


# ---- the stage of each value -----------------------------------------------------------------------------------


class _Placement:
    """The stage of each node, and which values are recomputed instead of sent."""

    def __init__(self, program: Program, positions: Sequence[int]) -> None:
        self.program = program
        self.count = len(positions) + 1
        self.nodes = list(program.graph.nodes)
        self.stage: dict[fx.Node, int] = {}
        self.free: set[fx.Node] = set()  # parameter-free: may be computed anywhere
        self.differentiable = differentiable_nodes(program)
        self.buffers = written_buffers_of(program)
        current = 0
        for index, node in enumerate(self.nodes):
            while current < len(positions) and index >= positions[current]:
                current += 1
            self.stage[node] = current
            if self._is_free(node):
                self.free.add(node)
        placed = placed_with(program)
        for node in self.nodes:
            if node.op.startswith("call"):
                self._place(node, placed)
        for uses in self.buffers.uses:
            self._together(uses)

    def _is_free(self, node: fx.Node) -> bool:
        if node.op == "get_attr":
            return str(node.target) not in self.program.parameters and node not in self.buffers.memory
        operands = node.all_input_nodes
        return (
            node.op == "call_function"
            and not is_inplace(node)
            and all(a.op == "placeholder" or a in self.free for a in operands)
        )

    def _place(self, node: fx.Node, placed: Mapping[fx.Node, fx.Node]) -> None:
        """Set the stage of ``node``: where it is in the program, or that of what it follows, but not before what it needs."""
        if operator_name(node) == "getitem" and isinstance(source := node.args[0], fx.Node):
            self.stage[node] = self.stage[source]
            return
        needs = (a for a in node.all_input_nodes if a.op.startswith("call") and a not in self.free)
        self.stage[node] = max(self.stage[placed.get(node, node)], *map(self.stage.__getitem__, needs), 0)

    def _together(self, uses: BufferUses) -> None:
        """Move what uses a buffer to one stage: that of the first use, or where all that they need is there.

        Raises:
            GraphparError: the result of one is needed on an earlier stage, or a stage would be left empty.
        """
        inside = set(uses.nodes)
        needs = {need for node in uses.nodes for need in node.all_input_nodes if need.op.startswith("call")}
        needs -= inside | self.free
        work, first = self._with_parameters(), min(self.stage[node] for node in uses.nodes)
        stage = max([first, *map(self.stage.__getitem__, needs)])
        for node in uses.nodes:
            early = [user for user in node.users if user not in inside and self.stage[user] < stage]
            if early and self.stage[node] < stage:
                raise _divided(uses, self.stage[node], stage)
        self.stage.update(dict.fromkeys(uses.nodes, stage))
        self.stage.update(
            {user: stage for node in uses.nodes for user in node.users if operator_name(user) == "getitem"}
        )
        if work - self._with_parameters():
            raise _divided(uses, first, stage)

    def _with_parameters(self) -> set[int]:
        return {self.stage[node] for node in self.nodes if node.op == "call_module" or _has_parameters(node)}

    @cached_property
    def _gradients_back(self) -> set[tuple[fx.Node, fx.Node]]:
        return gradients_back(self.program, self.differentiable)

    def requires_grad(self, node: fx.Node, stage: int) -> bool:
        """Return whether a gradient of this value comes back from ``stage``, or later ones. One of zeros would be wrong: optimizers step
        parameters that have a gradient."""
        value = value_of(node)
        if not (isinstance(value, Tensor) and value.is_floating_point() and node in self.differentiable):
            return False
        later = (user for user in node.users if user.op == "output" or self.stage.get(user, -1) >= stage)
        return any((node, user) in self._gradients_back for user in later)


class _Given(_Placement):
    """Places what reads parameters where stages hold these, and everything else as soon as its operands are there."""

    def __init__(self, program: Program, held: Sequence[Collection[str]]) -> None:
        self.held = held
        super().__init__(program, [len(program.graph.nodes)] * (len(held) - 1))

    def _place(self, node: fx.Node, placed: Mapping[fx.Node, fx.Node]) -> None:
        super()._place(node, {})
        read = [each for each in node.all_input_nodes if each.op == "get_attr"]
        names = {str(each.target) for each in (*read, node) if each.op != "call_function"}
        names = {name for name in names if any(name in own for own in self.held)}
        if names and node not in self.free and operator_name(node) != "getitem":
            stages = [stage for stage, own in enumerate(self.held) if names <= set(own)]
            later = [stage for stage in stages if stage >= self.stage[node]]
            if not later:
                holders = f"stage {stages[-1]} holds" if stages else "no stage holds all of"
                raise GraphparError(
                    f"in evaluation mode {' and '.join(sorted(names))} is applied to what stage {self.stage[node]} computes, but {holders} "
                    f"it{where(node)}; split elsewhere"
                )
            self.stage[node] = later[0]


def stages_of(program: Program, positions: Sequence[int]) -> dict[fx.Node, int]:
    """Return the stage of each operator of the root graph where stages begin at ``positions``."""
    return _Placement(program, positions).stage


def split(program: Program, positions: Sequence[int]) -> list[Stage]:
    """Split a program into stages at ``positions`` (of :func:`positions_of`).

    Raises:
        GraphparError: something other than a tensor would cross a boundary, or a written buffer would be on two stages.
    """
    return _split(_Placement(program, positions))


def split_as(program: Program, held: Sequence[Collection[str]]) -> list[Stage]:
    """Split a program into stages each of which has, of parameters and blocks, those ``held`` of another split of the same model.

    Raises:
        GraphparError: a stage needs what only a later one can compute.
    """
    return _split(_Given(program, held))


def _split(placement: _Placement) -> list[Stage]:
    program = placement.program
    needed = [_needed_on(placement, stage) for stage in range(placement.count)]
    crossing = _crossing(placement, needed)
    _check_buffers(placement, needed)
    names = _boundary_names(program, crossing)
    return [_stage(placement, needed[index], crossing, names, index) for index in range(placement.count)]


def _needed_on(placement: _Placement, stage: int) -> set[fx.Node]:
    """Return all nodes that ``stage`` computes: its own, and the parameter-free ones of other stages that they use."""
    own = [
        node
        for node in placement.nodes
        if placement.stage[node] == stage
        and node.op in ("call_function", "call_module", "output")
        and node not in placement.free
    ]
    if stage == placement.count - 1:
        own = [node for node in placement.nodes if node.op == "output"] + own
    needed: set[fx.Node] = set()
    while own:
        node = own.pop()
        if node not in needed:
            needed.add(node)
            own += [a for a in node.all_input_nodes if a in placement.free or a.op in ("placeholder", "get_attr")]
    return needed


def _crossing(placement: _Placement, needed: list[set[fx.Node]]) -> list[list[fx.Node]]:
    """Return for each boundary the values that cross it, newest first."""
    last_use: dict[fx.Node, int] = {}
    for stage, nodes in enumerate(needed):
        for node in nodes:
            for argument in node.all_input_nodes:
                sent = argument.op in ("call_function", "call_module") and argument not in placement.free
                if sent and placement.stage[argument] < stage:
                    last_use[argument] = max(last_use.get(argument, 0), stage)
    boundaries: list[list[fx.Node]] = [[] for _ in range(placement.count - 1)]
    for node in reversed(placement.nodes):
        for boundary in range(placement.stage[node], last_use.get(node, -1)):
            boundaries[boundary].append(node)
    for values in boundaries:
        for value in values:
            if any(isinstance(kind, ExpertRows) for kind in value.meta.get("types", {}).values()):
                raise GraphparError(
                    f"The value {value_name(value)!r} would cross a stage boundary, but it has the rows of a rank's own experts, and "
                    "how many is known only when it runs. Choose a split point before or after the experts."
                )
            if not isinstance(value_of(value), Tensor):
                raise GraphparError(
                    f"The value {value.name!r} ({type(value_of(value)).__name__}) would cross a stage boundary; only tensors can. "
                    "Choose another split point."
                )
    return boundaries


def _check_buffers(placement: _Placement, needed: list[set[fx.Node]]) -> None:
    """Check that each written buffer is on one stage only.

    Raises:
        GraphparError: one is not.
    """
    for uses in placement.buffers.uses:
        tensors = {
            node for node, name in placement.buffers.memory.items() if name == uses.name and node.op == "get_attr"
        }
        tensors |= {node for node in uses.nodes if node.op == "call_module"}
        holders = [stage for stage, nodes in enumerate(needed) if not tensors.isdisjoint(nodes)]
        if len(holders) > 1:
            raise _divided(uses, holders[0], holders[-1])


def _divided(uses: BufferUses, first: int, last: int) -> GraphparError:
    assert uses.last_write is not None
    return GraphparError(
        f"Buffer {uses.name!r} is written{where(uses.last_write)}, and is used on stages {first} and {last}. A written buffer must be on "
        "one stage: choose a split point that keeps its uses together, or leave pp out."
    )


# ---- one stage -------------------------------------------------------------------------------------------------


def _stage(
    placement: _Placement, needed: set[fx.Node], crossing: list[list[fx.Node]], names: Mapping[fx.Node, str], index: int
) -> Stage:
    program = placement.program
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    received = crossing[index - 1] if index else []
    sent = crossing[index] if index < placement.count - 1 else []
    for node in received:
        env[node] = graph.placeholder(names[node])
        env[node].meta = dict(node.meta, boundary=node)  # whose gradient comes back, if it has one
    used = {argument for node in needed for argument in node.all_input_nodes}
    placeholders = [node for node in placement.nodes if node.op == "placeholder" and node in used]
    for node in placeholders:
        env[node] = graph.placeholder(str(node.target))
        env[node].meta = dict(node.meta)
    sources = [env[node] for node in [*received, *placeholders]]
    for node in placement.nodes:
        if node not in needed or node in env or node.op == "output":
            continue
        if isinstance(value_of(node), torch.SymInt):
            size = local_size(graph, sources, value_of(node))
            if size is not None:
                env[node] = size
                continue
        env[node] = graph.node_copy(node, env.__getitem__)
        if isinstance(node.target, Helper):
            _size_locally(env[node], node.target, [env[value] for value in received])
    _finish(placement, graph, env, sent, index)
    for node in placeholders:
        if not env[node].users:
            graph.erase_node(env[node])
    left = set(graph.nodes)
    placeholders = [node for node in placeholders if env[node] in left]
    counts = tuple(n for n in (str(node.target) for node in placeholders) if n in program.count_names)
    recomputed = [
        node for node in placement.nodes if node in needed and node in placement.free and node.op == "call_function"
    ]
    return Stage(
        index=index,
        graph=graph,
        receives=tuple(Boundary(names[node], node, placement.requires_grad(node, index)) for node in received),
        sends=tuple(Boundary(names[node], node, placement.requires_grad(node, index + 1)) for node in sent),
        inputs=tuple(str(node.target) for node in placeholders if str(node.target) not in counts),
        counts=counts,
        attributes=(),
        modules=tuple(_modules(program, graph)),
        recomputed=tuple(node.name for node in recomputed),
    )


def _size_locally(call: fx.Node, helper: Helper, received: list[fx.Node]) -> None:
    """Give a helper that takes an input only for its batch size and device a received value instead."""
    if helper.like is None:
        return
    example = call.args[helper.like]
    assert isinstance(example, fx.Node)
    expected = batch_coefficients(example)
    for value in received:
        own = batch_coefficients(value)
        if all(own[dim : dim + 1] == (c,) for dim, c in enumerate(expected) if c is not None):
            call.args = tuple(value if position == helper.like else a for position, a in enumerate(call.args))
            return


def _finish(
    placement: _Placement, graph: fx.Graph, env: dict[fx.Node, fx.Node], sent: list[fx.Node], index: int
) -> None:
    """Add the stage's results: what it sends, or the program's output."""
    if index < placement.count - 1:
        held = placement.buffers.memory
        results = [_copied(graph, env[node], torch.ops.aten.clone) if node in held else env[node] for node in sent]
        for place, node in enumerate(sent):
            given = placement.stage[node] < index and not placement.requires_grad(node, index)
            if node in placement.differentiable and not given and not placement.requires_grad(node, index + 1):
                results[place] = _copied(graph, results[place], torch.ops.aten.detach)
        graph.output(results[0] if len(results) == 1 else tuple(results))
    else:
        output = next(node for node in placement.nodes if node.op == "output")
        outputs = fx.map_arg(output.args[0], env.__getitem__)
        assert isinstance(outputs, tuple | list)
        graph.output(outputs[0] if len(outputs) == 1 else tuple(outputs))
    remove_dead_code(graph)


def _copied(graph: fx.Graph, node: fx.Node, operator: Any) -> fx.Node:
    """Clone a buffer's value, since the next microbatch may write the buffer while it is being sent, or detach what has no gradient."""
    copy = graph.call_function(operator.default, (node,))
    copy.meta = {name: value for name, value in node.meta.items() if name != "transition"}
    return copy


def copy_written(graph: fx.Graph, again: Collection[str]) -> None:
    """Clone the buffers that ``graph`` writes where blocks ``again`` take them: in the backward these run on the same values again."""
    written = {node.target for node in written_buffers(graph)}
    for call in [node for node in graph.nodes if node.op == "call_module" and node.target in again]:
        for argument in call.all_input_nodes:
            read = argument
            while _may_view(read):
                read = read.args[0]  # type: ignore[assignment]
            if read.op == "get_attr" and read.target in written:
                with graph.inserting_before(call):
                    call.replace_input_with(argument, _copied(graph, argument, torch.ops.aten.clone))


def _may_view(node: fx.Node) -> bool:
    """Whether the result may be in the memory of the first operand."""
    first = node.args[0] if node.op == "call_function" and node.args else None
    return isinstance(first, fx.Node) and operator_name(node) != "clone"


def _boundary_names(program: Program, crossing: list[list[fx.Node]]) -> dict[fx.Node, str]:
    """Return a name for each value that crosses a boundary, kept where it is relayed.

    Names differ among values that cross together, and from the inputs' names, which stages take by keyword.
    """
    inputs = {str(node.target) for node in program.graph.nodes if node.op == "placeholder"}
    places: dict[fx.Node, list[int]] = {}
    for place, values in enumerate(crossing):
        for node in values:
            places.setdefault(node, []).append(place)
    names: dict[fx.Node, str] = {}
    for values in crossing:
        fresh = [node for node in values if node not in names]
        met = {place for node in fresh for place in places[node]}
        taken = {names[node] for place in met for node in crossing[place] if node in names}
        names.update(unique_names(fresh, inputs | taken))
    return names


def _modules(program: Program, graph: fx.Graph) -> list[str]:
    """Return the modules of a stage, in order: blocks, and the innermost modules of other operators with parameters."""
    modules: list[str] = []
    for node in graph.nodes:
        if node.op == "call_module":
            modules.append(str(node.target))
        elif _has_parameters(node):
            for argument in node.all_input_nodes:
                if argument.op == "get_attr" and str(argument.target) in program.parameters:
                    modules.append(str(argument.target).rpartition(".")[0] or str(argument.target))
    return list(dict.fromkeys(modules))
