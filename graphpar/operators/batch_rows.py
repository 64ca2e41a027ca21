"""What no rule of dims says of the batch: rows that are numbered, sorted, chosen by a mask, or picked by their own numbers.

    order = ids.argsort(); x[order]          Rows(order="argsort")         sorted rows stay rows, in another order
    x[torch.arange(len(x)), y]               Rows()                        each row picks within itself
    x[mask]                                  Rows(chosen=mask)             as many as the mask chooses

A rule sees that an index picks along a dim; that each row picks its own can be seen in the values alone. The states of a value:

    Fixed      the same for every microbatch
    Rows       one slice an example: the batch is along a dim of size outer * batch * inner
    Additive   a sum over examples: the value for the global batch is the sum over microbatches
    Layout     the sizes of groups of sorted rows, or where they end
    Coupled    examples are mixed (BatchNorm in training, attention over the batch): splitting the batch would change it
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, fx

from graphpar.ir.batch_sizes import batch_dims_of, result_coefficients
from graphpar.ir.program import operator_name, value_of
from graphpar.operators.placement import literal
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
    divides: bool = False  # the loss divides by it


@dataclass(frozen=True)
class Layout:
    """The sizes of groups of sorted rows (how many each expert has), or where they end (``ends``)."""

    order: str
    pure: bool = True
    ends: bool = False


State = Fixed | Rows | Additive | Coupled | Layout
States = Mapping[fx.Node, State]
Found = State | Sequence[State] | None
"""The state of the one result, or of each; None where the operator's rule has to say it."""


# ---- numbers ---------------------------------------------------------------------------------------------------


def numbering(node: fx.Node, rows: Sequence[Rows]) -> tuple[str, int]:
    """Return what the result's rows hold: numbers of rows survive where one operand has them, and may be divided."""
    numbers = [state for state in rows if state.kind != "values"]
    if not numbers:
        return "values", 1
    first, name = numbers[0], operator_name(node)
    floors = name == "floor_divide" or (name == "div" and node.kwargs.get("rounding_mode") == "floor")
    value = value_of(node)
    wraps = isinstance(value, Tensor) and value.dtype not in (torch.int32, torch.int64)
    if len(rows) > 1 or wraps or (name == "div" and not floors):
        return "something else", 1
    if not floors:
        return first.kind, first.divided
    divisor = node.args[1]
    if isinstance(divisor, int) and first.kind in ("position", "sorted"):
        return first.kind, first.divided * divisor
    return "something else", 1


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


# ---- sorting and choosing --------------------------------------------------------------------------------------


def _sort(node: fx.Node, states: States, pure: bool) -> Found:
    """Whole rows sorted: from here on they have this order."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    state = states[source]
    if not isinstance(state, Rows) or value_of(source).ndim != 1 or state.order is not None or state.kind != "values":
        return None
    values = replace(state, order=node.name, pure=pure)
    numbers = replace(values, kind="sorted")
    return numbers if operator_name(node) == "argsort" else (values, numbers)


def _counts(node: fx.Node, states: States, pure: bool) -> Found:
    """histc and bincount of sorted rows: the sizes of their groups. Of plain rows: sums over them."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    state = states[source]
    if not isinstance(state, Rows) or state.kind != "values":
        return Coupled(f"{operator_name(node)} mixes examples", node)
    if state.order is not None and state.chosen is None:
        return Layout(state.order, pure)
    bounds = [*node.args, 0, 0][2:4]
    counted = operator_name(node) == "histc" and bounds[0] != bounds[1]
    return Additive(pure) if counted else None


