"""Rows of work: products, attention, memory traffic and collectives, of sizes that are symbolic in the batch.

A row belongs to one phase: the forward, the input half or the weight half of the backward (which some schedules run separately).
Sizes are products of numbers and of the batch, so one table serves every microbatch size.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import sympy  # type: ignore[import-untyped]

from graphpar.operators.contractions import Size as Size  # sizes of rows
from graphpar.operators.contractions import product_of


class Phase(IntEnum):
    """When a row runs: in F, in the input half I of a backward, or in its weight half W."""

    FORWARD = 0
    INPUT = 1
    WEIGHT = 2


class Product(NamedTuple):
    """``matrices`` products of [m, k] and [k, n], of ``itemsize`` bytes an element, into one of so many ``pieces`` of a tensor.

    ``copies``: so many ranks compute the same.
    """

    phase: Phase
    matrices: Size
    m: Size
    n: Size
    k: Size
    itemsize: int
    pieces: int = 1
    copies: int = 1


class Attention(NamedTuple):
    """Fused attention of ``heads`` (over the batch) query rows over key rows of ``width`` (mean of keys' and values').

    ``copies``: so many ranks compute the same.
    """

    phase: Phase
    heads: Size
    queries: Size
    keys: Size
    width: float
    causal: bool
    itemsize: int
    copies: int = 1


class Traffic(NamedTuple):
    """A memory-bound kernel: bytes read and written. ``functions``: it also computes exponentials or sums of rows."""

    phase: Phase
    nbytes: Size
    functions: bool = False


class Collective(NamedTuple):
    """A collective over ``axis``; ``nbytes`` is the size of the tensor unsharded on that axis, or of the message of a send.

    ``beside``: the rank computes these at the same time, if its device can; those of another phase only where one function runs both, as
    where a backward is not split in two.
    """

    phase: Phase
    axis: str
    kind: str
    nbytes: Size
    beside: tuple[Attention | Product, ...] = ()


Row = Product | Attention | Traffic | Collective


@dataclass(frozen=True)
class Work:
    """Rows of work, with how often each runs."""

    rows: Mapping[Row, int] = field(default_factory=dict)

    def __add__(self, other: Work) -> Work:
        return Work(dict(Counter(self.rows) + Counter(other.rows)))

    @property
    def operators(self) -> tuple[int, int, int]:
        """The number of operators of each phase."""
        found = Counter[Phase]()
        for row, times in self.rows.items():
            found[row.phase] += times
        return found[Phase.FORWARD], found[Phase.INPUT], found[Phase.WEIGHT]

    def flops(self, batch: int, phases: Sequence[Phase] = tuple(Phase)) -> float:
        """Return the flops of products and attention."""
        return sum(_flops(row).at(batch) * times for row, times in self.rows.items() if row.phase in phases)

    def own_flops(self, batch: int) -> float:
        """Return the rank's share of the model's flops of products and attention: what several ranks compute alike counts once."""
        found = (
            _flops(row).at(batch) * times / row.copies
            for row, times in self.rows.items()
            if isinstance(row, Product | Attention)
        )
        return sum(found)

    def formula(self, batch: sympy.Symbol) -> dict[str, sympy.Expr]:
        """Return flops of products, bytes of memory-bound kernels and bytes of collectives by axis, as polynomials in the batch."""
        found: dict[str, sympy.Expr] = defaultdict(lambda: sympy.Integer(0))
        for row, times in self.rows.items():
            if isinstance(row, Product | Attention):
                found["flops"] += times * _symbolic(_flops(row), batch)
            else:
                name = "memory bytes" if isinstance(row, Traffic) else f"{row.axis} bytes"
                found[name] += times * _symbolic(row.nbytes, batch)
        return {name: sympy.expand(value) for name, value in found.items()}


def _symbolic(size: Size, batch: sympy.Symbol) -> sympy.Expr:
    return sympy.nsimplify(size.number) * batch**size.power


ATTENTION_BACKWARD = 2.5
"""The flops of a fused attention's backward over its forward's: five products (scores again, four gradients) for two."""


def _flops(row: Row) -> Size:
    if isinstance(row, Product):
        return 2.0 * product_of((row.matrices, row.m, row.n, row.k))
    if isinstance(row, Attention):
        times = 4.0 * row.width * (0.5 if row.causal else 1.0)
        times *= 1.0 if row.phase is Phase.FORWARD else ATTENTION_BACKWARD
        return times * product_of((row.heads, row.queries, row.keys))
    return Size(0.0)
