"""``simplify``: remove what a trace contains but nobody would write by hand.

That is metadata asserts, casts to the same dtype, dropout that drops nothing, burned-in devices, batch sizes spelled out where
``-1`` does, and dead code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.ir.batch_sizes import batch_coefficients
from graphpar.ir.program import Program, operator_name, value_of
from graphpar.operators.placement import argument_place, literal
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.normalize.functional import copied, infer, is_inplace
from graphpar.passes.normalize.graph_matching import sizes

_aten = torch.ops.aten


def simplify(program: Program) -> Program:
    """Remove the trace's clutter; the program computes the same numbers."""
    graph = copied(program.graph)
    for node in list(graph.nodes):
        if record_of(node).kind is Kind.CHECK:
            graph.erase_node(node)
    for node in list(graph.nodes):
        _simplified(node)
        if node.op == "call_function":
            # a factory's device is where the program was traced, not where it runs
            node.kwargs = {key: v for key, v in node.kwargs.items() if key not in ("device", "pin_memory", "layout")}
            _spell_dtype(node)
    remove_dead_code(graph)
    used = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    constants = {name: value for name, value in program.constants.items() if name in used or name in program.buffers}
    result = program.with_graph(graph, constants=constants)
    return result.warn(DENSE) if any(_of_sparse_gradient(node) for node in program.graph.nodes) else result


DENSE = "Embeddings with sparse=True have dense gradients here, of the same values; an optimizer for sparse gradients alone refuses them."


def _of_sparse_gradient(node: fx.Node) -> bool:
    return record_of(node).kind is Kind.LOOKUP and literal(node, "sparse") is True


def remove_dead_code(graph: fx.Graph) -> None:
    """Erase operators whose results nobody uses; writes to buffers and inputs stay."""
    for node in reversed(list(graph.nodes)):
        if not (node.users or node.op in ("placeholder", "output") or is_inplace(node)):
            graph.erase_node(node)


def _simplified(node: fx.Node) -> None:
    """Make an operator simpler, or let its operand take its place."""
    record, name = record_of(node), operator_name(node)
    if record.kind is Kind.COPY and name != "clone":
        _cast(node)
    elif record.kind is Kind.RESHAPE and record.sizes:
        _same_shape(node)
    elif record.neutral is not None:
        _without_neutral(node, record.neutral)
    else:
        rewrite = _REWRITES.get(name)
        if rewrite is not None:
            rewrite(node)


def _cast(node: fx.Node) -> None:
    """Make ``to(dtype)``, ``to(device, dtype)`` and ``to(other)`` a plain cast, or drop them."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    before, after = value_of(source), value_of(node)
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return
    if before.dtype == after.dtype:
        node.replace_all_uses_with(source)
    else:
        node.target, node.args, node.kwargs = _aten.to.dtype, (source, after.dtype), {}


def _alias(node: fx.Node) -> None:
    if isinstance(node.args[0], fx.Node):
        node.replace_all_uses_with(node.args[0])


def _dropout(node: fx.Node) -> None:
    if not isinstance(node.target, torch._ops.OpOverload):
        return  # already drawing from a stream
    source, probability, training = node.args
    if isinstance(source, fx.Node) and (not training or probability == 0.0):
        node.replace_all_uses_with(source)


def full_slice(node: fx.Node) -> None:
    """Replace ``x[:]`` by ``x``."""
    arguments: list[Any] = [*node.args, *(0, None, None, 1)[len(node.args) - 1 :]]
    source, dim, start, end, step = arguments
    if not isinstance(value_of(source), Tensor):
        return
    size = value_of(source).shape[dim]
    whole = end is None or (isinstance(end, int) and (end >= 2**62 or (isinstance(size, int) and end >= size)))
    if start in (0, None) and whole and step == 1:
        node.replace_all_uses_with(source)


def _full_slice_scatter(node: fx.Node) -> None:
    """Replace ``x[:, :] = y`` by ``y``."""
    source, value = node.args[0], node.args[1]
    assert isinstance(source, fx.Node) and isinstance(value, fx.Node)
    before, written = value_of(source), value_of(value)
    arguments: list[Any] = [*node.args[2:], *(0, None, None, 1)[len(node.args) - 2 :]]
    _, start, _, step = arguments
    same = before.dtype == written.dtype and sizes(source) == sizes(value)
    if same and start in (0, None) and step == 1:
        node.replace_all_uses_with(value)


def _squeeze(node: fx.Node) -> None:
    """Spell out the dims of ``squeeze()``: a microbatch may have one row, and must keep that dim."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    shape = value_of(source).shape
    if len(node.args) == 1:
        dims = [dim for dim, size in enumerate(shape) if isinstance(size, int) and size == 1]
    else:
        given = node.args[1] if isinstance(node.args[1], list | tuple) else [node.args[1]]
        dims = sorted({int(dim) % len(shape) for dim in given})  # type: ignore[arg-type]
    follows = batch_coefficients(source)
    dims = [dim for dim in dims if isinstance(shape[dim], int) and shape[dim] == 1 and follows[dim] is None]
    if not dims:
        node.replace_all_uses_with(source)
    elif len(node.args) == 1:
        one = len(dims) == 1
        node.target, node.args = (_aten.squeeze.dim if one else _aten.squeeze.dims), (source, dims[0] if one else dims)