def grouped(node: fx.Node, states: Sequence[State], pure: bool) -> State:
    """Return the state of an operator on the sizes of groups of sorted rows, or where they end, alone or with those rows.

    Sizes add up to ends by ``cumsum``; nothing else is known to make ends of them.
    """
    (first, *others) = [state for state in states if isinstance(state, Layout)]
    rows = [state for state in states if isinstance(state, Rows)]
    name, record = operator_name(node), record_of(node)
    alike = not others and all(state.order == first.order for state in rows)
    counts = value_of(node).dtype in (torch.int32, torch.int64, torch.float32, torch.float64)  # others wrap or round
    if alike and not rows and counts and (record.same_value or (name == "cumsum" and not first.ends)):
        return Layout(first.order, pure, first.ends or name == "cumsum")
    if alike and first.ends and len(rows) == 1 and "grouped_mm" in name and rows[0].dim == 0:
        return replace(rows[0], pure=pure)
    return Coupled(f"{operator_name(node)} mixes rows of different groups", node)


# ---- picking ---------------------------------------------------------------------------------------------------


def _index(node: fx.Node, states: States, pure: bool) -> Found:
    """x[i, j]: rows chosen by their own numbers stay rows; by a sort's indices they take its order, or lose it again."""
    source, indices = node.args[0], node.args[1]
    assert isinstance(source, fx.Node) and isinstance(indices, list | tuple)
    state = states[source]
    by = {dim: states[i] for dim, i in enumerate(indices) if isinstance(i, fx.Node)}
    numbered = {dim for dim, own in by.items() if isinstance(own, Rows) and own.kind != "values"}
    mixes = Coupled("index picks rows of the batch", node)
    if not isinstance(state, Rows):
        return mixes if numbered else None
    mask = indices[0]
    if len(by) == 1 and is_mask(mask):
        return _masked(node, state, mask, states, pure)
    own = by.get(state.dim)
    if own is None:
        return mixes if numbered else None
    if not isinstance(own, Rows) or numbered - {state.dim}:
        return mixes
    rows = [s for s in by.values() if isinstance(s, Rows)]
    if any(not isinstance(s, Rows | Fixed) for s in by.values()):
        return mixes
    return _picked(node, state, own, rows, pure) or mixes


def _picked(node: fx.Node, state: Rows, by: Rows, rows: Sequence[Rows], pure: bool) -> Rows | None:
    """Rows of ``state`` picked by the row numbers ``by``, which count ``divided`` rows of theirs for one of its.

    Numbers that are divided stay numbers of the same layout where several rows stand behind each other for one of the batch.
    """
    numbers = state.outer == by.outer and by.inner == state.inner * by.divided
    orders = {"position": (None, None), "sorted": (None, by.order), "inverse": (by.order, None)}
    taken, given = orders.get(by.kind, ("", None))
    if not numbers or state.order != taken or state.chosen is not None or len({s.layout for s in rows}) != 1:
        return None
    dims = batch_dims_of(node)
    if len(dims) != 1 or by.outer * by.inner != result_coefficients(node)[dims[0]]:
        return None
    return Rows(dims[0], by.outer, by.inner, pure, order=given)


def is_mask(node: Any) -> TypeGuard[fx.Node]:
    """Whether an index is a mask: of truth values, or of bytes."""
    value = value_of(node) if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and not value.is_floating_point() and value.dtype.itemsize == 1


def _masked(node: fx.Node, state: Rows, mask: fx.Node, states: States, pure: bool) -> State:
    """x[mask]: the rows (or parts of rows) that a boolean mask of each example's own chooses, in the batch's order."""
    by = states[mask]
    own = isinstance(by, Rows) and by.kind == "values" and (by.layout, by.dim) == (state.layout, state.dim)
    if own and state.dim < value_of(mask).ndim:
        return Rows(0, pure=pure, order=choice_of(mask), chosen=mask)
    return Coupled("index picks rows of the batch", node)


# ---- writing ---------------------------------------------------------------------------------------------------


