"""Names of values: the user's variable, the module that made it, or the operator."""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, fx

from graphpar.ir.program import is_of_torch, module_path, operator_name, value_of
from graphpar.ir.source import Source, variable_name
from graphpar.operators.table import record_of


def short_name(node: fx.Node) -> str:
    """Name a variable after the operator that makes it."""
    source = node.args[0] if node.target is operator.getitem else None
    if (
        isinstance(source, fx.Node)
        and isinstance(source.target, torch._ops.OpOverload)
        and not is_of_torch(source.target)
    ):
        return short_name(source)
    name = operator_name(node).rpartition("::")[2]
    return (
        re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removesuffix(".apply")).lower()
        if ".apply" in name
        else name.strip("_")
    )


def user_name(node: fx.Node) -> str | None:
    """Find the variable that holds ``node``'s value in the user's code; None where there is none.

    A returned value has the name that the caller gives to the result; one that is only cast on the way keeps its name, and a range
    or a constant that is made inside of the call is not the result.
    """
    source: Source | None = node.meta.get("source")
    if source is None:
        return None
    operand = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else node
    computed = operand is not node and operand.op == "call_function"
    before: Source | None = operand.meta.get("source") if computed else None
    if not source.targets and before is not None and before.targets and record_of(node).same_value:
        return user_name(operand)
    made = created_by(node)
    if made is not None and not source.assigns.operators & {operator_name(made), operator_name(node)}:
        return None
    position = node.args[1] if operator_name(node) == "getitem" else 0
    name = variable_name(source, position if isinstance(position, int) else 0, operator_name(node))
    if name is None and before is not None and before.assigns == source.assigns and source.assigns.made_of:
        return user_name(operand)
    return name


def created_by(node: fx.Node) -> fx.Node | None:
    """Find the operator that made ``node``'s value from no tensor (``arange``, ``zeros``), through changes of shape; None if none did."""
    while node.op == "call_function" and record_of(node).same_elements and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    sizes_alone = all(isinstance(value_of(argument), torch.SymInt) for argument in node.all_input_nodes)
    return node if node.op == "call_function" and sizes_alone and isinstance(value_of(node), Tensor) else None


def value_name(node: fx.Node) -> str:
    """Choose a readable name for a value: the user's variable, the module that made it, or the operator."""
    if node.op == "placeholder":
        return str(node.target)
    if node.op == "get_attr":
        return str(node.target).replace(".", "_")
    name = user_name(node)
    if name is not None:
        return name
    made = created_by(node)
    if made is not None:
        return short_name(made)
    parts = [part for part in module_path(node).split(".") if part and not part.isdigit()]
    return parts[-1] if parts else short_name(node)


def unique_names(nodes: Sequence[fx.Node], reserved: Iterable[str] = ()) -> dict[fx.Node, str]:
    """Choose the :func:`value_name` of each node, made distinct from each other and from ``reserved``."""
    names: dict[fx.Node, str] = {}
    for node in nodes:
        name = value_name(node)
        taken = {*names.values(), *reserved}
        if name in taken:
            parts = [part for part in module_path(node).split(".") if part and not part.isdigit()]
            name = f"{parts[-1]}_{name}" if parts and f"{parts[-1]}_{name}" not in taken else name
        names[node] = free_name(name, taken)
    return names


def free_name(name: str, taken: Collection[str]) -> str:
    """Return ``name``, or where that is taken ``name_2``, ``name_3``, and so on."""
    free, number = name, 2
    while free in taken:
        free, number = f"{name}_{number}", number + 1
    return free
