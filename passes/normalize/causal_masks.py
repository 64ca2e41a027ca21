"""Whether the values of a mask prove that attention is causal, whatever the inputs.

    arange ──► unsqueeze ──► <= ──► & ──► index ... ──► mask [b, 1, s, s]        is_causal: row i shows columns 0 to i

What the mask is made of runs on small tensors. The mask itself has s x s elements, too many to make for a long sequence, so
comparisons of a column with a row, and what is made of them, are kept as how many columns each row shows (:class:`_Prefix`).
Other masks (``triu`` of ones) are made, up to ``MOST_ELEMENTS``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.errors import GraphparError
from graphpar.ir.program import Program, TensorInfo, batch_coefficients, operator_name, size_coefficient, value_of
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.normalize.alike_examples import differs
from graphpar.passes.normalize.functional import is_inplace
from graphpar.passes.normalize.graph_matching import number, sizes
from graphpar.runtime.modes import GENERATE

HIDES = -1e9
"""Added to a score, or in its place, this or less is a weight of zero in every dtype."""
MOST_ELEMENTS = 2**26
"""Masks with more elements are not made."""
_EXAMPLES = 2
"""So many stand for all, as what may differ between them is not taken (:mod:`graphpar.passes.normalize.alike_examples`)."""
_ALL, _SHORT = 128, 16
"""Of a sequence of at most so many positions, masks of all lengths are tried; of a longer one, so many of the shortest, and a few."""
_SHAPES_ALONE = (Kind.FACTORY, Kind.NUMBER)
"""Operators that read a tensor's shape, and not its values."""


class _UnknownError(Exception):
    """The mask depends on values that are not known before the program runs."""


@dataclass(frozen=True)
class _Prefix:
    """A mask that shows the first ``count`` columns of each row: int64 [..., rows]; ``hidden`` is added to (or in place of) the others.

    ``hidden`` is None for a mask of booleans.
    """

    count: Tensor
    columns: int
    hidden: float | None = None


class Masks:
    """Knows which masks of a program are causal; layers share them.

    Attributes:
        program: the program whose graph the masks are in.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._lengths: dict[int, _Values] = {}
        self._known: dict[fx.Node, bool] = {}

    def is_causal(self, mask: fx.Node, length: int | str) -> bool:
        """Return whether ``mask``, of booleans or added to the scores, shows each row exactly the columns up to its own.

        A ``length`` that is no number is that of the sequence of a program for generation, whose masks are tried in several lengths.
        """
        made = value_of(mask)
        if not isinstance(made, Tensor) or made.ndim < 2 or sizes(mask)[-2:] != [length, length]:
            return False
        if not isinstance(length, int) and (self.program.mode != GENERATE or size_coefficient(made.shape[-1]) != 1):
            return False
        if mask not in self._known:
            try:
                with torch.no_grad():
                    self._known[mask] = all(_shows_lower(values.of(mask), n) for n, values in self._tried(length))
            except (_UnknownError, GraphparError, RuntimeError, TypeError, LookupError, ValueError):
                self._known[mask] = False
        return self._known[mask]

    def _tried(self, length: int | str) -> Iterator[tuple[int, _Values]]:
        """Yield lengths, with the values that the program has for sequences of them."""
        if isinstance(length, int):
            yield length, self._lengths.setdefault(0, _Values(self.program))
            return
        longest = self.program.batch
        short = longest if longest <= _ALL else _SHORT
        for tried in sorted({*range(1, min(short, longest) + 1), longest // 2, longest - 1, longest} - {0}):
            yield tried, self._lengths.setdefault(tried, _Values(self.program, tried))


def _shows_lower(value: Any, length: int) -> bool:
    if isinstance(value, _Prefix):
        rows = torch.arange(1, length + 1)
        hides = value.hidden is None or value.hidden <= HIDES
        return hides and value.columns == length and bool((value.count == rows).all())
    if not isinstance(value, Tensor) or value.shape[-2:] != (length, length):
        return False
    lower = torch.ones(length, length, dtype=torch.bool).tril_()
    if value.dtype == torch.bool:
        return bool((value == lower).all())
    return bool(torch.where(lower, value == 0, value <= HIDES).all())


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
        """Return the value of ``node``, a tensor, a number or a :class:`_Prefix`.

        Raises:
            _UnknownError: it depends on inputs, parameters or buffers, or is too large.
        """
        wanted, left = {node}, [node]
        while left:
            above = [each for each in self._needed(left.pop()) if each not in wanted and each not in self.known]
            if any(each.op == "placeholder" for each in above):
                raise _UnknownError
            wanted.update(above)
            left += above
        for current in node.graph.nodes:
            if current in wanted and current not in self.known:
                self.known[current] = value = self._computed(current)
                self._compare(current, value)
        return self.known[node]

    def _compare(self, node: fx.Node, value: Any) -> None:
        """Note whether ``node`` differs between examples.

        Raises:
            _UnknownError: it may do so in larger batches.
        """
        if node.op != "call_function" or not isinstance(value, Tensor | _Prefix) or self.positions is not None:
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
        if isinstance(value, Tensor) and value.ndim >= 2 and self._size(node) > 2**16:
            prefix = self._as_prefix(node)
            if prefix is not None:
                return prefix
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
        if isinstance(value, _Prefix):
            shape = self._shape(node)
            if value.count.numel() * value.columns > MOST_ELEMENTS:
                raise _UnknownError
            shown = torch.arange(value.columns) < value.count.unsqueeze(-1)
            whole = shown if value.hidden is None else torch.zeros(shown.shape).masked_fill(~shown, value.hidden)
            return whole.expand(shape).to(value_of(node).dtype)
        return value

    def _shape(self, node: fx.Node) -> tuple[int, ...]:
        given = zip(value_of(node).shape, batch_coefficients(node))
        return tuple(int(size) if coefficient is None else coefficient * self.batch for size, coefficient in given)

    def _size(self, node: fx.Node) -> int:
        return math.prod(self._shape(node))

    # ---- masks as prefixes ----

    def _as_prefix(self, node: fx.Node) -> _Prefix | None:
        """Return a large mask as what each row shows; None where that can't be said."""
        name, known = (
            operator_name(node),
            [self.known.get(each) if isinstance(each, fx.Node) else each for each in node.args],
        )
        tensors = [each for each in known if isinstance(each, Tensor)]
        if record_of(node).kind is Kind.POINTWISE and len(known) == len(tensors) == 2:
            return _compared(node, *tensors)
        if (pick := _pick(node)) is not None:
            return _joined(known[0], known[1], pick)
        first = known[0] if known else None
        if name == "where" and len(known) == 3 and isinstance(first, _Prefix) and first.hidden is None:
            shown, hidden = _scalar(known[1]), _scalar(known[2])
            return _Prefix(first.count, first.columns, hidden) if shown == 0 and hidden is not None else None
        if isinstance(first, _Prefix) and (record_of(node).kind in (Kind.COPY, Kind.ALIAS) or name == "expand"):
            return first if value_of(node).is_floating_point() == (first.hidden is not None) else None
        return None


