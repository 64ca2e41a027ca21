"""What the values of a mask prove of attention, whatever the inputs: that it is causal, or a window that slides.

    arange ──► unsqueeze ──► <= ──► & ──► index ... ──► mask [b, 1, s, s]        is_causal: row i shows columns 0 to i
                                                                                 window w: row i shows max(0, i - w + 1) to i

What the mask is made of runs on small tensors. The mask itself has s x s elements, too many to make for a long sequence, so
comparisons of a column with a row, and what is made of them, are kept as which columns each row shows (:class:`_Band`).
Other masks (``triu`` of ones) are made, up to ``MOST_ELEMENTS``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from graphpar.errors import GraphparError
from graphpar.ir.batch_sizes import batch_coefficients, size_coefficient
from graphpar.ir.program import Program, TensorInfo, operator_name, value_of
from graphpar.operators.elementwise import COMPARISONS
from graphpar.operators.record import Kind
from graphpar.operators.rules import rule_of
from graphpar.operators.table import record_of
from graphpar.passes.normalize.functional import is_inplace
from graphpar.passes.normalize.graph_matching import number, sizes
from graphpar.runtime.option_kinds import GENERATE

HIDES = -1e9
"""Added to a score, or in its place, this or less is a weight of zero in every dtype."""
MOST_ELEMENTS = 2**26
"""Masks with more elements are not made."""
SMALL = 2**16
"""Masks with more elements are bands, where they can be said so."""
_EXAMPLES = 2
"""So many stand for all, as what may differ between them is not taken (:mod:`graphpar.passes.normalize.causal_masks`)."""
_ALL, _SHORT = 128, 16
"""Of a sequence of at most so many positions, masks of all lengths are tried; of a longer one, so many of the shortest, and a few."""
_SHAPES_ALONE = (Kind.FACTORY, Kind.NUMBER)
"""Operators that read a tensor's shape, and not its values."""


class _UnknownError(Exception):
    """The mask depends on values that are not known before the program runs."""


UNKNOWN = (_UnknownError, GraphparError, RuntimeError, TypeError, LookupError, ValueError)


@dataclass(frozen=True)
class _Band:
    """A mask that shows the columns from ``first`` to before ``end`` of each row; ``hidden`` is added to (or in place of) the others.

    Attributes:
        first: int64 [..., rows], at most ``end``, of the same shape.
        columns: how many there are.
        hidden: None for a mask of booleans.
    """

    first: Tensor
    end: Tensor
    columns: int
    hidden: float | None = None

    def __post_init__(self) -> None:
        assert bool((self.first <= self.end).all())

    def __and__(self, other: _Band) -> _Band:
        first, end = torch.maximum(self.first, other.first), torch.minimum(self.end, other.end)
        return _Band(first, torch.maximum(first, end), self.columns)

    def __or__(self, other: _Band) -> _Band | None:
        """What either shows; None where that has holes."""
        a, b, c, d = torch.broadcast_tensors(self.first, self.end, other.first, other.end)
        without, with_none = a == b, c == d
        whole = without | with_none | (torch.maximum(a, c) <= torch.minimum(b, d))
        if not bool(whole.all()):
            return None
        first = torch.where(without, c, torch.where(with_none, a, torch.minimum(a, c)))
        end = torch.where(without, d, torch.where(with_none, b, torch.maximum(b, d)))
        return _Band(first, end, self.columns)

    def __invert__(self) -> _Band | None:
        """What it hides; None where that has holes."""
        before, after = (self.first == 0), (self.end == self.columns)
        if not bool((before | after | (self.first == self.end)).all()):
            return None
        none = self.first == self.end
        first = torch.where(before & ~none, self.end, 0)
        end = torch.where(before | none, self.columns, self.first)
        return _Band(first, torch.maximum(first, end), self.columns)


class Condition(NamedTuple):
    """A condition for a column to be shown: that a mask shows it or, of ``shown`` False, hides it.

    Attributes:
        node: of booleans, or added to scores.
        number: of other numbers, which must be this one.
    """

    node: fx.Node
    shown: bool = True
    number: float | None = None

    def of(self, value: Any) -> Any:
        """Return the mask of booleans that is this condition, from the value of ``node``; a mask that is added stays as it is."""
        if isinstance(value, _Band) and self.number is not None:
            value = replace(value, hidden=None) if self.number == 0 else ~replace(value, hidden=None)
        elif self.number is not None:
            value = value == self.number
        value = value if self.shown else ~value
        if value is None:
            raise _UnknownError
        return value


