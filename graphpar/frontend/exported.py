"""From torch's ``ExportedProgram`` to a :class:`~graphpar.ir.program.Program`.

placeholders of parameters and buffers ──► get_attr, by the user's names (each tied use by its own module's)
placeholders of inputs                 ──► placeholders, by the user's argument names
lifted constants                       ──► Program.constants, with real values
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from graphpar.errors import GraphparError
from graphpar.frontend.branches import flag, free_flag, marked
from graphpar.frontend.build import SEED
from graphpar.frontend.checkpoint_regions import Regions
from graphpar.frontend.fixed_size import NUMBERS, TWIN
from graphpar.frontend.precision import cast_parameters, kept_modules
from graphpar.frontend.signature import Request
from graphpar.ir.batch_sizes import size_coefficient
from graphpar.ir.precision import Precision
from graphpar.ir.program import (
    Branch,
    Input,
    Output,
    Program,
    TensorInfo,
    ancestors,
    is_plain,
    memory_of,
    set_model_outputs,
)
from graphpar.ir.source import source_of
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.option_kinds import GENERATE, INFER, TRAIN
from graphpar.runtime.stages.batches import PLAIN
from graphpar.text import is_below


class NeedsValuesError(GraphparError):
    """The model must be built with values, since the program holds some that can't be computed alone."""


def to_program(
    request: Request,
    exported: ExportedProgram,
    regions: Regions,
    *,
    symbolic: bool,
    size: int | None = None,
) -> Program:
    """Make a :class:`Program` of a trace, with the user's names.

    Args:
        regions: what the model runs under ``torch.utils.checkpoint``, which the trace does not show.
        symbolic: the batch size is a symbol in the trace; else it is the number ``size``.
    """
    model = request.model
    trains = request.output_names == ["loss"] and request.training
    mode = TRAIN if trains else GENERATE if request.module_mode == GENERATE else INFER
    parameters, ties = _parameters(model)
    parameters, stored = _as_read(model, parameters, request.precision.resolved(mode))
    buffers = _buffers(model)
    placeholders, constants = _lifted(exported)
    branches: dict[str, Branch] = {}
    graph = _unlifted_graph(exported, placeholders, request, ties, {*parameters, *buffers}, branches)
    shared = _shared_buffers(model, graph)
    regions.check(graph)
    buffers = {name: info for name, info in buffers.items() if not any(name in names[1:] for names in shared)}
    tensors = [
        (n, r, d, leaf)
        for n, r, d, leaf in zip(request.names, request.roles, request.batch_dims, request.leaves)
        if isinstance(leaf, Tensor)
    ]
    inputs = tuple(
        Input(name, tuple(leaf.shape), leaf.dtype, dim, role, _value_range(leaf)) for name, role, dim, leaf in tensors
    )
    output_node = graph.output_node()
    outputs = tuple(
        Output(name, _batch_dim(node)) for name, node in zip(request.output_names, cast(Any, output_node.args[0]))
    )
    read = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    values, drawn = _lifted_values(request, constants, buffers, read)
    buffers |= {name: TensorInfo((), torch.bool, False, False, "buffer") for name in branches}
    values |= {name: torch.zeros((), dtype=torch.bool) for name in branches}
    program = Program(
        name=type(model).__name__,
        mode=mode,
        graph=graph,
        parameters=parameters,
        buffers=buffers,
        constants=values,
        ties=ties + shared,
        inputs=inputs,
        outputs=outputs,
        batch=size or request.batch,
        symbolic=symbolic,
        unsplittable=None if symbolic else "unknown",
        module_classes={
            name: f"{type(module).__module__}.{type(module).__qualname__}"
            for name, module in model.named_modules(remove_duplicate=False)
        },
        subgraphs={
            name: module
            for name, module in exported.graph_module.named_children()
            if isinstance(module, fx.GraphModule)
        },
        stored=stored,
        plain={name: leaf for name, leaf in zip(request.names, request.leaves) if isinstance(leaf, PLAIN)},
        regions=tuple(dict.fromkeys(regions.paths)),
        branches=branches,
        returned=tuple(request.returned) if trains else (),
    )
    program = program.warn(*_branch_lines(branches.values()))
    if drawn:
        names = ", ".join(drawn)
        program = program.warn(
            f"The model draws {names} at random, which no weights file holds: the program has what it draws after "
            f"torch.manual_seed({SEED}). Register it without persistent=False to keep what a run began with."
        )
    return program


