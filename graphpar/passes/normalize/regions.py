"""``inline_regions``: no_grad and autocast regions become plain operators with the same meaning.

A no_grad region's inputs are detached, so nothing inside records a gradient. Autocast becomes casts of operators' inputs
(:mod:`graphpar.passes.normalize.casts`). Operators keep the modules they ran in, so blocks are found inside regions too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from graphpar.errors import GraphparError
from graphpar.frontend.exported import alias_used_in, kept_meta
from graphpar.ir.program import Program, is_of_torch, operator_name, value_of, where
from graphpar.ir.source import source_of
from graphpar.operators.functions import OPERATORS
from graphpar.operators.gradients import differentiable_nodes
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.normalize.casts import Autocast, Casts

_aten = torch.ops.aten


def inline_regions(program: Program) -> Program:
    """Inline ``wrap_with_set_grad_enabled`` and ``wrap_with_autocast`` regions.

    Raises:
        GraphparError: the program contains another higher-order operator (control flow).
    """
    if not program.subgraphs:
        return program
    inliner = _Inliner(program)
    inliner.copy(program.graph, {}, program.subgraphs, _Scope())
    inlined = program.with_graph(inliner.graph, subgraphs={}).warn(*inliner.warnings)
    return inlined.warn(*map(_not_frozen, _without_gradient(inlined))) if inlined.mode == "train" else inlined


def _without_gradient(program: Program) -> list[str]:
    """Return the outermost modules of whose trained parameters none gets a gradient, though all are used."""
    through, live = differentiable_nodes(program), set(program.graph.output_node().all_input_nodes)
    for node in reversed(program.graph.nodes):
        if node in live and node in through:
            live.update(node.all_input_nodes)
    used = {str(node.target): node in live for node in program.graph.nodes if node.op == "get_attr"}
    trained = {name: used.get(name, True) for name, info in program.parameters.items() if info.requires_grad}
    learns = {path for name, with_gradient in trained.items() if with_gradient for path in _enclosing(name)}
    quiet = (name for name, with_gradient in trained.items() if not with_gradient)
    found = dict.fromkeys(next((path for path in _enclosing(name) if path not in learns), "") for name in quiet)
    return [path for path in found if path]


def _enclosing(name: str) -> list[str]:
    """Return the paths of the modules that hold ``name``, outermost first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _not_frozen(path: str) -> str:
    return (
        f"{path} is used under torch.no_grad() alone, so its parameters get no gradient; call {path}.requires_grad_(False) in the model, "
        "which saves their gradients and optimizer state."
    )


@dataclass(frozen=True)
class _Scope:
    """The state inside a region: whether gradients are recorded, and what autocast does."""

    gradients: bool = True
    autocast: Autocast | None = None
    region: fx.Node | None = None


