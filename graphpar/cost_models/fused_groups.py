"""What ``torch.compile`` makes one kernel of: operators between products and collectives, forward and backward.

    x ─┬─ norm ─ q ── ... ── o ─┬─ add ─┬─ norm ─ up ...        norm | add, norm | ...: q, o and up are borders
       └────────────────────────┘       └─ ...

A group is what hangs together without a way through a border: it reads its inputs and writes its outputs once. Its backward reads the
gradients of its outputs, and what of the forward it needs: a result that a product keeps anyway, else the inputs of the group, from
which it is computed again (the min-cut partitioner of AOTAutograd decides so, too). It writes one gradient where several are equal, as
those of a sum are, and none where its result's gradient is that of its input.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import fx

from graphpar.cost_models.node_sizes import has_tensors, nbytes_of
from graphpar.ir.program import value_of
from graphpar.operators.placement import operands_of
from graphpar.operators.record import Reads
from graphpar.operators.table import record_of


@dataclass
class FusedGroup:
    """Operators of one kernel, and the values that it moves.

    Attributes:
        reads, writes: forward.
        gradients: that its backward reads, each as the part of a value that one consumer takes.
        saved: of the forward, that its backward reads.
        returned: values whose gradients its backward writes.
        backward: whether it has one.
    """

    nodes: tuple[fx.Node, ...]
    reads: list[fx.Node] = field(default_factory=list)
    writes: list[fx.Node] = field(default_factory=list)
    gradients: list[fx.Node] = field(default_factory=list)
    saved: list[fx.Node] = field(default_factory=list)
    returned: list[fx.Node] = field(default_factory=list)
    backward: bool = False

    @property
    def functions(self) -> bool:
        """Whether it computes exponentials or sums of rows."""
        return any(record_of(node).slow for node in self.nodes)


@dataclass(frozen=True)
class Fusion:
    """The groups of a graph, and the values of which gradients are added up outside of them: their parts, and the value."""

    groups: list[FusedGroup]
    sums: list[tuple[list[fx.Node], fx.Node]]


def fusion_of(graph: fx.Graph, fusible: Collection[fx.Node], grad: Callable[[fx.Node], bool]) -> Fusion:
    """Group the nodes ``fusible`` of ``graph``; every other operator but views is a border. ``grad``: whether a value has a gradient."""
    return _Fusing(graph, frozenset(fusible), grad).found()


def through_views(node: fx.Node) -> fx.Node:
    """Return the value that a view shows."""
    while node.op == "call_function" and record_of(node).free:
        if not node.all_input_nodes:
            return node
        node = node.all_input_nodes[0]
    return node


def uses_of(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield what uses a value or a view of it, and the value or view that it uses."""
    for user in node.users:
        if user.op == "call_function" and record_of(user).free:
            yield from uses_of(user)
        else:
            yield user, node