def _branch_lines(branches: Iterable[Branch]) -> Iterator[str]:
    """Say which branches on values the program has; a line in several modules once."""
    modules: dict[Branch, list[str]] = {}
    for branch in branches:
        modules.setdefault(replace(branch, module=""), []).append(branch.module)
    for branch, names in modules.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        place = ", ".join(filter(None, (names[0] + more, branch.line)))
        yield (
            f"`{branch.condition}`{f' ({place})' if place else ''} is {branch.taken} for the example inputs: the program has this branch "
            "alone, checks it in every microbatch, and ends a step with an error where it is another."
        )


def _value_range(leaf: Tensor) -> tuple[int, int]:
    """Find the smallest and largest value of an integer example, for random batches of its kind."""
    known = not isinstance(leaf, FakeTensor) and leaf.device.type != "meta" and leaf.numel() > 0
    if leaf.is_floating_point() or leaf.is_complex() or leaf.dtype is torch.bool or not known:
        return (0, 1)
    return int(leaf.min()), int(leaf.max())


def _batch_dim(node: Any) -> int | None:
    if not isinstance(node, fx.Node):
        return None
    known = node.meta.get("batch_coefficients")
    value = node.meta.get("val")
    if known is None and isinstance(value, Tensor):
        known = tuple(size_coefficient(size) for size in value.shape)
    return next((dim for dim, coefficient in enumerate(known or ()) if coefficient is not None), None)


