"""Stages: the graphs that a program is split into, and the tensors that are sent between them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx


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
