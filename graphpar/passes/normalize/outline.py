"""``outline``: repeated modules become blocks, one definition for all isomorphic instances.

    root:  embedding, [ops of h.0], [ops of h.1], ..., norm     ->    embedding, h.0(x), h.1(x), ..., norm
                                                                       blocks: GPT2Block = the one graph of all h.*

A class of modules is outlined where two of its outermost instances have the same structural hash: operators, literals, shapes of
parameters, which of them are tied, and how inputs and results are wired. Names don't count, so it works for ``h``, ``layers`` or
``stages.2.blocks``; a ResNet's stages differ, so the search continues inside them and finds the residual blocks.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from graphpar.codegen.printer import RESERVED
from graphpar.emitted import random_streams
from graphpar.ir.batch_sizes import batch_coefficients, multiple_of_batch, size_coefficient
from graphpar.ir.program import Block, Program, operator_name, value_of
from graphpar.operators.naming import unique_names
from graphpar.passes.normalize.applications import side_by_side
from graphpar.passes.normalize.simplify import remove_dead_code
from graphpar.text import is_below

_aten = torch.ops.aten
_CONTAINERS = "torch.nn.modules.container."


@dataclass
class Region:
    """One call of one module: its operators, what flows in and out."""

    call: str
    path: str
    module_class: str
    depth: int
    nodes: list[fx.Node] = field(default_factory=list)
    ancestors: tuple[str, ...] = ()
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    first_stream: int | None = None
    digest: str = ""


def outline(program: Program) -> Program:
    """Turn repeated modules into ``call_module`` nodes, one block for each distinct definition.

    Where the model is another program in evaluation, its instances of a block are isomorphic in both.
    """
    evaluated = {} if program.evaluated is None else _evaluated(program.evaluated)
    chosen = _choose(program, regions_of(program), evaluated)
    if not chosen:
        return program
    names = block_names(chosen)
    if program.evaluated is not None:
        program = replace(program, evaluated=outlined_as(program.evaluated, chosen, names, evaluated))
    return rebuilt(program, chosen, names)


def outlined_as(
    program: Program, chosen: Iterable[Region], names: dict[str, str], regions: Mapping[str, Sequence[Region]]
) -> Program:
    """Return what the same model is in evaluation, with calls of the modules that are ``chosen`` in training.

    Args:
        regions: its own calls of modules, by path.
    """
    classes = {region.path: region.digest for region in chosen}
    own = [replace(region, digest=classes[path]) for path in classes for region in regions.get(path, ())]
    return rebuilt(program, own, names)


def _evaluated(program: Program) -> dict[str, list[Region]]:
    """Return the calls of each module; those that can't be outlined, or are not alike, without a digest."""
    order = {node: index for index, node in enumerate(program.graph.nodes)}
    found: dict[str, list[Region]] = {}
    for region in regions_of(program):
        prepare(program, region, order)
        found.setdefault(region.path, []).append(region)
    for regions in found.values():
        if len({region.digest for region in regions}) > 1:
            regions[0].digest = ""
    return found


# ---- finding what repeats --------------------------------------------------------------------------------------


def regions_of(program: Program) -> list[Region]:
    """Return every call of a module in the root graph; a module that contains another comes before it."""
    regions: dict[str, Region] = {}
    for node in program.graph.nodes:
        if node.op != "call_function" or isinstance(value_of(node), torch.SymInt):
            continue  # each block reads batch sizes from its own inputs
        ancestors: tuple[str, ...] = ()
        for depth, (path, module_class, call) in enumerate(node.meta.get("module_stack", ())):
            region = regions.get(call)
            if region is None:
                region = regions[call] = Region(call, path, module_class, depth, ancestors=ancestors)
            region.nodes.append(node)
            ancestors += (call,)
    return [region for region in regions.values() if region.path]


