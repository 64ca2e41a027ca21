"""May a batch be padded at the end of its sequences? Only if nothing that counts depends on what is added, which the graph has to show.

    ids [b, s] ──embedding, norms, products──► [b, s, d]     position by position          Along(dim)
    causal attention                                         of positions before alone     Along(dim)
    cross_entropy(.., labels), labels ignored where added    a sum to which they add 0     invariant

It is the analysis of a batch (:mod:`graphpar.operators.batch`) on positions: which operators compute each position by itself follows from
the rules that shard them. What is known besides are attention with a causal mask, sums over what is zero where labels are ignored, and
sums along the sequence up to each position.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from graphpar.emitted import random_streams
from graphpar.ir.batch_sizes import batch_coefficients, is_size, number_arguments
from graphpar.ir.program import Program, operator_name, value_of, where
from graphpar.operators.batch import FILLED, SIZE_REWRITES
from graphpar.operators.placement import Context, literal, operands_of
from graphpar.operators.record import Kind
from graphpar.operators.rules import placements
from graphpar.operators.table import record_of
from graphpar.passes.normalize.causal_masks import Masks
from graphpar.passes.normalize.functional import is_inplace
from graphpar.passes.normalize.graph_matching import number
from graphpar.passes.normalize.mask_conditions import conditions_of, hides_whole_rows
from graphpar.runtime.layout import R, Shard

_HALVES = ("tril", "triu")  # are zero elsewhere
_MOVES = (Kind.RESHAPE, Kind.ALIAS, Kind.COPY, Kind.VIEW, Kind.EXPAND, Kind.PERMUTE)


@dataclass(frozen=True)
class _Along:
    """A value whose part at each position depends on positions up to it.

    Attributes:
        shard: the positions' dim; with parts where it is flattened with others.
        count: how many there are.
        zero: it is zero where positions are added.
        labels: the input of which it has the elements, so that what is added is what the input was padded with.
    """

    shard: Shard
    count: int
    zero: bool = False
    labels: str = ""


class _Square:
    """A value of positions by positions, such as a mask."""


_State = _Along | _Square | None
"""None: a value that does not change if positions are added."""
_SQUARE = _Square()


class _RefusedError(Exception):
    pass


def fills_of(program: Program, length: int, other: Program) -> str | dict[str, int]:
    """Return what labels are padded with, by name, so that the program of sequences of another length gives the same results; or why there
    is nothing.

    Args:
        program: without blocks; its sequences have a ``length`` that nothing else in it has.
        other: the same for sequences of another length, which shows what numbers follow the length.
    """
    analysis = _Analysis(program, length)
    try:
        for graph, twin in ((program.counts, other.counts), (program.graph, other.graph)):
            if graph is not None and twin is not None:
                analysis.compare(graph, twin)
                analysis.visit(graph, trains=program.mode == "train")
    except _RefusedError as refused:
        return str(refused)
    both = [name for name in analysis.fills if name in analysis.looked_up]
    return f"the input {both[0]} is looked up, and the loss ignores some of it" if both else analysis.fills


class _Analysis:
    def __init__(self, program: Program, length: int) -> None:
        self.program, self.length, self.masks = program, length, Masks(program)
        self.states: dict[fx.Node, _State] = {}
        self.fills: dict[str, int] = {}
        self.looked_up: set[str] = set()
        self.varying: set[fx.Node] = set()  # operators that take numbers of the length, and such numbers
        self.filled: set[fx.Node] = set()  # of these, what fills a tensor with such a number

    def compare(self, graph: fx.Graph, twin: fx.Graph) -> None:
        """Find which numbers follow the length."""
        for node, other in zip(graph.nodes, twin.nodes, strict=False):
            if operator_name(node) != operator_name(other):
                raise self.refused(node, "it is another operator at other lengths")
            given, there = (_numbers(each) for each in (node, other))
            if given != there or (is_size(node) and str(value_of(node)) != str(value_of(other))):
                self.varying.add(node)
                if _filling(node) != _filling(other):
                    self.filled.add(node)
        if len(graph.nodes) != len(twin.nodes):
            raise _RefusedError("at other lengths the program has other operators")

    def visit(self, graph: fx.Graph, trains: bool) -> None:
        """Find the state of each value of a graph; raise where its results change with what is added."""
        for node in graph.nodes:
            if node.op == "output":
                for result in node.args[0] if isinstance(node.args[0], tuple | list) else (node.args[0],):
                    known = isinstance(result, fx.Node) and result not in self.varying
                    if isinstance(result, fx.Node) and (not known or (trains and self.states[result] is not None)):
                        raise self.refused(result, "a result of the program follows the length")
                    if isinstance(result, fx.Node) and self.scattered(result):
                        raise self.refused(result, "a result of the program has positions of several rows in one dim")
            elif node.op == "placeholder":
                self.states[node] = self.input(node)
            else:
                self.states[node] = self.state(node)
                if node.meta.get("model_output") and self.scattered(node) and not _with_rows(node):
                    raise self.refused(node, "an output of the model has positions and others in one dim")

    def scattered(self, node: fx.Node) -> bool:
        """Whether what is added at the end of sequences is not at the end of the value."""
        state = self.states.get(node)
        return isinstance(state, _Along) and bool(state.shard.parts)

    def refused(self, node: fx.Node, why: str) -> _RefusedError:
        return _RefusedError(f"{operator_name(node)}{where(node)}: {why}")

    # ---- what has positions ----

    def along(self, node: fx.Node) -> _State:
        """The state of a value that is as long as the sequence."""
        value = value_of(node)
        if not isinstance(value, Tensor):
            return None
        dims = self.long_dims(node)
        return None if not dims else _SQUARE if len(dims) > 1 else _Along(Shard(dims[0]), self.length)

    def long_dims(self, node: fx.Node) -> list[int]:
        """The dims of a tensor that have positions."""
        sizes = (size if rows is None else rows for size, rows in zip(value_of(node).shape, batch_coefficients(node)))
        return [dim for dim, size in enumerate(sizes) if int(size) and int(size) % self.length == 0]

    def long_sizes(self, node: fx.Node) -> list[str]:
        """Their sizes."""
        return [str(value_of(node).shape[dim]) for dim in self.long_dims(node)]

    def input(self, node: fx.Node) -> _State:
        state, name = self.along(node), str(node.target)
        known = any(entry.name == name and entry.role != "sample_keys" for entry in self.program.inputs)
        whole = known and not value_of(node).is_floating_point()
        return replace(state, labels=name) if isinstance(state, _Along) and whole else state

    # ---- operators ----

    def state(self, node: fx.Node) -> _State:
        if node.op != "call_function":
            return self.along(node)
        if is_size(node):
            return None
        name, kind = operator_name(node), record_of(node).kind
        if name == "getitem":
            return self.states[node.all_input_nodes[0]]
        if node in self.filled or any(number in self.varying for _, number in number_arguments(node)):
            raise self.refused(node, "it computes with the length")
        operands = operands_of(node)
        states = [self.states[operand] for operand in operands]
        if not any(states):
            return self.made(node, name, kind)
        if is_inplace(node):
            raise self.refused(node, "it writes a buffer")
        for state in states if kind in (Kind.LOOKUP, Kind.INDEX) else ():
            self.looked_up.update([state.labels] if isinstance(state, _Along) and state.labels else [])
        if name in ("slice", "select"):
            return self.part(node, name, states[0])
        if node in self.varying and kind not in (Kind.RESHAPE, Kind.EXPAND, Kind.FACTORY):
            raise self.refused(node, "it computes with the length")
        if (labels := self.of_labels(node, name, kind, states)) is not None:
            return labels
        if kind is Kind.ATTENTION:
            return self.attention(node, name, states)
        if kind is Kind.CLASS_LOSS or name == "ne":
            return self.ignoring(node, name, operands, states)
        if kind is Kind.SCAN and isinstance(states[0], _Along) and not states[0].shard.parts:
            return replace(states[0], zero=False, labels="")
        squares = [operand for operand, state in zip(operands, states) if isinstance(state, _Square)]
        if squares and not self.by_element(node, kind, operands, squares):
            raise self.refused(node, "it joins positions, and no causal mask is known")
        if self.along(node) is _SQUARE:
            return _SQUARE
        if node.target in vars(random_streams).values() or kind is Kind.RANDOM:
            self.check_random(node, states)
        return self.by_rule(node, name, operands, states)

    def by_element(self, node: fx.Node, kind: Kind, operands: list[fx.Node], squares: list[fx.Node]) -> bool:
        """Whether an element of the result depends on the elements of ``squares`` in its own two positions alone."""
        if self.along(node) is not _SQUARE:
            return False
        if kind in (Kind.RESHAPE, Kind.EXPAND):
            return all(self.long_sizes(each) == self.long_sizes(node) for each in squares)
        looked_up = kind in (Kind.LOOKUP, Kind.INDEX) and not self.states[operands[0]]
        return (
            looked_up or kind in (Kind.POINTWISE, Kind.ALIAS, Kind.COPY, Kind.PERMUTE) or operator_name(node) in _HALVES
        )

    def made(self, node: fx.Node, name: str, kind: Kind) -> _State:
        """A value that is made of none that has positions."""
        state = self.along(node)
        if state is None:
            if node in self.varying:
                raise self.refused(node, "it computes with the length")
            return state
        counts = name == "arange" and (len(node.args) == 1 or node.args[0] == 0) and literal(node, "step") in (1, None)
        counts &= name == "arange" and value_of(node).shape[0] == self.length
        begins = name == "slice" and literal(node, "start") in (0, None) and literal(node, "step") == 1
        if counts or begins or kind is Kind.EXPAND or name in FILLED:
            return state
        raise self.refused(node, "it makes something as long as the sequence")

    def part(self, node: fx.Node, name: str, state: _State) -> _State:
        """A part of a value; along positions its first ones, or all but a few of the last."""
        source = operands_of(node)[0]
        dim, size = literal(node, "dim"), value_of(source).ndim
        if isinstance(state, _Square):
            whole = name == "slice" and str(value_of(node).shape[dim]) == str(value_of(source).shape[dim])
            if dim % size in self.long_dims(source) and not whole:
                raise self.refused(node, "it takes a part of what has positions by positions")
            return self.along(node)
        assert isinstance(state, _Along)
        if dim % size != state.shard.dim:
            return self.by_rule(node, name, operands_of(node), [replace(state, labels="")], state.labels)
        if state.shard.parts:
            raise self.refused(node, "it takes a part of flattened positions")
        first, end = (
            (literal(node, "index"), None) if name == "select" else (literal(node, "start") or 0, literal(node, "end"))
        )
        if not isinstance(first, int) or first < 0:
            raise self.refused(node, "it takes the last positions")
        if node in self.varying and (name == "select" or first):
            raise self.refused(node, "it begins at a position that follows the length")
        if name == "select" or (end is not None and end < state.count and node not in self.varying and end >= 0):
            return None  # of the first positions, which stay
        count = value_of(node).shape[state.shard.dim]
        to_the_end = end is None or end >= state.count
        if first and not (state.labels and to_the_end):
            raise self.refused(node, "it leaves out the first positions")
        if not to_the_end and state.labels and not first:
            state = replace(state, labels="")  # a label that counts was behind them
        return replace(state, count=int(count), zero=state.zero and to_the_end)

    def of_labels(self, node: fx.Node, name: str, kind: Kind, states: list[_State]) -> _State:
        """The state of what only moves labels, or adds ignored ones at the end."""
        state = states[0]
        if len(states) != 1 or not isinstance(state, _Along) or not state.labels:
            return None
        if name in ("constant_pad_nd", "pad"):
            widths: Any = literal(node, "pad")
            value = number(literal(node, "value"))
            behind = state.shard.dim == value_of(node).ndim - 1 and not state.shard.parts
            if not behind or len(widths) != 2 or widths[0] or not isinstance(widths[1], int) or value is None:
                return None
            self.fill(node, state.labels, int(value))
            return replace(state, count=state.count + widths[1])
        if kind not in _MOVES or value_of(node).dtype.is_floating_point:
            return None
        return self.by_rule(node, name, operands_of(node), states, state.labels)

    def fill(self, node: fx.Node, labels: str, value: int) -> None:
        """Note what labels are padded with."""
        if self.fills.setdefault(labels, value) != value:
            raise self.refused(
                node, f"{labels} are ignored where they are {self.fills[labels]}, and where they are {value}"
            )

    def attention(self, node: fx.Node, name: str, states: list[_State]) -> _State:
        query = states[0]
        if (
            not isinstance(query, _Along)
            or query.shard.parts
            or any(
                not isinstance(state, _Along) or (state.shard, state.count) != (query.shard, query.count)
                for state in states[:3]
            )
        ):
            raise self.refused(node, "its queries, keys and values do not have the same positions")
        plain = name == "scaled_dot_product_attention"
        if name != "packed_attention" and (not plain or literal(node, "dropout_p")):
            raise self.refused(node, "its dropout draws by the length")
        if plain and not literal(node, "is_causal"):
            mask = literal(node, "attn_mask")
            if not isinstance(mask, fx.Node) or not self.hides(mask):
                raise self.refused(node, "it is not causal, as far as its mask shows")
            if not hides_whole_rows(mask, self.length, self.masks):
                raise self.refused(
                    node,
                    "a row may see nothing, and numbers that hide all keys equally then show what is added, too: give a mask of booleans",
                )
        return _Along(query.shard, query.count)

    def hides(self, mask: fx.Node) -> bool:
        """Whether a mask hides all positions behind each one."""
        if not isinstance(self.states[mask], _Square):
            return False
        found = conditions_of(mask, self.length, self.masks)
        return any(self.masks.window((each,), self.length) is not None for each in found)

    def ignoring(self, node: fx.Node, name: str, operands: list[fx.Node], states: list[_State]) -> _State:
        """A loss that ignores labels, or the comparison that says which count."""
        labels = states[0 if name == "ne" else 1]
        ignored = number(node.args[1]) if name == "ne" else literal(node, "ignore_index")
        if not isinstance(labels, _Along) or not labels.labels or ignored is None:
            return self.by_rule(node, name, operands, states)
        if name == "ne":
            self.fill(node, labels.labels, int(ignored))
            return _Along(labels.shard, labels.count, zero=True)
        self.fill(node, labels.labels, int(ignored))
        if literal(node, "reduction") == 1:
            raise self.refused(node, "it is a mean over positions of a part of the batch")
        made = self.by_rule(
            node,
            name,
            operands,
            [replace(state, zero=True) if isinstance(state, _Along) else state for state in states],
        )
        return replace(made, zero=True) if isinstance(made, _Along) else None

    def check_random(self, node: fx.Node, states: list[_State]) -> None:
        """Check that what is drawn for a position is the same at any length: elements are numbered with the first dim outermost."""
        own = states[0]
        first = next((dim for dim, rows in enumerate(batch_coefficients(node)) if rows is None), None)
        if not isinstance(own, _Along) or own.shard.dim != first or own.shard.parts:
            raise self.refused(node, "what it draws depends on the length")

    def by_rule(
        self, node: fx.Node, name: str, operands: list[fx.Node], states: list[_State], labels: str = ""
    ) -> _State:
        """An operator that computes each position by itself, as the rules that shard it show; or a sum over zeros."""
        found_in = [state for state in states if isinstance(state, _Along)]
        if len({state.count for state in found_in}) > 1:
            raise self.refused(node, "it joins other numbers of positions")
        types = tuple(state.shard if isinstance(state, _Along) else R for state in states)
        known = {operand: [kind] for operand, kind in zip(operands, types) if isinstance(kind, Shard)}
        context = Context(found_in[0].count, lambda each, index: known.get(each, []), lambda each: False, SIZE_REWRITES)
        found = [each.results for each in placements(node, context) if each.operands == types]
        shards = [kind for results in found for kind in results if isinstance(kind, Shard)]
        zeros = [state.zero for state in found_in]
        if shards:
            kept = any(zeros) if name == "mul" else all(zeros) and record_of(node).kind in _MOVES
            return _Along(shards[0], found_in[0].count, kept, labels)
        if found and all(zeros) and (name in ("sum", "count_nonzero") or record_of(node).kind is Kind.CLASS_LOSS):
            return None
        if found:
            raise self.refused(node, "it sums over all positions, of which no label that is ignored leaves any out")
        raise self.refused(node, "it computes with several positions at once")


def _with_rows(node: fx.Node) -> bool:
    """Whether it is rows that are in one dim with others; such an output is not offered."""
    return any(rows not in (None, 1) for rows in batch_coefficients(node))


def _filling(node: fx.Node) -> Any:
    """What an operator fills a tensor with."""
    name = operator_name(node)
    return literal(node, "s" if name == "scalar_tensor" else "fill_value") if name in FILLED else None


def _numbers(node: fx.Node) -> list[Any]:
    """List what an operator takes besides the values of others."""
    return [item for item in tree_leaves((node.args, dict(node.kwargs))) if not isinstance(item, fx.Node)]
