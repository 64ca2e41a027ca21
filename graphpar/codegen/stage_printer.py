"""Print a stage's forward, with runs of blocks as loops.

hidden = h.0(hidden, mask); hidden = h.1(hidden, mask); ...
    ->  for block in self.h.values(): hidden = block(hidden, mask)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from graphpar.codegen.attributes import Tree, reference
from graphpar.codegen.layers import Layers
from graphpar.codegen.printer import EVALUATED, GraphPrinter, Statement, called
from graphpar.emitted import random_streams


@dataclass
class Run:
    """Consecutive calls of blocks in one container, each taking the result of the one before."""

    calls: list[fx.Node]
    parent: str
    carried: int  # which argument is the previous result
    streams: dict[int, tuple[int, int]]  # argument -> (first stream, streams per instance)

    @property
    def first(self) -> int:
        """The number of the first instance."""
        return int(self.path.rpartition(".")[2])

    @property
    def path(self) -> str:
        """The path of the first instance."""
        return str(self.calls[0].target)

    @property
    def operands(self) -> dict[int, fx.Node]:
        """The values that the loop reads, by argument; of a random stream its keys."""
        given = {place: item for place, item in enumerate(self.calls[0].args) if isinstance(item, fx.Node)}
        return {place: item.args[0] if place in self.streams else item for place, item in given.items()}  # type: ignore[misc]


class StagePrinter(GraphPrinter):
    """Prints a root graph whose attributes are in ``tree``."""

    def __init__(self, graph: fx.Graph, tree: Tree, keywords: Iterable[str], layers: Layers) -> None:
        super().__init__(
            graph, lambda name: reference(tree, name), lambda node: reference(tree, str(node.target)), keywords=keywords,
            layers=layers,
        )  # fmt: skip
        self.tree = tree
        self.runs: dict[fx.Node, Run] = {}  # by last call
        for run in find_runs(graph):
            self.runs[run.calls[-1]] = run
            self.skipped.update(run.calls[:-1])
            for call in run.calls:
                for position in run.streams:
                    argument = call.args[position]
                    assert isinstance(argument, fx.Node)
                    self.skipped.add(argument)

    def operands(self, node: fx.Node) -> list[fx.Node]:
        """List the values that ``node``'s statement or loop reads."""
        run = self.runs.get(node)
        return super().operands(node) if run is None else list(run.operands.values())

    def held(self, node: fx.Node) -> list[fx.Node]:
        """List the values that a loop reads again in each iteration: all but the one that it carries."""
        run = self.runs.get(node)
        return [] if run is None else [value for place, value in run.operands.items() if place != run.carried]

    def _preferred_names(self, node: fx.Node) -> list[str]:
        preferred = super()._preferred_names(node)
        for last, run in self.runs.items():
            start = run.calls[0].args[run.carried]
            if start is node and all(user in run.calls for user in node.users):
                return [*super()._preferred_names(last), *preferred]
        return preferred

    def statement(self, node: fx.Node) -> Statement:
        """Write the statement of ``node``, or the loop that ends with it."""
        run = self.runs.get(node)
        if run is None:
            return super().statement(node)
        name = self.names[node]
        start = self.expression(run.calls[0].args[run.carried]).text
        loop_name = loop_variable(run.parent)
        if loop_name in self.names.values() or loop_name == "stream":
            loop_name = f"each_{loop_name}"
        arguments: list[str] = []
        for position, argument in enumerate(run.calls[0].args):
            if position == run.carried:
                arguments.append(name)
            elif position in run.streams:
                begin, step = run.streams[position]
                keys = self.expression(argument.args[0]).text  # type: ignore[union-attr]
                arguments.append(f"stream({keys}, {_progression(begin, step, run.first)})")
            else:
                arguments.append(self.expression(argument).text)
        header, body = self._loop(run, loop_name)
        body = called(body, node)
        lines = [] if start == name else [f"{name} = {start}"]
        lines += [header, f"    {name} = {body}({', '.join(arguments)})"]
        last = run.first + len(run.calls) - 1
        return Statement(node, "\n".join(lines), f"{run.path}-{last}", "")

    def _loop(self, run: Run, name: str) -> tuple[str, str]:
        container = self.tree.at(run.parent)
        assert container is not None
        whole = list(container.children) == [str(call.target).rpartition(".")[2] for call in run.calls]
        text = reference(self.tree, run.parent) if run.parent else "self"
        numbers = f"range({run.first}, {run.first + len(run.calls)})" if run.first else f"range({len(run.calls)})"
        if not container.keyed():
            return f"for i in {numbers}:", f"getattr({text}, str(i))"
        if run.streams:
            if whole:
                return f"for i, {name} in enumerate({text}.values(){f', {run.first}' if run.first else ''}):", name
            return f"for i in {numbers}:", f"{text}[str(i)]"
        if whole:
            return f"for {name} in {text}.values():", name
        return f"for i in {numbers}:", f"{text}[str(i)]"