class _Fusing:
    """One graph."""

    def __init__(self, graph: fx.Graph, fusible: frozenset[fx.Node], grad: Callable[[fx.Node], bool]) -> None:
        self.graph, self.fusible, self.grad = graph, fusible, grad
        self.group: dict[fx.Node, FusedGroup] = {}
        self.groups = [FusedGroup(tuple(nodes)) for nodes in self._connected()]
        for group in self.groups:
            self.group |= dict.fromkeys(group.nodes, group)

    def found(self) -> Fusion:
        for group in self.groups:
            self._forward(group)
            self._backward(group)
        return Fusion(self.groups, list(self._sums()))

    # ---- which are one kernel ----

    def _connected(self) -> Iterable[list[fx.Node]]:
        """Join operators with those that they read where no border lies on any way between the two."""
        depth = self._depths()
        head: dict[fx.Node, fx.Node] = {}

        def top(node: fx.Node) -> fx.Node:
            while head[node] is not node:
                node = head[node]
            return node

        groups: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        ordered = [node for node in self.graph.nodes if node in self.fusible]
        for node in ordered:
            head[node] = node
            for source in map(through_views, node.all_input_nodes):
                if source in self.fusible and depth[source] == depth[node]:
                    head[top(source)] = node
        for node in ordered:
            groups[top(node)].append(node)
        return groups.values()

    def _depths(self) -> dict[fx.Node, int]:
        """Return how many borders lie before each operator, at most; one that fusible operators alone use stands beside the first."""
        depth: dict[fx.Node, int] = {}
        for node in self.graph.nodes:
            sources = [through_views(source) for source in node.all_input_nodes]
            depth[node] = max(
                (depth[source] + (node in self.fusible and self._is_border(source)) for source in sources), default=0
            )
        for node in reversed(self.graph.nodes):
            users = [user for user, _ in uses_of(node)]
            if node in self.fusible and users and all(user in self.fusible for user in users):
                depth[node] = max(depth[node], min(depth[user] for user in users))
        return depth

    def _is_border(self, node: fx.Node) -> bool:
        return node.op in ("call_function", "call_module") and node not in self.fusible and has_tensors(node)

    # ---- what they move ----

    def _forward(self, group: FusedGroup) -> None:
        read: dict[fx.Node, None] = {}
        for node in group.nodes:
            read.update((source, None) for source in map(through_views, node.all_input_nodes))
        group.reads = [node for node in read if self.group.get(node) is not group and has_tensors(node)]
        group.writes = [
            node for node in group.nodes if any(self.group.get(user) is not group for user, _ in uses_of(node))
        ]

    def _backward(self, group: FusedGroup) -> None:
        differentiable = [node for node in group.reads if self.grad(node)]
        if not differentiable or not any(map(self.grad, group.nodes)):
            return
        for value in group.writes:
            group.gradients += self._arriving(value)
        values = [node for node in differentiable if node.op != "get_attr"]
        roots = dict.fromkeys(self._root(group, value) for value in values)
        group.returned = [root for root in roots if not self._arrives(group, root)]
        group.backward = bool(group.returned) or len(values) < len(differentiable)
        needed: dict[fx.Node, None] = {}
        for node in filter(self.grad, group.nodes):
            for value in _needed(node, self.grad):
                needed.update(dict.fromkeys(self._kept(group, through_views(value))))
        group.saved = list(needed)
        for value in values:  # the first that uses it adds up what comes from others
            others = [part for user, part in self._consumers(value) if user is not group]
            if value not in self.group and self._first(value) is group:
                group.gradients += others

    def _arriving(self, value: fx.Node) -> list[fx.Node]:
        """Return the parts of a value of a group of which gradients come from outside of it."""
        own = self.group.get(value)
        return [part for user, part in self._consumers(value) if user is not own] if self.grad(value) else []

    def _consumers(self, value: fx.Node) -> list[tuple[FusedGroup | fx.Node, fx.Node]]:
        """Return each group and other operator that gives a gradient for a value, with the part of it that it uses."""
        found: dict[tuple[int, fx.Node], tuple[FusedGroup | fx.Node, fx.Node]] = {}
        for user, part in uses_of(value):
            if user.op == "output" or self.grad(user):
                consumer = self.group.get(user, user)
                whole = value if nbytes_of(part) == nbytes_of(value) else part
                found.setdefault((id(consumer), whole), (consumer, part))
        return list(found.values())

    def _first(self, value: fx.Node) -> FusedGroup | None:
        """Return the first group, in the order of the forward, that gives a gradient for a value."""
        return next((user for user, _ in self._consumers(value) if isinstance(user, FusedGroup)), None)

    def _root(self, group: FusedGroup, value: fx.Node) -> fx.Node:
        """Return the value whose gradient that of ``value`` is, as far as ``group`` adds to it: the last of sums of which it is a term."""
        uses = [(user, part) for user, part in uses_of(value) if self.group.get(user) is group and self.grad(user)]
        if len(uses) != 1:
            return value
        ((user, part),) = uses
        record = record_of(user)
        same = nbytes_of(user) == nbytes_of(value) and value_of(user).dtype == value_of(part).dtype
        if not record.passes or not same:
            return value
        return self._root(group, user) if user not in group.writes else user

    def _arrives(self, group: FusedGroup, root: fx.Node) -> bool:
        """Return whether the gradient of ``root`` comes from one place outside, so that nothing is computed."""
        if root not in group.writes or any(
            self.group.get(user) is group and self.grad(user) for user, _ in uses_of(root)
        ):
            return False
        return len(self._arriving(root)) == 1

    def _kept(self, group: FusedGroup, value: fx.Node) -> Iterator[fx.Node]:
        """Yield what is read for a value that a backward needs: itself where a product keeps it, else that from which it follows."""
        if value.op == "get_attr" or not has_tensors(value):  # a weight, a size
            return
        if self.group.get(value) is not group or any(self._keeps(user, value) for user, _ in uses_of(value)):
            yield value
            return
        for source in value.all_input_nodes:
            yield from self._kept(group, through_views(source))

    def _keeps(self, user: fx.Node, value: fx.Node) -> bool:
        if user.op != "call_function" or user in self.fusible or not record_of(user).multiplies:
            return False
        return any(self.grad(operand) and through_views(operand) is not value for operand in user.all_input_nodes)

    def _sums(self) -> Iterator[tuple[list[fx.Node], fx.Node]]:
        for node in self.graph.nodes:
            view = node.op == "call_function" and record_of(node).free
            if (
                node in self.fusible
                or node.op in ("get_attr", "output")
                or view
                or not has_tensors(node)
                or not self.grad(node)
            ):
                continue
            parts = [part for _, part in self._consumers(node)]
            if len(parts) > 1 and self._first(node) is None and not _apart(node, parts):
                yield parts, node


def _apart(node: fx.Node, parts: Sequence[fx.Node]) -> bool:
    """Return whether parts of a value may be its pieces, whose gradients are laid side by side, which is free as views are."""
    at = 1024
    return sum(nbytes_of(part).at(at) for part in parts) <= nbytes_of(node).at(at)


def _needed(node: fx.Node, grad: Callable[[fx.Node], bool]) -> Sequence[fx.Node]:
    """Return the tensors of the forward that an operator's backward reads."""
    record = record_of(node)
    if record.reads is not Reads.OPERANDS:
        return [node] if record.reads is Reads.RESULT else []
    operands, needed = operands_of(node), dict[fx.Node, None]()
    for place, operand in enumerate(operands):
        if grad(operand):
            together = next((places for places in record.linear if place in places), frozenset[int]())
            needed.update((other, None) for at, other in enumerate(operands) if at not in together)
    return list(needed)
