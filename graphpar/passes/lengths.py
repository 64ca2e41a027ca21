"""One program for a range of lengths of the sequence: the programs of several lengths, joined.

    length 4096   view(x, [b, 4096, 32, 64])   hidden [b, 2048, d]       S(0:4096)
    length  128   view(x, [b,  128, 32, 64])   hidden [b,   64, d]       S(0:128)
    joined        view(x, [b, x.shape[1], 32, 64])     [b, s/2, d]

Each length is compiled by the same plan; what differs must be a linear function of the length. The range's ends are among them, and one
between: so a model that does something else from some length on is refused, by the operator and its line.

    lengths 128, 512, 4096 of a list      Block.forward at 4096, with Block.at_512 and Block.at_128 where the graphs can't be joined

Of a list each length is compiled. A block or stage that is another one at some of them has a graph of each, on the same parameters; it
tells them apart by a size of what it is given.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.errors import GraphparError
from graphpar.ir.batch_sizes import batch_coefficients
from graphpar.ir.lengths import SIZES, Size
from graphpar.ir.program import Function, Input, ModelOutput, Program, operator_name, value_of, where
from graphpar.ir.sharding import Decision, Sharding, Types
from graphpar.ir.stage import Boundary, Stage, told_apart_by
from graphpar.operators.parameter_casts import read_dtypes
from graphpar.operators.placement import literal, operands_of
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.normalize.functional import copied
from graphpar.passes.sharding.keys import keys_of
from graphpar.passes.sharding.problem import Problem
from graphpar.passes.stage_passes import Stages
from graphpar.runtime.layout import Shard, Type

LISTS, EACH = "list the lengths, as in seq 128,512: each is traced", "compile a program for each length"
"""What helps where the program is another one at other lengths; and where that is a list already."""


def tried(least: int, most: int, multiple: int) -> list[int]:
    """Return multiples to compile for: the range's longest, its shortest, and one between.

    That one leaves another rest than the ends where they leave the same (a size such as ``length // 2 * 2`` would look linear), by as many
    small numbers as can be, and few numbers divide it.
    """
    low, high = -(-least // multiple), most // multiple
    alike = [number for number in (2, 3, 4, 5) if low % number == high % number]

    def told_apart(each: int) -> tuple[int, bool, bool]:
        return (
            sum(each % number != low % number for number in alike),
            bool(each % 2 and each % 3),
            2 * each >= low + high,
        )

    between = max(range(low + 1, high), key=told_apart, default=high)
    return [each * multiple for each in dict.fromkeys((high, low, between))]


def check_tables(program: Program) -> None:
    """Check that tables of positions are as long as the longest sequence: a trace without values looks up whatever it is asked for.

    Raises:
        GraphparError: one is shorter.
    """
    for graph in (program.graph, *(block.graph for block in program.blocks.values())):
        for node in graph.nodes:
            if node.op == "call_function" and record_of(node).kind is Kind.LOOKUP:
                table, places = operands_of(node)[:2]
                last, rows = _last_place(places), value_of(table).shape[0]
                if last is not None and isinstance(rows, int) and last >= rows:
                    raise GraphparError(
                        f"seq: {operator_name(node)}{where(node)} looks up position {last} of the longest sequence, but its table has "
                        f"{rows}; end the range earlier, or make the table longer."
                    )


def _last_place(node: fx.Node) -> int | None:
    """The largest of indices that count up, where nothing but their shape is changed since."""
    kinds = (Kind.RESHAPE, Kind.EXPAND, Kind.ALIAS, Kind.COPY)
    while node.op == "call_function" and record_of(node).kind in kinds and operands_of(node):
        node = operands_of(node)[0]
    if node.op != "call_function" or operator_name(node) not in ("arange", "add"):
        return None
    if operator_name(node) == "arange":
        start, end, step = (literal(node, name) for name in ("start", "end", "step"))
        return end - 1 if isinstance(end, int) and start in (0, None) and step in (1, None) else None
    first, more = node.args[0], node.args[1]
    before = _last_place(first) if isinstance(first, fx.Node) else None
    return before + more if before is not None and isinstance(more, int) else None


# ---- placements ------------------------------------------------------------------------------------------------------


def sharding_at(problem: Problem, sharding: Sharding, ratio: Fraction) -> Sharding:
    """Return ``sharding`` for the problem of another length, which is ``ratio`` times that of the sharding: runs of positions are as long.

    Raises:
        GraphparError: no rule allows a decision at that length.
    """
    decisions: dict[str, dict[str, Decision]] = {}
    keys = {scope: keys_of(problem.program, scope) for scope in {each.scope for each in problem.operators}}
    for each in problem.operators:
        key = keys[each.scope][each.node]
        decision = sharding.decisions[each.scope].get(key)
        legal = [Decision(choice.operands, choice.results, choice.rewrites) for choice in each.choices]
        if decision is not None and decision not in legal:
            decision = Decision(_of(decision.operands, ratio), _of(decision.results, ratio), decision.rewrites)
        if decision not in legal:
            raise GraphparError(
                f"{operator_name(each.node)}{where(each.node)} can't be sharded so at other lengths. If the model is another one there, "
                f"{LISTS}."
            )
        decisions.setdefault(each.scope, {})[key] = decision
    return replace(sharding, decisions=decisions)


def _of(side: tuple[Types, ...], ratio: Fraction) -> tuple[Types, ...]:
    return tuple(tuple(_scaled(kind, ratio) for kind in types) for types in side)


def _scaled(kind: Type, ratio: Fraction) -> Type:
    return replace(kind, parts=tuple(int(part * ratio) for part in kind.parts)) if isinstance(kind, Shard) else kind


# ---- graphs ----------------------------------------------------------------------------------------------------------


@dataclass
class _Join:
    """Joins the programs of several lengths, the longest first."""

    lengths: Sequence[int]
    multiple: int = 1
    functions: dict[Function, tuple[Function, bool]] = field(default_factory=dict)
    blocks: dict[str, tuple[fx.Graph, bool]] = field(default_factory=dict)
    programs: Sequence[Program] = ()
    listed: bool = False
    blocks_at: dict[str, dict[int, fx.Graph]] = field(default_factory=dict)

    def size(self, values: Sequence[int], refused: Callable[[str], GraphparError]) -> Size | None:
        """Return the linear function of the length that gives ``values``; None where they are all the same.

        Raises:
            GraphparError: there is none.
        """
        if len(set(values)) == 1:
            return None
        each = Fraction(values[0] - values[1], self.lengths[0] - self.lengths[1])
        rest = values[0] - each * self.lengths[0]
        if rest.denominator > 1 or any(each * length + rest != value for length, value in zip(self.lengths, values)):
            shown = ", ".join(f"{value} at {length}" for length, value in sorted(zip(self.lengths, values)))
            raise refused(f"a size is no linear function of the length ({shown})")
        self.multiple = math.lcm(self.multiple, each.denominator)
        return Size(each, int(rest))

    def mark(self, nodes: Sequence[fx.Node], node: fx.Node) -> None:
        """Note at ``node`` the sizes of its tensor that follow the length, which ``nodes`` has at each of them."""
        shapes = [_sizes(each) for each in nodes]
        if len({len(shape) for shape in shapes}) > 1:
            raise _refused(node, f"it has {' and '.join(str(len(shape)) for shape in shapes)} dims")
        found = tuple(self.size(sizes, lambda why: _refused(node, why)) for sizes in zip(*shapes))
        if any(found):
            node.meta[SIZES] = found
        if "model_output" in node.meta:
            everywhere = zip(*(each.meta.get("model_output", ()) for each in nodes), strict=True)
            node.meta["model_output"] = tuple(self._output(outputs, node) for outputs in everywhere)

    def _output(self, found: Sequence[ModelOutput], node: fx.Node) -> ModelOutput:
        shapes = ([c or size for size, c in zip(each.sizes, each.coefficients)] for each in found)
        sizes = tuple(self.size(values, lambda why: _refused(node, why)) for values in zip(*shapes))
        return replace(found[0], of_length=sizes if any(sizes) else ())

    def graph(self, graphs: Sequence[fx.Graph], like: int | None = None) -> tuple[fx.Graph, bool]:
        """Join graphs; the second is whether it takes the length as an input of its own, its last.

        Args:
            like: the input whose sequence another stage may not have as long.
        """
        rows = [list(graph.nodes) for graph in graphs]
        if len({len(row) for row in rows}) > 1:
            raise _first_difference(rows)
        return _GraphJoin(self, rows, like).run()

    def function(self, found: Sequence[Any], node: fx.Node) -> tuple[Any, bool]:
        """Join the targets of a node."""
        target = found[0]
        if not isinstance(target, Function):
            if any(other != target for other in found):
                raise _refused(node, f"it is {' and '.join(dict.fromkeys(map(str, found)))}")
            return target, False
        if target not in self.functions:
            graph, takes = self.graph([each.graph for each in found], getattr(target, "like", None))
            self.functions[target] = replace(target, graph=graph), takes
        return self.functions[target]

    def block(self, name: str) -> bool:
        """Join a block; return whether it takes the length. One of a list that can't be joined, or takes it, has a graph for each."""
        if name not in self.blocks:
            graphs = [program.blocks[name].graph for program in self.programs]
            found, others = self.joined_or_apart(
                graphs, lambda: f"{name} ({self.programs[0].blocks[name].instances[0]})"
            )
            self.blocks[name], self.blocks_at[name] = found, others
        return self.blocks[name][1]

    def joined_or_apart(
        self, graphs: Sequence[fx.Graph], named: Callable[[], str]
    ) -> tuple[tuple[fx.Graph, bool], dict[int, fx.Graph]]:
        """Join the graphs of a class; of a list that of the longest, with those of the other lengths, where that can't be."""
        try:
            found = self.graph(graphs)
        except GraphparError:
            if not self.listed:
                raise
        else:
            if not (self.listed and found[1]):
                return found, {}
        graphs = [_copied(graph) for graph in graphs]
        for length, graph in zip(self.lengths, graphs):
            for node in graph.nodes:
                if node.op == "call_module" and self.block(str(node.meta["block"])):
                    node.args = (*node.args, length)
        first, others = graphs[0], graphs[1:]
        if len({len([node for node in graph.nodes if node.op == "placeholder"]) for graph in graphs}) > 1:
            raise GraphparError(
                f"{named()} is another one at other lengths, and takes other inputs there; compile a program for each length."
            )
        self._mark_outputs(first, others)
        if takes := told_apart_by(graphs) is None:
            for length, graph in zip(self.lengths, graphs):
                _take_length(graph, length)
        return (first, takes), dict(zip(self.lengths[1:], others))

    def _mark_outputs(self, first: fx.Graph, others: Sequence[fx.Graph]) -> None:
        """Note at the nodes of ``first`` that the model returns how their sizes follow the length; what is not returned at all lengths is
        not offered at any."""
        at = [
            {each.name: each for node in graph.nodes for each in node.meta.get("model_output", ())} for graph in others
        ]
        for node in first.nodes:
            outputs = node.meta.get("model_output", ())
            if outputs:
                kept = [each for each in outputs if all(each.name in found for found in at)]
                joined = (self._output([each, *(found[each.name] for found in at)], node) for each in kept)
                node.meta["model_output"] = tuple(joined)
        names = {each.name for node in first.nodes for each in node.meta.get("model_output", ())}
        for graph in others:
            for node in graph.nodes:
                if node.meta.get("model_output"):
                    node.meta["model_output"] = tuple(each for each in node.meta["model_output"] if each.name in names)


class _GraphJoin:
    """Joins the nodes of some graphs, which are as many."""

    def __init__(self, join: _Join, rows: Sequence[Sequence[fx.Node]], like: int | None) -> None:
        self.join, self.rows, self.new, self.like = join, rows, fx.Graph(), like
        self.places = [{node: place for place, node in enumerate(row)} for row in rows]
        self.made: list[fx.Node] = []
        self.given: fx.Node | None = None  # the length, as an input

    def run(self) -> tuple[fx.Graph, bool]:
        for place, nodes in enumerate(zip(*self.rows)):
            first = nodes[0]
            target, takes = self.join.function([node.target for node in nodes], first)
            if first.op == "call_module":
                if len({node.meta["block"] for node in nodes}) > 1:
                    raise _refused(first, "it is another block")
                takes = self.join.block(str(first.meta["block"]))
            args = self._joined([node.args for node in nodes], first)
            kwargs = self._joined([node.kwargs for node in nodes], first)
            if takes:
                args = (*args, self._number(Size(Fraction(1), 0)))
            made = self.new.create_node(first.op, target, args, kwargs, name=first.name, type_expr=first.type)
            made.meta = dict(first.meta)
            self.join.mark(nodes, made)
            self.made.append(made)
            assert place + 1 == len(self.made)
        return self.new, self.given is not None

    def _joined(self, found: Sequence[Any], node: fx.Node) -> Any:
        """Join what the nodes take in one place."""
        first = found[0]
        if isinstance(first, fx.Node):
            places = {own[other] if isinstance(other, fx.Node) else -1 for own, other in zip(self.places, found)}
            if len(places) > 1:
                raise _refused(node, "it takes other values")
            return self.made[places.pop()]
        if isinstance(first, tuple | list):
            if len({len(other) for other in found}) > 1:
                raise _refused(node, "it takes other numbers of values")
            return type(first)(self._joined(items, node) for items in zip(*found))
        if isinstance(first, dict):
            return {key: self._joined([other[key] for other in found], node) for key in first}
        if all(type(other) is int for other in found):
            size = self.join.size(found, lambda why: _refused(node, why))
            return first if size is None else self._number(size)
        if any(type(other) is not type(first) or other != first for other in found):
            shown = ", ".join(f"{other} at {length}" for length, other in sorted(zip(self.join.lengths, found)))
            raise _refused(node, f"it takes the number {shown}")
        return first

    def _number(self, size: Size) -> fx.Node:
        """Return a node whose value is ``size``, made of a size of an input, or of the length as an input of its own."""
        made, known = self._source()
        each, value = size.each / known.each, int(value_of(made))
        for function, number, nothing in (
            (operator.sub, known.rest, 0),
            (operator.mul, each.numerator, 1),
            (operator.floordiv, each.denominator, 1),
            (operator.add, size.rest, 0),
        ):
            if number != nothing:
                value = function(value, number)
                made = self.new.call_function(function, (made, number))
                made.meta = {"val": value}
        assert value == size.each * self.join.lengths[0] + size.rest
        return made

    def _source(self) -> tuple[fx.Node, Size]:
        """Return a node that is a size of an input, the length itself where an input has it, and what it is of the length."""
        whole = Size(Fraction(1), 0)
        inputs = [node for node in self.made if node.op == "placeholder"]
        known = [node for place, node in enumerate(inputs) if place != self.like]
        found = [(node, dim, size) for node in known for dim, size in _lengths(node)]
        if found:
            node, dim, size = min(found, key=lambda each: each[2] != whole)
            made = self.new.call_function(torch.ops.aten.sym_size.int, (node, dim))
            made.meta = {"val": int(value_of(node).shape[dim])}
            return made, size
        if self.given is None:
            self.given = _take_length(self.new, self.join.lengths[0])
        return self.given, whole


def _take_length(graph: fx.Graph, length: int) -> fx.Node:
    """Add the length to the inputs of a graph, as its last."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before():
        node = graph.placeholder("length")
    node.meta = {"val": length}
    return node


def _lengths(node: fx.Node) -> Iterator[tuple[int, Size]]:
    """Yield the dims of a value whose size follows the length alone, with that size."""
    sizes, coefficients = node.meta.get(SIZES, ()), batch_coefficients(node)
    return (
        (dim, size) for dim, (size, rows) in enumerate(zip(sizes, coefficients)) if size is not None and rows is None
    )


def _sizes(node: fx.Node) -> tuple[int, ...]:
    """The sizes of a value; of a dim that follows the batch how many times it that is."""
    value = value_of(node)
    if not isinstance(value, Tensor):
        return ()
    return tuple(int(size) if rows is None else rows for size, rows in zip(value.shape, batch_coefficients(node)))


def _refused(node: fx.Node, why: str) -> GraphparError:
    return GraphparError(
        f"The program is another one at other lengths: {operator_name(node)}{where(node)}: {why}. Make the model independent of the "
        f"length, or {LISTS}."
    )


def _first_difference(rows: Sequence[Sequence[fx.Node]]) -> GraphparError:
    for nodes in zip(*rows):
        if len({(node.op, str(node.target)) for node in nodes}) > 1:
            return _refused(nodes[0], f"it is {' and '.join(dict.fromkeys(map(operator_name, nodes)))}")
    return _refused(rows[0][-1], "there are other operators")


# ---- programs --------------------------------------------------------------------------------------------------------


def joined(found: Sequence[Stages], lengths: Sequence[int], *, listed: bool = False) -> tuple[Stages, int]:
    """Join the programs of a rank and their stages at some lengths, the longest first.

    Args:
        listed: these are all the lengths that the program takes.

    Returns:
        Them for any length, and the number of which a length must be a multiple.

    Raises:
        GraphparError: they differ in more than sizes; the message names the first operator, its module and its line.
    """
    if listed:
        found = [
            found[0],
            *(_with_own_constants(found[0][0], *other, length) for other, length in zip(found[1:], lengths[1:])),
        ]
        _check_alike(found)
    programs = [program for program, _ in found]
    join = _Join(lengths, programs=programs, listed=listed)
    first = programs[0]
    for name, constant in () if listed else first.constants.items():
        if any(name not in other.constants or not _same(constant, other.constants[name]) for other in programs):
            raise GraphparError(
                f"The program is another one at other lengths: the constant {name} differs. Compute it from the input's shape, or {LISTS}."
            )
    if len({len(stages) for _, stages in found}) > 1 or len({len(program.stream_layouts) for program in programs}) > 1:
        raise GraphparError(
            "The program is another one at other lengths: it has other stages, or other random operators."
        )
    stages = [_stage(join, each) for each in zip(*(stages for _, stages in found))]
    counts = first.counts
    if counts is not None:
        try:
            counts, takes = join.graph([program.counts for program in programs if program.counts is not None])
        except GraphparError as error:
            raise GraphparError(f"What the loss divides by is another at other lengths. {error}") from error
        if takes:
            raise GraphparError(f"What the loss divides by follows the length, but no input of it; {EACH}.")
    for nodes in zip(*(_results(program.graph) for program in programs)):
        join.mark(nodes, nodes[0])
    blocks = {
        name: replace(block, graph=join.blocks[name][0], at_lengths=join.blocks_at[name])
        if name in join.blocks
        else block
        for name, block in first.blocks.items()
    }
    inputs = tuple(map(_input, first.inputs, programs[-1].inputs))
    constants = {name: value for program in reversed(programs) for name, value in program.constants.items()}
    return (replace(first, blocks=blocks, counts=counts, inputs=inputs, constants=constants), stages), join.multiple


def _with_own_constants(first: Program, program: Program, stages: Sequence[Stage], length: int) -> Stages:
    """Give constants of a program of another length that differ from those of ``first`` names of their own."""
    names = {
        name: f"{name}_at_{length}"
        for name, value in program.constants.items()
        if name not in first.constants or not _same(value, first.constants[name])
    }
    if not names:
        return program, list(stages)
    stages = [replace(stage, graph=_copied(stage.graph)) for stage in stages]
    blocks = {name: replace(block, graph=_copied(block.graph)) for name, block in program.blocks.items()}
    program = replace(program, blocks=blocks)
    counts = None if program.counts is None else _copied(program.counts)
    program = replace(program, counts=counts)
    roots = [*(stage.graph for stage in stages), *([] if counts is None else [counts])]
    graphs = [("", graph) for graph in roots] + [(name, block.graph) for name, block in blocks.items()]
    for scope, graph in graphs:
        for node in graph.nodes:
            if node.op == "get_attr" and any(f"{prefix}{node.target}" in names for prefix in program.prefixes(scope)):
                for prefix in program.prefixes(scope):
                    names.setdefault(f"{prefix}{node.target}", f"{prefix}{node.target}_at_{length}")
                node.target = f"{node.target}_at_{length}"
    return replace(program, constants={names.get(name, name): v for name, v in program.constants.items()}), stages


def _copied(graph: fx.Graph) -> fx.Graph:
    new = copied(graph)
    new.output_node().meta = dict(graph.output_node().meta)
    return new


def _check_alike(found: Sequence[Stages]) -> None:
    """Check that the programs of a list have the same stages, blocks, parameters and random operators.

    Raises:
        GraphparError: one has others.
    """
    (first, stages), *others = found
    read = [_read(first, stage) for stage in stages]
    for program, others_stages in others:
        if [_read(program, stage) for stage in others_stages] != read:
            there = [set(_read(program, stage)) for stage in others_stages]
            differing = sorted(set().union(*(a ^ set(b) for a, b in zip(there, read))) | set())
            shown = f": {differing[0]}" if differing else ""
            raise GraphparError(
                f"At other lengths other parameters or buffers are read, or in other stages{shown}; compile a program for each length."
            )
        if program.stream_layouts != first.stream_layouts:
            raise GraphparError(
                "At other lengths the model draws other random numbers; compile a program for each length."
            )
        if read_dtypes(program) != read_dtypes(first):
            raise GraphparError(
                "At other lengths parameters are read in other dtypes; compile a program for each length."
            )
        for what, facts in _facts(program, others_stages).items():
            if facts != _facts(first, stages)[what]:
                raise GraphparError(f"At other lengths the model {what}; {EACH}.")
        if dict(program.branches) != dict(first.branches):
            raise GraphparError(
                "At other lengths the model has other branches on values; compile a program for each length."
            )


def _facts(program: Program, stages: Sequence[Stage]) -> dict[str, object]:
    """Return what the runtime takes from the program of the longest length for all, by what is wrong where it differs."""
    return {
        "mixes examples of a batch that it does not mix elsewhere, or the reverse": (
            bool(program.couplings),
            program.unsplittable,
        ),
        "writes other buffers once a step": program.steady,
        "reads other inputs": program.unread,
        "calls its layers in another order": [
            node.target for stage in stages for node in stage.graph.nodes if node.op == "call_module"
        ],
    }


def _read(program: Program, stage: Stage) -> dict[str, str]:
    """Return what a stage reads of the model's state, and the blocks that it calls, each with its class."""
    state = {*program.parameters, *program.buffers}
    own = {str(node.target): "" for node in stage.graph.nodes if node.op == "get_attr" and node.target in state}
    calls = {str(node.target): str(node.meta["block"]) for node in stage.graph.nodes if node.op == "call_module"}
    inside = {
        f"{path}.{node.target}": ""
        for path, block in calls.items()
        for node in program.blocks[block].graph.nodes
        if node.op == "get_attr" and f"{path}.{node.target}" in state
    }
    return own | calls | inside


def _input(longest: Input, other: Input) -> Input:
    sizes = zip(longest.shape, other.shape)
    return replace(longest, positions=tuple(dim for dim, (size, shorter) in enumerate(sizes) if size != shorter))


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b))


