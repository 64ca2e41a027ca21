"""``Work``: the work of a rank's graph, as a table of products, memory traffic and collectives, symbolic in the batch.

    lowered graph ──walk──► rows: phase, kind, sizes as c * b^p ──► Work ──at a microbatch size──► compute.seconds, Network.seconds

The backward of products, attention, embeddings and collectives is known; any other reads the gradients of its results and its inputs,
and writes the gradients of its inputs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from graphpar.cost_models.flops import cache_length, cached_bytes
from graphpar.cost_models.fused_groups import fusion_of, through_views, uses_of
from graphpar.cost_models.node_sizes import elements_of, has_tensors, nbytes_of, sizes_of, total
from graphpar.cost_models.work import Attention, Collective, Phase, Product, Row, Size, Traffic, Work
from graphpar.cost_models.written_attention import is_written_out, written_out
from graphpar.emitted.expert_rows import own_offsets
from graphpar.emitted.fp8_gathers import all_gather_rounded
from graphpar.ir.program import Block, Chunked, Program, operator_name, value_of
from graphpar.operators.composite import Composite, Local, arguments_of, axes_of
from graphpar.operators.contractions import Matrices, matrices, product_of
from graphpar.operators.gradients import differentiable_nodes
from graphpar.operators.parallel_products import ENTERING, JOINED, joined_with
from graphpar.operators.parameter_casts import cast_parameters, casts_parameter
from graphpar.operators.placement import operands_of
from graphpar.operators.record import Kernel, Kind, Reads, Record
from graphpar.operators.table import COMPOSITES, record_of
from graphpar.operators.transitions import FUNCTIONS, SENDS, travelling_beside
from graphpar.runtime.layout import Shard

SCALE_BYTES = 2
"""Of the scale of a row in 8 bits."""


class Works:
    """The work of graphs of one lowered program; each block is walked once.

    Args:
        degrees: ranks by axis.
        fused: chains of elementwise operators are one kernel (:class:`graphpar.cost_models.execution.Execution`).
        gradient_bytes: of an element of accumulated gradients; None: as the parameter.
        compiled: ``torch.compile`` fuses the operators of each block, those between blocks, and those of a head in chunks.
        recasts: parameters that are read in another dtype are cast for each microbatch.
        travelling: rows travel to experts and back beside the products that stand between the start and the end of that.
    """

    def __init__(
        self,
        program: Program,
        degrees: Mapping[str, int],
        *,
        fused: bool = False,
        gradient_bytes: int | None = None,
        compiled: bool = False,
        recasts: bool = False,
        travelling: bool = False,
    ) -> None:
        self.travelling = travelling
        self.program, self.degrees, self.fused, self.gradient_bytes = program, degrees, fused, gradient_bytes
        self.compiled, self.train = compiled, program.mode == "train"
        self.differentiable = differentiable_nodes(program) if self.train else set()
        self.casts = cast_parameters(program) if self.train and not recasts else {}
        self._names = {(name, node.name) for node, name in _scoped(program) if node in self.differentiable}
        self._blocks: dict[tuple[str, bool, bool], Work] = {}

    def of(
        self,
        graph: fx.Graph,
        without: Collection[str] = (),
        plain: Collection[str] = (),
        shards: Collection[str] = (),
    ) -> Work:
        """Return the work of the ``graph`` of a stage, with the blocks that it calls.

        Args:
            without: names of nodes that are not counted.
            plain: the paths of blocks that are not compiled.
            shards: the paths of blocks that keep shards of what they gather.
        """
        found = Work(dict(Counter(_Walk(self, graph, "", without).rows())))
        for node in graph.nodes:
            if node.op == "call_module":
                path, block = str(node.target), self.program.block_of(node)
                found = found + self.block(block, plain=path in plain, shards=path in shards)
        return found

    def block(self, block: Block, without: Collection[str] = (), *, plain: bool = False, shards: bool = False) -> Work:
        """Return the work of one instance of a block, but of the nodes ``without``; ``plain``: it is not compiled; ``shards``: it keeps
        shards of what it gathers."""
        if without:
            return Work(dict(Counter(_Walk(self, block.graph, block.name, without, plain=plain).rows())))
        if (key := (block.name, plain, shards)) not in self._blocks:
            rows = _Walk(self, block.graph, block.name, (), plain=plain, shards=shards).rows()
            self._blocks[key] = Work(dict(Counter(rows)))
        return self._blocks[key]

    def collectives(self, node: fx.Node, scope: str = "", shards: bool = False) -> list[Collective]:
        """Return the collectives of a node, forward and backward: of a transition, or those inside of a composite operator; ``shards``: its
        block keeps shards of what it gathers."""
        name = operator_name(node)
        if "transition" in node.meta or name in FUNCTIONS:
            return list(self._transition(node, name, scope, shards))
        composite = COMPOSITES.get(name)
        return list(self._inside(node, composite, scope)) if composite is not None else []

    def sends_rounded(self, node: fx.Node, shards: bool) -> bool:
        """Whether a gather sends rows in 8 bits: :mod:`graphpar.emitted.fp8_gathers` says when."""
        return node.target is all_gather_rounded and (
            shards or not self.train or not node.kwargs.get("for_weights", True)
        )

    def _transition(self, node: fx.Node, name: str, scope: str, shards: bool) -> Iterator[Collective]:
        row = FUNCTIONS[name]
        axis = str(node.args[1])
        source = node.args[0]
        assert isinstance(source, fx.Node)
        nbytes = max(nbytes_of(node), nbytes_of(source), key=lambda size: size.at(1024))
        if row.forward_collective == "all-to-all":
            nbytes = nbytes * self.degrees[axis] * _room_of(node)
        beside = self._beside(node, scope)
        if self.sends_rounded(node, shards):
            block: Any = node.kwargs.get("block") or value_of(node).shape[-1]
            yield Collective(Phase.FORWARD, axis, "all-gather", (1 + SCALE_BYTES / block) * elements_of(node))
        elif row.forward_collective:
            yield Collective(Phase.FORWARD, axis, row.forward_collective, nbytes, beside[0])
        if row.backward_collective and self.has_gradient(source, scope):
            yield Collective(Phase.INPUT, axis, row.backward_collective, nbytes, beside[1])

    def gathers_again(self, node: fx.Node, scope: str) -> list[Collective]:
        """Return the gathers of a node that keeps shards, in the backward: beside the products of the gradient of what it gathered."""
        joined, beside = joined_with(node), tuple[Product, ...]()
        # Pieces wait for what was gathered before they begin, as what is copied into order does.
        waits = joined is not None and (joined.ring or (joined.in_order and bool(node.kwargs["dim"])))
        if joined and not waits and self.has_gradient(node.all_input_nodes[0], scope):
            beside = tuple(
                Product(Phase.INPUT, each.count, each.m, each.k, each.n, value_of(product).dtype.itemsize)
                for product in joined.products
                for each in matrices(product, sizes_of)
            )
        rows = [row for row in self.collectives(node, scope) if row.phase is Phase.FORWARD]
        return [row._replace(beside=beside) for row in rows]

    def _beside(self, node: fx.Node, scope: str) -> tuple[tuple[Product, ...], tuple[Product, ...]]:
        """Return the products beside a collective, forward and backward.

        Beside all pieces of a ring but a rank's own these are its products, of several with all their columns; beside the sum of the
        gradient of what enters products whole, those of the gradients of their weights; beside rows that travel, what stands there.
        """
        if self.travelling and (others := travelling_beside(node)):
            walk = _Walk(self, node.graph, scope, ())
            made = [product for other in others for product in walk.products(other)]
            forward = tuple(product for product in made if product.phase is Phase.FORWARD)
            return forward, tuple(product for product in made if product.phase is not Phase.FORWARD)
        joined = joined_with(node)
        if joined is None or not (joined.ring or node.target in ENTERING):
            return (), ()
        if not joined.ring:
            return (), tuple(
                Product(Phase.WEIGHT, each.count, each.n, each.k, each.m, value_of(product).dtype.itemsize)
                for product in joined.products
                for each in matrices(product, sizes_of)
                if self.has_gradient(each.right, scope)
            )
        found = [matrices(product, sizes_of)[0] for product in joined.products]
        itemsize, degree, first = value_of(joined.products[0]).dtype.itemsize, self.degrees[str(node.args[1])], found[0]
        columns, rows, count = (
            Size(sum(each.n.number for each in found)),
            first.m * (1 / degree),
            first.count * (degree - 1),
        )
        return (
            (Product(Phase.FORWARD, count, rows, columns, first.k, itemsize),),
            (Product(Phase.INPUT, count, rows, first.k, columns, itemsize),),
        )

    def ring_of(self, node: fx.Node) -> int:
        """Return into how many pieces the rows of a product are divided: the ranks of the ring that it is part of."""
        collective = node.meta.get(JOINED)
        return self.degrees[str(collective.args[1])] if isinstance(collective, fx.Node) else 1

    def _inside(self, node: fx.Node, composite: Composite, scope: str) -> Iterator[Collective]:
        """Yield what a composite operator sends; those of a ring while it attends to the keys of a step."""
        if composite.sends is None:
            return
        arguments = arguments_of(node)
        operands, made = [_local(operand) for operand in operands_of(node)], _local(node)
        differentiable = any(self.has_gradient(operand, scope) for operand in composite.sharded(arguments))
        for axis in axes_of(arguments):
            ways = composite.sends(node, operands, made, self.degrees[axis])
            for phase, messages in zip((Phase.FORWARD, Phase.INPUT)[: 1 + differentiable], ways):
                for message in messages:
                    beside = (attention_of(node)._replace(phase=phase),) if message.beside else ()
                    row = Collective(phase, axis, message.collective, message.nbytes, beside)
                    yield from [row] * message.times

    def casts_once(self, node: fx.Node, scope: str) -> bool:
        """Return whether a node casts a parameter, which a step does once: see :mod:`graphpar.runtime.stages.cast_once`."""
        if not casts_parameter(node):
            return False
        return f"{self.program.prefixes(scope)[0]}{node.all_input_nodes[0].target}" in self.casts

    def has_gradient(self, node: fx.Node, scope: str) -> bool:
        """Return whether a value has a gradient; nodes of stages, which are copies, are found by name or by their boundary."""
        if node.meta.get("boundary", node) in self.differentiable or (scope, node.name) in self._names:
            return True
        info = self.program.parameters.get(str(node.target)) if node.op == "get_attr" else None
        return self.train and info is not None and info.requires_grad


def _local(node: fx.Node) -> Local:
    return Local(sizes_of(node), value_of(node).dtype.itemsize)


def _scoped(program: Program) -> Iterator[tuple[fx.Node, str]]:
    for node in program.graph.nodes:
        yield node, ""
    for name, block in program.blocks.items():
        for node in block.graph.nodes:
            yield node, name


def attention_of(node: fx.Node) -> Attention:
    """Return the forward of an attention over the keys that it is given."""
    query, key, value = (argument for argument in node.args[:3] if isinstance(argument, fx.Node))
    shape, keys = sizes_of(query), sizes_of(key)
    width = (shape[-1].number + sizes_of(value)[-1].number) / 2
    causal = bool(node.kwargs.get("is_causal", False)) or any(argument is True for argument in node.args)
    causal |= operator_name(node) in (
        "packed_attention",
        "balanced_packed_attention",
    )  # at most: shorter documents take less
    itemsize = value_of(query).dtype.itemsize
    return Attention(Phase.FORWARD, product_of(shape[:-2]), shape[-2], keys[-2], width, causal, itemsize)


class _Walk:
    """One graph."""

    def __init__(
        self,
        works: Works,
        graph: fx.Graph,
        scope: str,
        without: Collection[str],
        *,
        plain: bool = False,
        shards: bool = False,
        function: bool = False,
    ) -> None:
        self.works, self.graph, self.scope, self.without = works, graph, scope, frozenset(without)
        self.shards = shards
        self.compiled = works.compiled and not plain

    def rows(self) -> Iterator[Row]:
        """Yield the rows of the graph, without those of the blocks it calls."""
        elementwise: list[fx.Node] = []
        for node in self.graph.nodes:
            if node.op != "call_function" or not has_tensors(node) or node.name in self.without:
                continue
            if isinstance(function := node.target, Chunked):
                yield from self._chunked(node, function)
                continue
            name = operator_name(node)
            yield from self.works.collectives(node, self.scope, self.shards)
            if self.works.sends_rounded(node, self.shards):
                yield from self._rounded(node)
            if "transition" in node.meta or name in FUNCTIONS:
                continue
            record = record_of(node)
            if record.kind is Kind.ATTENTION:
                yield from self._attention(node)
            elif products := matrices(node, self._sizes):
                yield from self._products(node, products)
            elif record.kind is Kind.LOOKUP:
                yield from self._lookup(node)
            elif record.kernels and self._alone(record):
                kernels = {Phase.FORWARD: record.kernels, Phase.INPUT: record.backward or record.kernels}
                for phase in (Phase.FORWARD, Phase.INPUT)[: 1 + self._grad(node)]:
                    yield from (self._kernel(phase, node, each) for each in kernels[phase])
            elif self.works.casts_once(node, self.scope):
                yield from self._cast_back(node)
            elif not record.free:
                elementwise.append(node)
        yield from self._compiled(elementwise) if self.compiled else self._elementwise(elementwise)
        if self.works.train:
            yield from self._gradient_sums()

    # ---- by kind ----

    def _chunked(self, node: fx.Node, function: Chunked) -> Iterator[Row]:
        """Yield the work of a function that runs in chunks: all of it in the forward, where gradients of what is whole are added up."""
        for row in _Walk(self.works, function.graph, "", (), function=True).rows():
            yield row._replace(phase=Phase.FORWARD)
        chunks = sizes_of(node.all_input_nodes[0])[0] * (1 / function.tokens)
        for argument in node.args[function.rows :]:
            if isinstance(argument, fx.Node) and self._grad(argument):
                yield Traffic(
                    Phase.FORWARD,
                    product_of([chunks, (1 + 8 / value_of(argument).dtype.itemsize) * nbytes_of(argument)]),
                )

    def _alone(self, record: Record) -> bool:
        """Whether no compiler fuses the kernels of an operator with others'."""
        return record.alone or (not self.works.fused and (record.in_place or not self.compiled))

    def _kernel(self, phase: Phase, node: fx.Node, kernel: Kernel) -> Traffic:
        moved = node if kernel.operand is None else operands_of(node)[kernel.operand]
        moves = kernel.fused if self.works.fused and kernel.fused is not None else kernel.moves
        return Traffic(phase, moves * nbytes_of(moved), kernel.functions)

    def _attention(self, node: fx.Node) -> Iterator[Row]:
        row = attention_of(node)._replace(copies=self._copies(node))
        for axis in axes_of(arguments_of(node)):  # keys and values of its ranks come round
            row = row._replace(keys=float(self.works.degrees[axis]) * row.keys)
        if (length := cache_length(node)) is not None:
            row = row._replace(keys=Size(float(length)))
        differentiable = any(isinstance(operand, fx.Node) and self._grad(operand) for operand in node.args[:3])
        if is_written_out(node):
            yield from written_out(row, differentiable)
            return
        yield row
        if (cached := cached_bytes(node)) is not None:  # few queries read many keys
            yield Traffic(Phase.FORWARD, Size(float(cached)))
        if differentiable:
            yield row._replace(phase=Phase.INPUT)

    def _products(self, node: fx.Node, products: Iterable[Matrices]) -> Iterator[Row]:
        """Yield products; where operands are rounded for them, each is read for its scales, read again, and written."""
        rounding = record_of(node).rounding
        for row in self._plain_products(node, products):
            if rounding is None or (row.phase is Phase.WEIGHT and not rounding.weights):
                yield row
                continue
            yield row._replace(itemsize=1)
            for elements in (row.matrices * row.m * row.k, row.matrices * row.k * row.n):
                yield Traffic(row.phase, (2 * row.itemsize + 1) * elements)

    def _rounded(self, gather: fx.Node) -> Iterator[Row]:
        """Yield rounding a shard as :meth:`_products` does, and reading and writing the whole, in the dtype that it had."""
        itemsize, elements = value_of(gather).dtype.itemsize, elements_of(gather)
        yield Traffic(Phase.FORWARD, (2 * itemsize + 1) * elements_of(gather.all_input_nodes[0]))
        yield Traffic(Phase.FORWARD, (1 + itemsize) * elements)

    def products(self, node: fx.Node) -> list[Product]:
        """Return the products of a node and those of its backward."""
        return list(self._plain_products(node, matrices(node, self._sizes)))

    def _plain_products(self, node: fx.Node, products: Iterable[Matrices]) -> Iterator[Product]:
        itemsize, pieces, copies = value_of(node).dtype.itemsize, self.works.ring_of(node), self._copies(node)
        for product in products:
            count, m, n, k = product.count, product.m, product.n, product.k
            rows = m * (1 / pieces)
            yield from [Product(Phase.FORWARD, count, rows, n, k, itemsize, pieces, copies)] * pieces
            if any(map(self._grad, product.left)):
                yield from [Product(Phase.INPUT, count, rows, k, n, itemsize, pieces, copies)] * pieces
            if self._grad(product.right):
                yield Product(Phase.WEIGHT if product.shared else Phase.INPUT, count, n, k, m, itemsize, 1, copies)

    def _copies(self, node: fx.Node) -> int:
        """Return how many ranks run a node on the same operands, or on summands of them: those of the axes that shard none."""
        types = [operand.meta.get("types", {}) for operand in node.all_input_nodes if has_tensors(operand)]
        alike = (
            axis
            for axis in self.works.degrees
            if all(axis in each and not isinstance(each[axis], Shard) for each in types)
        )
        return math.prod(self.works.degrees[axis] for axis in alike)

    def _sizes(self, node: fx.Node) -> list[Size]:
        return sizes_of(node)

    def _lookup(self, node: fx.Node) -> Iterator[Row]:
        """Yield reading and writing rows, and filling the table's gradient with zeros and adding to it."""
        out = nbytes_of(node)
        yield Traffic(Phase.FORWARD, 2 * out)
        for table in filter(self._grad, node.all_input_nodes):
            yield Traffic(Phase.WEIGHT, nbytes_of(table))
            yield Traffic(Phase.WEIGHT, 3 * out)

    def _cast_back(self, node: fx.Node) -> Iterator[Row]:
        """Yield casting the gradient of a parameter that a step casts once."""
        (parameter,) = node.all_input_nodes
        if self._grad(parameter):
            yield Traffic(Phase.WEIGHT, total([nbytes_of(node), nbytes_of(parameter)])[0])

    def _elementwise(self, nodes: Sequence[fx.Node]) -> Iterator[Row]:
        """Yield the traffic of chains of operators where they are fused, else of each alone."""
        chains: dict[fx.Node, list[fx.Node]] = {}
        head: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            sources = map(through_views, node.all_input_nodes)
            head[node] = next((head[source] for source in sources if self._joins(node, source, head)), node)
            chains.setdefault(head[node], []).append(node)
        for chain in chains.values():
            yield from self._chain(chain)

    def _joins(self, node: fx.Node, source: fx.Node, head: Mapping[fx.Node, fx.Node]) -> bool:
        if not self.works.fused or source not in head:
            return False
        return _fusible(node) and _fusible(source)

    def _chain(self, chain: Sequence[fx.Node]) -> Iterator[Row]:
        inside = set(chain)
        read: dict[fx.Node, None] = {}
        for node in chain:
            read.update((source, None) for source in map(through_views, node.all_input_nodes) if source not in inside)
        inputs = [node for node in read if has_tensors(node)]
        outputs = [node for node in chain if any(user not in inside for user, _ in uses_of(node))]
        if not inputs and not outputs:
            return
        records = [record_of(node) for node in chain]
        functions = any(record.slow for record in records)
        given = total(nbytes_of(node) for node in inputs)
        made = total(nbytes_of(node) for node in outputs)
        yield from _traffic(Phase.FORWARD, [*given, *made], functions)
        differentiable = [node for node in inputs if self._grad(node)]
        if not differentiable or not any(self._grad(node) for node in chain):
            return
        values = [node for node in differentiable if node.op != "get_attr"]
        gradients = [nbytes_of(node) for node in [*outputs, *values]]
        if all(record.reads is Reads.NOTHING for record in records):
            if self.works.fused or not all(record.passes for record in records):
                yield from _traffic(Phase.INPUT, gradients)
            return
        saved = [nbytes_of(node) for node in values]
        yield from _traffic(Phase.INPUT, total([*gradients, *saved]), functions)

    def _compiled(self, nodes: Sequence[fx.Node]) -> Iterator[Row]:
        """Yield the traffic of the kernels that ``torch.compile`` makes of a block, and of sums of gradients beside them."""
        casts = {
            node for node in nodes if casts_parameter(node) and not all(_fusible(user) for user, _ in uses_of(node))
        }
        fusion = fusion_of(self.graph, [node for node in nodes if _fusible(node) and node not in casts], self._grad)
        for node in nodes:
            if node in casts:
                yield from self._cast(node)
            elif not _fusible(node):
                yield from self._chain([node])
        for group in fusion.groups:
            yield from _traffic(Phase.FORWARD, map(nbytes_of, [*group.reads, *group.writes]), group.functions)
            if group.backward:
                moved = [*group.gradients, *group.saved, *group.returned]
                yield from _traffic(Phase.INPUT, map(nbytes_of, moved), group.functions)
        for parts, value in fusion.sums:
            yield from _traffic(Phase.INPUT, map(nbytes_of, [*parts, value]))

    def _cast(self, node: fx.Node) -> Iterator[Row]:
        """Yield casting what the graph holds, and its gradient back."""
        (source,) = node.all_input_nodes
        yield from _traffic(Phase.FORWARD, [nbytes_of(node), nbytes_of(source)])
        yield from self._cast_back(node)

    def _gradient_sums(self) -> Iterator[Row]:
        """Yield accumulating the gradients of parameters, and adding up those of values that are used several times, where that is not
        part of other kernels."""
        for node in self.graph.nodes:
            if not self._grad(node) or not isinstance(value_of(node), Tensor):
                continue
            if node.op == "get_attr":
                yield self._accumulation(node)
            if node.op == "get_attr" or self.compiled:
                continue
            uses = sum(1 for user in node.users if user.op != "output" and self._grad(user))
            if uses > 1:
                yield Traffic(Phase.INPUT, 3 * (uses - 1) * nbytes_of(node))

    def _accumulation(self, node: fx.Node) -> Traffic:
        """Return the traffic of accumulating a gradient: a fused product also reads the sum; else another kernel reads both."""
        elements = elements_of(node)
        itemsize = value_of(node).dtype.itemsize
        accumulated = 2 * (self.works.gradient_bytes or itemsize)
        return Traffic(
            Phase.WEIGHT, (accumulated - itemsize if self.works.fused else accumulated + itemsize) * elements
        )

    def _grad(self, node: fx.Node) -> bool:
        return self.works.has_gradient(node, self.scope)


def _fusible(node: fx.Node) -> bool:
    """Return whether a compiler fuses a node with its neighbours; it traces a user's autograd.Function, taken to be pointwise."""
    return record_of(node).fusible or operator_name(node).endswith(".apply")


def _room_of(moved: fx.Node) -> float:
    """Return for how many times its rows a tensor that is sent has room: padding is sent too."""
    room, divided = 1.0, moved.args[2] if operator_name(moved) in SENDS else None
    while isinstance(divided, fx.Node):  # exchange_of(own_offsets(offs, axis, rank_ends(...)), ...)
        room *= float(divided.kwargs.get("room", 1.0))  # type: ignore[arg-type]
        offs = divided.args[0]
        divided = offs.args[-1] if isinstance(offs, fx.Node) and offs.target is own_offsets else None
    return room


# ---- sizes -----------------------------------------------------------------------------------------------------


def _traffic(phase: Phase, sizes: Iterable[Size], functions: bool = False) -> Iterator[Traffic]:
    """Yield the traffic of one kernel; constant sizes (weights of norms) are neglected beside those that grow with the batch."""
    found = sorted(total(sizes), key=lambda size: -size.power)
    if found and found[0].number:
        yield Traffic(phase, found[0], functions)
