"""The calls of torch functions that a module makes: noted in one instance, answered as noted in another.

Recorder   calls through, and describes each call and what it returned
Player     describes each call, and where that is what was noted, returns tensors in the place of those that were made
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from graphpar.frontend.trace_guards import FunctionMode

_QUERIES = frozenset(
    (
        "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_cpu", "is_meta", "is_mkldnn", "is_sparse",
        "is_sparse_csr", "is_quantized", "is_nested", "is_xpu", "is_mps", "itemsize", "nbytes", "size", "dim", "ndimension", "nelement",
        "numel", "stride", "is_contiguous", "is_floating_point", "is_complex", "is_signed", "element_size", "get_device",
        "storage_offset", "__len__", "result_type", "promote_types", "can_cast", "broadcast_shapes",
    )
)  # fmt: skip
"""Functions of torch that follow from what is compared of their arguments, and return no tensor."""
PLAIN = (bool, int, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)
_TENSORS = (Tensor, FakeTensor, nn.Parameter)


class NotRepeatedError(BaseException):
    """A module is not run as its siblings are. No ``Exception``, so that a model's own ``except`` does not hide it."""


@dataclass(frozen=True)
class Call:
    """A call of a torch function: what it is, in words that mean the same in each instance, and what it returned.

    ``results`` has for each tensor either a name of one known before, or the place of a new one; other results are kept.
    """

    words: Hashable
    spec: TreeSpec | None
    results: tuple[Any, ...]


@dataclass(frozen=True)
class _Known:
    name: Hashable


@dataclass(frozen=True)
class _New:
    place: int


class Watch(FunctionMode):
    """Names the tensors of an instance: by the call that made them, or as the n-th that comes from outside."""

    def __init__(self, tracer: Any) -> None:
        super().__init__()
        self.tracer = tracer
        self.names: dict[int, Hashable] = {}
        self.outside: list[Tensor] = []
        self.inputs: list[Any] = []  # the values of the graph that those from outside are
        self.alive: list[Tensor] = []  # so that no other tensor gets the id of one

    def know(self, tensor: Tensor, name: Hashable) -> None:
        self.names[id(tensor)] = name
        self.alive.append(tensor)

    def words(self, function: Callable[..., Any], args: Any, options: Any) -> Hashable:
        """Describe a call; equal descriptions make equal operators.

        Raises:
            NotRepeatedError: an argument is of a kind that can't be compared.
        """
        name = getattr(function, "__name__", "")
        owner = getattr(function, "__self__", None)
        getter = getattr(owner, "__name__", "") if name in ("__get__", "__set__") else ""
        state = torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu")
        return name, getter, function, state, self.described(args), self.described(options)

    def described(self, value: Any) -> Hashable:
        kind = type(value)
        if isinstance(value, Tensor):
            return self.tensor(value)
        if kind in (tuple, list, torch.Size):
            return kind, *[self.described(each) for each in value]
        if kind in PLAIN:
            return kind, value
        if kind is torch.SymInt:
            return kind, _expression(value)
        if kind in (float, complex):
            return kind, repr(value)
        if kind is dict:
            return kind, *[(key, self.described(each)) for key, each in value.items()]
        if kind is slice:
            return kind, self.described((value.start, value.stop, value.step))
        if isinstance(value, type) and value.__module__ in ("builtins", "torch"):
            return type, value
        raise NotRepeatedError(f"an argument is a {kind.__name__}")

    def tensor(self, value: Tensor) -> Hashable:
        known = self.names.get(id(value))
        if known is not None:
            return known
        name = ("outside", len(self.outside))
        words = name, _metadata(value)
        self.inputs.append(slot_of(value, self.tracer).proxy)
        self.know(value, name)
        self.outside.append(value)
        return words


def _expression(size: Any) -> Hashable:
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression: Hashable = size.node.expr
    if any(str(symbol).startswith(("u", "zuf")) for symbol in size.node.expr.free_symbols):
        raise NotRepeatedError("a size depends on values of tensors")
    return expression


def slot_of(value: Tensor, tracer: Any) -> Any:
    """The value of the graph that a tensor is now. It is another one after ``x.to(x.dtype)``, which returns ``x``."""
    with torch._C.DisableTorchFunction():
        slot = proxy_tensor.get_proxy_slot(value, tracer, None)
    if slot is None or slot.constant is not None:
        raise NotRepeatedError("a tensor is no value of the graph")
    return slot


def _metadata(value: Tensor) -> Hashable:
    with torch._C.DisableTorchFunction():
        if type(value) not in _TENSORS or value.layout is not torch.strided or value.is_conj() or value.is_neg():
            raise NotRepeatedError(f"an argument is a {type(value).__name__} of an unusual kind")
        if getattr(value, "constant", None) is not None:
            raise NotRepeatedError("an argument is a constant")
        sizes = (*value.shape, *value.stride(), value.storage_offset())
        places = tuple(map(_expression, sizes))
        return type(value), places, value.dtype, value.device, value.requires_grad, isinstance(value, nn.Parameter)


