"""Print an fx graph as the body of a forward, in the user's names.

    graph ──choose which nodes get a statement──► name values by liveness ──► statements

A value used once is written where it is used. A statement's variable is the one that the user's code assigns there,
re-used when its old value is dead, so ``hidden_states = ...`` can follow ``hidden_states = ...``.
"""

from __future__ import annotations

import builtins
import inspect
import itertools
import keyword
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.codegen.dead_code import library, name_in_library, needed_by
from graphpar.codegen.formatting import describe_shape, note_of, shapes_of
from graphpar.codegen.layers import Layers, given
from graphpar.codegen.spelling import spell
from graphpar.emitted import chunks, collectives, expert_rows, kv_cache, model_outputs, random_streams
from graphpar.errors import GraphparError
from graphpar.ir.program import Chunked, Function, Helper, Program, operator_name, value_of
from graphpar.operators.functions import OPERATORS
from graphpar.operators.naming import created_by, short_name, user_name
from graphpar.operators.parameter_casts import casts_parameter
from graphpar.operators.spelling import Expression, literal
from graphpar.operators.table import COMPOSITES, TABLE, record_of
from graphpar.operators.transitions import travelling_beside

_INLINE = 88


def functions_of(module: ModuleType) -> tuple[str, ...]:
    """List the functions of a file of the package that other files may call."""
    made = inspect.getmembers(module, lambda item: inspect.isfunction(item) and item.__module__ == module.__name__)
    return tuple(name for name, _ in made if not name.startswith("_"))


# Functions of the emitted package, which no variable may hide.
FUNCTIONS = tuple(name for name in functions_of(random_streams) if name in TABLE)
_CALLED = {
    chunks.__name__,
    collectives.__name__,
    expert_rows.__name__,
    kv_cache.__name__,
    model_outputs.__name__,
    *(each.function.__module__ for each in COMPOSITES.values()),
}
OF_FILES = {name: functions_of(module) for name, module in sorted(library().items()) if module.__name__ in _CALLED}
"""Those of files that stand in the emitted folder as they stand here, by their file."""
_OF_FILES = tuple(name for names in OF_FILES.values() for name in names)
# Names that mean something in every emitted file.
RESERVED = ("Any", "F", "Tensor", "layers", "nn", "parameters", "torch", *FUNCTIONS, *_OF_FILES)


@dataclass
class Statement:
    """One line (or a loop) of a forward.

    Attributes:
        path: the module that it belongs to, for the comments.
        notes: for each redistribution in it, the call as the text has it and what it does to the types.
    """

    node: fx.Node
    text: str
    path: str = ""
    line: str = ""
    notes: tuple[tuple[str, str], ...] = ()


@dataclass
class Printed:
    """A printed graph: parameters of the forward, its statements, and what it returns."""

    parameters: list[str]
    statements: list[Statement]
    returned: str
    names: dict[fx.Node, str] = field(default_factory=dict)
    notes: tuple[tuple[str, str], ...] = ()  # of what is returned


EVALUATED = "evaluated"
"""The method of a class that is its forward in evaluation, where that is not what it is in training; in a call's metadata: that it is
called."""


def called(block: str, node: fx.Node) -> str:
    """Write what a call of a block calls."""
    return f"{block}.{EVALUATED}" if node.meta.get(EVALUATED) else block


def _is_sharded(node: fx.Node) -> bool:
    name = name_in_library(node.target)
    return "sharded" in node.kwargs or (name is not None and "collectives" in {name, *needed_by(name)})


def _line_of(node: fx.Node) -> tuple[str, int, str] | None:
    """The line that calls a module of torch's, and the call that it stands in."""
    source, stack = node.meta.get("source"), node.meta.get("module_stack", ())
    if source is None or len(stack) < 2 or not stack[-1][1].startswith("torch.nn.modules"):
        return None
    return source.file, source.line, stack[-2][2]


_BUILTINS_USED = {"bool", "enumerate", "float", "getattr", "int", "range", "str", "super", "tuple"}


