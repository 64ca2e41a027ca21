"""Branches on values: a trace takes the one that the example inputs take, and the program checks in each microbatch that it is so.

if not padding_mask.any(): ...    ``padding_mask.any()`` is computed for the example inputs; the trace goes on with what it is

What a condition needs is computed for real: operators of the trace up to it, from the example's rows, and from parameters and buffers as
the model is built. A mark of it stays in the trace, which :func:`flag` makes a write to a buffer of the module, ``other_branch_0``:

    self.other_branch_0.logical_or_(padding_mask.any())
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.symbol import SymT, symbol_is_type

from graphpar.errors import GraphparError
from graphpar.frontend.build import SEED
from graphpar.frontend.calls import NotRepeatedError
from graphpar.frontend.left_out import Condition
from graphpar.frontend.repetitions import REPETITION
from graphpar.frontend.trace_guards import FunctionMode
from graphpar.ir.program import OTHERWISE
from graphpar.ir.source import condition_now, left_out_now, runs_only_then, stack_line, user_text_of
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.stages.deferred import Recorder
from graphpar.runtime.torch_versions import keep_lines_of

_aten = torch.ops.aten
_MARK = "graphpar branch "
_LARGE, _DRAWS = 60, 200
"""Up to how many operators are computed several times, and how often, to see whether a condition depends on what is drawn."""
_WHOLE_NUMBERS = {
    "PythonMod": operator.mod,
    "Mod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
}
"""torch's names in an expression of sizes."""
_ASKED_AS: dict[Callable[..., Any], Callable[..., Any]] = {torch._is_all_true: torch.all, torch._is_any_true: torch.any}
"""What ``torch.distributions`` asks with, and operators of the same result."""
_REGIONS = ("_enter_autocast", "_exit_autocast")


