"""The sharding search: an integer program over the placements of a program's distinct operators.

    Problem ──prices──► x[operator, choice] in {0, 1}, flow[edge, from, to] >= 0 ──HiGHS──► Solution

Constraints, by category:

    1  one choice      each operator takes one of its placements
    2  flow            on every edge the producer's result is redistributed to what the user takes
    3  shared          a value that several users want in the same type is redistributed once
    4  ties            a parameter is stored once for all that read it: tied names, instances of a block, the root
    5  pins            the user's decisions
    6  meaning         on tp weights are sharded wherever a rule allows; on cp weights are whole; on ep expert weights are sharded
    7  memory          parameters, their gradients and optimizer state, and activations fit

Category 6 is a constraint where it can be fulfilled, else an objective that precedes time, so it never makes a program infeasible.
Time is compute, redistribution forward and backward, and the all-reduce of gradients once a step. Only choices that no solution can
take are dropped beforehand, so the optimum is over all combinations. The linear relaxation is solved first
(:mod:`graphpar.passes.sharding.integer_program`); branching is only needed where its solution is fractional. Instances of a block
share a class, and so a decision: nothing grows with the number of layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor, fx

from graphpar.annotations.values import Spec, allows, spec_text
from graphpar.cost_models.flops import operator_flops
from graphpar.cost_models.sharding import ShardingCosts
from graphpar.errors import GraphparError
from graphpar.ir.program import module_path, operator_name, value_of
from graphpar.operators.placement import results_of
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.sharding.costs import Prices, Workload, parameter_name
from graphpar.passes.sharding.experts import check_degree, find_experts
from graphpar.passes.sharding.integer_program import IntegerProgram, Optimum
from graphpar.passes.sharding.problem import Choice, Edge, Operator, Problem, Types, Value
from graphpar.passes.sharding.solution import Solution, priced
from graphpar.runtime.axes import AXIS, Divides
from graphpar.runtime.layout import P, R, Shard, Type

_TIE_BREAK = 1e-12  # seconds: less than the difference between any two prices


@dataclass(frozen=True)
class SearchConstraints:
    """The user's decisions: allowed types by axis, of parameters by name, of the results of operators, and of their first operands."""

    parameters: Mapping[str, Spec] = field(default_factory=dict)
    values: Mapping[fx.Node, Spec] = field(default_factory=dict)
    operands: Mapping[fx.Node, Spec] = field(default_factory=dict)


def search(
    problem: Problem, workload: Workload, costs: ShardingCosts | None = None, pins: SearchConstraints | None = None
) -> Solution:
    """Return the cheapest placements.

    Raises:
        GraphparError: no placement fulfils the pins or fits the memory; the message says which.
    """
    return _Search(problem, workload, costs or ShardingCosts(), pins or SearchConstraints()).solve()


def possible(problem: Problem, pins: SearchConstraints) -> Mapping[Operator, Sequence[int]]:
    """Return the choices of each operator that the pins allow and its neighbours can follow.

    Raises:
        GraphparError: an operator has none.
    """
    return _Search(problem, Workload(1, 1), ShardingCosts(), pins).possible()


def views_of_weights(problem: Problem) -> set[fx.Node]:
    """Return parameters, their views, such as ``weight.T``, and their casts, such as ``weight.bfloat16()``."""
    found: set[fx.Node] = set()
    for operator in problem.operators:
        record = record_of(operator.node)
        same = (record.free or record.kind is Kind.COPY) and operator.operands and found.issuperset(operator.operands)
        if operator.kind == "parameter" or same:
            found.add(operator.node)
    return found


def _pending(choice: Choice) -> int:
    """Return how many operands are partial sums; among equally cheap choices those that reduce early come first."""
    return sum(kind is P for types in choice.operands for kind in types)


class _Infeasible(Exception):
    """No solution, or none without weights that stay whole."""