def _index_put(node: fx.Node, states: States, pure: bool) -> Found:
    """empty[sorted indices] = arange: the inverse of the sort. Otherwise as a write to each row's own places."""
    target, indices, values = node.args[0], node.args[1], node.args[2]
    assert isinstance(indices, list | tuple) and isinstance(values, fx.Node) and isinstance(target, fx.Node)
    state, what = states[target], states[values]
    by = {dim: states[i] for dim, i in enumerate(indices) if isinstance(i, fx.Node)}
    numbered = [s for s in by.values() if isinstance(s, Rows) and s.kind != "values"]
    mixes = Coupled("index_put writes to rows of the batch", node)
    first = by.get(0)
    if len(indices) == 1 and isinstance(first, Rows) and isinstance(what, Rows) and first.kind == "sorted":
        plain = first.divided == what.divided == 1 and first.outer * first.inner == what.outer * what.inner
        if what.kind == "position":  # of all rows, whatever their layout
            plain &= not literal(node, "accumulate")
            return replace(first, kind="inverse", pure=pure) if plain else mixes
        assert isinstance(indices[0], fx.Node)
        rows_for_rows = value_of(indices[0]).ndim == 1 and value_of(values).ndim == value_of(target).ndim
        found = _written_back(state, first, what, pure, bool(literal(node, "accumulate"))) if rows_for_rows else None
        return found or mixes
    mask = indices[0] if len(indices) == 1 and is_mask(indices[0]) else None
    if not numbered and mask is None:
        return None
    if not isinstance(state, Rows) or state.order is not None or not _fits(node, state, what, states):
        return mixes
    if mask is not None:
        chosen = _masked(node, state, mask, states, pure)
        return replace(state, pure=pure) if isinstance(chosen, Rows) else chosen
    own = by.get(state.dim)
    others = [s for dim, s in by.items() if dim != state.dim]
    numbers = isinstance(own, Rows) and own.kind == "position" and own.divided == 1 and own.layout == state.layout
    plain = all(
        isinstance(s, Fixed) or (isinstance(s, Rows) and s.kind == "values" and s.layout == state.layout)
        for s in others
    )
    places = {value_of(i).ndim - s.dim for i, s in zip(indices, map(states.get, indices)) if isinstance(s, Rows)}
    return replace(state, pure=pure) if numbers and plain and len(places) == 1 else mixes


def _index_write(node: fx.Node, states: States, pure: bool) -> Found:
    """index_copy and index_add along the batch: sorted rows that go back to where the sort found them."""
    target, dim, index, values = node.args[:4]
    by = states[index] if isinstance(index, fx.Node) else None
    if not isinstance(by, Rows) or by.kind != "sorted":
        return None
    assert isinstance(target, fx.Node) and isinstance(values, fx.Node) and isinstance(dim, int)
    adds, along = operator_name(node) == "index_add", dim % value_of(target).ndim == 0
    found = _written_back(states[target], by, states[values], pure, adds) if along else None
    return found or Coupled(f"{operator_name(node)} writes to rows of the batch", node)


def _written_back(state: State, by: Rows, what: State, pure: bool, adds: bool) -> Rows | None:
    """Return the rows ``state`` once sorted rows ``what`` were written to their places, or added to those that each ``divided`` came from.

    ``by``: the numbers that the sort gave. Numbers that aren't divided name each row once, so nothing is left of what was overwritten.
    """
    if not isinstance(what, Rows) or what.kind != "values" or what.dim != 0 or by.dim != 0:
        return None
    if what.layout != by.layout or by.outer != 1 or by.chosen is not None or what.chosen is not None:
        return None
    if not isinstance(state, Rows) or (state.dim, state.outer, state.inner * by.divided) != (0, 1, by.inner):
        return None
    if by.divided > 1 and not adds:
        return None
    whole = by.divided == 1 and not adds
    if not whole and (state.order is not None or state.chosen is not None or state.kind != "values"):
        return None
    return Rows(0, 1, state.inner, pure)


