"""``with_rows``: products of a sequence whose rows were flattened, as those of ``Conv1D``, become products of the sequence itself.

    flat = x.flatten(0, 1)                          [b, s, d] -> [b * s, d]
    y = addmm(bias, flat, weight)
    y = y.unflatten(0, (-1, s))                     y = F.linear(x, weight.mT, bias)

and a reduce-scatter of every s rows in dim 0, between product and bias, becomes one in dim 1. Then the collectives before and after a
product are of a dim, as those of ``nn.Linear`` are, and one function can do both (:mod:`graphpar.passes.parallel_products`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from graphpar.emitted import collectives
from graphpar.frontend.fixed_size import TWIN
from graphpar.ir.program import Program, operator_name, value_of
from graphpar.ir.sharding import Sharding
from graphpar.operators.parallel_products import is_parameter
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.normalize.graph_matching import sizes
from graphpar.passes.normalize.simplify import remove_dead_code
from graphpar.runtime.layout import Shard

_aten = torch.ops.aten
_ALIKE = (collectives.sum_gradient, collectives.all_reduce)


def with_rows(program: Program, sharding: Sharding) -> Program:
    """Rewrite the program of a rank in place, where its tensors are placed on axes."""
    for graph in (program.graph, *(block.graph for block in program.blocks.values())) if sharding.degrees else ():
        _keep_rows(graph, sharding.all_degrees)
    return program


def _keep_rows(graph: fx.Graph, degrees: Mapping[str, int]) -> None:
    wide: dict[fx.Node, fx.Node] = {}  # from a flattened value to it with its dims
    for node in list(graph.nodes):
        found = _of_rows(graph, node, wide, degrees)
        if found is not None:
            with graph.inserting_before(node):
                flat = graph.call_function(_aten.flatten.using_ints, (found, 0, 1))
            flat.meta = {key: item for key, item in node.meta.items() if key != "transition"}
            node.replace_all_uses_with(flat)
            graph.erase_node(node)
            wide[flat] = found
        elif _is_reshape(node) and node.args[0] in wide and sizes(node) == sizes(wide[node.args[0]]):  # type: ignore[index]
            node.replace_all_uses_with(wide[node.args[0]])  # type: ignore[index]
        elif _is_reshape(node) and _flattens(node):
            wide[node] = node.all_input_nodes[0]
    remove_dead_code(graph)


def _is_reshape(node: fx.Node) -> bool:
    return node.op == "call_function" and record_of(node).kind is Kind.RESHAPE and isinstance(node.args[0], fx.Node)


def _flattens(node: fx.Node) -> bool:
    before, after = sizes(node.args[0]), sizes(node)
    known = len(before) == 3 and isinstance(before[1], int)  # not the positions of a window
    return known and len(after) == 2 and before[-1] == after[-1]


def _of_rows(
    graph: fx.Graph, node: fx.Node, wide: Mapping[fx.Node, fx.Node], degrees: Mapping[str, int]
) -> fx.Node | None:
    """Return what computes the rows of ``node``, with their dims; None where it does not compute rows of what is in ``wide``."""
    operands = [item for item in node.args if isinstance(item, fx.Node)]
    name = operator_name(node) if node.op == "call_function" else ""
    with graph.inserting_before(node):
        if name in ("mm", "addmm") and not node.kwargs and operands[-2] in wide and is_parameter(operands[-1]):
            *bias, flat, weight = operands
            if not all(is_parameter(item) and value_of(item).ndim == 1 for item in bias):
                return None
            turned = graph.call_function(_aten.t.default, (weight,))
            turned.meta = {key: item for key, item in node.meta.items() if key in ("module_stack", "source", "origin")}
            turned.meta["val"] = value_of(weight).t()
            product = graph.call_function(_aten.linear.default, (wide[flat], turned, *bias))
            return _with_metadata(product, node, wide[flat])
        if not operands or operands[0] not in wide:
            return None
        source = wide[operands[0]]
        if node.target in _ALIKE:
            made = graph.call_function(node.target, (source, *node.args[1:]))  # type: ignore[arg-type]
            return _with_metadata(made, node, source)
        if name == "add" and not node.kwargs and len(operands) == 2 and value_of(operands[1]).ndim == 1:
            made = graph.call_function(_aten.add.Tensor, (source, operands[1]))
            return _with_metadata(made, node, source)
        if node.target is collectives.reduce_scatter and dict(node.kwargs) == {"dim": 0, "parts": (sizes(source)[1],)}:
            made = graph.call_function(collectives.reduce_scatter, (source, node.args[1]), {"dim": 1})
            return _with_metadata(made, node, source, degrees[str(node.args[1])])
    return None


def _with_metadata(made: fx.Node, flat: fx.Node, source: fx.Node, divided: int = 1) -> fx.Node:
    """Give ``made`` the metadata of ``flat``, whose rows it has as ``source`` has them, ``divided`` over ranks."""
    first, second = value_of(source).shape[:2]
    made.meta = {
        key: item for key, item in flat.meta.items() if key not in ("val", "batch_coefficients", "model_output", TWIN)
    }
    made.meta["val"] = value_of(flat).new_empty((first, int(second) // divided, value_of(flat).shape[-1]))
    if "batch_coefficients" in source.meta:
        made.meta["batch_coefficients"] = (*source.meta["batch_coefficients"][:2], None)
    if "types" in flat.meta:
        made.meta["types"] = {axis: _unflattened(kind) for axis, kind in flat.meta["types"].items()}
    if "transition" in flat.meta:
        rows = str(Shard(0, (int(second),)))
        made.meta["transition"] = tuple(str(Shard(1)) if text == rows else text for text in flat.meta["transition"])
    return made


def _unflattened(kind: Any) -> Any:
    """Return the type of [b, s, d] whose rows [b * s, d] have the type ``kind``."""
    if not isinstance(kind, Shard):
        return kind
    return Shard(2, kind.parts) if kind.dim == 1 else Shard(1 if kind.parts else 0)
