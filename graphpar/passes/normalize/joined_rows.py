"""Rows that a mask chooses, joined with others, stay in place: a part of ``fill_unchosen``.

    e = cat([edges[:, mask], loops], 1)     ->  cat([edges, loops], 1), whose columns the mask cat([mask, ones]) chooses
    torch.ones(e.size(1))                   ->  of all columns
    x[e[0]]                                 ->  the same of all; those not chosen hold a harmless number
    out.scatter_add(0, e[1], values)        ->  out.scatter_add(0, e[1], where(mask, values, 0))

So graph networks with loops of their own have fixed sizes. Indices of columns that are not chosen are those of the model's input, so
that they are valid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.ir.batch_sizes import is_size, is_unknown
from graphpar.ir.program import operator_name, value_of
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.normalize.functional import copied, infer
from graphpar.passes.normalize.simplify import remove_dead_code

_aten = torch.ops.aten
HARMLESS = 0.5  # valid for logarithms, roots, quotients, probabilities


def join_chosen(graph: fx.Graph) -> fx.Graph:
    """Return ``graph`` with chosen rows that are joined with others in place; itself where something else is done with them."""
    made = copied(graph)
    joiner = _Joiner(made)
    try:
        for node in list(made.nodes):
            joiner.visit(node)
    except _OtherUseError:
        return graph
    remove_dead_code(made)
    return made


class _OtherUseError(Exception):
    """An operator of chosen rows for which there is no rule here."""


@dataclass(frozen=True)
class _Rows:
    """``value`` has all rows along ``dim``, of which ``mask`` [rows] chooses."""

    value: fx.Node
    mask: fx.Node
    dim: int


class _Joiner:
    """Adds the operators of all rows beside those of the chosen ones, and uses those where the rows leave."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.rows: dict[fx.Node, _Rows] = {}
        self.masks: dict[str, fx.Node] = {}  # by the unknown size

    def visit(self, node: fx.Node) -> None:
        """Add what ``node`` does with all rows.

        Raises:
            _OtherUseError: no rule says what.
        """
        touched = [argument for argument in node.all_input_nodes if argument in self.rows]
        if node.op == "output" and touched:
            raise _OtherUseError
        if node.op != "call_function" or is_size(node):
            return
        with self.graph.inserting_before(node):
            if not touched:
                self._begins(node)
            elif not any(is_unknown(size) for part in _tensors(node) for size in part.shape):
                node.replace_all_uses_with(self._leaves(node, touched))
            else:
                self._keep(node, *self._row_by_row(node, touched))

    # ---- where they begin ----

    def _begins(self, node: fx.Node) -> None:
        if operator_name(node) == "cat":
            parts: Any = node.args[0]
            dim = int(node.args[1]) % value_of(node).ndim if len(node.args) > 1 else 0  # type: ignore[arg-type]
            chosen = [_chosen(part, dim) for part in parts]
            if any(chosen) and all(found or not _unknown(part) for part, found in zip(parts, chosen)):
                whole = [found[0] if found else part for part, found in zip(parts, chosen)]
                masks = [found[1] if found else self._all(node, part, dim) for part, found in zip(parts, chosen)]
                mask = self._new(node, _aten.cat.default, masks, 0)
                self._keep(node, self._new(node, _aten.cat.default, whole, dim), mask, dim)
        elif record_of(node).kind is Kind.FACTORY and (sizes := self._sizes(node)):
            (mask,) = sizes.values()
            value = self._same(node, {})
            dims = [dim for dim, size in enumerate(value_of(node).shape) if is_unknown(size)]
            if len(sizes) != 1 or len(dims) != 1:
                raise _OtherUseError
            self._keep(node, value, mask, dims[0])

    def _all(self, like: fx.Node, part: fx.Node, dim: int) -> fx.Node:
        one = self._new(like, _aten.select.int, part, 1 - dim, 0) if value_of(part).ndim == 2 else part
        if value_of(one).ndim != 1:
            raise _OtherUseError
        return self._new(like, _aten.ones_like.default, self._new(like, _aten.to.dtype, one, torch.bool))

    def _keep(self, node: fx.Node, value: fx.Node, mask: fx.Node, dim: int) -> None:
        self.rows[node] = _Rows(value, mask, dim)
        self.masks[str(value_of(node).shape[dim])] = mask

    # ---- row by row ----

    def _row_by_row(self, node: fx.Node, touched: list[fx.Node]) -> tuple[fx.Node, fx.Node, int]:
        name, kind = operator_name(node), record_of(node).kind
        mask, rank = self._mask(touched), value_of(node).ndim
        own = self.rows[touched[0]]
        if name in ("index", "index_select"):
            return self._picked(node, touched, mask)
        if name == "select" and int(node.args[1]) % (rank + 1) != own.dim:  # type: ignore[arg-type]
            return self._same(node), mask, own.dim - (own.dim > int(node.args[1]) % (rank + 1))  # type: ignore[arg-type]
        if name == "unsqueeze":
            return self._same(node), mask, own.dim + (int(node.args[1]) % rank <= own.dim)  # type: ignore[arg-type]
        dims = [dim for dim, size in enumerate(value_of(node).shape) if is_unknown(size)]
        alone = all(size == 1 for dim, size in enumerate(value_of(touched[0]).shape) if dim != own.dim)
        if kind is Kind.RESHAPE and alone and len(dims) == 1 and rank <= 2:
            return self._same(node), mask, dims[0]
        pointwise = kind in (Kind.POINTWISE, Kind.COPY, Kind.ALIAS, Kind.EXPAND)
        places = {self.rows[each].dim - value_of(each).ndim for each in touched}
        if pointwise and len(places) == 1 and len(dims) == 1 and dims[0] - rank in places:
            return self._same(node), mask, dims[0]
        raise _OtherUseError

    def _picked(self, node: fx.Node, touched: list[fx.Node], mask: fx.Node) -> tuple[fx.Node, fx.Node, int]:
        """Take rows of a whole value by indices of which some are chosen."""
        source = node.args[0]
        if operator_name(node) == "index":
            given: Any = node.args[1]
            dim = len(given) - 1
            simple = given[-1] in self.rows and not any(isinstance(each, fx.Node) for each in given[:-1])
        else:
            dim, simple = int(node.args[1]) % value_of(source).ndim, True  # type: ignore[arg-type]
        if source in self.rows or not simple or value_of(touched[0]).ndim != 1:
            raise _OtherUseError
        value = self._same(node)
        if value_of(value).is_floating_point():
            value = self._new(node, _aten.where.ScalarOther, self._aligned(node, mask, dim, value), value, HARMLESS)
        return value, mask, dim

    # ---- where they leave ----

    def _leaves(self, node: fx.Node, touched: list[fx.Node]) -> fx.Node:
        name, kind = operator_name(node), record_of(node).kind
        if kind is Kind.FACTORY:  # of a dtype
            return self._same(node, leaves=True)
        mask, source = self._mask(touched), node.args[-1]
        added = name in ("scatter_add", "index_add") and len(node.args) == 4 and source in self.rows
        if added and node.args[2] in self.rows and node.args[0] not in self.rows and not node.kwargs:
            zeroed = self._zeroed(node, source, mask)  # type: ignore[arg-type]
            return self._same(node, {source: zeroed}, leaves=True)  # type: ignore[dict-item]
        if name == "sum" and source is not touched[0] and not node.kwargs:
            return self._same(node, {touched[0]: self._zeroed(node, touched[0], mask)}, leaves=True)
        raise _OtherUseError

    def _zeroed(self, like: fx.Node, node: fx.Node, mask: fx.Node) -> fx.Node:
        own = self.rows[node]
        return self._new(like, _aten.where.ScalarOther, self._aligned(like, mask, own.dim, own.value), own.value, 0)

    # ---- nodes ----

    def _mask(self, touched: list[fx.Node]) -> fx.Node:
        masks = {self.rows[each].mask for each in touched}
        if len(masks) != 1:
            raise _OtherUseError
        return masks.pop()

    def _aligned(self, like: fx.Node, mask: fx.Node, dim: int, value: fx.Node) -> fx.Node:
        for _ in range(value_of(value).ndim - dim - 1):
            mask = self._new(like, _aten.unsqueeze.default, mask, -1)
        return mask

    def _sizes(self, node: fx.Node) -> dict[fx.Node, fx.Node]:
        """The unknown numbers among the arguments, each with the mask that chooses so many rows."""
        numbers = [a for a in node.all_input_nodes if is_size(a) and is_unknown(value_of(a))]
        found = {number: self.masks.get(str(value_of(number))) for number in numbers}
        return {} if None in found.values() else found  # type: ignore[return-value]

    def _same(self, node: fx.Node, instead: dict[fx.Node, fx.Node] | None = None, leaves: bool = False) -> fx.Node:
        """``node`` on all rows of its arguments, or what is ``instead`` of them; ``leaves``: with the same result."""
        known = {each: own.value for each, own in self.rows.items()} | (instead or {})
        for number, mask in self._sizes(node).items():
            known[number] = self.graph.call_function(_aten.sym_size.int, (mask, 0))
            known[number].meta = {"val": value_of(mask).shape[0], "module_stack": ()}
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda each: known.get(each, each))
        made = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        if any(isinstance(value_of(each), Tensor) for each in made.all_input_nodes):
            return infer(made, node, same=leaves)
        args, kwargs = fx.map_arg((args, kwargs), lambda each: each.meta["val"])
        with value_of(next(iter(self.masks.values()))).fake_mode:
            made.meta = dict(node.meta) | {"val": node.target(*args, **kwargs)}  # type: ignore[operator]
        return made

    def _new(self, like: fx.Node, target: Any, *args: Any) -> fx.Node:
        return infer(self.graph.call_function(target, args), like)


def _chosen(part: fx.Node, dim: int) -> tuple[fx.Node, fx.Node] | None:
    """Return x and the mask where ``part`` is ``x[:, mask]``, with the mask at ``dim``."""
    if operator_name(part) != "index" or not isinstance(part.args[0], fx.Node):
        return None
    indices: Any = part.args[1]
    mask = indices[-1]
    one = len(indices) == dim + 1 and all(each is None for each in indices[:-1]) and isinstance(mask, fx.Node)
    if not one or value_of(mask).dtype is not torch.bool or value_of(mask).ndim != 1 or _unknown(part.args[0]):
        return None
    return part.args[0], mask


def _tensors(node: fx.Node) -> list[Tensor]:
    value = value_of(node)
    return [part for part in (value if isinstance(value, list | tuple) else [value]) if isinstance(part, Tensor)]


def _unknown(node: fx.Node) -> bool:
    return any(is_unknown(size) for part in _tensors(node) for size in part.shape)
