"""Regions and dtypes: ``no_grad`` and autocast regions, and parameters that are stored in another dtype, become plain operators.

    ``inline_regions``   with torch.no_grad(): f(x)                  f(x.detach())
                         linear(h, weight)  under autocast to bf16   linear(h.to(bfloat16), weight.to(bfloat16))
    ``cast_weights``     linear(x, weight)  stored in fp32           linear(x, weight.to(bfloat16))
    ``keep_marks``       pipe_split()                                a mark on the operator after it

A no_grad region's inputs are detached, so nothing inside records a gradient. Operators keep the modules that they ran in, so blocks are
found inside regions too. There is no list of what autocast casts, since that differs between devices and versions of torch. Instead the
operator runs on fake tensors under autocast, and each operator that torch dispatches is logged with its dtypes. Then it runs without
autocast, its inputs cast in each way that autocast has, until the log is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from graphpar.errors import GraphparError, torch_is_quiet
from graphpar.frontend.exported import alias_used_in, kept_meta
from graphpar.frontend.repetitions import fake_like
from graphpar.ir.program import (
    Program,
    is_of_torch,
    model_outputs,
    operator_name,
    set_model_outputs,
    value_of,
    where,
)
from graphpar.ir.source import source_of
from graphpar.operators.functions import OPERATORS
from graphpar.operators.gradients import differentiable_nodes
from graphpar.operators.parameter_casts import mixed_operands
from graphpar.operators.record import Kind
from graphpar.operators.table import record_named, record_of
from graphpar.passes.normalize.functional import copied

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
                    set_model_outputs(self.graph, (value and env[value] for value in model_outputs(source)))
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
                    "operators inside it, if any, compute in the dtypes of their inputs."
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


# ---- autocast ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Autocast:
    """The arguments of ``torch.autocast`` on the device that programs are traced on."""

    dtype: torch.dtype
    enabled: bool


@dataclass
class Casts:
    """Casts the inputs of operators; the result for one operator is reused for equal ones in other layers."""

    graph: fx.Graph
    known: dict[Any, torch.dtype | None] = field(default_factory=dict)
    made: dict[tuple[fx.Node, torch.dtype, Any], fx.Node] = field(default_factory=dict)

    def insert(self, node: fx.Node, autocast: Autocast) -> None:
        """Cast ``node``'s floating inputs such that it computes without autocast what it does with it.

        Raises:
            GraphparError: no casts of its inputs have that effect.
        """
        if not isinstance(node.target, torch._ops.OpOverload):
            return
        inputs = [argument for argument in node.all_input_nodes if _is_cast(value_of(argument))]
        if not inputs:
            return
        key = _operator_key(node, autocast)
        if key not in self.known:
            self.known[key] = _found(node, autocast)
        target = self.known[key]
        if target is None:
            return
        replacements = {a: self._cast(a, target, node) for a in inputs if value_of(a).dtype != target}
        node.args, node.kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: replacements.get(n, n))

    def _cast(self, argument: fx.Node, target: torch.dtype, user: fx.Node) -> fx.Node:
        """Cast ``argument``, once for each module that uses it, so that the cast belongs to that module's block."""
        key = (argument, target, user.meta["module_stack"])
        if key not in self.made:
            with self.graph.inserting_before(user):
                made = self.graph.call_function(_aten.to.dtype, (argument, target))
            value = value_of(argument)
            with value.fake_mode:
                made.meta = dict(argument.meta, val=value.to(target), module_stack=user.meta["module_stack"])
            self.made[key] = made
        return self.made[key]


