"""Separate biases while operators are sharded: ``linear(x, w, b)`` becomes ``linear(x, w) + b``.

The product of a row-parallel linear is partial; its bias must be added once, after the all-reduce. ``with_biases`` fuses them again
where no transition came between.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from graphpar.ir.program import Program, operator_name, value_of
from graphpar.passes.normalize.functional import infer

_aten = torch.ops.aten
_OWNER = "bias_of"


def separate_biases(program: Program) -> Program:
    """Split each ``linear`` and ``addmm`` with a bias into a product and a sum."""
    blocks = {name: replace(block, graph=_separated(block.graph)) for name, block in program.blocks.items()}
    return program.with_graph(_separated(program.graph), blocks=blocks)


def _separated(source: fx.Graph) -> fx.Graph:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in source.nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
        copy = env[node]
        name = operator_name(copy)
        if name == "linear" and len(copy.args) > 2 and isinstance(copy.args[2], fx.Node):
            env[node] = _with_sum(graph, node, copy, _aten.linear.default, copy.args[:2], copy.args[2])
        elif name == "addmm" and not copy.kwargs and value_of(copy.args[0]).ndim == 1:  # type: ignore[arg-type]
            env[node] = _with_sum(graph, node, copy, _aten.mm.default, copy.args[1:], copy.args[0])
    return graph


def _with_sum(
    graph: fx.Graph, node: fx.Node, copy: fx.Node, product: object, args: tuple[object, ...], bias: object
) -> fx.Node:
    copy.target, copy.args = product, args  # type: ignore[assignment]
    added = infer(graph.call_function(_aten.add.Tensor, (copy, bias)), node, same=True)  # type: ignore[arg-type]
    copy.meta.pop("model_output", None)
    added.meta = dict(node.meta) | {"val": added.meta["val"], _OWNER: operator_name(node)}
    return added


def with_biases(program: Program) -> Program:
    """Fuse products and biases again, in place, where nothing came between."""
    for graph in (program.graph, *(block.graph for block in program.blocks.values())):
        _join(graph)
    return program


def _join(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        owner = node.meta.get(_OWNER)
        if owner is None:
            continue
        product, bias = node.args
        assert isinstance(product, fx.Node)
        if operator_name(product) not in ("linear", "mm") or len(product.users) != 1:
            continue
        if owner == "linear":
            node.target, node.args = _aten.linear.default, (*product.args, bias)
        else:
            node.target, node.args = _aten.addmm.default, (bias, *product.args)
        graph.erase_node(product)