def _stage(join: _Join, stages: Sequence[Stage]) -> Stage:
    named = f"Stage {stages[0].index} ({', '.join(stages[0].modules)})"
    taken = [{*stage.inputs, *stage.counts, *(each.name for each in stage.receives)} for stage in stages]
    if differing := sorted({name for names in taken for name in names if any(name not in each for each in taken)}):
        raise GraphparError(
            f"{named} takes other tensors at other lengths ({', '.join(differing)}): inputs, tensors of stages before, or what the loss "
            f"divides by. Make them the same, or {EACH}."
        )
    (graph, takes), others = join.joined_or_apart([stage.graph for stage in stages], lambda: named)
    if takes:
        raise GraphparError(
            f"{named} needs the length of the sequence, but receives nothing that has it; split the model elsewhere."
        )

    if len({(stage.inputs, stage.counts, tuple(each.name for each in stage.receives)) for stage in stages}) > 1:
        raise GraphparError(f"{named} takes its tensors in another order at other lengths; {EACH}.")

    def boundaries(found: Sequence[tuple[Boundary, ...]]) -> None:
        for each in zip(*found, strict=True):
            join.mark([boundary.node for boundary in each], each[0].node)

    boundaries([stage.receives for stage in stages])
    boundaries([stage.sends for stage in stages])
    at_lengths = {length: replace(stages[join.lengths.index(length)], graph=other) for length, other in others.items()}
    return replace(stages[0], graph=graph, at_lengths=at_lengths)


def _results(graph: fx.Graph) -> list[fx.Node]:
    found: Any = graph.output_node().args[0]
    return [node for node in found if isinstance(node, fx.Node)] if isinstance(found, tuple | list) else [found]
