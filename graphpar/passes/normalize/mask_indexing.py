"""Indexing by a mask is spelled in one way, for :mod:`graphpar.passes.normalize.static_masking`.

    x[mask.nonzero()[:, 0]], x[torch.where(mask)], masked_select(x, mask)   ->   x[mask]
    y.index_add_(0, mask.nonzero()[:, 0], z), y[mask] += z                  ->   y.index_put_([mask], z, accumulate=True)

A loop that looks up each expert's tokens, by the positions of a mask, chooses them by that mask's tokens instead:

    token, slot = where(chosen == e)    chosen [tokens, k]         any [tokens] = (chosen == e).any(1)
    y = expert(h[token])                                           y = expert(h[any])
    y = y * weights[token, slot, None]                             y = y * (weights * (chosen == e)).sum(1, keepdim=True)[any]
    out[token] += y                                                out[any] += y

A token that two slots send to one expert has two rows on the left and one on the right. The indices of topk are distinct, so it has
one. Where that can't be seen, it must be added to ``out``, as a multiple of its weight: on the right that is the sum of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.ir.program import operator_name, value_of
from graphpar.operators.batch_rows import is_mask
from graphpar.operators.placement import literal
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.normalize.functional import infer
from graphpar.passes.normalize.graph_matching import comparable, sizes

_aten = torch.ops.aten


def spell_as_mask(graph: fx.Graph, node: fx.Node) -> None:
    """Spell the index by which ``node`` reads or writes rows as a mask, in place, where it was made of one."""
    source, name = node.args[0], operator_name(node)
    if not isinstance(source, fx.Node):
        return
    if name == "masked_select":
        mask: Any = node.args[1]
        with graph.inserting_before(node):
            both = comparable(torch.broadcast_shapes(value_of(source).shape, value_of(mask).shape))
            if both == sizes(source) != sizes(mask):
                mask = infer(graph.call_function(_aten.expand_as.default, (mask, source)), node)
            elif both != sizes(source):
                source = infer(graph.call_function(_aten.expand_as.default, (source, mask)), node)
        node.target, node.args, node.kwargs = _aten.index.Tensor, (source, [mask]), {}
    elif name in ("index", "index_put"):
        columns = [_column(index) for index in node.args[1]]  # type: ignore[union-attr]
        first = columns[0]
        if first is not None and columns == [(first[0], k) for k in range(value_of(first[0]).ndim)]:
            node.args = (source, [first[0]], *node.args[2:])
    if name == "index_put":
        _spell_as_sum(node)


def _spell_as_sum(node: fx.Node) -> None:
    """Spell ``x[mask] = x[mask] + y`` as ``x[mask] += y``: no mask chooses a row twice."""
    target, indices, value, *accumulate = node.args
    if any(accumulate) or not isinstance(value, fx.Node) or operator_name(value) != "add" or value.kwargs:
        return
    for own, other in (value.args[:2], value.args[1::-1]):
        reads = isinstance(own, fx.Node) and operator_name(own) == "index" and own.args == (target, indices)
        by_mask = len(indices) == 1 and is_mask(indices[0])  # type: ignore[arg-type, index]
        if not (reads and by_mask and isinstance(other, fx.Node)):
            continue
        if (value_of(other).dtype, value_of(other).ndim) == (value_of(value).dtype, value_of(value).ndim):
            node.args = (target, indices, other, True)
            return


def spell_by_rows(graph: fx.Graph) -> None:
    """Spell what takes or writes whole rows by their numbers as an index of the first dim, in place."""
    for node in list(graph.nodes):
        name, dim = operator_name(node), node.args[1] if len(node.args) > 2 else None
        if dim != 0 or node.kwargs or not isinstance(node.args[2], fx.Node):
            continue
        source, _, rows, *values = node.args
        assert isinstance(source, fx.Node) and isinstance(rows, fx.Node)
        if name in ("gather", "scatter_add"):
            spread = _spread(rows)
            if spread is None or sizes(source)[1:] != sizes(rows)[1:]:
                continue
            rows, name = spread, {"gather": "index_select", "scatter_add": "index_add"}[name]
        if _column(rows) is None:
            continue
        if name == "index_select":
            node.target, node.args = _aten.index.Tensor, (source, [rows])
        elif name in ("index_add", "index_copy") and len(values) == 1 and value_of(rows).ndim == 1:
            node.target, node.args = _aten.index_put.default, (source, [rows], values[0], name == "index_add")


def spell_pairs(graph: fx.Graph) -> None:
    """Spell positions in a mask of flat pairs, ``pair // slots`` and ``pair``, as those of the mask [tokens, slots], in place.

    pair = (chosen.view(-1) == e).nonzero()[:, 0]             token, slot = torch.where(chosen == e)
    weights.view(-1)[pair], x[pair // slots]             ->   weights[token, slot], x[token]
    """
    for pair in list(graph.nodes):
        found = _column(pair)
        flat = None if found is None else _flat_of(found[0])
        if found is None or flat is None:
            continue
        slots = int(value_of(flat[1]).shape[1])
        users = {user: _use_of_pair(user, pair, slots) for user in pair.users}
        if None in users.values() or "token" not in users.values():
            continue
        mask, (compared, chosen) = found[0], flat
        make = _maker(graph, mask)
        with graph.inserting_before(mask):
            args = tuple(chosen if each is compared else each for each in mask.args)
            by_slot = make(mask.target, *args)
        make = _maker(graph, pair)
        with graph.inserting_after(pair):
            positions = graph.call_function(_aten.nonzero.default, (by_slot,))
        places = [graph.call_function(_aten.select.int, (positions, 1, column)) for column in (0, 1)]
        for place in reversed(places):
            positions.append(place)
            place.meta = dict(pair.meta)
        positions.meta = dict(pair.meta) | {"val": torch.stack([value_of(pair)] * 2, 1)}
        for user, kind in users.items():
            if kind == "weight":
                with graph.inserting_before(user):
                    wide = make(_aten.unflatten.int, user.args[0], 0, [-1, slots])
                    user.args = (wide, places)
            else:
                user.replace_all_uses_with(places[kind == "slot"])


def _flat_of(mask: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return ``x.view(-1)`` and x [tokens, slots] where ``mask`` compares the former with a number."""
    flat = mask.args[0] if operator_name(mask) == "eq" else None
    if not isinstance(flat, fx.Node) or record_of(flat).kind is not Kind.RESHAPE or value_of(flat).ndim != 1:
        return None
    source = flat.args[0]
    return (flat, source) if isinstance(source, fx.Node) and value_of(source).ndim == 2 and mask.args[1:] else None


def _use_of_pair(user: fx.Node, pair: fx.Node, slots: int) -> str | None:
    """Say what ``user`` makes of the positions of pairs: the "token", the "slot", or the "weight" of each; None of anything else."""
    name, args = operator_name(user), user.args
    floor = name == "floor_divide" or (name == "div" and user.kwargs.get("rounding_mode") == "floor")
    if floor and args == (pair, slots):
        return "token"
    if name == "remainder" and args == (pair, slots):
        return "slot"
    return "weight" if name == "index" and args[1] == [pair] else None


def _spread(node: fx.Node) -> fx.Node | None:
    """Return ``rows`` where ``node`` is ``rows[:, None].expand(-1, width)``."""
    source = node.args[0] if operator_name(node) in ("expand", "expand_as", "repeat") else None
    if not isinstance(source, fx.Node) or operator_name(source) != "unsqueeze" or value_of(source).ndim != 2:
        return None
    rows = source.args[0]
    return rows if source.args[1] in (1, -1) and isinstance(rows, fx.Node) else None


def _column(index: Any) -> tuple[fx.Node, int] | None:
    """Return the mask, and the column of its ``nonzero()``, that an index tensor was made of."""
    value = value_of(index) if isinstance(index, fx.Node) else None
    if not isinstance(index, fx.Node) or not isinstance(value, Tensor) or value.ndim != 1:
        return None
    source = index.args[0] if index.args else None
    name = operator_name(index)
    if not isinstance(source, fx.Node):
        return None
    if name == "getitem":
        inner = source.args[0]
        if operator_name(source) in ("where", "nonzero_numpy") and len(source.args) == 1 and isinstance(inner, fx.Node):
            return inner, int(index.args[1])  # type: ignore[arg-type]
        if operator_name(source) == "unbind" and isinstance(inner, fx.Node) and operator_name(inner) == "nonzero":
            return inner.args[0], int(index.args[1])  # type: ignore[arg-type, return-value]
        return None
    if operator_name(source) != "nonzero" or not isinstance(source.args[0], fx.Node):
        return None
    mask = source.args[0]
    if name == "select" and index.args[1] in (1, -1):
        return mask, int(index.args[2]) % value_of(mask).ndim  # type: ignore[arg-type]
    flat = record_of(index).kind is Kind.RESHAPE and value_of(mask).ndim == 1
    return (mask, 0) if flat else None


# ---- loops over experts -----------------------------------------------------------------------------------------


def keep_tokens(graph: fx.Graph) -> None:
    """Rewrite every such loop in ``graph``, in place."""
    found: dict[fx.Node, dict[fx.Node, int]] = {}
    for node in graph.nodes:
        column = _column(node)
        if column is not None and value_of(column[0]).ndim > 1:
            found.setdefault(column[0], {})[node] = column[1]
    for mask, columns in found.items():
        loop = _loop(mask, columns)
        if loop is not None:
            _rewrite(graph, loop)


@dataclass
class _Loop:
    """One expert. ``mask``: its dims ``tokens`` number the rows, each of which several slots, the other dims, may choose."""

    mask: fx.Node
    tokens: tuple[int, ...]
    reads: list[fx.Node]  # h[token]
    weights: dict[fx.Node, tuple[int, ...]]  # weights[token, slot], and the mask's dims in that order
    writes: list[fx.Node]  # out[token] = y, out[token] += y


def _loop(mask: fx.Node, columns: dict[fx.Node, int]) -> _Loop | None:
    """Return the expert whose tokens ``mask`` chooses; None where they are used in another way."""
    uses = list(dict.fromkeys(use for column in columns for use in column.users))
    at = {use: _places(use, columns) for use in uses}
    writes = [use for use in uses if operator_name(use) == "index_put"]
    rows = {at[use] for use in writes}
    tokens = next(iter(rows), None)
    if len(rows) != 1 or tokens is None or None in tokens or len(tokens) == value_of(mask).ndim:
        return None
    known = tuple(dim for dim in tokens if dim is not None)
    if list(known) != sorted(known):
        return None
    loop = _Loop(mask, known, [], {}, writes)
    for use in uses:
        places = at[use]
        if use in writes:
            continue
        if places is None or operator_name(use) != "index":
            return None
        if places == tokens or (places == (None, *tokens) and _leading_one(use.args[0]) is not None):
            loop.reads.append(use)
        elif sorted(places, key=str) == list(range(value_of(mask).ndim)) and places[: len(tokens)] == tokens:
            loop.weights[use] = tuple(dim for dim in places if dim is not None)
        else:
            return None
    slots = [dim for dim in range(value_of(mask).ndim) if dim not in tokens]
    once = len(slots) == 1 and _is_distinct(mask, slots[0])
    return loop if once or _adds_multiples(loop) else None


def _places(use: fx.Node, columns: dict[fx.Node, int]) -> tuple[int | None, ...] | None:
    """Return which column of the mask's positions each index of ``use`` is."""
    indices = use.args[1] if operator_name(use) in ("index", "index_put") else None
    if not isinstance(indices, list | tuple) or any(i is not None and i not in columns for i in indices):
        return None
    return tuple(None if index is None else columns[index] for index in indices)  # type: ignore[index]


def _adds_multiples(loop: _Loop) -> bool:
    """Whether all that is written is added, and a multiple of a weight."""
    scaled = {end for weight in loop.weights for end in _multiples(weight)}
    adds = all(any(each.args[3:]) for each in loop.writes)
    return adds and bool(loop.weights) and scaled == {(each, each.args[2]) for each in loop.writes}


def _is_distinct(mask: fx.Node, dim: int) -> bool:
    """Whether at most one place along ``dim`` is True: there ``mask`` compares the indices of topk or a sort with one number."""
    node: Any = mask
    compared = False
    while isinstance(node, fx.Node) and isinstance(value_of(node), Tensor):
        name, args, rank = operator_name(node), node.args, value_of(node).ndim
        source: Any = args[0] if args else None
        if sizes(node)[dim] == 1:
            return True
        if name == "getitem" and isinstance(source, fx.Node):
            made, along = source.args[0], _dim_of(source)
            if operator_name(source) in ("topk", "sort"):
                return bool(compared and args[1] == 1 and along == dim)
            if operator_name(source) != "unbind" or along is None:
                return False
            node, dim = made, dim + (dim >= along)
        elif name == "argsort":
            return compared and _dim_of(node) == dim
        elif name == "select":
            along = int(args[1]) % (rank + 1)  # type: ignore[arg-type]
            node, dim = source, dim + (dim >= along)
        elif name == "permute":
            order = [int(each) % rank for each in args[1]]  # type: ignore[union-attr, arg-type]
            node, dim = source, order[dim]
        elif name in ("transpose", "t"):
            one, two = (int(each) % rank for each in (args[1:3] if name == "transpose" else (0, 1)))  # type: ignore[arg-type]
            node, dim = source, {one: two, two: one}.get(dim, dim)
        elif name == "unsqueeze":
            along = int(args[1]) % rank  # type: ignore[arg-type]
            node, dim = source, dim - (dim > along)
        elif name == "one_hot" and dim < rank - 1:
            node, compared = source, True
        elif name == "eq" and not compared:
            operands = [each for each in args[:2] if isinstance(each, fx.Node) and _reaches(each, rank, dim)]
            compared = True
            if len(operands) != 1:
                return False
            node, dim = operands[0], dim - rank + value_of(operands[0]).ndim
        elif (
            record_of(node).kind is Kind.RESHAPE
            and dim == rank - 1
            and source.meta["val"].shape[-1:] == value_of(node).shape[-1:]
        ):
            node, dim = source, value_of(source).ndim - 1
        elif name in ("slice", "clone", "detach") or _is_cast(node, compared):
            node = source
        else:
            return False
    return False


def _is_cast(node: fx.Node, compared: bool) -> bool:
    """Whether ``node`` keeps whole numbers, or, before they are ``compared``, what is True and False."""
    if operator_name(node) == "to":
        return not compared or value_of(node).dtype in (torch.int32, torch.int64)
    return operator_name(node) in ("ne", "gt") and not compared and bool(node.args[1] == 0)


def _dim_of(node: fx.Node) -> int | None:
    """Return the dim along which topk, a sort or unbind goes."""
    rank, dim = value_of(node.args[0]).ndim, literal(node, "dim")  # type: ignore[arg-type]
    return int(dim) % rank if isinstance(dim, int) and not isinstance(dim, bool) else None


def _reaches(node: fx.Node, rank: int, dim: int) -> bool:
    """Whether a tensor that is broadcast to ``rank`` dims has more than one element along ``dim``."""
    place = dim - rank + value_of(node).ndim
    return bool(place >= 0 and sizes(node)[place] != 1)


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
    rank = value_of(loop.mask).ndim
    make, chosen = _maker(graph, loop.mask), loop.mask
    with graph.inserting_after(loop.mask):
        for dim in sorted(set(range(rank)) - set(loop.tokens), reverse=True):
            chosen = make(_aten.any.dim, chosen, dim)
    for use in [*loop.reads, *loop.weights, *loop.writes]:
        source: Any = use.args[0]
        make = _maker(graph, use)
        with graph.inserting_before(use):
            if use in loop.writes:
                new = make(_aten.index_put.default, source, [chosen], *use.args[2:])
            elif use in loop.weights:
                new = make(_aten.index.Tensor, _of_tokens(loop, use, make), [chosen])
            elif len(use.args[1]) > len(loop.tokens):  # type: ignore[arg-type]
                new = make(_aten.unsqueeze.default, make(_aten.index.Tensor, _leading_one(source), [chosen]), 0)
            else:
                new = make(_aten.index.Tensor, source, [chosen])
        use.replace_all_uses_with(new)
        graph.erase_node(use)


def _of_tokens(loop: _Loop, use: fx.Node, make: Callable[..., fx.Node]) -> fx.Node:
    """Return the weight of each token: the sum over the slots that chose it."""
    source, order, rank = use.args[0], loop.weights[use], value_of(loop.mask).ndim
    assert isinstance(source, fx.Node)
    ones = loop.mask if order == tuple(range(rank)) else make(_aten.permute.default, loop.mask, list(order))
    ones = make(_aten.to.dtype, ones, value_of(source).dtype)
    for _ in range(value_of(source).ndim - rank):
        ones = make(_aten.unsqueeze.default, ones, -1)
    return make(_aten.sum.dim_IntList, make(_aten.mul.Tensor, source, ones), list(range(len(loop.tokens), rank)))


def _maker(graph: fx.Graph, like: fx.Node) -> Callable[..., fx.Node]:
    def make(target: Any, *args: Any) -> fx.Node:
        return infer(graph.call_function(target, args), like)

    return make
