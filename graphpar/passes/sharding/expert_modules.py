"""Find experts that are modules of their own: equal branches side by side, each weighed or chosen by another column of a router.

    hidden ──► experts.0 ──► * weights[:, 0] ──┐
           ──► experts.1 ──► * weights[:, 1] ──┴──► +           a loop over a ModuleList, once its masks keep all rows in place
           ──► experts.0, experts.1 ──► stack ──► * weights ──► sum

The number in a parameter's name says which branch it belongs to; that the branches are experts, the graph says: none takes what
another gives, and each is multiplied by, or chosen by, a value of its own that a product of the model's data gave.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from graphpar.ir.program import operator_name
from graphpar.operators.placement import operands_of
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of

_WEIGHS = ("mul", "where")


def expert_modules(graph: fx.Graph) -> dict[str, int]:
    """Return the paths of lists of experts in ``graph``, such as ``mlp.experts``, with the number of experts of each."""
    groups = _numbered_products(graph)
    fed = _fed_by_products(graph) if groups else set()
    return {path: len(branches) for path, branches in groups.items() if _are_experts(graph, branches, fed)}


def parameters_of(graph: fx.Graph, paths: Iterable[str]) -> list[fx.Node]:
    """Return the parameters and buffers of the modules in the lists ``paths``."""
    begins = tuple(f"{path}." for path in paths)
    found = [node for node in graph.nodes if node.op == "get_attr" and str(node.target).startswith(begins)]
    return [node for node in found if any(str(node.target).removeprefix(begin)[0].isdigit() for begin in begins)]


def _numbered_products(graph: fx.Graph) -> dict[str, dict[str, list[fx.Node]]]:
    """Return the products of weights, and calls of blocks, whose names have a number: by what stands before it, and by the number."""
    found: dict[str, dict[str, list[fx.Node]]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            names = [str(node.target)]
        elif record_of(node).multiplies:
            names = [name for operand in operands_of(node) if (name := _parameter_name(operand)) is not None]
        else:
            continue
        for words in (name.split(".") for name in names):
            for place, word in enumerate(words):
                if word.isdigit():
                    found.setdefault(".".join(words[:place]), {}).setdefault(word, []).append(node)
    return {path: branches for path, branches in found.items() if len(branches) > 1}


def _parameter_name(node: fx.Node) -> str | None:
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        if not (record_of(node).same_elements or record_of(node).kind is Kind.COPY):
            return None
        node = node.all_input_nodes[0]
    return str(node.target) if node.op == "get_attr" else None


def _fed_by_products(graph: fx.Graph) -> set[fx.Node]:
    """Return what depends on a product."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if record_of(node).multiplies or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _are_experts(graph: fx.Graph, branches: Mapping[str, list[fx.Node]], fed: set[fx.Node]) -> bool:
    kinds = {tuple(sorted(operator_name(node) for node in products)) for products in branches.values()}
    if len(kinds) > 1:
        return False
    own = {node: 1 << place for place, products in enumerate(branches.values()) for node in products}
    every = (1 << len(branches)) - 1
    reached: dict[fx.Node, int] = {}  # the branches that a value depends on, as bits
    gates: set[fx.Node] = set()  # what weighs or chooses the results of a branch
    stacked: set[fx.Node] = set()
    weighed = 0
    for node in graph.nodes:
        taken = (
            node.all_input_nodes[:1] if record_of(node).kind is Kind.RESHAPE else node.all_input_nodes
        )  # not view_as's shape
        sources = [reached.get(source, 0) for source in taken]
        bits = 0
        for source in sources:
            bits |= source
        if node in own and bits & ~own[node]:
            return False
        reached[node] = bits | own.get(node, 0)
        alone = [source for source in node.all_input_nodes if not reached[source] and source in fed]
        if node in own or not bits or not alone:
            pass
        elif operator_name(node) in _WEIGHS:
            fresh = [source for source in sources if source.bit_count() == 1 and not source & weighed]
            if fresh:
                weighed |= fresh[0]
                gates.add(alone[0])
        if operator_name(node) == "stack" and bits == every:
            stacked.add(node)
        elif stacked.intersection(node.all_input_nodes):
            if alone and (operator_name(node) in _WEIGHS or record_of(node).multiplies):
                return True
            if record_of(node).same_elements:
                stacked.add(node)
    return weighed == every and len(gates) == len(branches)
