"""For a trace at a fixed batch size: find what depends on the batch by comparing with a trace at another size.

6 rows:  view(x, [6, 4, 8])   div(s, 6)          7 rows:  view(x, [7, 4, 8])   div(s, 7)
         dim 0 is 1 * batch   the number is 1 * batch
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram

from graphpar.ir.batch_sizes import integer_arguments, is_unknown, scalar_arguments

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
