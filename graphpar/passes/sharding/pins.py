"""From a user's shard plan to constraints of the search.

ShardConstraints ──► variants           instances of a block that are pinned differently, or share other parameters, become
                                        separate blocks
                 ──► points             an identity operator where a module's input or output is pinned
                 ──► SearchConstraints  allowed types of parameters and of these points
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx

from graphpar.annotations.patterns import ShardConstraints
from graphpar.annotations.values import Spec, spec_text
from graphpar.errors import GraphparError
from graphpar.ir.program import Block, Program, value_of
from graphpar.ir.sharding import Point
from graphpar.passes.normalize.functional import copied
from graphpar.text import is_at_or_below

POINT = "pin_point"


def with_results(program: Program) -> Program:
    """Add an identity before each result of a block, so that it can be redistributed inside the block."""
    blocks = {name: replace(block, graph=_returned(block.graph)) for name, block in program.blocks.items()}
    return program.with_graph(program.graph, blocks=blocks)


def _returned(source: fx.Graph) -> fx.Graph:
    graph = copied(source)
    output = next(node for node in graph.nodes if node.op == "output")
    for number, value in enumerate(output.all_input_nodes):
        if value.op != "call_function" or not isinstance(value_of(value), Tensor):
            continue
        with graph.inserting_before(output):
            identity = graph.call_function(torch.ops.aten.alias.default, (value,))
        identity.meta = dict(value.meta) | {POINT: ("result", number, "")}
        output.replace_input_with(value, identity)
    return graph


# ---- variants --------------------------------------------------------------------------------------------------


def variants_of(program: Program, pins: ShardConstraints) -> dict[str, str]:
    """Return the instances that need another definition than the first: path -> name of the variant."""
    found: dict[str, str] = {}
    shared = _shared_outside(program)
    for block in program.blocks.values():
        names: dict[object, str] = {}
        for path in dict.fromkeys(block.instances):
            key = _signature(path, pins), frozenset(shared.get(path, ()))
            names.setdefault(key, block.name if not names else _fresh(block.name, program.blocks, found.values()))
            if names[key] != block.name:
                found[path] = names[key]
    return found


def _fresh(name: str, blocks: Iterable[str], taken: Iterable[str]) -> str:
    number = 2
    while f"{name}_{number}" in {*blocks, *taken}:
        number += 1
    return f"{name}_{number}"


def _signature(path: str, pins: ShardConstraints) -> object:
    """Return the pins inside the instance ``path``, by relative name."""
    tables: tuple[Mapping[str, object], ...] = (pins.parameters, pins.inputs, pins.outputs)
    return tuple(
        tuple(
            sorted((name.removeprefix(path), repr(spec)) for name, spec in table.items() if is_at_or_below(name, path))
        )
        for table in tables
    )


def _shared_outside(program: Program) -> dict[str, set[tuple[str, str, str]]]:
    """Return for each instance its parameters that are tied to another parameter of a block or are read by the root.

    A tied parameter is stored once for all its uses, so an instance with such a tie should not decide for instances without.
    """
    instances = {path: block.name for block in program.blocks.values() for path in block.instances}

    def place(name: str) -> tuple[str, str, str]:
        """Return instance, block, and the name in it."""
        parts = name.split(".")
        paths = (".".join(parts[:count]) for count in range(1, len(parts)))
        path = next((path for path in paths if path in instances), "")
        return path, instances.get(path, ""), name.removeprefix(f"{path}.")

    read = (str(node.target) for node in program.graph.nodes if node.op == "get_attr")
    of_root = {program.tie_of(name) for name in read if name in program.parameters}
    found: dict[str, set[tuple[str, str, str]]] = {}
    for group in dict.fromkeys((*program.tied_parameters, *of_root)):
        places = [place(name) for name in group]
        uses = {(block, name) for _, block, name in places} | ({("", "")} if group in of_root else set())
        for path, block, name in places:
            found.setdefault(path, set()).update((name, *use) for use in uses - {(block, name)})
    return found


def with_variants(program: Program, variants: Mapping[str, str]) -> Program:
    """Give the instances of ``variants`` a block of their own, by its name."""
    if not variants:
        return program
    blocks: dict[str, Block] = {}
    for name, block in program.blocks.items():
        kept = [path for path in block.instances if path not in variants]
        if kept:
            blocks[name] = replace(block, instances=kept)
        for path in block.instances:
            own = variants.get(path)
            if own is None:
                continue
            if own not in blocks:
                blocks[own] = replace(block, name=own, instances=[], graph=copied(block.graph))
            blocks[own].instances.append(path)
    graph = copied(program.graph)
    for node in graph.nodes:
        if node.op == "call_module" and str(node.target) in variants:
            node.meta["block"] = variants[str(node.target)]
    return program.with_graph(graph, blocks=blocks)


# ---- points ----------------------------------------------------------------------------------------------------


def points_of(pins: ShardConstraints) -> list[Point]:
    """Return where inputs and outputs of modules are pinned: outer inputs first, inner outputs first.

    Raises:
        GraphparError: a keyword input is pinned.
    """
    if pins.keyword_inputs:
        path, names = next(iter(pins.keyword_inputs.items()))
        raise GraphparError(
            f"The shard plan pins the keyword input{'s' if len(names) > 1 else ''} {', '.join(names)} of {path!r}; "
            "pin it by its position, or pin what makes it."
        )
    inputs = [Point(path, "input", i) for path, specs in pins.inputs.items() for i, spec in enumerate(specs) if spec]
    outputs = [Point(path, "output", i) for path, specs in pins.outputs.items() for i, spec in enumerate(specs) if spec]
    return sorted(inputs, key=lambda p: p.path.count(".")) + sorted(outputs, key=lambda p: -p.path.count("."))


def allowed_at(pins: ShardConstraints, point: Point) -> Spec:
    """Return the types that the user allows at a point."""
    specs = (pins.inputs if point.kind == "input" else pins.outputs)[point.path]
    spec = specs[point.position]
    assert spec is not None
    return spec


def with_points(program: Program, points: Sequence[Point]) -> Program:
    """Add an identity at each of ``points``."""
    if not points:
        return program
    graph = copied(program.graph)
    blocks = {name: replace(block, graph=copied(block.graph)) for name, block in program.blocks.items()}
    for point in points:
        block = next(
            (b for b in blocks.values() if any(is_at_or_below(point.path, path) for path in b.instances)), None
        )
        if block is None:
            _mark(graph, point, point.path)
            continue
        own = next(path for path in block.instances if is_at_or_below(point.path, path))
        first = _first_path(block)
        _mark(block.graph, point, first + point.path.removeprefix(own))
    return program.with_graph(graph, blocks=blocks)


def _first_path(block: Block) -> str:
    """Return the path of the instance that the block's graph was traced from, by its operators' module stacks."""
    for node in block.graph.nodes:
        for path, module_class, _ in node.meta.get("module_stack", ()):
            if module_class == block.module_class and node.op == "call_function":
                return str(path)
    return block.instances[0]


def _mark(graph: fx.Graph, point: Point, path: str) -> None:
    """Add an identity at the module's input or output, unless another instance added it."""
    if any(node.meta.get(POINT) == (point.kind, point.position, path) for node in graph.nodes):
        return
    called = [n for n in graph.nodes if n.op != "placeholder"]
    inside = [n for n in called if any(entry[0] == path for entry in n.meta.get("module_stack", ()))]
    region = set(inside)
    if not region:
        raise GraphparError(
            f"The shard plan pins the {point.kind} of {point.path!r}, which has no operators in the traced program."
        )
    if point.kind == "input":
        outer = [
            argument
            for node in inside
            for argument in node.all_input_nodes
            if argument not in region and argument.op != "get_attr" and isinstance(value_of(argument), Tensor)
        ]
        values = list(dict.fromkeys(outer))
    else:
        values = [n for n in inside if isinstance(value_of(n), Tensor) and any(user not in region for user in n.users)]
    if point.position >= len(values):
        raise GraphparError(
            f"The shard plan pins {point.kind} {point.position} of {point.path!r}, which has {len(values)} in the traced program."
        )
    value = values[point.position]
    users = [user for user in value.users if (user in region) == (point.kind == "input")]
    with graph.inserting_after(value):
        identity = graph.call_function(torch.ops.aten.alias.default, (value,))
    identity.meta = dict(value.meta) | {POINT: (point.kind, point.position, path)}
    stack = value.meta.get("module_stack", ()) if point.kind == "output" else inside[0].meta["module_stack"]
    depth = next((i for i, entry in enumerate(stack) if entry[0] == path), len(stack) - 1)
    identity.meta["module_stack"] = stack[: depth + 1]
    for user in users:
        user.replace_input_with(value, identity)


