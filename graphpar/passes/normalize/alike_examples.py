"""Whether a value is the same for all examples of a batch, however large, so that its value for two examples stands for all.

zeros(b, s), arange(s).expand(b, s)     alike, and so is what is computed of each row by itself
arange(b)                               differs; it may only pick the rows of what is alike: table[arange(b)]
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, fx

from graphpar.ir.program import batch_coefficients, size_coefficient, value_of
from graphpar.operators.record import Kind
from graphpar.operators.rules import rule_of
from graphpar.operators.table import record_of

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
