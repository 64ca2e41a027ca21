"""Modules that are applied several times: the towers of a siamese network, a policy on chosen and rejected answers, a recurrence.

net(a), net(b)   side by side: neither needs the other's result     each application is split where the first one is
net(net(x))      one after the other: a recurrence                  a later application stays in program order
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import fx

from graphpar.ir.program import Program, module_path, operator_name
from graphpar.passes.normalize.functional import is_inplace


def first_applications(program: Program) -> dict[fx.Node, fx.Node]:
    """Map operators of later applications of a module to the same operator of the first, where applications are side by side."""
    calls: dict[str, dict[str, list[fx.Node]]] = {}  # of each path
    for node in program.graph.nodes:
        for path, _, call in node.meta.get("module_stack", ()) if node.op in ("call_function", "call_module") else ():
            if path:
                calls.setdefault(path, {}).setdefault(call, []).append(node)
    found: dict[fx.Node, fx.Node] = {}
    for applications in calls.values():  # outer modules first
        first, *others = applications.values()
        if not others or any(node in found for node in first) or not side_by_side(list(applications.values())):
            continue
        originals = dict(_numbered(first))
        for nodes in others:
            found.update(
                {node: originals[key] for key, node in _numbered(nodes) if key in originals and node not in found}
            )
    return found


def _numbered(nodes: Iterable[fx.Node]) -> Iterable[tuple[tuple[str, str, int], fx.Node]]:
    """Yield nodes with a key: module, operator, and how many of that operator came before."""
    seen: Counter[tuple[str, str]] = Counter()
    for node in nodes:
        kind = module_path(node), str(node.target)
        yield (*kind, seen[kind]), node
        seen[kind] += 1


def side_by_side(applications: Sequence[Sequence[fx.Node]]) -> bool:
    """Return whether no application, each given by its nodes, needs the result of another.

    What is computed from parameters and buffers alone does not count, nor what one leaves in a buffer.
    """
    state = of_state_alone(applications[0][0].graph.nodes)
    owner = {node: number for number, nodes in enumerate(applications) for node in nodes}
    for number, nodes in enumerate(applications):
        reached, pending = set(nodes), list(nodes)
        while pending:
            node = pending.pop()
            for user in () if node in state or _in_buffer(node) else node.users:
                if owner.get(user, number) != number:
                    return False
                if user not in reached:
                    reached.add(user)
                    pending.append(user)
    return True


def of_state_alone(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return what is computed from parameters and buffers alone, such as their casts."""
    found: set[fx.Node] = set()
    for node in nodes:
        needs = node.all_input_nodes
        if node.op == "call_function" and needs and all(need.op == "get_attr" or need in found for need in needs):
            found.add(node)
    return found


def _in_buffer(node: fx.Node) -> bool:
    """Whether the value is what an operator left in a buffer, or a copy of that."""
    source = node.args[0] if operator_name(node) == "clone" else node
    return isinstance(source, fx.Node) and is_inplace(source)