def _choose(program: Program, regions: list[Region], evaluated: Mapping[str, Sequence[Region]]) -> list[Region]:
    """Return all instances of the outermost repeated classes; no instance is inside another."""
    total = max(1, program.parameter_count())
    by_class: dict[str, list[Region]] = {}
    for region in regions:
        # One operator is no block; nor is one with casts around it, as autocast has them.
        operators = sum(operator_name(node) not in ("to", "detach") for node in region.nodes)
        if not region.module_class.startswith(_CONTAINERS) and operators > 1:
            by_class.setdefault(region.module_class, []).append(region)
    order = {node: index for index, node in enumerate(program.graph.nodes)}
    chosen: dict[str, Region] = {}
    enclosing: set[str] = set()
    for _, candidates in sorted(by_class.items(), key=lambda item: min(region.depth for region in item[1])):
        free = [
            region
            for region in candidates
            if not any(call in chosen for call in region.ancestors) and region.call not in enclosing
        ]
        calls = {region.call for region in free}
        free = [region for region in free if not any(call in calls for call in region.ancestors)]
        if len(free) < 2 or not _substantial(program, free, total):
            continue
        free = _alike([region for region in free if prepare(program, region, order)])
        free = [region for region in free if all(own.digest for own in evaluated.get(region.path, ()))]
        for region in free:
            region.digest += "".join(own.digest for own in evaluated.get(region.path, ())[:1])
        free = _undivided(program, free, regions)
        digests = [region.digest for region in free]
        if len(set(digests)) == len(digests):
            continue
        for region in free:
            chosen[region.call] = region
            enclosing.update(region.ancestors)
    return sorted(chosen.values(), key=lambda region: order[region.nodes[0]])


def _alike(found: Sequence[Region]) -> list[Region]:
    """Leave out modules whose calls differ (another flag, another length): a module has one class."""
    digests: dict[str, set[str]] = {}
    for region in found:
        digests.setdefault(region.path, set()).add(region.digest)
    return [region for region in found if len(digests[region.path]) == 1]


def _undivided(program: Program, found: Sequence[Region], regions: Sequence[Region]) -> list[Region]:
    """Leave out whole networks: stages begin inside them."""
    alike: dict[str, list[Region]] = {}
    for region in found:
        alike.setdefault(region.digest, []).append(region)
    networks = [group for group in alike.values() if len(group) > 1 and _are_networks(program, group, regions)]
    left_out = {region.call for group in networks for region in group}
    return [region for region in found if region.call not in left_out]


def _are_networks(program: Program, alike: Sequence[Region], regions: Sequence[Region]) -> bool:
    """Return whether regions that compute the same are networks: of being one module applied several times, containing layers, and
    standing side by side, two hold."""
    signs = (len({region.path for region in alike}) == 1) + _has_layers(program, alike[0], regions)
    return signs == 2 or (signs == 1 and side_by_side([region.nodes for region in alike]))


def _has_layers(program: Program, network: Region, regions: Sequence[Region]) -> bool:
    """Return whether ``network`` contains several instances of a class with at least two parameterised parts."""
    paths: dict[str, set[str]] = {}
    for region in regions:
        if (
            network.call in region.ancestors
            and not region.module_class.startswith(_CONTAINERS)
            and len(_owners(program, region)) > 1
        ):
            paths.setdefault(region.module_class, set()).add(region.path)
    return any(len(found) > 1 for found in paths.values())


def _owners(program: Program, region: Region) -> set[str]:
    """Return the modules below a region that hold parameters directly."""
    prefix = f"{region.path}."
    return {name.rpartition(".")[0] for name in program.parameters if name.startswith(prefix)}


def _attributes(program: Program, path: str) -> list[str]:
    """Return the names of parameters, buffers and constants below ``path``, relative to it."""
    prefix = path + "."
    names = dict.fromkeys((*program.parameters, *program.buffers, *program.constants))
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def _substantial(program: Program, regions: list[Region], total: int) -> bool:
    """Return whether regions deserve a definition: several parameterised parts, or a tenth of the model's parameters together."""
    region = regions[0]
    size = sum(info.numel for name, info in program.parameters.items() if is_below(name, region.path))
    return len(_owners(program, region)) > 1 or size * len(regions) * 10 > total


