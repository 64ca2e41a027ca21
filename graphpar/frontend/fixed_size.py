"""For a trace at a fixed batch size: find what depends on the batch by comparing with a trace at another size.

6 rows:  view(x, [6, 4, 8])   div(s, 6)          7 rows:  view(x, [7, 4, 8])   div(s, 7)
         dim 0 is 1 * batch   the number is 1 * batch

Where the code has the 6 itself, as in ``x.view(6, -1)``, the trace at 7 rows takes a 7. Whether rows are independent then is found
out from the graph, as ever; and since the program of 6 rows is the model, a guess that was wrong is refused and never computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram

from graphpar.frontend.trace_guards import FunctionMode
from graphpar.ir.batch_sizes import integer_arguments, is_unknown, scalar_arguments
from graphpar.ir.source import stack_line
from graphpar.operators.record import Kind
from graphpar.operators.table import record_named

NUMBERS = "batch_numbers"  # node metadata: {argument: c} for numbers that are c * batch
TWIN = "twin"  # node metadata: the node's value in the other trace, from which those of new nodes follow


@dataclass(frozen=True)
class Twin:
    """A node's value in the trace at the other batch size, with both sizes."""

    value: Tensor
    size: int
    other_size: int


def mark_batch(exported: ExportedProgram, other: ExportedProgram, size: int, other_size: int) -> str | None:
    """Set ``batch_coefficients`` (and ``NUMBERS``) on ``exported``'s nodes; return why the batch can't be split, if it can't."""
    nodes, others = list(_nodes(exported.graph_module)), list(_nodes(other.graph_module))
    if [str(n.target) for n in nodes if n.op == "call_function"] != [
        str(n.target) for n in others if n.op == "call_function"
    ]:
        return f"its operators differ between {size} and {other_size} rows"
    reason = _differing_constant(exported, other, size, other_size)
    for node, twin in zip(nodes, others):
        value, moved = node.meta.get("val"), twin.meta.get("val")
        if isinstance(value, Tensor) and isinstance(moved, Tensor):
            coefficients = coefficients_of(value, moved, size, other_size)
            node.meta["batch_coefficients"] = tuple(c or None for c in coefficients)
            node.meta[TWIN] = Twin(moved, size, other_size)
            if None in coefficients:
                reason = reason or (
                    f"{node.name} has the shape {tuple(value.shape)} for a batch of {size} and {tuple(moved.shape)} for {other_size}"
                )
        reason = reason or _mark_numbers(node, twin, size, other_size, node.graph is exported.graph)
    return reason


def _nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield all nodes, with those of no_grad and autocast regions."""
    yield from module.graph.nodes
    for _, child in module.named_children():
        if isinstance(child, fx.GraphModule):
            yield from _nodes(child)


def coefficients_of(value: Tensor, moved: Tensor, size: int, other_size: int) -> list[int | None]:
    """For each dim: ``c`` where its size is ``c`` times the batch, 0 where it is fixed, None where it is neither."""
    return [
        0 if is_unknown(a) or is_unknown(b) else _coefficient(int(a), int(b), size, other_size)
        for a, b in zip(value.shape, moved.shape)
    ]


def _coefficient(here: int, there: int, size: int, other_size: int) -> int | None:
    """``c`` where the two are ``c`` times the batch, 0 where they are the same, None where they are neither."""
    step, rest = divmod(there - here, other_size - size)
    return step if rest == 0 and (step == 0 or here == step * size) else None


def _mark_numbers(node: fx.Node, twin: fx.Node, size: int, other_size: int, outside: bool) -> str | None:
    numbers: dict[int | str, int] = {}
    for (place, kind, here), (_, _, there) in zip(scalar_arguments(node), scalar_arguments(twin)):
        if kind == "size" or isinstance(here, fx.Node) or isinstance(there, fx.Node) or here == there:
            continue
        factor = round(here / size)
        if not outside or factor == 0 or here != factor * size or there != factor * other_size:
            return f"{node.target} takes the number {here} for a batch of {size} and {there} for {other_size}"
        numbers[place] = factor
    made_of_none = not any(isinstance(argument.meta.get("val"), Tensor) for argument in node.all_input_nodes)
    pairs = [] if made_of_none else zip(integer_arguments(node), integer_arguments(twin))  # its shape shows the batch
    for (name, here), (_, there) in pairs:
        if isinstance(here, int) and isinstance(there, int) and here != there:
            return f"{node.target} takes {name}={here} for a batch of {size} and {there} for {other_size}"
    node.meta.pop(NUMBERS, None)  # of another attempt
    if numbers:
        node.meta[NUMBERS] = numbers
    return None


def _differing_constant(exported: ExportedProgram, other: ExportedProgram, size: int, other_size: int) -> str | None:
    for name, here in exported.constants.items():
        there = other.constants.get(name)
        if _known(here) is not None and _known(there) is not None and not torch.equal(_known(here), _known(there)):  # type: ignore[arg-type]
            return f"the constant {name!r} differs between {size} and {other_size} rows"
    return None


def _known(value: Any) -> Tensor | None:
    return value.constant if isinstance(value, FakeTensor) else value if isinstance(value, Tensor) else None


# ---- sizes in the code -------------------------------------------------------------------------------------------

_WORDS = ("size", "shape", "repeats")
"""What torch's functions call the argument that has sizes."""


