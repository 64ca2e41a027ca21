"""The sizes of products whose factors say them: which dims count, which are one operand's, which are summed.

einsum("bij,bjk->bik")   counted b   left i   right k   summed j       2 b i j k flops
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from graphpar.ir.program import operator_name
from graphpar.operators.matrix import einsum, tensordot
from graphpar.operators.placement import Size, operands_of, sizes_of

_RULES = {"einsum": einsum, "tensordot": tensordot}


@dataclass(frozen=True)
class Contraction:
    """A product of two operands, as many matrix products: sizes of the dims that each of them has, and of those that are summed."""

    counted: tuple[Size, ...]
    left: tuple[Size, ...]
    right: tuple[Size, ...]
    summed: tuple[Size, ...]

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Of all dims: a multiplication and an addition for each of their products."""
        return (*self.counted, *self.left, *self.right, *self.summed)


def contraction(node: fx.Node) -> Contraction | None:
    """The sizes of an operator that multiplies two tensors and sums; None for one that does not, or whose factors don't say it."""
    row, operands = _RULES.get(operator_name(node)), operands_of(node)
    if row is None or len(operands) != 2:
        return None
    rule = row(node)
    first, second = (
        {f: s for f, s in zip(factors, sizes_of(o)) if f != "1"} for factors, o in zip(rule.operands, operands)
    )
    if len(rule.operands) != 2 or not rule.linear:
        return None
    made = set(rule.results[0])
    both = first.keys() & second.keys()
    return Contraction(
        counted=tuple(size for factor, size in first.items() if factor in both & made),
        left=tuple(size for factor, size in first.items() if factor not in both),
        right=tuple(size for factor, size in second.items() if factor not in both),
        summed=tuple(size for factor, size in first.items() if factor in both - made),
    )