class Values:
    """Computes for real what a trace has computed so far.

    Args:
        model: what is traced; its tensors as they were built.
        recorder: what made them, where they have no values.
        inputs: the example inputs, with as many rows as the trace has; None for one that has no values.
    """

    def __init__(self, model: nn.Module, recorder: Recorder | None, inputs: Sequence[Tensor | None]) -> None:
        self.recorder, self.inputs = recorder, inputs
        self.state: dict[str, Tensor] = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        self.built = {name: each.data for name, each in self.state.items()}  # before parameters are cast for the trace
        self.conditions: list[Condition] = []  # on how many rows a mask chooses
        self._known: dict[str, Tensor] = {}
        self._tracer: Any = None
        self._places: dict[fx.Node, str | int] = {}
        self._env: dict[fx.Node, Any] = {}

    def begin(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        """Note which values of the trace are parameters, buffers and inputs, as the traced forward begins."""
        self._tracer = tracer = _tracer()
        self._places, self._env = {}, {}
        if tracer is None:
            return
        named: list[tuple[str | int, Tensor]] = [*model.named_parameters(remove_duplicate=False)]
        named += [*model.named_buffers(remove_duplicate=False), *enumerate(tensors)]
        for name, tensor in named:
            if (node := _node_of(tensor, tracer)) is not None:
                self._places.setdefault(node, name)

    def needed(self, tensor: Tensor) -> list[fx.Node] | None:
        """Return the nodes of the trace that a tensor was computed by, in order; None where it is none of its values."""
        node = None if self._tracer is None else _node_of(tensor, self._tracer)
        return None if node is None else closure(self._tracer.graph, node)

    def fixed(self, leaf: Any) -> Any:
        """Return the value of a tensor of the trace that each step computes alike; anything else as it is.

        Raises:
            NotRepeatedError: it is of a module that was not traced.
        """
        nodes = self.needed(leaf) if isinstance(leaf, FakeTensor) else None
        if nodes is None:
            return leaf
        if any(each.target is REPETITION for each in nodes):
            raise NotRepeatedError("a module keeps what it computes")
        places = [self._places[each] for each in nodes if each in self._places]
        changing = any(isinstance(place, int) or self.state[place].requires_grad for place in places)
        written = any(base in self._places for each in nodes if _writes(each) for base in _written(each))
        if changing or written or any(map(_draws, nodes)):
            return leaf
        try:
            return self.compute(nodes)
        except RuntimeProgramError:
            return leaf

    def depends_on(self, nodes: Sequence[fx.Node]) -> bool:
        """Whether what ``nodes`` compute may differ between steps: they read inputs, parameters or buffers, or draw numbers."""
        return any(
            each in self._places or torch.Tag.nondeterministic_seeded in getattr(each.target, "tags", ())
            for each in nodes
        )

    def compute(self, nodes: Sequence[fx.Node]) -> Any:
        """Compute what the last of ``nodes`` of the trace does.

        Raises:
            RuntimeProgramError: something that they need has no values.
        """
        self._read([self._places[each] for each in nodes if each in self._places])
        env = {} if any(map(_writes, nodes)) else self._env
        return computed(nodes, self._leaf, env)

    def drawn_apart(self, nodes: Sequence[fx.Node]) -> bool:
        """Whether the last of ``nodes`` differs between draws of random numbers; true where that is not looked at."""
        if len(nodes) > _LARGE:
            return True
        with _for_real():
            found = {bool(computed(nodes, self._leaf, {}, seed)) for seed in range(_DRAWS)}
        return len(found) > 1

    def tensor(self, name: str) -> Tensor:
        """Return the value of a parameter or buffer.

        Raises:
            RuntimeProgramError: it has none.
        """
        self._read([name])
        return self._known[name]

    def _leaf(self, node: fx.Node) -> Any:
        place = self._places.get(node)
        if isinstance(place, int):
            if (value := self.inputs[place]) is None:
                raise RuntimeProgramError("the example inputs have no values")
            return value.clone()
        if place is not None:
            return self._known[place].to(node.meta["val"].dtype, copy=True)
        name = str(node.target)
        constant = getattr(self._tracer.root, name, None) if node.op == "get_attr" else None
        value = constant.constant if isinstance(constant, FakeTensor) else constant
        if value is None and constant is not None and self.recorder is not None:
            value = dict(self.recorder.run({name: constant}))[name]
        if value is None:
            raise RuntimeProgramError(f"{name} has no values")
        return value.clone()

    def _read(self, places: Sequence[str | int]) -> None:
        """Find the values of parameters and buffers."""
        names = [name for name in places if isinstance(name, str) and name not in self._known]
        unknown = {name: self.built[name] for name in names if isinstance(self.built[name], FakeTensor)}
        if unknown and self.recorder is None:
            raise RuntimeProgramError(f"{next(iter(unknown))} has no values")
        with _for_real():
            self._known |= {name: self.built[name] for name in names if name not in unknown}
            if unknown and self.recorder is not None:
                self._known |= dict(self.recorder.run(unknown))


@contextlib.contextmanager
def _for_real(seed: int = SEED) -> Iterator[None]:
    """Compute inside with values, whatever is traced, as after ``torch.manual_seed``."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        with (
            torch._C.DisableTorchFunction(),
            _disable_current_modes(),
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
        ):
            yield
    finally:
        torch.set_rng_state(state)


def computed(
    nodes: Sequence[fx.Node], leaf: Callable[[fx.Node], Any], env: dict[fx.Node, Any], seed: int = SEED
) -> Any:
    """Compute what the last of ``nodes`` does; ``leaf`` gives what is no operator, ``env`` has and gets what is known."""
    with _for_real(seed):
        for node in nodes:
            if node in env:
                continue
            if node.op != "call_function" or not callable(node.target):
                env[node] = leaf(node)
                continue
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), env.__getitem__)
            env[node] = node.target(*args, **kwargs)
        return env[nodes[-1]]


def closure(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """Return the nodes that ``node`` is computed by, in order, with the writes to them that come before it, and itself at the end."""
    before: list[fx.Node] = []
    for each in graph.nodes:
        before.append(each)
        if each is node:
            break
    found, pending = set[fx.Node](), [node]
    while pending:
        while pending:
            each = pending.pop()
            if each not in found:
                found.add(each)
                pending += each.all_input_nodes
        pending += [
            each for each in before if each not in found and _writes(each) and not found.isdisjoint(_written(each))
        ]
    regions = [
        each for each in before if each.op == "call_function" and getattr(each.target, "__name__", "") in _REGIONS
    ]
    return [each for each in before if each in found or each in regions]


def with_rows(leaf: Tensor, dim: int | None, rows: int) -> Tensor | None:
    """Return an example input with ``rows`` rows, its own repeated in order if needed; None where it has no values."""
    if isinstance(leaf, FakeTensor) or leaf.is_meta:
        return None
    leaf = leaf.detach()
    return leaf if dim is None else leaf.index_select(dim, torch.arange(rows, device=leaf.device) % leaf.shape[dim])


def _tracer() -> Any:
    mode = proxy_tensor.get_proxy_mode()
    return None if mode is None else mode.tracer


def _node_of(tensor: Tensor, tracer: Any) -> fx.Node | None:
    with torch._C.DisableTorchFunction():
        slot = proxy_tensor.get_proxy_slot(tensor, tracer, None)
    return None if slot is None else slot.proxy.node


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _written(node: fx.Node) -> list[fx.Node]:
    """Return what an operator writes: its first operand, and what that is a view of."""
    found: list[fx.Node] = []
    while node.op == "call_function" and node.args and isinstance(first := node.args[0], fx.Node):
        schema = getattr(node.target, "_schema", None)
        if schema is None or not any(each.alias_info is not None for each in schema.returns):
            break
        found.append(first)
        node = first
    return found


class Branches(FunctionMode):
    """Answers ``bool(tensor)`` with what it is for the example inputs, and marks it in the trace."""

    def __init__(self, values: Values) -> None:
        super().__init__()
        self.values = values
        self.numbers: dict[Any, Tensor] = {}  # by symbol: the tensor whose value it is
        self._any: dict[int, tuple[Tensor, Tensor]] = {}  # by identity: the result of any(), and the mask
        self._pending: list[tuple[Tensor, str]] = []  # marks of conditions in a region, which are made behind it
        self._bool = torch.SymBool.__bool__
        self._texts = {kind: kind.__repr__ for kind in (torch.SymInt, torch.SymFloat, torch.SymBool)}

    def __enter__(self) -> Any:
        decided = self._bool
        for kind, text in self._texts.items():
            kind.__repr__ = _guarded(text)  # type: ignore[method-assign]
        self._outside = _modes()

        def of_number(value: torch.SymBool) -> bool:
            found = self._compared(value)
            if found is not None:
                return self.decide(found)
            return self._of_rows(value, decided(value)) if _asked_by_user() else decided(value)

        torch.SymBool.__bool__ = of_number  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.SymBool.__bool__ = self._bool  # type: ignore[method-assign]
        for kind, text in self._texts.items():
            kind.__repr__ = text  # type: ignore[method-assign]
        super().__exit__(*error)
        if not any(error):
            self._mark()

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call ``function``, or decide what it asks for."""
        if self._pending and _modes() == self._outside:
            self._mark()
        function = _ASKED_AS.get(function, function)
        name = getattr(function, "__name__", "")
        first = args[0] if args else None
        if name in ("__bool__", "is_nonzero") and isinstance(first, Tensor) and first.numel() == 1:
            return self.decide(first)
        if name == "equal" and all(isinstance(each, Tensor) for each in args[:2]):
            return args[0].shape == args[1].shape and self.decide((args[0] == args[1]).all())
        if name == "_assert" and isinstance(first, Tensor) and first.numel() == 1:
            assert self.decide(first), args[1:]
            return None
        if name == "allclose":
            return self.decide(torch.isclose(*args, **options).all())
        if name == "__contains__" and isinstance(first, Tensor):
            return self.decide((first == args[1]).any())
        result = function(*args, **options)
        if name == "item" and isinstance(result, torch.SymInt | torch.SymFloat | torch.SymBool):
            self.numbers |= dict.fromkeys(result.node.expr.free_symbols, args[0])
        if name == "any" and isinstance(first, Tensor) and isinstance(result, Tensor):
            self._any[id(result)] = result, first
        return result

    def _of_rows(self, value: torch.SymBool, taken: bool) -> bool:
        """Return ``taken``, the answer for a number of rows that a mask chooses, which a trace takes to be one at least.

        Raises:
            GraphparError: without rows the model does something else than nothing.
        """
        symbols = value.node.expr.free_symbols if isinstance(value.node.expr, sympy.Basic) else ()
        chosen = frozenset(str(each) for each in symbols if symbol_is_type(each, SymT.UNBACKED_INT))
        if chosen and (text := left_out_now(taken)):
            raise GraphparError(
                f"The model does something else where a mask chooses no rows, `{text}`{_at()}, and a program computes one branch: compute "
                "both and take torch.where of them, or leave the other out if it adds nothing."
            )
        if chosen:
            self._only_with_rows(chosen, taken)
        return taken

    def _only_with_rows(self, chosen: frozenset[str], taken: bool) -> None:
        """Note what runs only where a mask chooses rows."""
        text, _ = condition_now()
        path, function, lines = runs_only_then(taken)
        if lines:
            keep_lines_of(path, function)
            self.values.conditions.append(Condition(chosen, path, lines, f"`{text}`{_at()}"))

    def _rows_of(self, condition: Tensor) -> frozenset[str]:
        """Return the numbers of rows that are 0 where ``mask.any()`` does not hold; none where ``condition`` is something else."""
        found: set[str] = set()
        while (made := self._any.get(id(condition))) is not None:
            condition = made[1]
            if condition.dtype is torch.bool:
                size = torch.nonzero(condition).shape[0]
                found |= (
                    {str(symbol) for symbol in size.node.expr.free_symbols} if isinstance(size, torch.SymInt) else set()
                )
        return frozenset(found)

    def _compared(self, value: torch.SymBool) -> Tensor | None:
        """Return ``x.max().item() > 5`` as a tensor; None where ``value`` is of sizes, or of anything else."""
        expression = value.node.expr
        symbols = sorted(expression.free_symbols, key=str)
        if not symbols or not all(symbol in self.numbers for symbol in symbols):
            return None
        try:
            function = sympy.lambdify(symbols, expression, modules=[_WHOLE_NUMBERS, "math"])
            found = function(*(self.numbers[symbol] for symbol in symbols))
        except (TypeError, NameError):  # a function of numbers alone
            return None
        return found if isinstance(found, Tensor) and found.numel() == 1 else None

    def decide(self, condition: Tensor) -> bool:
        """Return whether ``condition`` holds for the example inputs; marked unless it does for any.

        Raises:
            GraphparError: a loop depends on it, or it can't be computed.
        """
        nodes = self.values.needed(condition) if isinstance(condition, FakeTensor) else None
        if nodes is None or getattr(condition, "constant", None) is not None:
            return bool(condition)
        text, loops = condition_now()
        differs = self.values.depends_on(nodes)
        if loops and differs and (chosen := self._rows_of(condition)) and not left_out_now(True):
            self._only_with_rows(chosen, True)
            return True
        if loops and differs:
            raise GraphparError(
                f"The model's control flow depends on values of tensors, which a trace can't follow: {loops} on {text or 'a tensor'}"
                f"{_at()}. Give the loop a fixed number of rounds, and use torch.where in it; in a loop over experts leave out the "
                "condition, since an expert without tokens adds nothing."
            )
        try:
            value = self.values.compute(nodes)
            with _for_real():
                taken = bool(value)
        except RuntimeProgramError as error:
            raise GraphparError(
                f"The model's control flow depends on values of tensors{_at()}, and which branch to take can't be computed: {error}. Give "
                "example inputs with values, and a function that builds the model, or use torch.where there."
            ) from error
        if any(map(_draws, nodes)) and not _is_validation() and self.values.drawn_apart(nodes):
            raise GraphparError(
                f"The model draws random numbers to choose a branch, {text or 'a condition'}{_at()}: a program has one branch. Multiply by "
                "what is drawn (stochastic depth), or set that probability to 0."
            )
        if differs:
            self._pending.append((condition, _MARK + json.dumps([taken, text or "a condition", stack_line()])))
            if _modes() == self._outside:
                self._mark()
        return taken

    def _mark(self) -> None:
        """Leave the marks in the trace: of a region (``torch.no_grad``, ``autocast``) what nothing reads is lost."""
        pending, self._pending = self._pending, []
        for condition, mark in pending:
            plain = condition.reshape(()) if condition.ndim else condition
            torch._assert_async(plain if plain.dtype is torch.bool else plain != 0, mark)


def _asked_by_user() -> bool:
    """Whether the user's code asks for the truth of a number now, and no function of torch that it calls."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename == torch.__file__ and frame.f_back is not None:  # the methods of SymInt
        frame = frame.f_back
    return user_text_of(frame) is not None


def _is_validation() -> bool:
    """Whether ``torch.distributions`` asks now whether its arguments are valid, and raises where they are not."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and user_text_of(frame) is None:
        if f"{os.sep}torch{os.sep}distributions{os.sep}" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _guarded(text: Callable[[Any], str]) -> Callable[[Any], str]:
    """Return ``text``, the text of a number, for numbers that stand for any value: only what a model prints or logs may have it.

    The function that is returned raises ``GraphparError`` where other code of the model asks for such a text.
    """

    def shown(value: Any) -> str:
        symbols = value.node.expr.free_symbols if isinstance(value.node.expr, sympy.Basic) else ()
        line = user_text_of(sys._getframe(1))  # str() and f-strings are C code, which has no frame
        depends = any(symbol_is_type(each, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)) for each in symbols)
        if depends and line is not None and not _SAYS.match(line):
            raise GraphparError(
                f"The model makes a text of a number that depends on values, `{line}`{_at()}, which a trace can't follow: compare numbers, "
                "or leave it out."
            )
        return text(value)

    return shown