def _scalar(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return number(value)


def _compared(node: fx.Node, first: Tensor, second: Tensor) -> _Prefix | None:
    """Compare columns [.., 1, s] with rows [.., s, 1]: columns that grow are shown up to a place."""
    if first.ndim < 2 or second.ndim < 2 or first.is_complex() or second.is_complex() or node.kwargs:
        return None
    shown = node.target(torch.tensor([-1, 0, 1]), torch.tensor(0))  # type: ignore[operator]
    if shown.dtype != torch.bool:
        return None
    less, same, more = shown.tolist()
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
    if (less, same, more) == (False, True, False):
        constant = columns[..., :1]
        alike = bool((columns == constant).all()) and bool((rows == constant).all())
        return _Prefix(torch.full(rows.shape, width), width) if alike else None
    if not less or more or not bool((columns.diff(dim=-1) >= 0).all()):
        return None
    return _Prefix(torch.searchsorted(columns, rows, right=same), width)


def _pick(node: fx.Node) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return how an operator joins what two masks show: the fewer columns (and), the more (or); None where it is neither."""
    if record_of(node).kind is not Kind.POINTWISE or len(node.args) != 2 or node.kwargs:
        return None
    if any(not isinstance(each, fx.Node) or value_of(each).dtype != torch.bool for each in node.args):
        return None
    made = node.target(torch.tensor([False, False, True, True]), torch.tensor([False, True, False, True]))  # type: ignore[operator]
    table = {(False, False, False, True): torch.minimum, (False, True, True, True): torch.maximum}
    return table.get(tuple(made.tolist()))


def _joined(first: Any, second: Any, pick: Callable[[Tensor, Tensor], Tensor]) -> _Prefix | None:
    """Join two masks of booleans, of which one may be the same for all columns, or for all rows."""
    if not isinstance(first, _Prefix):
        first, second = second, first
    if not isinstance(first, _Prefix) or first.hidden is not None:
        return None
    if isinstance(second, Tensor) and second.dtype == torch.bool and (second.ndim == 0 or second.shape[-1] == 1):
        count = second.squeeze(-1) if second.ndim else second
        return _Prefix(pick(first.count, count * first.columns), first.columns)
    if isinstance(second, Tensor) and second.dtype == torch.bool and (second.ndim == 1 or second.shape[-2] == 1):
        shown = second.squeeze(-2) if second.ndim > 1 else second
        falls = bool((shown.int().diff(dim=-1) <= 0).all())
        return _Prefix(pick(first.count, shown.sum(-1, keepdim=True)), first.columns) if falls else None
    if isinstance(second, _Prefix) and second.hidden is None and second.columns == first.columns:
        return _Prefix(pick(*torch.broadcast_tensors(first.count, second.count)), first.columns)
    return None
