"""Positions that a model counts, ``cumsum`` of a mask of ones, are numbers from the first on: an ``arange``.

    ones [b, s] ──► cumsum ──► * mask - 1        arange(1, length + 1) ──► window ──► expand ──► * mask - 1

Nothing is known by name: a tensor whose values follow from constants and sizes alone, and are ``start``, ``start + 1``, .. along the
positions in all lengths that are tried, is that. Such a tensor can be computed for a window of positions; a sum over those before can't.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

import torch
from torch import Tensor, fx

from graphpar.emitted import kv_cache
from graphpar.ir.batch_sizes import batch_dims_of, is_size, size_factor
from graphpar.ir.program import Program, batch_coefficients, value_of
from graphpar.operators.batch import Coupled
from graphpar.passes.normalize.causal_masks import Masks
from graphpar.passes.normalize.graph_matching import insert_helper

_aten = torch.ops.aten


def count_positions(graph: fx.Graph, program: Program, couplings: Iterable[Coupled]) -> None:
    """Replace what counts positions, in place.

    Args:
        couplings: the operators that mix positions.
    """
    masks = Masks(program.with_graph(graph))
    for node in [coupled.node for coupled in couplings if coupled.node is not None]:
        if (start := _start(node, masks)) is not None:
            _replace(node, start, program)


def _start(node: fx.Node, masks: Masks) -> int | None:
    """Return the number of the first position, where ``node`` numbers them."""
    dims = batch_dims_of(node) if isinstance(value_of(node), Tensor) else []
    if len(dims) != 1 or batch_coefficients(node)[dims[0]] != 1 or value_of(node).is_complex():
        return None
    start: int | None = None
    for length, value in masks.values(node):
        if not isinstance(value, Tensor) or value.numel() == 0 or value.shape[dims[0]] != length:
            return None
        first = float(value.flatten()[0])
        if not first.is_integer() or start not in (None, int(first)):
            return None
        start = int(first)
        numbers = torch.arange(start, start + length, dtype=torch.float64)
        if not bool((value.movedim(dims[0], -1).double() == numbers).all()):
            return None
    return start


def _replace(node: fx.Node, start: int, program: Program) -> None:
    """Let a window of an arange take the place of ``node``."""
    value, (dim,) = value_of(node), batch_dims_of(node)
    length, size = program.batch, _size(node, program)
    numbers = insert_helper(node, _aten.arange.start, (start, start + length), value.new_empty(length))
    numbers.kwargs = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    made = insert_helper(node, kv_cache.window, (numbers, 0, size), value.new_empty(value.shape[dim]))
    for _ in range(dim + 1, value.ndim):
        made = insert_helper(node, _aten.unsqueeze.default, (made, -1), value_of(made).unsqueeze(-1))
    if value.ndim > 1:
        others = [-1 if place == dim else size for place, size in enumerate(value.shape)]
        made = insert_helper(node, _aten.expand.default, (made, others), value_of(made).expand(others))
    node.replace_all_uses_with(made)


def _size(node: fx.Node, program: Program) -> fx.Node:
    """Return the number of positions of the window, as a node before ``node``."""
    before = takewhile(lambda each: each is not node, node.graph.nodes)
    sizes: list[fx.Node] = [each for each in before if is_size(each) and size_factor(each) == 1]
    if sizes:
        return sizes[0]
    tokens = next(each for each in node.graph.nodes if each.op == "placeholder")
    dim = program.inputs[0].batch_dim
    assert dim is not None
    return insert_helper(node, _aten.sym_size.int, (tokens, dim), value_of(tokens).shape[dim])
