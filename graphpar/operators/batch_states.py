"""How one value depends on the batch.

Fixed      the same for every microbatch
Rows       one slice an example: the batch is along a dim of size outer * batch * inner
Additive   a sum over examples: the value for the global batch is the sum over microbatches
Layout     the sizes of groups of sorted rows, or where they end
Coupled    examples are mixed (BatchNorm in training, attention over the batch): splitting the batch would change it
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from graphpar.ir.program import value_of
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of


@dataclass(frozen=True)
class Fixed:
    """``pure``: computed from inputs and constants alone, so it has no gradient and no parameter in it."""

    pure: bool = True


@dataclass(frozen=True)
class Rows:
    """``kind`` says what a row holds:

    values     anything that belongs to its example
    position   the row's own number, divided by ``divided``
    sorted     the number (divided by ``divided``) of the row that a sort put here
    inverse    where a sort put this row
    begins     where the row's own run of ``divided`` elements begins, in the order of the rows

    ``order`` names the sort, or the choice, that the rows went through; rows of different orders don't belong together.
    """

    dim: int
    outer: int = 1
    inner: int = 1
    pure: bool = True
    kind: str = "values"
    order: str | None = None
    divided: int = 1
    chosen: fx.Node | None = None  # the boolean mask that chose these rows; how many is known only when it runs

    @property
    def layout(self) -> tuple[int, int, str | None]:
        """What rows that belong together have in common."""
        return self.outer, self.inner, self.order


@dataclass(frozen=True)
class Additive:
    """``pure`` as for :class:`Fixed`."""

    pure: bool = True


@dataclass(frozen=True)
class Coupled:
    """``node`` mixes examples, for ``reason``."""

    reason: str
    node: fx.Node | None = None
    pure: bool = False


@dataclass(frozen=True)
class Layout:
    """The sizes of groups of sorted rows (how many each expert has), or where they end (``ends``)."""

    order: str
    pure: bool = True
    ends: bool = False


State = Fixed | Rows | Additive | Coupled | Layout


# ---- which rows a mask chooses ---------------------------------------------------------------------------------


def choice_of(mask: fx.Node) -> str:
    """Name the rows that ``mask`` chooses, in their order: equal for equal values, whatever the shape that they are seen in."""
    return f"chosen by {_digest(_row_major(mask), {})}"


def _row_major(node: fx.Node) -> fx.Node:
    """The value that ``node`` shows in another shape, element by element in the same order."""
    source = node.args[0] if node.args else None
    if (
        not isinstance(source, fx.Node)
        or not isinstance(value_of(source), Tensor)
        or not isinstance(value_of(node), Tensor)
    ):
        return node
    same = value_of(source).dtype == value_of(node).dtype
    kinds = (Kind.RESHAPE, Kind.ALIAS, Kind.COPY)
    return _row_major(source) if same and record_of(node).kind in kinds else node


def _digest(node: fx.Node, known: dict[fx.Node, str]) -> str:
    """A digest of how ``node`` is computed, the same for equal values: ``labels != -100`` may be written twice."""
    if node in known:
        return known[node]
    drawn = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    if node.op in ("placeholder", "get_attr") or drawn:
        text = node.name
    else:
        operands = node.all_input_nodes
        if len(operands) == 1 and record_of(node).kind in (Kind.POINTWISE, Kind.COPY):  # of a view is a view of it
            operands = [_row_major(operands[0])]
        words = [_digest(argument, known) for argument in operands]
        place = {argument: index for index, argument in enumerate(node.all_input_nodes)}
        shape = fx.map_arg((node.args, dict(node.kwargs)), lambda n: slice(place[n]))  # type: ignore[arg-type, return-value]
        text = f"{node.target}{shape}{words}"
    known[node] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return known[node]