class _Search:
    def __init__(self, problem: Problem, workload: Workload, costs: ShardingCosts, pins: SearchConstraints) -> None:
        self.problem, self.workload = problem, workload
        self.prices = Prices(problem, workload, costs)
        self.pins = pins
        self.options: dict[Operator, list[int]] = {}
        self._given: dict[tuple[Operator, int], list[int]] = {}
        self._taken: dict[Edge, list[int]] = {}
        self.weights = views_of_weights(problem)
        self.parameters = max(1, problem.program.parameter_count())
        self.experts = find_experts((operator.node for operator in problem.operators), problem.program.blocks)
        self.homes = {self._home(node): count for node, count in self.experts.counts.items()}
        for axis in problem.axes:
            if AXIS[axis].divides is Divides.EXPERTS:
                check_degree(self.experts, problem.degrees[axis], problem.program.name)
        self.flops = (
            sum(
                operator_flops(o.node, workload.microbatch) * o.count
                for o in problem.operators
                if record_of(o.node).multiplies
            )
            or 1.0
        )

    def solve(self) -> Solution:
        """Return the cheapest solution, with as few whole weights and repeated products as possible."""
        try:
            solution = self._solve(strict=True)
        except _Infeasible:  # some weight can't be sharded, or some product can't be divided
            try:
                solution = self._solve(strict=False)
            except _Infeasible:
                raise self._refused() from None
        solution.parts = priced(solution, self.prices)
        solution.seconds = sum(solution.parts.values())
        return solution

    def possible(self) -> Mapping[Operator, Sequence[int]]:
        """Return the choices that are left before the search."""
        self.options = {operator: self._pinned(operator) for operator in self.problem.operators}
        try:
            self._prune(strict=False)
        except _Infeasible:
            raise self._refused() from None
        return self.options

    def _solve(self, strict: bool) -> Solution:
        self.options = {operator: self._pinned(operator) for operator in self.problem.operators}
        self._prune(strict)
        self._clear()
        self._choose_one()
        self._flow()
        self._tie()
        if self.workload.memory_limit is not None:
            terms = [(column, nbytes) for column, nbytes in enumerate(self.stored) if nbytes]
            self.program.row(terms, -np.inf, self.workload.memory_limit)
        if not strict:
            self._limit_missed()
        found = self._run()
        choices = {}
        for operator, allowed in self.options.items():
            best = max(allowed, key=lambda i, o=operator: (found.values[self.column[o, i]], -i))  # type: ignore[misc]
            choices[operator] = operator.choices[best]
        return Solution(self.problem, choices, 0.0, found.gap)

    # ---- choices that are left ----

    def _pinned(self, operator: Operator) -> list[int]:
        """Return the choices that the pins allow."""
        allowed = [i for i, choice in enumerate(operator.choices) if self._allowed(operator, choice)]
        if not allowed:
            raise GraphparError(self._impossible(operator))
        return allowed

    def _prune(self, strict: bool) -> None:
        """Drop choices that no solution can take, since no operand can be redistributed to them or no user takes their result.

        ``strict``: drop also those that leave more undivided than others of the operator.
        """
        if strict:
            for operator, allowed in self.options.items():
                least = min(self._missed(operator, operator.choices[i]) for i in allowed)
                self.options[operator] = [i for i in allowed if self._missed(operator, operator.choices[i]) == least]
        edges = [(value, edge) for value in self.problem.values for edge in value.edges]
        changed: set[Operator] | None = None
        for sweep in range(6):
            now: set[Operator] = set()
            for value, edge in edges if sweep % 2 == 0 else reversed(edges):
                touched = changed is None or not {edge.maker, edge.user}.isdisjoint(changed | now)
                if touched and self._consistent(value, edge):
                    now |= {edge.maker, edge.user}
            changed = now
            if not changed:
                break

    def _consistent(self, value: Value, edge: Edge) -> bool:
        """Drop choices at both ends of an edge that have no counterpart; return whether there were any."""
        maker, user = value.maker, edge.user
        if user not in self.options:
            return False
        given, taken = self._given_by(value), self._taken_by(edge)
        made = list(dict.fromkeys(given[i] for i in self.options[maker]))
        required = list(dict.fromkeys(taken[i] for i in self.options[user]))
        possible = np.isfinite(self._transitions(value, edge, made, required))
        sources, targets = possible.any(axis=1), possible.any(axis=0)
        if sources.all() and targets.all():
            return False
        kept = {number for number, reached in zip(made, sources) if reached}
        self.options[maker] = [i for i in self.options[maker] if given[i] in kept]
        kept = {number for number, reached in zip(required, targets) if reached}
        self.options[user] = [i for i in self.options[user] if taken[i] in kept]
        if not self.options[maker] or not self.options[user]:
            raise _Infeasible
        return True

    def _given_by(self, value: Value) -> list[int]:
        """Return for each choice of the producer the number of the value's types."""
        key = (value.maker, value.index)
        if key not in self._given:
            self._given[key] = [self.prices.number(choice.results[value.index]) for choice in value.maker.choices]
        return self._given[key]

    def _taken_by(self, edge: Edge) -> list[int]:
        """Return for each choice of the user the number of the types in which it takes the value."""
        if edge not in self._taken:
            self._taken[edge] = [self.prices.number(self._required(edge, choice)) for choice in edge.user.choices]
        return self._taken[edge]

    def _required(self, edge: Edge, choice: Choice) -> Types:
        return choice.results[0] if edge.user.kind == "boundary" else choice.operands[edge.position]

    # ---- variables and constraints ----

    def _clear(self) -> None:
        self.missed: list[float] = []  # by choice; their columns come first
        self.stored: list[float] = []
        self.program = IntegerProgram()
        self.column: dict[tuple[Operator, int], int] = {}

    def _choose_one(self) -> None:
        for operator, allowed in self.options.items():
            terms = []
            for place, i in enumerate(sorted(allowed, key=lambda i, o=operator: (_pending(o.choices[i]), i))):  # type: ignore[misc]
                choice = operator.choices[i]
                seconds = self.prices.own(operator, choice)
                column = self.program.column(seconds * operator.count + place * _TIE_BREAK, integral=len(allowed) > 1)
                self.column[operator, i] = column
                self.stored.append(self.prices.memory(operator, choice) * operator.count)
                self.missed.append(self._missed(operator, choice))
                terms.append((column, 1.0))
            self.program.row(terms, 1.0, 1.0)

    def _allowed(self, operator: Operator, choice: Choice) -> bool:
        """Return whether a choice fulfils the pins, and without a pin the meaning of each axis."""
        pin = self._pin(operator)
        ranks = [tensor.ndim for tensor in results_of(operator.node)] if pin else []
        taken = self.pins.operands.get(operator.node, {})
        for place, axis in enumerate(self.problem.axes):
            divides = AXIS[axis].divides
            if axis in taken and choice.operands[0][place] not in taken[axis]:
                return False
            if axis in pin:
                if not all(allows(pin[axis], types[place], rank) for types, rank in zip(choice.results, ranks)):
                    return False
            elif operator.kind == "parameter" and isinstance(choice.results[0][place], Shard):
                if divides is Divides.SEQUENCE:
                    return False
                if divides is Divides.EXPERTS and not self._of_experts(operator, choice.results[0][place]):
                    return False
            own = choice.rewrites[place] == "own_experts"
            if divides is not Divides.EXPERTS and own and not self._pinned_experts(operator, axis):
                return False
        return not self._wide_table(operator, choice)

    def _of_experts(self, parameter: Operator, kind: Type) -> bool:
        """Return whether a shard holds whole experts, of their weights or of another parameter of their module with one row each.

        Of experts that are modules of their own it holds features, since each rank's program names all of them.
        """
        if parameter.node in self.experts.modules:
            return True
        own = self.homes.get(self._home(parameter.node))
        return kind == Shard(0) and own is not None and value_of(parameter.node).shape[0] == own

    @staticmethod
    def _home(node: fx.Node) -> tuple[fx.Graph, str]:
        return node.graph, str(node.target).rpartition(".")[0]

    def _pinned_experts(self, product: Operator, axis: str) -> bool:
        """Return whether the user shards the experts of a product over ``axis``; by default their features are, for equal rows."""
        weight = self.experts.weights.get(product.node)
        return weight is not None and axis in self._pin(self.problem.of[weight])

    def _pin(self, operator: Operator) -> Spec:
        if operator.kind == "parameter":
            return self.pins.parameters.get(self._name(operator), {})
        return self.pins.values.get(operator.node, {})

    def _wide_table(self, operator: Operator, choice: Choice) -> bool:
        """Return whether a choice shards an embedding by columns where it could by rows, as the head that it may be tied to is."""
        if operator_name(operator.node) != "embedding":
            return False
        pinned = self.pins.parameters.get(str(operator.operands[0].target), {})
        return any(
            AXIS[axis].divides is Divides.WEIGHTS
            and axis not in pinned
            and choice.operands[0][place] == Shard(1)
            and any(other.rewrites[place] for other in operator.choices)
            for place, axis in enumerate(self.problem.axes)
        )

    def _undivided(self, operator: Operator, pin: Spec) -> str:
        """Return ``"32 is not divisible by 3; "`` for sizes that a pin shards unevenly."""
        value, degrees = value_of(operator.node), self.problem.degrees
        shape = value.shape if isinstance(value, Tensor) else ()
        shards = [(axis, kind.dim) for axis, allowed in pin.items() for kind in allowed if isinstance(kind, Shard)]
        pairs = [(shape[dim], degrees[axis]) for axis, dim in shards if axis in degrees and dim < len(shape)]
        return "".join(
            f"{size} is not divisible by {degree}; "
            for size, degree in dict.fromkeys(pair for pair in pairs if isinstance(pair[0], int))
            if size % degree
        )

    def _impossible(self, operator: Operator) -> str:
        pin = self._pin(operator)
        name, uneven = module_path(operator.node) or operator.node.name, self._undivided(operator, pin)
        if operator.kind == "parameter":
            name = f"{self._name(operator)} of shape {tuple(value_of(operator.node).shape)}"
        axes = ", ".join(f"{axis}={degree}" for axis, degree in self.problem.degrees.items())
        offered = dict.fromkeys(str(t) for c in operator.choices for types in c.results for t in types)
        return (
            f"{name} can't be placed as {spec_text(pin)} with {axes}: {uneven}its operators allow {', '.join(offered)}. "
            "A dim can be sharded where the degree divides its size (heads as well as features)."
        )

    def _name(self, operator: Operator) -> str:
        return parameter_name(self.problem, operator)

    def _missed(self, operator: Operator, choice: Choice) -> float:
        """Return how much a choice leaves undivided: on tp the share of all weights that stay whole, on cp the share of all products
        that are repeated along the sequence, on ep both.
        """
        missed = 0.0
        for place, axis in enumerate(self.problem.axes):
            divides = AXIS[axis].divides
            of_experts = operator.node in self.experts.counts or operator.node in self.experts.modules
            shards = divides is Divides.WEIGHTS or (divides is Divides.EXPERTS and of_experts)
            if shards and operator.kind == "parameter":
                whole = not isinstance(choice.results[0][place], Shard) and value_of(operator.node).ndim > 1
                own = self.prices.elements(operator.node) * operator.count / self.parameters
                missed += own if whole and own > 1e-3 else 0.0
            product = divides is not Divides.WEIGHTS and record_of(operator.node).multiplies
            if product and not choice.divided[place]:
                own = operator_flops(operator.node, self.workload.microbatch) * operator.count / self.flops
                missed += own if own > 1e-3 else 0.0
        return missed

    def _flow(self) -> None:
        for value in self.problem.values:
            made = self._columns(value.maker, self._given_by(value))
            taken = [self._columns(edge.user, self._taken_by(edge)) for edge in value.edges]
            seconds = [
                self._transitions(value, edge, list(made), list(own)) * value.count
                for edge, own in zip(value.edges, taken)
            ]
            shared = self._shared(made, taken, seconds)
            for own, costs in zip(taken, seconds):
                self._edge(made, own, costs, shared[:, list(own)])

    def _columns(self, operator: Operator, numbers: Sequence[int]) -> dict[int, list[int]]:
        """Return the columns of an operator's choices, by the number of the types of each."""
        found: dict[int, list[int]] = {}
        for i in self.options.get(operator, ()):
            found.setdefault(numbers[i], []).append(self.column[operator, i])
        return found

    def _shared(
        self, made: Mapping[int, list[int]], taken: Sequence[Mapping[int, list[int]]], seconds: Sequence[np.ndarray]
    ) -> np.ndarray:
        """Return the column of each transition that several users of a value may share, else -1. Shape: [source, target number]."""
        size = 1 + max((number for own in taken for number in own), default=0)
        users = np.zeros((len(made), size), dtype=int)
        price = np.zeros((len(made), size))
        for own, costs in zip(taken, seconds):
            paid = np.isfinite(costs) & (costs > 0)
            users[:, list(own)] += paid
            price[:, list(own)] = np.where(paid, costs, price[:, list(own)])
        columns = np.full(users.shape, -1)
        columns[users > 1] = self.program.columns(price[users > 1])
        return columns

    def _edge(
        self, made: Mapping[int, list[int]], taken: Mapping[int, list[int]], seconds: np.ndarray, shared: np.ndarray
    ) -> None:
        source, target = np.nonzero(np.isfinite(seconds))
        paid_by = np.where(seconds[source, target] > 0, shared[source, target], -1)
        flows = self.program.columns(np.where(paid_by < 0, seconds[source, target], 0.0), paid_by)
        cheapest = _cheapest(seconds)[source, target]
        self.program.first.append(np.where(paid_by < 0, flows, paid_by)[cheapest])
        rows = [source, target + len(made)]
        columns, coefficients = [flows, flows], [np.ones(2 * len(flows))]
        for row, own in enumerate((*made.values(), *taken.values())):
            rows.append(np.full(len(own), row))
            columns.append(np.array(own))
            coefficients.append(np.full(len(own), -1.0))
        parts = (np.concatenate(rows), np.concatenate(columns), np.concatenate(coefficients))
        self.program.rows(len(made) + len(taken), *parts, 0.0, 0.0)
        together = np.flatnonzero(paid_by >= 0)
        links = np.arange(len(together))
        terms = np.concatenate((links, links)), np.concatenate((paid_by[together], flows[together]))
        ones = np.repeat((1.0, -1.0), len(together))
        self.program.rows(len(together), *terms, ones, 0.0, np.inf, groups=paid_by[together])

    def _transitions(self, value: Value, edge: Edge, sources: Sequence[int], targets: Sequence[int]) -> np.ndarray:
        """Return the prices of redistributing a value, in seconds; infinite where that is not done.

        Parameters and their views are stored as they are used. Between two instances of a block nothing is redistributed, since
        the block itself can do it before it returns.
        """
        seconds = self.prices.transitions(value, sources, targets)
        if edge.user.kind == "boundary" and edge.user.scope == value.maker.scope:
            return np.where(np.array(sources)[:, None] == np.array(targets), seconds, np.inf)
        if value.maker.node in self.weights:
            types = self.prices.numbered
            for i, j in itertools.product(range(len(sources)), range(len(targets))):
                if not all(map(self._stored_for, self.problem.axes, types[sources[i]], types[targets[j]])):
                    seconds[i, j] = np.inf
        return seconds

    @staticmethod
    def _stored_for(axis: str, stored: Type, used: Type) -> bool:
        """Return whether a parameter may be stored in one type and used in another: on axes other than tp, uses may take a shard of a
        whole parameter.
        """
        whole = not (isinstance(stored, Shard) or isinstance(used, Shard))
        return stored == used or whole or (AXIS[axis].divides is not Divides.WEIGHTS and stored is R)

    def _tie(self) -> None:
        for first, *others in (stored.operators for stored in self.problem.stored):
            own = self._columns(first, self._stored_as(first))
            for other in others:
                theirs = self._columns(other, self._stored_as(other))
                for types in {**own, **theirs}:
                    terms = [(c, 1.0) for c in own.get(types, [])] + [(c, -1.0) for c in theirs.get(types, [])]
                    self.program.row(terms, 0.0, 0.0)

    def _stored_as(self, parameter: Operator) -> list[int]:
        return [self.prices.number(choice.results[0]) for choice in parameter.choices]

    # ---- solving ----

    def _limit_missed(self) -> None:
        """Minimise what stays undivided, and make that a constraint."""
        if not any(self.missed):
            return
        least = float(np.dot(self.missed, self._run(self.missed).values[: len(self.missed)]))
        unit = max(self.missed)
        terms = [(column, amount / unit) for column, amount in enumerate(self.missed) if amount]
        self.program.row(terms, -np.inf, least / unit + 1e-7)

    def _run(self, objective: Sequence[float] | None = None) -> Optimum:
        found = self.program.solve(objective)
        if found is None:
            raise _Infeasible
        return found

    def _refused(self) -> GraphparError:
        return GraphparError(
            f"No sharding of {self.problem.program.name} over "
            f"{', '.join(f'{a}={d}' for a, d in self.problem.degrees.items())} "
            f"satisfies the shard plan{' and fits the memory' if self.workload.memory_limit is not None else ''}."
        )


def _cheapest(seconds: np.ndarray, count: int = 6) -> np.ndarray:
    """Return which transitions are among the cheapest of their source or of their target."""
    found = np.zeros(seconds.shape, dtype=bool)
    for axis in (0, 1):
        places = np.argsort(seconds, axis=axis, kind="stable").take(range(min(count, seconds.shape[axis])), axis)
        np.put_along_axis(found, places, True, axis)
    return found
