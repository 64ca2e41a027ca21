"""The sharding problem of a program: every operator with its legal placements, every value with its uses.

    root graph, blocks ──rules, to a fixed point──► Problem(operators, values, edges)

A block is one scope, whatever the number of its instances: they share a class, so they share its placement. An edge is a value
and an operand that takes it; equal edges of many instances are one, with a count. A parameter may be read in several places: under
tied names, by other instances, by the root. All of these store it in the same types (:class:`Stored`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor, fx

from graphpar.annotations.values import Spec
from graphpar.ir.batch_sizes import is_size
from graphpar.ir.program import Block, Program, operator_name, value_of
from graphpar.operators.gradients import block_results, differentiable_nodes
from graphpar.operators.placement import Context, Placement, operands_of, results_of, sizes_of
from graphpar.operators.rewrite import REWRITES, can_replace
from graphpar.operators.rules import placements
from graphpar.passes.normalize.functional import is_inplace
from graphpar.runtime.axes import AXIS
from graphpar.runtime.layout import ExpertRows, I, P, R, Shard, Type

Types = tuple[Type, ...]
"""The types of one tensor, one an axis of the problem."""
_SWEEPS = 8


@dataclass(frozen=True)
class Choice:
    """One way to run an operator: types of its operands and results on all axes, and the rewrite on each axis."""

    operands: tuple[Types, ...]
    results: tuple[Types, ...]
    rewrites: tuple[str, ...]
    divided: tuple[bool, ...] = ()  # whether each axis divides the work
    share: int = 1  # the number of ranks that the work is divided over


@dataclass(eq=False)
class Operator:
    """A decision of the search: an operator, a parameter, an input, or the boundary of a block."""

    node: fx.Node
    scope: str  # "" is the root, else the block's name
    kind: str  # operator | parameter | source | boundary | output
    choices: list[Choice]
    operands: list[fx.Node]
    count: int = 1  # how many instances run it


@dataclass(frozen=True)
class Edge:
    """Result ``index`` of ``maker`` is taken by operand ``position`` of ``user``."""

    maker: Operator
    index: int
    user: Operator
    position: int


@dataclass
class Value:
    """A tensor with all its uses. ``count``: how many instances have one."""

    maker: Operator
    index: int
    node: fx.Node
    edges: list[Edge]
    count: int
    differentiable: bool


@dataclass(frozen=True)
class Stored:
    """Operators that read parameters which must be stored in the same types: those of one class, and tied ones.

    ``parameters``: the number of distinct tensors.
    """

    operators: tuple[Operator, ...]
    parameters: int


@dataclass
class Problem:
    """The operators and values of a program, for the search to place on ``axes``."""

    program: Program
    axes: tuple[str, ...]
    degrees: Mapping[str, int]
    operators: list[Operator]
    values: list[Value]
    differentiable: set[fx.Node]
    stored: list[Stored]
    of: dict[fx.Node, Operator] = field(default_factory=dict)


def build_problem(
    program: Program, degrees: Mapping[str, int], stored: Mapping[str, Spec] = MappingProxyType({})
) -> Problem:
    """Build the problem of ``program`` on the axes ``degrees`` (each larger than 1).

    Args:
        stored: types in which operators may read parameters though no neighbour shards them so.
    """
    return _Builder(program, degrees, stored).build()


class _Builder:
    def __init__(self, program: Program, degrees: Mapping[str, int], stored: Mapping[str, Spec]) -> None:
        self.program = program
        self.degrees = dict(degrees)
        self.axes = tuple(degrees)
        used = {str(node.meta["block"]) for node in program.graph.nodes if node.op == "call_module"}
        self.blocks: dict[str, Block] = {name: block for name, block in program.blocks.items() if name in used}
        self.returned = {result for block in self.blocks.values() for result in block_results(block.graph)}
        self.differentiable = differentiable_nodes(program)
        self.operators: dict[fx.Node, Operator] = {}
        self.counting: dict[tuple[fx.Graph, str], set[fx.Node]] = {}
        self.shards: list[dict[tuple[fx.Node, int], dict[Shard, None]]] = [{} for _ in self.axes]
        self.stored_groups = self._stored_groups(stored)
        self.links = [
            *self._boundaries(),
            *(((first, 0), (other, 0)) for (first, *others), _ in self.stored_groups for other in others),
        ]

    def scopes(self) -> list[tuple[str, fx.Graph, int]]:
        """Return the name, graph and number of instances of the root and of each block that is called."""
        counts = dict.fromkeys(self.blocks, 0)
        for node in self.program.graph.nodes:
            if node.op == "call_module":
                counts[str(node.meta["block"])] += 1
        return [
            ("", self.program.graph, 1),
            *((name, block.graph, counts[name]) for name, block in self.blocks.items()),
        ]

    def build(self) -> Problem:
        """Return the problem."""
        per_axis = [self._fixed_point(position) for position in range(len(self.axes))]
        for scope, graph, count in self.scopes():
            for node in graph.nodes:
                made = self._operator(node, scope, count, per_axis)
                if made is not None:
                    self.operators[node] = made
        values = self._values()
        return Problem(
            self.program,
            self.axes,
            self.degrees,
            list(self.operators.values()),
            values,
            self.differentiable,
            [Stored(tuple(self.operators[node] for node in nodes), count) for nodes, count in self.stored_groups],
            self.operators,
        )

    def _stored_groups(self, stored: Mapping[str, Spec]) -> list[tuple[list[fx.Node], int]]:
        """Return groups of nodes whose parameters must be stored in the same types, each with its number of distinct parameters."""
        readers: dict[str, list[fx.Node]] = {}  # by the first name of a parameter
        groups: dict[fx.Node, list[fx.Node]] = {}
        for scope, graph, _ in self.scopes():
            for node in graph.nodes:
                if node.op != "get_attr" or not self._is_parameter(node, scope):
                    continue
                groups[node] = [node]
                for prefix in self.program.prefixes(scope):
                    name = f"{prefix}{node.target}"
                    readers.setdefault(self.program.tie_of(name)[0], []).append(node)
                    for axis, shards in zip(self.axes, self.shards):
                        for kind in sorted(stored.get(name, {}).get(axis, ()), key=str):
                            if isinstance(kind, Shard):
                                shards.setdefault((node, 0), {})[kind] = None
        for first, *others in readers.values():
            for other in others:
                if groups[other] is not groups[first]:
                    groups[first] += groups[other]
                    groups.update(dict.fromkeys(groups[other], groups[first]))
        counts = Counter(id(groups[nodes[0]]) for nodes in readers.values())
        distinct = {id(group): group for group in groups.values()}
        return [(group, counts[key]) for key, group in distinct.items()]

    # ---- placements of each axis, to a fixed point ----

    def _fixed_point(self, position: int) -> dict[fx.Node, list[Placement]]:
        """Return the placements of every operator on one axis; shards by parts spread from operators that need them to neighbours."""
        shards: dict[tuple[fx.Node, int], dict[Shard, None]] = self.shards[position]
        rows: dict[tuple[fx.Node, int], dict[ExpertRows, None]] = {}
        axis = AXIS[self.axes[position]]
        context = Context(
            self.degrees[self.axes[position]],
            lambda node, i: shards.get(_value(node, i), ()),
            self.differentiable.__contains__,
            tuple(name for name, rewrite in REWRITES.items() if axis.divides in rewrite.divides),
            lambda node, i: rows.get(_value(node, i), ()),
            axis.replicas,
        )
        found: dict[fx.Node, list[Placement]] = {}
        nodes = [node for _, graph, _ in self.scopes() for node in graph.nodes]
        pending = set(nodes)
        for sweep in range(_SWEEPS):
            changed: set[fx.Node] = set()
            for node in nodes if sweep % 2 == 0 else reversed(nodes):
                if node in pending and is_operator(node):
                    found[node] = self._legal(node, placements(node, context))
                    changed |= self._spread(shards, rows, node, found[node])
            pending = changed | self._linked(shards)
            if not pending:
                break
        return found

    def _legal(self, node: fx.Node, options: list[Placement]) -> list[Placement]:
        """Drop placements that shard a buffer written in place, which every rank holds whole.

        Also those in which rows of a rank's experts leave the graph with their offsets, or have their size read.
        """
        written = is_inplace(node) or (operator_name(node) == "batch_norm" and node.args[5])
        leaves = node in self.returned or any(is_size(user) for user in node.users)

        def allowed(placement: Placement) -> bool:
            rows = {kind for kind in (*placement.operands, *placement.results) if isinstance(kind, ExpertRows)}
            synchronized = bool(placement.rewrite) and REWRITES[placement.rewrite].updates
            if written and not synchronized and (placement.divides or P in placement.results):
                return False
            return not rows or not (leaves or any(node in self._counting(node.graph, kind.offsets) for kind in rows))

        return [placement for placement in options if allowed(placement)]

    def _counting(self, graph: fx.Graph, offsets: str) -> set[fx.Node]:
        """Return what the value ``offsets`` depends on, including itself."""
        if (graph, offsets) not in self.counting:
            pending = [node for node in graph.nodes if node.name == offsets]
            found = self.counting.setdefault((graph, offsets), set(pending))
            while pending:
                fresh = [node for node in pending.pop().all_input_nodes if node not in found]
                found.update(fresh)
                pending += fresh
        return self.counting[graph, offsets]

    def _spread(
        self,
        shards: dict[tuple[fx.Node, int], dict[Shard, None]],
        rows: dict[tuple[fx.Node, int], dict[ExpertRows, None]],
        node: fx.Node,
        options: Iterable[Placement],
    ) -> set[fx.Node]:
        """Note the shards of the values around ``node``, and return the nodes that should be visited again."""
        changed: set[fx.Node] = set()
        operands = operands_of(node)
        for placement in options:
            around = [(_value(operand, 0), kind) for operand, kind in zip(operands, placement.operands)]
            around += [((node, index), kind) for index, kind in enumerate(placement.results)]
            for key, kind in around:
                if isinstance(kind, ExpertRows):
                    if kind not in rows.setdefault(key, {}):
                        rows[key][kind] = None
                        changed |= _around(key[0])
                elif isinstance(kind, Shard) and kind not in shards.setdefault(key, {}):
                    shards[key][kind] = None
                    if kind.parts or not self._evenly(key, kind):
                        changed |= _around(key[0])
        return changed

    def _evenly(self, key: tuple[fx.Node, int], shard: Shard) -> bool:
        node, index = key
        tensors = results_of(node)
        size = tensors[index].shape[shard.dim]
        return not isinstance(size, int) or all(size % degree == 0 for degree in self.degrees.values())

    def _linked(self, shards: dict[tuple[fx.Node, int], dict[Shard, None]]) -> set[fx.Node]:
        """Spread shards over the boundaries of blocks, both ways, and return the nodes that should be visited again."""
        changed: set[fx.Node] = set()
        for first, second in self.links:
            for source, target in ((first, second), (second, first)):
                for shard in list(shards.get(source, {})):
                    if shard not in shards.setdefault(target, {}):
                        shards[target][shard] = None
                        changed.update(_around(target[0]))
        return changed

    def _boundaries(self) -> Iterator[tuple[tuple[fx.Node, int], tuple[fx.Node, int]]]:
        """Yield pairs of an argument and a block's input, and of a call's and a block's result; of equal calls, only one's."""
        inside = {name: [n for n in block.graph.nodes if n.op == "placeholder"] for name, block in self.blocks.items()}
        results = {name: block_results(block.graph) for name, block in self.blocks.items()}
        seen = set()
        for call in self.program.graph.nodes:
            if call.op != "call_module":
                continue
            name = str(call.meta["block"])
            takers = frozenset(
                user for user in _around(call) if user.op == "call_function" and operator_name(user) != "getitem"
            )
            alike = (name, takers, tuple(self._source(argument) for argument in call.args))
            if alike in seen:
                continue
            seen.add(alike)
            for argument, placeholder in zip(call.args, inside[name]):
                if isinstance(argument, fx.Node) and isinstance(value_of(placeholder), Tensor):
                    yield _value(argument, 0), (placeholder, 0)
            for index, result in enumerate(results[name]):
                yield (call, index), _value(result, 0)

    @staticmethod
    def _source(argument: Any) -> object:
        """Return what makes an argument of a block; results of instances of the same block are equal."""
        if not isinstance(argument, fx.Node):
            return None
        node, index = _value(argument, 0)
        return (str(node.meta["block"]), index) if node.op == "call_module" else (node, index)

    # ---- decisions ----

    def _operator(
        self, node: fx.Node, scope: str, count: int, per_axis: Sequence[Mapping[fx.Node, list[Placement]]]
    ) -> Operator | None:
        if is_operator(node):
            choices = self._product(node, [found[node] for found in per_axis])
            return Operator(node, scope, "operator", choices, operands_of(node), count)
        if not isinstance(value_of(node), Tensor) or node.op not in ("placeholder", "get_attr"):
            return None
        if node.op == "placeholder" and not scope:
            return Operator(node, scope, "source", [_only(source_types(self.program, node, self.axes))], [], count)
        options = [self._types_of(node, position) for position in range(len(self.axes))]
        if node.op == "get_attr" and not self._is_parameter(node, scope):
            options = [[R] for _ in self.axes]
        kind = "boundary" if node.op == "placeholder" else "parameter"
        choices = [_only(types) for types in itertools.product(*options) if self._fits(node, types)]
        return Operator(node, scope, kind, choices, [], count)

    def _types_of(self, node: fx.Node, position: int) -> list[Type]:
        """Return every type that a parameter or a block's input can have on an axis."""
        whole: list[Type] = [I, R] if node in self.differentiable else [R]
        axis = AXIS[self.axes[position]]
        if node.op == "get_attr":
            whole = [R] if axis.shares_state else whole  # its gradient is a sum over these ranks, whatever they store
            if axis.replicas:
                return whole
        return [*whole, *self.shards[position].get((node, 0), {})]

    def _is_parameter(self, node: fx.Node, scope: str) -> bool:
        first = self.program.prefixes(scope)[0]  # all instances have the same kinds
        return f"{first}{node.target}" in self.program.parameters

    def _product(self, node: fx.Node, options: Sequence[Sequence[Placement]]) -> list[Choice]:
        """Combine placements of single axes to choices on all, where their shards are compatible."""
        operands, results = operands_of(node), len(options[0][0].results)
        found = []
        for combination in itertools.product(*options):
            before = tuple(tuple(p.operands[i] for p in combination) for i in range(len(operands)))
            after = tuple(tuple(p.results[i] for p in combination) for i in range(results))
            rewrites = tuple(p.rewrite for p in combination)
            if len(self.axes) > 1 and not (
                can_replace(rewrites) and all(self._fits(operand, types) for operand, types in zip(operands, before))
            ):
                continue
            divided = tuple(p.divides for p in combination)
            share = math.prod(self.degrees[axis] for axis, own in zip(self.axes, divided) if own)
            found.append(Choice(before, after, rewrites, divided, share))
        return found

    def _fits(self, node: fx.Node, types: Types) -> bool:
        """Return whether axes that shard the same dim divide its size together."""
        shards = [(kind, self.degrees[axis]) for kind, axis in zip(types, self.axes) if isinstance(kind, Shard)]
        for dim in {shard.dim for shard, _ in shards}:
            own = [(shard, degree) for shard, degree in shards if shard.dim == dim]
            if len(own) > 1:
                size = sizes_of(node)[dim]
                uneven = any(shard.parts or isinstance(shard, ExpertRows) for shard, _ in own)
                if uneven or size[0] % math.prod(degree for _, degree in own):
                    return False
        return True

    # ---- values and edges ----

    def _values(self) -> list[Value]:
        """Return the values, one for all with the same producer and users: the results of 31 of 32 layers."""
        uses: dict[fx.Node, dict[Edge, None]] = {}
        scope_of: dict[fx.Node, int] = {}

        def use(value: fx.Node, user: Operator, position: int) -> None:
            maker, index = self._maker(value)
            uses.setdefault(value, {})[Edge(maker, index, user, position)] = None
            scope_of[value] = user.count if user.kind != "boundary" else 1

        for operator in list(self.operators.values()):
            for position, operand in enumerate(operator.operands):
                use(operand, operator, position)
        for call in self.program.graph.nodes:
            if call.op == "call_module":
                graph = self.blocks[str(call.meta["block"])].graph
                inside = [node for node in graph.nodes if node.op == "placeholder"]
                for argument, placeholder in zip(call.args, inside):
                    if isinstance(argument, fx.Node) and placeholder in self.operators:
                        use(argument, self.operators[placeholder], 0)
        output = next(node for node in self.program.graph.nodes if node.op == "output")
        results = [node for node in output.all_input_nodes if isinstance(value_of(node), Tensor)]
        end = Operator(output, "", "output", [self._end(results)], results)
        self.operators[output] = end
        for position, node in enumerate(results):
            use(node, end, position)
        values: dict[tuple[int, int, bool, frozenset[Edge]], Value] = {}
        for node, edges in uses.items():
            first = next(iter(edges))
            key = (id(first.maker), first.index, node in self.differentiable, frozenset(edges))
            if key in values:
                values[key].count += scope_of[node]
            else:
                values[key] = Value(
                    first.maker, first.index, node, list(edges), scope_of[node], node in self.differentiable
                )
        return list(values.values())

    def _end(self, results: Sequence[fx.Node]) -> Choice:
        types = tuple(
            result_types(self.program, node, place, node in self.differentiable, self.axes)
            for place, node in enumerate(results)
        )
        return Choice(types, (), ("",) * len(self.axes))

    def _maker(self, value: fx.Node) -> tuple[Operator, int]:
        """Return what makes a value: an operator of its graph, or one inside a block."""
        node, index = _value(value, 0)
        if node.op != "call_module":
            return self.operators[node], index
        result = block_results(self.blocks[str(node.meta["block"])].graph)[index]
        inner, inner_index = _value(result, 0)
        return self.operators[inner], inner_index


