"""One spelling of indexing by a mask, for :mod:`graphpar.passes.normalize.static_masking`.

x[mask.nonzero()[:, 0]], x[torch.where(mask)], masked_select(x, mask)   ->   x[mask]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphpar.ir.program import operator_name, value_of
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.normalize.functional import infer
from graphpar.passes.normalize.graph_matching import comparable, sizes

_aten = torch.ops.aten


def spell_as_mask(graph: fx.Graph, node: fx.Node) -> None:
    """Spell the index that ``node`` takes rows by as a mask, in place, where it was made of one."""
    source, name = node.args[0], operator_name(node)
    if not isinstance(source, fx.Node):
        return
    mask: fx.Node | None = None
    with graph.inserting_before(node):
        if name == "masked_select":
            mask = node.args[1]  # type: ignore[assignment]
            assert isinstance(mask, fx.Node)
            both = comparable(torch.broadcast_shapes(value_of(source).shape, value_of(mask).shape))
            if both == sizes(source) != sizes(mask):
                mask = infer(graph.call_function(_aten.expand_as.default, (mask, source)), node)
            elif both != sizes(source):
                source = infer(graph.call_function(_aten.expand_as.default, (source, mask)), node)
        elif name == "index_select":
            found = _column(node.args[2]) if node.args[1] == 0 else None
            mask = found[0] if found is not None and value_of(found[0]).ndim == 1 else None
        elif name == "index":
            columns = [_column(index) for index in node.args[1]]  # type: ignore[union-attr]
            first = columns[0]
            if first is not None and columns == [(first[0], k) for k in range(value_of(first[0]).ndim)]:
                mask = first[0]
    if mask is not None:
        node.target, node.args, node.kwargs = _aten.index.Tensor, (source, [mask]), {}


def _column(index: Any) -> tuple[fx.Node, int] | None:
    """Return the mask, and the column of its ``nonzero()``, that an index tensor was made of."""
    if not isinstance(index, fx.Node) or value_of(index).ndim != 1:
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
