"""Patterns of operators, what passes ask of a node, and how they put another operator in its place.

X, EPS = Value("x"), Number("eps")
call("div", X, call("sqrt", call("add", X, EPS)))      x / sqrt(x + eps), with its operands in either order where that is the same
matches(pattern, node) ──► {"x": node, "eps": 1e-6}    one for each way in which it fits
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.ir.program import Program, operator_name, value_of
from graphpar.operators.batch import FILLED
from graphpar.operators.placement import literal
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of

_SWAPS = ("add", "mul")
"""Operators whose two operands may change places."""
_USUAL: dict[str, tuple[Any, ...]] = {"alpha": (1, None), "rounding_mode": (None,)}
"""Options with which an operator is another one: the values with which it is not; None is that of an operator without the option."""


@dataclass(frozen=True)
class Value:
    """Any tensor; wherever the name stands, the same one."""

    name: str


@dataclass(frozen=True)
class Number:
    """Any Python number."""

    name: str


@dataclass(frozen=True)
class Call:
    """A call of one of some operators or kinds of operators; see :func:`call`."""

    what: tuple[str | Kind, ...]
    operands: tuple[Pattern, ...]
    name: str
    options: tuple[tuple[str, Any], ...]


Pattern = Value | Number | Call | tuple[Any, ...] | float
"""What an argument may be; a tuple has patterns of which one fits, and a number is itself."""


def call(what: str | Kind, *operands: Pattern, name: str = "", **options: Any) -> Call:
    """Return the pattern of a call of an operator named in ``what``, such as ``"mul div"``, or of a kind; the node is known by ``name``.

    Args:
        operands: the first ones; others may be any.
        options: what arguments of these names must be.
    """
    return Call(tuple(what.split()) if isinstance(what, str) else (what,), operands, name, tuple(options.items()))


def matches(pattern: Pattern, value: Any, found: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Yield what the names of ``pattern`` stand for, in each way in which it fits ``value``; ``found``: names that are known."""
    found = found or {}
    if isinstance(pattern, tuple):
        for each in pattern:
            yield from matches(each, value, found)
    elif isinstance(pattern, Value):
        if isinstance(value, fx.Node) and found.get(pattern.name, value) is value:
            yield found | {pattern.name: value}
    elif isinstance(pattern, Call):
        if _is_called(pattern, value) and found.get(pattern.name, value) is value:
            known = found | {pattern.name: value} if pattern.name else found
            operands = value.args[: len(pattern.operands)]
            yield from _all(pattern.operands, operands, known)
            if operator_name(value) in _SWAPS and len(operands) == 2:
                yield from _all(pattern.operands, operands[::-1], known)
    elif (given := number(value)) is not None and (isinstance(pattern, Number) or given == pattern):
        yield found | ({pattern.name: given} if isinstance(pattern, Number) else {})


def _is_called(pattern: Call, node: Any) -> bool:
    if not isinstance(node, fx.Node) or node.op != "call_function" or len(node.args) < len(pattern.operands):
        return False
    name = operator_name(node)
    if name not in pattern.what and record_of(node).kind not in pattern.what:
        return False
    usual = all(literal(node, option) in values for option, values in _USUAL.items())
    return usual and all(literal(node, key) == expected for key, expected in pattern.options)


def _all(patterns: Sequence[Pattern], values: Sequence[Any], found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if not patterns:
        yield found
    for known in matches(patterns[0], values[0], found) if patterns else ():
        yield from _all(patterns[1:], values[1:], known)


def is_call(node: Any, *names: str) -> bool:
    """Return whether ``node`` calls one of torch's operators ``names``."""
    return isinstance(node, fx.Node) and isinstance(node.target, torch._ops.OpOverload) and operator_name(node) in names


def number(value: Any) -> float | None:
    """Return a Python number that an operator takes; None for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def filled(value: Any) -> float | None:
    """Return the number that ``value`` is, or that an operator fills a tensor with; None for anything else."""
    name = operator_name(value) if isinstance(value, fx.Node) and value.op == "call_function" else ""
    if name not in FILLED or "empty" in name:
        return number(value)
    named = {"zeros": 0.0, "ones": 1.0}.get(name.removeprefix("new_").removesuffix("_like"))
    return number(literal(value, "s" if name == "scalar_tensor" else "fill_value")) if named is None else named


def sizes(node: Any) -> list[int | str]:
    """Return the sizes of a tensor's dims, as text where they follow the batch: comparing symbols with numbers would fix the batch."""
    return comparable(value_of(node).shape)


def comparable(shape: Iterable[Any]) -> list[int | str]:
    """Return sizes such that comparing them fixes none."""
    texts = [str(size) for size in shape]
    return [int(text) if text.isdecimal() else text for text in texts]


def cast_from(node: fx.Node) -> fx.Node:
    """Return the value of which ``node`` is a copy in a wider dtype; ``node`` itself where it is none."""
    while node.op == "call_function" and record_of(node).kind is Kind.COPY:
        source = node.args[0]
        if not isinstance(source, fx.Node) or not _wider(value_of(node), value_of(source)):
            return node
        node = source
    return node


def _wider(made: Any, source: Any) -> bool:
    """Whether ``made`` has the values of ``source`` exactly."""
    if not (isinstance(made, Tensor) and isinstance(source, Tensor) and source.is_floating_point()):
        return False
    return torch.promote_types(made.dtype, source.dtype) == made.dtype


def follows_parameters(node: fx.Node, program: Program) -> bool:
    """Whether ``node`` is computed from a parameter, so that it may have a gradient."""
    below, seen = [node], {node}
    while below:
        current = below.pop()
        if current.op == "get_attr" and str(current.target) in program.parameters:
            return True
        below += [each for each in current.all_input_nodes if each not in seen]
        seen.update(current.all_input_nodes)
    return False


def insert_call(node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
    """Let a call of ``target`` take the place of ``node``, with its metadata; return the call."""
    while args and args[-1] is None:
        args = args[:-1]
    with node.graph.inserting_before(node):
        call = node.graph.call_function(target, args, kwargs or {})
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    return call


def insert_helper(node: fx.Node, target: Any, args: tuple[Any, ...], val: Any) -> fx.Node:
    """Insert a call of ``target`` before ``node``, from the same place in the user's code; ``val`` is its fake result."""
    with node.graph.inserting_before(node):
        call = node.graph.call_function(target, args)
    call.meta = {key: node.meta[key] for key in ("module_stack", "source") if key in node.meta} | {"val": val}
    return call
