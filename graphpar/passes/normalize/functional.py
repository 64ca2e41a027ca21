"""``functionalize``: in-place operators on values become operators that return a new value.

Writes to buffers (BatchNorm's statistics and counters) stay: they are effects on the module's state. What reads a buffer before such a
write reads a copy of its own, so that no later pass takes the old value for the new one. A write through a view is written back to
the tensor that was viewed. An operator that changes how a tensor shows its memory is a view from there on:

    y = x[:, 0]; y.add_(1)                          ->    y = x[:, 0] + 1;  x = select_scatter(x, y, 1, 0)
    x.transpose_(0, 1); x.add_(1)                   ->    y = x.transpose(0, 1);  x = y + 1
    old = self.mean * 1; self.mean.mul_(0.9)        ->    old = self.mean.clone() * 1;  self.mean.mul_(0.9)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.errors import GraphparError
from graphpar.frontend.fixed_size import TWIN, Twin, coefficients_of
from graphpar.ir.program import (
    Program,
    model_outputs,
    named_arguments,
    operator_name,
    set_model_outputs,
    value_of,
    where,
)
from graphpar.operators.in_place import changes_view, in_order, out_of_place, refusal_of
from graphpar.operators.record import Kind
from graphpar.operators.rules import rule_of
from graphpar.operators.table import record_of

_aten = torch.ops.aten
_UNDERIVED = (_aten.slice_scatter.default, _aten.select_scatter.default)  # of complex numbers, by torch


@dataclass
class _Alias:
    """A view of (part of) a base tensor: how it was made from its parent, and at which version of the base."""

    base: fx.Node
    parent: fx.Node | None
    maker: fx.Node | None
    version: int


def functionalize(program: Program) -> Program:
    """Replace in-place operators, except on buffers.

    Raises:
        GraphparError: a parameter or a constant is written, or a tensor whose views can't be followed.
    """
    if any(_out(node) is not None or changes_view(node.target) for node in program.graph.nodes):
        program = program.with_graph(_spelled_out(program.graph))
    if not written_buffers(program.graph) and not any(is_inplace(node) for node in program.graph.nodes):
        return program
    return program.with_graph(_Functionalizer(program).rewrite())


def _out(node: fx.Node) -> fx.Node | None:
    """Return the tensor that ``torch.div(a, b, out=x)`` writes."""
    written = node.kwargs.get("out") if is_inplace(node) else None
    return written if isinstance(written, fx.Node) else None


def copied(source: fx.Graph) -> fx.Graph:
    """Return a copy of a graph."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(source, copies))
    set_model_outputs(graph, (value and copies[value] for value in model_outputs(source)))
    return graph


def _spelled_out(graph: fx.Graph) -> fx.Graph:
    """Replace ``torch.div(a, b, out=x)`` by ``x.copy_(a / b)``, and ``x.transpose_(0, 1)`` by ``x.transpose(0, 1)``."""
    new = copied(graph)
    for node in list(new.nodes):
        if changes_view(node.target):
            _use_view(new, node)
        elif (written := _out(node)) is not None:
            _copy_to_out(new, node, written)
    return new


def _copy_to_out(graph: fx.Graph, node: fx.Node, written: fx.Node) -> None:
    target = _without_out(node.target)
    if target is None or value_of(written).shape != value_of(node).shape:
        raise GraphparError(
            f"The operator {node.target} writes to out={where(node)}, and has no form that returns a new tensor."
        )
    with graph.inserting_before(node):
        options = {name: value for name, value in node.kwargs.items() if name != "out"}
        made = infer(graph.call_function(target, node.args, options), node)
        write = graph.call_function(_aten.copy_.default, (written, made))
    write.meta = dict(node.meta)
    node.replace_all_uses_with(write)
    graph.erase_node(node)


