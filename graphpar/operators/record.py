"""One record for each operator: how it can be sharded, what kind of work it is, what its backward reads, how it is written.

    "linear": Record(Kind.PRODUCT, linear, bias=2, spelling=(function("F.linear", "input weight bias"),))

Records stand beside the rules of their family (:mod:`graphpar.operators.matrix`, ...); :mod:`graphpar.operators.table` has them
all. What can be derived is not in a record: flops of a product come from the factors of its rule, an operator without a record is
pointwise where torch says so, and how any other operator can be sharded is found by trial runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from torch import fx

from graphpar.operators.composite import Composite
from graphpar.operators.notation import Rule
from graphpar.operators.placement import Context, Placement
from graphpar.operators.spelling import Spelling

RuleOf = Callable[[fx.Node], Rule | None]
PlacementsOf = Callable[[fx.Node, Context], list[Placement]]


class Kind(Enum):
    """What kind of work an operator does."""

    PRODUCT = auto()  # multiplies tensors and sums: matmul, einsum
    GROUPED = auto()  # rows by group times each group's matrix
    CONVOLUTION = auto()
    ATTENTION = auto()
    LOOKUP = auto()  # rows of a table: embedding
    RECURRENT = auto()
    PERMUTE = auto()  # the same memory with dims in another order
    RESHAPE = auto()  # the same elements in the same order
    EXPAND = auto()  # dims of size 1 repeated, without memory
    VIEW = auto()  # parts, diagonals, windows: other views
    ALIAS = auto()  # the operand itself: detach, contiguous
    COPY = auto()  # its elements in new memory, or in another dtype
    MOVE = auto()  # joins, repeats, pads, shifts
    POINTWISE = auto()
    REDUCTION = auto()
    NORM = auto()  # divides by statistics of rows: layer_norm, softmax
    SCAN = auto()
    SORT = auto()
    INDEX = auto()  # picks and puts by index
    PLACES = auto()  # pools and interpolates
    TRANSFORM = auto()  # Fourier transforms, decompositions
    LOSS = auto()
    CLASS_LOSS = auto()  # of which the mean divides by (the weights of) the labels that count
    FACTORY = auto()  # makes a tensor of numbers
    RANDOM = auto()
    CHECK = auto()  # gives nothing: asserts of the trace
    NUMBER = auto()  # gives numbers: sizes and their arithmetic
    OTHER = auto()  # no record says


class Reads(Enum):
    """Which tensors of the forward an operator's backward reads, besides masks, indices and statistics."""

    NOTHING = auto()
    RESULT = auto()
    OPERANDS = auto()  # and perhaps the result


class Rounding(NamedTuple):
    """How a product rounds its operands to 8 bits: by which ``recipe``, ``block`` values of what is summed with a scale
    (0: all of them), and whether it does so for the gradient of its second operand, too."""

    recipe: str
    block: int = 0
    weights: bool = False


class Kernel(NamedTuple):
    """A kernel that moves ``moves`` times the bytes of its operator's result, or of an ``operand``; ``functions`` as in :class:`Record`.

    ``fused``: how often it moves them where a compiler makes it.
    """

    moves: float
    functions: bool = False
    operand: int | None = None
    fused: float | None = None


_MULTIPLIES = {Kind.PRODUCT, Kind.GROUPED, Kind.CONVOLUTION, Kind.ATTENTION}
_FREE = {Kind.PERMUTE, Kind.RESHAPE, Kind.EXPAND, Kind.VIEW, Kind.ALIAS}
_MOVES = _FREE | {Kind.COPY, Kind.MOVE, Kind.LOOKUP, Kind.INDEX, Kind.SORT, Kind.FACTORY, Kind.RANDOM}
_SAME_VALUE = {Kind.ALIAS, Kind.COPY}
_WHOLE = {Kind.PERMUTE, Kind.RESHAPE, Kind.EXPAND} | _SAME_VALUE
_FUSIBLE = {Kind.COPY, Kind.MOVE, Kind.POINTWISE, Kind.REDUCTION, Kind.NORM, Kind.LOSS, Kind.FACTORY, Kind.RANDOM}
_FUNCTIONS = {Kind.NORM, Kind.SCAN, Kind.SORT, Kind.CLASS_LOSS}
_PURE = _WHOLE | {Kind.VIEW, Kind.MOVE, Kind.POINTWISE, Kind.REDUCTION}

