"""``share_helpers``: parameter-free parts of the root become functions.

Masks and rotary tables come from inputs and constants alone, so any stage can compute them. Written once as a function,
they are printed once, and each stage that needs one calls it.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from graphpar.ir.program import Helper, Program, value_of
from graphpar.operators.naming import free_name, unique_names, value_name
from graphpar.passes.normalize.functional import is_inplace, written_buffers
from graphpar.passes.normalize.outline import local_size
from graphpar.passes.normalize.simplify import remove_dead_code

_SMALLEST = 5


def share_helpers(program: Program) -> Program:
    """Turn large parameter-free parts of the root graph into calls of helper functions."""
    free = _parameter_free(program)
    order = {node: index for index, node in enumerate(program.graph.nodes)}
    parts = [_sinks(part, order) for part in _components(program, free)]
    parts = [(outputs, members) for outputs, members in parts if len(members) >= _SMALLEST and outputs]
    if not parts:
        return program
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    begins: dict[fx.Node, list[int]] = {}
    results = {node for outputs, _ in parts for node in outputs}
    for index, (outputs, _) in enumerate(parts):
        users = [user for node in outputs for user in node.users if user not in results]
        begins.setdefault(min(users, key=order.__getitem__), []).append(index)
    names: set[str] = set()
    for node in program.graph.nodes:
        for index in begins.get(node, ()):
            _call(program, graph, *parts[index], env, names)
        if node not in results:
            env[node] = graph.node_copy(node, env.__getitem__)
    remove_dead_code(graph)
    return program.with_graph(graph)


def _sinks(part: list[fx.Node], order: dict[fx.Node, int]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return a group's final results, and the operators that compute them, in order.

    A value that is used outside but also leads to another result (position ids, and the mask made of them) stays in the root.
    """
    inside = set(part)
    used_outside = [node for node in part if any(user not in inside for user in node.users)]
    ancestors: dict[fx.Node, set[fx.Node]] = {}
    for node in part:
        above = {argument for argument in node.all_input_nodes if argument in inside}
        ancestors[node] = above.union(*(ancestors[argument] for argument in above))
    inner = set().union(*(ancestors[node] for node in used_outside)) if used_outside else set()
    outputs = [node for node in used_outside if node not in inner and isinstance(value_of(node), Tensor)]
    members = set(outputs).union(*(ancestors[node] for node in outputs)) if outputs else set()
    return outputs, sorted(members, key=order.__getitem__)


def _parameter_free(program: Program) -> list[fx.Node]:
    """Return the operators that depend on no parameter, and not on the model's mode as dropout does, in order."""
    written = written_buffers(program.graph)
    free: dict[fx.Node, None] = {}
    for node in program.graph.nodes:
        if node.op != "call_function" or is_inplace(node):
            continue
        if all(_is_source(program, a, written) or a in free for a in node.all_input_nodes):
            free[node] = None
    return list(free)


def _is_source(program: Program, node: fx.Node, written: set[fx.Node]) -> bool:
    if node.op == "placeholder":
        keys = {entry.name for entry in program.inputs if entry.role == "sample_keys"}
        return str(node.target) not in (*program.count_names, *keys)
    return node.op == "get_attr" and str(node.target) not in program.parameters and node not in written


def _components(program: Program, free: list[fx.Node]) -> list[list[fx.Node]]:
    """Return the connected groups of parameter-free operators, each in order; batch sizes don't connect."""
    members = [node for node in free if not isinstance(value_of(node), torch.SymInt)]
    group: dict[fx.Node, list[fx.Node]] = {}
    for node in members:
        merged = [node]
        for argument in node.all_input_nodes:
            other = group.get(argument)
            if other is not None and other is not group.get(node):
                merged = other + [item for item in merged if item not in other]
        for item in merged:
            group[item] = merged
    order = {node: index for index, node in enumerate(program.graph.nodes)}
    unique = {id(part): part for part in group.values()}
    return [sorted(part, key=order.__getitem__) for part in unique.values()]


def _call(
    program: Program,
    graph: fx.Graph,
    outputs: list[fx.Node],
    members: list[fx.Node],
    env: dict[fx.Node, fx.Node],
    names: set[str],
) -> None:
    inside = set(members)
    arguments: list[fx.Node] = []
    sizes: list[fx.Node] = []
    for node in members:
        for argument in node.all_input_nodes:
            if argument not in inside and argument not in [*arguments, *sizes]:
                (sizes if isinstance(value_of(argument), torch.SymInt) else arguments).append(argument)
    like: int | None = None
    if not any(argument.op == "placeholder" for argument in arguments):
        # No argument has the batch size and the device: take them from an input, or (in later stages) from a received value.
        example = next(entry for entry in program.inputs if entry.batch_dim is not None and entry.role != "sample_keys")
        like = len(arguments)
        arguments.append(next(n for n in program.graph.nodes if n.op == "placeholder" and n.target == example.name))
    inner, body = {}, fx.Graph()
    for argument, name in unique_names(arguments).items():
        inner[argument] = body.placeholder(name if like is None or argument is not arguments[like] else "like")
        inner[argument].meta = dict(argument.meta)
    sources = [inner[argument] for argument in arguments]
    for argument in sizes:
        size = local_size(body, sources, value_of(argument))
        if size is None:
            size = body.placeholder(argument.name)
            size.meta = dict(argument.meta)
            arguments.append(argument)
        inner[argument] = size
    for node in members:
        inner[node] = body.node_copy(node, inner.__getitem__)
    body.output(inner[outputs[0]] if len(outputs) == 1 else tuple(inner[node] for node in outputs))
    helper = Helper(_function_name(outputs, names), body, like)
    call = graph.call_function(helper, tuple(env[argument] for argument in arguments))
    call.meta = {key: outputs[-1].meta[key] for key in ("module_stack", "source") if key in outputs[-1].meta}
    if len(outputs) == 1:
        call.meta |= {key: outputs[0].meta[key] for key in ("val", "batch_coefficients") if key in outputs[0].meta}
        env[outputs[0]] = call
        return
    call.meta["val"] = tuple(value_of(node) for node in outputs)
    for position, node in enumerate(outputs):
        env[node] = graph.call_function(operator.getitem, (call, position))
        env[node].meta = dict(node.meta)


def _function_name(outputs: list[fx.Node], names: set[str]) -> str:
    """Name a helper after its results: ``make_causal_mask``, ``make_rotary_emb``."""
    made = list(dict.fromkeys(value_name(node) for node in outputs if isinstance(value_of(node), Tensor)))
    modules = {entry[0].rpartition(".")[2] for node in outputs for entry in node.meta.get("module_stack", ())[-1:]}
    of_one_module = len(made) > 1 and len(modules) == 1
    base = modules.pop() if of_one_module else "_and_".join(made[:2])
    base = base if base.isidentifier() else made[0]
    name = free_name(f"make_{base}", names)
    names.add(name)
    return name
