"""The best sharding without any pruning, twice: by elimination of one operator after another, and by the whole integer program.

``eliminated`` uses no solver at all: tables over the choices of neighbouring operators, from which one operator after the
other is minimised away (exact dynamic programming). It needs a few dozen choices an operator, so one axis. ``integer`` is the
search's own program, with nothing dropped and no gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from graphpar.cost_models.sharding import ShardingCosts
from graphpar.passes.sharding import search as passes_search
from graphpar.passes.sharding.costs import Workload
from graphpar.passes.sharding.problem import Choice, Edge, Operator, Problem, Types, Value
from graphpar.passes.sharding.search import SearchConstraints
from graphpar.passes.sharding.solution import priced
from graphpar.runtime.layout import R, Shard

LARGEST = 60_000_000  # entries of a table
Table = tuple[tuple[int, ...], np.ndarray, np.ndarray]  # operators; what misses the meaning; seconds


class _Whole(passes_search._Search):
    """The search with every choice that the pins allow, and every transition."""

    def _prune(self, strict: bool) -> None:
        if strict:
            raise passes_search._Infeasible  # the least that misses the meaning is computed, not assumed


def integer(
    problem: Problem, workload: Workload, pins: SearchConstraints | None = None, costs: ShardingCosts | None = None
) -> float:
    """Seconds of the best solution."""
    return _Whole(problem, workload, costs or ShardingCosts(), pins or SearchConstraints()).solve().seconds


def eliminated(
    problem: Problem, workload: Workload, pins: SearchConstraints | None = None, costs: ShardingCosts | None = None
) -> float:
    """Seconds of the best of all combinations of choices.

    Raises:
        MemoryError: the problem is too large for a table.
    """
    whole = _Whole(problem, workload, costs or ShardingCosts(), pins or SearchConstraints())
    operators = [*problem.operators, *(o for o in problem.of.values() if o.kind == "output")]
    choices = [[o.choices[i] for i in whole._pinned(o)] if o.kind != "output" else o.choices for o in operators]
    number = {id(operator): i for i, operator in enumerate(operators)}
    tables: list[Table] = []
    for i, operator in enumerate(operators):
        seconds = [
            whole.prices.own(operator, c) * operator.count if operator.kind != "output" else 0.0 for c in choices[i]
        ]
        missed = [whole._missed(operator, c) if operator.kind != "output" else 0.0 for c in choices[i]]
        tables.append(((i,), np.array(missed), np.array(seconds)))
    for value in problem.values:
        tables.append(_value_table(whole, value, number, choices))
    tables += _tie_tables(whole, operators, number, choices)
    return _eliminate(tables, [len(c) for c in choices])


def _value_table(whole: _Whole, value: Value, number: dict[int, int], choices: Sequence[Sequence[Choice]]) -> Table:
    """Seconds of a value's transitions, each target paid once, for all choices of its maker and users; infinite where one can't be."""
    maker = number[id(value.maker)]
    users = list(dict.fromkeys(number[id(edge.user)] for edge in value.edges))
    scope = [maker, *(user for user in users if user != maker)]
    made = [choice.results[value.index] for choice in choices[maker]]
    wanted = [[whole._required(edge, choice) for choice in choices[number[id(edge.user)]]] for edge in value.edges]
    shape = [len(choices[i]) for i in scope]
    if math.prod(shape) > LARGEST:
        raise MemoryError
    seconds = np.zeros(shape)
    for source in dict.fromkeys(made):
        rows = [i for i, kind in enumerate(made) if kind == source]
        total = np.zeros(shape[1:])
        for target in dict.fromkeys(kind for kinds in wanted for kind in kinds):
            if target == source:
                continue
            takes = np.zeros(shape[1:], dtype=bool)
            price = 0.0
            for edge, kinds in zip(value.edges, wanted):
                place = scope.index(number[id(edge.user)]) - 1
                own = np.array([kind == target for kind in kinds])
                view = [1] * len(shape[1:])
                view[place] = len(kinds)
                seconds_of_edge = _price(whole, value, edge, source, target)
                if math.isinf(seconds_of_edge):  # whatever other users may take
                    total = np.where(own.reshape(view), math.inf, total)
                else:
                    takes |= own.reshape(view)
                    price = seconds_of_edge
            total = np.where(takes, total + price, total)
        seconds[rows] = total * value.count
    return tuple(scope), np.zeros(shape), seconds


def _price(whole: _Whole, value: Value, edge: Edge, source: Types, target: Types) -> float:
    for axis, stored, used in zip(whole.problem.axes, source, target):
        cut = isinstance(stored, Shard) or isinstance(used, Shard)
        if value.maker.node in whole.weights and stored != used and cut and not (axis == "cp" and stored is R):
            return math.inf  # a parameter is stored as it is used; only cp stores all whole
    if edge.user.kind == "boundary" and edge.user.scope == value.maker.scope:
        return math.inf  # between two instances of a block nothing is moved
    seconds = whole.prices.transition(value, source, target)
    return math.inf if seconds is None else seconds


def _tie_tables(
    whole: _Whole, operators: Sequence[Operator], number: dict[int, int], choices: Sequence[Sequence[Choice]]
) -> list[Table]:
    names: dict[str, list[int]] = {}
    for operator in operators:
        if operator.kind == "parameter":
            program = whole.problem.program
            paths = [f"{path}." for path in program.blocks[operator.scope].instances] if operator.scope else [""]
            for name in dict.fromkeys(program.tie_of(f"{path}{operator.node.target}")[0] for path in paths):
                names.setdefault(name, []).append(number[id(operator)])
    found: list[Table] = []
    for first, *others in names.values():
        for other in others:
            same = np.array([[a.results == b.results for b in choices[other]] for a in choices[first]])
            found.append(((first, other), np.zeros(same.shape), np.where(same, 0.0, np.inf)))
    return found


def _eliminate(tables: list[Table], sizes: Sequence[int]) -> float:
    """Minimises the sum of the tables: the meaning first, then seconds."""
    left = set(range(len(sizes)))
    while left:
        around = {i: {j for scope, _, _ in tables if i in scope for j in scope} for i in left}
        chosen = min(sorted(left), key=lambda i: math.prod(sizes[j] for j in around[i]))
        scope = tuple(sorted(around[chosen]))
        if math.prod(sizes[j] for j in scope) > LARGEST:
            raise MemoryError
        joined = [table for table in tables if chosen in table[0]]
        missed, seconds = np.zeros([1] * len(scope)), np.zeros([1] * len(scope))
        for table in joined:
            missed, seconds = missed + _spread(table[0], table[1], scope), seconds + _spread(table[0], table[2], scope)
        missed, seconds = np.broadcast_arrays(missed, seconds)
        missed = np.where(np.isinf(seconds), np.inf, missed)
        place = scope.index(chosen)
        least = missed.min(axis=place, keepdims=True)
        seconds = np.where(missed <= least + 1e-12, seconds, np.inf).min(axis=place)
        tables = [table for table in tables if chosen not in table[0]]
        tables.append((scope[:place] + scope[place + 1 :], least.squeeze(place), seconds))
        left.remove(chosen)
    return float(sum(table[2] for table in tables))


def _spread(own: tuple[int, ...], values: np.ndarray, scope: tuple[int, ...]) -> np.ndarray:
    order = sorted(range(len(own)), key=lambda i: own[i])
    ordered = np.transpose(values, order)
    sizes = iter(ordered.shape)
    return ordered.reshape([next(sizes) if i in own else 1 for i in scope])


def repriced(solution: passes_search.Solution, workload: Workload, costs: ShardingCosts | None = None) -> float:
    """Seconds of a solution by its choices alone."""
    prices = passes_search.Prices(solution.problem, workload, costs or ShardingCosts())
    return math.fsum(priced(solution, prices).values())
