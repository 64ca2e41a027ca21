"""``Work``: what a rank's graph has to do, as a table of products, memory traffic and collectives, symbolic in the batch.

    lowered graph ──walk──► rows: phase, kind, sizes as c * b^p ──► Work ──at a microbatch size──► compute.seconds, Network.seconds

A row belongs to one phase: the forward, the backward by input or the backward by weight (schedules that split the backward run
the last two apart). Sizes are products of numbers and of the batch, so one table is good for every microbatch size.

What an operator's backward does is known for products, attention, embeddings and collectives; for all others it reads the gradients
of its results and its inputs, and writes the gradients of its inputs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import sympy  # type: ignore[import-untyped]
from torch import Tensor, fx

from graphpar.ir.program import Block, Program, batch_coefficients, operator_name, value_of
from graphpar.operators.contractions import Matrices, matrices, product_of
from graphpar.operators.contractions import Size as Size  # sizes of rows
from graphpar.operators.gradients import differentiable_nodes
from graphpar.operators.record import Kind, Reads
from graphpar.operators.table import record_of
from graphpar.operators.transitions import TABLE
from graphpar.runtime.layout import ExpertRows


class Phase(IntEnum):
    """When a row is done: in F, in the input half I of a backward, or in its weight half W."""

    FORWARD = 0
    INPUT = 1
    WEIGHT = 2


class Product(NamedTuple):
    """As many products as ``matrices`` of [m, k] and [k, n], of ``itemsize`` bytes an element."""

    phase: Phase
    matrices: Size
    m: Size
    n: Size
    k: Size
    itemsize: int


class Attention(NamedTuple):
    """Fused attention of ``heads`` (over the batch) query rows over key rows of ``width`` (mean of keys' and values')."""

    phase: Phase
    heads: Size
    queries: Size
    keys: Size
    width: float
    causal: bool
    itemsize: int


class Traffic(NamedTuple):
    """A kernel that is bound by memory: bytes read and written. ``functions``: it works out exponentials or sums of rows on the way."""

    phase: Phase
    nbytes: Size
    functions: bool = False


class Collective(NamedTuple):
    """Over ``axis``; ``nbytes`` of the tensor where it is whole on that axis."""

    phase: Phase
    axis: str
    kind: str
    nbytes: Size


Row = Product | Attention | Traffic | Collective


@dataclass(frozen=True)
class Work:
    """Rows with how often each is there, and how many operators a host starts in each phase."""

    rows: Mapping[Row, int] = field(default_factory=dict)

    def __add__(self, other: Work) -> Work:
        return Work(dict(Counter(self.rows) + Counter(other.rows)))

    @property
    def operators(self) -> tuple[int, int, int]:
        """How many operators each phase has."""
        found = Counter[Phase]()
        for row, times in self.rows.items():
            found[row.phase] += times
        return found[Phase.FORWARD], found[Phase.INPUT], found[Phase.WEIGHT]

    def flops(self, batch: int, phases: Sequence[Phase] = tuple(Phase)) -> float:
        """Of products and attention."""
        return sum(_flops(row).at(batch) * times for row, times in self.rows.items() if row.phase in phases)

    def formula(self, batch: sympy.Symbol) -> dict[str, sympy.Expr]:
        """Flops of products, bytes of memory-bound kernels and bytes of collectives by axis, as polynomials in the batch."""
        found: dict[str, sympy.Expr] = defaultdict(lambda: sympy.Integer(0))
        for row, times in self.rows.items():
            if isinstance(row, Product | Attention):
                found["flops"] += times * _symbolic(_flops(row), batch)
            else:
                name = "memory bytes" if isinstance(row, Traffic) else f"{row.axis} bytes"
                found[name] += times * _symbolic(row.nbytes, batch)
        return {name: sympy.expand(value) for name, value in found.items()}


def _symbolic(size: Size, batch: sympy.Symbol) -> sympy.Expr:
    return sympy.nsimplify(size.number) * batch**size.power


ATTENTION_BACKWARD = 2.5
"""Products of a fused attention's backward for each two of its forward: scores again, and four gradients."""


def _flops(row: Row) -> Size:
    if isinstance(row, Product):
        return 2.0 * product_of((row.matrices, row.m, row.n, row.k))
    if isinstance(row, Attention):
        times = (
            4.0 * row.width * (0.5 if row.causal else 1.0) * (1.0 if row.phase is Phase.FORWARD else ATTENTION_BACKWARD)
        )
        return times * product_of((row.heads, row.queries, row.keys))
    return Size(0.0)


# ---- walking a program -----------------------------------------------------------------------------------------


