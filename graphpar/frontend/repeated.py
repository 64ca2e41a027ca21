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
import operator
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.fx.experimental import proxy_tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten

from graphpar.frontend.calls import PLAIN, Call, NotRepeatedError, Player, Recorder, slot_of
from graphpar.frontend.repetitions import (
    EXAMPLE,
    PLACE,
    REPETITION,
    Example,
    Repetition,
    copy_well,
    fake_like,
    fake_on,
    is_number,
    moved,
)
from graphpar.ir.program import memory_of
from graphpar.operators.functions import plain_apply


class _Made(torch.autograd.Function):
    """Gives stand-ins for results of operators a gradient function, as such results have."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, made: list[Tensor]) -> Any:  # type: ignore[override]
        """Return the tensors in ``made``."""
        return tuple(made)


class _Recorded:
    """A traced instance: its calls, and the tensors that they took from outside and made.

    Attributes:
        renewed: those from outside that are other values of the graph now; see :func:`slot_of`.
    """

    def __init__(
        self, example: Example, calls: list[Call], outside: list[Tensor], made: list[Tensor], renewed: list[int]
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
        plain = tuple((type(leaf), leaf if type(leaf) in PLAIN else None) for leaf in leaves)
        state = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype(), module.training
        group = self.groups.setdefault((number, _call_stack(), state, spec, plain), _Group())
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
        first, watch = next(iter(reversed(graph.nodes))), Recorder(self.tracer)
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
            ends = [slot_of(each, self.tracer).proxy.node for each in watch.made]
            outer = [slot_of(each, self.tracer).proxy.node for each in watch.outside]
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
        player = Player(self.tracer, recorded.calls, recorded.stand_ins())
        with _disable_current_modes(), player.no_operators, player:
            output = original(*args, **kwargs)
        if player.failure is not None or player.position != len(recorded.calls) or len(graph.nodes) != count:
            self.found.failure = player.failure or NotRepeatedError("a module makes fewer calls, or other operators")
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


def _call_stack() -> Hashable:
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


# ---- which modules repeat ---------------------------------------------------------------------------------------


LEAST = 6
"""Fewer modules that are alike are each traced."""


def siblings(model: nn.Module) -> list[list[nn.Module]]:
    """List the groups of at least ``LEAST`` modules that are alike, the outermost ones; none where a module has two names."""
    named = list(model.named_modules(remove_duplicate=False))
    if len({id(module) for _, module in named}) != len(named):
        return []
    kinds: dict[Hashable, int] = {}
    kind_of: dict[int, int] = {}
    for _, module in reversed(named):  # children first
        kind_of[id(module)] = kinds.setdefault(_module_signature(module, kind_of), len(kinds))
    count = Counter(kind_of.values())
    groups: dict[int, list[nn.Module]] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            kind = kind_of[id(child)]
            if (
                count[kind] >= LEAST
                and next(child.children(), None) is not None
                and type(child).forward is not nn.Module.forward
            ):
                groups.setdefault(kind, []).append(child)
            else:
                visit(child)

    visit(model)
    plain = (group for group in groups.values() if not any(isinstance(each, torch.jit.ScriptModule) for each in group))
    return [group for group in plain if len(group) >= LEAST]


def _module_signature(module: nn.Module, kind_of: dict[int, int]) -> Hashable:
    tensors = tuple(
        (name, tuple(each.shape), each.dtype, each.requires_grad)
        for name, each in (*module._parameters.items(), *module._buffers.items())
        if each is not None
    )
    children = tuple((name, None if child is None else kind_of[id(child)]) for name, child in module._modules.items())
    settings = tuple((key, _setting(value)) for key, value in vars(module).items() if not key.startswith("_"))
    return type(module), tensors, children, settings


def _setting(value: Any) -> Hashable:
    """What of an attribute tells modules apart; numbers do not, since many a module has its own."""
    if isinstance(value, Tensor):
        return Tensor, tuple(value.shape)
    if type(value) in (bool, str, float, type(None), torch.dtype):
        return type(value), repr(value)
    return (type(value),)
