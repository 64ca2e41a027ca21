"""``--explain`` of a sharded program: the spec of each tensor around a module, its cost, and the cost of the next best spec.

tensor ──its type forbidden, searched again──► next best type ──priced as a step is──► what a step would take then, and its memory

Seconds are those of the report: of a priced step, and not of the simpler costs that the search minimises.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import fx

from graphpar.annotations.patterns import ShardConstraints, names_of, resolve
from graphpar.annotations.values import Choice, Spec
from graphpar.cli.explain import compared
from graphpar.codegen.formatting import describe_shape
from graphpar.cost_models.collective_costs import SentPrices
from graphpar.cost_models.estimates import Estimate
from graphpar.cost_models.sharding import costs_for
from graphpar.errors import GraphparError
from graphpar.ir.program import Block, module_path
from graphpar.ir.sharding import Sharding, Types
from graphpar.operators.naming import value_name
from graphpar.operators.transitions import moves
from graphpar.passes.compilation import Compilation
from graphpar.passes.planning.prices import estimate_plan
from graphpar.passes.sharding.costs import Prices, Workload
from graphpar.passes.sharding.keys import by_node
from graphpar.passes.sharding.pins import pin_nodes
from graphpar.passes.sharding.problem import Operator, Value
from graphpar.passes.sharding.search import SearchConstraints, search
from graphpar.passes.sharding.solution import Solution, sharding_of
from graphpar.passes.sharding.tp_switches import with_switches
from graphpar.runtime.layout import R, Shard, Type
from graphpar.text import is_at_or_below, seconds_text

MOST = 12
"""How many tensors are searched again, each once for every axis; a pattern may match more."""


class ShardingExplainer:
    """Explains the tensors of ``compilation`` under the sharding of its plan.

    ``shard_plan``: the user's, whose pins hold in every alternative; None where it is not known.
    """

    def __init__(self, compilation: Compilation, shard_plan: Mapping[str, Any] | None) -> None:
        problem, plan, program = compilation.sharded.problem, compilation.plan, compilation.program
        assert problem is not None, "nothing is sharded"
        self.plan, self.sharding, self.whole, self.cluster = plan, plan.sharding, program, compilation.cluster
        self.problem, self.program, self.axes = problem, problem.program, problem.axes
        self.decisions = by_node(self.program, self.sharding)
        self.pins = (
            resolve(shard_plan or {}, names_of(program), plan.sharding.degrees) if shard_plan else ShardConstraints()
        )
        points = plan.sharding.points if shard_plan else ()
        given = SearchConstraints(self.pins.parameters, pin_nodes(self.program, self.pins, points))
        self.given = with_switches(given, problem, plan.sp, plan.loss_parallel)
        self.workload = Workload(plan.microbatch_size, plan.microbatches, plan.mode == "train")
        self.costs = costs_for(program, plan.mesh, plan.cluster)
        self.prices = Prices(self.problem, self.workload, self.costs)
        self.sent = SentPrices(self.program, plan.mesh, plan.microbatch_size, self.cluster)
        self.parameters = dict(self._parameters())
        self._next: dict[Operator, str] = {}
        self._told: dict[tuple[str, str], str] = {}  # by scope and name in it: the instance that was explained first

    def lines(self, name: str) -> list[str]:
        """Explain the parameter or the module ``name``; empty for anything else."""
        if name in self.parameters:
            operator = self.parameters[name]
            told = self._told.setdefault((operator.scope, str(operator.node.target)), name)
            return [f"is placed as {self._tensor(operator)}"] if told == name else [f"is placed as {told} is"]
        if name not in self.program.module_classes:
            return []
        block, own = self._place(name)
        told = self._told.setdefault((block.name if block else "", own), name)
        if told != name:
            return [f"is placed as {told} is"]
        return [f"{what} {label} as {self._tensor(operator)}" for what, label, operator in self._around(block, own)]

    # ---- which tensors ----

    def _parameters(self) -> Iterator[tuple[str, Operator]]:
        for operator in self.problem.operators:
            if operator.kind == "parameter":
                for prefix in self.program.prefixes(operator.scope):
                    yield f"{prefix}{operator.node.target}", operator

    def _place(self, path: str) -> tuple[Block | None, str]:
        """The block that contains a module, and the module's path in the instance of the block that was traced."""
        for block in self.program.blocks.values():
            for instance in block.instances:
                if is_at_or_below(path, instance):
                    return block, block.path + path.removeprefix(instance)
        return None, path

    def _around(self, block: Block | None, own: str) -> list[tuple[str, str, Operator]]:
        """The inputs of a module, the parameters that it uses, and its outputs."""
        scope = "" if block is None else block.name
        region = {
            operator.node: operator
            for operator in self.problem.operators
            if operator.kind == "operator"
            and operator.scope == scope
            and is_at_or_below(module_path(operator.node), own)
        }
        found: dict[tuple[str, Operator], str] = {}
        for value in self.problem.values:
            maker = value.maker
            users = [edge.user for edge in value.edges]
            if maker.node in region and any(user.node not in region for user in users):
                found["gives", maker] = self._label(maker)
            elif maker.node not in region and any(user.node in region for user in users):
                parameter = maker.kind == "parameter"
                found["holds" if parameter else "takes", maker] = self._label(maker)
        order = ("takes", "holds", "gives")
        rows = [(what, label, operator) for (what, operator), label in found.items()]
        return sorted(rows, key=lambda row: order.index(row[0]))

    def _label(self, operator: Operator) -> str:
        if operator.kind == "parameter":
            return str(operator.node.target)
        return f"{value_name(operator.node)} {describe_shape(operator.node)}".rstrip()

    # ---- one tensor ----

    def _tensor(self, operator: Operator) -> str:
        """Its spec, its redistributions and their cost, and the next best spec."""
        types = self._chosen(operator)
        turned = "".join(f", turned into {text}" for text in self._turned(operator, types))
        return f"{self._spec(types)}{turned}; {self._alternative(operator, types)}"

    def _chosen(self, operator: Operator) -> Types:
        return self.decisions[operator.node].results[0]

    def _spec(self, types: Types) -> str:
        return ", ".join(f"{kind}@{axis}" for axis, kind in zip(self.axes, types))

    def _turned(self, operator: Operator, types: Types) -> list[str]:
        """The redistributions of a value, for one instance and microbatch."""
        found: dict[Types, str] = {}
        for value in self.problem.values:
            if value.maker is not operator or value.index:
                continue
            for edge in value.edges:
                decision = self.decisions[edge.user.node]
                required = decision.results[0] if edge.user.kind == "boundary" else decision.operands[edge.position]
                seconds = self._path_s(value, types, required) if required != types else None
                if seconds is not None:
                    found[required] = f"{self._spec(required)} ({seconds_text(seconds)})"
        return list(found.values())

    def _path_s(self, value: Value, source: Types, target: Types) -> float | None:
        """Seconds of the redistribution from one to the other, forward and backward; None where there is no path."""
        steps = moves(source, target, value.differentiable)
        if steps is None:
            return None
        seconds, now = 0.0, list(source)
        for place, step in steps:
            now[place] = R
            nbytes = self.prices.nbytes(value.maker.node, tuple(now), value.index)
            seconds += self.sent.step_s(step.transition, self.axes[place], nbytes, value.differentiable) or 0.0
            now[place] = step.target
        return seconds

    @cached_property
    def step(self) -> Estimate:
        """A step of the plan."""
        return self._estimate(self.sharding)

    def _estimate(self, sharding: Sharding) -> Estimate:
        placed = replace(
            self.plan, sharding=replace(sharding, variants=self.sharding.variants, points=self.sharding.points)
        )
        return estimate_plan(self.whole, placed, self.cluster)

    def _alternative(self, operator: Operator, types: Types) -> str:
        if operator not in self._next:
            if len(self._next) >= MOST:
                return f"the next best was searched for the first {MOST} tensors only; give a narrower pattern"
            self._next[operator] = self._next_best(operator, types)
        return self._next[operator]

    def _next_best(self, operator: Operator, types: Types) -> str:
        pinned = self._pinned(operator)
        best: Solution | None = None
        possible = False
        for place, axis in enumerate(self.axes):
            others = frozenset(
                c.results[0][place] for c in operator.choices if not _alike(c.results[0][place], types[place])
            )
            if not others or axis in pinned:
                continue
            possible = True
            try:
                solution = search(self.problem, self.workload, self.costs, self._with(operator, axis, others))
            except GraphparError:  # no other type is possible with the rest
                continue
            if best is None or solution.seconds < best.seconds:
                best = solution
        if best is None:
            if pinned:
                origins = ", ".join(map(repr, self._origins(operator)))
                return f"pinned by the shard plan: {origins}" if origins else f"pinned by sp={self.plan.sp}"
            return (
                "no other spec is possible with the rest of the program" if possible else "no rule allows another spec"
            )
        other = self._estimate(sharding_of(best))
        cheaper = other.step_time_s < (1 - 5e-4) * self.step.step_time_s and other.missing_bytes <= 0
        why = "; slower by the costs that the search minimises, or with more memory" if cheaper else ""
        return f"next best {self._spec(best.types(operator))}: {compared(self.step, other)}{why}"

    def _pinned(self, operator: Operator) -> Spec:
        if operator.kind == "parameter":
            return self.given.parameters.get(self._first_name(operator), {})
        return self.given.values.get(operator.node, {})

    def _origins(self, operator: Operator) -> tuple[str, ...]:
        name = self._first_name(operator) if operator.kind == "parameter" else module_path(operator.node)
        usual = () if self.plan.sp is not None else ("a module's input or output",)
        return self.pins.origins.get(name, usual)

    def _first_name(self, operator: Operator) -> str:
        return f"{self.program.prefixes(operator.scope)[0]}{operator.node.target}"

    def _with(self, operator: Operator, axis: str, allowed: Choice) -> SearchConstraints:
        """The user's pins, and ``operator`` with a type of ``allowed``."""
        if operator.kind == "parameter":
            name = self._first_name(operator)
            return replace(
                self.given, parameters={**self.given.parameters, name: {**self._pinned(operator), axis: allowed}}
            )
        values: dict[fx.Node, Spec] = {**self.given.values, operator.node: {**self._pinned(operator), axis: allowed}}
        return replace(self.given, values=values)


def _alike(one: Type, other: Type) -> bool:
    """Tell whether two types are the same except for parts, which a pin does not distinguish."""
    if isinstance(one, Shard) and isinstance(other, Shard):
        return one.dim == other.dim
    return one == other
