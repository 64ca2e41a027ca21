"""``Recomputation``: how a block runs its forward again in the backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from graphpar.emitted.recomputation import Keeps, listed_in, selected

GATHERS, POINTWISE = "gathers", "pointwise"
"""The kinds that only gather again (:mod:`graphpar.emitted.gathering`), or compute the results of pointwise operators and norms again
(:mod:`graphpar.emitted.pointwise`); one kind may be both, joined by ``+``."""


def gathers_again(kind: object) -> bool:
    """Whether blocks of one kind, if any, keep shards of what they gather."""
    return isinstance(kind, str) and GATHERS in kind.split("+")


@dataclass(frozen=True)
class Recomputation:
    """How a block is recomputed.

    Attributes:
        kind: ``pointwise``, ``gathers``, ``gathers+pointwise``, ``selective``, ``full`` or ``budget:SHARE``.
        calls: whose results a budget keeps: numbers of calls in a forward, by the name of the operator.
        nodes: the same as names of the block's nodes; for ``gathers`` and ``pointwise`` all that don't run again.
        writes: names, in the block, of its buffers that are written while the program runs.
        rows_travel: rows are on their way to experts while something else runs.
    """

    kind: str
    calls: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    nodes: frozenset[str] = frozenset()
    writes: tuple[str, ...] = ()
    rows_travel: bool = False

    @property
    def gathers(self) -> bool:
        """Whether gathers run again, and little else."""
        return gathers_again(self.kind)

    @property
    def pointwise(self) -> bool:
        """Whether pointwise operators and norms run again, and little else."""
        return POINTWISE in self.kind.split("+")

    @property
    def by_hooks(self) -> bool:
        """Whether hooks make single results again: the forward does not run again."""
        return self.gathers or self.pointwise

    @property
    def compiles(self) -> bool:
        """Whether ``torch.compile`` compiles the block with what it runs again."""
        return not self.by_hooks and not (self.keeps is not None and (self.writes or self.rows_travel))

    @property
    def keeps(self) -> Keeps | None:
        """Whether the result of an operator's call is kept; None where none is."""
        if self.kind == "selective":
            return selected
        return listed_in(self.calls) if self.calls else None
