"""Classes and functions of the emitted package: one for each distinct block, stage and helper."""

from __future__ import annotations

import contextlib
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, fx

from graphpar.codegen.attributes import InitPrinter, Tree, build_tree, reference
from graphpar.codegen.formatting import WIDTH, commented, describe_shape, describe_types, wrapped
from graphpar.codegen.layers import Layers
from graphpar.codegen.printer import EVALUATED, GraphPrinter, Printed, identifier
from graphpar.codegen.stage_printer import StagePrinter
from graphpar.ir.program import Block, Chunked, Function, Program, TensorInfo, value_of
from graphpar.ir.stage import Stage, told_apart_by
from graphpar.operators.naming import free_name
from graphpar.runtime.layout import Shard
from graphpar.text import is_at_or_below, is_below, numbered_runs, short_names

_INDENT = "    "
_COLUMN = 84  # where comments about types begin


def block_class(program: Program, block: Block) -> tuple[str, bool, bool]:
    """Print a block's class; return its text, whether it needs the helper ``parameters``, and whether it has a method ``evaluated``, as it
    computes something else in evaluation.
    """
    other = None if program.evaluated is None else program.evaluated.blocks.get(block.name)
    at_lengths = list(block.at_lengths.values())
    instance = block.instances[0]
    prefix = f"{instance}."
    infos = {name.removeprefix(prefix): info for name, info in _owned(program, prefix).items()}
    tree = build_tree(
        infos, {}, [name.removeprefix(prefix) for name in program.module_classes if name.startswith(prefix)]
    )
    layers = Layers.of(
        block.graph,
        tree,
        program.module_classes,
        prefix,
        at_lengths=at_lengths,
        evaluated=None if other is None else other.graph,
    )
    made = layers.constructors(tree, program.module_classes, prefix)
    init = InitPrinter(tree, made, train=program.mode == "train")
    body = init.print(program.ties_below(instance))

    def printed_of(graph: fx.Graph) -> Printed:
        return GraphPrinter(graph, lambda name: reference(tree, name), base=block.path, layers=layers).print()

    printed = printed_of(block.graph)
    where = ", ".join(numbered_runs(list(dict.fromkeys(block.instances))))
    lines = [
        f"class {block.name}(nn.Module):",
        *docstring(f"{where}: {_flow(block.graph, printed)}{_shardings(infos)}"),
    ]
    lines += _init_lines(body)
    apart = False
    if other is not None:
        with _inputs_named_as(other.graph, block.graph):  # what comes into a block may have another name
            apart = _body(printed_of(other.graph)) != _body(printed)
    lines += _forward_lines(
        printed, block.graph, base=block.path, first=_by_length(printed, block.graph, block.at_lengths)
    )
    for length, graph in block.at_lengths.items():
        again = printed_of(graph)
        lines += _forward_lines(again, graph, method_at(length), _at(length, graph, again), base=block.path)
    if other is not None and apart:
        again = printed_of(other.graph)
        doc = docstring(f"In evaluation: {_flow(other.graph, again)}", _INDENT * 2)
        lines += _forward_lines(again, other.graph, EVALUATED, doc, base=block.path)
    return "\n".join(lines) + "\n", init.needs_parameters, apart


@contextlib.contextmanager
def _inputs_named_as(graph: fx.Graph, other: fx.Graph) -> Iterator[None]:
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    names = [node.target for node in other.nodes if node.op == "placeholder"]
    before = [node.target for node in placeholders]
    for node, name in zip(placeholders, names):
        node.target = name
    try:
        yield
    finally:
        for node, name in zip(placeholders, before):
            node.target = name


def _body(printed: Printed) -> object:
    return printed.parameters, [statement.text for statement in printed.statements], printed.returned


