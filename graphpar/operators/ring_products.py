"""Which products of a rank's graph can run beside a collective: those that take what is gathered, or make what is summed and scattered.

    all_gather(x) ──► linear, linear, linear       linear ──► reduce_scatter

The dim of the collective must be one of the rows, and divide evenly. Nothing else may read what is gathered, or what is scattered. A
product between two collectives is beside the gather.
"""

from __future__ import annotations

from torch import fx

from graphpar.emitted import collectives
from graphpar.ir.program import operator_name, value_of
from graphpar.operators.parameter_casts import casts_parameter

AXIS = "tp"


def products_of(node: fx.Node) -> list[fx.Node]:
    """Return the products that can run beside a collective, in order; none where ``node`` is no such collective."""
    if node.op != "call_function" or node.kwargs.keys() - {"dim"} or node.args[1:] != (AXIS,):
        return []
    if node.target is collectives.all_gather:
        return _beside_gather(node)
    if node.target is collectives.reduce_scatter:
        return _beside_scatter(node)
    return []


def _beside_gather(gather: fx.Node) -> list[fx.Node]:
    products = list(gather.users)
    if not all(_is_product(user) and gather not in user.args[1:] for user in products):
        return []
    return products if _is_of_rows(gather, gather) else []


def _beside_scatter(scatter: fx.Node) -> list[fx.Node]:
    product = scatter.args[0]
    assert isinstance(product, fx.Node)
    if not _is_product(product) or len(product.users) != 1 or len(product.args) > 2:
        return []
    if product in products_of(product.all_input_nodes[0]):  # beside the gather
        return []
    whole, piece = (value_of(node).shape[int(scatter.kwargs["dim"])] for node in (product, scatter))  # type: ignore[arg-type]
    return [product] if _is_of_rows(scatter, product) and whole % piece == 0 else []


def _is_of_rows(collective: fx.Node, whole: fx.Node) -> bool:
    last = value_of(whole).ndim - 1
    return collective.kwargs["dim"] in range(last)


def _is_product(node: fx.Node) -> bool:
    """Whether ``node`` applies a parameter to all rows of its operand."""
    if operator_name(node) != "linear" or node.kwargs:
        return False
    parameters = [item for item in node.args[1:] if isinstance(item, fx.Node)]
    return all(item.op == "get_attr" or casts_parameter(item) for item in parameters)
