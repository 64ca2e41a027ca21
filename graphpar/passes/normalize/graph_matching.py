"""What passes ask of a node when they look for patterns, and how they put another operator in its place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.ir.program import Program, operator_name, value_of
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of


def is_call(node: Any, *names: str) -> bool:
    """Return whether ``node`` calls one of torch's operators ``names``."""
    return isinstance(node, fx.Node) and isinstance(node.target, torch._ops.OpOverload) and operator_name(node) in names


def number(value: Any) -> float | None:
    """Return a Python number that an operator takes; None for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


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
