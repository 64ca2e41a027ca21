"""The prices of the sharding search: seconds and bytes of an operator's placement, and of redistributing a value.

    Choice       ──Prices.compute──► seconds of the operator on a rank's shards, forward and backward
    Types, Types ──Prices.transitions──► seconds of the collectives between them, in tables
    Parameter    ──Prices.finishing──► seconds of the all-reduce of its gradient, once a step, spread over the microbatches

All are for one instance and one microbatch, at the rates of :class:`graphpar.cost_models.sharding.ShardingCosts`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from graphpar.cost_models.flops import operator_flops
from graphpar.cost_models.sharding import ShardingCosts
from graphpar.ir.program import operator_name, value_of
from graphpar.operators.composite import Local
from graphpar.operators.parallel_products import AXIS, ENTERING, is_product
from graphpar.operators.placement import sizes_of
from graphpar.operators.table import COMPOSITES, record_of
from graphpar.operators.transitions import Step, collective_cost, moves
from graphpar.passes.sharding.problem import Choice, Operator, Problem, Types, Value
from graphpar.runtime.layout import R, Shard, Type


@dataclass(frozen=True)
class Workload:
    """Rows of a microbatch, their number, and memory: what prices depend on besides the program."""

    microbatch: int
    microbatches: int
    train: bool = True
    memory_limit: float | None = None  # bytes of one device


class Prices:
    """Seconds of choices and transitions, for one instance and one microbatch."""

    def __init__(self, problem: Problem, workload: Workload, costs: ShardingCosts) -> None:
        self.problem, self.workload, self.costs = problem, workload, costs
        self._elements: dict[tuple[fx.Node, int], float] = {}
        self._whole: dict[tuple[fx.Node, int], float] = {}
        self._parameters = {
            stored.operators[0]: stored.parameters / stored.operators[0].count for stored in problem.stored
        }
        self._numbers: dict[Types, int] = {}
        self._steps: dict[tuple[str, int, bool, bool], tuple[float, float]] = {}
        self._flops: dict[fx.Node, float] = {}
        self._paths: dict[bool, np.ndarray] = {flag: np.full((6, 0, 0), np.nan) for flag in (False, True)}
        self._beside: dict[tuple[fx.Node, int], float] = {}

    def elements(self, node: fx.Node, index: int = 0) -> float:
        """Return the elements of the unsharded tensor."""
        if (node, index) not in self._elements:
            if isinstance(value_of(node), tuple | list):
                user = next((u for u in node.users if operator_name(u) == "getitem" and u.args[1] == index), None)
                found = self.elements(user) if user is not None else 0.0
            else:
                rows = self.workload.microbatch
                found = float(math.prod(n * (rows if power else 1) for n, power in sizes_of(node)))
            self._elements[node, index] = found
        return self._elements[node, index]

    def nbytes(self, node: fx.Node, types: Types, index: int = 0) -> float:
        """Return the bytes of a rank's shard."""
        value = value_of(node)
        tensor = value[index] if isinstance(value, tuple | list) else value
        return float(self.elements(node, index) * tensor.dtype.itemsize / self._pieces(types))

    def _pieces(self, types: Sequence[Type]) -> int:
        return math.prod(
            self.problem.degrees[axis] for axis, kind in zip(self.problem.axes, types) if isinstance(kind, Shard)
        )

    def compute(self, operator: Operator, choice: Choice) -> float:
        """Return the seconds of an operator on a rank's shards, forward and backward."""
        node = operator.node
        if operator.kind != "operator" or record_of(node).free:
            return 0.0
        backward = node in self.problem.differentiable and self.workload.train
        if node not in self._flops:
            self._flops[node] = operator_flops(node, self.workload.microbatch)
        flops = self._flops[node] / choice.share
        moved = sum(self.nbytes(n, types) for n, types in zip(operator.operands, choice.operands))
        moved += sum(self.nbytes(node, types, index) for index, types in enumerate(choice.results))
        times = 1 + (2 if record_of(node).multiplies else 1) * backward
        return times * self.costs.operator_s(flops, moved)

    def collectives(self, operator: Operator, choice: Choice) -> float:
        """Return the seconds of the collectives inside a rewritten operator that its own steps do not hide."""
        seconds, node = 0.0, operator.node
        for axis, rewrite in zip(self.problem.axes, choice.rewrites):
            composite = COMPOSITES.get(rewrite)
            if composite is None or composite.sends is None:
                continue
            degree = self.problem.degrees[axis]
            operands = composite.ordered(list(map(self._local, operator.operands, choice.operands)))
            ways = composite.sends(node, operands, self._local(node, choice.results[0]), degree)
            train = self.workload.train and node in self.problem.differentiable
            forward_s = self.compute(operator, choice) / (3 if train else 1) / degree
            for messages, step_s in zip(ways[: 1 + train], (forward_s, 2 * forward_s)):
                for message in messages:
                    sent = self.costs.collective_s(axis, collective_cost(message.collective, message.nbytes, degree))
                    seconds += message.times * max(0.0, sent - step_s * message.beside)
        return seconds

    def _local(self, node: fx.Node, types: Types) -> Local:
        """Describe a rank's shard of a tensor."""
        rows, tensor = self.workload.microbatch, value_of(node)
        tensor = tensor[0] if isinstance(tensor, tuple | list) else tensor
        sizes = [float(n * (rows if power else 1)) for n, power in sizes_of(node)]
        for axis, kind in zip(self.problem.axes, types):
            if isinstance(kind, Shard):
                sizes[kind.dim] /= self.problem.degrees[axis]
        return Local(sizes, tensor.dtype.itemsize)

    def own(self, operator: Operator, choice: Choice) -> float:
        """Return all seconds of an operator except redistributing its operands."""
        seconds = self.compute(operator, choice) + self.collectives(operator, choice)
        return seconds + (self.finishing(operator, choice.results[0]) if choice.results else 0.0)

    def transition(self, value: Value, source: Types, target: Types) -> float | None:
        """Return the seconds of redistributing a value, forward and backward; None where that is not possible."""
        seconds = float(self.transitions(value, [self.number(source)], [self.number(target)])[0, 0])
        return seconds if math.isfinite(seconds) else None

    @property
    def numbered(self) -> list[Types]:
        """The types behind each number."""
        return list(self._numbers)

    def number(self, types: Types) -> int:
        """Return a small number for a tuple of types, as :meth:`transitions` takes it."""
        return self._numbers.setdefault(types, len(self._numbers))

    def transitions(self, value: Value, sources: Sequence[int], targets: Sequence[int]) -> np.ndarray:
        """Return the seconds of redistributing from each of ``sources`` to each of ``targets``; infinite where not possible.

        Shape: [sources, targets].
        """
        place = (value.maker.node, value.index)
        if place not in self._whole:
            self._whole[place] = self.nbytes(value.maker.node, (), value.index)
        table = self._paths[value.differentiable]
        if table.shape[1] < len(self._numbers):
            grown = np.full((len(table), 2 * len(self._numbers), 2 * len(self._numbers)), np.nan)
            grown[:, : table.shape[1], : table.shape[2]] = table
            table = self._paths[value.differentiable] = grown
        chosen = np.ix_(range(len(table)), sources, targets)
        if np.isnan(table[chosen]).any():
            types = self.numbered
            for source, target in itertools.product(sources, targets):
                if np.isnan(table[0, source, target]):
                    table[:, source, target] = self._path(types[source], types[target], value.differentiable)
        seconds, seconds_per_byte, sums, sums_per_byte, share, dim = table[chosen]
        found = seconds + seconds_per_byte * self._whole[place]
        if beside := self._beside_s(value):
            of_rows = dim < value_of(value.maker.node).ndim - 1
            found -= of_rows * np.minimum(sums + sums_per_byte * self._whole[place], beside * share)
        return np.asarray(found)

    def _beside_s(self, value: Value) -> float:
        """Return the seconds on one device of the gradients of the weights by which all that reads a value multiplies it; 0 where
        something else reads it, too, or the device computes and sends in turn."""
        place, train = (value.maker.node, value.index), self.workload.train and value.differentiable
        if place not in self._beside:
            users = [edge.user.node for edge in value.edges]
            whole = value_of(value.maker.node)
            alone = all(edge.position == 0 and is_product(edge.user.node) for edge in value.edges)
            alone = alone and not isinstance(whole, tuple | list)
            trained = [node for node in users if node.args[1] in self.problem.differentiable] if alone else []
            flops = sum(operator_flops(node, self.workload.microbatch) for node in trained)
            self._beside[place] = flops / self.costs.flops_per_s if self.costs.hides and train else 0.0
        return self._beside[place]

    def _path(self, source: Types, target: Types, differentiable: bool) -> tuple[float, ...]:
        """Return the latency of a path's collectives, and the seconds for each byte of the unsharded tensor; both again of the sum of the
        gradient that products of its result can hide, and a rank's share of these products, with the gathered dim or -1."""
        steps = moves(source, target, differentiable)
        if steps is None:
            return math.inf, 0.0, 0.0, 0.0, 0.0, -1
        seconds, seconds_per_byte, now = 0.0, 0.0, list(source)
        sums, sums_per_byte, share, dim = 0.0, 0.0, 0.0, -1
        for place, step in steps:
            now[place] = R
            if step.function is not None:
                started, sent = self._step(step, place, differentiable)
                seconds += started
                seconds_per_byte += sent / self._pieces(now)
                if self._joins(step, place):
                    started, sent = self._step(step, place, differentiable, forward=False)
                    sums, sums_per_byte = started, sent / self._pieces(now)
                    dim = step.source.dim if isinstance(step.source, Shard) else -1
                    share = 1 / (self.problem.degrees[AXIS] * self._pieces(target))
            now[place] = step.target
        return seconds, seconds_per_byte, sums, sums_per_byte, share, dim

    def _joins(self, step: Step, place: int) -> bool:
        """Whether a transition becomes one function with the products that read its result."""
        plain = not (isinstance(step.source, Shard) and step.source.parts)
        names = [function.__name__ for function in ENTERING]
        return self.problem.axes[place] == AXIS and step.function in names and step.target is R and plain

    def _step(self, step: Step, place: int, differentiable: bool, forward: bool = True) -> tuple[float, float]:
        """Return the latency of a transition's collectives, and the seconds for each byte of the tensor unsharded on the axis; without
        ``forward`` of its backward alone."""
        key = (str(step.function), place, differentiable, forward)
        if key not in self._steps:
            axis, row = self.problem.axes[place], step.transition
            backward = row.backward_collective if differentiable and self.workload.train else None
            ways = [
                collective_cost(name, 1.0, self.problem.degrees[axis])
                for name in (row.forward_collective if forward else None, backward)
            ]
            self._steps[key] = (
                sum(self.costs.transition_s(axis, cost.messages, 0.0) for cost in ways),
                sum(cost.bytes_sent for cost in ways) / self.costs.transition_rate(axis),
            )
        return self._steps[key]

    def finishing(self, operator: Operator, types: Types) -> float:
        """Return the seconds of all-reducing a partial gradient, once a step, spread over the microbatches."""
        node, parameters = operator.node, self._parameters.get(operator, 0.0)
        if not parameters or node not in self.problem.differentiable or not self.workload.train:
            return 0.0
        seconds = 0.0
        for axis, kind in zip(self.problem.axes, types):
            if kind is R:
                degree = self.problem.degrees[axis]
                seconds += self.nbytes(node, types) * 2 * (degree - 1) / degree / self.costs.transition_rate(axis)
        return seconds * parameters / self.workload.microbatches

    def memory(self, operator: Operator, choice: Choice) -> float:
        """Return the bytes kept on a device: parameters with their state, and results that the backward needs."""
        differentiable = operator.node in self.problem.differentiable
        if operator.kind == "parameter":
            factor = 2.0 + self.problem.program.optimizer.tensors if differentiable else 1.0  # with gradient and state
            count = self._parameters.get(operator, 0.0)
            return count * factor * sum(self.nbytes(operator.node, types) for types in choice.results)
        saved = operator.kind == "operator" and differentiable and self.workload.train
        if not saved or record_of(operator.node).free:
            return 0.0
        return sum(self.nbytes(operator.node, types, index) for index, types in enumerate(choice.results))


def parameter_name(problem: Problem, operator: Operator) -> str:
    """Return the name of a parameter; in a block, its name in the first instance."""
    return f"{problem.program.prefixes(operator.scope)[0]}{operator.node.target}"
