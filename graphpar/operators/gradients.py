"""Which values a gradient flows through."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import fx

from graphpar.ir.program import Chunked, Helper, Program, operator_name
from graphpar.operators.placement import results_of, sums
from graphpar.operators.record import Reads
from graphpar.operators.table import record_of
from graphpar.runtime.option_kinds import TRAIN


def block_results(graph: fx.Graph) -> list[fx.Node]:
    """List the values that a block returns."""
    returned: Any = graph.output_node().args[0]
    return list(returned) if isinstance(returned, tuple | list) else [returned]


def differentiable_nodes(program: Program, inputs: Iterable[fx.Node] = ()) -> set[fx.Node]:
    """Find the values that a gradient flows through: of programs for training. One inside a block counts if it does in any call of the
    block. ``inputs``: those of the program through which one does."""
    if program.mode != TRAIN:
        return set()
    found = set(inputs)
    walked: dict[tuple[str, frozenset[int]], list[bool]] = {}
    for node in program.graph.nodes:
        if node.op == "call_module":
            block = program.block_of(node)
            key = block.name, frozenset(place for place, argument in enumerate(node.args) if argument in found)
            if key not in walked:
                inside = _differentiable_inside(program, block.graph, program.prefixes(block.name)[0], key[1])
                found |= inside
                walked[key] = [result in inside for result in block_results(block.graph)]
            if any(walked[key]):
                found.add(node)
        elif (
            operator_name(node) == "getitem"
            and isinstance(source := node.args[0], fx.Node)
            and source.op == "call_module"
        ):
            given = frozenset(place for place, argument in enumerate(source.args) if argument in found)
            if walked[program.block_of(source).name, given][int(node.args[1])] and _has_gradients(node):  # type: ignore[arg-type]
                found.add(node)
        elif _differentiable(program, node, "", found):
            found.add(node)
            if isinstance(node.target, Chunked):
                given = frozenset(place for place, argument in enumerate(node.args) if argument in found)
                found |= _differentiable_inside(program, node.target.graph, "", given)
    return found


def gradients_back(program: Program, differentiable: Collection[fx.Node]) -> set[tuple[fx.Node, fx.Node]]:
    """Find the (value, user) of the root graph between which a gradient comes back in the backward of what the program returns: not where
    the user, or all that follows, detaches it. ``differentiable``: :func:`differentiable_nodes`."""
    found: set[tuple[fx.Node, fx.Node]] = set()
    reached = {program.graph.output_node()}
    for node in reversed(program.graph.nodes):
        for value in node.all_input_nodes if node in reached else ():
            if value in differentiable and (node.op == "output" or _passes(program, value, node)):
                found.add((value, node))
                reached.add(value)
    return found


def _passes(program: Program, value: fx.Node, user: fx.Node) -> bool:
    """Whether a result of ``user`` has a gradient of ``value``."""
    if user.op != "call_module":
        return _differentiable(program, user, "", {value})
    block = program.block_of(user)
    places = frozenset(place for place, argument in enumerate(user.args) if argument is value)
    inside = _differentiable_inside(program, block.graph, "", places, parameters=False)
    return any(result in inside for result in block_results(block.graph))


def blocks_without_backward(program: Program, inputs: Iterable[fx.Node] = ()) -> set[str]:
    """Return the paths of the blocks through which no gradient flows, such as those of a network that is frozen as a whole.

    Args:
        inputs: those of the program through which one flows.
    """
    found = differentiable_nodes(program, inputs)
    calls = [node for node in program.graph.nodes if node.op == "call_module"]
    return {str(node.target) for node in calls} - {str(node.target) for node in calls if node in found}


def is_read_in_backward(node: fx.Node) -> bool:
    """Whether the backward of an operator reads the value of ``node``, or a view or copy of it."""
    return any(
        user.op != "call_function"
        or record_of(user).reads is Reads.OPERANDS
        or ((record_of(user).free or record_of(user).same_value) and is_read_in_backward(user))
        for user in node.users
    )


def _differentiable_inside(
    program: Program, graph: fx.Graph, prefix: str, given: frozenset[int], *, parameters: bool = True
) -> set[fx.Node]:
    """The values of a block or function that a gradient flows through, where one does through arguments ``given`` and ``parameters``."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    found = {placeholders[place] for place in given}
    for node in graph.nodes:
        if (parameters or node.op != "get_attr") and _differentiable(program, node, prefix, found):
            found.add(node)
    return found


def _has_gradients(node: fx.Node) -> bool:
    return any(sums(tensor) for tensor in results_of(node))


def _differentiable(program: Program, node: fx.Node, prefix: str, found: set[fx.Node]) -> bool:
    if node.op == "get_attr":
        info = program.parameters.get(f"{prefix}{node.target}")
        return info is not None and info.requires_grad
    if node.op != "call_function" or operator_name(node) == "detach" or isinstance(node.target, Helper):
        return False
    return _has_gradients(node) and any(argument in found for argument in node.all_input_nodes)
