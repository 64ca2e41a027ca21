"""``with_overlap``: rows travel to experts and back while the rank computes what needs none of them, such as a shared expert.

    sent = send_rows(rows, axis, exchange)          sent = start_send(rows, axis, exchange)
    hidden = grouped_mm(sent, ...)                  gate = linear(x, shared_gate)
    down = grouped_mm(hidden, ...)                  sent = finish_send(sent, axis, exchange)
    back = return_rows(down, axis, exchange)   ──►  hidden = grouped_mm(sent, ...)
    gate = linear(x, shared_gate)                   down = grouped_mm(hidden, ...)
    shared = linear(gate, shared_down)              back = start_return(down, axis, exchange)
    return back + shared                            shared = linear(gate, shared_down)
                                                    return finish_return(back, axis, exchange) + shared

Autograd runs the backward of what was computed last first, so gradients travel beside the backward of the same operators. The order is that
of the rank's program from here on: what is counted in it, as the products that recomputation keeps, is counted in the order that runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import fx

from graphpar.cost_models.flops import operator_flops
from graphpar.emitted import expert_rows
from graphpar.ir.program import Program, operator_name
from graphpar.operators.table import record_of
from graphpar.operators.transitions import HALVES
from graphpar.passes.normalize.functional import copied


def with_overlap(program: Program) -> Program:
    """Return a rank's program in which rows of experts travel beside products that need none of them, in blocks that have such."""
    blocks = {name: replace(block, graph=_with_overlap(block.graph)) for name, block in program.blocks.items()}
    return program.with_graph(program.graph, blocks=blocks)


def _with_overlap(source: fx.Graph) -> fx.Graph:
    if not any(node.target is expert_rows.send_rows for node in source.nodes):
        return source
    graph = copied(source)
    for new, old in zip(graph.nodes, source.nodes, strict=True):
        new.meta = dict(old.meta)
    nodes = list(graph.nodes)
    *others, send = [node for node in nodes if node.target is expert_rows.send_rows]
    returns = [node for node in nodes if node.target is expert_rows.return_rows]
    if returns[-1].args[2] is not send.args[2]:
        return source
    free = _with_products(_free(nodes, [*others, send, *returns]))
    if not free:
        return source
    flops = list(itertools.accumulate((_flops(node) for node in free), initial=0.0))
    half = next(place for place, done in enumerate(flops) if 2 * done >= flops[-1])
    half = half if flops[half] < flops[-1] else len(free)
    for moved, parts in ((send, free[:half]), (returns[-1], free[half:])):
        if parts:
            _start_before(moved, parts)
    graph.lint()
    return graph


def _start_before(moved: fx.Node, parts: Sequence[fx.Node]) -> None:
    """Begin what ``moved`` does, compute ``parts``, and end it."""
    start, finish = HALVES[operator_name(moved)]
    with moved.graph.inserting_before(moved):
        begun = moved.graph.call_function(start, moved.args)
    begun.meta = dict(moved.meta)
    moved.target, moved.args = finish, (begun, *moved.args[1:])
    del moved.meta["transition"]
    for node in parts:
        for source in node.all_input_nodes:
            if source.op == "get_attr":
                begun.prepend(source)
        moved.prepend(node)


def _free(nodes: Sequence[fx.Node], moves: Sequence[fx.Node]) -> list[fx.Node]:
    """Return what can be computed anywhere from where the last row is about to be sent until the last has returned, in order."""
    first = next(node for node in reversed(moves) if node.target is expert_rows.send_rows)
    place = {node: number for number, node in enumerate(nodes)}
    before = _reached([first], lambda node: node.all_input_nodes)
    fixed = _reached(moves, lambda node: node.all_input_nodes) | _reached(moves, lambda node: node.users)
    writes = [node for node in nodes if _writes(node)]
    written = {
        str(each.target) for each in _reached(writes, lambda node: node.all_input_nodes) if each.op == "get_attr"
    }

    def ready(source: fx.Node) -> bool:
        return (
            source in free
            or source in before
            or source.op == "placeholder"
            or (source.op == "get_attr" and str(source.target) not in written)
        )

    def waits(user: fx.Node) -> bool:
        return user in free or place[user] > place[moves[-1]]

    free = dict.fromkeys(n for n in nodes if n.op == "call_function" and n not in fixed and n not in writes)
    while stays := [n for n in free if not (all(map(ready, n.all_input_nodes)) and all(map(waits, n.users)))]:
        for node in stays:
            del free[node]
    return list(free)


def _with_products(free: Sequence[fx.Node]) -> list[fx.Node]:
    """Return products, and what hangs together with them."""
    products, known = [node for node in free if _flops(node)], set(free)
    kept = _reached(products, lambda node: known.intersection([*node.all_input_nodes, *node.users]))
    return [node for node in free if node in kept]


def _reached(starts: Iterable[fx.Node], neighbours: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    queue = list(starts)
    while queue:
        node = queue.pop()
        if node not in found:
            found.add(node)
            queue += neighbours(node)
    return found


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target._schema.is_mutable)


def _flops(node: fx.Node) -> float:
    """Return the flops of a product, of a batch of 1,024 rows."""
    return operator_flops(node, 1024) if record_of(node).multiplies else 0.0