def source_types(program: Program, node: fx.Node, axes: Sequence[str]) -> Types:
    """Return the types of an input: on axes of replicas S(batch dim), on others R."""
    dim = next((entry.batch_dim for entry in program.inputs if entry.name == str(node.target)), None)
    return tuple(R if dim is None or not AXIS[axis].replicas else Shard(dim % value_of(node).ndim) for axis in axes)


def result_types(program: Program, node: fx.Node, place: int, differentiable: bool, axes: Sequence[str]) -> Types:
    """Return the types of an output: on axes of replicas a loss is P and another output S(batch dim), on other axes it is whole.

    A loss is I there, since every rank starts its backward from it.
    """
    whole: Type = I if differentiable else R
    dim = None if program.mode == "train" else program.outputs[place].batch_dim
    rows: Type = P if program.mode == "train" else R if dim is None else Shard(dim % value_of(node).ndim)
    return tuple(rows if AXIS[axis].replicas else whole for axis in axes)


def _only(types: Types) -> Choice:
    return Choice((), (types,), ("",) * len(types))


def _value(node: fx.Node, index: int) -> tuple[fx.Node, int]:
    """Return the operator and the result's index where ``node`` picks one of several results, else ``node`` and ``index``."""
    if operator_name(node) == "getitem" and isinstance(value_of(node.args[0]), tuple | list):  # type: ignore[arg-type]
        return node.args[0], int(node.args[1])  # type: ignore[arg-type, return-value]
    return node, index


def _around(node: fx.Node) -> set[fx.Node]:
    """Return ``node`` and its users, through picks among its results."""
    items = {taker for user in node.users if operator_name(user) == "getitem" for taker in user.users}
    return {node, *node.users, *items}


def is_operator(node: fx.Node) -> bool:
    """Return whether ``node`` computes tensors (sizes and picks among results don't)."""
    if node.op != "call_function" or not results_of(node):
        return False
    return _value(node, 0)[0] is node