class Recorder(Watch):
    """Calls through, and notes each call. ``why_not`` says why the instance is no example, if so."""

    def __init__(self, tracer: Any) -> None:
        super().__init__(tracer)
        self.calls: list[Call] = []
        self.made: list[Tensor] = []
        self.first: list[fx.Node] = []  # what each of ``made`` was when it was made
        self.nodes: set[fx.Node] = set()  # made in calls
        self.why_not: str | None = None

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call ``function``, and note it."""
        words: Hashable = None
        if self.why_not is None:
            try:
                words = self.words(function, args, options)
            except NotRepeatedError as error:
                self.why_not = str(error)
        before = len(self.tracer.graph.nodes)
        result = function(*args, **options)
        nodes = len(self.tracer.graph.nodes) - before
        self.nodes.update(itertools.islice(reversed(self.tracer.graph.nodes), nodes))
        if self.why_not is None:
            try:
                self.calls.append(Call(words, *self._results(function, result, nodes)))
            except NotRepeatedError as error:
                self.why_not = str(error)
        return result

    def _results(
        self, function: Callable[..., Any], result: Any, nodes: int
    ) -> tuple[TreeSpec | None, tuple[Any, ...]]:
        name = getattr(function, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(function, "__self__", None), "__name__", "")
        if name == "data" or (name.endswith("_") and not name.endswith("__") and not nodes):
            raise NotRepeatedError(f"{name} changes a tensor")
        leaves, spec = ([result], None) if isinstance(result, Tensor) else tree_flatten(result)
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            if name not in _QUERIES and not (name == "__setitem__" and nodes):
                raise NotRepeatedError(f"{name} returns no tensor")
            self.described(result)
            return None, (result,)
        return spec, tuple(self._result(leaf) for leaf in leaves)

    def _result(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            if type(leaf) not in PLAIN:
                raise NotRepeatedError(f"a function returns a {type(leaf).__name__} and a tensor")
            return leaf
        known = self.names.get(id(leaf))
        if known is not None:
            return _Known(known)
        _metadata(leaf)
        if type(leaf) is not FakeTensor:
            raise NotRepeatedError("a result is of an unusual kind")
        self.first.append(slot_of(leaf, self.tracer).proxy.node)
        self.know(leaf, ("made", len(self.made)))
        self.made.append(leaf)
        return _New(len(self.made) - 1)


class Player(Watch):
    """Answers each call as the example's was, with tensors in the place of the example's."""

    def __init__(self, tracer: Any, calls: list[Call], stand_ins: list[Tensor]) -> None:
        super().__init__(tracer)
        self.calls, self.stand_ins = calls, stand_ins
        self.by_name: dict[Hashable, Tensor] = {}
        self.position = 0
        self.failure: NotRepeatedError | None = None
        self.no_operators = _NoOperators(self)

    def know(self, tensor: Tensor, name: Hashable) -> None:
        super().know(tensor, name)
        self.by_name[name] = tensor

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Return what the example's call of this place returned; from the first one that is another on, call ``function``."""
        try:
            if self.failure is None and (
                self.position >= len(self.calls)
                or self.calls[self.position].words != self.words(function, args, options)
            ):
                raise NotRepeatedError(f"{getattr(function, '__name__', function)} is another call")
        except NotRepeatedError as error:
            self.failure = error
        if self.failure is not None:
            return self.beside(function, args, options)
        call = self.calls[self.position]
        self.position += 1
        leaves = [self._result(each) for each in call.results]
        return leaves[0] if call.spec is None else tree_unflatten(leaves, call.spec)

    def beside(self, function: Callable[..., Any], args: Any, options: Any) -> Any:
        """Call ``function`` on fake tensors, for a trace that is given up."""
        with detect_fake_mode(self.stand_ins) or contextlib.nullcontext():
            return function(*args, **options)

    def _result(self, result: Any) -> Any:
        if isinstance(result, _Known):
            return self.by_name[result.name]
        if isinstance(result, _New):
            made = self.stand_ins[result.place]
            self.know(made, ("made", result.place))
            return made
        return result


class _NoOperators(TorchDispatchMode):
    """Notes operators: those that a repetition runs beside calls of torch functions would be lost."""

    def __init__(self, player: Player) -> None:
        super().__init__()
        self.player = player

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, for a trace that is given up."""
        self.player.failure = self.player.failure or NotRepeatedError(f"{func} is run between calls")
        return self.player.beside(func, args, kwargs or {})