def _is_cast(value: Any) -> bool:
    """Return whether autocast casts such a value; it leaves doubles alone."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _operator_key(node: fx.Node, autocast: Autocast) -> Any:
    """Return a key that is equal for operators with the same target, ranks, dtypes and options."""

    def described(argument: fx.Node) -> Any:
        value = value_of(argument)
        return slice(str(value.dtype), value.ndim) if isinstance(value, Tensor) else slice(str(type(value)))

    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), described)  # type: ignore[arg-type]
    return node.target, autocast, repr(args), repr(sorted(kwargs.items()))


def _found(node: fx.Node, autocast: Autocast) -> torch.dtype | None:
    """Return the dtype that ``node``'s inputs must have (None: their own) to compute as under autocast.

    Where torch can't run the operator on fake tensors under autocast, the dtypes of its traced results are compared instead.
    """
    values = [value_of(argument) for argument in node.all_input_nodes]
    dtypes = [value.dtype for value in values if _is_cast(value)]
    widest = dtypes[0]
    for dtype in dtypes[1:]:
        widest = torch.promote_types(widest, dtype)
    expected = _computed(node, autocast, None)
    for target in (None, autocast.dtype, torch.float32, widest):
        found = _computed(node, Autocast(autocast.dtype, False), target)
        if found is not None and (found == expected if expected is not None else found[-1] == _dtypes(value_of(node))):
            return target
    raise GraphparError(
        f"Autocast computes {node.target}{where(node)} in dtypes that casts of its inputs don't reproduce. "
        "Cast explicitly there, or leave autocast out."
    )


def _computed(node: fx.Node, autocast: Autocast, target: torch.dtype | None) -> list[Any] | None:
    """Return the operators that torch dispatches for ``node``, with their dtypes; None where it does not run."""

    def given(argument: fx.Node) -> Any:
        value = tree_map(_of_one_size, value_of(argument))
        return value.to(target) if target is not None and _is_cast(value) else value

    # An operator that replaces a custom autograd function shows what it dispatches only when the function itself runs.
    function = OPERATORS[node.target].run if node.target in OPERATORS else node.target
    log = _Log()
    assert callable(function)
    with (
        FakeTensorMode(),
        torch.no_grad(),
        torch.autocast("cpu", autocast.dtype, autocast.enabled, cache_enabled=False),
    ):
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), given)
        try:
            with log, torch_is_quiet():
                result = function(*args, **kwargs)
        except RuntimeError:
            return None
    return [*log.entries, _dtypes(result)]


def _of_one_size(value: Any) -> Any:
    """Make a tensor like ``value`` whose sizes are numbers: under autocast torch 2.11 multiplies no matrices of symbolic sizes."""
    if isinstance(value, Tensor):
        sizes, strides = map(_of_one_size, value.shape), map(_of_one_size, value.stride())
        return torch.empty_strided([*sizes], [*strides], dtype=value.dtype, device=value.device)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.hint if value.node.has_hint() else 2
    return value


def _dtypes(values: Any) -> tuple[torch.dtype, ...]:
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
    return tuple(value.dtype for value in tensors if value.is_floating_point() or value.is_complex())


class _Log(TorchDispatchMode):
    """Logs each operator that computes, with the dtypes of its inputs and results."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        moves = func.is_view or name.startswith("copy") or record_named(name).same_elements  # says nothing about dtypes
        if namespace != "prim" and not moves:  # prim::device only asks for a tensor's device
            self.entries.append((func, _dtypes((args, kwargs)), _dtypes(result)))
        return result


# ---- stored dtypes ----------------------------------------------------------------------------------------------


def cast_weights(program: Program) -> Program:
    """Declare parameters in the dtypes in which they are stored, with a cast for each module that reads one.

    Raises:
        GraphparError: an operator takes operands in two dtypes that torch's kernels don't take together.
    """
    for node in program.graph.nodes:
        _check_operands(node)
    if not program.stored:
        return program
    graph = copied(program.graph)
    places = {node: place for place, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op == "get_attr" and str(node.target) in program.stored:
            _cast(graph, node, program.stored[str(node.target)], places)
    infos = {name: replace(program.parameters[name], dtype=dtype) for name, dtype in program.stored.items()}
    return program.with_graph(graph, parameters=program.parameters | infos, stored={})


def _check_operands(node: fx.Node) -> None:
    """Check that an operator takes floating operands of dtypes that torch's kernels take together: a trace takes others, too."""
    if (operands := mixed_operands(node)) is None:
        return
    one, other = (str(value_of(each).dtype).removeprefix("torch.") for each in operands)
    which = repr(str(operands[1].target)) if operands[1].op == "get_attr" else "another operand"
    raise GraphparError(
        f"{operator_name(node)}{where(node)} takes an input in {one} and {which} in {other}: something before it is in more bits, such as "
        "a buffer, or is cast to more. Cast it in the model: x.to(self.weight.dtype)."
    )


def _cast(graph: fx.Graph, node: fx.Node, stored: torch.dtype, places: Mapping[fx.Node, int]) -> None:
    """Cast the parameter ``node`` once for each module that uses it, so that the cast belongs to that module's block; ``places``
    has the order of its users."""
    read = value_of(node)
    assert isinstance(read, Tensor)
    fake = isinstance(read, FakeTensor)
    node.meta["val"] = fake_like(read, stored).requires_grad_(read.requires_grad) if fake else read.to(stored)  # type: ignore[arg-type]
    made: dict[Any, fx.Node] = {}
    for user in sorted(node.users, key=places.__getitem__):
        stack = user.meta.get("module_stack", ())
        if stack not in made:
            with graph.inserting_before(user):
                made[stack] = graph.call_function(_aten.to.dtype, (node, read.dtype))
            made[stack].meta = dict(node.meta, val=read, module_stack=stack)
            if "source" in user.meta:
                made[stack].meta["source"] = user.meta["source"]
        user.replace_input_with(node, made[stack])


# ---- marks of stages --------------------------------------------------------------------------------------------


def keep_marks(program: Program) -> Program:
    """Replace ``pipe_split()`` by ``meta["stage_begins"]`` on the operator after it."""
    if not any(operator_name(node) == "_pipe_split" for node in program.graph.nodes):
        return program
    graph = copied(program.graph)
    for node in list(graph.nodes):
        if operator_name(node) == "_pipe_split":
            following = node.next
            while following.op not in ("call_function", "output"):
                following = following.next
            following.meta["stage_begins"] = True
            graph.erase_node(node)
    return program.with_graph(graph)