def _use_view(graph: fx.Graph, node: fx.Node) -> None:
    """Let all later readers take a view: a trace gives them the result of the operator, whatever name they know the tensor by."""
    assert isinstance(node.target, torch._ops.OpOverload)
    source: Any = node.args[0]
    assert isinstance(source, fx.Node)
    stored: Any = source
    while isinstance(stored, fx.Node) and is_inplace(stored):
        stored = stored.args[0]
    if isinstance(stored, fx.Node) and stored.op == "get_attr":
        raise GraphparError(
            f"The model changes the shape of {str(stored.target)!r} in place by {operator_name(node)}{where(node)}, so each step would "
            f"begin with that of the step before; call {operator_name(node).rstrip('_')} and use its result."
        )
    if (target := out_of_place(node.target)) is not None:
        node.target, node.args = target, in_order(node.target, target, node.args)
    elif operator_name(node) in ("resize_", "resize_as_") and value_of(node).shape == value_of(source).shape:
        node.replace_all_uses_with(source)
        graph.erase_node(node)
    else:
        raise _without_other_form(node)


def _without_other_form(node: fx.Node) -> GraphparError:
    reason = refusal_of(node.target) if isinstance(node.target, torch._ops.OpOverload) else ""
    return GraphparError(f"The in-place operator {node.target}{where(node)} can't be followed: {reason}.")


def _without_out(target: Any) -> Any:
    """Return the overload of the same operator that takes the same arguments except ``out``."""
    signature = [(a.name, str(a.type)) for a in target._schema.arguments if not a.is_out]
    packet = target._overloadpacket
    overloads = [getattr(packet, name) for name in packet.overloads()]
    return next((o for o in overloads if [(a.name, str(a.type)) for a in o._schema.arguments] == signature), None)


def is_inplace(node: fx.Node) -> bool:
    """Return whether an operator writes one of its arguments; batch_norm, which writes its statistics, does not count."""
    return (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
        and operator_name(node) != "batch_norm"
    )


def written_buffers(graph: fx.Graph) -> set[fx.Node]:
    """Return the ``get_attr`` nodes of buffers that operators write, directly or through a view."""
    written: set[fx.Node] = set()
    for node in graph.nodes:
        for target in written_operands(node):
            while isinstance(target, fx.Node) and target.op == "call_function":
                target = target.args[0]  # type: ignore[assignment]
            if isinstance(target, fx.Node):
                written.add(target)
    return written


