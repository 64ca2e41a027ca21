"""Trace one instance of each repeated module; the others are only watched, and get copies of its operators.

    layers.0   traced
    layers.1   traced, and each call of a torch function noted with what its arguments are       (the example)
    layers.2   run with tensors that are made from the example's, call by call: the same calls   (a repetition)
      ...      ──► one node of the graph, ``repetition(inputs)``; see :mod:`graphpar.frontend.repetitions`
    layers.N   traced, and compared with the example

The module's own code runs in each repetition, so whatever it does in Python happens as in a trace: hooks, lists that it fills, branches
on its index. What is spared is torch's work. A repetition makes the same operators as the example since it makes the same calls: equal
functions, on tensors of equal shape, strides, dtype and origin, with equal other arguments. After the first call that differs the model
runs to its end, so that what it keeps in Python is as after any forward (a list that it clears at its end, a counter of a class); then
``NotRepeatedError`` is raised, and the model is traced as a whole. So it is also where an example does anything that calls don't show.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.fx.experimental import proxy_tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from graphpar.frontend.modes import FunctionMode
from graphpar.frontend.repetitions import EXAMPLE, PLACE, REPETITION, Example, Repetition, copy_well, is_number
from graphpar.frontend.siblings import siblings
from graphpar.ir.fakes import fake_like, fake_on, moved
from graphpar.ir.program import memory_of
from graphpar.operators.functions import plain_apply

_QUERIES = frozenset(
    (
        "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_cpu", "is_meta", "is_mkldnn", "is_sparse",
        "is_sparse_csr", "is_quantized", "is_nested", "is_xpu", "is_mps", "itemsize", "nbytes", "size", "dim", "ndimension", "nelement",
        "numel", "stride", "is_contiguous", "is_floating_point", "is_complex", "is_signed", "element_size", "get_device",
        "storage_offset", "__len__", "result_type", "promote_types", "can_cast", "broadcast_shapes",
    )
)  # fmt: skip
"""Functions of torch that follow from what is compared of their arguments, and return no tensor."""
_PLAIN = (bool, int, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)
_TENSORS = (Tensor, FakeTensor, nn.Parameter)


class NotRepeatedError(BaseException):
    """A module is not run as its siblings are. No ``Exception``, so that a model's own ``except`` does not hide it."""


@dataclass(frozen=True)
class _Call:
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


class _Made(torch.autograd.Function):
    """Gives stand-ins for results of operators a gradient function, as such results have."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, made: list[Tensor]) -> Any:  # type: ignore[override]
        """Return the tensors in ``made``."""
        return tuple(made)


class _Recorded:
    """A traced instance: its calls, and the tensors that they took from outside and made.

    Attributes:
        renewed: those from outside that are other values of the graph now; see :func:`_slot`.
    """

    def __init__(
        self, example: Example, calls: list[_Call], outside: list[Tensor], made: list[Tensor], renewed: list[int]
    ) -> None:
        self.example, self.calls, self.outside, self.renewed = example, calls, outside, renewed
        self.made = [each for each in made if isinstance(each, FakeTensor)]
        assert len(self.made) == len(made)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            self.plain = []
            for each in self.made:
                with in_kernel_invocation_manager(each.fake_mode):
                    self.plain.append(each.detach())
            self.trained = [place for place, each in enumerate(made) if each.requires_grad]

    def stand_ins(self) -> list[Tensor]:
        """New fake tensors like those that the calls made, in the same memory."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            found = [fake_on(plain, each) for plain, each in zip(self.plain, self.made)]
            if self.trained:
                anchor = torch.zeros((), requires_grad=True)
                for place, tensor in zip(
                    self.trained, plain_apply(_Made, anchor, [found[each] for each in self.trained])
                ):
                    found[place] = tensor
        return found

    def set_apart(self, used: list[tuple[int, Tensor]], outside: list[Tensor]) -> None:
        """Give those stand-ins that live on memory of their own, or that of what was taken from ``outside``, as the example's have."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            storages = {memory_of(old): new.untyped_storage() for old, new in zip(self.outside, outside)}
            for place, tensor in used:
                like = self.made[place]
                if memory_of(like) not in storages:
                    storages[memory_of(like)] = fake_like(like).untyped_storage()
                assert isinstance(tensor, FakeTensor)
                moved(tensor, storages[memory_of(like)])


class _Watch(FunctionMode):
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
        if kind in _PLAIN:
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
        self.inputs.append(_slot(value, self.tracer).proxy)
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


def _slot(value: Tensor, tracer: Any) -> Any:
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


class _Recorder(_Watch):
    """Calls through, and notes each call. ``why_not`` says why the instance is no example, if so."""

    def __init__(self, tracer: Any) -> None:
        super().__init__(tracer)
        self.calls: list[_Call] = []
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
                self.calls.append(_Call(words, *self._results(function, result, nodes)))
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
            if type(leaf) not in _PLAIN:
                raise NotRepeatedError(f"a function returns a {type(leaf).__name__} beside a tensor")
            return leaf
        known = self.names.get(id(leaf))
        if known is not None:
            return _Known(known)
        _metadata(leaf)
        if type(leaf) is not FakeTensor:
            raise NotRepeatedError("a result is of an unusual kind")
        self.first.append(_slot(leaf, self.tracer).proxy.node)
        self.know(leaf, ("made", len(self.made)))
        self.made.append(leaf)
        return _New(len(self.made) - 1)


class _Player(_Watch):
    """Answers each call as the example's was, with tensors in the place of the example's."""

    def __init__(self, tracer: Any, recorded: _Recorded, stand_ins: list[Tensor]) -> None:
        super().__init__(tracer)
        self.calls, self.stand_ins = recorded.calls, stand_ins
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


@dataclass
class Repetitions:
    """What was noted while a model was traced: its examples and repetitions, by the numbers in their nodes."""

    examples: dict[int, Example] = field(default_factory=dict)
    repetitions: dict[int, Repetition] = field(default_factory=dict)
    begun: bool = False  # whether a module was not traced
    failure: NotRepeatedError | None = None  # of a module that was not traced and is another one


@dataclass
class _Group:
    """Instances that are called at one place of the code, in one state of torch."""

    calls: int = 0
    recorded: _Recorded | None = None


class _NoOperators(TorchDispatchMode):
    """Notes operators: those that a repetition runs beside calls of torch functions would be lost."""

    def __init__(self, player: _Player) -> None:
        super().__init__()
        self.player = player

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, for a trace that is given up."""
        self.player.failure = self.player.failure or NotRepeatedError(f"{func} is run beside calls")
        return self.player.beside(func, args, kwargs or {})