class Masks:
    """Knows which columns the masks of a program show; layers share them.

    Attributes:
        program: the program whose graph the masks are in.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._lengths: dict[int, _Values] = {}
        self._known: dict[tuple[Condition, ...], int | None] = {}
        self.cases: dict[tuple[fx.Node, int | str], Any] = {}
        self.copies: dict[fx.Node, fx.Node] = {}

    def window(self, conditions: tuple[Condition, ...], length: int | str) -> int | None:
        """Return how many columns all of ``conditions`` show each row, its own the last, where there are so many before it.

        That is the longest length (:meth:`longest`) where they are causal; None where they show anything else. A ``length`` that is no
        number is that of the sequence of a program for generation, whose masks are tried in several lengths.
        """
        whole = [sizes(each.node)[-2:] == [length, length] for each in conditions]
        masks = tuple(
            each
            for _, each in sorted(zip(whole, conditions), key=lambda pair: (not pair[0], -value_of(pair[1].node).ndim))
        )
        made = value_of(masks[0].node)
        if not isinstance(made, Tensor) or made.ndim < 2 or sizes(masks[0].node)[-2:] != [length, length]:
            return None
        if not isinstance(length, int) and (self.program.mode != GENERATE or size_coefficient(made.shape[-1]) != 1):
            return None
        if masks not in self._known:
            try:
                with torch.no_grad():
                    self._known[masks] = self._window(masks, length)
            except UNKNOWN:
                self._known[masks] = None
        return self._known[masks]

    def _window(self, masks: tuple[Condition, ...], length: int | str) -> int | None:
        longest = self.longest(length)
        width = _last_row(self._shown(masks, length, longest))
        if not 1 <= width <= longest:
            return None
        tried = [longest] if isinstance(length, int) else tried_lengths(longest, width)
        return width if all(_shows(self._shown(masks, length, n), n, width) for n in tried) else None

    def _shown(self, masks: tuple[Condition, ...], length: int | str, tried: int) -> Any:
        """Return what all of the masks show; several are of booleans."""
        first, *others = (mask.of(self._values(length, tried).of(mask.node)) for mask in masks)
        for other in others:
            first = (
                first & other
                if isinstance(first, Tensor) and isinstance(other, Tensor)
                else _joined(first, other, _AND)
            )
        return first

    def values(self, node: fx.Node) -> Iterator[tuple[int, Any]]:
        """Yield lengths of a sequence of a program for generation, the longest first, with the value that ``node`` has in each.

        It is None where it depends on more than constants.
        """
        for length in reversed(tried_lengths(self.program.batch)):
            try:
                with torch.no_grad():
                    value = self._values("", length).of(node)
            except UNKNOWN:
                value = None
            yield length, value

    def ends(self, node: fx.Node) -> tuple[float, float] | None:
        """Return the least and the most number of a constant that has no others, whatever the batch; None where it has, or is none."""
        values = self._values(0, 0)
        try:
            with torch.no_grad():
                value = values.of(node)
            if node in values.differing or self.program.mode == GENERATE:
                return None
            if isinstance(value, _Band):
                return (min(0.0, value.hidden), max(0.0, value.hidden)) if value.hidden is not None else None
            least, most = value.aminmax()
            return (float(least), float(most)) if bool(((value == least) | (value == most)).all()) else None
        except UNKNOWN:
            return None

    def longest(self, length: int | str) -> int:
        """Return the length, or that of the longest sequence that a program for generation takes."""
        return length if isinstance(length, int) else self.program.batch

    def _values(self, length: int | str, tried: int) -> _Values:
        """Return the values that the program has, for sequences of ``tried`` positions where their length varies."""
        varies = not isinstance(length, int)
        return self._lengths.setdefault(tried if varies else 0, _Values(self.program, tried if varies else None))


def tried_lengths(longest: int, width: int | None = None) -> list[int]:
    """Return lengths that stand for all up to ``longest``, with those about a window of ``width`` positions."""
    short = longest if longest <= _ALL else _SHORT
    about = {width - 1, width, width + 1} if width is not None else set()
    tried = {*range(1, short + 1), *about, longest // 2, longest - 1, longest}
    return sorted(n for n in tried if 1 <= n <= longest)


def _last_row(value: Any) -> int:
    """Return how many columns the last row of a mask shows."""
    if isinstance(value, _Band):
        return int((value.end - value.first)[..., -1].flatten()[0])
    if not isinstance(value, Tensor):
        raise _UnknownError
    row = value[..., -1, :].reshape(-1, value.shape[-1])[0]
    return int((row if row.dtype == torch.bool else row == 0).sum())


def _shows(value: Any, length: int, width: int) -> bool:
    """Whether each row of a mask shows its own column and the ``width - 1`` before it, and hides the others."""
    if isinstance(value, _Band):
        end = torch.arange(1, length + 1)
        hides = value.hidden is None or value.hidden <= HIDES
        exact = bool((value.end == end).all() and (value.first == (end - width).clamp(min=0)).all())
        return hides and value.columns == length and exact
    if not isinstance(value, Tensor) or value.shape[-2:] != (length, length):
        return False
    shown = torch.ones(length, length, dtype=torch.bool).tril_().triu_(1 - width)
    if value.dtype == torch.bool:
        return bool((value == shown).all())
    return bool(torch.where(shown, value == 0, value <= HIDES).all())


class _Values:
    """The values of a graph's nodes for a batch of two examples, where they follow from constants alone and no example is special.

    ``positions``: of a program for generation, whose batch they are; they may differ.
    """

    def __init__(self, program: Program, positions: int | None = None) -> None:
        self.program, self.positions = program, positions
        self.batch = positions or _EXAMPLES
        self.known: dict[fx.Node, Any] = {}
        self.differing: set[fx.Node] = set()  # between examples

    def of(self, node: fx.Node) -> Any:
        """Return the value of ``node``, a tensor, a number or a :class:`_Band`.

        Raises:
            _UnknownError: it depends on inputs, parameters or buffers, or is too large.
        """
        required, left = {node}, [node]
        while left:
            above = [each for each in self._needed(left.pop()) if each not in required and each not in self.known]
            if any(each.op == "placeholder" for each in above):
                raise _UnknownError
            required.update(above)
            left += above
        for current in node.graph.nodes:
            if current in required and current not in self.known:
                self.known[current] = value = self._computed(current)
                self._compare(current, value)
        return self.known[node]

    def _compare(self, node: fx.Node, value: Any) -> None:
        """Note whether ``node`` differs between examples.

        Raises:
            _UnknownError: it may do so in larger batches.
        """
        if node.op != "call_function" or not isinstance(value, Tensor | _Band) or self.positions is not None:
            return
        found = differs(node, value if isinstance(value, Tensor) else None, self.differing)
        if found is None:
            raise _UnknownError
        if found:
            self.differing.add(node)

    def _needed(self, node: fx.Node) -> list[fx.Node]:
        if node.op != "call_function" or record_of(node).kind in _SHAPES_ALONE:
            return [each for each in node.all_input_nodes if not isinstance(value_of(each), Tensor)]
        return node.all_input_nodes

    def _computed(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            name = str(node.target)
            if name in self.program.constants and self._stays(node, self.program.buffers.get(name)):
                return self.program.constants[name]
            raise _UnknownError
        value = node.meta.get("val")
        if isinstance(value, int | torch.SymInt):
            coefficient = size_coefficient(value)
            return int(value) if coefficient is None else coefficient * self.batch
        if node.op != "call_function" or record_of(node).kind is Kind.RANDOM:
            raise _UnknownError
        if isinstance(value, Tensor) and value.ndim >= 2 and self._size(node) > SMALL:
            band = self._as_band(node)
            if band is not None:
                return band
            if self._size(node) > MOST_ELEMENTS:
                raise _UnknownError
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._plain)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _stays(self, node: fx.Node, buffer: TensorInfo | None) -> bool:
        """Whether a constant has its value whenever the program runs: no buffer, or in generation one that is neither saved nor written."""
        if buffer is None:
            return True
        return self.positions is not None and not buffer.persistent and not any(map(is_inplace, node.users))

    def _plain(self, node: fx.Node) -> Any:
        if node not in self.known:  # only its shape is read
            return torch.zeros((), dtype=value_of(node).dtype).expand(self._shape(node))
        value = self.known[node]
        if isinstance(value, _Band):
            shape = self._shape(node)
            if value.end.numel() * value.columns > MOST_ELEMENTS:
                raise _UnknownError
            column = torch.arange(value.columns)
            shown = (column >= value.first.unsqueeze(-1)) & (column < value.end.unsqueeze(-1))
            whole = shown if value.hidden is None else torch.zeros(shown.shape).masked_fill(~shown, value.hidden)
            return whole.expand(shape).to(value_of(node).dtype)
        return value

    def _shape(self, node: fx.Node) -> tuple[int, ...]:
        given = zip(value_of(node).shape, batch_coefficients(node))
        return tuple(int(size) if coefficient is None else coefficient * self.batch for size, coefficient in given)

    def _size(self, node: fx.Node) -> int:
        return math.prod(self._shape(node))

    # ---- masks as bands ----

    def _as_band(self, node: fx.Node) -> _Band | None:
        """Return a large mask as what each row shows; None where that can't be said."""
        name, known = (
            operator_name(node),
            [self.known.get(each) if isinstance(each, fx.Node) else each for each in node.args],
        )
        tensors = [each for each in known if isinstance(each, Tensor)]
        first = known[0] if known else None
        if record_of(node).kind is Kind.POINTWISE and len(known) == len(tensors) == 2:
            return _visible_columns(node, *tensors)
        if (truth := _truth_table(node)) is not None:
            if len(known) == 1:
                return ~first if truth == _NOT and isinstance(first, _Band) and first.hidden is None else None
            return _joined(known[0], known[1], truth)
        if name == "where" and len(known) == 3 and isinstance(first, _Band) and first.hidden is None:
            shown, hidden = _scalar(known[1]), _scalar(known[2])
            made = replace(first, hidden=hidden)
            return made if shown == 0 and hidden is not None else None
        if isinstance(first, _Band) and (record_of(node).kind in (Kind.COPY, Kind.ALIAS) or name == "expand"):
            return first if value_of(node).is_floating_point() == (first.hidden is not None) else None
        return None


