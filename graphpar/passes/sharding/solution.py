"""``Solution``: the result of the sharding search: its price, the work it leaves undivided, and its form in a plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from graphpar.cost_models.flops import operator_flops
from graphpar.ir.program import module_path, operator_name
from graphpar.ir.sharding import Decision, Sharding
from graphpar.operators.matrix import heads_of
from graphpar.operators.table import record_of
from graphpar.passes.sharding.costs import Prices, Workload
from graphpar.passes.sharding.keys import keyed
from graphpar.passes.sharding.problem import Choice, Edge, Operator, Problem, Types
from graphpar.runtime.axes import AXIS, Divides
from graphpar.runtime.layout import I, R, Type
from graphpar.text import share_text


@dataclass
class Solution:
    """The chosen placement of every operator, its seconds a microbatch by the search's prices, and the optimality gap."""

    problem: Problem
    choices: dict[Operator, Choice]
    seconds: float
    gap: float
    parts: dict[str, float] = field(default_factory=dict)  # compute, transitions, gradients

    def types(self, operator: Operator, index: int = 0) -> Types:
        """Return the types of a result of ``operator``."""
        return self.choices[operator].results[index]


def priced(solution: Solution, prices: Prices) -> dict[str, float]:
    """Return the seconds a microbatch of a solution, recomputed from its choices: compute, transitions, gradients."""
    compute = gradients = moved = 0.0
    for operator, choice in solution.choices.items():
        compute += operator.count * prices.compute(operator, choice)
        moved += operator.count * prices.collectives(operator, choice)
        if operator.kind == "parameter":
            gradients += operator.count * prices.finishing(operator, choice.results[0])
    for value in solution.problem.values:
        source = solution.types(value.maker, value.index)
        for target in dict.fromkeys(taken(solution, edge) for edge in value.edges):  # in order, since sums round
            if target == source:
                continue
            seconds = prices.transition(value, source, target)
            assert seconds is not None, (value.node, source, target)
            moved += seconds * value.count
    return {"compute": compute, "transitions": moved, "gradients": gradients}


def taken(solution: Solution, edge: Edge) -> Types:
    """Return the types in which the user of an edge takes the value."""
    choice = solution.choices[edge.user]
    return choice.results[0] if edge.user.kind == "boundary" else choice.operands[edge.position]


def undivided_work(solution: Solution, workload: Workload) -> tuple[str, ...]:
    """Return warnings for matrix products and attention that every rank of an axis computes whole, with the reason."""
    problem = solution.problem
    work = {
        o: operator_flops(o.node, workload.microbatch) * o.count
        for o in problem.operators
        if record_of(o.node).multiplies
    }
    total = sum(work.values()) or 1.0
    found: dict[str, float] = {}
    for operator, flops in work.items():
        for place, axis in enumerate(problem.axes):
            if solution.choices[operator].divided[place]:
                continue
            degree = problem.degrees[axis]
            # Of heads it is said however little it is: who gives tp a degree gives it for them.
            if flops > 0.01 * total or _undivided_heads(operator, axis, degree):
                line = _undivided(operator, axis, place, degree)
                found[line] = found.get(line, 0.0) + flops / total
    shares = {line: f"{share:.0%}" if share >= 0.01 else share_text(share) for line, share in found.items()}
    return tuple(f"{line} ({share} of the flops of matrix products)." for line, share in shares.items())


def _undivided_heads(operator: Operator, axis: str, degree: int) -> int:
    """Return the number of heads of an attention that ``degree`` does not divide; else 0."""
    heads = heads_of(operator.node) if AXIS[axis].divides is Divides.WEIGHTS else 0
    return heads if heads % degree else 0


def _undivided(operator: Operator, axis: str, place: int, degree: int) -> str:
    module = module_path(operator.node) or operator_name(operator.node)
    if operator.scope:
        module = f"{operator.scope}, {'.'.join(module.split('.')[-1:])}"
    if heads := _undivided_heads(operator, axis, degree):
        return f"{module}: {heads} heads don't divide over {axis}={degree}, so every rank computes the full attention"
    possible = any(choice.divided[place] for choice in operator.choices)
    why = (
        "redistributing its operands and results would cost more than that saves" if possible else "no rule divides it"
    )
    return f"{module}: {operator_name(operator.node)} is not divided over {axis}={degree}, since {why}"


def sharding_of(solution: Solution) -> Sharding:
    """Return the solution as plain data, for the plan."""
    problem, program = solution.problem, solution.problem.program
    decisions: dict[str, dict[fx.Node, Decision]] = {"": {}}
    parameters: dict[str, dict[str, Type]] = {}
    for operator, choice in solution.choices.items():
        rows = decisions.setdefault(operator.scope, {})
        rows[operator.node] = Decision(choice.operands, choice.results, choice.rewrites)
        if operator.kind == "parameter":
            spec = dict(zip(problem.axes, choice.results[0]))
            for prefix in program.prefixes(operator.scope):
                for name in program.tie_of(f"{prefix}{operator.node.target}"):
                    assert parameters.setdefault(name, spec) == spec, (
                        f"{name} is stored as {parameters[name]} and as {spec}"
                    )
    unread: dict[str, Type] = {
        axis: R if AXIS[axis].replicas or AXIS[axis].shares_state else I for axis in problem.axes
    }
    for name in program.parameters:
        for tied in program.tie_of(name):
            parameters.setdefault(tied, unread)
    degrees, own = dict(problem.degrees), dict(sorted(parameters.items()))
    return Sharding(degrees, keyed(program, decisions), own, cost=solution.parts, gap=solution.gap)