class _Tracing:
    """Replaces ``forward`` of repeated modules for one trace."""

    def __init__(self, tracer: Any, found: Repetitions, last: set[int]) -> None:
        self.tracer, self.found, self.last = tracer, found, last
        self.groups: dict[Hashable, _Group] = {}
        self.called: set[int] = set()
        self.inside = False

    def forward(self, module: nn.Module, number: int, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run ``module``: traced, or as a repetition of the one before it."""
        mode = proxy_tensor.get_proxy_mode()
        tracer = None if mode is None else mode.tracer
        given_up = self.found.failure is not None or not _modes_are_known()
        if self.inside or given_up or id(module) in self.called or tracer is not self.tracer:
            return original(*args, **kwargs)
        self.called.add(id(module))
        leaves, spec = tree_flatten((args, kwargs))
        plain = tuple((type(leaf), leaf if type(leaf) in _PLAIN else None) for leaf in leaves)
        state = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype(), module.training
        group = self.groups.setdefault((number, _place(), state, spec, plain), _Group())
        group.calls += 1
        if group.calls == 1 or (group.calls > 2 and group.recorded is None):
            return original(*args, **kwargs)
        self.inside = True
        try:
            if group.recorded is None or id(module) in self.last:
                output, recorded = self._recorded(original, args, kwargs)
                if group.recorded is None:
                    group.recorded = recorded
                elif recorded is not None and recorded.calls == group.recorded.calls:
                    recorded.example.like = group.recorded.example.number
                return output
            return self._repeated(group.recorded, original, args, kwargs)
        finally:
            self.inside = False

    def _recorded(self, original: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, _Recorded | None]:
        graph = self.tracer.graph
        before = dict(graph._graph_namespace._base_count)
        first, watch = next(reversed(graph.nodes)), _Recorder(self.tracer)
        with watch:
            output = original(*args, **kwargs)
        nodes = _nodes_after(first, graph)
        known = set(nodes)
        if watch.why_not is not None or not nodes or not known.issuperset(watch.first):
            return output, None
        if not all(node in watch.nodes or is_number(node) for node in nodes):
            return output, None
        if not copy_well(nodes, watch.outside):
            return output, None
        try:
            ends = [_slot(each, self.tracer).proxy.node for each in watch.made]
            outer = [_slot(each, self.tracer).proxy.node for each in watch.outside]
        except NotRepeatedError:
            return output, None
        if not known.issuperset(ends):
            return output, None
        renewed = [place for place, node in enumerate(outer) if node in known]
        number = len(self.found.examples)
        rises = {base: (before.get(base, -1), count) for base, count in graph._graph_namespace._base_count.items()}
        rises = {base: (low, high) for base, (low, high) in rises.items() if high != low}
        places = {node: place for place, node in enumerate(nodes)}
        results = [places[node] for node in (*ends, *(outer[place] for place in renewed))]
        for node, place in places.items():
            node.meta[PLACE] = number, place
        example = Example(number, len(nodes), results, rises)
        self.found.examples[number] = example
        mark = self.tracer.create_proxy("call_function", EXAMPLE, (watch.inputs, number), {}, name="repeated_example")
        mark.node.meta["val"] = []
        return output, _Recorded(example, watch.calls, watch.outside, watch.made, renewed)

    def _repeated(self, recorded: _Recorded, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.found.begun = True
        graph = self.tracer.graph
        count, counts = len(graph.nodes), graph._graph_namespace._base_count
        player = _Player(self.tracer, recorded, recorded.stand_ins())
        with _disable_current_modes(), player.no_operators, player:
            output = original(*args, **kwargs)
        if player.failure is not None or player.position != len(recorded.calls) or len(graph.nodes) != count:
            self.found.failure = player.failure or NotRepeatedError(
                "a module makes fewer calls, or operators beside them"
            )
            return output
        places = [weakref.ref(each) for each in player.stand_ins]
        player.stand_ins.clear()
        player.names, player.by_name, player.alive = {}, {}, []
        used = [(place, tensor) for place, each in enumerate(places) if (tensor := each()) is not None]
        recorded.set_apart(used, player.outside)
        used += [(len(places) + index, player.outside[place]) for index, place in enumerate(recorded.renewed)]
        self._add(recorded, player.inputs, used, counts)
        return output

    def _add(
        self, recorded: _Recorded, inputs: list[Any], used: list[tuple[int, Tensor]], counts: dict[str, int]
    ) -> None:
        """Add the node of a repetition, of which the tensors in ``used`` live on, and count the names that a trace would take."""
        example, number = recorded.example, len(self.found.repetitions)
        shifts = {base: counts.get(base, -1) - low for base, (low, _) in example.names.items()}
        for base, (low, high) in example.names.items():
            counts[base] = counts.get(base, -1) + high - low
        self.found.repetitions[number] = Repetition(example.number, [place for place, _ in used], shifts)
        create = functools.partial(self.tracer.create_proxy, "call_function")
        node = create(REPETITION, (inputs, number), {}, name="repetition")
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            proxy_tensor.set_meta(node, [each for _, each in used])
            for index, (_, tensor) in enumerate(used):
                result = create(operator.getitem, (node, index), {}, name="repetition_result")
                proxy_tensor.track_tensor_tree(tensor, result, constant=None, tracer=self.tracer)


_TRACING = ("graphpar.", "torch.fx.experimental.", "torch._export.", "torch._subclasses.")


def _modes_are_known() -> bool:
    """Whether no mode of the model's own, such as ``torch.device("cuda")``, changes what functions do."""
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    return all(type(mode).__module__.startswith(_TRACING) for mode in modes)


def _nodes_after(node: fx.Node, graph: fx.Graph) -> list[fx.Node]:
    found: list[fx.Node] = []
    for each in reversed(graph.nodes):
        if each is node:
            break
        found.append(each)
    return found[::-1]


def _place() -> Hashable:
    """The lines that are running, down to that which called a module's ``forward``."""
    frame, lines = sys._getframe(2), []
    while frame is not None and not (frame.f_code.co_name == "forward" and frame.f_globals.get("__name__") == _ROOT):
        lines.append((id(frame.f_code), frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(lines)


_ROOT = "graphpar.frontend.capture"


@contextlib.contextmanager
def repeated(model: nn.Module, found: Repetitions | None) -> Iterator[None]:
    """Have modules of ``model`` that are like each other traced once within the block, which is run under a trace; None changes nothing."""
    mode = proxy_tensor.get_proxy_mode()
    groups = siblings(model) if found is not None and mode is not None else []
    if found is None or mode is None or not groups:
        yield
        return
    tracing = _Tracing(mode.tracer, found, {id(group[-1]) for group in groups})
    before: list[tuple[nn.Module, dict[str, Any]]] = []
    for number, group in enumerate(groups):
        for module in group:
            before.append((module, {key: vars(module)[key] for key in ("forward",) if key in vars(module)}))
            vars(module)["forward"] = _watched(tracing, module, number)
    try:
        yield
    finally:
        for module, own in before:
            vars(module).pop("forward", None)
            vars(module).update(own)
    if found.failure is not None:
        raise found.failure


def _watched(tracing: _Tracing, module: nn.Module, number: int) -> Callable[..., Any]:
    original = module.forward

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        return tracing.forward(module, number, original, args, kwargs)

    return watched
