"""Composite operators: functions of ``graphpar.emitted`` in the place of operators of torch, each with all that graphpar knows of it.

    swiglu(gate, up)                silu(gate) * up, wherever a model has it
    ring_attention(q, k, v, "cp")   scaled_dot_product_attention(q, k, v), where the ranks of an axis have shards of the sequence

A composite stands in the record of its operator (:class:`graphpar.operators.record.Record`). The search, prices, reports, the printer,
the proofs and ``check`` ask it, so that a new one is a file of ``graphpar.emitted`` and a record. What a function does on the axis that
it is given is declared where the function is, at the beginning of its docstring: ``query, key, value S(2) -> S(2): ...``.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from graphpar.operators.placement import Context, Placement, argument_place
from graphpar.runtime.axes import Divides
from graphpar.runtime.layout import Shard, Type, parse_type

Emit = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Make a call of a target with arguments and options: a node of a graph, or at once."""
Draw = Callable[..., Tensor]
"""``draw(2, 3)``: random numbers of this shape; ``draw(2, 3, below=5)``: whole ones."""
Sample = Callable[[Draw], tuple[tuple[Any, ...], dict[str, Any]]]
"""Arguments and options of a call."""


@dataclass
class LocalCall:
    """A call on one rank's arguments, which are read and written by name, however they were given."""

    node: fx.Node
    args: list[Any]
    kwargs: dict[str, Any]
    degrees: Mapping[str, int]
    target: Any = None
    axes: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by the rewrites that replace the call

    def get(self, name: str, default: Any = None) -> Any:
        """Return the argument ``name``."""
        place = argument_place(self.node, name)
        if place is not None and place < len(self.args):
            return self.args[place]
        return self.kwargs.get(name, default)

    def replace(self, target: Any, **options: Any) -> None:
        """Call ``target`` instead, on the same first operand and ``options``."""
        self.target, self.args, self.kwargs = target, [self.args[0], *options.values()], {}

    def set(self, name: str, value: Any) -> None:
        """Replace the argument ``name``."""
        place = argument_place(self.node, name)
        if place is not None and place < len(self.args):
            self.args[place] = value
        else:
            self.kwargs[name] = value


class Local(NamedTuple):
    """A rank's tensor: its sizes, which are numbers or :class:`~graphpar.operators.contractions.Size`, and the bytes of an element."""

    sizes: Sequence[Any]
    itemsize: int

    @property
    def elements(self) -> Any:
        """How many elements it has."""
        return math.prod(self.sizes[1:], start=self.sizes[0]) if self.sizes else 1

    @property
    def nbytes(self) -> Any:
        """Its bytes."""
        return self.elements * self.itemsize


class Message(NamedTuple):
    """``times`` collectives of a tensor of ``nbytes`` in all shards together, or sends of as many.

    ``beside``: while the rank computes one of ``degree`` equal steps of the operator.
    """

    collective: str
    nbytes: Any
    times: int = 1
    beside: bool = False


Messages = tuple[list[Message], list[Message]]
"""Forward and backward."""


@dataclass(frozen=True)
class Composite:
    """A function of ``graphpar.emitted``.

    Attributes:
        function: its operands that are tensors come first; ``axis`` (or ``axes``) is the axis of the mesh that it is given, if it is.
        parts: the same in operators of torch, on whole tensors: the function's arguments without the axis. Of a function that takes an axis
            but declares no types ``parts`` is its collectives and products: it has the axis, and ``collectives`` before all else.
        fuses: what a model writes as ``parts``, of tensors of one shape, becomes a call of the function.
        of: the operator of torch that becomes the function on shards, as ``placements`` say, by ``arguments``.
        placements: its placements on an axis, besides those that ``of`` has anyway.
        arguments: (a call of ``of``, the axes) -> the function's arguments and options.
        order: the place that each operand of the function has in ``of``, where that is another.
        sends: (node, the rank's operands, its result, degree) -> what goes over the axis; ``node`` for its options.
        divides: what an axis must divide for it.
        updates: it writes the same to buffers on all ranks.
        also: composites of the same ``of`` on other axes, whose work the function does as well.
        title: what a model has in its place, or what its collectives are called, for people.
        samples: arguments of ``of``, or of the function where there is none; of a function that takes an axis, those of one rank.
    """

    function: Callable[..., Any]
    parts: Callable[..., Any]
    fuses: bool = False
    of: Any = None
    placements: Callable[[fx.Node, Context], list[Placement]] | None = None
    arguments: Callable[[LocalCall, Sequence[str]], tuple[tuple[Any, ...], dict[str, Any]]] | None = None
    order: tuple[int, ...] = ()
    sends: Callable[[fx.Node, Sequence[Local], Local, int], Messages] | None = None
    divides: tuple[Divides, ...] = tuple(Divides)
    updates: bool = False
    also: tuple[str, ...] = ()
    title: str = ""
    samples: tuple[Sample, ...] = ()

    @property
    def composed(self) -> bool:
        """Whether ``parts`` has the collectives in it."""
        return bool(inspect.signature(self.function).parameters.keys() & {"axis", "axes"}) and not self.types

    @property
    def types(self) -> Types | None:
        """What the function does on its axis."""
        return declared_types(self.function)

    def sharded(self, arguments: Mapping[str, Any]) -> list[Any]:
        """Return those of the function's arguments that are sharded."""
        return (
            [] if self.types is None else [arguments[n] for n, k in self.types.operands.items() if isinstance(k, Shard)]
        )

    def ordered(self, operands: Sequence[Any]) -> list[Any]:
        """Put what belongs to the operands of ``of`` in the order of those of the function."""
        return [operands[place] for place in self.order] if self.order else list(operands)


class Types(NamedTuple):
    """The types of operands, by name, and of the result, on the axis that a function is given. Operands without a name are R or I."""

    operands: Mapping[str, Type]
    result: Type
    text: str


_TYPE = r"(?:[RIPE]|S\(\d+\))"
_OPERANDS = rf"\w+(?:, \w+)* {_TYPE}"
_DECLARED = re.compile(rf"({_OPERANDS}(?:, {_OPERANDS})*) -> ({_TYPE}):")


@cache
def declared_types(function: Callable[..., Any]) -> Types | None:
    """Parse what ``function`` declares at the beginning of its docstring; None where it declares no types."""
    found = _DECLARED.match(function.__doc__ or "")
    if found is None:
        return None
    operands: dict[str, Type] = {}
    for group in re.finditer(rf"(\w+(?:, \w+)*) ({_TYPE})", found[1]):
        operands |= dict.fromkeys(group[1].split(", "), parse_type(group[2]))
    return Types(operands, parse_type(found[2]), found[1])


def arguments_of(node: fx.Node) -> Mapping[str, Any]:
    """Return the arguments of a call of a function of ``graphpar.emitted`` by name; none for other nodes."""
    if isinstance(node.target, torch._ops.OpOverload) or not inspect.isfunction(node.target):
        return {}
    return inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments


def axes_of(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the axes among the arguments of a function."""
    axis = arguments.get("axis", arguments.get("axes", ()))
    return (axis,) if isinstance(axis, str) else tuple(axis)
