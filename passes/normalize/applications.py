"""One module applied several times: the towers of a siamese network, a policy on chosen and rejected answers, a recurrence.

net(a), net(b)   side by side: neither needs the other's result     each application is cut where the first one is
net(net(x))      one after the other: a recurrence                  a later application lies where it stands in the program
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import fx

from graphpar.ir.program import Program, module_path


def first_applications(program: Program) -> dict[fx.Node, fx.Node]:
    """For each operator of the root in one of several applications side by side but the first, its like in that one."""
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
        likes = dict(_numbered(first))
        for nodes in others:
            found.update({node: likes[key] for key, node in _numbered(nodes) if key in likes and node not in found})
    return found


def _numbered(nodes: Iterable[fx.Node]) -> Iterable[tuple[tuple[str, str, int], fx.Node]]:
    """Nodes by module, operator, and how many there are of it before."""
    seen: Counter[tuple[str, str]] = Counter()
    for node in nodes:
        kind = module_path(node), str(node.target)
        yield (*kind, seen[kind]), node
        seen[kind] += 1


def side_by_side(applications: Sequence[Sequence[fx.Node]]) -> bool:
    """Whether none of the applications, given by their nodes, needs what another one makes."""
    owner = {node: number for number, nodes in enumerate(applications) for node in nodes}
    for number, nodes in enumerate(applications):
        reached, pending = set(nodes), list(nodes)
        while pending:
            for user in pending.pop().users:
                if owner.get(user, number) != number:
                    return False
                if user not in reached:
                    reached.add(user)
                    pending.append(user)
    return True