def loop_variable(path: str) -> str:
    """Name the variable of a loop over ``model.layers``: ``layer``."""
    words = [part for part in path.split(".") if part and not part.isdigit()]
    name = words[-1] if words else "block"
    if name.endswith("ies"):
        return name[:-3] + "y"
    if name.endswith("s") and len(name) > 2 and not name.endswith("ss"):
        return name[:-1]
    return "block" if len(name) < 3 else name


def _progression(begin: int, step: int, first: int) -> str:
    """Stream number of instance ``i``, where instance ``first`` has ``begin``."""
    offset = begin - step * first
    product = f"{step} * i" if step != 1 else "i"
    return product if offset == 0 else f"{offset} + {product}" if offset > 0 else f"{product} - {-offset}"


def find_runs(graph: fx.Graph) -> list[Run]:
    """Find the longest runs of at least two calls that can be written as a loop."""
    calls = [node for node in graph.nodes if node.op == "call_module"]
    runs: list[Run] = []
    position = 0
    while position < len(calls):
        run = _run_from(calls, position)
        position += len(run.calls) if run else 1
        if run is not None:
            runs.append(run)
    return runs


def _run_from(calls: list[fx.Node], start: int) -> Run | None:
    first = calls[start]
    parent, _, number = str(first.target).rpartition(".")
    if not number.isdigit() or start + 1 >= len(calls):
        return None
    second = calls[start + 1]
    carried = [position for position, argument in enumerate(second.args) if argument is first]
    if len(carried) != 1:
        return None
    run = Run([first], parent, carried[0], {})
    for following in calls[start + 1 :]:
        previous = run.calls[-1]
        expected = f"{parent}.{run.first + len(run.calls)}" if parent else str(run.first + len(run.calls))
        if str(following.target) != expected or following.args[run.carried : run.carried + 1] != (previous,):
            break
        same = following.meta.get(EVALUATED) == first.meta.get(EVALUATED)
        several = any(isinstance(call.meta.get("val"), tuple) for call in (previous, following))
        if several or len(previous.users) != 1 or not same or not _same_arguments(run, following):
            break
        run.calls.append(following)
    return run if len(run.calls) > 1 else None


def _same_arguments(run: Run, call: fx.Node) -> bool:
    """Whether ``call`` has the run's arguments, but for the carried one and evenly spaced streams."""
    first, count = run.calls[0], len(run.calls)
    if len(first.args) != len(call.args):
        return False
    found: dict[int, tuple[int, int]] = {}
    for position, (own, theirs) in enumerate(zip(first.args, call.args)):
        if position == run.carried or own is theirs:
            continue
        begin, number = _stream_number(own), _stream_number(theirs)
        if begin is None or number is None or own.args[0] is not theirs.args[0]:  # type: ignore[union-attr]
            return False
        if (number - begin) % count:
            return False
        found[position] = (begin, (number - begin) // count)
    if count > 1 and found != run.streams:
        return False
    run.streams = found
    return True


def _stream_number(argument: Any) -> int | None:
    if isinstance(argument, fx.Node) and argument.target is random_streams.stream and len(argument.users) == 1:
        return int(argument.args[1])  # type: ignore[arg-type]
    return None
