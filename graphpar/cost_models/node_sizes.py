"""Sizes of a rank's values as they grow with the rows of a microbatch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torch import Tensor, fx

from graphpar.ir.batch_sizes import batch_coefficients
from graphpar.ir.program import operator_name, value_of
from graphpar.operators.contractions import Size, product_of


def has_tensors(node: fx.Node) -> bool:
    """Whether the value is a tensor, or several values with one among them."""
    value = value_of(node)
    if isinstance(value, tuple | list):
        return any(isinstance(item, Tensor) for item in value)
    return isinstance(value, Tensor)


def sizes_of(node: fx.Node) -> list[Size]:
    """Return the size of each dim of a rank's shard; a rank's program has as many rows of experts as an even spread gives it."""
    value = value_of(node)
    assert isinstance(value, Tensor)
    return [
        Size(float(coefficient), 1) if coefficient is not None else Size(float(int(size)))
        for size, coefficient in zip(value.shape, batch_coefficients(node))
    ]


def elements_of(node: fx.Node) -> Size:
    """Return how many elements a rank's shard has."""
    return product_of(sizes_of(node))


def nbytes_of(node: fx.Node) -> Size:
    """Return its bytes; of several values, those of the largest."""
    value = value_of(node)
    if isinstance(value, tuple | list):
        users = [user for user in node.users if operator_name(user) == "getitem" and isinstance(value_of(user), Tensor)]
        return max((nbytes_of(user) for user in users), default=Size(0.0), key=lambda size: size.at(1024))
    return elements_of(node) * float(value.dtype.itemsize)


def total(sizes: Iterable[Size]) -> list[Size]:
    """Return the sums of the sizes of each power."""
    found: dict[int, float] = defaultdict(float)
    for size in sizes:
        found[size.power] += size.number
    return [Size(number, power) for power, number in found.items()]
