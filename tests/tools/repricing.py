"""``Repricing``: the price of a rank's program, computed from the program itself: an oracle for the sharding search.

    lowered program ──every instance of every block──► local work, collectives, gradients ──► seconds a microbatch

Only the rates are the search's. The search adds up a folded program (a block once, equal values once, tied parameters once); this
walks the one that runs. Where both agree, the search has minimised what will run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, fx

from graphpar.cost_models.flops import operator_flops
from graphpar.cost_models.sharding import ShardingCosts
from graphpar.ir.batch_sizes import concrete_shape
from graphpar.ir.program import Program, operator_name, value_of
from graphpar.operators.gradients import differentiable_nodes
from graphpar.operators.parallel_products import ENTERING, products_of
from graphpar.operators.table import record_of
from graphpar.operators.transitions import TABLE, Cost, collective_cost
from graphpar.passes.sharding.check_types import lowered_operands
from graphpar.passes.sharding.costs import Workload
from graphpar.passes.sharding.problem import is_operator
from graphpar.runtime.layout import R, Shard, Type


@dataclass(frozen=True)
class Sent:
    """What one node of a rank's program sends over an axis, forward and backward, in bytes."""

    axis: str
    source: str
    target: str
    forward: str
    backward: str
    forward_bytes: float
    backward_bytes: float
    seconds: float