def stage_class(
    program: Program, stage: Stage, modules: str, infos: Mapping[str, TensorInfo], blocks: Mapping[str, str]
) -> tuple[str, bool]:
    """Print a stage's class; return its text and whether it needs the helper ``parameters``.

    Args:
        modules: what the stage holds, for the docstring.
        infos: its tensors outside of blocks.
        blocks: its block instances, path -> class.
    """
    tree = stage_tree(program, infos, blocks)
    other = stage.evaluated
    at_lengths = {length: each.graph for length, each in stage.at_lengths.items()}
    layers = Layers.of(
        stage.graph,
        tree,
        program.module_classes,
        at_lengths=list(at_lengths.values()),
        evaluated=None if other is None else other.graph,
    )
    init = InitPrinter(tree, layers.constructors(tree, program.module_classes), train=program.mode == "train")
    body = init.print(stage_ties(program, infos, blocks))
    printer = StagePrinter(stage.graph, tree, (*stage.inputs, *stage.counts), layers)
    printed = printer.print()
    received = {boundary.name for boundary in stage.receives}
    summary = f"{modules}. {_flow(stage.graph, printed)}"
    lines = [f"class Stage{stage.index}(nn.Module):", *docstring(summary)]
    lines += _init_lines(body)
    first = _by_length(printed, stage.graph, at_lengths, len(received))
    lines += _forward_lines(printed, stage.graph, keyword_after=len(received), first=first)
    for length, graph in at_lengths.items():
        printed = StagePrinter(graph, tree, (*stage.inputs, *stage.counts), layers).print()
        doc = _at(length, graph, printed)
        lines += _forward_lines(printed, graph, method_at(length), doc, keyword_after=len(received))
    if other is not None:
        printed = StagePrinter(other.graph, tree, (*other.inputs, *other.counts), layers).print()
        doc = docstring(f"In evaluation: {_flow(other.graph, printed)}", _INDENT * 2)
        lines += _forward_lines(printed, other.graph, EVALUATED, doc, keyword_after=len(other.receives))
    return "\n".join(lines) + "\n", init.needs_parameters


def stage_tree(program: Program, infos: Mapping[str, TensorInfo], blocks: Mapping[str, str]) -> Tree:
    """Build the tree of a stage's modules."""
    return build_tree(infos, blocks, list(program.module_classes))


def helper_function(helper: Function) -> str:
    """Print a function of what the root has no parameters in."""
    printer = GraphPrinter(helper.graph, lambda name: name)
    printed = printer.print()
    arguments = ", ".join(f"{name}: {_type(node)}" for name, node in _parameters(printed, helper.graph))
    header = f"def {helper.name}({arguments}) -> {_result_type(helper.graph)}:"
    tokens = f"; {helper.tokens} rows at a time" if isinstance(helper, Chunked) else ""
    doc = f'{_INDENT}"""{_flow(helper.graph, printed)}{tokens}"""'
    body = _statement_lines(printed, _INDENT, "")
    return "\n".join([*wrapped(header, ""), doc, *body, *wrapped(f"return {printed.returned}", _INDENT)]) + "\n"


def counts_function(program: Program) -> str:
    """Print ``global_counts``: the loss denominators from buffers and one microbatch's inputs; they add up over microbatches."""
    assert program.counts is not None
    names = [str(node.target) for node in program.counts.nodes if node.op == "placeholder"]
    buffers: dict[str, str] = {}

    def constant(name: str) -> str:
        if name in buffers:
            return buffers[name]
        value = program.constants[name]
        told = value.dtype in (torch.float32, torch.int64, torch.bool)  # what torch makes of Python's numbers
        dtype = "" if told else f", dtype={value.dtype}"
        return f"torch.tensor({printer.expression(value.tolist()).text}{dtype}, device={anchor}.device)"

    printer = GraphPrinter(program.counts, constant, keywords=names)
    for path in program.count_buffers:
        buffers[path] = free_name(identifier(path), {*names, *program.count_names, *printer.reserved})
        printer.reserved.add(buffers[path])
    anchor = names[0]
    printed = printer.print()
    arguments = ", ".join(
        [
            *(f"{name}: Tensor" for name in buffers.values()),
            *(f"{name}: {_type(node)}" for name, node in _parameters(printed, program.counts)),
        ]
    )
    results = ", ".join(["Tensor"] * len(program.count_names))
    lines = [
        f"def global_counts({arguments}) -> tuple[{results}]:",
        f'{_INDENT}"""{", ".join(program.count_names)}: what the loss divides by, summed over the microbatches of a step."""',
        *_statement_lines(printed, _INDENT, "", fold=False),
    ]
    counts = program.counts_results(printer.expression)
    lines.append(f"{_INDENT}return ({counts[0]},)" if len(counts) == 1 else f"{_INDENT}return {', '.join(counts)}")
    return "\n".join(lines) + "\n"