class GraphPrinter:
    """Prints one graph.

    Args:
        attribute: spells a parameter or buffer of this name.
        call: spells a block of this ``call_module`` node.
        base: the path of the module that the graph is of.
        keywords: placeholders that are passed by name, so that their names can't be changed.
        layers: the operators that are calls of modules.
    """

    def __init__(
        self,
        graph: fx.Graph,
        attribute: Callable[[str], str],
        call: Callable[[fx.Node], str] | None = None,
        *,
        base: str = "",
        reserved: Iterable[str] = (),
        keywords: Iterable[str] = (),
        layers: Layers | None = None,
    ) -> None:
        self.graph = graph
        self.layers: Mapping[fx.Node, str] = {} if layers is None else layers.calls
        self.attribute = attribute
        self.call = call
        self.base = base
        self.reserved = set(reserved) | {"F", "torch", "self", "nn", "parameters", *FUNCTIONS}
        self.reserved |= {
            OPERATORS[n.target].function.__qualname__.split(".")[0] for n in graph.nodes if n.target in OPERATORS
        }
        self.reserved |= set(_OF_FILES) if any(_is_sharded(node) for node in graph.nodes) else set()
        self.reserved |= {operator_name(node) for node in graph.nodes} & set(
            _OF_FILES
        )  # no variable may hide what it calls
        self.reserved |= {node.target.name for node in graph.nodes if isinstance(node.target, Function)}
        self.keywords = set(keywords)
        self.nodes = [node for node in graph.nodes if node.op not in ("get_attr", "output")]
        self.output = graph.output_node()
        self.inlined: set[fx.Node] = set()
        self.names: dict[fx.Node, str] = {}
        self.skipped = set() if layers is None else set(layers.counts)  # printed as part of another statement
        self._lengths: dict[fx.Node, int] = {}
        self._last: dict[Any, fx.Node] = {}  # by user's line: its last operator in a module of torch
        for node in self.nodes:
            if _line_of(node) is not None:
                self._last[_line_of(node)] = node

        self.norms = _watched_norms(self.graph)

    # ---- which nodes get a statement ----

    def choose_inlined(self) -> None:
        """Find the nodes that are written inside of the statement that uses them; casts of a layer's parameters are its own."""
        for node in self.layers:
            self.inlined.update(each for each in node.all_input_nodes if casts_parameter(each))
        fixed = self._before_write() | self._while_travelling()
        for node in self.nodes:
            if node not in fixed and self._may_inline(node):
                self.inlined.add(node)

    def _before_write(self) -> set[fx.Node]:
        """Values made of a buffer that is written later: they must be computed where they stand."""
        nodes = list(self.graph.nodes)
        last = max((index for index, node in enumerate(nodes) if _writes(node) or node in self.norms), default=-1)
        writes = [node for node in nodes[: last + 1] if _writes(node)]
        names = {_buffer_of(node).target for node in writes if _buffer_of(node).op == "get_attr"}
        names |= {each.target for node in self.norms for each in _statistics(node)}
        buffers = {_buffer_of(node) for node in writes} | {
            node for node in nodes if node.op == "get_attr" and node.target in names
        }
        found: set[fx.Node] = set()
        for node in nodes[:last]:
            if node in buffers or any(argument in found for argument in node.all_input_nodes):
                found.add(node)
        for node in writes:  # self.cache[1].copy_(value): what is written may stand in the statement that writes
            target = node.args[0]
            while isinstance(target, fx.Node) and target.op == "call_function" and len(target.users) == 1:
                found.discard(target)
                target = target.args[0]
        return found

    def _while_travelling(self) -> set[fx.Node]:
        """What begins to send rows and ends that, and what is made of others meanwhile for later: computed where it stands."""
        found: set[fx.Node] = set()
        for node in self.graph.nodes:
            if others := travelling_beside(node):
                found |= {node, *node.users, *(each for each in others if not each.users.keys() <= set(others))}
        return found

    def _may_inline(self, node: fx.Node) -> bool:
        if node.op != "call_function" or len(node.users) != 1 or _writes(node) or node in self.norms:
            return False
        if operator_name(node) == "getitem" and self.unpacked(node.args[0]) is not None:  # type: ignore[arg-type]
            return False
        (user,) = node.users
        if user.op == "output" and isinstance(user.args[0], tuple | list):
            return False
        if user in self.skipped:
            return False
        uses = sum(1 for argument in _leaves((user.args, user.kwargs)) if argument is node)
        if uses != 1:
            return False
        if isinstance(value_of(node), int | torch.SymInt):
            return True
        if user.op == "call_module" or operator_name(user) == "getitem":
            return False
        own, theirs = node.meta.get("source"), user.meta.get("source")
        same_line = own is not None and theirs is not None and (own.file, own.line) == (theirs.file, theirs.line)
        named = own is not None and own.targets and not same_line
        return not named and self._length(node) <= _INLINE

    def _length(self, node: fx.Node) -> int:
        """Roughly how long the expression of ``node`` is."""
        if node not in self._lengths:
            total = len(operator_name(node)) + 4
            if node in self.layers:
                inner = sum(self._length(operand) if operand in self.inlined else 10 for operand in given(node))
                self._lengths[node] = len(self.layers[node]) + 7 + inner
                return self._lengths[node]
            for argument in node.all_input_nodes:
                if argument.op == "get_attr":
                    total += len(str(argument.target)) // 2 + 8
                elif argument in self.inlined:
                    total += self._length(argument)
                else:
                    total += 10
            self._lengths[node] = total
        return self._lengths[node]

    # ---- names ----

    def statements_of(self) -> list[fx.Node]:
        """List the nodes that get a statement."""
        return [
            node
            for node in self.nodes
            if node.op != "placeholder" and node not in self.inlined and node not in self.skipped
        ]

    def assign_names(self, order: list[fx.Node]) -> None:
        """Name values in the order of statements; a name is free again after the last use of its value."""
        last = self._last_uses(order)
        placeholders = [node for node in self.nodes if node.op == "placeholder"]
        live = {self._keyword(node): node for node in placeholders if self._given_by_name(node)}
        for node in placeholders:
            if not self._given_by_name(node):
                live[self._fresh(identifier(str(node.target)), live, self.reserved)] = node
        self.names.update({node: name for name, node in live.items()})
        for position, node in enumerate(order):
            free = {name for name, holder in live.items() if last.get(holder, -1) <= position}
            free -= {self.names[held] for held in self.held(node) if held in self.names}
            taken = {name: holder for name, holder in live.items() if name not in free}
            for target in self._targets(node):
                preferred = self._preferred_names(target)
                name = next((w for w in preferred if w not in taken and w not in self.reserved), None)
                name = name or self._fresh(preferred[0], taken, self.reserved)
                self.names[target] = name
                taken[name] = live[name] = target

    def _given_by_name(self, node: fx.Node) -> bool:
        return str(node.target) in self.keywords and not node.meta.get("boundary")

    def _keyword(self, node: fx.Node) -> str:
        name = str(node.target)
        if not name.isidentifier() or keyword.iskeyword(name) or name in self.reserved | _BUILTINS_USED:
            raise GraphparError(
                f"An input is named {name!r}, a name that the emitted code needs itself; rename the argument of the model."
            )
        return name

    def _targets(self, node: fx.Node) -> list[fx.Node]:
        """What a statement assigns: itself, or all its parts where they are unpacked."""
        parts = self.unpacked(node)
        return [] if node.target is model_outputs.keep_output else [node] if parts is None else parts

    def unpacked(self, node: fx.Node) -> list[fx.Node] | None:
        """List the ``getitem`` nodes of a node with several results, in order; None where a result is not used."""
        value = value_of(node)
        if node.op == "placeholder" or not isinstance(value, tuple | list):
            return None
        parts: dict[int, fx.Node] = {}
        for user in node.users:
            if operator_name(user) != "getitem" or not isinstance(user.args[1], int):
                return None
            parts[user.args[1]] = user
        return [parts[index] for index in sorted(parts)] if len(parts) == len(value) else None

    def _last_uses(self, order: list[fx.Node]) -> dict[fx.Node, int]:
        last: dict[fx.Node, int] = {}

        def visit(node: fx.Node, position: int) -> None:
            for argument in self.operands(node):
                last[argument] = max(last.get(argument, -1), position)
                if argument in self.inlined:
                    visit(argument, position)

        for position, node in enumerate(order):
            visit(node, position)
        visit(self.output, len(order))
        return last

    def operands(self, node: fx.Node) -> list[fx.Node]:
        """List the values that ``node``'s statement reads."""
        return [_written_value(argument) for argument in node.all_input_nodes]

    def held(self, node: fx.Node) -> list[fx.Node]:
        """List the operands that the statement's result must not overwrite (a loop reads them again)."""
        return []

    def _fresh(self, name: str, taken: Iterable[str], reserved: set[str]) -> str:
        unavailable = set(taken) | reserved
        if name not in unavailable:
            return name
        number = 2
        while f"{name}_{number}" in unavailable:
            number += 1
        return f"{name}_{number}"

    def _preferred_names(self, node: fx.Node) -> list[str]:
        """Candidate names: the user's variable at this line or at a caller's, the module's, the operator's."""
        if isinstance(value_of(node), int | torch.SymInt) and "name" not in node.meta:
            return ["batch" if operator_name(node) == "sym_size" else "rows"]
        if "name" in node.meta:
            return [identifier(str(node.meta["name"]))]
        source = node.meta.get("source")
        named = user_name(node)
        candidates = [] if named is None else [named]
        if source is not None and len(source.targets) > 1 and operator_name(node) != "getitem":
            # q, k = f(q, k): what is made of k is k; what only moves dims of cos is cos.
            own = self._operand_names(node)
            kept = [name for name in own if name in source.targets]
            candidates = kept + self._moved_from(node) + candidates
        made = created_by(node)
        if made is not None and not candidates:
            return [identifier(short_name(made))]
        stack = node.meta.get("module_stack", ())
        path = stack[-1][0] if stack else ""
        parts = [part for part in path.removeprefix(self.base).split(".") if part and not part.isdigit()]
        if parts:
            candidates.append(parts[-1])
            if candidates[0] != parts[-1]:
                candidates.insert(1 if isinstance(node.target, Helper) else 2, f"{parts[-1]}_{candidates[0]}")
            if self._last.get(_line_of(node), node) is not node:
                # down(act(gate(x)) * up(x)): what is not the line's result is named by its module.
                candidates.insert(0, parts[-1])
        candidates.append(short_name(node) if node.op == "call_function" else "hidden")
        if operator_name(node) == "getitem" and not (source is not None and source.targets):
            # A part of a result that no line of the user's names: what it is to the function that takes it.
            candidates = _parameters_of(node) + candidates
        return [identifier(candidate) for candidate in candidates]

    def _moved_from(self, node: fx.Node) -> list[str]:
        """The variable whose elements ``node`` has, in another order or shape."""
        while record_of(node).same_elements and isinstance(node.args[0], fx.Node):
            node = node.args[0]
            if node not in self.inlined:
                return [self.names[node]] if node in self.names else []
        return []

    def _operand_names(self, node: fx.Node) -> list[str]:
        """The variables in ``node``'s expression, the first operand's first."""
        names: list[str] = []
        for argument in self.operands(node):
            if argument in self.inlined:
                names += self._operand_names(argument)
            elif argument in self.names:
                names.append(self.names[argument])
        return names

    # ---- text ----

    def expression(self, item: Any) -> Expression:
        """Spell an argument: a value, a literal, or a list or tuple of them."""
        if isinstance(item, fx.Node):
            item = _written_value(item)
            if item.op == "get_attr":
                return Expression(self.attribute(str(item.target)))
            if item in self.inlined:
                return self.spelled(item)
            return Expression(self.names[item])
        if isinstance(item, tuple):
            inner = ", ".join(self.expression(part).text for part in item)
            return Expression(f"({inner},)" if len(item) == 1 else f"({inner})")
        if isinstance(item, list):
            return Expression(f"[{', '.join(self.expression(part).text for part in item)}]")
        text = literal(item)
        return Expression(text, 80 if text.startswith("-") else 100)

    def spelled(self, node: fx.Node) -> Expression:
        """Spell the call that ``node`` is."""
        if node.op == "call_module":
            assert self.call is not None
            arguments = ", ".join(self.expression(argument).text for argument in node.args)
            return Expression(f"{called(self.call(node), node)}({arguments})")
        if node in self.layers:
            arguments = ", ".join(self.expression(operand).text for operand in given(node))
            return Expression(f"{self.attribute(self.layers[node])}({arguments})")
        if isinstance(function := node.target, Chunked):
            rows, whole = (
                self.expression(list(part)).text for part in (node.args[: function.rows], node.args[function.rows :])
            )
            return Expression(f"in_chunks({function.name}, {rows}, {whole}, tokens={function.tokens})")
        return spell(node, self.expression, self.anchor())

    def anchor(self) -> str:
        """Return an expression with a ``.device``: a tensor argument, or a parameter."""
        numbers = {name for n, name in self.names.items() if not isinstance(value_of(n), Tensor)}
        for candidate in self.nodes:
            # The name may stand for another tensor by now; it is on the same device.
            tensor = candidate.op == "placeholder" and isinstance(value_of(candidate), Tensor)
            if tensor and self.names[candidate] not in numbers:
                return self.names[candidate]
        attribute = next((n for n in self.graph.nodes if n.op == "get_attr"), None)
        return self.attribute(str(attribute.target)) if attribute is not None else "torch.empty(0)"

    def print(self) -> Printed:
        """Print the graph."""
        self.choose_inlined()
        for node in self.statements_of():
            self.skipped.update(self.unpacked(node) or ())
        order = self.statements_of()
        self.assign_names(order)
        statements = [self.statement(node) for node in order]
        returned = self.output.args[0]
        text = self.expression(returned).text
        if isinstance(returned, tuple | list):
            text = text[1:-1].rstrip(",") if all("(" not in self.expression(r).text for r in returned) else text
        parameters = [self.names[node] for node in self.nodes if node.op == "placeholder"]
        return Printed(parameters, statements, text, self.names, tuple(self._notes(self.output)))

    def statement(self, node: fx.Node) -> Statement:
        """Write the statement of ``node``."""
        parts = self.unpacked(node)
        spelled = self.spelled(node).text
        if _writes(node):
            text = f"if self.training:\n    {spelled}" if self._written_in_training(node) else spelled
        elif node.target is model_outputs.keep_output:
            text = spelled
        elif parts is not None:
            names = ", ".join(self.names[part] for part in parts)
            alone = len(parts) == 1 and isinstance(node.target, torch._ops.OpOverload)  # a list of one
            text = f"({names},) = {spelled}" if alone else f"{names} = {spelled}"
        else:
            text = f"{self.names[node]} = {spelled}"
        if isinstance(value_of(node), int | torch.SymInt):
            return Statement(node, text)
        source = node.meta.get("source")
        stack = node.meta.get("module_stack", ())
        line = f"{source.file}:{source.line}" if source else ""
        return Statement(node, text, stack[-1][0] if stack else "", line, tuple(self._notes(node)))

    def _written_in_training(self, node: fx.Node) -> bool:
        """Whether ``node`` counts the batches of a BatchNorm, which has other statistics in evaluation and counts nothing there."""
        module = str(_buffer_of(node).target).rpartition(".")[0]
        norms = [
            n for n in self.graph.nodes if operator_name(n) in ("batch_norm", "sync_batch_norm", "channel_batch_norm")
        ]
        norms = [n for n in norms if n.kwargs.get("training") or n.args[5] is True]
        means = [n.args[3].target for n in norms if isinstance(n.args[3], fx.Node)]
        return any(str(mean).rpartition(".")[0] == module for mean in means)

    def _notes(self, node: fx.Node) -> list[tuple[str, str]]:
        """The redistributions in a statement, in the order of their calls."""
        own = [note_of(node, self.names)] if "transition" in node.meta else []
        inner = (self._notes(argument) for argument in node.all_input_nodes if argument in self.inlined)
        return [*own, *itertools.chain.from_iterable(inner)]


