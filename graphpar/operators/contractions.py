"""Count an operator's work as products of matrices [m, k] and [k, n], from the factors of its rule.

einsum("bij,bjk->bik")       b products   m = i   n = k   k = j            2 b i j k flops
einsum("ij,jk,kl->il")       two, from the left to the right
conv2d                       a product a group, as the columns of im2col give it
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from graphpar.ir.program import value_of
from graphpar.operators.placement import literal, operands_of
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of


@dataclass(frozen=True)
class Size:
    """``number * batch ** power``."""

    number: float
    power: int = 0

    def __mul__(self, other: Size | float) -> Size:
        if isinstance(other, Size):
            return Size(self.number * other.number, self.power + other.power)
        return Size(self.number * other, self.power)

    __rmul__ = __mul__

    def __add__(self, other: Size) -> Size:
        assert self.power == other.power, "sizes that grow differently with the batch"
        return Size(self.number + other.number, self.power)

    def at(self, batch: int) -> float:
        """Return the number for a batch of ``batch`` rows."""
        return float(self.number * float(batch) ** self.power)


ONE = Size(1.0)
Sizes = Callable[[fx.Node], Sequence[Size]]
"""The size of each dim of a value."""


def product_of(sizes: Iterable[Size]) -> Size:
    """Multiply sizes; 1 for none."""
    return functools.reduce(operator.mul, sizes, ONE)


@dataclass(frozen=True)
class Matrices:
    """``count`` products of [m, k] and [k, n].

    Attributes:
        left, right: the operands that each side is made of.
        shared: one matrix is applied to all rows, so that its gradient is a sum over the examples.
    """

    left: tuple[fx.Node, ...]
    right: fx.Node
    count: Size
    m: Size
    n: Size
    k: Size
    shared: bool

    @property
    def flops(self) -> Size:
        """Count 2: a multiplication and an addition, for each product of two elements."""
        return 2.0 * product_of((self.count, self.m, self.n, self.k))


def matrices(node: fx.Node, sizes: Sizes) -> list[Matrices]:
    """List the products of matrices that an operator computes, in order; none for attention and for other kinds of operators."""
    record = record_of(node)
    if record.kind is Kind.CONVOLUTION:
        return [_convolution(node, sizes)]
    if record.kind is Kind.GROUPED:
        return [_grouped(node, sizes)]
    if record.kind is not Kind.PRODUCT:
        return []
    rule = record.rule(node) if record.rule is not None else None
    operands = operands_of(node)
    if rule is None or len(rule.results) != 1:
        return []
    taken = [place for place in range(len(operands)) if place != record.bias]
    if rule.fixed and not rule.linear:
        return []  # no factor says what is summed
    return _contracted([operands[i] for i in taken], [rule.operands[i] for i in taken], set(rule.results[0]), sizes)


def _contracted(
    operands: Sequence[fx.Node], factors: Sequence[Sequence[str]], made: set[str], sizes: Sizes
) -> list[Matrices]:
    """Pair by pair; a factor is summed as soon as neither the result nor a later operand has it."""
    rows = [
        {factor: size for factor, size in zip(names, sizes(operand)) if factor != "1"}
        for names, operand in zip(factors, operands)
    ]
    found = []
    left, before = rows[0], tuple(operands[:1])
    for place in range(1, len(operands)):
        right = rows[place]
        kept = made.union(*(row.keys() for row in rows[place + 1 :]))
        both = left.keys() & right.keys()
        found.append(
            Matrices(
                before,
                operands[place],
                count=product_of(left[factor] for factor in left if factor in both & kept),
                m=product_of(size for factor, size in left.items() if factor not in both and factor in kept),
                n=product_of(size for factor, size in right.items() if factor not in both and factor in kept),
                k=product_of(left[factor] for factor in left if factor in both - kept),
                shared=not both & kept,
            )
        )
        left = {factor: size for factor, size in (left | right).items() if factor in kept}
        before = (*before, operands[place])
    return found


def _convolution(node: fx.Node, sizes: Sizes) -> Matrices:
    """For each group of channels: positions of the result (transposed: of the operand) by those of the kernel."""
    x, weight = operands_of(node)[:2]
    groups = int(literal(node, "groups", default=1))
    kernel = list(sizes(weight))
    transposed = "transpose" in str(node.target) or bool(literal(node, "transposed"))
    walked = list(sizes(x if transposed else node))
    channels = walked.pop(len(walked) - len(kernel) + 1)
    rows, inside = product_of(walked), product_of(kernel[1:])
    if transposed:
        return Matrices((x,), weight, Size(float(groups)), rows, inside, channels * (1 / groups), shared=True)
    return Matrices((x,), weight, Size(float(groups)), rows, channels * (1 / groups), inside, shared=True)


def _grouped(node: fx.Node, sizes: Sizes) -> Matrices:
    """Assumes that rows are spread evenly over the groups."""
    x, weight = operands_of(node)[:2]
    a, b, out = sizes(x), sizes(weight), sizes(node)
    if value_of(x).ndim == 2 and value_of(weight).ndim == 3:
        rows = Size(a[0].number / b[0].number, a[0].power)
        return Matrices((x,), weight, b[0], rows, b[2], a[-1], shared=True)
    return Matrices((x,), weight, product_of(out[:-2]), out[-2], out[-1], a[-1], shared=True)
