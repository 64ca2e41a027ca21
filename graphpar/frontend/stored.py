"""A captured program as bytes, and back: its graph with the fake values of its nodes, and all that a trace found out.

    Program ──dumps──► bytes ──loads──► an equal Program, its fake tensors of a new mode

Stored are programs whose only symbol is the batch, and whose operators are torch's or of a library that the model file imports. Others,
and programs that are traced again for each microbatch size, raise ``NotStorableError``.
"""

from __future__ import annotations

import io
import pickle
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx
from torch._guards import Source
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.fx.node import map_aggregate
from torch.utils._sympy.value_ranges import ValueRanges

from graphpar.ir.program import FUNCTION_OPERATORS, Program, memory_of

_BATCH = sympy.Symbol("batch", positive=True, integer=True)
"""Stands for the batch in stored sizes."""


class NotStorableError(Exception):
    """A program that can't be stored; says why."""


def dumps(program: Program) -> bytes:
    """Return ``program`` as bytes, without its source.

    Raises:
        NotStorableError: it holds something that another process can't make again.
    """
    if program.retrace is not None:
        raise NotStorableError("the program is traced again for each microbatch size")
    content = {each.name: getattr(program, each.name) for each in fields(program)} | {"source": None}
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(content)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise NotStorableError(str(error)) from error
    size = (None, 0, 0) if pickler.symbol is None else (max(2, program.batch), *pickler.symbol[1:])
    return pickle.dumps((size, buffer.getvalue()))


def loads(stored: bytes) -> Program:
    """Return the program that :func:`dumps` stored."""
    (hint, lower, upper), content = pickle.loads(stored)
    loading = _Loading(hint, lower, upper)
    token = _loading.set(loading)
    try:
        return Program(**pickle.loads(content))
    finally:
        _loading.reset(token)


class _Pickler(pickle.Pickler):
    """``symbol``: the batch's symbol, and the least and largest value that it may have."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.symbol: tuple[Any, Any, Any] | None = None
        self.storages: dict[int, int] = {}
        self.alive: list[Tensor] = []

    def reducer_override(self, obj: Any) -> Any:
        """Say how to make graphs, operators, fake tensors and symbolic sizes again."""
        if isinstance(obj, FakeTensor):
            return self._fake(obj)
        if isinstance(obj, torch.SymInt):
            return _size, (self._expression(obj),)
        if isinstance(obj, torch.SymBool | torch.SymFloat):
            raise NotStorableError("a value of the trace is symbolic, but not a size")
        if isinstance(obj, fx.Graph):
            return _graph, (_node_rows(obj),)
        if isinstance(obj, torch._ops.OpOverload):
            if obj.namespace == FUNCTION_OPERATORS:
                raise NotStorableError("the model calls an autograd function of its own")
            return _operator, (obj.namespace, obj._opname, obj._overloadname)
        if isinstance(obj, torch._ops.HigherOrderOperator):
            return _higher_order, (obj.name(),)
        if isinstance(obj, fx.GraphModule):
            return _module, (obj.graph, dict(obj.named_children()), obj.meta)
        if isinstance(obj, fx.Node | torch.nn.Module):
            raise NotStorableError(f"the trace holds a {type(obj).__name__}")
        return NotImplemented

    def _fake(self, value: FakeTensor) -> Any:
        if value.layout is not torch.strided or value.is_conj() or value.is_neg():
            raise NotStorableError("a value of the trace is a tensor of an unusual kind")
        number = self.storages.setdefault(memory_of(value), len(self.storages))
        self.alive.append(value)  # so that no other storage gets its number
        shape, strides = tuple(map(self._expression, value.shape)), tuple(map(self._expression, value.stride()))
        place = number, self._expression(value.storage_offset()), shape, strides
        described = *place, value.dtype, str(value.device), value.requires_grad, isinstance(value, torch.nn.Parameter)
        return (_fake, described) if value.constant is None else (_constant, (described, value.constant))

    def _expression(self, size: Any) -> Any:
        """Return a number, or an expression of ``_BATCH``."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        node = size.node
        expression = node.expr
        if expression.is_Integer:
            return int(expression)
        symbols = expression.free_symbols
        if self.symbol is None and len(symbols) == 1:
            (symbol,) = symbols
            known = node.shape_env.var_to_range.get(symbol)
            if known is None or str(symbol).startswith("u"):
                raise NotStorableError("a size of the trace depends on values of tensors")
            self.symbol = symbol, known.lower, known.upper
        if self.symbol is None or symbols != {self.symbol[0]}:
            raise NotStorableError("a size of the trace depends on more than the batch")
        return expression.xreplace({self.symbol[0]: _BATCH})


