"""What a model leaves out where a mask chooses no rows must add nothing then, as a program computes it always.

    rows = torch.where(chosen == e)[0]
    if rows.numel() == 0: continue            # or: if (chosen == e).any():
    y[rows] += expert(x[rows])                adds nothing without rows
    used[e] += 1                              adds something: refused

A trace goes on as with rows. What it then computes, by the lines of the code, may leave these lines as rows, as a write by the rows'
numbers, or as a sum with such a write to zeros.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.export import ExportedProgram

from graphpar.errors import GraphparError
from graphpar.ir.batch_sizes import is_unknown
from graphpar.ir.program import operator_name
from graphpar.ir.source import lines_of, stack_lines
from graphpar.operators.record import Kind
from graphpar.operators.table import record_named, record_of


@dataclass(frozen=True)
class Condition:
    """A condition on how many rows are chosen.

    Attributes:
        symbols: the numbers of rows that are 0 where it does not hold.
        path, lines: the file, and its lines that run only where it holds.
        text: the line that asks, with its place.
    """

    symbols: frozenset[str]
    path: str
    lines: frozenset[int]
    text: str


def check_left_out(exported: ExportedProgram, conditions: Iterable[Condition]) -> None:
    """Check that what is left out without rows adds nothing.

    Raises:
        GraphparError: it does, or it can't be seen that it doesn't.
    """
    together: dict[tuple[str, frozenset[int], str], list[frozenset[str]]] = {}
    for each in conditions:
        together.setdefault((each.path, each.lines, each.text), []).append(each.symbols)
    for (path, lines, text), symbols in together.items():
        for module in exported.graph_module.modules():
            runs = _runs(module.graph, path, lines) if isinstance(module, fx.GraphModule) else []
            known = symbols if len(runs) == len(symbols) else [frozenset[str]().union(*symbols)] * len(runs)
            for run, own in zip(runs, known):
                for node in _Body(set(run), own).that_add():
                    raise GraphparError(
                        f"The model leaves out what follows where a mask chooses no rows, {text}, and it can't be seen that "
                        f"{operator_name(node).rstrip('_')}{lines_of(node)} adds nothing then: a program computes one branch. Leave out "
                        "the condition if nothing is added without rows, or weigh with 0 and 1 (torch.where)."
                    )


def _runs(graph: fx.Graph, path: str, lines: frozenset[int]) -> list[list[fx.Node]]:
    """Return the operators of these lines, those of each round of a loop by themselves: between them others compute the condition."""
    found: list[list[fx.Node]] = []
    apart = True
    for node in graph.nodes:
        if _is_in(node, path, lines):
            if apart:
                found.append([])
            found[-1].append(node)
            apart = False
        elif node.op == "call_function" and isinstance(node.meta.get("val"), Tensor):
            apart = True
    return found


def _is_in(node: fx.Node, path: str, lines: frozenset[int]) -> bool:
    return node.op == "call_function" and any(
        file == path and line in lines for file, line in stack_lines(node.meta.get("stack_trace") or "")
    )


class _Body:
    """The operators of lines that run only with rows."""

    def __init__(self, nodes: set[fx.Node], symbols: Collection[str]) -> None:
        self.nodes, self.symbols = nodes, symbols

    def that_add(self) -> Iterator[fx.Node]:
        """Yield the operators whose results leave the lines, or that write what is outside, and do something without rows."""
        for node in self.nodes:
            if not isinstance(node.meta.get("val"), Tensor | tuple | list) or record_of(node).kind is Kind.CHECK:
                continue
            outside = any(user not in self.nodes and record_of(user).kind is not Kind.NUMBER for user in node.users)
            writes = _writes(node) and self._base(node) not in self.nodes
            if (outside or writes) and not (self._has_rows(node) or self._keeps(node)):
                yield node

    def _base(self, node: fx.Node) -> fx.Node:
        """What an operator in place writes, through views."""
        base = node.args[0]
        while isinstance(base, fx.Node) and base in self.nodes and base.args and _views(base):
            base = base.args[0]
        assert isinstance(base, fx.Node)
        return base

    def _has_rows(self, node: fx.Node) -> bool:
        """Whether a tensor has as many rows as are chosen."""
        value = node.meta.get("val")
        parts = value if isinstance(value, tuple | list) else [value]
        sizes: list[Any] = [size for part in parts if isinstance(part, Tensor) for size in part.shape]
        unknown = (size.node.expr.free_symbols for size in sizes if is_unknown(size))
        return any(str(symbol) in self.symbols for symbols in unknown for symbol in symbols)

    def _is_by_rows(self, node: fx.Node) -> bool:
        """Whether an operator writes rows that are chosen, and no others."""
        index = record_named(operator_name(node).rstrip("_")).kind is Kind.INDEX
        return index and not self._has_rows(node) and any(map(self._has_rows, node.all_input_nodes[1:]))

    def _keeps(self, node: object) -> bool:
        """Whether a value is what it was before, without rows."""
        if not isinstance(node, fx.Node) or node not in self.nodes:
            return True
        name = operator_name(node).rstrip("_")
        if self._is_by_rows(node) or record_of(node).kind is Kind.ALIAS:
            return self._keeps(node.args[0])
        if name in ("add", "sub"):
            one, other = node.args[:2]
            return (self._keeps(one) and self._is_nothing(other)) or (
                name == "add" and self._keeps(other) and self._is_nothing(one)
            )
        return _views(node) and not _writes(node) and self._keeps(node.args[0])

    def _is_nothing(self, node: object) -> bool:
        """Whether a value is zero without rows."""
        if not isinstance(node, fx.Node) or node.op != "call_function":
            return False
        name, record = operator_name(node), record_of(node)
        if name.removeprefix("new_").startswith("zeros"):
            return True
        if self._is_by_rows(node) or record.kind in (Kind.RESHAPE, Kind.PERMUTE, Kind.ALIAS, Kind.COPY):
            return self._is_nothing(node.args[0])
        return name == "mul" and any(map(self._is_nothing, node.args))


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _views(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(each.alias_info is not None for each in schema.returns)