def written_operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands that an operator writes: that of an operator in place, the running statistics of BatchNorm."""
    targets: Sequence[Any] = [node.args[0]] if is_inplace(node) else []
    if (operator_name(node) == "batch_norm" and node.args[5]) or (
        operator_name(node) in ("sync_batch_norm", "channel_batch_norm") and node.kwargs["training"]
    ):
        targets = node.args[3:5]
    return [target for target in targets if isinstance(target, fx.Node)]


def infer(node: fx.Node, like: fx.Node, same: bool = False) -> fx.Node:
    """Give ``node`` (new in its graph) the metadata of ``like``, and its fake value by running its operator.

    ``same``: it has the value of ``like``, so the same dims follow the batch.
    """
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    given = torch.utils._pytree.tree_leaves([value_of(n) for n in node.all_input_nodes])
    mode = next(v.fake_mode for v in given if hasattr(v, "fake_mode"))
    assert callable(node.target)
    with mode:
        value = node.target(*args, **kwargs)
    node.meta = {key: item for key, item in like.meta.items() if key in ("module_stack", "source")}
    node.meta["val"] = value
    if same:
        node.meta |= {key: like.meta[key] for key in ("batch_coefficients", TWIN) if key in like.meta}
    elif isinstance(value, Tensor):
        _infer_coefficients(node, value, like)
    return node


def _infer_coefficients(node: fx.Node, value: Tensor, like: fx.Node) -> None:
    """Find which dims follow the batch in a fixed-size trace, by running the operator on the values of the second trace too."""
    twins = [n.meta[TWIN] for n in node.all_input_nodes if TWIN in n.meta]
    if not twins:
        return
    size, other_size, mode = twins[0].size, twins[0].other_size, twins[0].value.fake_mode
    assert callable(node.target)
    try:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: _moved(n, mode))
        with mode:
            moved = node.target(*args, **kwargs)
        coefficients = coefficients_of(value, moved, size, other_size)
    except (RuntimeError, KeyError):  # a literal size among its arguments
        if "batch_coefficients" in like.meta and value_of(like).shape == value.shape:
            node.meta |= {key: like.meta[key] for key in ("batch_coefficients", TWIN) if key in like.meta}
        return
    node.meta["batch_coefficients"] = tuple(coefficient or None for coefficient in coefficients)
    node.meta[TWIN] = Twin(moved, size, other_size)


def _moved(node: fx.Node, mode: Any) -> Any:
    value = value_of(node)
    if TWIN in node.meta or not isinstance(value, Tensor):
        return node.meta[TWIN].value if TWIN in node.meta else value
    if value.ndim:
        raise KeyError(node.name)
    with mode:
        return torch.empty((), dtype=value.dtype)


class _Functionalizer:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.aliases: dict[fx.Node, _Alias] = {}  # by node of the old graph
        self.current: dict[fx.Node, fx.Node] = {}  # a base's newest value in the new graph
        self.versions: dict[fx.Node, int] = {}
        self.refreshed: dict[tuple[fx.Node, int], fx.Node] = {}
        self.memory: dict[int, fx.Node] = {}  # the base in each storage
        self.unclear: set[fx.Node] = set()  # bases whose memory is also seen through an operator that we can't invert
        self.differentiable: set[fx.Node] = set()
        self.writes_left = buffer_writes(program)
        self.snapshots: dict[tuple[fx.Node, int], fx.Node] = {}  # of a view of a buffer, with so many writes left

    def rewrite(self) -> fx.Graph:
        """Return the graph without writes to values."""
        for node in self.program.graph.nodes:
            self._trace_gradient(node)
            if is_inplace(node) and not self._writes_buffer(node):
                self._write(node)
                continue
            written = _written_names(node, self.program)
            reads_now = bool(written) or _viewed(node) is not None
            self.env[node] = self.graph.node_copy(node, self._read if reads_now else self._read_buffers_too)
            for name in written:
                self.writes_left[name] -= 1
            if node.op == "output":
                continue
            parent = _viewed(node)
            if parent is not None:
                alias = self.aliases[parent]
                self.aliases[node] = _Alias(alias.base, parent, node, self.versions.get(alias.base, 0))
            elif is_inplace(node):
                self.aliases[node] = self.aliases[node.args[0]]  # type: ignore[index]
            else:
                self.aliases[node] = _Alias(node, None, None, 0)
                self._note_memory(node)
        return self.graph

    def _note_memory(self, node: fx.Node) -> None:
        memory = _memory(node)
        if (
            memory is None
            or not isinstance(value_of(node), Tensor)
            or operator_name(node) in ("lift_fresh_copy", "batch_norm")
        ):
            return
        other = self.memory.setdefault(memory, node)
        if other is not node:
            self.unclear.update((node, other))

    def _trace_gradient(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            info = self.program.parameters.get(str(node.target))
            if info is not None and info.requires_grad:
                self.differentiable.add(node)
            return
        value = value_of(node)
        real = isinstance(value, list | tuple) or (
            isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
        )
        if real and operator_name(node) != "detach" and any(a in self.differentiable for a in node.all_input_nodes):
            self.differentiable.add(node)
            written = node.args[0] if is_inplace(node) else None
            if isinstance(written, fx.Node) and written in self.aliases:
                self.differentiable.update((written, self.aliases[written].base))

    def _writes_buffer(self, node: fx.Node) -> bool:
        target = node.args[0]
        if not isinstance(target, fx.Node):
            raise _without_other_form(node)
        base = self.aliases[target].base
        return base.op == "get_attr" and str(base.target) in self.program.buffers

    def _read_buffers_too(self, node: fx.Node) -> fx.Node:
        """Return the new graph's value of ``node``; a copy of what a buffer holds now, where it is written: later, or in the next
        microbatch."""
        read, alias = self._read(node), self.aliases.get(node)
        name = str(alias.base.target) if alias is not None and alias.base.op == "get_attr" else None
        if name not in self.writes_left:
            return read
        left = self.writes_left[name]
        key = (node, left)
        if key not in self.snapshots:
            self.snapshots[key] = infer(self.graph.call_function(_aten.clone.default, (read,)), node, same=True)
        return self.snapshots[key]

    def _read(self, node: fx.Node) -> fx.Node:
        """Return the new graph's value of ``node`` after the writes so far."""
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
            self.refreshed[key] = infer(copy, node, same=True)
        return self.refreshed[key]

    def _write(self, node: fx.Node) -> None:
        target = node.args[0]
        assert isinstance(target, fx.Node)
        alias = self.aliases[target]
        self._check_writable(node, target)
        result = self._functional(node, self._read(target))
        self.versions[alias.base] = self.versions.get(alias.base, 0) + 1
        self._carry_back(target, result, node)
        # The operator's own result is the written tensor.
        self.aliases[node] = _Alias(alias.base, alias.parent, alias.maker, alias.version)
        if alias.maker is None:
            self.aliases[node].version = -1

    def _check_writable(self, node: fx.Node, target: fx.Node) -> None:
        base = self.aliases[target].base
        if base.op == "get_attr" and operator_name(node) == "embedding_renorm_":
            raise GraphparError(
                f"The embedding of {str(base.target)!r} has max_norm{where(node)}, which writes the rows that it looks up; a "
                "program can change parameters only through their gradients. Leave max_norm out, and shorten the rows between steps."
            )
        if base.op == "get_attr" and str(base.target) in self.program.parameters:
            raise GraphparError(
                f"The model writes the parameter {str(base.target)!r} in place{where(node)}; a program can change parameters "
                "only through their gradients. Do it between steps, or make it a buffer."
            )
        if base.op == "get_attr":
            raise GraphparError(
                f"The model writes the tensor {str(base.target)!r} in place{where(node)}, which is not a buffer: a program would begin "
                "each step with the value that it had when it was traced. Make it a buffer with register_buffer (persistent=False leaves "
                "it out of checkpoints), or write to a copy of it."
            )
        if base in self.unclear:
            raise GraphparError(
                f"The model writes in place to memory that several tensors share{where(node)}; write the result to a "
                "new tensor instead."
            )
        alias = self.aliases[target]
        while alias.maker is not None and alias.parent is not None:
            if operator_name(alias.maker) == "detach" and alias.parent in self.differentiable:
                raise GraphparError(
                    f"The model writes in place to a detached tensor (or under no_grad) that also carries a gradient{where(node)}: "
                    "the value would change behind the gradient's back. Write the result to a new tensor instead."
                )
            alias = self.aliases[alias.parent]

    def _functional(self, node: fx.Node, target: fx.Node) -> fx.Node:
        name = operator_name(node)
        before = value_of(target)
        args = [target, *(fx.map_arg(a, self._read_buffers_too) for a in node.args[1:])]
        kwargs = fx.map_arg(dict(node.kwargs), self._read_buffers_too)
        source = args[1] if name in ("copy_", "fill_") else 0
        if isinstance(source, fx.Node) and isinstance(value_of(source), Tensor):
            if value_of(source).dtype != before.dtype:
                source = self._call(node, _aten.to.dtype, (source, before.dtype))
            return self._call(node, _aten.expand_as.default, (source, target))
        if name in ("fill_", "zero_"):
            return self._call(node, _aten.full_like.default, (target, source))
        if name == "fill_diagonal_" and before.ndim == 2 and not named_arguments(node)["wrap"]:
            diagonal = self._call(node, _aten.diagonal.default, (target,))
            filled = self._call(node, _aten.full_like.default, (diagonal, args[1]))
            return self._call(node, _aten.diagonal_scatter.default, (target, filled))
        if name.startswith("logical_") and node.args[0] in self.differentiable:
            raise GraphparError(
                f"The model writes truth values over numbers that carry a gradient by {name}{where(node)}, and torch would pass the "
                f"gradient on as if nothing were written; use the result of {name.rstrip('_')}."
            )
        assert isinstance(node.target, torch._ops.OpOverload)
        overload = out_of_place(node.target)
        if overload is None or value_of(node).shape != before.shape:
            raise _without_other_form(node)
        ordered = in_order(node.target, overload, args)
        needed = [each.name for each in overload._schema.arguments[len(ordered) :] if not each.has_default_value()]
        usual = named_arguments(node)
        kwargs = {**{key: usual[key] for key in needed}, **kwargs}
        result = infer(self.graph.call_function(overload, ordered, kwargs), node, same=True)
        if value_of(result).dtype != before.dtype:
            result = self._call(node, _aten.to.dtype, (result, before.dtype))
        return result

    def _call(self, like: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        return infer(self.graph.call_function(target, args, kwargs or {}), like)

    def _carry_back(self, target: fx.Node, result: fx.Node, cause: fx.Node) -> None:
        """Write ``result``, the new value of ``target``, into every tensor that ``target`` is a view of."""
        alias = self.aliases[target]
        if alias.maker is None or alias.parent is None:
            self.current[alias.base] = result
            return
        parent = self._stale(alias.parent)
        self._carry_back(alias.parent, self._inverse(alias.maker, parent, result, cause), cause)

    def _stale(self, node: fx.Node) -> fx.Node:
        """Return the value of ``node`` just before the write in progress."""
        base = self.aliases[node].base
        self.versions[base] -= 1
        try:
            return self._read(node)
        finally:
            self.versions[base] += 1

    def _scattered(self, cause: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """Call an operator that writes one tensor into another; of complex numbers by their parts where torch needs that."""
        parent, result, *rest = args
        if not value_of(parent).is_complex() or target not in _UNDERIVED:
            return self._call(cause, target, args, kwargs)
        dim = kwargs.pop("dim", rest[0] if rest else 0) % value_of(parent).dim()
        parts = [self._call(each, _aten.view_as_real.default, (each,)) for each in (parent, result)]
        written = self._call(cause, target, (*parts, dim, *rest[1:]), kwargs)
        return self._call(cause, _aten.view_as_complex.default, (written,))

    def _inverse(self, maker: fx.Node, parent: fx.Node, result: fx.Node, cause: fx.Node) -> fx.Node:
        """Return ``parent`` with ``result`` in place of the view that ``maker`` made of it."""
        name, record, rest = operator_name(maker), record_of(maker), tuple(maker.args[1:])
        same = value_of(parent).dtype == value_of(result).dtype
        scatter = (
            getattr(_aten, f"{name}_scatter", None) if name != "as_strided" else None
        )  # new tensors have other strides
        if record.kind is Kind.VIEW and scatter is not None:
            return self._scattered(cause, scatter.default, (parent, result, *rest), dict(maker.kwargs))
        if record.kind is Kind.PERMUTE and (rule := rule_of(maker)) is not None:
            order = [rule.results[0].index(factor) for factor in rule.operands[0]]
            if order == [rule.operands[0].index(factor) for factor in rule.results[0]]:  # its own inverse
                return self._call(cause, maker.target, (result, *rest), dict(maker.kwargs))
            return self._call(cause, _aten.permute.default, (result, order))
        if record.kind is Kind.RESHAPE and same:
            return self._call(cause, _aten.view_as.default, (result, parent))
        if name == "narrow":
            dim, start, length = rest
            return self._scattered(cause, _aten.slice_scatter.default, (parent, result, dim, start, start + length), {})  # type: ignore[operator]
        alike = value_of(parent).shape == value_of(result).shape
        if same and alike and value_of(parent).stride() == value_of(maker).stride():
            return result  # detach, a cast to the same dtype, dropout that drops nothing
        raise GraphparError(
            f"The model writes in place through a view made by {name!r}{where(cause)}; write the result to a new tensor instead."
        )


def _written_names(node: fx.Node, program: Program) -> list[str]:
    """Return the buffers that an operator writes, directly or through views."""
    names = []
    for target in written_operands(node):
        while isinstance(target, fx.Node) and target.op == "call_function":
            target = target.args[0] if is_inplace(target) else _viewed(target)  # type: ignore[assignment]
        if isinstance(target, fx.Node) and target.op == "get_attr" and str(target.target) in program.buffers:
            names.append(str(target.target))
    return names


def buffer_writes(program: Program) -> dict[str, int]:
    """Return how often each buffer is written, directly or through views."""
    return Counter(name for node in program.graph.nodes for name in _written_names(node, program))


def _memory(node: fx.Node) -> int | None:
    """Return an identifier of the value's storage, of the first of several results."""
    value = value_of(node)
    value = value[0] if isinstance(value, list | tuple) and value else value
    return int(torch._C._storage_id(value)) if isinstance(value, Tensor) else None  # type: ignore[attr-defined]


def _viewed(node: fx.Node) -> fx.Node | None:
    """Return the tensor that ``node`` is a view of: its first argument, where both share one storage."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, fx.Node) or is_inplace(node) or operator_name(node) in ("lift_fresh_copy", "batch_norm"):
        return None
    if operator_name(node) == "getitem" and _viewed(source) is None:
        return None  # one of several fresh results
    drops_nothing = operator_name(node) in ("dropout", "feature_dropout") and not (node.args[1] and node.args[2])
    memory = _memory(node)
    return source if memory is not None and (drops_nothing or memory == _memory(source)) else None
