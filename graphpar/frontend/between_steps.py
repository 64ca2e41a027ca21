"""State that a model keeps between steps in other places than buffers, which a trace would fix at its first value.

self.count += 1; return x * self.count      what the forward assigns and reads: seen in a second trace, which begins with it
self.scale = self.scale * 2                 a tensor that the forward assigns and reads
self.past[0] = x                            an element of a list or dict, or an attribute of an object, likewise
register_buffer("first", self.all[:4])      two buffers in one memory, of which one is written
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from graphpar.errors import GraphparError
from graphpar.ir.program import Program

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
def noted(model: nn.Module, into: list[Assigned]) -> Iterator[None]:
    """Write to ``into`` which attributes of modules the block assigns, and which elements of lists, dicts and objects in them.

    Elements are put back at its end, where they changed; attributes are by :func:`attributes_kept`.
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
            after = tree_map(_stand_in, each.after)
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


def _stand_in(value: Any) -> Any:
    return torch.zeros((), dtype=value.dtype) if isinstance(value, Tensor) else value


def check_same(assigned: Sequence[Assigned], program: Program, trace: Callable[[], Program]) -> None:
    """Refuse what the forward assigns where the next step, which ``trace`` traces, is another program.

    Raises:
        GraphparError: it is.
    """
    changed = [each for each in assigned if not each.is_tensor]
    if not changed:
        return
    later: Program | None = None
    with _a_step_later(changed), contextlib.suppress(Exception):  # what it fails at, the first step does not compute
        later = trace()
    if later is None or _spelled(program.graph) != _spelled(later.graph):
        first = changed[0]
        plain = all(isinstance(value, int | float) for value in (first.before, first.after))
        how = f" ({first.before} becomes {first.after})" if plain else ""
        raise GraphparError(
            f"The model assigns its attribute {first} in the forward{how}, and computes something else then: a program would compute "
            f"each step as the first. {_HOW}."
        )


def _spelled(graph: fx.Graph) -> list[str]:
    return [f"{node.name} {node.op} {node.target} {node.args} {node.kwargs}" for node in graph.nodes]


def _written(program: Program) -> list[str]:
    """Return the buffers that operators write, or what was made of them: what follows by first operands counts."""
    names = []
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        source: Any = node
        while isinstance(source, fx.Node) and source.op == "call_function":
            source = source.args[0] if source.args else None
        mutable = node.op == "call_function" and schema is not None and schema.is_mutable
        if mutable and isinstance(source, fx.Node) and str(source.target) in program.buffers:
            names.append(str(source.target))
    return names


def check_memory(program: Program, model: nn.Module) -> None:
    """Refuse a buffer that is written and shares memory with another tensor that is not the same as a whole.

    Raises:
        GraphparError: there is one.
    """
    written = _written(program)
    if not written:
        return
    named = [*model.named_buffers(remove_duplicate=False), *model.named_parameters(remove_duplicate=False)]
    places = {name: (value.storage_offset(), value.shape, value.stride()) for name, value in named}
    memory = {name: value.untyped_storage()._cdata for name, value in named}
    for name in written:
        for other, place in places.items():
            if name in memory and memory[other] == memory[name] and place != places[name]:
                raise GraphparError(
                    f"The model writes the buffer {name!r} in place, which shares memory with {other!r}: a program has each of them by "
                    "itself, so the other would keep its value. Register one of them, and take the other from it in the forward."
                )