FIRST = (frozenset({0}),)
"""Linear in the first operand."""
EACH = (frozenset({0}), frozenset({1}))
"""Linear in each of two operands while the other is fixed."""
TOGETHER = (frozenset({0, 1}),)
"""Linear in two operands at once: a sum."""


@dataclass(frozen=True)
class Record:
    """What graphpar knows about one operator.

    Attributes:
        rule: its factors in one use; None where factors do not describe it.
        placements: its placements, where they need more than factors; used instead of the rule's.
        rounding: of a product that rounds what it multiplies.
        bias: the operand that is added to a product; where the product is partial, the bias must be partial, too.
        linear: for a pointwise operator, groups of operands in which it is linear while the others are fixed.
        tame: pointwise, and finite with finite slopes wherever its operands are, so that padding stays harmless.
        adds: linear in all operands at once: their sum, or their concatenation.
        neutral: the second operand that changes nothing: 0 of a sum, 1 of a product.
        saves: what its backward reads, where that does not follow from the kind.
        passes: its backward returns the gradient itself for the first operand, and so runs no kernel.
        functions: slower than its memory traffic on a device with slow exponentials (a CPU). Norms, scans and sorts always are.
        kernels: those of its forward, where they are more than one, and of its backward, unless ``backward`` has those.
        in_place: some of its kernels write what another made, so ``torch.compile`` doesn't fuse them.
        alone: no compiler fuses its kernels with others', as collectives stand between them.
        sizes: the argument that gives the result's sizes.
        module: the class of ``torch.nn`` that calls it with its own parameters; ``{}`` in it is the number of spatial dims.
        spelling: how people write it, tried in turn; where none fits, :mod:`graphpar.codegen.spelling` looks in torch.
        composite: what else there is to know of a function of ``graphpar.emitted``.
    """

    kind: Kind
    rule: RuleOf | None = None
    placements: PlacementsOf | None = None
    rounding: Rounding | None = None
    bias: int | None = None
    linear: tuple[frozenset[int], ...] = ()
    tame: bool = False
    adds: bool = False
    neutral: float | None = None
    saves: Reads | None = None
    passes: bool = False
    functions: bool = False
    kernels: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()
    in_place: bool = False
    alone: bool = False
    sizes: str = ""
    module: str = ""
    spelling: tuple[Spelling, ...] = ()
    composite: Composite | None = None

    @property
    def multiplies(self) -> bool:
        """Whether its work is products of matrices."""
        return self.kind in _MULTIPLIES

    @property
    def reads(self) -> Reads:
        """What its backward reads, so that autograd keeps it."""
        if self.saves is not None:
            return self.saves
        return Reads.NOTHING if self.kind in _MOVES else Reads.OPERANDS

    @property
    def free(self) -> bool:
        """Whether it is a view: no kernel runs (unless the memory layout forces a copy)."""
        return self.kind in _FREE

    @property
    def same_value(self) -> bool:
        """Whether the result has the operand's values, perhaps in another dtype or layout, so that people give both one name."""
        return self.kind in _SAME_VALUE

    @property
    def same_elements(self) -> bool:
        """Whether the result has exactly the operand's elements, perhaps in another shape or dtype."""
        return self.kind in _WHOLE

    @property
    def fusible(self) -> bool:
        """Whether a compiler fuses it with pointwise operators into one kernel."""
        return self.kind in _FUSIBLE

    @property
    def slow(self) -> bool:
        """Whether it is slower than its memory traffic on a device with slow exponentials."""
        return self.functions or self.kind in _FUNCTIONS

    @property
    def pure(self) -> bool:
        """Whether equal operands give equal results, for operators that masks are made of."""
        return self.kind in _PURE


Records = Mapping[str, Record]


def each(names: str, record: Record) -> dict[str, Record]:
    """Give several operators the same record: ``each("mm bmm", ...)``."""
    return dict.fromkeys(names.split(), record)