_NORMS = ("batch_norm", "sync_batch_norm", "channel_batch_norm")


def _statistics(node: fx.Node) -> list[fx.Node]:
    """The running statistics that a BatchNorm takes."""
    return [each for each in node.args[3:5] if isinstance(each, fx.Node)]


def _watched_norms(graph: fx.Graph) -> set[fx.Node]:
    """Return the BatchNorms whose running statistics something else uses, too, so that these stand in the order of the model."""
    norms = [node for node in graph.nodes if operator_name(node) in _NORMS and _statistics(node)]
    users: dict[Any, set[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            users.setdefault(node.target, set()).update(node.users)
    return {node for node in norms if any(len(users.get(each.target, ())) > 1 for each in _statistics(node))}


def _writes(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
        and operator_name(node) != "batch_norm"
    )


def _buffer_of(node: fx.Node) -> fx.Node:
    """The buffer that ``node`` writes or views."""
    while node.op == "call_function":
        assert isinstance(node.args[0], fx.Node)
        node = node.args[0]
    return node


def _written_value(node: fx.Node) -> fx.Node:
    """The value that ``node`` writes in place, which is its result; ``node`` itself if it writes nothing."""
    while _writes(node):
        assert isinstance(node.args[0], fx.Node)
        node = node.args[0]
    return node


def _parameters_of(node: fx.Node) -> list[str]:
    """What the functions of gates that take ``node`` call it: ``gate`` or ``up`` of ``swiglu(gate, up)``."""
    found = []
    for user in node.users:
        composite = COMPOSITES.get(operator_name(user))
        if composite is not None and composite.fuses:
            names = inspect.signature(user.target).parameters  # type: ignore[arg-type]
            found += [name for name, argument in zip(names, user.args) if argument is node]
    return found


def _leaves(tree: Any) -> list[Any]:
    leaves: list[Any] = []
    fx.map_arg(tree, lambda node: leaves.append(node))  # type: ignore[func-returns-value, arg-type, return-value]
    return leaves


def identifier(name: str) -> str:
    """Return ``name``, or what a variable can be called in its place."""
    text = "".join(char if char.isalnum() or char == "_" else "_" for char in name)
    if not text or text[0].isdigit():
        text = f"_{text}"
    return f"{text}_value" if keyword.iskeyword(text) or hasattr(builtins, text) else text


def print_graph(graph: fx.Graph) -> str:
    """Print a graph as a Python function, for people who want to look at a pass's result."""
    printer = GraphPrinter(graph, lambda name: f"self.{name}", lambda node: f"self.{node.target}")
    printed = printer.print()
    lines = [f"def forward(self, {', '.join(printed.parameters)}):"]
    path = None
    for statement in printed.statements:
        if statement.path != path:
            path = statement.path
            lines.append(f"    # {path}  {statement.line}".rstrip())
        lines.append(f"    {statement.text}  # {describe_shape(statement.node)}".rstrip(" #"))
    lines.append(f"    return {printed.returned}")
    return "\n".join(lines) + "\n"


def program_text(program: Program) -> str:
    """Print the graphs of a program as code."""
    with shapes_of(program.mode):
        return _program_text(program)


def _program_text(program: Program) -> str:
    parts = [f"# {program.name}\n{print_graph(program.graph)}"]
    parts += [
        f"# block {name} ({len(block.instances)} instances)\n{print_graph(block.graph)}"
        for name, block in program.blocks.items()
    ]
    return "\n".join(parts)
