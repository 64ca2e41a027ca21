"""``keep_tokens``: a loop that looks up each expert's tokens, by the positions of a mask, chooses them by that mask's tokens instead.

    slot, token = where(chosen[e])      chosen[e] [k, tokens]          any [tokens] = chosen[e].any(0)
    y = expert(h[token])                                               y = expert(h[any])
    y = y * weights[token, slot, None]                                 y = y * (weights * chosen[e].T).sum(1, keepdim=True)[any]
    out.index_add_(0, token, y)                                        out[any] += y

A token that two slots send to one expert has two rows on the left and one on the right, whose weight is the sum of both: what is
added to it is the same, since it is a multiple of the weight. What is left are rows that a mask chooses, which
:mod:`graphpar.passes.normalize.static_masking` keeps in place: each expert then computes all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphpar.ir.program import operator_name, value_of
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.normalize.functional import infer

_aten = torch.ops.aten


def keep_tokens(graph: fx.Graph) -> None:
    """Rewrite every such loop in ``graph``, in place."""
    for node in list(graph.nodes):
        loop = _loop(node)
        if loop is not None:
            _rewrite(graph, loop)


@dataclass
class _Loop:
    """One expert. ``mask``: two dims, one of which is that of tokens, ``dim``."""

    mask: fx.Node
    dim: int
    tokens: list[fx.Node]  # h[token]
    weights: list[fx.Node]  # weights[token, slot]
    sums: list[fx.Node]  # index_add(out, 0, token, y)


def _loop(node: fx.Node) -> _Loop | None:
    """Return the expert whose tokens ``node`` finds; None where it is something else, or they are used in another way."""
    mask = node.args[0] if operator_name(node) in ("where", "nonzero_numpy") and len(node.args) == 1 else None
    if not isinstance(mask, fx.Node) or value_of(mask).ndim != 2:
        return None
    columns: dict[fx.Node, int] = {user: int(user.args[1]) for user in node.users if operator_name(user) == "getitem"}  # type: ignore[arg-type]
    uses = list(dict.fromkeys(use for column in columns for use in column.users))
    sums = [use for use in uses if operator_name(use) == "index_add"]
    dims = {columns.get(each.args[2]) for each in sums}  # type: ignore[arg-type]
    if len(columns) != len(node.users) or len(dims) != 1 or None in dims or not all(map(_plain_sum, sums)):
        return None
    (dim,) = dims
    assert dim is not None
    loop = _Loop(mask, dim, [], [], sums)
    for use in uses:
        if use in sums:
            continue
        at = [columns.get(index) for index in use.args[1]] if operator_name(use) == "index" else []  # type: ignore[union-attr, arg-type]
        indices = list(use.args[1]) if at else []  # type: ignore[arg-type]
        if at == [dim] or (at == [None, dim] and indices[0] is None and _leading_one(use.args[0]) is not None):
            loop.tokens.append(use)
        elif at in ([0, 1], [1, 0]) and at[0] == dim:
            loop.weights.append(use)
        else:
            return None
    scaled = {end for weight in loop.weights for end in _multiples(weight)}
    weighed = bool(loop.weights) and scaled == {(each, each.args[3]) for each in sums}
    return loop if weighed else None


def _plain_sum(node: fx.Node) -> bool:
    return len(node.args) == 4 and bool(node.args[1] == 0) and not node.kwargs and node.args[2] is not node.args[3]


def _leading_one(node: Any) -> fx.Node | None:
    """Return h where ``node`` is ``h[None]``."""
    given = isinstance(node, fx.Node) and operator_name(node) == "unsqueeze" and node.args[1] == 0
    return node.args[0] if given and isinstance(node.args[0], fx.Node) else None


def _multiples(weight: fx.Node) -> set[tuple[fx.Node, Any]]:
    """Return the operators that take a multiple of ``weight``, each with that operand; ``weight`` itself where it is used otherwise."""
    found: set[tuple[fx.Node, Any]] = set()
    pending = [(weight, False)]
    while pending:
        node, scaled = pending.pop()
        for user in node.users:
            record, others = record_of(user), [n for n in user.all_input_nodes if n is not node]
            if (record.same_elements or record.kind is Kind.COPY) and not others:
                pending.append((user, scaled))
            elif operator_name(user) == "mul" and len(others) == 1 and not scaled:
                pending.append((user, True))
            else:
                found.add((user, node) if scaled else (weight, None))
    return found


def _rewrite(graph: fx.Graph, loop: _Loop) -> None:
    slots = 1 - loop.dim
    make = _maker(graph, loop.mask)
    with graph.inserting_after(loop.mask):
        chosen = make(_aten.any.dim, loop.mask, slots)
    for use in loop.tokens:
        source = use.args[0]
        assert isinstance(source, fx.Node)
        make = _maker(graph, use)
        with graph.inserting_before(use):
            if len(use.args[1]) == 2:  # type: ignore[arg-type]
                new = make(_aten.unsqueeze.default, make(_aten.index.Tensor, _leading_one(source), [chosen]), 0)
            else:
                new = make(_aten.index.Tensor, source, [chosen])
        use.replace_all_uses_with(new)
        graph.erase_node(use)
    for use in loop.weights:
        source = use.args[0]
        assert isinstance(source, fx.Node)
        make = _maker(graph, use)
        with graph.inserting_before(use):
            ones = loop.mask if loop.dim == 0 else make(_aten.permute.default, loop.mask, [1, 0])
            ones = make(_aten.to.dtype, ones, value_of(source).dtype)
            for _ in range(value_of(source).ndim - 2):
                ones = make(_aten.unsqueeze.default, ones, -1)
            total = make(_aten.sum.dim_IntList, make(_aten.mul.Tensor, source, ones), [1])
            new = make(_aten.index.Tensor, total, [chosen])
        use.replace_all_uses_with(new)
        graph.erase_node(use)
    for use in loop.sums:
        before, _, _, added = use.args
        make = _maker(graph, use)
        with graph.inserting_before(use):
            new = make(_aten.index_put.default, before, [chosen], added, True)
        use.replace_all_uses_with(new)
        graph.erase_node(use)


def _maker(graph: fx.Graph, like: fx.Node) -> Callable[..., fx.Node]:
    def make(target: Any, *args: Any) -> fx.Node:
        return infer(graph.call_function(target, args), like)

    return make