def _cat(node: fx.Node) -> None:
    """Drop empty parts (``cat([empty, keys])``: a cache before the first step), and ``cat`` of one tensor."""
    parts = node.args[0]
    assert isinstance(parts, list | tuple)
    full = [part for part in parts if tuple(value_of(part).shape) != (0,)]  # type: ignore[arg-type]
    if full and len(full) < len(parts) and all(value_of(part).dtype == value_of(node).dtype for part in full):  # type: ignore[arg-type]
        node.args = (full, *node.args[1:])
        parts = full
    if len(parts) == 1 and isinstance(parts[0], fx.Node):
        node.replace_all_uses_with(parts[0])


def _same_shape(node: fx.Node) -> None:
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return
    before, after = value_of(source), value_of(node)
    if before.dtype != after.dtype:
        return  # the bits, read as another type
    if sizes(source) == sizes(node):
        node.replace_all_uses_with(source)
    else:
        _infer_one_size(node)


def _expand(node: fx.Node) -> None:
    source, given = node.args[0], list(node.args[1])  # type: ignore[arg-type]
    assert isinstance(source, fx.Node)
    before, after = sizes(source), sizes(node)
    if before == after:
        node.replace_all_uses_with(source)
        return
    offset = len(after) - len(before)
    for dim in range(offset, len(after)):
        if before[dim - offset] == after[dim]:
            given[dim] = -1
    node.args = (source, given)


def _infer_one_size(node: fx.Node) -> None:
    """Turn ``view(x, [batch, 16, -1])`` into ``view(x, [-1, 16, 768])``: only the batch's size is inferred."""
    value = value_of(node)
    coefficients = batch_coefficients(node)
    moving = [dim for dim, coefficient in enumerate(coefficients) if coefficient is not None]
    if len(moving) == 1 and len(node.args) == 2 and isinstance(node.args[1], list | tuple):
        sizes = [-1 if dim == moving[0] else int(size) for dim, size in enumerate(value.shape)]
        if math.prod(size for size in sizes if size != -1) > 0:
            node.args = (node.args[0], sizes)


def _without_neutral(node: fx.Node, neutral: float) -> None:
    """Drop ``x + 0`` and ``x * 1`` with a Python number, when the dtype stays."""
    source, other = node.args[0], node.args[1]
    if not isinstance(source, fx.Node) or isinstance(other, fx.Node | bool) or other != neutral:
        return
    before, after = value_of(source), value_of(node)
    if isinstance(before, Tensor) and before.dtype == after.dtype:
        node.replace_all_uses_with(source)


def _without_true(node: fx.Node) -> None:
    """Drop ``mask & True``, as masks are begun with."""
    for source, other in (node.args[:2], node.args[1::-1]):
        if not isinstance(source, fx.Node) or value_of(source).dtype != torch.bool or sizes(source) != sizes(node):
            continue
        if other is True or _is_true(other):
            node.replace_all_uses_with(source)
            return


def _is_true(node: Any) -> bool:
    """Whether ``node`` makes booleans that are all true."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or value_of(node).dtype != torch.bool:
        return False
    name = operator_name(node)
    return name in ("ones", "new_ones", "ones_like") or (name == "full" and literal(node, "fill_value", 1) is True)


def _index_of_all(node: fx.Node) -> None:
    """Spell ``x[arange(b)[:, None, None], arange(n)]``, as transformers' masks are made, as what it is: ``x`` with dims of one between."""
    source, indices = node.args[0], node.args[1]
    if (
        not isinstance(source, fx.Node)
        or not isinstance(indices, list | tuple)
        or len(indices) != value_of(source).ndim
    ):
        return
    root = source
    while root.op == "call_function" and record_of(root).kind in _VIEWS:
        root = root.args[0]  # type: ignore[assignment]
    if root.op == "get_attr":
        return  # a copy of a buffer, which may be written after it
    places = [_counted_dim(index, size) for index, size in zip(indices, sizes(source))]
    if None in places or places != sorted(set(places)):  # type: ignore[type-var]
        return
    whole, ndim = source, value_of(node).ndim
    with node.graph.inserting_before(node):
        for dim in sorted(set(range(-ndim, 0)) - set(places)):
            whole = infer(node.graph.call_function(_aten.unsqueeze.default, (whole, dim + ndim)), node)
    node.replace_all_uses_with(whole)


_VIEWS = (Kind.PERMUTE, Kind.RESHAPE, Kind.EXPAND, Kind.VIEW, Kind.ALIAS)


