"""``simplify``: what the trace wrote down but nobody would write by hand goes out.

Metadata asserts, casts to the same dtype, dropout that drops nothing, burned-in devices, batch sizes spelled out where
``-1`` says it, and dead code.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.ir.program import Program, batch_coefficients, operator_name, value_of
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.normalize.functional import is_inplace

_aten = torch.ops.aten


def simplify(program: Program) -> Program:
    """Program -> Program without the trace's clutter; the numbers are the same."""
    graph = fx.Graph()
    val_map: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(program.graph, val_map)
    output = next(iter(reversed(program.graph.nodes)))
    graph.output(fx.map_arg(output.args[0], val_map.__getitem__))
    for node in list(graph.nodes):
        if record_of(node).kind is Kind.CHECK:
            graph.erase_node(node)
    for node in list(graph.nodes):
        _simplified(node)
        if node.op == "call_function":
            _free_of_devices(node)
            _own_dtype(node)
    remove_dead_code(graph)
    used = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    constants = {name: value for name, value in program.constants.items() if name in used or name in program.buffers}
    return program.with_graph(graph, constants=constants)


def remove_dead_code(graph: fx.Graph) -> None:
    """Erases operators whose results nobody uses; writes to buffers and inputs stay."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("placeholder", "output") or node.users:
            continue
        if is_inplace(node):
            continue
        graph.erase_node(node)


def _simplified(node: fx.Node) -> bool:
    """Make an operator simpler; whether its operand took its place."""
    record, name = record_of(node), operator_name(node)
    if record.kind is Kind.COPY and name != "clone":
        return _cast(node)
    if record.kind is Kind.RESHAPE and record.sizes:
        return _same_shape(node)
    if record.neutral is not None:
        return _without_neutral(node, record.neutral)
    match name:
        case "alias" | "lift_fresh":
            return _is_copy_of_same(node)
        case "dropout" | "feature_dropout":
            return _dropout(node)
        case "slice":
            return full_slice(node)
        case "slice_scatter":
            return _full_slice_scatter(node)
        case "expand":
            return _expand(node)
        case "broadcast_tensors":
            return _broadcast(node)
        case "squeeze":
            return _squeeze(node)
        case "cat":
            return _without_empty_parts(node) or _single_part(node)
        case "grouped_mm_fallback":
            return _library_operator(node)
    return False


def _forward_to(node: fx.Node, replacement: fx.Node) -> bool:
    node.replace_all_uses_with(replacement)
    return True


def _cast(node: fx.Node) -> bool:
    """``to(dtype)``, ``to(device, dtype)``, ``to(other)``: a plain cast, or nothing."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    before, after = value_of(source), value_of(node)
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        if before.dtype == after.dtype:
            return _forward_to(node, source)
        node.target, node.args, node.kwargs = _aten.to.dtype, (source, after.dtype), {}
    return False


def _is_copy_of_same(node: fx.Node) -> bool:
    source = node.args[0]
    return isinstance(source, fx.Node) and _forward_to(node, source)