class Works:
    """The work of graphs of one lowered program; each block's is found once.

    Args:
        degrees: ranks by axis, for the rows of experts, which are taken to be spread evenly.
        fused: chains of elementwise operators are one kernel (:class:`graphpar.cost_models.execution.Execution`).
        gradient_bytes: of an element of the gradients that microbatches are summed in; None: as the parameter.
    """

    def __init__(
        self, program: Program, degrees: Mapping[str, int], *, fused: bool = False, gradient_bytes: int | None = None
    ) -> None:
        self.program, self.degrees, self.fused, self.gradient_bytes = program, degrees, fused, gradient_bytes
        self.train = program.mode == "train"
        self.differentiable = differentiable_nodes(program) if self.train else set()
        self._names = {(name, node.name) for node, name in _scoped(program) if node in self.differentiable}
        self._blocks: dict[str, Work] = {}

    def of(self, graph: fx.Graph, scope: str = "", without: Collection[str] = ()) -> Work:
        """The work of ``graph``, a stage's or a block's (``scope`` is its name), with all that it calls.

        ``without``: names of nodes that are not counted.
        """
        walk = _Walk(self, graph, scope, without)
        found = Work(dict(Counter(walk.rows())))
        for node in graph.nodes:
            if node.op == "call_module":
                found = found + self.block(self.program.block_of(node))
        return found

    def block(self, block: Block) -> Work:
        if block.name not in self._blocks:
            self._blocks[block.name] = self.of(block.graph, block.name)
        return self._blocks[block.name]

    def collectives(self, node: fx.Node, scope: str = "") -> list[Collective]:
        """What a node sends: a transition, or a loss over cut classes, forward and backward; nothing else does."""
        name = operator_name(node)
        if "transition" in node.meta or name in _COLLECTIVES:
            return list(self._transition(node, name, scope))
        if name == "vocab_cross_entropy":
            return list(self._vocab_loss(node))
        if name == "sync_batch_norm":
            return list(self._statistics(node, scope))
        return []

    def _transition(self, node: fx.Node, name: str, scope: str) -> Iterator[Collective]:
        row = _COLLECTIVES[name]
        axis = str(node.args[1])
        source = node.args[0]
        assert isinstance(source, fx.Node)
        nbytes = max(_nbytes(node, self.degrees), _nbytes(source, self.degrees), key=lambda size: size.at(1024))
        if name == "all_to_all":
            nbytes = nbytes * self.degrees[axis]
        if row.forward_collective:
            yield Collective(Phase.FORWARD, axis, row.forward_collective, nbytes)
        if row.backward_collective and self.has_gradient(source, scope):
            yield Collective(Phase.INPUT, axis, row.backward_collective, nbytes)

    def _vocab_loss(self, node: fx.Node) -> Iterator[Collective]:
        """Two all-reduces of a number or two a row (see ``emitted.collectives``)."""
        labels, axis = node.args[1], str(node.args[2])
        assert isinstance(labels, fx.Node)
        rows = _elements(labels, self.degrees)
        yield Collective(Phase.FORWARD, axis, "all-reduce", 4 * rows)
        yield Collective(Phase.FORWARD, axis, "all-reduce", 8 * rows)

    def _statistics(self, node: fx.Node, scope: str) -> Iterator[Collective]:
        """A mean and a variance of each channel are gathered, and their gradients scattered (see ``emitted.collectives``)."""
        source, axes = node.args[0], node.args[5]
        assert isinstance(source, fx.Node) and isinstance(axes, tuple)
        for axis in map(str, axes):
            nbytes = 8 * self.degrees[axis] * _sizes(source, self.degrees)[1]
            yield Collective(Phase.FORWARD, axis, "all-gather", nbytes)
            if self.has_gradient(source, scope):
                yield Collective(Phase.INPUT, axis, "reduce-scatter", nbytes)

    def has_gradient(self, node: fx.Node, scope: str) -> bool:
        """Stages' graphs are copies, so a node is known by its name, or as what another stage sends."""
        known = node.meta.get("boundary", node) in self.differentiable or (scope, node.name) in self._names
        return known or self._is_trained(node)

    def _is_trained(self, node: fx.Node) -> bool:
        info = self.program.parameters.get(str(node.target)) if node.op == "get_attr" else None
        return self.train and info is not None and info.requires_grad


def _scoped(program: Program) -> Iterator[tuple[fx.Node, str]]:
    for node in program.graph.nodes:
        yield node, ""
    for name, block in program.blocks.items():
        for node in block.graph.nodes:
            yield node, name


_COLLECTIVES = {row.function: row for row in TABLE if row.function}