def prepare(program: Program, region: Region, order: dict[fx.Node, int]) -> bool:
    """Fill in inputs, outputs and digest; return False where the region can't be outlined."""
    inside = set(region.nodes)
    streams = [int(node.args[1]) for node in region.nodes if node.target is random_streams.stream]  # type: ignore[arg-type]
    region.first_stream = min(streams, default=None)
    region.inputs = []
    for node in region.nodes:
        for argument in node.all_input_nodes:
            local = argument.op == "get_attr" and is_below(str(argument.target), region.path)
            if argument not in inside and argument not in region.inputs and not local:
                region.inputs.append(argument)
    region.outputs = [node for node in region.nodes if any(user not in inside for user in node.users)]
    tensors = bool(region.outputs) and all(isinstance(value_of(node), Tensor) for node in region.outputs)
    if not tensors or not _convex(region, inside, order):
        return False
    region.digest = _digest(program, region)
    return True


def _convex(region: Region, inside: set[fx.Node], order: dict[fx.Node, int]) -> bool:
    """Return whether no path leaves the region and comes back."""
    first, last = order[region.nodes[0]], order[region.nodes[-1]]
    if last - first + 1 == len(region.nodes):
        return True
    after: set[fx.Node] = set()
    node = region.nodes[0]
    while node is not region.nodes[-1]:
        if node not in inside and any(argument in inside or argument in after for argument in node.all_input_nodes):
            after.add(node)
        if node in inside and any(argument in after for argument in node.all_input_nodes):
            return False
        node = node.next
    return not any(argument in after for argument in node.all_input_nodes)


def _digest(program: Program, region: Region) -> str:
    """Return the structural hash of a region; names and paths outside of it don't count."""
    index = {node: number for number, node in enumerate(region.nodes)}
    inputs = {node: number for number, node in enumerate(region.inputs)}

    def place(argument: fx.Node) -> Any:
        if argument in index:
            return _Place(("value", index[argument]))
        if argument in inputs:
            return _Place(("input", inputs[argument]))
        return _Place(("attribute", str(argument.target).removeprefix(region.path + ".")))

    digest = hashlib.sha256()
    for name in _attributes(program, region.path):
        info = program.tensor_info(f"{region.path}.{name}")
        shown = info.kind, info.shape, str(info.dtype), info.requires_grad, info.persistent
        digest.update(repr((name, shown)).encode())
    digest.update(repr(program.ties_below(region.path)).encode())  # instances of a class share its ties
    for node in region.inputs:
        digest.update(repr(_signature(node)).encode())
    for node in region.nodes:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), place)
        if node.target is random_streams.stream:
            args = (args[0], args[1] - (region.first_stream or 0))  # type: ignore[operator]
        paths = tuple(
            path.removeprefix(region.path) for path, _, _ in node.meta["module_stack"] if path.startswith(region.path)
        )
        digest.update(repr((str(node.target), args, sorted(kwargs.items()), _signature(node), paths)).encode())
    digest.update(repr([index[node] for node in region.outputs]).encode())
    return digest.hexdigest()


class _Place:
    """A node's place in the region; fx.map_arg would look into a tuple."""

    def __init__(self, place: tuple[str, object]) -> None:
        self.place = place

    def __repr__(self) -> str:
        return repr(self.place)


def _signature(node: fx.Node) -> Any:
    value = value_of(node)
    if isinstance(value, Tensor):
        return (tuple(str(size) for size in value.shape), str(value.dtype), batch_coefficients(node))
    return str(type(value))


# ---- names -----------------------------------------------------------------------------------------------------