def _check_sequence(pins: ShardConstraints, point: Point, value: Tensor) -> None:
    """Check that an activation that the style ``sequence`` pins has a sequence: a dim between the examples and the features."""
    if "sequence" in pins.styles.get(point.path, ()) and value.ndim < 3:
        sizes = ", ".join(str(size) if isinstance(size, int) else "batch" for size in value.shape)
        raise GraphparError(
            f"The shard plan's {' and '.join(map(repr, pins.origins[point.path]))} pins {spec_text(allowed_at(pins, point))} on the "
            f"{point.kind} of {point.path!r}, whose {value.ndim} dims ({sizes}) have no sequence between "
            "examples and features; pin the dim that is meant, as in {'inputs': ['S(0)@tp'], 'outputs': ['S(0)@tp']}."
        )


def pin_nodes(program: Program, pins: ShardConstraints, points: Sequence[Point]) -> dict[fx.Node, Spec]:
    """Return the identities of a prepared program with the types that are allowed there."""
    found: dict[fx.Node, Spec] = {}
    graphs = [(program.graph, None), *((block.graph, block) for block in program.blocks.values())]
    for graph, block in graphs:
        for node in graph.nodes:
            if POINT not in node.meta:
                continue
            kind, position, path = node.meta[POINT]
            for point in points:
                own = point.path
                if block is not None:
                    instance = next((i for i in block.instances if is_at_or_below(point.path, i)), None)
                    if instance is None:
                        continue
                    own = _first_path(block) + point.path.removeprefix(instance)
                if (point.kind, point.position, own) == (kind, position, path):
                    found[node] = allowed_at(pins, point)
                    _check_sequence(pins, point, value_of(node))
    return found
