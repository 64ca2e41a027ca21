"""State that a model keeps between steps in other places than buffers, which a trace would fix at its first value.

self.count += 1; return x * self.count      what the forward assigns and reads: seen in a second trace, which begins with it
self.scale = self.scale * 2                 a tensor that the forward assigns and reads
self.past[0] = x                            an element of a list or dict, or an attribute of an object, likewise
self.cos = self.cos if self.n == n else f() a table that is kept: the second trace begins with its values, and must compute the same
register_buffer("first", self.all[:4])      two buffers in one memory, of which one is written
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import operator
import os
import textwrap
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from graphpar.errors import GraphparError
from graphpar.frontend.branches import closure, computed
from graphpar.ir.program import Program
from graphpar.runtime.errors import RuntimeProgramError

_HOW = "Make it a buffer with register_buffer, and write to it in place (persistent=False leaves it out of checkpoints)"
_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module."""
_MISSING = object()
"""In the place of an attribute or element that there is not."""


@dataclass(frozen=True)
class Assigned:
    """An attribute of a module that a trace assigned; ``key``: its element, where it is a list, a dict or an object that stayed."""

    module: nn.Module
    name: str
    before: Any
    after: Any
    key: Any = _MISSING

    def __str__(self) -> str:
        element = "" if self.key is _MISSING else f"[{self.key!r}]"
        return f"{self.name + element!r} of {type(self.module).__name__}"

    @property
    def is_tensor(self) -> bool:
        """Whether a tensor became another one."""
        return isinstance(self.before, Tensor) and isinstance(self.after, Tensor)


@contextlib.contextmanager
def noted(model: nn.Module, into: list[Assigned], value_of: Callable[[Any], Any]) -> Iterator[None]:
    """Write to ``into`` which attributes of modules the block assigns, and which elements of lists, dicts and objects in them.

    Elements are put back at its end, where they changed; attributes are by :func:`attributes_kept`.

    Args:
        value_of: of a tensor of the trace, its values where each step computes the same.
    """
    before = [
        (module, {name: (value, _elements(value)) for name, value in _own(module).items()})
        for module in model.modules()
    ]
    try:
        yield
    finally:
        into.clear()
        for module, attributes in before:
            after = _own(module)
            for name in dict.fromkeys((*attributes, *after)):
                value, elements = attributes.get(name, (_MISSING, None))
                now = after.get(name, _MISSING)
                if elements is not None and now is value:
                    if changes := _changes(elements, _elements(value) or {}):
                        into += [Assigned(module, name, *change) for change in changes]
                        _put(value, elements)
                elif not _same(value, now):
                    into.append(Assigned(module, name, value, now))
    if not all(each.is_tensor for each in into):
        into[:] = [replace(each, after=tree_map(value_of, each.after)) for each in into]


@contextlib.contextmanager
def attributes_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let modules have their attributes of now again after the block."""
    before = {id(module): (module, dict(vars(module)), _slots(module)) for module in modules}
    try:
        yield
    finally:
        for module, attributes, slots in before.values():
            vars(module).clear()
            vars(module).update(attributes)
            for name in _descriptors(module):
                _assign(module, name, slots.get(name, _MISSING))


def _own(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OF_TORCH} | _slots(module)


def _descriptors(module: nn.Module) -> dict[str, Any]:
    """Return the slots of a module's classes: attributes that are not in its ``__dict__``."""
    return {
        name: found
        for kind in type(module).__mro__
        for name, found in vars(kind).items()
        if isinstance(found, MemberDescriptorType)
    }


def _slots(module: nn.Module) -> dict[str, Any]:
    return {name: getattr(module, name) for name, found in _descriptors(module).items() if hasattr(module, name)}


