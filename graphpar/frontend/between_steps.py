"""State that a model keeps between steps in other places than buffers, which a trace would fix at its first value.

self.count += 1; return x * self.count      a number that the forward assigns and reads: seen in a second trace, with its next value
self.scale = self.scale * 2                 a tensor that the forward assigns and reads
register_buffer("first", self.all[:4])      two buffers in one memory, of which one is written
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from graphpar.errors import GraphparError
from graphpar.ir.program import Program

_HOW = "Make it a buffer with register_buffer, and write to it in place (persistent=False leaves it out of checkpoints)"


@dataclass(frozen=True)
class Assigned:
    """An attribute of a module that a trace assigned."""

    module: nn.Module
    name: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.name!r} of {type(self.module).__name__}"


@contextlib.contextmanager
def noted(model: nn.Module, into: list[Assigned]) -> Iterator[None]:
    """Write to ``into`` which numbers and tensors among attributes of modules the block assigns; torch.export takes it back."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    yield
    into.clear()
    for module, attributes in before:
        for name, value in attributes.items():
            after = vars(module).get(name)
            if isinstance(value, Tensor):
                changed = isinstance(after, Tensor) and after is not value
            else:
                changed = isinstance(value, int | float) and type(after) is type(value) and bool(after != value)
            if changed and name != "training":
                into.append(Assigned(module, name, value, after))


def check_tensors(changed: Sequence[Assigned], constants: Mapping[str, Any]) -> None:
    """Refuse a tensor that the forward reads, and assigns anew.

    Raises:
        GraphparError: there is one.
    """
    for each in changed:
        if any(each.before is value for value in constants.values()):
            raise GraphparError(
                f"The model assigns its attribute {each} in the forward, and computes with it: a program would begin each step with the "
                f"value that it had when it was traced. {_HOW}."
            )


def numbers(changed: Sequence[Assigned]) -> list[Assigned]:
    """Return those that are numbers."""
    return [each for each in changed if not isinstance(each.before, Tensor)]


@contextlib.contextmanager
def a_step_later(changed: Sequence[Assigned]) -> Iterator[None]:
    """Set attributes to what the forward left in them."""
    for each in changed:
        setattr(each.module, each.name, each.after)
    try:
        yield
    finally:
        for each in changed:
            setattr(each.module, each.name, each.before)


def check_same(changed: Sequence[Assigned], program: Program, later: Program) -> None:
    """Refuse numbers that the forward assigns, where the next step is another program.

    Raises:
        GraphparError: it is.
    """
    if _spelled(program.graph) != _spelled(later.graph):
        raise GraphparError(
            f"The model assigns its attribute {changed[0]} in the forward ({changed[0].before} becomes {changed[0].after}), and computes "
            f"something else then: a program would compute each step as the first. {_HOW}."
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
