"""The program on the rows of all replicas at once, where examples depend on each other.

    a replica's program, images [b, 3, 224, 224]  ──widened by 4──►  images [4 b, 3, 224, 224], of which a replica has S(0)

``b`` stays the number of a replica's rows. A trace at a fixed batch has its sizes as literals, so there the program is traced again
at the rows of all replicas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.ir.batch_sizes import batch_coefficients
from graphpar.ir.program import Program, value_of
from graphpar.runtime.axes import AXIS


def _replicas(degrees: Mapping[str, int]) -> int:
    return math.prod(degree for axis, degree in degrees.items() if AXIS[axis].replicas)


def of_a_replica(program: Program, rows: int, degrees: Mapping[str, int]) -> Program:
    """Return ``program`` for the ``rows`` of a replica, or of all replicas where it can be traced with these only.

    Raises:
        GraphparError: with so many rows it traces to another program.
    """
    all_rows = program.of_one_size and program.batch == rows * _replicas(degrees)
    return program if all_rows else program.at_batch(rows)


def with_all_rows(program: Program, degrees: Mapping[str, int]) -> Program:
    """Trace a ``program`` of a fixed batch at the rows of all replicas of ``degrees``; return others unchanged.

    Raises:
        GraphparError: with so many rows it traces to another program.
    """
    times = _replicas(degrees)
    fits = times == 1 or program.symbolic or program.of_one_size
    return program if fits else program.at_batch(program.batch * times)


def widened(program: Program, degrees: Mapping[str, int]) -> Program:
    """Give every value of ``program`` the rows of all replicas of ``degrees``.

    A program of a fixed batch must come from :func:`with_all_rows`.
    """
    times = _replicas(degrees)
    if times == 1:
        return program
    symbolic = program.symbolic
    blocks = {
        name: replace(block, graph=_graph(block.graph, times, symbolic)) for name, block in program.blocks.items()
    }
    batch = program.batch if symbolic else program.batch // times
    return program.with_graph(_graph(program.graph, times, symbolic), blocks=blocks, batch=batch)


def _graph(source: fx.Graph, times: int, symbolic: bool) -> fx.Graph:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(source, copies))
    for old, new in copies.items():
        new.meta = dict(old.meta)
        if symbolic and "val" in old.meta:
            new.meta["val"] = _value(value_of(old), times)
        if "batch_coefficients" in old.meta:
            new.meta["batch_coefficients"] = tuple(None if c is None else c * times for c in batch_coefficients(old))
        if "batch_factor" in old.meta:
            new.meta["batch_factor"] = old.meta["batch_factor"] * times
    return graph


def _value(value: Any, times: int) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_value(part, times) for part in value)
    if isinstance(value, Tensor):
        shape = [_wider(size, times) for size in value.shape]
        return value if shape == list(value.shape) else value.new_empty(shape)
    return _wider(value, times)


def _wider(size: Any, times: int) -> Any:
    """Return a size, or a number made of sizes, for a batch that is ``times`` as large."""
    if not isinstance(size, torch.SymInt):
        return size
    expression = size.node.expr
    symbols = [symbol for symbol in expression.free_symbols if not str(symbol).startswith("u")]
    changed = expression.subs({symbol: times * symbol for symbol in symbols}, simultaneous=True)
    environment = size.node.shape_env
    hint = size.node.hint * times if size.node.has_hint() else None
    return environment.create_symintnode(changed, hint=hint) if symbols else size
