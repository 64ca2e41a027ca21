"""Keys of decisions: how a plan names the operators, parameters and inputs of a graph.

    operator     "mlp.up/linear#0"     module path (in a block relative to the instance), operator, and its number there
    parameter    "mlp.up.weight"       its name (in a block relative to the instance)
    input        "input/input_ids"     the root's by name, "input/0" a block's by position
    output       "output"

A module has the same keys whatever operators precede it, and whatever fx calls their nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import fx

from graphpar.errors import GraphparError, near_match
from graphpar.ir.program import Program, module_path, operator_name
from graphpar.ir.sharding import Decision, Sharding, Types
from graphpar.runtime.layout import ExpertRows
from graphpar.text import is_at_or_below


def keys_of(program: Program, scope: str) -> dict[fx.Node, str]:
    """Return the key of each node of a graph of ``program``; ``scope`` is a block's name, "" the root."""
    block = program.blocks[scope] if scope else None
    graph, base = (program.graph, "") if block is None else (block.graph, block.path)
    met: Counter[str] = Counter()
    inputs = 0
    keys: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            keys[node] = f"input/{inputs if scope else node.target}"
            inputs += 1
        elif node.op == "output":
            keys[node] = "output"
        else:
            parameter = node.op == "get_attr"
            name = str(node.target) if parameter else f"{_relative(module_path(node), base)}/{operator_name(node)}"
            again = met[name]
            met[name] += 1
            keys[node] = name if parameter and not again else f"{name}#{again}"
    return keys


def _relative(path: str, base: str) -> str:
    if base and is_at_or_below(path, base):
        return path[len(base) + 1 :]
    return path


def keyed(program: Program, decisions: Mapping[str, Mapping[fx.Node, Decision]]) -> dict[str, dict[str, Decision]]:
    """Return decisions by scope and key, as a plan has them, from those by scope and node."""
    found = {}
    for scope, rows in decisions.items():
        keys = keys_of(program, scope)
        names = {node.name: key for node, key in keys.items()}
        found[scope] = {keys[node]: _renamed(decision, names.__getitem__) for node, decision in rows.items()}
    return found


def by_node(program: Program, sharding: Sharding) -> dict[fx.Node, Decision]:
    """Return the decisions of a plan by node of ``program``, which is prepared as the sharding says.

    Raises:
        GraphparError: a key names nothing in the program.
    """
    found: dict[fx.Node, Decision] = {}
    for scope, rows in sharding.decisions.items():
        if scope and scope not in program.blocks:
            raise GraphparError(
                f"The plan's sharding decides on the block {scope!r}, which the model does not have.{near_match(scope, program.blocks)} "
                "The model has changed, or the plan was edited; compile the model again."
            )
        nodes = {key: node for node, key in keys_of(program, scope).items()}

        def node_of(key: str, scope: str = scope, nodes: Mapping[str, fx.Node] = nodes) -> fx.Node:
            if key not in nodes:
                where = f"the block {scope}" if scope else "the model, outside of blocks"
                raise GraphparError(
                    f"The plan's sharding decides on {key!r}, which is nothing in {where}.{near_match(key, nodes)} "
                    "The model has changed, or the plan was edited; compile the model again."
                )
            return nodes[key]

        found |= {node_of(key): _renamed(decision, lambda name: node_of(name).name) for key, decision in rows.items()}
    return found


def _renamed(decision: Decision, name: Callable[[str], str]) -> Decision:
    """Rename the values that hold the offsets of experts' rows."""

    def types(own: Types) -> Types:
        return tuple(
            replace(kind, offsets=name(kind.offsets)) if isinstance(kind, ExpertRows) else kind for kind in own
        )

    return Decision(tuple(map(types, decision.operands)), tuple(map(types, decision.results)), decision.rewrites)
