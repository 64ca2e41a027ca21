"""Experts on replicas: each rank of dp_expert takes other rows of the batch and holds other experts, to which all send their rows.

    weight [8, k, n] of 8 experts               weight [4, k, n] on each of 2 ranks
    rows ──► grouped_mm ──► silu ──►            rows ──send_rows──► grouped_mm ──► silu ──►
             grouped_mm ──► rows                                    grouped_mm ──return_rows──► rows

A rank's program on its own rows is that of the model: examples don't depend on each other, which is known for all replicas. A product by
group gives each row what its expert's matrix makes of it, wherever that happens and in whatever order, so the rows may travel; what
stands between two such products and treats each row by itself travels with them. Nothing else differs from a replica of
dp_replicate, but that a rank has the whole gradient of its experts, and no sum of it is taken over dp_expert.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from graphpar.emitted import expert_rows
from graphpar.errors import GraphparError
from graphpar.ir.program import Block, Program, TensorInfo, operator_name, value_of, where
from graphpar.ir.sharding import Sharding
from graphpar.operators.placement import Context, operands_of, results_of
from graphpar.operators.record import Kind
from graphpar.operators.rules import placements
from graphpar.operators.table import record_of
from graphpar.passes.normalize.coupled import is_coupled
from graphpar.passes.normalize.simplify import remove_dead_code
from graphpar.passes.sharding.expert_modules import expert_modules
from graphpar.passes.sharding.experts import first_dim
from graphpar.runtime.layout import ExpertRows, Shard, Type, local_size
from graphpar.runtime.mesh import Mesh

AXIS = "dp_expert"
_FIRST = Shard(0)


def exchangeable(program: Program) -> dict[str, int]:
    """Return the weights that products of rows sorted by expert take, under every name, with the number of experts of each."""
    found: dict[str, int] = {}
    others: set[str] = set()  # read by something else too
    for prefixes, graph in _scopes(program):
        for node in graph.nodes:
            if node.op != "get_attr":
                continue
            names = {name for prefix in prefixes for name in program.tie_of(f"{prefix}{node.target}")}
            names &= set(program.parameters)
            if _is_experts(node):
                found |= dict.fromkeys(names, int(value_of(node).shape[0]))
            else:
                others |= names
    return {name: count for name, count in found.items() if name not in others}


def exchanged_parameters(program: Program) -> dict[str, dict[str, Type]]:
    """Return the types of the weights of experts on the axis of the exchange, by name."""
    return {name: {AXIS: _FIRST} for name in exchangeable(program)}


def exchange_over(program: Program, mesh: Mesh) -> dict[str, int]:
    """Return the axis over which rows are sent to experts, with its degree; none where it has one rank.

    Raises:
        GraphparError: the experts can't be divided over it.
    """
    if mesh.dp_expert == 1:
        return {}
    check_experts(program, mesh.dp_expert)
    return {AXIS: mesh.dp_expert}


def check_shares(program: Program, sharding: Sharding) -> None:
    """Check that the experts which ranks of another axis hold can be shared out over replicas too.

    Raises:
        GraphparError: they can't; the number of experts and that of ranks are told.
    """
    for name, experts in exchangeable(program).items() if sharding.exchange else ():
        spec = sharding.parameters.get(name, {})
        axes = {axis: sharding.all_degrees[axis] for axis, kind in spec.items() if kind == _FIRST}
        ranks = math.prod(axes.values())
        if experts % ranks:
            shown = " x ".join(f"{axis}={degree}" for axis, degree in axes.items())
            raise GraphparError(f"{name} has {experts} experts, which the {ranks} ranks of {shown} can't share evenly.")


def check_experts(program: Program, degree: int) -> None:
    """Check that experts can be divided over ``degree`` replicas.

    Raises:
        GraphparError: there are none, they can't be shared evenly, or examples depend on each other.
    """
    found = exchangeable(program)
    lists = [f"{prefixes[0]}{path}" for prefixes, graph in _scopes(program) for path in expert_modules(graph)]
    if not found and lists:
        raise GraphparError(
            f"Mesh {AXIS}={degree}: the experts {lists[0]} of {program.name} are modules of their own, so their weights are not parts of "
            "one parameter that ranks could share, and each computes all tokens, so that no rows could be sent; use ep or tp, which divide "
            "each expert by its features, dp_shard, which stores them in shards, or stacked weights and grouped_mm."
        )
    products = [node for _, graph in _scopes(program) for node in graph.nodes if record_of(node).kind is Kind.GROUPED]
    if not found and products:
        raise GraphparError(
            f"Mesh {AXIS}={degree}: {program.name} computes the weights of its experts{where(products[0])} before they multiply rows, as "
            "adapters on stacked experts are added to them, and only parameters can be divided; use ep, or merge the adapters."
        )
    if not found:
        raise GraphparError(
            f"Mesh {AXIS}={degree}: {program.name} has no experts that rows can be sent to: no grouped_mm applies a weight to "
            "rows that are sorted by expert; use ep, or dp_replicate."
        )
    for name, count in found.items():
        if count % degree:
            raise GraphparError(
                f"Mesh {AXIS}={degree}: {name} has {count} experts, which {degree} ranks can't share evenly."
            )
    if is_coupled(program):
        raise GraphparError(
            f"Mesh {AXIS}={degree}: examples of {program.name} depend on each other, so its operators are placed on the axes of replicas, "
            "which this axis does not support; use ep."
        )


def exchange_experts(program: Program, degree: int, experts: Collection[str]) -> Program:
    """Return the program of a rank that holds its share of the weights ``experts``, with the exchange of rows around their products."""
    blocks: dict[str, Block] = {}
    for name, block in program.blocks.items():
        graph = _Exchange(block.graph, degree, read_in_scope(program, name, experts)).apply()
        blocks[name] = block if graph is None else replace(block, graph=graph)
    graph = _Exchange(program.graph, degree, read_in_scope(program, "", experts)).apply()
    parameters = program.parameters | {name: _local(program.parameters[name], degree) for name in experts}
    return program.with_graph(graph or program.graph, blocks=blocks, parameters=parameters)


def _local(info: TensorInfo, degree: int) -> TensorInfo:
    shape = (local_size(info.shape[0], _FIRST, degree), *info.shape[1:])
    return replace(info, shape=shape, whole=info.whole or info.shape, spec=((AXIS, _FIRST), *info.spec))


def _scopes(program: Program) -> Iterator[tuple[list[str], fx.Graph]]:
    used = {str(node.meta["block"]) for node in program.graph.nodes if node.op == "call_module"}
    yield list(program.prefixes("")), program.graph
    for name, block in program.blocks.items():
        if name in used:
            yield list(program.prefixes(name)), block.graph


def read_in_scope(program: Program, scope: str, experts: Collection[str]) -> set[str]:
    """Return the names by which a scope's graph reads ``experts``."""
    prefix = next(iter(program.prefixes(scope)), "")
    return {name.removeprefix(prefix) for name in experts if name.startswith(prefix)}


