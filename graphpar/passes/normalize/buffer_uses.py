"""Which operators of a program read and write each buffer that is written, by themselves or in blocks.

calls += 1 (a)   calls += 1 (b)   x * calls     ->     calls: a writes, b writes, and then its value is read
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from graphpar.ir.program import Program, operator_name
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.passes.normalize.functional import is_inplace, written_operands
from graphpar.text import paths_above

_VIEWS = {Kind.PERMUTE, Kind.RESHAPE, Kind.EXPAND, Kind.VIEW, Kind.ALIAS, Kind.COPY}


@dataclass
class BufferUses:
    """The operators that take the memory of a written buffer, in order: those that write it, view it or copy it."""

    name: str
    nodes: list[fx.Node] = field(default_factory=list)
    last_write: fx.Node | None = None


@dataclass
class WrittenBuffers:
    """The uses of each written buffer, and the values that are in its memory: itself, views, results of writes."""

    uses: list[BufferUses]
    memory: dict[fx.Node, str]


def written_buffers_of(program: Program) -> WrittenBuffers:
    """Find every buffer that the root graph writes, in operators or in the blocks that it calls."""
    found: dict[str, BufferUses] = {}
    memory: dict[fx.Node, str] = {}
    several: dict[fx.Node, dict[int, str]] = {}  # calls of blocks with several results
    owners = {path for name in program.buffers for path in paths_above(name)}
    for node in program.graph.nodes:
        if node.op == "get_attr":
            if str(node.target) in program.buffers:
                memory[node] = program.tie_of(str(node.target))[0]
            continue
        if node.op == "call_module":
            given = [memory.get(a) for a in node.args if isinstance(a, fx.Node)]
            if not any(given) and str(node.target) not in owners:
                continue
            block = _Block(program.block_of(node).graph, f"{node.target}.", given, program)
            _note(found, node, block.used, block.written)
            several[node] = block.results
            if 0 in block.results and not block.several:
                memory[node] = block.results[0]
        elif node.op == "call_function":
            used = [memory[a] for a in node.all_input_nodes if a in memory]
            _note(found, node, used, [memory[a] for a in written_operands(node) if a in memory])
            _follow(node, memory)
            if node.target is operator.getitem and node.args[0] in several:
                place = several[node.args[0]].get(node.args[1])  # type: ignore[index, arg-type]
                memory |= {} if place is None else {node: place}
    written = {name: uses for name, uses in found.items() if uses.last_write is not None}
    return WrittenBuffers(list(written.values()), {node: name for node, name in memory.items() if name in written})


def _note(found: dict[str, BufferUses], node: fx.Node, used: Iterable[str], written: Iterable[str]) -> None:
    for name in dict.fromkeys(used):
        found.setdefault(name, BufferUses(name)).nodes.append(node)
    for name in written:
        found[name].last_write = node


def _follow(node: fx.Node, memory: dict[fx.Node, str]) -> None:
    """Note that the result is in the memory of its first operand, where it may be."""
    source = node.args[0] if node.args else None
    views = is_inplace(node) or (operator_name(node) != "clone" and record_of(node).kind in _VIEWS)
    if isinstance(source, fx.Node) and source in memory and views:
        memory[node] = memory[source]


class _Block:
    """What a call of a block uses and writes of buffers: its own, and those that it is given (``given``: by operand)."""

    def __init__(self, graph: fx.Graph, prefix: str, given: list[str | None], program: Program) -> None:
        self.used: list[str] = []
        self.written: list[str] = []
        self.results: dict[int, str] = {}
        self.several = False
        memory: dict[fx.Node, str] = {}
        operands = iter(given)
        for node in graph.nodes:
            if node.op == "placeholder":
                name = next(operands)
                memory |= {} if name is None else {node: name}
            elif node.op == "get_attr":
                if prefix + str(node.target) in program.buffers:
                    memory[node] = program.tie_of(prefix + str(node.target))[0]
            elif node.op == "call_function":
                self.used += [memory[a] for a in node.all_input_nodes if a in memory]
                self.written += [memory[a] for a in written_operands(node) if a in memory]
                _follow(node, memory)
            elif node.op == "output":
                self.several = isinstance(node.args[0], tuple | list)
                results = node.args[0] if isinstance(node.args[0], tuple | list) else [node.args[0]]
                self.results = {n: memory[r] for n, r in enumerate(results) if isinstance(r, fx.Node) and r in memory}