def _fits(node: fx.Node, state: Rows, what: State, states: States) -> bool:
    """Whether the written values are the same for all rows, or have the batch where the written places have it."""
    target, indices, values = node.args[0], node.args[1], node.args[2]
    assert isinstance(target, fx.Node) and isinstance(indices, list | tuple) and isinstance(values, fx.Node)
    if isinstance(what, Fixed):
        return True
    given = [dim for dim, index in enumerate(indices) if isinstance(index, fx.Node)]
    together = given == list(range(given[0], given[0] + len(given)))
    picks = [index for index in indices if isinstance(index, fx.Node)]
    own = indices[state.dim] if state.dim < len(indices) else None
    by = states[own] if isinstance(own, fx.Node) else None
    if (
        not isinstance(what, Rows)
        or what.layout != state.layout
        or what.kind != "values"
        or any(map(is_mask, picks))
        or not together
    ):
        return False
    if not isinstance(own, fx.Node) or not isinstance(by, Rows):
        return False
    widest = max(value_of(pick).ndim for pick in picks)
    places = value_of(target).ndim - len(given) + widest
    dim = given[0] + by.dim + widest - value_of(own).ndim
    return bool(value_of(values).ndim - what.dim == places - dim)


# ---- looking up ------------------------------------------------------------------------------------------------


def _embedding(node: fx.Node, states: States, pure: bool) -> Found:
    if literal(node, "scale_grad_by_freq"):
        return Coupled("embedding scales gradients by how often an index comes in the batch", node)
    return None


def _embedding_bag(node: fx.Node, states: States, pure: bool) -> Found:
    """Bags of one size, each the run of indices of its example. Other offsets count over the indices of all examples."""
    weight, indices, offsets, each = (
        literal(node, name) for name in ("weight", "indices", "offsets", "per_sample_weights")
    )
    if literal(node, "scale_grad_by_freq"):
        return Coupled("embedding_bag scales gradients by how often an index comes in the batch", node)
    table, rows, begins, own = (
        states[a] if isinstance(a, fx.Node) else Fixed() for a in (weight, indices, offsets, each)
    )
    bags = isinstance(begins, Rows) and isinstance(rows, Rows) and (rows.outer, rows.order) == (1, None)
    if bags and isinstance(table, Fixed):
        assert isinstance(begins, Rows) and isinstance(rows, Rows)
        counted = begins.kind == "begins" or (begins.kind == "position" and begins.inner == begins.divided == 1)
        weighted = not isinstance(each, fx.Node) or (
            isinstance(own, Rows) and own.kind == "values" and own.layout == rows.layout
        )
        if counted and weighted and begins.divided == rows.inner and rows.kind == "values":
            return [Rows(0, pure=pure)] * len(value_of(node))
    return Coupled("embedding_bag takes offsets that count over the indices of all examples", node)


# ---- windows of a sequence -------------------------------------------------------------------------------------


def windowed(node: fx.Node, states: States, pure: bool) -> State | None:
    """What :mod:`graphpar.emitted.kv_cache` does: positions are the rows, and attention to others' is known to be sound."""
    name = operator_name(node)
    if name == "window":
        source, dim, _ = cast(tuple[fx.Node, int, fx.Node], node.args)
        return Rows(dim, pure=pure) if isinstance(states[source], Fixed) else Coupled("a window picks rows", node)
    if name == "last":
        return states[node.args[0]]  # type: ignore[index]
    if name == "cached_attention":
        rows = Rows(value_of(node).ndim - 2)
        own = all(isinstance(s, Rows) and replace(s, pure=True) == rows for s in map(states.get, node.args[:3]))  # type: ignore[arg-type]
        return replace(rows, pure=False) if own else Coupled("attention mixes examples", node)
    return None


SPECIAL: dict[str, Callable[[fx.Node, States, bool], Found]] = {
    **dict.fromkeys(("sort", "argsort"), _sort),
    **dict.fromkeys(("histc", "bincount"), _counts),
    "index": _index,
    "index_put": _index_put,
    **dict.fromkeys(("index_copy", "index_add"), _index_write),
    "embedding": _embedding,
    "embedding_bag": _embedding_bag,
}
"""Operators that see the rows' values, not only their dims."""

TAKES_NUMBERS = {*SPECIAL, "floor_divide", "div"}
"""Operators besides those that only move elements which may be given numbers of rows."""