def _assign(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute as it is, or take it away."""
    descriptor = _descriptors(module).get(name)
    if descriptor is None:
        _replace(vars(module), name, value)
    elif value is not _MISSING:
        descriptor.__set__(module, value)
    elif hasattr(module, name):
        descriptor.__delete__(module)


def _elements(value: Any) -> dict[Any, Any] | None:
    """Return what a list, a dict or an object of the user's class holds; None of other values."""
    if isinstance(value, list):
        return dict(enumerate(list.__iter__(value)))
    if isinstance(value, dict):
        return dict(_base(value).items(value))
    held = getattr(value, "__dict__", None)
    plain = not isinstance(value, type | FunctionType | ModuleType | nn.Module | Tensor | torch.Generator)
    return dict(held) if plain and type(held) is dict else None


def _base(value: dict[Any, Any]) -> type[dict[Any, Any]]:
    """Return the class whose methods do what those of a dict do, whatever ``value``'s own class forbids or does besides."""
    return OrderedDict if isinstance(value, OrderedDict) else dict


def _put(container: Any, elements: Mapping[Any, Any]) -> None:
    """Let a list, a dict or an object hold ``elements`` again."""
    if isinstance(container, list):
        list.__setitem__(container, slice(None), elements.values())
        return
    held = container if isinstance(container, dict) else vars(container)
    base = _base(held)
    base.clear(held)
    for key, value in elements.items():
        base.__setitem__(held, key, value)


def _changes(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> list[tuple[Any, Any, Any]]:
    """Return the elements that changed, as (before, after, key)."""
    every = ((before.get(key, _MISSING), after.get(key, _MISSING), key) for key in dict.fromkeys((*before, *after)))
    return [each for each in every if not _same(each[0], each[1])]


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, tuple) and isinstance(after, tuple):
        return len(before) == len(after) and all(map(_same, before, after))
    plain = isinstance(before, bool | int | float | str | bytes) and type(before) is type(after)
    if isinstance(before, _Counter):
        return plain and int(before) == int(after)
    return before is after or (plain and bool(before == after))


def check_tensors(changed: Sequence[Assigned], constants: Mapping[str, Any]) -> None:
    """Refuse a tensor that the forward reads, and assigns anew.

    Raises:
        GraphparError: there is one.
    """
    for each in changed:
        if each.is_tensor and any(each.before is value for value in constants.values()):
            raise GraphparError(
                f"The model assigns its attribute {each} in the forward, and computes with it: a program would begin each step with the "
                f"value that it had when it was traced. {_HOW}."
            )


@contextlib.contextmanager
def _a_step_later(changed: Sequence[Assigned]) -> Iterator[None]:
    """Set attributes and elements to what the forward left in them, with other tensors in the place of those of the trace."""
    containers = [_own(each.module)[each.name] for each in changed if each.key is not _MISSING]
    held = [(container, _elements(container) or {}) for container in containers]
    with attributes_kept(each.module for each in changed):
        for each in changed:
            after = tree_map(
                lambda leaf: torch.zeros((), dtype=leaf.dtype) if isinstance(leaf, FakeTensor) else leaf, each.after
            )
            if type(each.before) is int and type(after) is int:
                after = _Counter(after)
            if each.key is _MISSING:
                _assign(each.module, each.name, after)
            else:
                container = _own(each.module)[each.name]
                elements = _elements(container) or {}
                _replace(elements, each.key, after)
                _put(container, elements)
        try:
            yield
        finally:
            for container, elements in held:
                _put(container, elements)


def _replace(values: dict[Any, Any], key: Any, value: Any) -> None:
    if value is _MISSING:
        values.pop(key, None)
    else:
        values[key] = value


class _Counter(int):
    """A number that the forward changes in each step; it notes whether it is compared with anything, as a later step may find otherwise."""

    compared = False

    def _counted(self, value: Any) -> Any:
        found = _Counter(value) if type(value) is int else value
        if isinstance(found, _Counter):
            found.compared = self.compared
        return found

    def __add__(self, other: Any) -> Any:
        return self._counted(int.__add__(self, other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._counted(int.__sub__(self, other))

    __hash__ = int.__hash__


def _comparing(name: str) -> Callable[..., Any]:
    def compared(self: _Counter, *others: Any) -> Any:
        self.compared = True
        return getattr(int, name)(self, *others)

    return compared


_COMPARES = (
    operator.eq,
    operator.ne,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
    operator.mod,
    operator.floordiv,
)
for _name in ("bool", *(function.__name__ for function in _COMPARES)):
    setattr(_Counter, f"__{_name}__", _comparing(f"__{_name}__"))


def check_same(
    assigned: Sequence[Assigned],
    program: Program,
    trace: Callable[[], Program],
    state: Callable[[str], Tensor],
    now: Callable[[], Sequence[Assigned]],
) -> None:
    """Refuse what the forward assigns where the next step, which ``trace`` traces, computes something else, or a later one may.

    Args:
        state: gives the values of a parameter or buffer.
        now: what the last trace assigned.

    Raises:
        GraphparError: it is.
    """
    changed = [each for each in assigned if not each.is_tensor]
    if not changed:
        return
    later: Program | None = None
    with _a_step_later(changed), contextlib.suppress(Exception):  # what it fails at, the first step does not compute
        later = trace()
    if later is None or not (_spelled(program.graph) == _spelled(later.graph) or _is_same(program, later, state)):
        unknown = (each for each in changed if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(each.after)))
        first = next(unknown, changed[0])
        plain = all(isinstance(value, int | float) for value in (first.before, first.after))
        how = f" ({first.before} becomes {first.after})" if plain else ""
        raise GraphparError(
            f"The model assigns its attribute {first} in the forward{how}, and then computes something different{_line_of(first)}: a "
            f"program would compute each step like the first. {_HOW}."
        )
    for each in now():
        if isinstance(each.before, _Counter) and (each.before.compared or getattr(each.after, "compared", False)):
            raise GraphparError(
                f"The model counts in its attribute {each} and compares the count{_line_of(each)}: a later step may compute something "
                f"else, and a program computes each like the first. {_HOW}, and choose by torch.where."
            )


def _line_of(assigned: Assigned) -> str:
    """Return `` (model.py:12)``, the last line of the module's class that assigns the attribute or, where none does, names it."""
    with contextlib.suppress(OSError, TypeError, SyntaxError):
        lines, first = inspect.getsourcelines(type(assigned.module))
        found = [
            node
            for node in ast.walk(ast.parse(textwrap.dedent("".join(lines))))
            if isinstance(node, ast.Attribute) and node.attr == assigned.name
        ]
        stored = [node for node in found if isinstance(node.ctx, ast.Store)]
        if found:
            file = os.path.basename(inspect.getsourcefile(type(assigned.module)) or "")
            return f" ({file}:{first + max(node.lineno for node in stored or found) - 1})"
    return ""


def _is_same(program: Program, later: Program, state: Callable[[str], Tensor]) -> bool:
    """Whether the graph of the next step is that of the first, but for values that it kept, which are those that the first computes."""
    env: dict[fx.Node, Any] = {}

    def leaf(node: fx.Node) -> Any:
        name = str(node.target)
        if node.op == "placeholder":
            raise RuntimeProgramError("an input has other values in each step")
        if name in program.subgraphs:
            return program.subgraphs[name]
        return program.constants[name] if name in program.constants else state(name)

    def is_kept(mine: fx.Node, kept: Tensor) -> bool:
        try:
            value = computed(closure(program.graph, mine), leaf, env)
        except (RuntimeProgramError, RuntimeError):
            return False
        return isinstance(value, Tensor) and value.dtype == kept.dtype and torch.equal(value.cpu(), kept.cpu())

    ends = [*zip(_effects(program), _effects(later)), (program.graph.output_node(), later.graph.output_node())]
    if len(_effects(program)) != len(_effects(later)):
        return False
    pending, seen = list(ends), set[tuple[fx.Node, fx.Node]]()
    while pending:
        mine, other = pair = pending.pop()
        if pair in seen:
            continue
        seen.add(pair)
        if other.op == "get_attr" and str(other.target) in later.constants and mine.target != other.target:
            if not is_kept(mine, later.constants[str(other.target)]):
                return False
            continue
        if (mine.op, str(mine.target)) != (other.op, str(other.target)) or _form(mine) != _form(other):
            return False
        pending += zip(mine.all_input_nodes, other.all_input_nodes)
    return True


def _effects(program: Program) -> list[fx.Node]:
    """Return the operators that write, but to what neither inputs nor state are in."""
    state = program.parameters.keys() | program.buffers.keys()
    writing = [node for node in program.graph.nodes if _mutates(node)]
    return [
        node
        for node in writing
        if any(
            each.op == "placeholder" or (each.op == "get_attr" and str(each.target) in state)
            for each in closure(program.graph, node)
        )
    ]


def _form(node: fx.Node) -> tuple[str, int]:
    """Return a node's arguments, with places for other nodes, which each argument has once."""
    shown = fx.map_arg((node.args, dict(node.kwargs)), lambda used: _Place(node.all_input_nodes.index(used)))
    return str(shown), len(node.all_input_nodes)


class _Place(int):
    """A node in the text of an operator."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def _spelled(graph: fx.Graph) -> list[str]:
    return [f"{node.name} {node.op} {node.target} {node.args} {node.kwargs}" for node in graph.nodes]


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)


def written_buffers(program: Program) -> list[str]:
    """Return the buffers that operators write, or what was made of them: what follows by first operands counts."""
    names = []
    for node in program.graph.nodes:
        source: Any = node
        while isinstance(source, fx.Node) and source.op == "call_function":
            source = source.args[0] if source.args else None
        if _mutates(node) and isinstance(source, fx.Node) and str(source.target) in program.buffers:
            names.append(str(source.target))
    return names


def check_memory(program: Program, model: nn.Module) -> None:
    """Refuse a buffer that is written and shares memory with another tensor that is not the same as a whole.

    Raises:
        GraphparError: there is one.
    """
    written = written_buffers(program)
    if not written:
        return
    named = [*model.named_buffers(remove_duplicate=False), *model.named_parameters(remove_duplicate=False)]
    places = {name: (value.storage_offset(), value.shape, value.stride()) for name, value in named}
    memory = {name: value.untyped_storage()._cdata for name, value in named}
    for name in written:
        for other, place in places.items():
            if name in memory and memory[other] == memory[name] and place != places[name]:
                raise GraphparError(
                    f"The model writes the buffer {name!r} in place, which shares memory with {other!r}: a program stores each separately, "
                    "so the other would keep its value. Register one of them, and take the other from it in the forward."
                )
