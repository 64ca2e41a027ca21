"""Modules that are applied several times, and networks beside each other: which operators share a stage.

    net(a), net(b)                  side by side, neither needs the other's result: each application is split where the first one is
    net(net(x))                     one after the other, a recurrence: a later application stays in program order
    policy(a), reference(a) ──►     policy.layers.0  policy.layers.1 | policy.layers.2  policy.layers.3
                                    reference.layers.0    .layers.1  | reference.layers.2    .layers.3

In program order stages of a frozen network, a reference or a teacher, would follow those of the trained one: forwards without a backward,
whose parameters and time are on other ranks. Here the network with more parts is divided, and each operator of the other is where the
divided one is as far, by flops.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import fx

from graphpar.cost_models.flops import node_flops
from graphpar.ir.program import Program, module_path, operator_name
from graphpar.operators.gradients import differentiable_nodes
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


# ---- networks beside each other ---------------------------------------------------------------------------------


_MOST = 0.5
"""A trained network is beside a frozen one if it has more than this share of the flops of all that is trained."""


def placed_with(program: Program) -> dict[fx.Node, fx.Node]:
    """Map operators to others whose stage is theirs, too, or the first one after it on which all that they need is there.

    These are later applications of a module, to the same operator of the first, and networks beside others that have more parts.
    """
    again = first_applications(program)
    return {**again, **_parallel_operators(program, again)}


def followed(placed: Mapping[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    """Return the operator by whose place ``node`` gets its stage: itself, if it follows none."""
    while node in placed:
        node = placed[node]
    return node


def _parallel_operators(program: Program, again: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """Map the operators of networks to those of the network that they are beside."""
    if program.mode != "train" or all(info.requires_grad for info in program.parameters.values()):
        return {}
    nodes = [node for node in program.graph.nodes if node.op in ("call_function", "call_module") and node not in again]
    differentiable = differentiable_nodes(program)
    trained = {node for node in nodes if node in differentiable}
    trained |= {again[node] for node in again if node in differentiable}
    stored = of_state_alone(nodes)
    flops = {node: 0.0 if node in stored else own for node, own in node_flops(program, 1).items()}
    total = sum(flops[node] for node in trained)
    place = {node: index for index, node in enumerate(nodes)}
    quiet = [node for node in _with_parameters(nodes) if node not in trained]
    found: dict[fx.Node, fx.Node] = {}
    pending = _connected(quiet)
    while pending:
        frozen = pending.pop()
        users = [place[user] for node in frozen for user in node.users if user in trained]
        end = min(users, default=len(nodes))
        room = [node for node in nodes[:end] if node in trained]
        if sum(flops[node] for node in room) > _MOST * total:
            if min(_module_count(frozen), _module_count(room)) > 1:
                room = sorted({*room, *_needed_by(room, set(quiet) - set(frozen))}, key=place.__getitem__)
                behind, ahead = (room, frozen) if _module_count(frozen) > _module_count(room) else (frozen, room)
                found |= _aligned(behind, ahead, flops, stored)
        elif users:  # what the trained network begins with, which may be the begin of another network, too
            early = _needed_by([nodes[end]], set(frozen))
            pending += _connected([node for node in frozen if node not in early])
    return found


def _with_parameters(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return what depends on state: parameters, buffers, or blocks."""
    found: dict[fx.Node, None] = {}
    for node in nodes:
        if node.op == "call_module" or any(need.op == "get_attr" or need in found for need in node.all_input_nodes):
            found[node] = None
    return list(found)


def _connected(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Divide ``nodes`` into groups between which nothing flows, each in the order of ``nodes``."""
    head = {node: node for node in nodes}

    def first(node: fx.Node) -> fx.Node:
        while head[node] is not node:
            head[node] = node = head[head[node]]
        return node

    for node in nodes:
        for need in node.all_input_nodes:
            if need in head:
                head[first(need)] = first(node)
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        groups.setdefault(first(node), []).append(node)
    return list(groups.values())


def _needed_by(nodes: Sequence[fx.Node], among: Collection[fx.Node]) -> set[fx.Node]:
    """Return those ``among`` that ``nodes`` need, directly or not."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        new = [need for need in pending.pop().all_input_nodes if need in among and need not in found]
        found.update(new)
        pending += new
    return found


def _module_count(nodes: Sequence[fx.Node]) -> int:
    """Count the modules with parameters, of which blocks are one each."""
    return len(
        {
            module_path(node)
            for node in nodes
            if node.op == "call_module" or any(need.op == "get_attr" for need in node.all_input_nodes)
        }
    )


def _aligned(
    behind: Sequence[fx.Node], ahead: Sequence[fx.Node], flops: Mapping[fx.Node, float], stored: Collection[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Map each operator ``behind`` to the one ``ahead`` that computes when the same share of the flops is done."""
    ends = list(itertools.accumulate(flops[node] for node in ahead))
    whole = sum(flops[node] for node in behind) or 1.0
    found: dict[fx.Node, fx.Node] = {}
    done = 0.0
    for node in behind:
        if node not in stored:
            middle = (done + flops[node] / 2) / whole
            found[node] = ahead[min(bisect.bisect_right(ends, middle * ends[-1]), len(ahead) - 1)]
            done += flops[node]
    for node in reversed(behind):
        if node in stored:  # where it is read
            user = next((user for user in node.users if user in found), None)
            found |= {} if user is None else {node: found[user]}
    return found