@cache
def _sized(name: str) -> Kind | None:
    """Return the kind of a function whose first arguments, after the tensor it is a method of, are sizes; None for others."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = (
        [getattr(packet, each) for each in packet.overloads()]
        if isinstance(packet, torch._ops.OpOverloadPacket)
        else []
    )
    takes = any(argument.name in _WORDS for each in overloads for argument in each._schema.arguments)
    kind = record_named(name).kind
    if name == "repeat" or name.startswith("rand"):
        kind = Kind.EXPAND if name == "repeat" else Kind.FACTORY
    return kind if takes and kind in (Kind.RESHAPE, Kind.EXPAND, Kind.FACTORY) else None


@dataclass(frozen=True)
class _Call:
    """A call that takes sizes, in the trace of the example."""

    name: str
    kind: Kind
    shape: tuple[Any, ...]  # of the tensor that it is a method of
    sizes: tuple[Any, ...]


@dataclass
class LiteralSizes:
    """Which sizes in the model's code mean the rows of a batch.

    Attributes:
        followed: the kinds of functions whose sizes follow the batch, where the example's rows stand in the code.
        place: the line of the first such call, and what it says; None where there is none.
        others: the trace had such sizes in calls of other kinds.
    """

    example: int
    followed: tuple[Kind, ...] = ()
    place: str | None = None
    others: bool = False
    calls: list[_Call] = field(default_factory=list)

    def traced(self, size: int) -> FunctionMode:
        """Return what a trace at ``size`` rows runs under: that of the example notes its calls, any other follows them."""
        if size != self.example:
            return _Follows(self, size)
        self.calls = []
        return _Notes(self)

    def attempts(self) -> Iterator[None]:
        """Let ever more sizes follow the batch, as long as that changes a trace; last, none."""
        self.followed, self.place, self.others = (Kind.RESHAPE,), None, False
        yield
        if self.others:
            self.followed, self.place = (Kind.RESHAPE, Kind.EXPAND, Kind.FACTORY), None
            yield
        if self.place is not None:
            self.followed, self.place = (), None
            yield


class _Notes(FunctionMode):
    def __init__(self, literals: LiteralSizes) -> None:
        super().__init__()
        self.literals = literals

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Note a call that takes sizes."""
        if (found := _sizes_of(function, args, options)) is not None:
            self.literals.calls.append(found[0])
        return function(*args, **options)


class _Follows(FunctionMode):
    def __init__(self, literals: LiteralSizes, size: int) -> None:
        super().__init__()
        self.literals, self.size = literals, size
        self.calls = iter(literals.calls)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call ``function`` with this trace's rows where the same call of the example has the example's as a literal."""
        if (found := _sizes_of(function, args, options)) is None:
            return function(*args, **options)
        here, replaced = found
        there = next(self.calls, None)
        if there is None or there.name != here.name or len(there.sizes) != len(here.sizes):
            self.calls = iter(())  # this trace does something else
        elif there.sizes == here.sizes and (dim := _dim_of_rows(there, here, self.literals.example)) is not None:
            if here.kind not in self.literals.followed:
                self.literals.others = True
            else:
                sizes = list(here.sizes)
                sizes[dim] = sizes[dim] // self.literals.example * self.size
                text = ", ".join(map(str, here.sizes))
                self.literals.place = self.literals.place or f"{here.name}({text}) at {stack_line()}"
                args, options = replaced(tuple(sizes))
        return function(*args, **options)


def _sizes_of(
    function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[_Call, Callable[[tuple[Any, ...]], tuple[tuple[Any, ...], dict[str, Any]]]] | None:
    """Return a call's sizes, and how to call with others; None for a call that takes none."""
    name = getattr(function, "__name__", "")
    if (kind := _sized(name)) is None:
        return None
    first = 1 if args and isinstance(args[0], Tensor) else 0
    shape = tuple(args[0].shape) if first else ()
    rest = args[first:]
    word = next((each for each in _WORDS if each in options), None)
    if word is not None:
        sizes = options[word]
        return (
            (_Call(name, kind, shape, tuple(sizes)), lambda new: (args, {**options, word: new}))
            if _are_sizes(sizes)
            else None
        )
    if rest and isinstance(rest[0], Sequence):
        if not _are_sizes(rest[0]):
            return None
        return _Call(name, kind, shape, tuple(rest[0])), lambda new: ((*args[:first], new, *rest[1:]), options)
    return (
        (_Call(name, kind, shape, rest), lambda new: ((*args[:first], *new), options))
        if rest and _are_sizes(rest)
        else None
    )


def _are_sizes(sizes: Any) -> bool:
    return isinstance(sizes, Sequence) and all(type(size) is int for size in sizes)


def _dim_of_rows(there: _Call, here: _Call, example: int) -> int | None:
    """Return the dim of ``sizes``, the same in both calls, that means the rows of ``example``; None where none does."""
    if here.kind is not Kind.RESHAPE:
        return next((dim for dim, size in enumerate(here.sizes) if size == example), None)
    if not _are_sizes(there.shape) or not _are_sizes(here.shape):
        return None
    follows = next((dim for dim, (a, b) in enumerate(zip(there.shape, here.shape)) if a != b), None)
    if follows is None:
        return None
    outer, product = math.prod(there.shape[:follows]), 1
    for dim, size in enumerate(here.sizes):  # rows go where the sizes before hold what the dims before them do
        if size < 0 or product * size > outer:
            return dim if size > 0 and size % example == 0 else None
        product *= size
    return None
