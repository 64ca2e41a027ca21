"""``inline_regions``: no_grad and autocast regions become plain operators that mean the same.

A no_grad region's inputs are detached, so nothing inside records a gradient. In an autocast region every operator
ran in a dtype that its recorded result shows; casts are inserted until the plain operator gives that dtype too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from graphpar.errors import GraphparError
from graphpar.fixed_size import TWIN
from graphpar.program import Program, operator_name, value_of
from graphpar.source import source_of

_aten = torch.ops.aten


def inline_regions(program: Program) -> Program:
    """Program -> Program without ``wrap_with_*`` higher-order operators."""
    if not program.subgraphs:
        return program
    inliner = _Inliner(program)
    inliner.copy(program.graph, {}, program.subgraphs, _Scope())
    return program.with_graph(inliner.graph, subgraphs={})


@dataclass(frozen=True)
class _Scope:
    """What holds inside of a region: whether gradients are recorded, and autocast's dtype."""

    gradients: bool = True
    cast_to: torch.dtype | None = None
    region: fx.Node | None = None


class _Inliner:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph = fx.Graph()
        self.quiet: set[fx.Node] = set()  # made where no gradients are recorded
        self.detached: dict[fx.Node, fx.Node] = {}

    def copy(self, source: fx.Graph, env: dict[fx.Node, Any], modules: Any, scope: _Scope) -> list[Any]:
        """Copies ``source`` to the new graph; ``env`` holds its placeholders where it is a region. Returns its results."""
        for node in source.nodes:
            if node in env:
                continue
            if node.op == "output":
                if scope.region is None:
                    self.graph.output(fx.map_arg(node.args[0], env.__getitem__))
                    return []
                return list(tree_map(lambda leaf: env[leaf] if isinstance(leaf, fx.Node) else leaf, node.args[0]))
            if node.op == "get_attr" and isinstance(_child(modules, str(node.target)), fx.GraphModule):
                env[node] = _child(modules, str(node.target))
            elif _region(node) is not None:
                env[node] = self._region(node, env, scope)
            elif operator_name(node) == "getitem" and isinstance(env.get(node.args[0]), list):  # type: ignore[arg-type]
                env[node] = env[node.args[0]][node.args[1]]  # type: ignore[index]
            else:
                env[node] = self._operator(node, env, scope)
        raise AssertionError("a graph without an output")

    def _region(self, node: fx.Node, env: dict[fx.Node, Any], outside: _Scope) -> list[Any]:
        if _region(node) == "wrap_with_set_grad_enabled":
            enabled, subgraph, *operands = node.args
            scope = replace(outside, gradients=bool(enabled), region=node)
        else:
            _, dtype, enabled, _, subgraph, *operands = node.args
            cast_to = cast("torch.dtype | None", dtype) or torch.bfloat16
            scope = replace(outside, cast_to=cast_to if enabled else None, region=node)
        if outside.region is not None:  # the user's place is that of the outermost region
            scope = replace(scope, region=outside.region)
        module = env[cast(fx.Node, subgraph)]
        placeholders = [child for child in module.graph.nodes if child.op == "placeholder"]
        inner = {
            child: env[operand] if isinstance(operand, fx.Node) else operand for child, operand in zip(placeholders, operands)
        }
        return self.copy(module.graph, inner, module, scope)

    def _operator(self, node: fx.Node, env: dict[fx.Node, Any], scope: _Scope) -> Any:
        if scope.gradients:
            new = self.graph.node_copy(node, env.__getitem__)
        elif _gives_itself(node):
            return env[cast(fx.Node, node.args[0])]  # the very tensor, gradient and all
        else:
            new = self.graph.node_copy(node, lambda argument: self._without_gradient(env[argument]))
            self.quiet.add(new)
        if scope.region is not None:
            new.meta = _meta_like(node, scope.region)
        if scope.cast_to is not None:
            _insert_casts(self.graph, new, scope.cast_to)
        return new

    def _without_gradient(self, node: Any) -> Any:
        if not isinstance(node, fx.Node) or node in self.quiet or not _differentiable(self.program, node):
            return node
        if node not in self.detached:
            self.detached[node] = self.graph.call_function(_aten.detach.default, (node,))
            self.detached[node].meta = dict(node.meta)
        return self.detached[node]


def _child(modules: Any, name: str) -> Any:
    return modules.get(name) if isinstance(modules, dict) else getattr(modules, name, None)


def _gives_itself(node: fx.Node) -> bool:
    """``x.float()`` of a float tensor is ``x`` itself, also under no_grad."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, fx.Node) or operator_name(node) not in ("to", "type_as", "contiguous"):
        return False
    before, after = value_of(source), value_of(node)
    same = before.dtype == after.dtype and torch._C._storage_id(before) == torch._C._storage_id(after)  # type: ignore[attr-defined]
    return bool(same)


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


def _meta_like(child: fx.Node, region: fx.Node) -> dict[str, Any]:
    meta = {"val": child.meta.get("val"), "module_stack": region.meta.get("module_stack", ())}
    meta |= {key: child.meta[key] for key in ("batch_coefficients", TWIN) if key in child.meta}
    trace = child.meta.get("stack_trace")
    meta["source"] = source_of(trace) if trace else region.meta.get("source")
    return meta


def _differentiable(program: Program, node: fx.Node) -> bool:
    value = value_of(node)
    constant = node.op == "get_attr" and str(node.target) not in program.parameters
    return isinstance(value, Tensor) and value.is_floating_point() and not constant


def _insert_casts(graph: fx.Graph, node: fx.Node, low: torch.dtype) -> None:
    """Casts ``node``'s floating inputs so that the plain operator gives the dtype that autocast gave."""
    wanted = value_of(node)
    if not isinstance(wanted, Tensor) or not wanted.is_floating_point():
        return
    if _plain_dtype(node) == wanted.dtype and not _mixed_matrices(node):
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


_MATRIX = {
    "linear", "matmul", "mm", "bmm", "mv", "addmm", "addbmm", "baddbmm", "einsum", "chain_matmul", "scaled_dot_product_attention",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc",
}  # fmt: skip


def _mixed_matrices(node: fx.Node) -> bool:
    """Matrix products of several dtypes, which autocast casts and fake tensors let pass, but which don't run."""
    values = [value_of(argument) for argument in node.all_input_nodes]
    dtypes = {value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()}
    return operator_name(node) in _MATRIX and len(dtypes) > 1


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
