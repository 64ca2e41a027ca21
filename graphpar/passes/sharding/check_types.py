"""``check_types``: check a rank's program against the rules, node by node, from its inputs and parameters on.

    parameters' types, collectives by their definition, operators by their rules ──► the type of every value; shapes by execution

Only the program is looked at, not what the search or the lowering noted: a missing collective, or a shard of the wrong dim, leaves an
operator with operands that no placement of its rule allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx

from graphpar.emitted import collectives
from graphpar.ir.program import Program, operator_name, value_of
from graphpar.operators.gradients import block_results
from graphpar.operators.placement import operands_of
from graphpar.operators.rewrite import REWRITES
from graphpar.operators.table import COMPOSITES
from graphpar.operators.transitions import FUNCTIONS
from graphpar.passes.sharding.problem import Operator, Problem, is_operator, result_types, source_types
from graphpar.runtime.layout import ExpertRows, I, P, R, Shard, Type

Types = tuple[Type, ...]
_KINDS: dict[str, Type | None] = {"R": R, "I": I, "P": P, "S": None, "E": None}
"""By the letters of a transition; None: the shard that the call's arguments name."""
_MADE_OWN = {rewrite.own for rewrite in REWRITES.values()} - {None}
"""Functions that make operands a rank's own."""


def check_types(problem: Problem, local: Program) -> list[str]:
    """Return what is wrong with ``local``, the lowered form of the program of ``problem``; empty if nothing is."""
    return _Checker(problem, local).check()


