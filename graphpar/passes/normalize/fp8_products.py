"""``round_products``: linear layers that are chosen multiply in 8 bits.

    linear(x, up.weight, up.bias)    ──►    fp8_linear(x, up.weight) + up.bias      or mxfp8_linear, as the recipe says

The layers are those of ``nn.Linear`` weights in the modules that patterns match (:attr:`graphpar.ir.precision.Precision.fp8`), but for
three kinds that lose by it, unless a pattern is their own path: heads, after which nothing is multiplied; routers, whose results choose
experts; and low-rank adapters. A weight of several calls is rounded in all of them, or in none. Rows that do not follow the batch, as of a
learned table, are never rounded: their gradients are sums over microbatches, each of which would round its part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import fx

from graphpar.emitted.fp8 import fp8_linear, mxfp8_linear
from graphpar.errors import OptionError, near_match
from graphpar.ir.batch_sizes import batch_dims_of, unknown_dims
from graphpar.ir.precision import MXFP8
from graphpar.ir.program import Program, operator_name, value_of
from graphpar.operators.parameter_casts import weight_of
from graphpar.operators.reduce import chooses
from graphpar.operators.table import record_of
from graphpar.passes.normalize.functional import copied, infer
from graphpar.text import matching

_aten = torch.ops.aten


def round_products(program: Program) -> Program:
    """Make the products of the layers that the program's precision names round to 8 bits.

    Raises:
        OptionError: a pattern has no layer, or the model does not compute in bf16.
    """
    patterns = () if program.source is None else program.source.precision.fp8
    if not patterns:
        return program
    assert program.source is not None
    if program.source.precision.dtype != "bf16":
        raise OptionError("fp8 is for a model that computes in bf16, and this one computes in fp32.")
    graph = copied(program.graph)
    layers = {node: path for node in graph.nodes if (path := _layer(node)) is not None}
    small = {name.rpartition(".")[0] for each in program.adapters for name in (each.a, each.b)}
    chosen = _chosen(patterns, set(layers.values())) - small
    weights = {node: program.tie_of(f"{path}.weight")[0] for node, path in layers.items()}
    own = {weights[node] for node, path in layers.items() if path in patterns}
    left = {weights[node] for node, path in layers.items() if path not in chosen or _is_head(node) or _is_router(node)}
    batched = any(entry.batch_dim is not None for entry in program.inputs)
    shared = {weights[node] for node in layers if batched and not batch_dims_of(node) and not unknown_dims(node)}
    rounded = [
        node for node, weight in weights.items() if weight not in shared and (weight in own or weight not in left)
    ]
    if not rounded:
        raise OptionError(
            f"fp8: {', '.join(patterns)} has no linear layers other than heads, routers, adapters and those of rows that all examples "
            "share, and other products don't round; leave it out."
        )
    function = mxfp8_linear if program.source.precision.fp8_recipe == MXFP8 else fp8_linear
    for node in rounded:
        _round(graph, node, function)
    return program.with_graph(graph)


def _layer(node: fx.Node) -> str | None:
    """Return the path of the layer whose weight a product in bf16 multiplies by."""
    if operator_name(node) != "linear" or node.kwargs or value_of(node).dtype is not torch.bfloat16:
        return None
    path, _, name = weight_of(node)[0].rpartition(".")
    return path if name == "weight" else None


def _chosen(patterns: tuple[str, ...], layers: set[str]) -> set[str]:
    """Return the layers in the modules that patterns match."""
    around = {path: {path.rsplit(".", up)[0] for up in range(path.count(".") + 1)} for path in layers}
    modules, found = set[str]().union(*around.values()), set[str]()
    for pattern in patterns:
        matched = set(matching(pattern, modules))
        if not matched:
            raise OptionError(f"fp8: the pattern {pattern!r} matches no linear layer.{near_match(pattern, modules)}")
        found |= {path for path, outer in around.items() if outer & matched}
    return found


def _is_head(product: fx.Node) -> bool:
    """Whether nothing that follows multiplies."""
    return not any(record_of(node).multiplies for node in _following(product))


def _is_router(product: fx.Node) -> bool:
    """Whether the largest results are chosen before anything else multiplies."""
    return any(chooses(node) for node in _following(product))


def _following(product: fx.Node) -> Iterator[fx.Node]:
    """Yield what follows a product, up to the next ones."""
    seen, left = {product}, list(product.users)
    while left:
        node = left.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        yield node
        if not record_of(node).multiplies:
            left += node.users


def _round(graph: fx.Graph, node: fx.Node, function: Callable[..., object]) -> None:
    x, weight, *bias = node.args
    with graph.inserting_before(node):
        made = infer(graph.call_function(function, (x, weight)), node, same=True)  # type: ignore[arg-type]
        if bias and bias[0] is not None:
            made = infer(graph.call_function(_aten.add.Tensor, (made, bias[0])), node, same=True)  # type: ignore[arg-type]
    made.meta = {**node.meta, "val": made.meta["val"]}
    node.replace_all_uses_with(made)
    graph.erase_node(node)