class _Walk:
    """One graph."""

    def __init__(self, works: Works, graph: fx.Graph, scope: str, without: Collection[str]) -> None:
        self.works, self.graph, self.scope, self.without = works, graph, scope, frozenset(without)

    def rows(self) -> Iterator[Row]:
        elementwise: list[fx.Node] = []
        for node in self.graph.nodes:
            if node.op != "call_function" or not _tensors(node) or node.name in self.without:
                continue
            name = operator_name(node)
            yield from self.works.collectives(node, self.scope)
            if "transition" in node.meta or name in _COLLECTIVES:
                continue
            if name == "vocab_cross_entropy":
                yield from self._vocab_loss(node)
            elif (record := record_of(node)).kind is Kind.ATTENTION:
                yield from self._attention(node)
            elif products := matrices(node, self._sizes):
                yield from self._products(node, products)
            elif record.kind is Kind.LOOKUP:
                yield from self._lookup(node)
            elif not record.free:
                elementwise.append(node)
        yield from self._elementwise(elementwise)
        if self.works.train:
            yield from self._sums()

    # ---- by kind ----

    def _vocab_loss(self, node: fx.Node) -> Iterator[Row]:
        """The logits are read three times and written once, besides what is sent."""
        logits = node.args[0]
        assert isinstance(logits, fx.Node)
        nbytes = _nbytes(logits, self.works.degrees)
        yield Traffic(Phase.FORWARD, (2 if self.works.fused else 5) * nbytes, True)
        if self._grad(logits):
            yield Traffic(Phase.INPUT, 2 * nbytes, True)

    def _attention(self, node: fx.Node) -> Iterator[Row]:
        query, key, value = (argument for argument in node.args[:3] if isinstance(argument, fx.Node))  # they may be one
        shape, keys = _sizes(query, self.works.degrees), _sizes(key, self.works.degrees)
        width = (shape[-1].number + _sizes(value, self.works.degrees)[-1].number) / 2
        causal = bool(node.kwargs.get("is_causal", False)) or any(argument is True for argument in node.args)
        tensor = value_of(query)
        row = Attention(
            Phase.FORWARD, product_of(shape[:-2]), shape[-2], keys[-2], width, causal, tensor.dtype.itemsize
        )
        yield row
        if any(map(self._grad, (query, key, value))):
            yield row._replace(phase=Phase.INPUT)

    def _products(self, node: fx.Node, products: Iterable[Matrices]) -> Iterator[Row]:
        itemsize = value_of(node).dtype.itemsize
        for product in products:
            count, m, n, k = product.count, product.m, product.n, product.k
            yield Product(Phase.FORWARD, count, m, n, k, itemsize)
            if any(map(self._grad, product.left)):
                yield Product(Phase.INPUT, count, m, k, n, itemsize)
            if self._grad(product.right):
                yield Product(Phase.WEIGHT if product.shared else Phase.INPUT, count, n, k, m, itemsize)

    def _sizes(self, node: fx.Node) -> list[Size]:
        return _sizes(node, self.works.degrees)

    def _lookup(self, node: fx.Node) -> Iterator[Row]:
        """Rows are read and written; the gradient of the table is filled with zeros and added to."""
        out = _nbytes(node, self.works.degrees)
        yield Traffic(Phase.FORWARD, 2 * out)
        tables = [a for a in node.all_input_nodes if self._grad(a)]
        for table in tables:
            yield Traffic(Phase.WEIGHT, _nbytes(table, self.works.degrees))
            yield Traffic(Phase.WEIGHT, 3 * out)

    def _elementwise(self, nodes: Sequence[fx.Node]) -> Iterator[Row]:
        """Chains of operators where they are fused, else each alone."""
        chains: dict[fx.Node, list[fx.Node]] = {}
        head: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            before = next(
                (
                    head[source]
                    for source in map(_through_views, node.all_input_nodes)
                    if self._joins(node, source, head)
                ),
                node,
            )
            head[node] = before
            chains.setdefault(before, []).append(node)
        for chain in chains.values():
            yield from self._chain(chain)

    def _joins(self, node: fx.Node, source: fx.Node, head: Mapping[fx.Node, fx.Node]) -> bool:
        if not self.works.fused or source not in head:
            return False
        return record_of(node).fusible and record_of(source).fusible

    def _chain(self, chain: Sequence[fx.Node]) -> Iterator[Row]:
        inside = set(chain)
        read: dict[fx.Node, None] = {}
        for node in chain:
            read.update((source, None) for source in map(_through_views, node.all_input_nodes) if source not in inside)
        inputs = [node for node in read if _tensors(node)]
        outputs = [node for node in chain if any(user not in inside for user in _users_through_views(node))]
        if not inputs and not outputs:
            return
        records = [record_of(node) for node in chain]
        functions = any(record.slow for record in records)
        given = _total(_nbytes(node, self.works.degrees) for node in inputs)
        made = _total(_nbytes(node, self.works.degrees) for node in outputs)
        yield from _traffic(Phase.FORWARD, [*given, *made], functions)
        differentiable = [node for node in inputs if self._grad(node)]
        if not differentiable or not any(self._grad(node) for node in chain):
            return
        values = [node for node in differentiable if node.op != "get_attr"]
        gradients = [_nbytes(node, self.works.degrees) for node in [*outputs, *values]]
        if all(record.reads is Reads.NOTHING for record in records):
            if self.works.fused or not all(record.passes for record in records):
                yield from _traffic(Phase.INPUT, gradients)
            return
        saved = [_nbytes(node, self.works.degrees) for node in values]
        yield from _traffic(Phase.INPUT, _total([*gradients, *saved]), functions)

    def _sums(self) -> Iterator[Row]:
        """Gradients of values that are used several times are added up; those of parameters, to what microbatches before gave."""
        for node in self.graph.nodes:
            if not self._grad(node) or not isinstance(value_of(node), Tensor):
                continue
            if node.op == "get_attr":
                yield self._accumulation(node)
                continue
            uses = sum(1 for user in node.users if user.op != "output" and self._grad(user))
            if uses > 1:
                yield Traffic(Phase.INPUT, 3 * (uses - 1) * _nbytes(node, self.works.degrees))

    def _accumulation(self, node: fx.Node) -> Traffic:
        """A fused product adds to the sum itself, which it reads besides; else one more kernel reads both and writes one."""
        elements = _elements(node, self.works.degrees)
        itemsize = value_of(node).dtype.itemsize
        if self.works.fused:
            return Traffic(Phase.WEIGHT, (2 * (self.works.gradient_bytes or itemsize) - itemsize) * elements)
        return Traffic(Phase.WEIGHT, (itemsize + 2 * (self.works.gradient_bytes or itemsize)) * elements)

    def _grad(self, node: fx.Node) -> bool:
        return self.works.has_gradient(node, self.scope)


