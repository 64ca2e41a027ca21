"""``with_rings``: gathers and reduce-scatters become one function with the products beside them, which sends pieces while it multiplies.

    whole = all_gather(x, "tp", dim=1)
    q = linear(whole, q_proj.weight)               q, k = gathered_products(x, [q_proj.weight, k_proj.weight], "tp", 1)
    k = linear(whole, k_proj.weight)
    down = linear(h, down_proj.weight)
    x = reduce_scatter(down, "tp", dim=1)          x = scattered_product(h, down_proj.weight, "tp", 1)

That is the last step before printing: sharding, prices and reports are of the collectives, which send the same.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from graphpar.emitted import collectives, ring_products
from graphpar.errors import GraphparError
from graphpar.ir.program import Program, value_of
from graphpar.ir.stage import Stage
from graphpar.operators.ring_products import products_of


@dataclass(frozen=True)
class Overlapped:
    """Collectives beside products, in a forward of all stages: how many of each kind, and how many products are beside them."""

    gathers: int
    scatters: int
    products: int

    def to_json(self) -> dict[str, int]:
        """Return plain data."""
        return {"gathers": self.gathers, "reduce_scatters": self.scatters, "products": self.products}


def overlapped_in(program: Program, stages: Sequence[Stage]) -> Overlapped:
    """Count the collectives of ``stages`` that can run beside products.

    Raises:
        GraphparError: there are none.
    """
    found: Counter[str] = Counter()
    for stage in stages:
        found += _counts(program, stage.graph)
    if not found:
        raise GraphparError(
            f"overlap_tp: {program.name} has no all-gather before a product and no reduce-scatter after one; leave it out, or give tp=2 or "
            "more and a shard plan that shards the sequence at the norms, such as {'**.input_layernorm': 'sequence'}."
        )
    return Overlapped(found["all_gather"], found["reduce_scatter"], found["products"])


def _counts(program: Program, graph: fx.Graph) -> Counter[str]:
    found: Counter[str] = Counter()
    for node in graph.nodes:
        if node.op == "call_module":
            found += _counts(program, program.block_of(node).graph)
        elif products := products_of(node):
            found += Counter({str(node.target.__name__): 1, "products": len(products)})
    return found


def with_rings(program: Program, stages: Sequence[Stage]) -> tuple[Program, list[Stage]]:
    """Return a program and its stages with the functions of ``ring_products.py``."""
    blocks = {name: replace(block, graph=_ringed(block.graph)) for name, block in program.blocks.items()}
    return program.with_graph(program.graph, blocks=blocks), [
        replace(stage, graph=_ringed(stage.graph)) for stage in stages
    ]


def _ringed(source: fx.Graph) -> fx.Graph:
    if not any(products_of(node) for node in source.nodes):
        return source
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.output(graph.graph_copy(source, copies))
    copies[source.output_node()] = output
    for old, new in copies.items():
        new.meta = dict(old.meta)
    for node in list(graph.nodes):
        if products := products_of(node):
            (_gathered if node.target is collectives.all_gather else _scattered)(graph, node, products)
    graph.lint()
    return graph


def _gathered(graph: fx.Graph, gather: fx.Node, products: Sequence[fx.Node]) -> None:
    x, axis = gather.args
    weights = [product.args[1] for product in products]
    biases = [product.args[2] if len(product.args) > 2 else None for product in products]
    places = {node: place for place, node in enumerate(graph.nodes)}
    first = min(products, key=places.__getitem__)
    for parameter in (item for item in (*weights, *biases) if isinstance(item, fx.Node)):
        for item in (*parameter.all_input_nodes, parameter):  # a cast of a parameter
            if places[item] > places[first]:
                first.prepend(item)
    options: dict[str, Any] = {"dim": gather.kwargs["dim"]}
    with graph.inserting_before(first):
        if len(products) == 1:
            options |= {} if biases[0] is None else {"bias": biases[0]}
            made = graph.call_function(ring_products.gathered_product, (x, weights[0], axis), options)
            made.meta = _meta(products[0], gather)
            products[0].replace_all_uses_with(made)
        else:
            options |= {"biases": biases} if any(biases) else {}
            made = graph.call_function(ring_products.gathered_products, (x, weights, axis), options)
            kept = {key: gather.meta[key] for key in ("module_stack", "source", "transition") if key in gather.meta}
            made.meta = kept | {"val": tuple(value_of(product) for product in products)}
            for place, product in enumerate(products):
                item = graph.call_function(operator.getitem, (made, place))
                item.meta = dict(product.meta)
                product.replace_all_uses_with(item)
    for product in products:
        graph.erase_node(product)
    graph.erase_node(gather)


def _scattered(graph: fx.Graph, scatter: fx.Node, products: Sequence[fx.Node]) -> None:
    (product,) = products
    x, weight = product.args
    with graph.inserting_before(scatter):
        made = graph.call_function(
            ring_products.scattered_product, (x, weight, scatter.args[1]), {"dim": scatter.kwargs["dim"]}
        )
    made.meta = dict(scatter.meta)
    scatter.replace_all_uses_with(made)
    graph.erase_node(scatter)
    graph.erase_node(product)


def _meta(product: fx.Node, gather: fx.Node) -> dict[str, Any]:
    return {**product.meta, "transition": gather.meta["transition"]}