def _counted_dim(index: Any, size: int | str) -> int | None:
    """Return the dim, from the last, along which ``index`` counts from 0 to ``size``; None where it does anything else."""
    if not isinstance(index, fx.Node) or size == 1:
        return None
    long = [dim - value_of(index).ndim for dim, given in enumerate(sizes(index)) if given != 1]
    while operator_name(index) == "unsqueeze" or (
        index.op == "call_function" and record_of(index).kind is Kind.RESHAPE
    ):
        index = index.args[0]
        assert isinstance(index, fx.Node)
    counts = operator_name(index) == "arange" and sizes(index) == [size] and len(long) == 1
    plain = counts and literal(index, "start", default=0) == 0 and literal(index, "step", default=1) == 1
    return long[0] if plain and not value_of(index).is_floating_point() else None


def _broadcast(node: fx.Node) -> None:
    """Drop ``broadcast_tensors`` of tensors that have the same shape already."""
    parts = node.args[0]
    assert isinstance(parts, list | tuple)
    for user in list(node.users):
        source = parts[int(user.args[1])]  # type: ignore[arg-type, index]
        if isinstance(source, fx.Node) and sizes(source) == sizes(user):
            user.replace_all_uses_with(source)


def _grouped_mm(node: fx.Node) -> None:
    """Replace transformers' own operator, and the one below it, by torch's function: the emitted program needs torch alone."""
    ends = node.args[2] if len(node.args) > 2 else node.kwargs.get("offs")
    if ends is not None and len(node.args) <= 3 and not node.kwargs.keys() - {"offs"}:
        node.target = torch.nn.functional.grouped_mm
        node.args, node.kwargs = node.args[:2], {"offs": ends}


def _dense_gradient(node: fx.Node) -> None:
    """Let a table have a dense gradient, which can be summed over ranks, where a sparse one of the same values was asked for."""
    if _of_sparse_gradient(node):
        place = argument_place(node, "sparse")
        node.args = tuple(False if index == place else item for index, item in enumerate(node.args))


def _usual_scale(node: fx.Node) -> None:
    """Drop the scale of attention that it has anyway."""
    scale, width = node.kwargs.get("scale"), value_of(node.args[0]).shape[-1]  # type: ignore[arg-type]
    if isinstance(scale, float) and isinstance(width, int) and math.isclose(scale, width**-0.5, rel_tol=1e-12):
        node.kwargs = {name: value for name, value in node.kwargs.items() if name != "scale"}


_REWRITES: dict[str, Callable[[fx.Node], None]] = {
    "alias": _alias,
    "lift_fresh": _alias,
    "dropout": _dropout,
    "feature_dropout": _dropout,
    "slice": full_slice,
    "slice_scatter": _full_slice_scatter,
    "expand": _expand,
    "broadcast_tensors": _broadcast,
    "bitwise_and": _without_true,
    "logical_and": _without_true,
    "__and__": _without_true,
    "index": _index_of_all,
    "squeeze": _squeeze,
    "cat": _cat,
    **dict.fromkeys(("grouped_mm_fallback", "_grouped_mm"), _grouped_mm),
    "scaled_dot_product_attention": _usual_scale,
    **dict.fromkeys(("embedding", "embedding_bag"), _dense_gradient),
}


def _spell_dtype(node: fx.Node) -> None:
    """Spell out the default dtype of floating results made of no floating operands; it may differ where the program runs."""
    value = node.meta.get("val")
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(value, Tensor):
        return
    tensors = [argument for argument in node.all_input_nodes if isinstance(value_of(argument), Tensor)]
    inexact = any(value_of(tensor).is_floating_point() or value_of(tensor).is_complex() for tensor in tensors)
    if not value.is_floating_point() or value.dtype == torch.float32 or inexact:
        return
    names = [argument.name for argument in node.target._schema.arguments]
    if "dtype" in names:
        if dict(zip(names, node.args)).get("dtype") is None and node.kwargs.get("dtype") is None:
            node.kwargs = {**node.kwargs, "dtype": value.dtype}
    elif operator_name(node) == "where":
        node.target = _aten.where.self
        node.args = (node.args[0], *(_numbers(node, number, value) for number in node.args[1:]))
    else:
        for tensor in tensors:
            node.replace_input_with(tensor, _floating(node, tensor, value.dtype))


def _numbers(node: fx.Node, number: Any, value: Tensor) -> fx.Node:
    """Return an operand of ``node`` in the dtype of its result ``value``: a Python number as a tensor, a tensor cast."""
    if isinstance(number, fx.Node):
        return _floating(node, number, value.dtype)
    with node.graph.inserting_before(node):
        made = node.graph.call_function(_aten.full.default, ([], number), {"dtype": value.dtype})
    made.meta = _where_from(node) | {"val": value.new_empty([])}
    return made


def _floating(node: fx.Node, tensor: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Cast ``tensor``, of whole numbers, to ``dtype``."""
    with node.graph.inserting_before(node):
        cast = node.graph.call_function(_aten.to.dtype, (tensor, dtype))
    cast.meta = dict(tensor.meta) | _where_from(node) | {"val": value_of(tensor).to(dtype)}
    return cast


def _where_from(node: fx.Node) -> dict[str, Any]:
    """Return the metadata that says where in the user's code ``node`` was made."""
    return {key: node.meta[key] for key in ("module_stack", "source") if key in node.meta}