def stage_ties(program: Program, infos: Mapping[str, TensorInfo], blocks: Mapping[str, str]) -> list[tuple[str, ...]]:
    """List the groups of a stage's names that are one parameter."""
    groups = []
    for group in program.tied_parameters:
        held = tuple(n for n in group if n in infos or any(is_below(n, path) for path in blocks))
        inside_one = [path for path in blocks if all(is_below(name, path) for name in held)]
        if len(held) > 1 and not inside_one:
            groups.append(held)
    return groups


def _owned(program: Program, prefix: str) -> dict[str, TensorInfo]:
    """Parameters, buffers and constants below ``prefix``, in the order of the user's model."""
    names = dict.fromkeys([*program.parameters, *program.buffers, *program.constants])
    return {name: program.tensor_info(name) for name in names if name.startswith(prefix)}


# ---- text ------------------------------------------------------------------------------------------------------


def docstring(text: str, indent: str = _INDENT) -> list[str]:
    """Write a docstring of one line, or of several where it is long."""
    room = 120 - len(indent) - 6
    text = " ".join(text.split())
    if len(text) <= room:
        return [f'{indent}"""{text}"""']
    lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
    return [f'{indent}"""{lines[0]}', *(f"{indent}{line}" for line in lines[1:]), f'{indent}"""']


def _flow(graph: fx.Graph, printed: Printed) -> str:
    """``hidden [b, 16, 64], mask [b, 1, 16, 16] -> [b, 16, 64]``"""
    takes = [f"{name} {_placed(node)}".strip() for name, node in _parameters(printed, graph)]
    output = graph.output_node().args[0]
    results = output if isinstance(output, tuple | list) else [output]
    gives = [_placed(node) or "int" for node in results if isinstance(node, fx.Node)]
    return f"{', '.join(takes)} -> {', '.join(gives)}"


def _placed(node: fx.Node) -> str:
    """``[b, 8, 64] S(1)@tp``"""
    shape = describe_shape(node)
    return shape if shape in ("", "scalar") else f"{shape} {describe_types(node)}".strip()


def _shardings(infos: Mapping[str, TensorInfo]) -> str:
    """``. Sharded: q, k, v S(0)@tp; o S(1)@tp``; other weights are not sharded."""
    names = short_names([name for name, info in infos.items() if _sharding(info) and len(info.shape) > 1])
    groups: dict[str, list[str]] = {}
    for name, shown in names.items():
        groups.setdefault(_sharding(infos[name]), []).append(shown)
    listed = [f"{', '.join(group)} {spec}" for spec, group in groups.items()]
    return f". Sharded: {'; '.join(listed)}" if groups else ""


def _sharding(info: TensorInfo) -> str:
    return ", ".join(f"{kind}@{axis}" for axis, kind in info.spec if isinstance(kind, Shard))


def _parameters(printed: Printed, graph: fx.Graph) -> list[tuple[str, fx.Node]]:
    return list(zip(printed.parameters, (node for node in graph.nodes if node.op == "placeholder")))


def _type(node: fx.Node) -> str:
    return "Tensor" if isinstance(value_of(node), Tensor) else "int"


def _result_type(graph: fx.Graph) -> str:
    output = graph.output_node().args[0]
    if isinstance(output, tuple | list):
        return f"tuple[{', '.join('Tensor' for _ in output)}]"
    return "Tensor"


def _init_lines(body: Sequence[tuple[str, str]]) -> list[str]:
    lines = ["", f"{_INDENT}def __init__(self) -> None:", f"{_INDENT * 2}super().__init__()"]
    beside = [
        len(line) + 8
        for line, comment in body
        if len(line) + len(comment) + 12 <= WIDTH and comment not in ("", "tied")
    ]
    column = min(max(beside, default=0), _COLUMN)
    for line, comment in body:
        lines += commented(line, _INDENT * 2, comment, 0 if comment == "tied" else column)
    return lines