class Repricing:
    """Prices of the nodes of ``program``, the lowered one, for one microbatch."""

    def __init__(
        self, program: Program, degrees: Mapping[str, int], workload: Workload, costs: ShardingCosts | None = None
    ) -> None:
        self.program, self.degrees, self.workload = program, degrees, workload
        self.costs = costs or ShardingCosts()
        self.differentiable = differentiable_nodes(program)

    def total(self) -> dict[str, float]:
        """Seconds of compute, transitions and gradients, every instance counted."""
        counts = Counter(str(node.meta["block"]) for node in self.program.graph.nodes if node.op == "call_module")
        graphs = [
            (self.program.graph, 1),
            *((self.program.blocks[name].graph, count) for name, count in counts.items()),
        ]
        nodes = [(node, count) for graph, count in graphs for node in graph.nodes]
        sent = ((self.sent(node), count) for node, count in nodes)
        return {
            "compute": sum(self.compute(node) * count for node, count in nodes),
            "transitions": sum(found.seconds * count for found, count in sent if found is not None),
            "gradients": self.gradients(),
        }

    def compute(self, node: fx.Node) -> float:
        """A rank's share of an operator, forward and backward."""
        origin = node.meta.get("origin")
        if origin is None or "transition" in node.meta or not is_operator(origin) or record_of(origin).free:
            return 0.0
        operands = lowered_operands(node, origin)
        own: list[tuple[fx.Node, Mapping[str, Type]]] = [(operand, operand.meta["types"]) for operand in operands]
        if isinstance(value_of(origin), Tensor):
            own.append((node, node.meta["types"]))
        else:
            own += [(user, user.meta["types"]) for user in node.users if operator_name(user) == "getitem"]
        divided = [axis for axis in self.degrees if any(isinstance(types[axis], Shard) for _, types in own)]
        flops = operator_flops(origin, self.workload.microbatch) / math.prod(self.degrees[axis] for axis in divided)
        backward = node in self.differentiable and self.workload.train
        times = 1 + (2 if record_of(origin).multiplies else 1) * backward
        return times * self.costs.operator_s(flops, sum(self._bytes(value, types) for value, types in own))

    def sent(self, node: fx.Node) -> Sent | None:
        """What a transition, or an operator that sends by itself, sends; None for the rest."""
        if "transition" in node.meta:
            return self._transition(node)
        if operator_name(node) == "sync_batch_norm":
            return self._statistics(node)
        if operator_name(node) == "ring_attention":
            return self._ring(node)
        return self._loss(node) if operator_name(node) == "vocab_cross_entropy" else None

    def gradients(self) -> float:
        """The gradients that are partial sums, finished once a step; names of one parameter share theirs."""
        if not self.workload.train:
            return 0.0
        seconds = 0.0
        for name, info in self.program.parameters.items():
            if not info.requires_grad or self.program.tie_of(name)[0] != name:
                continue
            pieces = math.prod(self.degrees[axis] for axis, kind in info.spec if isinstance(kind, Shard))
            nbytes = math.prod(info.whole or info.shape) * info.dtype.itemsize / pieces
            for axis in (axis for axis, kind in info.spec if kind is R):
                seconds += collective_cost(
                    "all-reduce", nbytes, self.degrees[axis]
                ).bytes_sent / self.costs.transition_rate(axis)
        return seconds / self.workload.microbatches

    def _transition(self, node: fx.Node) -> Sent:
        axis, row = str(node.args[1]), next(row for row in TABLE if row.function == operator_name(node))
        train = node in self.differentiable and self.workload.train
        whole = self._bytes(node, {other: kind for other, kind in node.meta["types"].items() if other != axis})
        forward = collective_cost(row.forward_collective, whole, self.degrees[axis])
        backward = collective_cost(row.backward_collective if train else None, whole, self.degrees[axis])
        seconds = sum(self.costs.collective_s(axis, cost) for cost in (forward, backward))
        if self.costs.hides and train:
            seconds -= min(self.costs.collective_s(axis, backward), self._of_weights(node))
        source, target = node.meta["transition"]
        text = row.backward if train else ""
        return Sent(axis, source, target, row.forward, text, forward.bytes_sent, backward.bytes_sent, seconds)

    def _of_weights(self, node: fx.Node) -> float:
        """A rank's share of the gradients of the weights of products that are one function with a collective before them."""
        flops = 0.0
        for product in products_of(node) if node.target in ENTERING else []:
            if product.args[1] in self.differentiable:
                kinds = node.meta["types"], product.meta["types"]
                divided = {axis for types in kinds for axis, kind in types.items() if isinstance(kind, Shard)}
                whole = operator_flops(product.meta["origin"], self.workload.microbatch)
                flops += whole / math.prod(self.degrees[axis] for axis in divided)
        return flops / self.costs.flops_per_s

    def _loss(self, node: fx.Node) -> Sent:
        """A vocabulary-parallel loss."""
        labels, axis = node.args[1], str(node.args[2])
        assert isinstance(labels, fx.Node)
        rows = self._elements(labels, labels.meta["types"])  # of one number each, then of two, in float32
        costs = [collective_cost("all-reduce", nbytes * rows, self.degrees[axis]) for nbytes in (4, 8)]
        sent = sum(costs, Cost()).bytes_sent
        backward = "nothing" if self.workload.train else ""
        seconds = sum(self.costs.collective_s(axis, cost) for cost in costs)
        return Sent(axis, "S(1)", "I", f"{len(costs)} all-reduces", backward, sent, 0.0, seconds)

    def _statistics(self, node: fx.Node) -> Sent:
        """BatchNorm with the statistics of all replicas."""
        source, axes = node.args[0], node.args[5]
        assert isinstance(source, fx.Node) and isinstance(axes, tuple)
        train, axis = self.workload.train and node in self.differentiable, str(axes[0])
        nbytes = 8.0 * value_of(source).shape[1] * self.degrees[axis]  # a mean and a variance in float32, of each rank
        ways = ("all-gather", "reduce-scatter")[: 1 + train]
        costs = [collective_cost(way, nbytes, self.degrees[axis]) for way in ways]
        seconds = sum(self.costs.collective_s(axis, cost) for cost in costs)
        sent = [cost.bytes_sent for cost in (*costs, Cost())]
        backward = "reduce-scatter" if train else ""
        return Sent(axis, "S(0)", "S(0)", "all-gather", backward, sent[0], sent[1], seconds)

    def _ring(self, node: fx.Node) -> Sent:
        """Keys and values, of each step but the last, hidden by that step; where causal, chunks before the ring and after it."""
        *operands, axis = node.args
        degree, train = self.degrees[str(axis)], self.workload.train and node in self.differentiable
        query, key, value = (self._bytes(x, x.meta["types"]) for x in operands if isinstance(x, fx.Node))
        result = self._bytes(node, node.meta["types"])
        step_s = self.compute(node) / (3 if train else 1) / degree
        share = (degree > 2) + 0.5 * (degree == 2)  # of a rank's rows, those that it sends
        chunks = [share * (query + key + value), share * result] if node.kwargs.get("is_causal") else []
        ways = [(key + value, chunks, step_s)]
        if train:
            ways.append((2 * (key + value), [2 * share * result, *chunks[:1]] if chunks else [], 2 * step_s))
        sent = [sum(alone) + (degree - 1) * beside for beside, alone, _ in ways]
        seconds = 0.0
        for beside, alone, hidden_s in ways:
            seconds += sum(self.costs.transition_s(str(axis), 1, nbytes) for nbytes in alone)
            seconds += (degree - 1) * max(0.0, self.costs.transition_s(str(axis), 1, beside) - hidden_s)
        count = degree - 1 + len(chunks)
        text = f"{count} send{'s' * (count > 1)}"
        backward = text if train else "nothing" if self.workload.train else ""
        return Sent(str(axis), "S(2)", "S(2)", text, backward, sent[0], sent[1] if train else 0.0, seconds)

    def _elements(self, node: fx.Node, types: Mapping[str, Type]) -> float:
        """Return the elements of a rank's shard."""
        pieces = math.prod(self.degrees[axis] for axis, kind in types.items() if isinstance(kind, Shard))
        return math.prod(concrete_shape(node.meta["origin"], self.workload.microbatch)) / pieces

    def _bytes(self, node: fx.Node, types: Mapping[str, Type]) -> float:
        return self._elements(node, types) * float(value_of(node).dtype.itemsize)
