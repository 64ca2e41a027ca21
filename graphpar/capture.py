"""Capture: from an ordinary model to a :class:`~graphpar.program.Program`.

    factory ──FakeTensorMode──► model ─┐
    example inputs ──flatten──► leaves ┴─ torch.export ─► training-IR graph ─► Program (get_attr parameters, named inputs)

The batch is traced as a symbol where the model allows it. Where it doesn't, the program is traced at a fixed
batch size, and once more at another one, so that every dim that follows the batch is still known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from graphpar.deferred import Tape
from graphpar.errors import GraphparError, near_match
from graphpar.program import Input, ModelSource, Output, Program, TensorInfo, size_coefficient
from graphpar.source import source_of

ModelLike = nn.Module | Callable[[], nn.Module]


@dataclasses.dataclass
class _Request:
    """Everything that a trace needs, so that it can be repeated at another batch size."""

    model: nn.Module
    mode: FakeTensorMode | None
    tape: Tape | None
    arguments_spec: TreeSpec
    leaves: list[Any]
    names: list[str]
    roles: list[str]
    batch_dims: list[int | None]
    batch: int
    loss_fn: Callable[..., Any] | None
    training: bool
    output_names: list[str] = dataclasses.field(default_factory=list)  # filled by the trace


def capture(
    model: ModelLike,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    targets: Sequence[Any] = (),
    batch_dims: Mapping[str, int | None] | None = None,
    mode: str | None = None,
    dtype: torch.dtype | None = None,
) -> Program:
    """Trace ``model`` (or what the factory ``model`` returns) on the example inputs. See :func:`graphpar.export`."""
    if mode not in (None, "train", "infer"):
        raise GraphparError(f"mode is {mode!r}; it must be 'train' or 'infer'.")
    built, fake, tape = build(model, dtype)
    if mode is not None:
        built.train(mode == "train")
    request = _request(built, fake, tape, tuple(args), dict(kwargs or {}), loss_fn, tuple(targets), batch_dims or {})
    request.training = mode != "infer"
    program = _trace(request)
    name = next((key for key, value in _DTYPE_NAMES.items() if value is dtype), None)
    program.source = ModelSource(model, tuple(args), dict(kwargs or {}), loss_fn, tuple(targets), name, mode)
    return program


_DTYPE_NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build(model: ModelLike, dtype: torch.dtype | None = None) -> tuple[nn.Module, FakeTensorMode | None, Tape | None]:
    """The module itself, or the factory's under fake tensors: no memory, whatever its size.

    Some constructors can't run on fake tensors (they read values, or copy modules); those run for real.
    """
    if isinstance(model, nn.Module):
        return _unwrapped(model), None, None
    if not callable(model):
        raise GraphparError(f"model is a {type(model).__name__}; it must be an nn.Module or a function that returns one.")
    fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    tape = Tape()
    with default_dtype(dtype):
        try:
            with fake, tape, _shared_by_copies(fake):
                built = model()
        except Exception:
            built, fake, tape = model(), cast(Any, None), cast(Any, None)
    if not isinstance(built, nn.Module):
        raise GraphparError(f"The model factory returned a {type(built).__name__}; it must return an nn.Module.")
    return _unwrapped(built), fake, tape


@contextlib.contextmanager
def _shared_by_copies(mode: FakeTensorMode) -> Iterator[None]:
    """Copies of fake tensors stay in ``mode`` (nn.Transformer deep-copies its layers)."""
    FakeTensorMode.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del FakeTensorMode.__deepcopy__  # type: ignore[attr-defined]


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of a DataParallel or DistributedDataParallel wrapper."""
    while type(model).__name__ in ("DataParallel", "DistributedDataParallel") and hasattr(model, "module"):
        model = cast(nn.Module, model.module)
    return model


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype or previous)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


# ---- inputs ----------------------------------------------------------------------------------------------------