def method_at(length: int) -> str:
    """Name the method of a class that is another one at this length of the sequence."""
    return f"at_{length}"


def _at(length: int, graph: fx.Graph, printed: Printed) -> list[str]:
    return docstring(f"At {length} positions: {_flow(graph, printed)}", _INDENT * 2)


def _by_length(
    printed: Printed, graph: fx.Graph, at_lengths: Mapping[int, fx.Graph], keyword_after: int | None = None
) -> list[str]:
    """Print what chooses the method of a length, by a size of an input."""
    if not at_lengths:
        return []
    found = told_apart_by([graph, *at_lengths.values()])
    assert found is not None, "else every length would run the longest's graph"
    place, dim = found
    names = printed.parameters
    given = ", ".join(
        name if keyword_after is None or number < keyword_after else f"{name}={name}"
        for number, name in enumerate(names)
    )
    lines = []
    for length, other in at_lengths.items():
        value = value_of([node for node in other.nodes if node.op == "placeholder"][place])
        size, number = (names[place], value) if dim is None else (f"{names[place]}.shape[{dim}]", value.shape[dim])
        lines += [
            f"{_INDENT * 2}if {size} == {int(number)}:",
            *wrapped(f"return self.{method_at(length)}({given})", _INDENT * 3),
        ]
    return lines


def _forward_lines(
    printed: Printed,
    graph: fx.Graph,
    name: str = "forward",
    doc: Sequence[str] = (),
    *,
    base: str = "",
    keyword_after: int | None = None,
    first: Sequence[str] = (),
) -> list[str]:
    parameters = [f"{name}: {_type(node)}" for name, node in _parameters(printed, graph)]
    if keyword_after is not None and len(parameters) > keyword_after:
        parameters.insert(keyword_after, "*")
    header = f"def {name}({', '.join(['self', *parameters])}) -> {_result_type(graph)}:"
    return [
        "",
        *wrapped(header, _INDENT),
        *doc,
        *first,
        *_statement_lines(printed, _INDENT * 2, base),
        *_noted(wrapped(f"return {printed.returned}", _INDENT * 2), printed.notes),
    ]


def _statement_lines(printed: Printed, indent: str, base: str, *, fold: bool = True) -> list[str]:
    """Statements, with a comment where another of the user's modules begins: its name and source line."""
    lines: list[str] = []
    shown: str | None = None
    statements = list(printed.statements)
    last = statements[-1] if fold and statements else None
    if last is not None and last.text.startswith(f"{printed.returned} = ") and "\n" not in last.text:
        # `x = f(...)` directly before `return x` is `return f(...)`.
        statements.pop()
        printed.returned, printed.notes = last.text.partition(" = ")[2], last.notes
    for statement in statements:
        part = _module_part(statement.path, base) if statement.path else shown
        if part != shown and part:
            comment = f"# {part}"
            lines.append(f"{indent}{comment:<40}{statement.line}".rstrip() if statement.line else f"{indent}{comment}")
        shown = part
        for line in statement.text.split("\n"):
            spaces = len(line) - len(line.lstrip())
            lines += _noted(wrapped(line.lstrip(), indent + " " * spaces), statement.notes)
    return lines


def _noted(lines: list[str], notes: Sequence[tuple[str, str]]) -> list[str]:
    """The lines of a statement, with a comment on each redistribution behind the line that calls it, where there is room."""
    noted, left = [], list(notes)
    for line in lines:
        own = []
        for call in re.findall(r"(?<![\w.])\w+\(", line):
            note = next((note for note in left if note[0] == call), None)
            if note is not None:
                left.remove(note)
                own.append(note[1])
        full = f"{line:<{_COLUMN}}  # {'; '.join(own)}"
        short = f"{line}  # {'; '.join(text.partition('  ')[0] for text in own)}"
        noted.append(line if not own else next((text for text in (full, short) if len(text) <= WIDTH), line))
    return noted


def _module_part(path: str, base: str) -> str:
    """The child of ``base`` that contains ``path``; empty for a path outside of ``base``."""
    if not base:
        return path
    inside = is_at_or_below(path, base)
    return path.removeprefix(base).lstrip(".").split(".")[0] if inside else ""
