"""``check_exchange``: check in a rank's program that rows which travelled to experts are used as such, and come back.

    from each send_rows, exchange_of and received_ends on ──► where the rows of every value are: at home, or with an exchange

Only the program is looked at, not how the exchange was inserted.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, fx

from graphpar.ir.program import Program, operator_name, value_of
from graphpar.operators.placement import operands_of
from graphpar.passes.sharding.exchange import experts_of_product, read_in_scope, treats_rows_alone

_HOME = None


def check_exchange(program: Program, experts: Collection[str]) -> list[str]:
    """Return what is wrong with ``program``, in which replicas hold different ``experts``; empty if nothing is."""
    graphs = {"": program.graph} | {name: block.graph for name, block in program.blocks.items()}
    return [
        problem for scope, graph in graphs.items() for problem in _check(graph, read_in_scope(program, scope, experts))
    ]


def _check(graph: fx.Graph, experts: Collection[str]) -> list[str]:
    problems: list[str] = []
    where: dict[fx.Node, fx.Node | None] = {}  # the exchange that the rows of a value travelled with
    for node in graph.nodes:
        at = {source: where.get(source) for source in node.all_input_nodes}
        name, found = operator_name(node), set(at.values())
        if node.op == "call_function" and name in ("send_rows", "return_rows"):
            rows, _, exchange = node.args
            assert isinstance(rows, fx.Node) and isinstance(exchange, fx.Node)
            before, where[node] = (_HOME, exchange) if name == "send_rows" else (exchange, _HOME)
            if at[rows] is not before:
                problems.append(
                    f"{name} takes {rows.name}, whose rows are {_rows_text(at[rows])}, not {_rows_text(before)}"
                )
        elif node.op == "call_function" and name == "received_ends":
            (where[node],) = node.all_input_nodes
        elif node.op == "call_function" and (weight := experts_of_product(node, experts)) is not None:
            rows, _, ends = operands_of(node)
            where[node] = at[ends]
            if at[ends] is _HOME or at[rows] is not at[ends]:
                problems.append(
                    f"{node.name} applies {weight} to rows that are {_rows_text(at[rows])}, by ends of rows that are {_rows_text(at[ends])}"
                )
        elif found <= {_HOME}:
            where[node] = _HOME
        else:
            where[node] = next(place for place in at.values() if place is not _HOME)
            picked = name == "getitem" and isinstance(value_of(node), Tensor)
            if len(found) > 1 or not (picked or treats_rows_alone(node)):
                listed = ", ".join(f"{source.name} {_rows_text(place)}" for source, place in at.items())
                problems.append(f"{node.name} ({name}) takes rows that are elsewhere: {listed}")
    return problems


def _rows_text(exchange: fx.Node | None) -> str:
    return "at home" if exchange is None else f"sent by {exchange.name}"