def _request(
    model: nn.Module,
    fake: FakeTensorMode | None,
    tape: Tape | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: Callable[..., Any] | None,
    targets: tuple[Any, ...],
    batch_dims: Mapping[str, int | None],
) -> _Request:
    named = _bind(model, args, kwargs)
    leaves, spec = tree_flatten((args, kwargs, targets))
    names = _leaf_names(named, targets, loss_fn)
    if len(names) != len(leaves):  # a signature that can't be bound: positional names
        names = [f"input_{index}" for index in range(len(leaves))]
    is_target = [False] * len(tree_flatten((args, kwargs))[0]) + [True] * len(tree_flatten(targets)[0])
    tensor_names = [name for name, leaf in zip(names, leaves) if isinstance(leaf, Tensor)]
    unknown = [name for name in batch_dims if not any(_matches(name, known) for known in tensor_names)]
    if unknown:
        raise GraphparError(
            f"batch_dims names {unknown[0]!r}, which is no input.{near_match(unknown[0], tensor_names)} "
            f"The inputs are {', '.join(tensor_names)}."
        )
    batch = _batch_size(names, leaves, batch_dims)
    dims: list[int | None] = []
    for name, leaf in zip(names, leaves):
        given = next((dim for pattern, dim in batch_dims.items() if _matches(pattern, name)), "default")
        if not isinstance(leaf, Tensor):
            dims.append(None)
        elif given != "default":
            dims.append(cast("int | None", given))
        else:
            dims.append(0 if leaf.ndim and leaf.shape[0] == batch else None)
    roles = ["target" if flag else "input" for flag in is_target]
    return _Request(model, fake, tape, spec, leaves, names, roles, dims, batch, loss_fn, True)


def _matches(pattern: str, name: str) -> bool:
    return name == pattern or name.startswith(pattern + "_")