def _scalar(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return number(value)


def _visible_columns(node: fx.Node, first: Tensor, second: Tensor) -> _Band | None:
    """Compare columns [.., 1, s] with rows [.., s, 1]: columns that grow are shown up to a place, from one on, or between two."""
    if first.ndim < 2 or second.ndim < 2 or first.is_complex() or second.is_complex() or node.kwargs:
        return None
    if operator_name(node) not in COMPARISONS:
        return None
    less, same, more = node.target(torch.tensor([-1, 0, 1]), torch.tensor(0)).tolist()  # type: ignore[operator]
    if first.shape[-1] == 1 and second.shape[-2] == 1:  # rows first
        first, second, less, more = second, first, more, less
    if first.shape[-2] != 1 or second.shape[-1] != 1:
        return None
    columns, rows = (
        each if each.is_floating_point() else each.long() for each in (first.squeeze(-2), second.squeeze(-1))
    )  # differences of booleans and of uint8 are not negative
    lead = torch.broadcast_shapes(columns.shape[:-1], rows.shape[:-1])
    columns = columns.expand(*lead, -1).contiguous()
    rows = rows.expand(*lead, -1).contiguous()
    width = columns.shape[-1]
    if (less and more) or not bool((columns.diff(dim=-1) >= 0).all()) or bool(rows.isnan().any()):
        return None
    below, upto = (torch.searchsorted(columns, rows, right=right) for right in (False, True))
    begin = torch.zeros_like(below) if less else below if same else upto
    end = torch.full_like(below, width) if more else upto if same else below
    return _Band(begin, end, width)


_AND, _OR, _NOT = (False, False, False, True), (False, True, True, True), (True, False)


def _truth_table(node: fx.Node) -> tuple[bool, ...] | None:
    """Return what an operator makes of booleans, False first; None where it takes others, or makes others."""
    if record_of(node).kind is not Kind.POINTWISE or len(node.args) not in (1, 2) or node.kwargs:
        return None
    if any(not isinstance(each, fx.Node) or value_of(each).dtype != torch.bool for each in node.args):
        return None
    one, two = torch.tensor([False, True]), (torch.tensor([False, False, True, True]), torch.tensor([False, True] * 2))
    made = node.target(*((one,) if len(node.args) == 1 else two))  # type: ignore[operator]
    return tuple(made.tolist()) if made.dtype == torch.bool else None


def _joined(first: Any, second: Any, truth: tuple[bool, ...]) -> _Band | None:
    """Join two masks of booleans (and, or), of which one may be the same for all columns, or for all rows."""
    if not isinstance(first, _Band):
        first, second = second, first
    if not isinstance(first, _Band) or first.hidden is not None:
        return None
    other = second if isinstance(second, _Band) else as_band(second, first.columns)
    if other is None or other.hidden is not None or other.columns != first.columns:
        return None
    return first & other if truth == _AND else first | other if truth == _OR else None


def as_band(mask: Any, columns: int) -> _Band | None:
    """Return a mask of booleans as a band; None where a row has holes, or they are fewer columns."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        return None
    if mask.ndim == 0 or mask.shape[-1] == 1:
        end = (mask.squeeze(-1) if mask.ndim else mask) * columns
        return _Band(torch.zeros_like(end), end, columns)
    if mask.shape[-1] != columns:
        return None
    shown = mask.int() if mask.ndim > 1 else mask.int().unsqueeze(0)
    count, first = shown.sum(-1), shown.argmax(-1)
    whole = (
        shown.cumsum(-1).eq(count.unsqueeze(-1)).int().argmax(-1) - first + 1 == count
    )  # the last that is shown follows the others
    return _Band(first, first + count, columns) if bool((whole | (count == 0)).all()) else None


# ---- batches ----------------------------------------------------------------------------------------------------
#
# zeros(b, s), arange(s).expand(b, s)     the same for all examples, and so is what is computed of each row by itself
# arange(b)                               differs; it may only pick the rows of what is the same: table[arange(b)]


_SIZES = (Kind.FACTORY, Kind.NUMBER, Kind.RESHAPE, Kind.EXPAND, Kind.VIEW)
"""Operators that may take the number of examples, as a size."""


def differs(node: fx.Node, value: Tensor | None, differing: Collection[fx.Node]) -> bool | None:
    """Return whether ``node`` differs between examples, by its value for two of them; None where that says nothing of more.

    Args:
        value: None where it is known to be alike if its operands are.
        differing: the nodes before it that differ.
    """
    record, sources = record_of(node), node.all_input_nodes
    counts = {each for each in sources if isinstance(value_of(each), torch.SymInt)}
    counts = {each for each in counts if size_coefficient(value_of(each)) is not None}
    if counts and record.kind not in _SIZES:
        return None  # computes with the number of examples
    if record.kind is Kind.FACTORY and any(isinstance(item, fx.Node) and item in counts for item in node.args):
        return True  # its elements are made of it, as those of arange(b), or full([], b)
    own = [each for each in sources if each in differing]
    if own and not record.same_elements:
        return False if _picks(node, own) else None
    if not own and not _by_row(node):
        return None
    return value is not None and _differs(node, value)


def _differs(node: fx.Node, value: Tensor) -> bool:
    dims = [dim for dim, coefficient in enumerate(batch_coefficients(node)) if coefficient is not None]
    return any(not bool((value == value.narrow(dim, 0, 1)).all()) for dim in dims)


def _by_row(node: fx.Node) -> bool:
    """Whether an operator of values that are alike gives one that is, if it does for two examples."""
    record = record_of(node)
    if record.kind in _SIZES or record.kind in (Kind.POINTWISE, Kind.COPY, Kind.ALIAS, Kind.PERMUTE):
        return True
    sources = [each for each in node.all_input_nodes if isinstance(value_of(each), Tensor)]
    if all(not any(each is not None for each in batch_coefficients(source)) for source in sources):
        return True  # of no example
    if record.kind is Kind.INDEX:
        return _picks(node, [])
    rule = rule_of(node)
    if rule is None or not isinstance(value_of(node), Tensor):
        return False
    following = {
        factors[dim]
        for source, factors in zip(sources, rule.operands)
        for dim, coefficient in enumerate(batch_coefficients(source))
        if coefficient is not None
    }
    return following <= set(rule.results[0]) - set(rule.fixed)


def _picks(node: fx.Node, own: list[fx.Node]) -> bool:
    """Whether ``table[index, ...]`` picks rows of a table that is alike, by indices of which ``own`` are those of examples."""
    if record_of(node).kind is not Kind.INDEX or len(node.args) != 2 or not isinstance(node.args[1], list | tuple):
        return False
    table, indices = node.args
    if not isinstance(table, fx.Node) or table in own:
        return False
    following = batch_coefficients(table)
    given = list(zip(indices, following))  # type: ignore[arg-type]
    return all((index in own) <= (coefficient is not None) for index, coefficient in given if index is not None)