class _Inliner:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph = fx.Graph()
        self.casts = Casts(self.graph)
        self.quiet: set[fx.Node] = set()  # made where no gradients are recorded
        self.detached: dict[tuple[fx.Node, Any], fx.Node] = {}
        self.stacks: dict[tuple[str, ...], tuple[tuple[str, str, str], ...]] = {}
        self.attributes: dict[str, fx.Node] = {}
        self.warnings: list[str] = []

    def copy(self, source: fx.Graph, env: dict[fx.Node, Any], modules: Any, scope: _Scope) -> list[Any]:
        """Copy ``source`` to the new graph; ``env`` holds its placeholders where it is a region. Return its results."""
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
            scope = replace(outside, gradients=bool(enabled), region=outside.region or node)
        else:
            device, dtype, enabled, _, subgraph, *operands = node.args
            scope = replace(outside, region=outside.region or node)
            if device == "cpu":
                scope = replace(
                    scope, autocast=Autocast(cast("torch.dtype | None", dtype) or torch.bfloat16, bool(enabled))
                )
            else:  # torch itself switches it off where there is no such device
                self.warnings.append(_elsewhere(str(device), env[cast(fx.Node, subgraph)]))
        module = env[cast(fx.Node, subgraph)]
        placeholders = [child for child in module.graph.nodes if child.op == "placeholder"]
        inner = {
            child: env[operand] if isinstance(operand, fx.Node) else operand
            for child, operand in zip(placeholders, operands)
        }
        return self.copy(module.graph, inner, module, scope)

    def _operator(self, node: fx.Node, env: dict[fx.Node, Any], scope: _Scope) -> Any:
        meta = dict(node.meta)
        if scope.region is not None:
            meta = kept_meta(node, self.stacks)
            meta.setdefault("source", scope.region.meta.get("source"))
        stack = meta.get("module_stack", ())

        def given(argument: fx.Node) -> Any:
            value = self._named(env[argument], stack) if scope.region is not None else env[argument]
            return value if scope.gradients else self._without_gradient(value, stack)

        if not scope.gradients and _gives_itself(node):
            return env[cast(fx.Node, node.args[0])]  # the same tensor, with its gradient
        new = self.graph.node_copy(node, given)
        new.meta = meta
        if new.op == "get_attr":
            self.attributes[str(new.target)] = new
        if not scope.gradients:
            self.quiet.add(new)
        if scope.autocast is not None and scope.autocast.enabled and new.op == "call_function":
            self.casts.insert(new, scope.autocast)
            if (
                not is_of_torch(new.target)
                and isinstance(new.target, torch._ops.OpOverload)
                and new.target not in OPERATORS
            ):
                self.warnings.append(
                    f"{operator_name(new)}{where(new)} runs under autocast in the model, and without it in the program: torch's "
                    "operators inside of it, if there are any, compute in the dtypes of their inputs."
                )
        return new

    def _named(self, node: Any, stack: tuple[tuple[str, str, str], ...]) -> Any:
        """Return a tied parameter under its name in the module that uses it; the region takes it under one name for all.

        A buffer with several names has one in a program.
        """
        if not isinstance(node, fx.Node) or node.op != "get_attr" or str(node.target) not in self.program.parameters:
            return node
        names = self.program.tie_of(str(node.target))
        name = alias_used_in(stack, names) if len(names) > 1 else str(node.target)
        if name == node.target:
            return node
        if name not in self.attributes:
            with self.graph.inserting_after(node):
                self.attributes[name] = self.graph.get_attr(name)
            self.attributes[name].meta = dict(node.meta)
        return self.attributes[name]

    def _without_gradient(self, node: Any, stack: Any) -> Any:
        """Detach ``node``, once for each module that uses it, so that the detach belongs to that module's block."""
        if not isinstance(node, fx.Node) or node in self.quiet or not _differentiable(self.program, node):
            return node
        if (node, stack) not in self.detached:
            detached = self.graph.call_function(_aten.detach.default, (node,))
            detached.meta = dict(node.meta, module_stack=stack)
            self.detached[node, stack] = detached
        return self.detached[node, stack]


def _elsewhere(device: str, module: fx.GraphModule) -> str:
    """Return the warning for autocast of a device that the trace does not run on."""
    sources = [source_of(node.meta["stack_trace"]) for node in module.graph.nodes if node.meta.get("stack_trace")]
    place = next((f" ({source.file}:{source.line})" for source in sources if source is not None), "")
    return (
        f"torch.autocast({device!r}){place} does nothing in the program: it is traced on a CPU, whatever device it runs on. "
        "Write torch.autocast(x.device.type), with x a tensor of the model's."
    )


def _child(modules: Any, name: str) -> Any:
    return modules.get(name) if isinstance(modules, dict) else getattr(modules, name, None)


def _gives_itself(node: fx.Node) -> bool:
    """Return whether an operator returns its operand unchanged: ``x.float()`` of a float tensor is ``x``, also under no_grad."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, fx.Node) or (
        record_of(node).kind is not Kind.COPY and operator_name(node) != "contiguous"
    ):
        return False
    before, after = value_of(source), value_of(node)
    same = before.dtype == after.dtype and torch._C._storage_id(before) == torch._C._storage_id(after)  # type: ignore[attr-defined]
    return bool(same)


def _region(node: fx.Node) -> str | None:
    """Return the name of the region that a node calls; None for other nodes."""
    if node.op != "call_function":
        return None
    name = getattr(node.target, "__name__", "") or str(node.target)
    if name in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
        return name
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        raise GraphparError(
            f"The model contains the control-flow region {name!r}{where(node)}, which graphpar does not split. Replace it by "
            "plain tensor operators."
        )
    return None


def _differentiable(program: Program, node: fx.Node) -> bool:
    value = value_of(node)
    constant = node.op == "get_attr" and str(node.target) not in program.parameters
    return isinstance(value, Tensor) and value.is_floating_point() and not constant
