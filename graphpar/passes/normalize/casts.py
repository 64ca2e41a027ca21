"""The effect of autocast on an operator, as casts of its inputs.

    linear(h, weight)  under autocast to bf16   ->   linear(h.to(bfloat16), weight.to(bfloat16))

There is no list of what autocast casts, since that differs between devices and versions of torch. Instead the operator runs on fake
tensors under autocast, and each operator that torch dispatches is logged with its dtypes. Then it runs without autocast, its inputs
cast in each way that autocast has, until the log is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from graphpar.errors import GraphparError
from graphpar.ir.program import value_of, where
from graphpar.operators.functions import OPERATORS
from graphpar.operators.table import record_named
from graphpar.quiet_torch import torch_is_quiet

_aten = torch.ops.aten


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
        key = _kind(node, autocast)
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


def _kind(node: fx.Node, autocast: Autocast) -> Any:
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
