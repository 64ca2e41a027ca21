"""The conditions under which a mask shows a column, whatever operators join them.

    ~((d[:, :, None] != d[:, None]) | later)                     shows where the comparison is False, and so is ``later``
    where(same, 0, -inf) + full(-inf).triu(1)                    where ``same`` is True, and ``triu`` is 0
    zeros.masked_fill((1 - same.float()).bool(), finfo.min)      where ``same`` is True

An operator by element runs on the numbers that its operands have where all of their conditions hold, and on those that they have elsewhere.
It joins conditions if its result in one of these cases is not among the results in the others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, fx

from graphpar.ir.program import value_of
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.normalize.causal_masks import HIDES, UNKNOWN, Condition, Masks
from graphpar.passes.normalize.functional import is_inplace
from graphpar.passes.normalize.graph_matching import filled, is_call, sizes

SHAPES = (Kind.RESHAPE, Kind.EXPAND, Kind.ALIAS)
"""Operators that leave elements in order."""
_MOST = 6
"""So many ways to say when a value is which are kept."""


class _Cases(NamedTuple):
    """What a value is: ``held`` [1] where all conditions hold, and one of ``others`` [n] elsewhere; a constant has no conditions."""

    conditions: tuple[Condition, ...]
    held: Tensor
    others: Tensor


def conditions_of(mask: fx.Node, length: int | str, masks: Masks) -> tuple[Condition, ...]:
    """Return what must hold for ``mask`` [.., s, s], of booleans or added to scores, to show a column: itself if no more is known."""
    for conditions, held, others in _cases(mask, length, masks):
        truth = value_of(mask).dtype == torch.bool
        if conditions and bool(((held if truth else held == 0) & (~others if truth else others <= HIDES).all()).all()):
            return conditions
    return (Condition(mask),)


def constant(value: object, masks: Masks) -> float | None:
    """Return the number that a value has everywhere; None where it may have others."""
    if not isinstance(value, fx.Node):
        return filled(value)
    return next((float(each.held) for each in _cases(value, "", masks) if not each.conditions), None)


def shows_itself(mask: fx.Node, length: int | str, masks: Masks) -> bool:
    """Whether each row of a mask shows its own column."""
    found = conditions_of(mask, length, masks)
    others = tuple(each for each in found if not equals_itself(each, length))
    return not others or masks.window(others, length) is not None


def hides_whole_rows(mask: fx.Node, length: int | str, masks: Masks) -> bool:
    """Whether columns have no weight in a row that is shown none, either: numbers added to all of its scores change nothing."""
    cases = _cases(mask, length, masks)
    nothing = any(each.conditions and bool(each.held == 0) and bool((each.others == -math.inf).all()) for each in cases)
    return nothing or value_of(mask).dtype == torch.bool or shows_itself(mask, length, masks)


def equals_itself(condition: Condition, length: int | str) -> fx.Node | None:
    """Return the numbers [b, s] that must be the same for a row and a column; None of another condition, or of numbers that may be nan."""
    sides = (
        each_with_each(condition.node, length) if is_call(condition.node, "eq" if condition.shown else "ne") else None
    )
    columns, rows = map(flat, sides) if sides is not None else (None, None)
    return columns if columns is rows and columns is not None and not value_of(columns).is_floating_point() else None


def each_with_each(comparison: fx.Node, length: int | str) -> tuple[fx.Node, fx.Node] | None:
    """Return the operands of columns and of rows of a comparison of each with each."""
    if len(comparison.all_input_nodes) != 2:
        return None
    columns, rows = comparison.all_input_nodes
    if sizes(columns)[-2:] == [length, 1]:
        columns, rows = rows, columns
    return (columns, rows) if sizes(columns)[-2:] == [1, length] and sizes(rows)[-2:] == [length, 1] else None


def flat(node: fx.Node) -> fx.Node:
    """Return the [b, s] of which ``node`` has the elements in order, or the first of more dims that is no view."""
    while record_of(node).kind in SHAPES and value_of(node).ndim > 2:
        node = node.all_input_nodes[0]
    return node


def _cases(node: fx.Node, length: int | str, masks: Masks) -> tuple[_Cases, ...]:
    """Return what is known of a mask, or of what one is made of; each is true."""
    if (node, length) not in masks.cases:
        masks.cases[node, length] = _found(node, length, masks)
    found: tuple[_Cases, ...] = masks.cases[node, length]
    return found


def _found(node: fx.Node, length: int | str, masks: Masks) -> tuple[_Cases, ...]:
    value = value_of(node)
    if not isinstance(value, Tensor):
        return ()
    if (number := filled(node)) is not None:
        return _of_numbers(node, number, number)
    kind, square = record_of(node).kind, sizes(node)[-2:] == [length, length]
    found: tuple[_Cases, ...] = ()
    if kind in SHAPES:
        below = node.all_input_nodes[0]
        whole = square and sizes(below)[-2:] == [length, length]
        found = tuple(each for each in _cases(below, length, masks) if whole or not each.conditions)
    elif kind in (Kind.POINTWISE, Kind.COPY) and not is_inplace(node):
        found = tuple(itertools.islice(_joined(node, length, masks), _MOST))
    if value.dtype == torch.bool and (len(found) != 1 or found[0].conditions):
        return found[:_MOST] + _of_numbers(node, False, True)
    ends = masks.ends(node) if not found and (square or not value.ndim) else None
    return found if ends is None else _of_numbers(node, *ends)


def _of_numbers(node: fx.Node, least: float, most: float) -> tuple[_Cases, ...]:
    """Return what is known of a value that has two numbers, or one."""
    dtype = value_of(node).dtype
    low, high = (torch.tensor([each], dtype=torch.float64).to(dtype) for each in (least, most))
    if low == high:
        return (_Cases((), high, low[:0]),)
    itself = Condition(node, number=None if dtype == torch.bool else most)
    return _Cases((itself,), high, low), _Cases((itself._replace(shown=False),), low, high)


def _joined(node: fx.Node, length: int | str, masks: Masks) -> Iterator[_Cases]:
    """Yield what is known of the result of an operator by element."""
    operands = node.all_input_nodes
    for known in itertools.product(*(_cases(each, length, masks) for each in operands)):
        if any(cases.conditions and not value_of(each).ndim for each, cases in zip(operands, known)):
            continue
        values = [torch.cat([each.held, each.others]) for each in known]
        places = torch.cartesian_prod(*(torch.arange(each.numel()) for each in values)).view(-1, len(values))
        taken = (value[places[:, i]] for i, value in enumerate(values))
        given = {each: numbers if value_of(each).ndim else numbers[0] for each, numbers in zip(operands, taken)}
        try:
            args, kwargs = fx.map_arg((node.args, node.kwargs), given.__getitem__)
            made = node.target(*args, **kwargs).reshape(-1)  # type: ignore[operator]
        except UNKNOWN:
            return
        if made.numel() == len(places) and not bool((made[1:] == made[0]).any()):
            every = dict.fromkeys(condition for each in known for condition in each.conditions)
            yield _Cases(tuple(every), made[:1], made[1:].unique())