_SAYS = re.compile(r"(print|[\w.]*(log|warn|writer|debug|info)[\w.]*)\s*\(", re.IGNORECASE)


def _modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), *(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))


def _at() -> str:
    place = stack_line()
    return f" ({place})" if place else ""


def marked(node: fx.Node) -> tuple[bool, str, str] | None:
    """Return what a mark says: the branch taken, the condition and its line; None of other operators."""
    text = node.args[1] if node.target is _aten._assert_async.msg else None
    if not isinstance(text, str) or not text.startswith(_MARK):
        return None
    taken, condition, line = json.loads(text.removeprefix(_MARK))
    return taken, condition, line


def flag(graph: fx.Graph, condition: fx.Node, buffer: fx.Node, taken: bool, meta: Mapping[str, Any]) -> None:
    """Add the write to ``buffer`` of whether ``condition`` is otherwise."""
    value = condition.meta["val"]
    if taken:
        condition = graph.call_function(_aten.logical_not.default, (condition,))
        condition.meta = {**meta, "val": value}
    write = graph.call_function(_aten.logical_or_.default, (buffer, condition))
    write.meta = {**meta, "val": buffer.meta["val"]}


def free_flag(module: str, taken: Collection[str]) -> str:
    """Return a name for a flag of ``module`` that is not in ``taken``."""
    prefix, number = (f"{module}." if module else "") + OTHERWISE, 0
    while f"{prefix}{number}" in taken:
        number += 1
    return f"{prefix}{number}"