def block_names(regions: list[Region]) -> dict[str, str]:
    """Map digests to class names: the user's class, with the variants' paths where there are several."""
    names: dict[str, str] = {}
    by_class: dict[str, dict[str, list[str]]] = {}
    for region in regions:
        simple = region.module_class.rpartition(".")[2]
        by_class.setdefault(simple, {}).setdefault(region.digest, []).append(region.path)
    for simple, variants in by_class.items():
        if len(variants) == 1:
            names[next(iter(variants))] = _free(simple, names.values())
            continue
        prefixes = {digest: _common_prefix(paths) for digest, paths in variants.items()}
        positions = max(len(prefix) for prefix in prefixes.values())
        shared = [
            position
            for position in range(positions)
            if all(position < len(prefix) for prefix in prefixes.values())
            and len({prefix[position] for prefix in prefixes.values()}) == 1
        ]
        for digest, prefix in prefixes.items():
            parts = [part for position, part in enumerate(prefix) if position not in shared]
            name = simple
            for part in parts:
                word = "".join(piece[:1].upper() + piece[1:] for piece in re.split(r"_|\W", part))
                name += f"_{word}" if word[:1].isdigit() and name[-1:].isdigit() else word
            names[digest] = _free(name, names.values())
    return names


def _free(name: str, taken: Collection[str]) -> str:
    """Return ``name``, changed where the emitted files have it already."""
    if re.fullmatch(r"Stage\d+", name) or name in RESERVED:
        name += "Block"
    while name in taken:
        name += "Variant"
    return name


def _common_prefix(paths: Iterable[str]) -> list[str]:
    split = [path.split(".") for path in paths]
    prefix: list[str] = []
    for parts in zip(*split):
        if len(set(parts)) > 1:
            break
        prefix.append(parts[0])
    return prefix


# ---- building --------------------------------------------------------------------------------------------------


