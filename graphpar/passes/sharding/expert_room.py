"""``with_room``: give the rows of each rank's experts room that does not depend on their number, so that no layer waits for the device.

    ends = rank_ends(offs, "ep")                 ──►   ends = rank_ends(offs, "ep", rows, room=1.25)
    y = grouped_mm(x[expert_rows(order, "ep", ends)], w, offs=own_offsets(offs, "ep"))
                                                 ──►   y = grouped_mm(without_padding(x[expert_rows(order, "ep", ends)], ends), w,
                                                                      offs=own_offsets(offs, "ep", ends))
    exchange = exchange_of(offs, "dp_expert")    ──►   exchange = exchange_of(offs, "dp_expert", rows, room=1.25)

Products leave the padding behind the rows undefined, and the gradients of padding too. What treats each row by itself may do so with
padding; where rows and what all ranks have come together padding is set to zero, in the forward and in the backward.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, fx

from graphpar.emitted import expert_rows
from graphpar.errors import GraphparError
from graphpar.ir.program import Block, Program, operator_name, value_of, where
from graphpar.operators.placement import operands_of, results_of
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.runtime.layout import ExpertRows

_DIVIDED = (expert_rows.rank_ends, expert_rows.exchange_of)
_BY_NUMBER = (
    expert_rows.expert_rows,
    expert_rows.expert_sums,
    expert_rows.send_rows,
    expert_rows.return_rows,
    expert_rows.without_padding,
)
"""Functions that know which rows are padding."""


def divides_rows(program: Program) -> bool:
    """Whether a rank's program has rows of its own experts, whose number is known only when it runs."""
    graphs = (program.graph, *(block.graph for block in program.blocks.values()))
    return any(node.target in _DIVIDED for graph in graphs for node in graph.nodes)


def with_room(program: Program, room: float | None) -> Program:
    """Return a rank's program whose functions have room for ``room`` times the mean number of rows; None: as it is.

    Raises:
        GraphparError: an operator would compute with padding; its line is told.
    """
    if room is None or not divides_rows(program):
        return program
    blocks: dict[str, Block] = {
        name: replace(block, graph=_with_room(block.graph, room)) for name, block in program.blocks.items()
    }
    return program.with_graph(_with_room(program.graph, room), blocks=blocks)


def _with_room(source: fx.Graph, room: float) -> fx.Graph:
    if not any(node.target in _DIVIDED for node in source.nodes):
        return source
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(source, copies))
    for old, new in copies.items():
        new.meta = dict(old.meta)
    nodes = list(graph.nodes)
    nodes[-1].meta = dict(next(iter(reversed(source.nodes))).meta)
    ends = {}
    for node in nodes:
        if node.target in _DIVIDED:
            first = next(user for user in nodes if user in node.users)
            assert first.target in (expert_rows.expert_rows, expert_rows.send_rows), first
            first.prepend(node)  # now what it is to have room for has been computed
            rows = first.args[0]
            assert isinstance(rows, fx.Node)
            if operator_name(rows) == "index":
                rows.meta.setdefault("name", "rows")
            held = 1.0 if _is_rows(rows) else room  # those that a rank has taken have room for them already
            node.args, node.kwargs = (*node.args, rows), {"room": held}
            ends[node.args[:2]] = node
    for node in nodes:
        if node.target is expert_rows.own_offsets:
            node.args = (*node.args, ends[node.args])
        elif node.op == "call_function" and node.target not in _BY_NUMBER:
            _set_padding_to_zero(node)
    graph.lint()
    return graph


def _set_padding_to_zero(node: fx.Node) -> None:
    """Set padding to zero where ``node`` takes rows of experts together with others, and in what it makes of them."""
    operands = operands_of(node)
    rows = [operand for operand in operands if _is_rows(operand)]
    if not rows or not results_of(node) or record_of(node).kind is Kind.GROUPED:
        return
    alone = all(operand in rows or not value_of(operand).is_floating_point() for operand in operands)
    if not (_is_rows(node) if isinstance(value_of(node), Tensor) else alone):
        raise GraphparError(
            f"expert_room: {operator_name(node)}{where(node)} takes the rows of a rank's experts together, and would take the padding "
            "behind them too; leave expert_room out, or divide the experts over dp_expert alone."
        )
    if alone:
        return
    for operand in rows:
        if value_of(operand).is_floating_point():
            node.replace_input_with(operand, _without_padding(operand, operand))
    if any(user.target not in (expert_rows.send_rows, *_DIVIDED) for user in node.users):
        made = _without_padding(node, rows[0])
        node.replace_all_uses_with(made, lambda user: user is not made)


def _without_padding(node: fx.Node, rows: fx.Node) -> fx.Node:
    with node.graph.inserting_after(node):
        made = node.graph.call_function(expert_rows.without_padding, (node, _ends_of(rows)))
    made.meta = {key: value for key, value in node.meta.items() if key != "transition"} | {"origin": node}
    return made


def _ends_of(rows: fx.Node) -> fx.Node:
    """Return what says where the rows end."""
    while rows.target is not expert_rows.expert_rows:
        rows = next(operand for operand in rows.all_input_nodes if _is_rows(operand))
    ends = rows.args[2]
    assert isinstance(ends, fx.Node)
    return ends


def _is_rows(node: fx.Node) -> bool:
    """Whether a value has the rows of a rank's own experts."""
    return any(isinstance(kind, ExpertRows) for kind in node.meta.get("types", {}).values())