def _bind(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """(argument name, value) in the order in which the pytree of (args, kwargs) lists them."""
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    named: list[tuple[str, Any]] = []
    for index, value in enumerate(args):
        positional = parameters[index] if index < len(parameters) else None
        plain = positional is not None and positional.kind is not inspect.Parameter.VAR_POSITIONAL
        named.append((positional.name if plain and positional else f"input_{index}", value))
    return named + list(kwargs.items())


def _leaf_names(named: list[tuple[str, Any]], targets: tuple[Any, ...], loss_fn: Callable[..., Any] | None) -> list[str]:
    names: list[str] = []
    for name, value in named:
        names += _paths(name, value)
    wanted: list[str] = []
    if loss_fn is not None and targets:
        with contextlib.suppress(TypeError, ValueError):
            wanted = [p.name for p in inspect.signature(loss_fn).parameters.values() if p.kind is not p.VAR_POSITIONAL][1:]
    for index, value in enumerate(targets):
        fallback = "target" if len(targets) == 1 else f"target_{index}"
        names += _paths(wanted[index] if index < len(wanted) else fallback, value)
    unique: list[str] = []
    for name in names:
        candidate = name if name not in unique else f"{name}_target"
        while candidate in unique:
            candidate += "_again"
        unique.append(candidate)
    return unique


def _paths(name: str, value: Any) -> list[str]:
    """Names of the leaves of ``value``: ``name``, or ``name_key`` for containers."""
    leaves = torch.utils._pytree.tree_leaves_with_path(value)
    result = []
    for path, _ in leaves:
        parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
        text = "_".join([name, *parts])
        result.append("".join(char if char.isalnum() or char == "_" else "_" for char in text))
    return result


def _batch_size(names: list[str], leaves: list[Any], batch_dims: Mapping[str, int | None]) -> int:
    """The global batch of the example: from ``batch_dims`` where given, else dim 0 of the first tensor."""
    for pattern, dim in batch_dims.items():
        for name, leaf in zip(names, leaves):
            if dim is not None and _matches(pattern, name) and isinstance(leaf, Tensor):
                if not -leaf.ndim <= dim < leaf.ndim:
                    raise GraphparError(f"batch_dims gives dim {dim} for {name!r}, which has shape {tuple(leaf.shape)}.")
                return int(leaf.shape[dim])
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.ndim:
            return int(leaf.shape[0])
    raise GraphparError("None of the example inputs is a tensor with at least one dim; there is no batch to split.")


def _check_batch(request: _Request) -> None:
    for name, leaf, dim in zip(request.names, request.leaves, request.batch_dims):
        if dim is not None and leaf.shape[dim] != request.batch:
            raise GraphparError(
                f"Input {name!r} has {leaf.shape[dim]} rows on dim {dim}, but the batch is {request.batch}. "
                "Give batch_dims for inputs whose batch is on another dim."
            )


# ---- the trace -------------------------------------------------------------------------------------------------


class _Traced(nn.Module):
    """The model with its loss, over a flat list of input leaves."""

    def __init__(self, request: _Request) -> None:
        super().__init__()
        self.model = request.model
        object.__setattr__(self, "request", request)

    def forward(self, *tensors: Tensor) -> Any:
        request: _Request = self.request
        feed = iter(tensors)
        leaves = [next(feed) if isinstance(leaf, Tensor) else leaf for leaf in request.leaves]
        args, kwargs, targets = tree_unflatten(leaves, request.arguments_spec)
        output = self.model(*args, **kwargs)
        if request.training:
            if request.loss_fn is not None:
                loss = request.loss_fn(output, *targets)
                if isinstance(loss, Tensor) and loss.numel() != 1:
                    raise GraphparError(
                        f"loss_fn returned a tensor of shape {tuple(loss.shape)}; it must return a scalar."
                    )
            else:
                loss = own_loss(output)
            if loss is not None:
                if not isinstance(loss, Tensor):
                    raise GraphparError(f"loss_fn returned a {type(loss).__name__}; it must return a scalar tensor.")
                request.output_names[:] = ["loss"]
                return (loss.reshape(()) if loss.ndim else loss,)
        named = named_outputs(output)
        request.output_names[:] = [name for name, _ in named]
        return tuple(value for _, value in named)


def own_loss(output: Any) -> Tensor | None:
    """The loss that the model itself returns: a scalar output, or a ``loss`` in it."""
    if isinstance(output, Tensor):
        return output if output.ndim == 0 else None
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def named_outputs(output: Any) -> list[tuple[str, Tensor]]:
    if isinstance(output, Tensor):
        return [("output", output)]
    if isinstance(output, Mapping):
        items: list[tuple[str, Any]] = [(str(key), value) for key, value in output.items()]
    elif dataclasses.is_dataclass(output):
        items = [(f.name, getattr(output, f.name)) for f in dataclasses.fields(output)]
    else:
        items = [("output", output)]
    named = []
    for key, value in items:
        leaves = tree_flatten(value)[0]
        if any(not isinstance(leaf, Tensor | int | float | bool | type(None)) for leaf in leaves):
            kinds = {type(leaf).__name__ for leaf in leaves}
            raise GraphparError(
                f"The model's output {key!r} holds {', '.join(sorted(kinds))}; register it with torch.utils._pytree, "
                "or return tensors in tuples, lists, dicts or dataclasses."
            )
        for name, leaf in zip(_paths(key, value), leaves):
            if isinstance(leaf, Tensor):
                named.append((name, leaf))
    return named


def _trace(request: _Request) -> Program:
    _check_batch(request)
    symbolic_failure: Exception | None = None
    if any(dim is not None for dim in request.batch_dims):
        try:
            return _to_program(request, *_export(request, request.batch, symbolic=True), symbolic=True)
        except GraphparError:
            raise
        except Exception as error:
            symbolic_failure = error
    return _trace_static(request, request.batch, symbolic_failure)


def _trace_static(request: _Request, size: int, why: Exception | None) -> Program:
    """A trace at a fixed batch, with the dims that follow the batch found by comparing it with a second trace."""
    try:
        exported, notes = _export(request, size, symbolic=False)
    except GraphparError:
        raise
    except Exception as error:
        raise _explained(error) from error
    reason: str | None
    try:
        other = _export(request, size + 1, symbolic=False)[0]
        reason = _mark_batch(exported.graph, other.graph, size, size + 1)
    except Exception as error:
        reason = f"it can be traced only with {size} rows: {_first_line(error)}"
    program = _to_program(request, exported, notes, symbolic=False, size=size)
    program.unsplittable = reason
    program.retrace = functools.partial(_trace_static, request, why=why)
    if why is not None:
        program = program.warn(f"The batch size is fixed in the program (no symbolic trace: {_first_line(why)}).")
    return program


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(error).__name__


def _mark_batch(graph: fx.Graph, other: fx.Graph, size: int, other_size: int) -> str | None:
    """Sets ``batch_coefficients`` on ``graph``'s nodes from a trace at another size, or says why it can't."""
    nodes, others = list(graph.nodes), list(other.nodes)
    if [str(n.target) for n in nodes if n.op == "call_function"] != [
        str(n.target) for n in others if n.op == "call_function"
    ]:
        return f"its operators differ between {size} and {other_size} rows"
    for node, twin in zip(nodes, others):
        value, moved = node.meta.get("val"), twin.meta.get("val")
        if not isinstance(value, Tensor) or not isinstance(moved, Tensor):
            continue
        coefficients: list[int | None] = []
        for here, there in zip(value.shape, moved.shape):
            step = int(there) - int(here)
            if step == 0:
                coefficients.append(None)
            elif int(here) == step * size:
                coefficients.append(step)
            else:
                return f"{node.name} has {int(here)} rows for a batch of {size} and {int(there)} for {other_size}"
        node.meta["batch_coefficients"] = tuple(coefficients)
    return None


def _export(request: _Request, size: int, *, symbolic: bool) -> tuple[ExportedProgram, list[str]]:
    traced = _Traced(request)
    dims: list[dict[int, Any] | None] = []
    example: list[Tensor] = []
    trace_size = max(2, size) if symbolic else size
    batch = Dim("batch", min=1 if not symbolic else 2) if symbolic else None
    for leaf, dim in zip(request.leaves, request.batch_dims):
        if not isinstance(leaf, Tensor):
            continue
        shape = list(leaf.shape)
        if dim is not None:
            shape[dim] = trace_size
        example.append(_example(leaf, shape, request.mode))
        dims.append({dim % leaf.ndim: batch} if symbolic and dim is not None else None)
    training = [module.training for module in traced.modules()]
    notes: list[str] = []
    with warnings.catch_warnings(), _watch_erased_regions(notes, request.training):
        warnings.simplefilter("ignore")
        exported = torch.export.export(
            traced, tuple(example), dynamic_shapes={"tensors": tuple(dims)} if symbolic else None, strict=False
        )
    assert training == [module.training for module in traced.modules()]
    return exported, notes


def _example(leaf: Tensor, shape: list[int], mode: FakeTensorMode | None) -> Tensor:
    """A tensor of its own for each input (one object given twice would be merged into one graph input)."""
    make = functools.partial(torch.zeros, shape, dtype=leaf.dtype, requires_grad=False)
    if mode is None:
        return make()
    with mode:
        return make()


@contextlib.contextmanager
def _watch_erased_regions(notes: list[str], training: bool) -> Iterator[None]:
    """Notices what a trace would silently lose: custom backwards and the user's own checkpoint regions."""
    function_apply: Any = vars(torch.autograd.Function)["apply"]  # the descriptor: a bound method would fix the class
    checkpoint_regions = torch.utils.checkpoint._checkpoint_without_reentrant_generator

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is torch.utils.checkpoint.CheckpointFunction:
            notes.append("checkpoint")
        elif training and not cls.__module__.startswith("torch."):
            raise GraphparError(
                f"The model uses the custom autograd.Function {cls.__module__}.{cls.__qualname__}, whose backward a "
                "trace would lose. Register it as an operator instead: torch.library.custom_op for the forward, and "
                "register_autograd for the backward."
            )
        return function_apply.__func__(cls, *args, **kwargs)

    def regions(*args: Any, **kwargs: Any) -> Any:
        notes.append("checkpoint")
        return checkpoint_regions(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    torch.utils.checkpoint._checkpoint_without_reentrant_generator = regions
    try:
        yield
    finally:
        torch.autograd.Function.apply = function_apply
        torch.utils.checkpoint._checkpoint_without_reentrant_generator = checkpoint_regions


def _explained(error: Exception) -> GraphparError:
    """torch.export's failure in the user's terms."""
    kind, text = type(error).__name__, str(error)
    if "GuardOnDataDependent" in kind or "data-dependent" in text.lower() or "DynamicOutputShape" in kind:
        what = (
            "The model's control flow or a tensor's size depends on values of tensors, which a trace can't follow. "
            "Use torch.where, torch.cond or a fixed size there"
        )
        user = [line.strip() for line in text.splitlines() if line.strip().startswith("File ")]
        return GraphparError(f"{what}{': ' + user[-1] if user else ''}. ({kind}: {_first_line(error)})")
    return GraphparError(f"torch.export could not trace the model ({kind}): {text.strip()[:1500]}")


# ---- from ExportedProgram to Program ---------------------------------------------------------------------------


def _to_program(
    request: _Request,
    exported: ExportedProgram,
    notes: list[str],
    *,
    symbolic: bool,
    size: int | None = None,
) -> Program:
    model = request.model
    parameters, ties = _parameters(model)
    buffers = _buffers(model)
    placeholders, constants = _lifted(exported)
    graph = _unlifted_graph(exported, placeholders, request, parameters, ties)
    tensors = [(n, r, d, leaf) for n, r, d, leaf in zip(request.names, request.roles, request.batch_dims, request.leaves)
               if isinstance(leaf, Tensor)]
    inputs = tuple(
        Input(name, tuple(leaf.shape), leaf.dtype, dim, role, _value_range(leaf)) for name, role, dim, leaf in tensors
    )
    output_node = next(iter(reversed(graph.nodes)))
    outputs = tuple(
        Output(name, _batch_dim(node)) for name, node in zip(request.output_names, cast(Any, output_node.args[0]))
    )
    program = Program(
        name=type(model).__name__,
        mode="train" if request.output_names == ["loss"] and request.training else "infer",
        graph=graph,
        parameters=parameters,
        buffers=buffers,
        constants=_values(request, constants, buffers, exported),
        ties=ties,
        inputs=inputs,
        outputs=outputs,
        batch=size or request.batch,
        symbolic=symbolic,
        unsplittable=None if symbolic else "unknown",
        module_classes={name: _class_name(module) for name, module in model.named_modules()},
        subgraphs={
            name: module for name, module in exported.graph_module.named_children() if isinstance(module, fx.GraphModule)
        },
    )
    if "checkpoint" in notes:
        program = program.warn(
            f"The model's {notes.count('checkpoint')} activation-checkpoint regions are ignored: the trace erases them, "
            "so their activations are kept."
        )
    return program


def _value_range(leaf: Tensor) -> tuple[int, int]:
    """Smallest and largest value of an integer example, for random batches of its kind."""
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


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _parameters(model: nn.Module) -> tuple[dict[str, TensorInfo], tuple[tuple[str, ...], ...]]:
    infos: dict[str, TensorInfo] = {}
    owners: dict[int, list[str]] = {}
    storages: dict[int, tuple[int, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        infos[name] = TensorInfo(tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        owners.setdefault(id(parameter), []).append(name)
        storage = int(torch._C._storage_id(parameter))
        first, first_name = storages.setdefault(storage, (id(parameter), name))
        if first != id(parameter) and parameter.numel():
            raise GraphparError(
                f"Parameters {first_name!r} and {name!r} share memory but are two Parameter objects, so an optimizer would "
                "update that memory twice. Tie them by assigning the same Parameter."
            )
    return infos, tuple(tuple(names) for names in owners.values() if len(names) > 1)


def _buffers(model: nn.Module) -> dict[str, TensorInfo]:
    infos = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None:
                full = f"{prefix}.{name}" if prefix else name
                persistent = name not in module._non_persistent_buffers_set
                infos[full] = TensorInfo(tuple(buffer.shape), buffer.dtype, False, persistent, "buffer")
    return infos


def _lifted(exported: ExportedProgram) -> tuple[dict[str, tuple[InputKind, str]], dict[str, Any]]:
    """What each placeholder stands for, and the constants that the trace lifted, by a readable name."""
    placeholders: dict[str, tuple[InputKind, str]] = {}
    constants: dict[str, Any] = {}
    for spec in exported.graph_signature.input_specs:
        target = spec.target or ""
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            target = target.removeprefix("model.")
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            value = exported.constants[target]
            target = target.removeprefix("model.").replace("lifted_tensor", "constant")
            constants[target] = value
        placeholders[spec.arg.name] = (spec.kind, target)
    return placeholders, constants


def _unlifted_graph(
    exported: ExportedProgram,
    placeholders: dict[str, tuple[InputKind, str]],
    request: _Request,
    parameters: dict[str, TensorInfo],
    ties: tuple[tuple[str, ...], ...],
) -> fx.Graph:
    """The exported graph with parameters and buffers as ``get_attr`` and inputs under the user's names.

    torch.export merges tied parameters into one input. Each use gets back the name that its own module gives it.
    """
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    stacks: dict[tuple[str, ...], tuple[tuple[str, str, str], ...]] = {}
    attributes: dict[str, fx.Node] = {}
    tied = {name: group for group in ties for name in group}
    input_names = iter([name for name, leaf in zip(request.names, request.leaves) if isinstance(leaf, Tensor)])
    inputs = [node for node in exported.graph.nodes
              if node.op == "placeholder" and placeholders[node.name][0] is InputKind.USER_INPUT]
    for node in inputs:
        name = next(input_names)
        env[node] = graph.placeholder(name)
        env[node].meta = _kept_meta(node, stacks)

    def attribute(node: fx.Node, user: fx.Node) -> fx.Node:
        target = placeholders[node.name][1]
        if target in tied:
            target = _alias_used_by(user, tied[target])
        if target not in attributes:
            with _inserted_after_inputs(graph, attributes, env):
                attributes[target] = graph.get_attr(target)
            attributes[target].meta = _kept_meta(node, stacks)
        return attributes[target]

    def mapped(argument: fx.Node, user: fx.Node) -> fx.Node:
        return env[argument] if argument in env else attribute(argument, user)

    for node in exported.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            graph.output(fx.map_arg(node.args[0], functools.partial(mapped, user=node)))
            continue
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), functools.partial(mapped, user=node))
        env[node] = graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        env[node].meta = _kept_meta(node, stacks)
    return graph


@contextlib.contextmanager
def _inserted_after_inputs(graph: fx.Graph, attributes: dict[str, fx.Node], env: dict[fx.Node, fx.Node]) -> Iterator[None]:
    """Parameters stand before all operators, in the order of their first use."""
    last = next(reversed(attributes.values()), None)
    if last is None:
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        last = inputs[-1] if inputs else None
    with graph.inserting_after(last):
        yield


def _alias_used_by(user: fx.Node, names: tuple[str, ...]) -> str:
    """The one of a tied parameter's names that lies in the module which uses it here."""
    for path, _ in reversed(list((user.meta.get("nn_module_stack") or {}).values())):
        path = path.removeprefix("model").removeprefix(".")
        for name in names:
            if path and name.startswith(path + "."):
                return name
    return names[0]


def _kept_meta(node: fx.Node, stacks: dict[tuple[str, ...], tuple[tuple[str, str, str], ...]]) -> dict[str, Any]:
    """The metadata that passes use: the value, the module stack as (path, class, call) and the user's source line."""
    meta = {key: node.meta[key] for key in ("val", "batch_coefficients") if key in node.meta}
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
    if "stack_trace" in node.meta and node.meta["stack_trace"]:
        meta["source"] = source_of(node.meta["stack_trace"])
    return meta


def _values(
    request: _Request, lifted: dict[str, Any], buffers: dict[str, TensorInfo], exported: ExportedProgram
) -> dict[str, Tensor]:
    """Real values of lifted constants and of non-persistent buffers."""
    wanted: dict[str, Any] = dict(lifted)
    for name, info in buffers.items():
        if not info.persistent:
            wanted[name] = request.model.get_buffer(name)
    real = {name: value for name, value in wanted.items() if not isinstance(value, FakeTensor)}
    fake = {name: value for name, value in wanted.items() if isinstance(value, FakeTensor)}
    known = {name: value.constant for name, value in fake.items() if value.constant is not None}
    unknown = {name: value for name, value in fake.items() if name not in known}
    if unknown:
        assert request.tape is not None
        try:
            known.update(zip(unknown, request.tape.materialize(list(unknown.values()))))
        except KeyError as error:
            raise GraphparError(
                f"The values of {', '.join(unknown)} could not be computed without building the model for real; pass a "
                "built model instead of a factory."
            ) from error
    return {name: (real | known)[name].detach().clone() for name in wanted}