class _Checker:
    def __init__(self, problem: Problem, local: Program) -> None:
        self.problem, self.local, self.axes = problem, local, problem.axes
        self.problems: list[str] = []
        self.results: dict[str, list[Types]] = {}  # of each block
        self.inputs: dict[str, list[Types]] = {}

    def check(self) -> list[str]:
        """Return what is wrong, as sentences."""
        calls = [node for node in self.local.graph.nodes if node.op == "call_module"]
        for name in dict.fromkeys(str(node.meta["block"]) for node in calls):
            graph = self.local.blocks[name].graph
            inside = [node for node in graph.nodes if node.op == "placeholder"]
            types = self._graph(graph, name)
            self.inputs[name] = [types.get(node, ()) for node in inside]
            self.results[name] = [types[node] for node in block_results(graph)]
        types = self._graph(self.local.graph, "")
        output = next(node for node in self.local.graph.nodes if node.op == "output")
        results = [node for node in output.all_input_nodes if isinstance(value_of(node), Tensor)]
        for place, node in enumerate(results):
            origin = node.meta["origin"]
            expected = result_types(
                self.problem.program, origin, place, origin in self.problem.differentiable, self.axes
            )
            if types[node] != expected:
                must = _text(expected) if P in expected else "whole"
                self.problems.append(f"the program returns {node.name} as {_text(types[node])}, but it must be {must}")
        return self.problems

    def _graph(self, graph: fx.Graph, scope: str) -> dict[fx.Node, Types]:
        types: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            if node.op != "output":
                types[node] = self._types(node, scope, types)
        return types

    def _types(self, node: fx.Node, scope: str, types: dict[fx.Node, Any]) -> Any:
        """Return the types of a node's value, from those of its operands; a list where there are several values."""
        if node.op == "placeholder":
            declared = tuple(node.meta["types"].values()) if "types" in node.meta else ()
            if not scope and isinstance(value_of(node), Tensor):
                return source_types(self.problem.program, node, self.axes)
            return declared if scope else ()
        if node.op == "get_attr":
            return self._parameter(node, scope)
        if node.op == "call_module":
            return self._call(node, types)
        if operator_name(node) == "getitem" and isinstance(types.get(node.args[0]), list):  # type: ignore[arg-type]
            return self._settled(node, types[node.args[0]][int(node.args[1])])  # type: ignore[index, arg-type]
        if "transition" in node.meta:
            return self._transition(node, types)
        origin = node.meta.get("origin")
        if origin is None or not is_operator(origin) or origin not in self.problem.of:
            return ()  # sizes, and steps inside of a rewrite
        return self._operator(node, self.problem.of[origin], types)

    def _parameter(self, node: fx.Node, scope: str) -> Types:
        """Return the types in which a parameter is stored, equal in all instances of a block and under all tied names."""
        names = [f"{prefix}{node.target}" for prefix in self.local.prefixes(scope)]
        found = {name: self._stored(name) for own in names for name in self.local.tie_of(own)}
        first = found[names[0]]
        self.problems += [
            f"{name} is stored as {_text(types)}, but {names[0]} as {_text(first)}; both are read by {node.name}"
            for name, types in found.items()
            if types != first
        ]
        return first

    def _stored(self, name: str) -> Types:
        info = self.local.parameters.get(name)
        spec = dict(info.spec) if info is not None else {}
        return tuple(spec.get(axis, R) for axis in self.axes)

    def _call(self, node: fx.Node, types: Mapping[fx.Node, Any]) -> Any:
        name = str(node.meta["block"])
        for argument, expected in zip(node.args, self.inputs[name]):
            if isinstance(argument, fx.Node) and expected and not self._fits(argument, types[argument], expected):
                self.problems.append(
                    f"block {node.target} takes {argument.name} as {_text(expected)}, but it is {_text(types[argument])}"
                )
        several = isinstance(value_of(node), tuple | list)
        return self.results[name] if several else self._settled(node, self.results[name][0])

    def _settled(self, node: fx.Node, types: Types) -> Types:
        """Return the types of a block's result: R and I differ only in gradients, so without a gradient I is R."""
        if node.meta.get("origin", node) in self.problem.differentiable:
            return types
        return tuple(R if kind is I else kind for kind in types)

    def _fits(self, argument: fx.Node, given: Types, expected: Types) -> bool:
        """Return whether a block takes an argument; one without a gradient (an input) may be R where others are I."""
        if argument.meta.get("origin", argument) in self.problem.differentiable:
            return given == expected
        return all(a == b or (a is R and b is I) for a, b in zip(given, expected))

    def _transition(self, node: fx.Node, types: Mapping[fx.Node, Any]) -> Types:
        value, axis, *ends = node.args
        assert isinstance(value, fx.Node) and isinstance(axis, str)
        place = self.axes.index(axis)
        options = dict(node.kwargs)
        if ends:
            assert isinstance(ends[0], fx.Node)
            offs, over = ends[0].args
            assert isinstance(offs, fx.Node)
            options["offsets"] = offs.meta["origin"].name
            if types[offs] != (R,) * len(self.axes) or over != axis:
                self.problems.append(
                    f"{operator_name(node)} on {axis} counts rows by {offs.name} {_text(types[offs])} on {over}"
                )
        row = FUNCTIONS[operator_name(node)]
        two = row.source == row.target == "S"
        source = _KINDS[row.source] or _named(options, "from_" if two else "")
        target = _KINDS[row.target] or _named(options, "to_" if two else "")
        now = list(types[value])
        if now[place] != source:
            self.problems.append(
                f"{operator_name(node)} redistributes {source} to {target}, but {value.name} is {now[place]} on {axis}"
            )
        dims = {kind.dim for kind in (source, target) if isinstance(kind, Shard)}
        for other, kind in zip(self.axes, now):
            within = self.axes.index(other) > place or (ends and other != axis)
            if within and isinstance(kind, Shard) and kind.dim in dims:
                self.problems.append(
                    f"{operator_name(node)} on {axis} moves dim {kind.dim} of {value.name}, which is sharded on {other} too"
                )
        silent = node.meta["origin"] not in self.problem.differentiable
        now[place] = R if silent and target is I else target  # R and I differ only in gradients
        return tuple(now)

    def _operator(self, node: fx.Node, operator: Operator, types: Mapping[fx.Node, Any]) -> Any:
        local = lowered_operands(node, operator.node)
        given = tuple(types[operand] for operand in local)
        found = [choice for choice in operator.choices if choice.operands == given]
        claimed = node.meta.get("types")
        if not found:
            line = node.meta.get("source")
            where = f" ({line.file}:{line.line})" if line else ""
            shown = ", ".join(f"{operand.name} {_text(kind)}" for operand, kind in zip(local, given))
            self.problems.append(f"{operator_name(operator.node)}{where} can't be run on {shown}")
            found = [choice for choice in operator.choices if claimed and choice.results[0] == tuple(claimed.values())]
        choices = [choice for choice in found if claimed is None or choice.results[0] == tuple(claimed.values())]
        if found and not choices:
            said, given_by_rule = _text(tuple(claimed.values()) if claimed else ()), _text(found[0].results[0])
            self.problems.append(f"{node.name} is annotated as {said}, but its rule gives {given_by_rule}")
        choice = (choices or found or operator.choices)[0]
        for name, rewrite in REWRITES.items():
            if rewrite.own is None:
                continue
            own = [axis for axis, chosen in zip(self.axes, choice.rewrites) if chosen == name]
            given_for = [operand.args[1] for operand in operands_of(node) if operand.target is rewrite.own]
            if list(dict.fromkeys(given_for)) != (own[:1] if rewrite.first else own):
                self.problems.append(
                    f"{node.name} is placed as {name} on {own or 'no axis'}, but takes {rewrite.own.__name__} on "
                    f"{given_for or 'none'}"
                )
        results = list(choice.results)
        return results if isinstance(value_of(operator.node), tuple | list) else results[0]


def lowered_operands(node: fx.Node, origin: fx.Node) -> list[fx.Node]:
    """Return the operands of a lowered operator, in the order of the original's."""
    operands = [operands_of(o)[0] if o.target in _MADE_OWN else before_agreement(o) for o in operands_of(node)]
    name = operator_name(node)
    if name in COMPOSITES and COMPOSITES[name].order:
        return [operands[COMPOSITES[name].order.index(place)] for place in range(len(operands))]
    if name == "div" and operator_name(origin) != "div":  # a mean: the operands are those of the sum
        return lowered_operands(operands[0], origin)
    return operands


def before_agreement(node: fx.Node) -> fx.Node:
    """Return what ranks computed before they agreed on it."""
    while node.target is collectives.agree_on:
        node = operands_of(node)[0]
    return node


def _named(options: Mapping[str, Any], prefix: str = "") -> Shard:
    if "offsets" in options:
        return ExpertRows(offsets=options["offsets"])
    return Shard(options[f"{prefix}dim"], tuple(options.get(f"{prefix}parts", ())))


def _text(types: Types) -> str:
    return "|".join(map(str, types))
