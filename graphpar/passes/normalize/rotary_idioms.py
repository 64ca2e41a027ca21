"""Rotary position embeddings that are written out: found by what they compute, not by how they are written.

    x * cos + cat([-x[..., n / 2:], x[..., :n / 2]], -1) * sin            apply_rotary(x, cos, sin)
    stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)         apply_rotary(x, cos, sin, interleaved=True)
    view_as_real(view_as_complex(pairs of x) * table).flatten(-2)         apply_rotary(x, table.real, table.imag, interleaved=True)

All operators between x, its two tables (or one of complex numbers) and the result must be linear and mix elements in the last dim alone,
so they compute the same function of each row. It runs on random rows in fp64, and is rotary if it agrees with ``apply_rotary`` on all of
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.emitted.rotary import apply_rotary
from graphpar.ir.program import operator_name, value_of
from graphpar.operators.placement import literal
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.normalize.causal_masks import Masks
from graphpar.passes.normalize.graph_matching import follows_parameters, insert_call, insert_helper, is_call, sizes

_aten = torch.ops.aten
_LEAST, _MOST = 4, 24
"""Operators of a rotary embedding."""
_ROWS = 3
_OFF = 1e-12


def rotary(node: fx.Node, found: dict[str, Any], masks: Masks) -> bool:
    """What turns pairs of features by two tables: one call."""
    for x, tables, region in _regions(node, masks):
        if not all(isinstance(value_of(each), Tensor) for each in (x, *tables)):
            continue
        alike = sizes(x) == sizes(node) and all(_broadcast(table, x) for table in tables)
        values = [value_of(each) for each in (x, *tables, *region) if isinstance(value_of(each), Tensor)]
        same = len({value.dtype.to_real() for value in values}) == 1
        real = value_of(x).is_floating_point() and value_of(node).is_floating_point()
        if alike and same and real and _replaced(region):
            for given, interleaved in itertools.product(itertools.permutations(tables), (False, True)):
                if _agrees(region, x, given, interleaved):
                    options = {"interleaved": True} if interleaved else {}
                    insert_call(node, apply_rotary, (x, *_table_pair(node, given)), options)
                    return True
    return False


def _regions(node: fx.Node, masks: Masks) -> Iterator[tuple[fx.Node, list[fx.Node], list[fx.Node]]]:
    """Yield values x from which ``node`` follows by tables without gradients, the tables, and the operators in order."""
    if not isinstance(value_of(node), Tensor):
        return
    lead = value_of(node).ndim - 1
    region: list[fx.Node] = []
    left, tables, last = set[fx.Node](), set[fx.Node](), node
    while len(region) <= _MOST and len(tables) <= 2 and _is_of_last_dim(last, lead):
        region.append(last)
        for source in last.all_input_nodes:
            (left if follows_parameters(source, masks.program) else tables).add(source)
        if len(left) == 1 and len(region) >= _LEAST and (len(tables) == 2 or _is_complex(tables)):
            yield next(iter(left)), sorted(tables), region[::-1]
        if not left:
            return
        last = max(left)  # by their places in the graph
        left.discard(last)


def _is_of_last_dim(node: fx.Node, lead: int) -> bool:
    """Whether an operator is linear, and computes each element from those at its place in the first ``lead`` dims."""
    if node.op != "call_function":
        return False
    kind, result, sources = record_of(node).kind, value_of(node), node.all_input_nodes
    if kind is Kind.POINTWISE:
        return bool(record_of(node).linear)
    if kind is Kind.ALIAS or operator_name(node) == "getitem":
        return operator_name(node) != "detach"  # whose gradient is none
    if kind is Kind.RESHAPE:
        return isinstance(result, Tensor) and result.ndim > lead and sizes(node)[:lead] == sizes(sources[0])[:lead]
    if is_call(node, "view_as_complex", "view_as_real"):
        return bool(min(value_of(node).ndim, value_of(sources[0]).ndim) > lead)
    if not is_call(node, "slice", "split", "split_with_sizes", "chunk", "unbind", "select", "cat", "stack"):
        return False
    rank = value_of(sources[0]).ndim + is_call(node, "stack")
    return bool(int(literal(node, "dim", default=0)) % rank >= lead)


def _is_complex(tables: Collection[fx.Node]) -> bool:
    """Whether there is one table, and it is of complex numbers."""
    return len(tables) == 1 and all(isinstance(v := value_of(each), Tensor) and v.is_complex() for each in tables)


def _table_pair(node: fx.Node, tables: Sequence[fx.Node]) -> list[fx.Node]:
    """Return two tables, or the real and the imaginary part of one."""
    if len(tables) > 1:
        return [*tables]
    (table,) = tables
    found = []
    for target, part in ((_aten.real.default, value_of(table).real), (_aten.imag.default, value_of(table).imag)):
        before = [user for user in table.users if user.target is target and user < node]
        found.append(before[0] if before else insert_helper(node, target, (table,), part))
    return found


def _broadcast(table: fx.Node, x: fx.Node) -> bool:
    """Whether a table has a number for each feature of x, or for each pair, and is repeated in other dims at most."""
    if not 1 <= value_of(table).ndim <= value_of(x).ndim:
        return False
    (*others, width), whole = sizes(table), sizes(x)
    features = whole[-1]
    if not isinstance(features, int) or features % 2 or width not in (features, features // 2):
        return False
    return all(size in (1, full) for size, full in zip(reversed(others), reversed(whole[:-1])))


def _replaced(region: list[fx.Node]) -> bool:
    """Whether nothing else uses what the operators compute; views cost nothing."""
    return all(set(each.users) <= set(region) for each in region[:-1] if not record_of(each).free)


def _agrees(region: list[fx.Node], x: fx.Node, tables: Sequence[fx.Node], interleaved: bool) -> bool:
    """Whether the operators give what ``apply_rotary`` does."""
    generator = torch.Generator().manual_seed(0)
    lead = value_of(x).ndim - 1
    given = {
        each: torch.randn(
            [_ROWS, *[1] * (lead - 1), int(sizes(each)[-1])],
            generator=generator,
            dtype=torch.complex128 if value_of(each).is_complex() else torch.float64,
        )
        for each in (x, *tables)
    }
    cos, sin = [given[each] for each in tables] if len(tables) > 1 else (given[tables[0]].real, given[tables[0]].imag)
    expected = apply_rotary(given[x], cos, sin, interleaved)
    found = _run(region, dict(given), lead)
    return found.shape == expected.shape and bool(((found - expected).abs() <= _OFF).all())


def _run(region: list[fx.Node], values: dict[fx.Node, Any], lead: int) -> Any:
    for node in region:
        if record_of(node).kind is Kind.RESHAPE:
            source = values[node.all_input_nodes[0]]
            values[node] = source.reshape(*source.shape[:lead], *sizes(node)[lead:])
        else:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return values[region[-1]]
