"""Stages: the graphs that a program is split into, and the tensors that are sent between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, fx

from graphpar.ir.batch_sizes import batch_coefficients
from graphpar.ir.program import value_of


@dataclass(frozen=True)
class Boundary:
    """A value that one stage sends to the next."""

    name: str
    node: fx.Node  # in the root graph
    requires_grad: bool


@dataclass
class Stage:
    """One stage: its graph (placeholders: received values, then inputs, then loss denominators) and what belongs to it."""

    index: int
    graph: fx.Graph
    receives: tuple[Boundary, ...]
    sends: tuple[Boundary, ...]
    inputs: tuple[str, ...]
    counts: tuple[str, ...]
    attributes: tuple[str, ...]  # parameters, buffers and constants, by name
    modules: tuple[str, ...]
    recomputed: tuple[str, ...]  # values that other stages compute too
    units: tuple[tuple[str, ...], ...] | None = None  # paths of modules that are gathered together; None: each block
    evaluated: Stage | None = None  # what it is in evaluation, where the model is another program then
    at_lengths: Mapping[int, Stage] = field(default_factory=dict)  # what it is at other lengths of the sequence


def told_apart_by(graphs: Sequence[fx.Graph]) -> tuple[int, int | None] | None:
    """Return by which input, and which dim of it, a class tells which of ``graphs``, of sequences of as many lengths, is meant; without a
    dim: by a number. None: by none."""
    inputs = ([node for node in graph.nodes if node.op == "placeholder"] for graph in graphs)
    for place, nodes in enumerate(zip(*inputs)):
        values = [value_of(node) for node in nodes]
        if all(isinstance(value, int) for value in values) and len(set(values)) == len(graphs):
            return place, None
        if all(isinstance(value, Tensor) for value in values) and len({value.ndim for value in values}) == 1:
            for dim, sizes in enumerate(zip(*(value.shape for value in values))):
                of_batch = any(batch_coefficients(node)[dim] is not None for node in nodes)
                if not of_batch and len({int(size) for size in sizes}) == len(graphs):
                    return place, dim
    return None
