"""``with_products``: collectives of tp and the products beside them become one function.

    whole = all_gather(x, "tp", dim=1)
    q = linear(whole, q_proj.weight)               q, k = gathered_products(x, [q_proj.weight, k_proj.weight], "tp", dim=1)
    k = linear(whole, k_proj.weight)
    down = linear(h, down_proj.weight)
    x = reduce_scatter(down, "tp", dim=1)          x = scattered_product(h, down_proj.weight, "tp", dim=1)

Functions that begin with ``ring_`` send pieces while others are multiplied, the others whole tensors. :func:`with_joined` notes which
products become one function with a collective: prices are of that, and :func:`with_products`, the last step before printing, makes the
functions of it.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from graphpar.emitted import collectives, parallel_products
from graphpar.errors import GraphparError
from graphpar.ir.program import Program, value_of
from graphpar.ir.stage import Stage
from graphpar.operators.naming import value_name
from graphpar.operators.parallel_products import (
    AXIS,
    ENTERING,
    IN_PIECES,
    JOINED,
    Joined,
    in_order,
    joined_products_of,
    joined_with,
    products_of,
    ring_products_of,
)
from graphpar.passes.normalize.functional import copied

_NAMES = {
    collectives.all_gather: "gathered_product",
    collectives.reduce_scatter: "scattered_product",
    collectives.sum_gradient: "shared_product",
}
WAITED = (*IN_PIECES, collectives.all_gather_invariant)
"""Gathers and reduce-scatters, of which those in pieces run beside products."""


@dataclass(frozen=True)
class Overlapped:
    """Collectives beside products, in a forward of all stages: how many of each kind, and how many products are beside them.

    Attributes:
        others: how many gathers and reduce-scatters of tp are waited for, by the name of what they gather or sum.
    """

    gathers: int
    scatters: int
    products: int
    others: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        counts = {"gathers": self.gathers, "reduce_scatters": self.scatters, "products": self.products}
        return {**counts, "others": dict(self.others)}


def overlapped_in(program: Program, stages: Sequence[Stage]) -> Overlapped:
    """Count the collectives of ``stages`` that can run beside products.

    Raises:
        GraphparError: there are none.
    """
    found: Counter[str] = Counter()
    others: Counter[str] = Counter()
    for stage in stages:
        for node in _calls(program, stage.graph):
            if products := ring_products_of(node):
                found += Counter({str(node.target.__name__): 1, "products": len(products)})  # type: ignore[union-attr]
            elif node.target in WAITED and node.args[1] == AXIS:
                others[value_name(node.all_input_nodes[0])] += 1
    if not found:
        raise GraphparError(
            f"overlap_tp: {program.name} has no all-gather before a product and no reduce-scatter after one; leave it out, or shard the "
            "sequence between them: sp (--sp), or a shard plan, such as {'**.input_layernorm': 'sequence'}."
        )
    return Overlapped(found["all_gather"], found["reduce_scatter"], found["products"], others)


def _calls(program: Program, graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the nodes that run, those of a block as often as it does."""
    for node in graph.nodes:
        if node.op == "call_module":
            yield from _calls(program, program.block_of(node).graph)
        else:
            yield node


def with_products(program: Program, stages: Sequence[Stage]) -> tuple[Program, list[Stage]]:
    """Make one function of each collective and the products that :func:`with_joined` noted beside it, in place."""
    for graph in (*(block.graph for block in program.blocks.values()), *(stage.graph for stage in stages)):
        for node in list(graph.nodes):
            if joined := joined_with(node):
                (_entered if node.target in ENTERING else _left)(graph, node, joined)
        graph.lint()
    return program, list(stages)