# ---- sizes -----------------------------------------------------------------------------------------------------


def _tensors(node: fx.Node) -> bool:
    value = value_of(node)
    if isinstance(value, tuple | list):
        return any(isinstance(item, Tensor) for item in value)
    return isinstance(value, Tensor)


def _sizes(node: fx.Node, degrees: Mapping[str, int]) -> list[Size]:
    """Of each dim of a rank's piece; experts' rows are spread evenly."""
    value = value_of(node)
    assert isinstance(value, Tensor)
    sizes = [
        Size(float(coefficient), 1) if coefficient is not None else Size(float(int(size)))
        for size, coefficient in zip(value.shape, batch_coefficients(node))
    ]
    for axis, kind in node.meta.get("types", {}).items():
        if isinstance(kind, ExpertRows):
            sizes[0] = Size(sizes[0].number / degrees[axis], sizes[0].power)
    return sizes


def _elements(node: fx.Node, degrees: Mapping[str, int]) -> Size:
    return product_of(_sizes(node, degrees))


def _nbytes(node: fx.Node, degrees: Mapping[str, int]) -> Size:
    value = value_of(node)
    if isinstance(value, tuple | list):
        users = [user for user in node.users if operator_name(user) == "getitem" and isinstance(value_of(user), Tensor)]
        return max((_nbytes(user, degrees) for user in users), default=Size(0.0), key=lambda size: size.at(1024))
    return _elements(node, degrees) * float(value.dtype.itemsize)


def _total(sizes: Iterable[Size]) -> list[Size]:
    """Sums of the sizes of each power."""
    found: dict[int, float] = defaultdict(float)
    for size in sizes:
        found[size.power] += size.number
    return [Size(number, power) for power, number in found.items()]


def _traffic(phase: Phase, sizes: Iterable[Size], functions: bool = False) -> Iterator[Traffic]:
    """One kernel. What does not grow with the batch (weights of norms) is left out beside what does."""
    found = sorted(_total(sizes), key=lambda size: -size.power)
    if found and found[0].number:
        yield Traffic(phase, found[0], functions)


def _through_views(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and record_of(node).free:
        if not node.all_input_nodes:
            return node
        node = node.all_input_nodes[0]
    return node


def _users_through_views(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if user.op == "call_function" and record_of(user).free:
            yield from _users_through_views(user)
        else:
            yield user