def _parameters(model: nn.Module) -> tuple[dict[str, TensorInfo], tuple[tuple[str, ...], ...]]:
    infos: dict[str, TensorInfo] = {}
    owners: dict[int, list[str]] = {}
    storages: dict[int, list[tuple[int, int, int, str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        infos[name] = TensorInfo(tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        owners.setdefault(id(parameter), []).append(name)
        begin, end = _span(parameter)
        taken = storages.setdefault(memory_of(parameter), [])
        for other_begin, other_end, other, first_name in taken if parameter.numel() else ():
            if other != id(parameter) and begin < other_end and other_begin < end:
                raise GraphparError(
                    f"Parameters {first_name!r} and {name!r} share memory but are two Parameter objects, so an optimizer would "
                    "update that memory twice. Tie them by assigning the same Parameter."
                )
        taken.append((begin, end, id(parameter), name))
    return infos, tuple(tuple(names) for names in owners.values() if len(names) > 1)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first element of its storage that ``tensor`` may use, and the one behind the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    begin = int(tensor.storage_offset())
    return begin, begin + int(last) + 1


def _as_read(
    model: nn.Module, parameters: dict[str, TensorInfo], precision: Precision
) -> tuple[dict[str, TensorInfo], dict[str, torch.dtype]]:
    """Describe the parameters in the dtypes in which the trace reads them, and list in which others they are stored."""
    if not precision.casts:
        return parameters, {}
    cast = cast_parameters(model, precision)
    names = [name for name, each in model.named_parameters(remove_duplicate=False) if id(each) in cast]
    kept = kept_modules(model, precision.keep_fp32)
    parameters = parameters | {
        f"{path}.{name}": replace(parameters[f"{path}.{name}"], dtype=torch.float32)
        for path, module in kept.items()
        for name, each in module.named_parameters(remove_duplicate=False)
        if each.is_floating_point()
    }
    read = {name: replace(parameters[name], dtype=precision.computed) for name in names}
    if precision.stored == precision.computed:
        return parameters | read, {}
    trained = [
        name for name in names if parameters[name].requires_grad
    ]  # a frozen one is never stepped, so it needs no main copy
    return parameters | read, dict.fromkeys(trained, precision.stored)


def _buffers(model: nn.Module) -> dict[str, TensorInfo]:
    infos = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and is_plain(buffer):
                full = f"{prefix}.{name}" if prefix else name
                persistent = name not in module._non_persistent_buffers_set
                infos[full] = TensorInfo(tuple(buffer.shape), buffer.dtype, False, persistent, "buffer")
    return infos


def _shared_buffers(model: nn.Module, graph: fx.Graph) -> tuple[tuple[str, ...], ...]:
    """List the names of each persistent buffer that has several, the one that the trace reads first."""
    read = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    saved, owners = model.state_dict(keep_vars=True), dict[int, list[str]]()
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in saved:
            owners.setdefault(id(buffer), []).append(name)
    groups = (sorted(names, key=lambda name: name not in read) for names in owners.values() if len(names) > 1)
    return tuple(tuple(names) for names in groups if names[1] not in read)


def _lifted(exported: ExportedProgram) -> tuple[dict[str, tuple[InputKind, str]], dict[str, Any]]:
    """What each placeholder is, and the constants that the trace lifted, by a readable name."""
    placeholders: dict[str, tuple[InputKind, str]] = {}
    constants: dict[str, Any] = {}
    count: dict[str, int] = {}
    for spec in exported.graph_signature.input_specs:
        target = spec.target or ""
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            target = target.removeprefix("model.")
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            value = exported.constants[target]
            prefix, dot, name = target.removeprefix("model.").rpartition(".")
            if name.startswith("lifted_tensor"):  # numbered within its module, so that layers stay equal
                count[prefix] = count.get(prefix, -1) + 1
                name = f"constant_{count[prefix]}"
            target = prefix + dot + name
            constants[target] = value
        placeholders[spec.arg.name] = (spec.kind, target)
    return placeholders, constants


def _unlifted_graph(
    exported: ExportedProgram,
    placeholders: dict[str, tuple[InputKind, str]],
    request: Request,
    ties: tuple[tuple[str, ...], ...],
    known: set[str],
    branches: dict[str, Branch],
) -> fx.Graph:
    """The exported graph with parameters and buffers as ``get_attr`` and inputs under the user's names.

    torch.export merges tied parameters into one input. Each use gets back the name that its own module gives it.

    Args:
        known: the names of parameters and buffers.
        branches: filled with those that the trace has marked.
    """
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    stacks: dict[tuple[str, ...], tuple[tuple[str, str, str], ...]] = {}
    attributes: dict[str, fx.Node] = {}
    tied = {name: group for group in ties for name in group}
    input_names = iter([name for name, leaf in zip(request.names, request.leaves) if isinstance(leaf, Tensor)])
    inputs = [
        node
        for node in exported.graph.nodes
        if node.op == "placeholder" and placeholders[node.name][0] is InputKind.USER_INPUT
    ]
    for node in inputs:
        name = next(input_names)
        env[node] = graph.placeholder(name)
        env[node].meta = kept_meta(node, stacks)

    def attribute(node: fx.Node, user: fx.Node) -> fx.Node:
        target = placeholders[node.name][1]
        if target in tied:
            target = alias_used_in(kept_meta(user, stacks)["module_stack"], tied[target])
        if target not in attributes:
            with _inserted_after_inputs(graph, attributes):
                attributes[target] = graph.get_attr(target)
            attributes[target].meta = kept_meta(node, stacks)
        return attributes[target]

    def mapped(argument: fx.Node, user: fx.Node) -> fx.Node:
        return env[argument] if argument in env else attribute(argument, user)

    for node in exported.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            results: Any = fx.map_arg(node.args[0], functools.partial(mapped, user=node))
            graph.output(results[: len(request.output_names)])
            needed = ancestors(graph.output_node())
            returned = results[len(request.output_names) :]
            set_model_outputs(
                graph, [value if value in needed and value.op == "call_function" else None for value in returned]
            )
            continue
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), functools.partial(mapped, user=node))
        if (mark := marked(node)) is not None:
            meta = {key: value for key, value in kept_meta(node, stacks).items() if key != "val"}
            module = meta["module_stack"][-1][0] if meta["module_stack"] else ""
            name = free_flag(module, known | branches.keys())
            branches[name] = Branch(module, mark[2], mark[1], mark[0])
            condition = mapped(node.args[0], node)
            with _inserted_after_inputs(graph, attributes):
                attributes[name] = graph.get_attr(name)
            attributes[name].meta = {
                "val": torch.zeros_like(condition.meta["val"]),
                "module_stack": meta["module_stack"],
            }
            flag(graph, condition, attributes[name], mark[0], meta)
            continue
        numbers = node.meta.get(NUMBERS, {})
        sizes = {place: _batch_number(graph, request, env, inputs, factor) for place, factor in numbers.items()}
        env[node] = graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        env[node].meta = kept_meta(node, stacks)
        for place, number in sizes.items():
            if isinstance(place, int):
                env[node].update_arg(place, number)
            else:
                env[node].update_kwarg(place, number)
    return graph


def _batch_number(
    graph: fx.Graph, request: Request, env: dict[fx.Node, fx.Node], inputs: list[fx.Node], factor: int
) -> fx.Node:
    """``factor`` times the batch size, read off an input: in a fixed-size trace it is a literal."""
    dims = [dim for leaf, dim in zip(request.leaves, request.batch_dims) if isinstance(leaf, Tensor)]
    source, dim = next((node, dim) for node, dim in zip(inputs, dims) if dim is not None)
    size = graph.call_function(torch.ops.aten.sym_size.int, (env[source], dim))
    size.meta = {"val": int(source.meta["val"].shape[dim]), "batch_factor": 1, "module_stack": ()}
    if factor == 1:
        return size
    product = graph.call_function(operator.mul, (size, factor))
    product.meta = {"val": size.meta["val"] * factor, "batch_factor": factor, "module_stack": ()}
    return product


@contextlib.contextmanager
def _inserted_after_inputs(graph: fx.Graph, attributes: dict[str, fx.Node]) -> Iterator[None]:
    """Move parameters before all operators, in the order of their first use."""
    last = next(reversed(attributes.values()), None)
    if last is None:
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        last = inputs[-1] if inputs else None
    with graph.inserting_after(last):
        yield


def alias_used_in(stack: tuple[tuple[str, str, str], ...], names: tuple[str, ...]) -> str:
    """Choose, of a tied parameter's names, that in the module which uses it: the innermost of ``stack`` that has one."""
    for path, _, _ in reversed(stack):
        for name in names:
            if path and is_below(name, path):
                return name
    return names[0]


def kept_meta(node: fx.Node, stacks: dict[tuple[str, ...], tuple[tuple[str, str, str], ...]]) -> dict[str, Any]:
    """Collect the metadata that passes use: the value, the module stack as (path, class, call) and the user's source line."""
    meta: dict[str, Any] = {key: node.meta[key] for key in ("val", "batch_coefficients", TWIN) if key in node.meta}
    stack = node.meta.get("nn_module_stack") or {}
    key = tuple(stack)
    if key not in stacks:
        entries = []
        for call, (path, cls) in stack.items():
            if path.startswith("model.") or path == "model":
                name = cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"
                entries.append((path.removeprefix("model").removeprefix("."), name, call))
        stacks[key] = tuple(entries)
    meta["module_stack"] = stacks[key]
    if node.meta.get("stack_trace"):
        meta["source"] = source_of(node.meta["stack_trace"])
    return meta


def _lifted_values(
    request: Request, lifted: dict[str, Any], buffers: dict[str, TensorInfo], read: set[str]
) -> tuple[dict[str, Tensor], list[str]]:
    """Return values of lifted constants and of non-persistent buffers, and the names of those ``read`` that are drawn at random.

    Raises:
        GraphparError: one has no values; or it is read, and has whatever its memory held.
    """
    required: dict[str, Any] = dict(lifted)
    for name, info in buffers.items():
        if not info.persistent:
            required[name] = request.model.get_buffer(name)
    constants_of = {name: getattr(value, "constant", None) for name, value in required.items()}
    known = {name: value for name, value in constants_of.items() if value is not None}
    unknown = {name: value for name, value in required.items() if name not in known}
    unwritten, drawn = list[str](), list[str]()
    if request.recorder is not None:
        try:
            unknown, unwritten, drawn = request.recorder.certain(unknown)
        except RuntimeProgramError as error:
            raise NeedsValuesError(
                f"The values of {', '.join(unknown)} could not be computed without building the model for real: {error}. "
                "Pass a built model instead of a factory."
            ) from error
    if unwritten := [name for name in unwritten if name in read]:
        owner = request.model.get_submodule(unwritten[0].rpartition(".")[0])
        raise GraphparError(
            f"{unwritten[0]!r} of {type(owner).__name__} holds whatever was in memory: what builds the model makes it by "
            "torch.empty, to_empty or the like, and writes nothing to it. No weights file holds it, so write its values after "
            "that, or register it without persistent=False."
        )
    return {name: (known | unknown)[name].detach().clone() for name in required}, [
        name for name in drawn if name in read
    ]