def with_joined(program: Program, stages: Sequence[Stage], *, whole: bool, rings: bool) -> tuple[Program, list[Stage]]:
    """Return a program and its stages in which each collective has the products that become one function with it (``JOINED``).

    Args:
        whole: with those that send whole tensors.
        rings: with those that send pieces, where there are any.
    """
    blocks = {name: replace(block, graph=_joined(block.graph, whole, rings)) for name, block in program.blocks.items()}
    return program.with_graph(program.graph, blocks=blocks), [
        replace(stage, graph=_joined(stage.graph, whole, rings)) for stage in stages
    ]


def _joined(source: fx.Graph, whole: bool, rings: bool) -> fx.Graph:
    if not any(products_of(node) for node in source.nodes):
        return source
    graph = copied(source)
    graph.output_node().meta = dict(source.output_node().meta)
    for node in graph.nodes:
        ring = ring_products_of(node) if rings else []
        products = ring or (joined_products_of(node) if whole else [])
        if not products:
            continue
        dim = node.kwargs.get("dim")
        ordered = not ring and dim is not None and any(in_order(product, int(dim)) for product in products)  # type: ignore[arg-type]
        node.meta[JOINED] = Joined(tuple(products), bool(ring), ordered)
        for product in ring:
            product.meta[JOINED] = node
    return graph


def _entered(graph: fx.Graph, collective: fx.Node, joined: Joined) -> None:
    x, axis = collective.args
    products, ring = joined.products, joined.ring
    weights = [product.args[1] for product in products]
    biases = [product.args[2] if len(product.args) > 2 else None for product in products]
    places = {node: place for place, node in enumerate(graph.nodes)}
    first = min(products, key=places.__getitem__)
    for parameter in (item for item in (*weights, *biases) if isinstance(item, fx.Node)):
        for item in _made_of(parameter):
            if places[item] > places[first]:
                first.prepend(item)
    options: dict[str, Any] = dict(collective.kwargs)
    if joined.in_order:
        options["in_order"] = True
    name = _function_name(collective, ring)
    with graph.inserting_before(first):
        if len(products) == 1:
            options |= {} if biases[0] is None else {"bias": biases[0]}
            made = graph.call_function(getattr(parallel_products, name), (x, weights[0], axis), options)
            made.meta = _meta(products[0], collective)
            products[0].replace_all_uses_with(made)
        else:
            options |= {"biases": biases} if any(biases) else {}
            made = graph.call_function(getattr(parallel_products, f"{name}s"), (x, weights, axis), options)
            made.meta = _meta(collective) | {"val": tuple(value_of(product) for product in products)}
            for place, product in enumerate(products):
                item = graph.call_function(operator.getitem, (made, place))
                item.meta = _without_joined(product)
                product.replace_all_uses_with(item)
    for product in products:
        graph.erase_node(product)
    graph.erase_node(collective)


def _left(graph: fx.Graph, collective: fx.Node, joined: Joined) -> None:
    (product,) = joined.products
    function = getattr(parallel_products, _function_name(collective, joined.ring))
    with graph.inserting_before(collective):
        made = graph.call_function(function, (*product.args, collective.args[1]), dict(collective.kwargs))
    made.meta = _without_joined(collective)
    collective.replace_all_uses_with(made)
    graph.erase_node(collective)
    graph.erase_node(product)


def _function_name(collective: fx.Node, ring: bool) -> str:
    """Return the name of the function for one product."""
    assert callable(collective.target)
    return f"{'ring_' if ring else ''}{_NAMES[collective.target]}"


def _made_of(parameter: fx.Node) -> list[fx.Node]:
    """Return what a parameter is made of, such as its cast, in order."""
    return [*(item for operand in parameter.all_input_nodes for item in _made_of(operand)), parameter]


def _meta(node: fx.Node, collective: fx.Node | None = None) -> dict[str, Any]:
    if collective is not None:
        return {**_without_joined(node), "transition": collective.meta["transition"]}
    return {key: node.meta[key] for key in ("module_stack", "source", "transition") if key in node.meta}


def _without_joined(node: fx.Node) -> dict[str, Any]:
    return {key: item for key, item in node.meta.items() if key != JOINED}
