"""``functionalize``: in-place operators on values become operators that give a new value.

Writes to buffers (BatchNorm's statistics and counters) stay what they are: effects on the module's state. A write
through a view is carried back to the tensor that was viewed:

    y = x[:, 0]; y.add_(1)      ->    y = x[:, 0] + 1;  x = select_scatter(x, y, 1, 0)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.errors import GraphparError
from graphpar.program import Program, operator_name, value_of

_aten = torch.ops.aten

_VIEWS = {
    "view", "reshape", "_unsafe_view", "transpose", "permute", "t", "unsqueeze", "squeeze", "select", "slice", "detach",
    "alias", "flatten", "unflatten", "expand", "split", "split_with_sizes", "chunk", "unbind", "getitem", "narrow",
    "view_as", "expand_as", "movedim", "swapaxes", "tensor_split", "diagonal",
}  # fmt: skip


@dataclass
class _Alias:
    """A value that shows (part of) a base tensor: how it was made from its parent, and when."""

    base: fx.Node
    parent: fx.Node | None
    maker: fx.Node | None
    version: int


def functionalize(program: Program) -> Program:
    """Program -> Program in which only buffers are written in place."""
    if not any(is_inplace(node) for node in program.graph.nodes):
        return program
    return program.with_graph(_Functionalizer(program).rewrite())


def is_inplace(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
        and operator_name(node) != "batch_norm"
    )


def infer(node: fx.Node, like: fx.Node) -> fx.Node:
    """Gives ``node`` (new in its graph) the metadata of ``like`` and the fake value of its own operator."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    mode = next(v.fake_mode for v in (value_of(n) for n in node.all_input_nodes) if hasattr(v, "fake_mode"))
    assert callable(node.target)
    with mode:
        value = node.target(*args, **kwargs)
    node.meta = {key: item for key, item in like.meta.items() if key in ("module_stack", "source")}
    node.meta["val"] = value
    if isinstance(value, Tensor):
        _infer_coefficients(node, value, like)
    return node


def _infer_coefficients(node: fx.Node, value: Tensor, like: fx.Node) -> None:
    """Which dims follow the batch, in a fixed-size trace: those of a value of the same shape, or of the same first dims."""
    known = [n for n in (like, *node.all_input_nodes) if "batch_coefficients" in n.meta and isinstance(value_of(n), Tensor)]
    for other in known:
        if value_of(other).shape == value.shape:
            node.meta["batch_coefficients"] = other.meta["batch_coefficients"]
            return
    for other in known:
        first = value_of(other).ndim
        if first and value.shape[:first] == value_of(other).shape:
            node.meta["batch_coefficients"] = (*other.meta["batch_coefficients"], *[None] * (value.ndim - first))
            return