def _dropout(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False  # already drawing from a stream
    source, probability, training = node.args
    if isinstance(source, fx.Node) and (not training or probability == 0.0):
        return _forward_to(node, source)
    return False


def full_slice(node: fx.Node) -> bool:
    """``x[:]`` is ``x``."""
    arguments: list[Any] = [*node.args, *(0, None, None, 1)[len(node.args) - 1 :]]
    source, dim, start, end, step = arguments
    if not isinstance(value_of(source), Tensor):
        return False
    size = value_of(source).shape[dim]
    whole = end is None or (isinstance(end, int) and (end >= 2**62 or (isinstance(size, int) and end >= size)))
    return start in (0, None) and whole and step == 1 and _forward_to(node, source)


def _full_slice_scatter(node: fx.Node) -> bool:
    """``x[:, :] = y`` is ``y``."""
    source, value = node.args[0], node.args[1]
    assert isinstance(source, fx.Node) and isinstance(value, fx.Node)
    before, written = value_of(source), value_of(value)
    arguments: list[Any] = [*node.args[2:], *(0, None, None, 1)[len(node.args) - 2 :]]
    _, start, _, step = arguments
    same = before.dtype == written.dtype and _all_same(before.shape, written.shape)
    return bool(same) and start in (0, None) and step == 1 and _forward_to(node, value)


def _squeeze(node: fx.Node) -> bool:
    """``squeeze()`` names its dims: a microbatch may have one row, and must keep that dim."""
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
        return _forward_to(node, source)
    if len(node.args) == 1:
        one = len(dims) == 1
        node.target, node.args = (_aten.squeeze.dim if one else _aten.squeeze.dims), (source, dims[0] if one else dims)
    return False


def _without_empty_parts(node: fx.Node) -> bool:
    """An empty cache before the first step: ``cat([empty, keys])``."""
    parts = node.args[0]
    assert isinstance(parts, list | tuple)
    full = [part for part in parts if tuple(value_of(part).shape) != (0,)]  # type: ignore[arg-type]
    if full and len(full) < len(parts) and all(value_of(part).dtype == value_of(node).dtype for part in full):  # type: ignore[arg-type]
        node.args = (full, *node.args[1:])
    return False


def _same_shape(node: fx.Node) -> bool:
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return False
    before, after = value_of(source), value_of(node)
    if before.dtype != after.dtype:
        return False  # the bits, read as another type
    if _all_same(before.shape, after.shape):
        return _forward_to(node, source)
    _infer_one_size(node)
    return False


def _same_size(a: Any, b: Any) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return str(a) == str(b)


def _expand(node: fx.Node) -> bool:
    source, sizes = node.args[0], list(node.args[1])  # type: ignore[arg-type]
    assert isinstance(source, fx.Node)
    before, after = value_of(source), value_of(node)
    if _all_same(before.shape, after.shape):
        return _forward_to(node, source)
    offset = after.ndim - before.ndim
    for dim in range(offset, after.ndim):
        if _same_size(before.shape[dim - offset], after.shape[dim]):
            sizes[dim] = -1
    node.args = (source, sizes)
    return False


def _infer_one_size(node: fx.Node) -> bool:
    """``view(x, [batch, 16, -1])`` becomes ``view(x, [-1, 16, 768])``: the one size that is not spelled out is the batch's."""
    value = value_of(node)
    coefficients = batch_coefficients(node)
    moving = [dim for dim, coefficient in enumerate(coefficients) if coefficient is not None]
    if len(moving) == 1 and len(node.args) == 2 and isinstance(node.args[1], list | tuple):
        sizes = [-1 if dim == moving[0] else int(size) for dim, size in enumerate(value.shape)]
        if math.prod(size for size in sizes if size != -1) > 0:
            node.args = (node.args[0], sizes)
    return False


def _single_part(node: fx.Node) -> bool:
    """``cat`` of one tensor."""
    parts = node.args[0]
    if isinstance(parts, list | tuple) and len(parts) == 1 and isinstance(parts[0], fx.Node):
        return _forward_to(node, parts[0])
    return False


def _without_neutral(node: fx.Node, neutral: float) -> bool:
    """``x + 0`` and ``x * 1`` with a Python number, when the dtype stays."""
    source, other = node.args[0], node.args[1]
    if not isinstance(source, fx.Node) or isinstance(other, fx.Node | bool) or other != neutral:
        return False
    before, after = value_of(source), value_of(node)
    if not isinstance(before, Tensor) or before.dtype != after.dtype:
        return False
    return _forward_to(node, source)


def _broadcast(node: fx.Node) -> bool:
    """``broadcast_tensors`` of tensors that have one shape already."""
    parts = node.args[0]
    assert isinstance(parts, list | tuple)
    for user in list(node.users):
        source = parts[int(user.args[1])]  # type: ignore[arg-type, index]
        if isinstance(source, fx.Node) and _all_same(value_of(source).shape, value_of(user).shape):
            _forward_to(user, source)
    return False


def _all_same(first: Any, second: Any) -> bool:
    return len(first) == len(second) and all(_same_size(a, b) for a, b in zip(first, second))


def _library_operator(node: fx.Node) -> bool:
    """A library's own operator becomes torch's equal, so that the emitted program needs torch alone."""
    node.target = torch.nn.functional.grouped_mm
    node.args, node.kwargs = node.args[:2], {"offs": node.args[2] if len(node.args) > 2 else node.kwargs["offs"]}
    return False


def _free_of_devices(node: fx.Node) -> None:
    """A factory's device is where the program runs, not where it was traced."""
    kwargs = {key: value for key, value in node.kwargs.items() if key not in ("device", "pin_memory", "layout")}
    if len(kwargs) != len(node.kwargs):
        node.kwargs = kwargs


def _own_dtype(node: fx.Node) -> None:
    """What makes floating numbers of none has the default dtype, which may be another where the program runs: it is said."""
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
    """An operand of ``node`` in the dtype of its result ``value``: a Python number as a tensor, a tensor cast."""
    if isinstance(number, fx.Node):
        return _floating(node, number, value.dtype)
    with node.graph.inserting_before(node):
        made = node.graph.call_function(_aten.full.default, ([], number), {"dtype": value.dtype})
    made.meta = _where_from(node) | {"val": value.new_empty([])}
    return made


def _floating(node: fx.Node, tensor: fx.Node, dtype: torch.dtype) -> fx.Node:
    """``tensor``, whole numbers, in ``dtype``."""
    with node.graph.inserting_before(node):
        cast = node.graph.call_function(_aten.to.dtype, (tensor, dtype))
    cast.meta = dict(tensor.meta) | _where_from(node) | {"val": value_of(tensor).to(dtype)}
    return cast


def _where_from(node: fx.Node) -> dict[str, Any]:
    """What says where in the user's code ``node`` was made."""
    return {key: node.meta[key] for key in ("module_stack", "source") if key in node.meta}