# ---- which products -------------------------------------------------------------------------------------------


def _is_product(node: fx.Node) -> bool:
    """Whether rows by group times each group's matrix: x [t, k], weight [g, k, n], offsets [g]."""
    if record_of(node).kind is not Kind.GROUPED:
        return False
    return [value_of(operand).ndim for operand in operands_of(node)] == [2, 3, 1]


def _is_experts(parameter: fx.Node) -> bool:
    """Whether only such products take a parameter, or views and casts of it that keep its first dim."""
    if not isinstance(value_of(parameter), Tensor) or value_of(parameter).ndim != 3:
        return False
    return bool(parameter.users) and all(_leads_to_product(user, parameter) for user in parameter.users)


def _leads_to_product(node: fx.Node, source: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    operands = operands_of(node)
    if _is_product(node):
        return operands[1] is source and source not in (operands[0], operands[2])
    record, (parameter, dim) = record_of(node), first_dim(node)
    if operands != [source] or parameter is None or dim or not (record.same_value or record.kind is Kind.PERMUTE):
        return False
    return bool(node.users) and all(_leads_to_product(user, node) for user in node.users)


def experts_of_product(node: fx.Node, experts: Collection[str]) -> str | None:
    """Return which of ``experts`` a product by group applies to its rows; None where it is no such product."""
    if node.op != "call_function" or not _is_product(node):
        return None
    weight = operands_of(node)[1]
    while weight.op != "get_attr" and len(weight.all_input_nodes) == 1:
        weight = weight.all_input_nodes[0]
    return str(weight.target) if weight.op == "get_attr" and weight.target in experts else None


def treats_rows_alone(node: fx.Node) -> bool:
    """Whether a row of each result is made of the same row of every operand, wherever that row is."""
    operands, kind = operands_of(node), ExpertRows(offsets="rows")
    if node.op != "call_function" or set(node.all_input_nodes) != set(operands):
        return False
    context = Context(1, lambda n, i: (), lambda n: True, (), lambda n, i: [kind])
    expected = (kind,) * len(operands), (kind,) * len(results_of(node))
    return any((p.operands, p.results, p.rewrite) == (*expected, "") for p in placements(node, context))


# ---- one graph ------------------------------------------------------------------------------------------------


class _Exchange:
    """``moved``: the values that have the rows of this rank's experts, with the exchange that brought these."""

    def __init__(self, source: fx.Graph, degree: int, experts: Collection[str]) -> None:
        self.source, self.degree, self.experts = source, degree, experts
        self.moved: dict[fx.Node, fx.Node] = {}
        self.sent: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
        self.back: dict[fx.Node, fx.Node] = {}
        self.exchanges: dict[fx.Node, fx.Node] = {}
        self.kinds: dict[fx.Node, ExpertRows] = {}  # of rows that an exchange brought

    def apply(self) -> fx.Graph | None:
        """Return a copy with the exchange; None where nothing takes experts."""
        if not any(node.op == "get_attr" and node.target in self.experts for node in self.source.nodes):
            return None
        self.graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        self.graph.output(self.graph.graph_copy(self.source, copies))
        for old, new in copies.items():
            new.meta = dict(old.meta)
        nodes = list(self.graph.nodes)
        nodes[-1].meta = dict(next(iter(reversed(self.source.nodes))).meta)
        for node in nodes:
            if node.op == "get_attr" and node.target in self.experts:
                self._divide(node)
        self.products = {node for node in nodes if experts_of_product(node, self.experts) is not None}
        between = self._between(nodes)
        for node in nodes:
            if node in self.products:
                self._product(node)
            elif node in between and self._travels(node):
                self._mark(node, self.moved[node.all_input_nodes[0]])
            else:
                for operand in node.all_input_nodes:
                    if operand in self.moved:
                        node.replace_input_with(operand, self._returned(operand))
        remove_dead_code(self.graph)
        self.graph.lint()
        return self.graph

    def _divide(self, node: fx.Node) -> None:
        """Give a weight, its views and casts the shape of a rank's share."""
        value = value_of(node)
        shape = (local_size(int(value.shape[0]), _FIRST, self.degree), *value.shape[1:])
        node.meta["val"] = value.new_empty(shape)
        node.meta["types"] = {AXIS: _FIRST, **node.meta.get("types", {})}
        for user in node.users:
            if not _is_product(user):
                self._divide(user)

    def _between(self, nodes: list[fx.Node]) -> set[fx.Node]:
        """Return what depends on a product and what another product's rows depend on."""
        after: set[fx.Node] = set()
        for node in nodes:
            if any(source in after or source in self.products for source in node.all_input_nodes):
                after.add(node)
        before: set[fx.Node] = set()
        for node in reversed(nodes):
            if any(user in before or (user in self.products and operands_of(user)[0] is node) for user in node.users):
                before.add(node)
        return after & before

    def _product(self, node: fx.Node) -> None:
        rows, _, offs = operands_of(node)
        exchange = self._exchange(offs)
        if self.moved.get(rows) is not exchange:
            node.replace_input_with(rows, self._sent(rows, exchange))
        with self.graph.inserting_before(node):
            ends = self.graph.call_function(expert_rows.received_ends, (exchange,))
        own = value_of(offs).new_empty(value_of(offs).shape[0] // self.degree)
        ends.meta = {"module_stack": exchange.meta["module_stack"], "val": own, "batch_coefficients": (None,)}
        node.replace_input_with(offs, ends)
        self._mark(node, exchange)

    def _mark(self, node: fx.Node, exchange: fx.Node) -> None:
        self.moved[node] = exchange
        node.meta["types"] = {AXIS: self.kinds[exchange], **node.meta.get("types", {})}

    def _travels(self, node: fx.Node) -> bool:
        """Whether ``node`` treats rows one by one, and all tensors that it takes have travelled together."""
        exchanges = {self.moved.get(operand) for operand in node.all_input_nodes}
        if len(exchanges) != 1 or None in exchanges:
            return False
        return operator_name(node) == "getitem" or treats_rows_alone(node)

    # ---- what is inserted ----

    def _exchange(self, offs: fx.Node) -> fx.Node:
        offs = self._first_alike(offs)
        if offs not in self.exchanges:
            with self.graph.inserting_after(offs):
                made = self.graph.call_function(expert_rows.exchange_of, (offs, AXIS))
            made.meta = {"module_stack": offs.meta.get("module_stack", ()), "name": "exchange"}
            self.exchanges[offs] = made
            self.kinds[made] = ExpertRows(offsets=offs.name)
        return self.exchanges[offs]

    def _first_alike(self, offs: fx.Node) -> fx.Node:
        """Return the first offsets of an exchange that equal ``offs``: where ranks of another axis hold other experts too, each product has
        offsets of its own.
        """
        same = (offs.target, offs.args, offs.kwargs)
        return next((known for known in self.exchanges if (known.target, known.args, known.kwargs) == same), offs)

    def _sent(self, rows: fx.Node, exchange: fx.Node) -> fx.Node:
        if rows in self.moved:
            rows = self._returned(rows)
        key = rows, exchange
        if key not in self.sent:
            later = exchange if self._precedes(rows, exchange) else rows
            kind = self.kinds[exchange]
            self.sent[key] = self._travel(
                expert_rows.send_rows, later, rows, exchange, ("S(0)", str(kind)), {AXIS: kind}
            )
            self.moved[self.sent[key]] = exchange
        return self.sent[key]

    def _returned(self, rows: fx.Node) -> fx.Node:
        if rows not in self.back:
            kind = str(self.kinds[self.moved[rows]])
            self.back[rows] = self._travel(expert_rows.return_rows, rows, rows, self.moved[rows], (kind, "S(0)"), {})
        return self.back[rows]

    def _travel(
        self,
        function: Any,
        after: fx.Node,
        rows: fx.Node,
        exchange: fx.Node,
        words: tuple[str, str],
        own: Mapping[str, Type],
    ) -> fx.Node:
        with self.graph.inserting_after(after):
            made = self.graph.call_function(function, (rows, AXIS, exchange))
        kept = ("module_stack", "source", "val", "batch_coefficients", "origin")
        made.meta = {"origin": rows} | {key: rows.meta[key] for key in kept if key in rows.meta}
        others = {axis: kind for axis, kind in rows.meta.get("types", {}).items() if axis != AXIS}
        made.meta |= {"types": {**own, **others}, "transition": words}
        return made

    def _precedes(self, first: fx.Node, second: fx.Node) -> bool:
        return next(node for node in self.graph.nodes if node in (first, second)) is first