class _Functionalizer:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.aliases: dict[fx.Node, _Alias] = {}  # by node of the old graph
        self.current: dict[fx.Node, fx.Node] = {}  # a base's newest value in the new graph
        self.versions: dict[fx.Node, int] = {}
        self.refreshed: dict[tuple[fx.Node, int], fx.Node] = {}

    def rewrite(self) -> fx.Graph:
        for node in self.program.graph.nodes:
            if is_inplace(node) and not self._writes_buffer(node):
                self._write(node)
                continue
            self.env[node] = self.graph.node_copy(node, self._read)
            if node.op == "output":
                continue
            parent = self._viewed(node)
            if parent is not None:
                alias = self.aliases[parent]
                self.aliases[node] = _Alias(alias.base, parent, node, self.versions.get(alias.base, 0))
            elif is_inplace(node):
                self.aliases[node] = self.aliases[node.args[0]]  # type: ignore[index]
            else:
                self.aliases[node] = _Alias(node, None, None, 0)
        return self.graph

    def _viewed(self, node: fx.Node) -> fx.Node | None:
        if node.op != "call_function" or operator_name(node) not in _VIEWS or not isinstance(node.args[0], fx.Node):
            return None
        source = node.args[0]
        if operator_name(node) == "getitem" and operator_name(source) not in _VIEWS:
            return None  # one of several fresh results
        return source

    def _writes_buffer(self, node: fx.Node) -> bool:
        target = node.args[0]
        assert isinstance(target, fx.Node)
        base = self.aliases[target].base
        return base.op == "get_attr" and str(base.target) in self.program.buffers

    def _read(self, node: fx.Node) -> fx.Node:
        """The new graph's value of ``node`` as it is now, after the writes so far."""
        alias = self.aliases.get(node)
        if alias is None:
            return self.env[node]
        version = self.versions.get(alias.base, 0)
        if alias.version == version:
            return self.env.get(node) or self._read(alias.base)
        if alias.maker is None:
            return self.current.get(alias.base, self.env.get(node, node))
        key = (node, version)
        if key not in self.refreshed:
            assert alias.parent is not None
            parent = alias.parent
            args = tuple(self._read(a) if a is parent else a for a in alias.maker.args)
            args = fx.map_arg(args, lambda n: self.env.get(n, n))
            copy = self.graph.call_function(alias.maker.target, args, dict(alias.maker.kwargs))  # type: ignore[arg-type]
            self.refreshed[key] = infer(copy, node)
        return self.refreshed[key]

    def _write(self, node: fx.Node) -> None:
        target = node.args[0]
        assert isinstance(target, fx.Node)
        alias = self.aliases[target]
        result = self._functional(node, self._read(target))
        self.versions[alias.base] = self.versions.get(alias.base, 0) + 1
        self._carry_back(target, result, node)
        # The operator's own result is the written tensor.
        self.aliases[node] = _Alias(alias.base, alias.parent, alias.maker, alias.version)
        if alias.maker is None:
            self.aliases[node].version = -1

    def _functional(self, node: fx.Node, target: fx.Node) -> fx.Node:
        name = operator_name(node)
        before = value_of(target)
        args = [target, *(fx.map_arg(a, self._read) for a in node.args[1:])]
        kwargs = fx.map_arg(dict(node.kwargs), self._read)
        if name == "copy_":
            source = args[1]
            if value_of(source).dtype != before.dtype:  # type: ignore[arg-type]
                source = self._call(node, _aten.to.dtype, (source, before.dtype))
            return self._call(node, _aten.expand_as.default, (source, target))
        if name in ("fill_", "zero_"):
            filled = args[1] if name == "fill_" else 0
            if isinstance(filled, fx.Node):
                return self._call(node, _aten.expand_as.default, (filled, target))
            return self._call(node, _aten.full_like.default, (target, filled))
        assert isinstance(node.target, torch._ops.OpOverload)
        plain = getattr(_aten, name.rstrip("_"), None)
        overload = getattr(plain, node.target._overloadname or "default", None)
        if overload is None or not name.endswith("_"):
            raise GraphparError(f"The in-place operator {node.target} has no out-of-place form{_line(node)}.")
        result = self._call(node, overload, tuple(args), kwargs)
        if value_of(result).dtype != before.dtype:
            result = self._call(node, _aten.to.dtype, (result, before.dtype))
        return result

    def _call(self, like: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        return infer(self.graph.call_function(target, args, kwargs or {}), like)

    def _carry_back(self, target: fx.Node, result: fx.Node, cause: fx.Node) -> None:
        """Writes ``result``, the new value of ``target``, into every tensor that ``target`` is a view of."""
        alias = self.aliases[target]
        if alias.maker is None or alias.parent is None:
            self.current[alias.base] = result
            return
        parent = self._stale(alias.parent)
        self._carry_back(alias.parent, self._inverse(alias.maker, parent, result, cause), cause)

    def _stale(self, node: fx.Node) -> fx.Node:
        """The value of ``node`` just before the write in progress."""
        base = self.aliases[node].base
        self.versions[base] -= 1
        try:
            return self._read(node)
        finally:
            self.versions[base] += 1

    def _inverse(self, maker: fx.Node, parent: fx.Node, result: fx.Node, cause: fx.Node) -> fx.Node:
        name, rest = operator_name(maker), tuple(maker.args[1:])
        if name == "select":
            return self._call(cause, _aten.select_scatter.default, (parent, result, *rest))
        if name == "slice":
            return self._call(cause, _aten.slice_scatter.default, (parent, result, *rest))
        if name in ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze", "alias", "detach"):
            return self._call(cause, _aten.view_as.default, (result, parent))
        if name == "transpose":
            return self._call(cause, _aten.transpose.int, (result, *rest))
        if name == "t":
            return self._call(cause, _aten.t.default, (result,))
        if name == "permute":
            order = list(rest[0])  # type: ignore[arg-type]
            inverse = [order.index(dim) for dim in range(len(order))]
            return self._call(cause, _aten.permute.default, (result, inverse))
        raise GraphparError(
            f"The model writes in place through a view made by {name!r}{_line(cause)}; write the result to a new tensor instead."
        )


def _line(node: fx.Node) -> str:
    source = node.meta.get("source")
    return f" ({source.file}:{source.line})" if source else ""
