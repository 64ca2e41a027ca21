"""``inline_regions``: no_grad and autocast regions become plain operators that mean the same.

A no_grad region's inputs are detached, so nothing inside records a gradient. In an autocast region every operator
ran in a dtype that its recorded result shows; casts are inserted until the plain operator gives that dtype too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from graphpar.errors import GraphparError
from graphpar.program import Program, value_of

_aten = torch.ops.aten


def inline_regions(program: Program) -> Program:
    """Program -> Program without ``wrap_with_*`` higher-order operators."""
    if not program.subgraphs:
        return program
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    for node in program.graph.nodes:
        if node.op == "get_attr" and node.target in program.subgraphs:
            continue
        if _region(node) is None:
            env[node] = graph.node_copy(node, env.__getitem__)
        else:
            env[node] = _inline(program, graph, node, env)
    _select_results(graph, env)
    return program.with_graph(graph, subgraphs={})


def _region(node: fx.Node) -> str | None:
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    name = name or (str(node.target) if node.op == "call_function" else "")
    if name in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
        return name
    if node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator):
        raise GraphparError(
            f"The model contains the control-flow region {name!r}{_where(node)}, which graphpar does not split. Replace it by "
            "plain tensor operators."
        )
    return None


def _where(node: fx.Node) -> str:
    source = node.meta.get("source")
    return f" ({source.file}:{source.line})" if source else ""


def _inline(program: Program, graph: fx.Graph, node: fx.Node, env: dict[fx.Node, Any]) -> list[Any]:
    """Copies the region's operators into ``graph``; returns its results in order."""
    if _region(node) == "wrap_with_set_grad_enabled":
        enabled, subgraph, *operands = node.args
        cast_to = None
        if enabled and any(isinstance(value_of(operand), Tensor) for operand in operands if isinstance(operand, fx.Node)):
            # Enabling inside of an enabled program changes nothing.
            detach = False
        else:
            detach = not enabled
    else:
        _, dtype, enabled, _, subgraph, *operands = node.args
        detach, cast_to = False, (dtype or torch.bfloat16) if enabled else None
    assert isinstance(subgraph, fx.Node)
    module = program.subgraphs[str(subgraph.target)]
    inner: dict[fx.Node, Any] = {}
    feed = iter(operands)
    for child in module.graph.nodes:
        if child.op == "placeholder":
            operand = next(feed)
            inner[child] = env[operand] if isinstance(operand, fx.Node) else operand
            if detach and isinstance(operand, fx.Node) and _differentiable(operand):
                inner[child] = _detached(graph, inner[child])
        elif child.op == "output":
            results = child.args[0]
            return list(tree_map(lambda leaf: inner[leaf] if isinstance(leaf, fx.Node) else leaf, results))
        elif child.op == "get_attr":
            target = f"{subgraph.target}.{child.target}"
            nested = getattr(module, str(child.target))
            if isinstance(nested, fx.GraphModule):
                program.subgraphs[target] = nested
                inner[child] = child
            else:
                inner[child] = graph.node_copy(child, inner.__getitem__)
        elif _region(child) is not None:
            inner[child] = _inline_nested(program, graph, child, inner, str(subgraph.target))
        else:
            inner[child] = graph.node_copy(child, inner.__getitem__)
            inner[child].meta = _meta_like(child, node)
            if cast_to is not None:
                _insert_casts(graph, inner[child], cast_to)
    raise AssertionError("a region without an output")


def _inline_nested(
    program: Program, graph: fx.Graph, node: fx.Node, env: dict[fx.Node, Any], prefix: str
) -> list[Any]:
    for argument in node.all_input_nodes:
        if argument.op == "get_attr" and f"{prefix}.{argument.target}" in program.subgraphs:
            argument.target = f"{prefix}.{argument.target}"
    return _inline(program, graph, node, env)


def _meta_like(child: fx.Node, region: fx.Node) -> dict[str, Any]:
    from graphpar.source import source_of

    meta = {"val": child.meta.get("val"), "module_stack": region.meta.get("module_stack", ())}
    if "batch_coefficients" in child.meta:
        meta["batch_coefficients"] = child.meta["batch_coefficients"]
    trace = child.meta.get("stack_trace")
    meta["source"] = source_of(trace) if trace else region.meta.get("source")
    return meta


def _differentiable(node: fx.Node) -> bool:
    value = value_of(node)
    return isinstance(value, Tensor) and value.is_floating_point()


def _detached(graph: fx.Graph, node: fx.Node) -> fx.Node:
    detached = graph.call_function(_aten.detach.default, (node,))
    detached.meta = dict(node.meta)
    return detached


def _insert_casts(graph: fx.Graph, node: fx.Node, low: torch.dtype) -> None:
    """Casts ``node``'s floating inputs so that the plain operator gives the dtype that autocast gave."""
    wanted = value_of(node)
    if not isinstance(wanted, Tensor) or not wanted.is_floating_point():
        return
    if _plain_dtype(node) == wanted.dtype:
        return
    target = low if wanted.dtype == low else torch.float32
    replacements: dict[fx.Node, fx.Node] = {}
    for argument in node.all_input_nodes:
        value = value_of(argument)
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != target:
            with graph.inserting_before(node):
                cast = graph.call_function(_aten.to.dtype, (argument, target))
            cast.meta = dict(argument.meta, val=value.to(target))
            replacements[argument] = cast
    node.args, node.kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: replacements.get(n, n))
    found = _plain_dtype(node)
    if found != wanted.dtype:
        raise GraphparError(
            f"Autocast ran {node.target}{_where(node)} with a result in {wanted.dtype}, which casts of its inputs to {target} "
            f"don't reproduce (they give {found}). Cast explicitly there, or leave autocast out."
        )


def _plain_dtype(node: fx.Node) -> torch.dtype | None:
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    mode = next((v.fake_mode for v in (value_of(n) for n in node.all_input_nodes) if hasattr(v, "fake_mode")), None)
    assert mode is not None and callable(node.target)
    try:
        with mode:
            result = node.target(*args, **kwargs)
    except RuntimeError:
        return None
    return result.dtype if isinstance(result, Tensor) else None


def _select_results(graph: fx.Graph, env: dict[fx.Node, Any]) -> None:
    """``getitem`` of a region's results becomes the result itself."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.args and isinstance(node.args[0], list) and len(node.args) == 2:
            results, index = node.args
            if getattr(node.target, "__name__", "") == "getitem" and isinstance(results, list | tuple):
                node.replace_all_uses_with(results[int(index)])  # type: ignore[arg-type]
                graph.erase_node(node)