@dataclass(frozen=True)
class _Ref:
    """A node of the graph, in the arguments of others, by its place."""

    place: int


def _node_rows(graph: fx.Graph) -> list[tuple[Any, ...]]:
    places: dict[fx.Node, Any] = {node: _Ref(place) for place, node in enumerate(graph.nodes)}
    rows = []
    for node in graph.nodes:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), places.__getitem__)
        rows.append((node.op, node.target, args, kwargs, node.name, dict(node.meta)))
    return rows


# ---- making the content again ------------------------------------------------------------------------------------


class _Batch(Source):  # torch._dynamo has such sources, and takes a second to import
    """Where the symbol of the batch is from, for messages of torch."""

    @property
    def _name_template(self) -> str:
        return "batch"


class _Loading:
    """The fake mode of a program that is being loaded, and what of it was made already."""

    def __init__(self, hint: int | None, lower: Any, upper: Any) -> None:
        self.environment = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.environment, allow_non_fake_inputs=True)
        self.symbol: Any = None
        if hint is not None:
            self.symbol = self.environment.create_symbol(
                hint, _Batch(), DimDynamic.DYNAMIC, do_not_specialize_zero_one=True
            )
            self.environment.var_to_range[self.symbol] = ValueRanges(lower, upper)
        self.hint = hint
        self.sizes: dict[Any, Any] = {}
        self.tensors: dict[Any, Tensor] = {}
        self.storages: dict[int, torch.UntypedStorage] = {}

    def size(self, stored: Any) -> Any:
        if isinstance(stored, int):
            return stored
        if stored not in self.sizes:
            expression = stored.xreplace({_BATCH: self.symbol})
            hint = int(stored.xreplace({_BATCH: sympy.Integer(self.hint)}))
            self.sizes[stored] = self.environment.create_symintnode(expression, hint=hint)
        return self.sizes[stored]

    def tensor(self, *key: Any) -> Tensor:
        """Return a fake tensor; those of equal descriptions are one."""
        if key not in self.tensors:
            self.tensors[key] = self.made(*key)
        return self.tensors[key]

    def made(
        self,
        number: int,
        offset: Any,
        shape: Any,
        strides: Any,
        dtype: torch.dtype,
        device: str,
        grad: bool,
        parameter: bool,
    ) -> Tensor:
        """Return a fake tensor in the storage ``number``."""
        sizes, steps = tuple(map(self.size, shape)), tuple(map(self.size, strides))
        with torch.no_grad():
            if number not in self.storages and offset == 0:
                plain = torch.empty_strided(sizes, steps, dtype=dtype, device="meta")
            else:
                plain = torch.empty(0, dtype=dtype, device="meta")
                plain.set_(self.storages.get(number, plain.untyped_storage()), self.size(offset), sizes, steps)
            self.storages.setdefault(number, plain.untyped_storage())
            value = FakeTensor(self.mode, plain, torch.device(device))
        return torch.nn.Parameter(value, grad) if parameter else value.requires_grad_(grad)


_loading: ContextVar[_Loading] = ContextVar("_loading")


def _fake(*key: Any) -> Tensor:
    return _loading.get().tensor(*key)


def _constant(key: tuple[Any, ...], value: Tensor) -> Any:
    made: Any = _loading.get().made(*key)
    made.constant = value
    return made


def _size(stored: Any) -> Any:
    return _loading.get().size(stored)


def _operator(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _higher_order(name: str) -> Any:
    return torch._ops._higher_order_ops[name]


def _module(graph: fx.Graph, children: dict[str, Any], meta: dict[str, Any]) -> fx.GraphModule:
    module = fx.GraphModule(children, graph)
    module.meta = meta
    return module


def _graph(rows: list[tuple[Any, ...]]) -> fx.Graph:
    graph = fx.Graph()
    nodes: list[fx.Node] = []

    def known(item: Any) -> Any:
        return nodes[item.place] if isinstance(item, _Ref) else item

    for op, target, args, kwargs, name, meta in rows:
        args, kwargs = map_aggregate((args, kwargs), known)  # type: ignore[misc]
        node = graph.create_node(op, target, args, kwargs, name=name)
        node.meta = meta
        nodes.append(node)
    return graph
