"""Which products of a rank's graph stand beside a collective of tp: those that take what it gives, or make what it sums.

    all_gather(x)   ──► linear, linear, linear       linear ──► reduce_scatter
    sum_gradient(x) ──► linear, linear

Where the collective has a dim, it must be one of the rows, and divide evenly. Nothing else may read what a collective gives to products, or
what is summed. A product between two collectives is beside the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import fx

from graphpar.emitted import collectives, rotary
from graphpar.ir.program import operator_name, value_of
from graphpar.operators.parameter_casts import casts_parameter
from graphpar.operators.placement import Size, sizes_of
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of

AXIS = "tp"
ENTERING = (collectives.all_gather, collectives.sum_gradient)
"""Collectives before products."""
LEAVING = (collectives.reduce_scatter,)
"""Collectives after a product."""
IN_PIECES = (collectives.all_gather, collectives.reduce_scatter)
"""Collectives that can be sent in pieces, beside their products."""
_APART = {Kind.POINTWISE, Kind.VIEW, Kind.ALIAS, Kind.COPY, Kind.PERMUTE, Kind.EXPAND}
"""Kinds of operators that read rows wherever they lie in memory, and give rows that lie alike, or any."""


JOINED = "joined"
"""In the metadata of a collective: :class:`Joined`; in that of its products, where it is sent in pieces: the collective."""


class Joined(NamedTuple):
    """The products that become one function with a collective.

    Attributes:
        products: in order.
        ring: it is sent in pieces, beside these.
        in_order: what is gathered, and the results, lie in memory in their order.
    """

    products: tuple[fx.Node, ...]
    ring: bool
    in_order: bool


def joined_with(node: fx.Node) -> Joined | None:
    """Return what becomes one function with a collective; None where it stays by itself."""
    found = node.meta.get(JOINED)
    return found if isinstance(found, Joined) else None


def products_of(node: fx.Node) -> list[fx.Node]:
    """Return the products beside a collective, in order; none where ``node`` is no such collective."""
    if node.op != "call_function" or node.kwargs.keys() - {"dim"} or node.args[1:] != (AXIS,):
        return []
    if node.target in ENTERING:
        return _after(node)
    if node.target in LEAVING:
        return _before(node)
    return []


def joined_products_of(node: fx.Node) -> list[fx.Node]:
    """Return the products that become one function with a collective that sends whole tensors; none where it stays by itself."""
    products = products_of(node)
    return [] if products and _crossed(node.graph, products) else products


def _crossed(graph: fx.Graph, products: Sequence[fx.Node]) -> bool:
    """Whether other products stand between these: they have numbers, by which budgets of recomputation keep their results."""
    if len(products) == 1:
        return False
    nodes = list(graph.nodes)
    first, last = nodes.index(products[0]), nodes.index(products[-1])
    return any(record_of(node).multiplies and node not in products for node in nodes[first:last])


def in_order(node: fx.Node, dim: int, moved: bool = False) -> bool:
    """Whether what reads the rows of ``node`` wants them in memory in their order, ``dim`` not at the front; it would copy them else.

    ``moved``: dims are not where they were, so that ``dim`` is not known.
    """
    for user in node.users:
        kind = record_of(user).kind
        copied = kind is Kind.RESHAPE and record_of(node).kind is Kind.EXPAND  # wherever its rows lie
        if kind is Kind.ATTENTION or copied or _scattered_alike(user, dim, moved):
            continue
        with_ones = kind is Kind.RESHAPE and _longer(node) == _longer(user)
        alike = kind is Kind.RESHAPE and not moved and sizes_of(node)[: dim + 1] == sizes_of(user)[: dim + 1]
        if with_ones or alike:
            pass
        elif kind not in _APART and operator_name(user) != "getitem" and user.target is not rotary.apply_rotary:
            return True
        if in_order(user, dim, moved or with_ones or kind is Kind.PERMUTE):
            return True
    return False


def _longer(node: fx.Node) -> list[Size]:
    """Return the sizes of the dims that have more than one element."""
    return [size for size in sizes_of(node) if size != (1, 0)]


def _scattered_alike(product: fx.Node, dim: int, moved: bool) -> bool:
    """Whether ``product`` becomes one with a reduce-scatter that moves ``dim`` to the front, too."""
    after = next(iter(product.users), None)
    if moved or after is None or after.target is not collectives.reduce_scatter or after.kwargs.get("dim") != dim:
        return False
    return product in products_of(after)


def ring_products_of(node: fx.Node) -> list[fx.Node]:
    """Return the products beside the pieces of a collective; none where it is not sent in pieces."""
    return products_of(node) if node.target in IN_PIECES else []


def _after(collective: fx.Node) -> list[fx.Node]:
    products = list(collective.users)
    if not all(is_product(user) and collective not in user.args[1:] for user in products):
        return []
    return products if _is_of_rows(collective, collective) else []


def _before(collective: fx.Node) -> list[fx.Node]:
    product = collective.args[0]
    assert isinstance(product, fx.Node)
    if not is_product(product) or len(product.users) != 1 or len(product.args) > 2:
        return []
    if product in products_of(product.all_input_nodes[0]):  # beside what is before it
        return []
    if "dim" not in collective.kwargs:
        return [product]
    whole, piece = (value_of(node).shape[int(collective.kwargs["dim"])] for node in (product, collective))  # type: ignore[arg-type]
    return [product] if _is_of_rows(collective, product) and whole % piece == 0 else []


def _is_of_rows(collective: fx.Node, whole: fx.Node) -> bool:
    return "dim" not in collective.kwargs or collective.kwargs["dim"] in range(value_of(whole).ndim - 1)


def is_product(node: fx.Node) -> bool:
    """Whether ``node`` applies a parameter to all rows of its operand."""
    if operator_name(node) != "linear" or node.kwargs or value_of(node.args[1]).ndim != 2:  # type: ignore[arg-type]
        return False
    return all(is_parameter(item) for item in node.args[1:] if isinstance(item, fx.Node))


def is_parameter(node: fx.Node) -> bool:
    """Whether ``node`` is what the graph holds, perhaps in another dtype or with its dims in another order."""
    if node.op == "get_attr" or casts_parameter(node):
        return True
    return node.op == "call_function" and record_of(node).kind is Kind.PERMUTE and is_parameter(node.all_input_nodes[0])