def rebuilt(program: Program, chosen: list[Region], names: dict[str, str]) -> Program:
    """Return the program with a call in the place of each region; ``names``: those of their classes, by digest."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    owner = {node: region for region in chosen for node in region.nodes}
    blocks: dict[str, Block] = {}
    done: set[str] = set()
    drawn = {entry.name for entry in program.inputs if entry.role == "sample_keys"}
    keys = {node for node in program.graph.nodes if node.op == "placeholder" and node.target in drawn}

    def emit(node: fx.Node) -> None:
        """Copy ``node`` (or call its region) after what it needs."""
        if node in env:
            return
        region = owner.get(node)
        if region is None:
            for argument in node.all_input_nodes:
                emit(argument)
            env[node] = graph.node_copy(node, env.__getitem__)
            return
        if region.call in done:
            return
        for argument in region.inputs:
            emit(argument)
        done.add(region.call)
        _call(graph, region, names[region.digest], blocks, env, keys)

    for node in list(program.graph.nodes):
        emit(node)
    remove_dead_code(graph)
    return program.with_graph(graph, blocks=blocks)


def _call(
    graph: fx.Graph,
    region: Region,
    name: str,
    blocks: dict[str, Block],
    env: dict[fx.Node, fx.Node],
    keys: set[fx.Node],
) -> None:
    block_graph, used = _block_graph(region, keys)
    block = blocks.setdefault(name, Block(name, region.module_class, block_graph))
    block.instances.append(region.path)
    if len(block.instances) == 2:  # the first instance's inputs are named by what precedes all layers; use the second's
        placeholders = [node for node in block.graph.nodes if node.op == "placeholder"]
        for placeholder, own in zip(placeholders, [node for node in block_graph.nodes if node.op == "placeholder"]):
            placeholder.target = own.target
    arguments = []
    for node in used:
        if node in keys and region.first_stream is not None:
            own = graph.call_function(random_streams.stream, (env[node], region.first_stream))
            own.meta = dict(node.meta)
            arguments.append(own)
        else:
            arguments.append(env[node])
    call = graph.call_module(region.path, tuple(arguments))
    call.meta = {
        "block": name,
        "module_stack": _stack_up_to(region.nodes[0].meta["module_stack"], region.call),
        "source": region.outputs[-1].meta.get("source"),
    }
    if region.nodes[0].meta.get("stage_begins"):
        call.meta["stage_begins"] = True
    kept = ("val", "batch_coefficients", "types", "model_output")
    if len(region.outputs) == 1:
        (output,) = region.outputs
        call.meta |= {key: output.meta[key] for key in kept if key in output.meta} | _mark(region, output)
        env[output] = call
        return
    call.meta["val"] = tuple(value_of(output) for output in region.outputs)
    for position, output in enumerate(region.outputs):
        item = graph.call_function(operator.getitem, (call, position))
        item.meta = {key: output.meta[key] for key in ("source", *kept) if key in output.meta} | _mark(region, output)
        item.meta["module_stack"] = call.meta["module_stack"]
        env[output] = item


def _mark(region: Region, output: fx.Node) -> dict[str, Any]:
    """Return the mark of a result that the model returns, where a region ends with redistributing it."""
    value, inside = output, set(region.nodes) - set(region.outputs)
    while "transition" in value.meta and value.all_input_nodes[0] in inside:
        value = value.all_input_nodes[0]
    return {"model_output": value.meta["model_output"]} if "model_output" in value.meta else {}


def _stack_up_to(stack: tuple[tuple[str, str, str], ...], call: str) -> tuple[tuple[str, str, str], ...]:
    for position, entry in enumerate(stack):
        if entry[2] == call:
            return stack[: position + 1]
    return stack


def _block_graph(region: Region, keys: set[fx.Node]) -> tuple[fx.Graph, list[fx.Node]]:
    """Return the region as a separate graph, and the outer values it takes; it reads batch sizes from these."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    taken = [node for node in region.inputs if not isinstance(value_of(node), torch.SymInt)]
    names = unique_names(taken)
    for node in taken:
        env[node] = graph.placeholder(names[node])
        env[node].meta = dict(node.meta)
    for node in region.inputs:
        if node in taken:
            continue
        size = local_size(graph, [env[n] for n in taken], value_of(node))
        if size is None:
            taken.append(node)
            size = graph.placeholder(node.name)
            size.meta = dict(node.meta)
        env[node] = size

    def mapped(argument: fx.Node) -> fx.Node:
        if argument not in env:
            env[argument] = graph.get_attr(str(argument.target).removeprefix(region.path + "."))
            env[argument].meta = dict(argument.meta)
        return env[argument]

    for node in region.nodes:
        if node.target is random_streams.stream and node.args[0] in keys:
            offset = int(node.args[1]) - (region.first_stream or 0)  # type: ignore[arg-type]
            if offset == 0:
                env[node] = mapped(node.args[0])  # type: ignore[arg-type]
                continue
            env[node] = graph.call_function(random_streams.stream, (mapped(node.args[0]), offset))  # type: ignore[arg-type]
            env[node].meta = dict(node.meta)
            continue
        env[node] = graph.node_copy(node, mapped)
    results = tuple(env[node] for node in region.outputs)
    graph.output(results[0] if len(results) == 1 else results)
    return graph, taken


def local_size(graph: fx.Graph, tensors: list[fx.Node], size: Any) -> fx.Node | None:
    """Add a node that computes ``size`` (a multiple of the batch) from a dim of one of ``tensors``; None where none has it."""
    expected = multiple_of_batch(size)
    for tensor in tensors:
        value = value_of(tensor)
        if expected is None or not isinstance(value, Tensor):
            continue
        for dim, own in enumerate(value.shape):
            coefficient = size_coefficient(own)
            if coefficient is None or expected % coefficient:
                continue
            node = graph.call_function(_aten.sym_size.int, (tensor, dim))
            node.meta = {"val": own, "module_stack": tensor.meta.get("module_stack", ())}
            if expected != coefficient:
                node = graph.call_function(operator.mul, (node, expected // coefficient))
                node.meta = {"val": size, "module_stack": tensor.meta.get("module_stack", ())}
            return node
    return None
