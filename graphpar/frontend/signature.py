"""What a trace takes and returns: leaves of the user's arguments and targets, their names and batch dims; the loss, and outputs by name.

A program for generation is traced with the model's tokens alone, and their positions as what varies:

    input_ids [4, 1024], labels, attention_mask  ──►  input_ids [4, s]      s: the positions of a window

Labels and masks of padding are left out: they have defaults in the model's forward, or it can't generate.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import keyword
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_leaves_with_path

from graphpar.errors import GraphparError, near_match
from graphpar.frontend.between_steps import Assigned
from graphpar.frontend.fixed_size import LiteralSizes
from graphpar.ir.lengths import Lengths
from graphpar.ir.precision import Precision
from graphpar.ir.program import ModelSource
from graphpar.runtime.option_kinds import GENERATE, INFER
from graphpar.runtime.stages.batches import leaf_paths
from graphpar.runtime.stages.deferred import Recorder

RESERVED = ("sample_keys", "step_key", "self")  # names of inputs that graphpar adds


@dataclasses.dataclass
class Request:
    """Everything that a trace needs, so that it can be repeated at another batch size."""

    model: nn.Module
    mode: FakeTensorMode | None
    recorder: Recorder | None
    arguments_spec: TreeSpec
    leaves: list[Any]
    names: list[str]
    roles: list[str]
    batch_dims: list[int | None]
    batch: int
    loss_fn: Callable[..., Any] | None
    training: bool  # whether the loss is traced, too
    precision: Precision = dataclasses.field(default_factory=Precision)
    module_mode: str | None = None  # train | infer: what the modules are set to while they are traced
    still: dict[str, str] = dataclasses.field(
        default_factory=dict
    )  # modules that train() leaves in evaluation mode; filled by the trace
    takes_scalar: bool = True  # whether the only scalar in the model's output that needs a gradient is its loss
    scalar: str | None = None  # that one; filled by the trace
    scalars: list[str] = dataclasses.field(default_factory=list)  # several that may be the loss; filled by the trace
    output_names: list[str] = dataclasses.field(default_factory=list)  # filled by the trace
    returned: list[str] = dataclasses.field(default_factory=list)  # the same: what comes after the loss
    assigned: list[Assigned] = dataclasses.field(default_factory=list)  # filled by the trace: what the forward assigned
    unread: Mapping[int, Any] = dataclasses.field(
        default_factory=dict
    )  # what stands in the place of leaves that may not be read
    literals: LiteralSizes | None = None  # of traces at a fixed size


def make_request(
    source: ModelSource,
    model: nn.Module,
    fake: FakeTensorMode | None,
    recorder: Recorder | None,
    batch_dims: Mapping[str, int | None],
) -> Request:
    """Flatten example arguments and targets into named leaves, and find the batch size and each leaf's batch dim.

    Args:
        model: as :func:`graphpar.frontend.build.build` made it, with its fake mode and recorder.

    Raises:
        GraphparError: arguments don't fit the model or the loss, or no batch can be found.
    """
    args, kwargs, loss_fn, targets = source.args, dict(source.kwargs), source.loss_fn, source.targets
    _check_targets(loss_fn, targets)
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
            f"batch_dims names {unknown[0]!r}, which is not an input.{near_match(unknown[0], tensor_names)} "
            f"The inputs are {', '.join(tensor_names)}."
        )
    batch = _batch_size(names, leaves, batch_dims)
    dims: list[int | None] = []
    for name, leaf in zip(names, leaves):
        given = next((dim for pattern, dim in batch_dims.items() if _matches(pattern, name)), "default")
        if not isinstance(leaf, Tensor):
            dims.append(None)
        elif given != "default":
            dims.append(None if given is None else _checked_dim(name, leaf, cast(int, given)))
        else:
            dims.append(0 if leaf.ndim and leaf.shape[0] == batch else None)
    roles = ["target" if flag else "input" for flag in is_target]
    training = source.mode not in (INFER, GENERATE)
    return Request(
        model, fake, recorder, spec, leaves, names, roles, dims, batch, loss_fn, training, source.precision, source.mode
    )


def _check_targets(loss_fn: Callable[..., Any] | None, targets: tuple[Any, ...]) -> None:
    """Check that ``loss_fn`` can be called with the model's output and the targets."""
    forward = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    if forward is None:
        return
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    try:
        signature.bind(None, *targets)
    except TypeError as error:
        count = f"{len(targets)} target{'s' if len(targets) != 1 else ''}"
        raise GraphparError(
            f"loss_fn is called with the model's output and {count}, but it takes {signature}: {error}. Its targets are "
            "example_targets in a model file, and targets in Python."
        ) from None


def _matches(pattern: str, name: str) -> bool:
    return name == pattern or name.startswith(pattern + "_")


def _bind(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """(argument name, value) in the order in which the pytree of (args, kwargs) lists them."""
    try:
        parameters = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [
        (positional[index] if index < len(positional) else f"input_{index}", value) for index, value in enumerate(args)
    ]
    return named + list(kwargs.items())


def _leaf_names(
    named: list[tuple[str, Any]], targets: tuple[Any, ...], loss_fn: Callable[..., Any] | None
) -> list[str]:
    names: list[str] = []
    for name, value in named:
        names += leaf_paths(name, value)
    accepted: list[str] = []
    if loss_fn is not None and targets:
        with contextlib.suppress(TypeError, ValueError):
            _, *parameters = inspect.signature(loss_fn).parameters.values()
            accepted = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
    for index, value in enumerate(targets):
        fallback = "target" if len(targets) == 1 else f"target_{index}"
        names += leaf_paths(accepted[index] if index < len(accepted) else fallback, value)
    unique: list[str] = []
    for name in names:
        candidate = name if name not in unique else f"{name}_target"
        while candidate in unique or candidate in RESERVED or keyword.iskeyword(candidate):
            candidate += "_again" if candidate in unique else "_input"
        unique.append(candidate)
    return unique


def batch_size(args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: tuple[Any, ...]) -> int | None:
    """Count the rows of an example without ``batch_dims``; None where it has no batch, which :func:`make_request` refuses."""
    leaves = tree_flatten((args, dict(kwargs), targets))[0]
    try:
        return _batch_size([""] * len(leaves), leaves, {})
    except GraphparError:
        return None


def _batch_size(names: list[str], leaves: list[Any], batch_dims: Mapping[str, int | None]) -> int:
    """The global batch of the example: from ``batch_dims`` where given, else dim 0 of the first tensor that it does not name."""
    for pattern, dim in batch_dims.items():
        for name, leaf in zip(names, leaves):
            if dim is not None and _matches(pattern, name) and isinstance(leaf, Tensor):
                return int(leaf.shape[_checked_dim(name, leaf, dim)])
    for name, leaf in zip(names, leaves):
        if isinstance(leaf, Tensor) and leaf.ndim and not any(_matches(pattern, name) for pattern in batch_dims):
            return int(leaf.shape[0])
    raise GraphparError(
        "There is no batch to split: each example input is a number, a tensor without dims, or has None in batch_dims. "
        "Give batch_dims the dim of an input that counts its rows."
    )


def _checked_dim(name: str, leaf: Tensor, dim: int) -> int:
    if not -leaf.ndim <= dim < leaf.ndim:
        raise GraphparError(f"batch_dims gives dim {dim} for {name!r}, which has shape {tuple(leaf.shape)}.")
    return dim % leaf.ndim


def check_batch(request: Request) -> None:
    """Check that every input with a batch dim has as many rows as the batch.

    Raises:
        GraphparError: one has not; the message names it.
    """
    for name, leaf, dim in zip(request.names, request.leaves, request.batch_dims):
        if dim is not None and leaf.shape[dim] != request.batch:
            raise GraphparError(
                f"Input {name!r} has {leaf.shape[dim]} rows on dim {dim}, but the batch is {request.batch}. "
                "Give batch_dims for inputs whose batch is on another dim."
            )


def lengths_of(source: ModelSource, request: Request) -> Lengths:
    """Find where the example has the length of its sequence: that of the first input of whole numbers [batch, length], or else of the
    first [batch, length, ...]. Every dim of that size varies with it.

    Raises:
        GraphparError: no input has a sequence, or the program takes any length already.
    """
    assert source.seq is not None
    if source.mode == GENERATE:
        raise GraphparError("A program for generation takes prompts of any length; leave seq out.")
    tensors = [(leaf, dim) for leaf, dim in zip(request.leaves, request.batch_dims) if isinstance(leaf, Tensor)]
    sequences = [(leaf, dim) for leaf, dim in tensors if dim is not None and leaf.ndim > 1]
    tokens = [(leaf, dim) for leaf, dim in sequences if not leaf.is_floating_point()]
    if not sequences:
        raise GraphparError(
            "seq says which lengths the sequence may have, but no example input has one: [batch, length] or more dims."
        )
    leaf, batch = (tokens or sequences)[0]
    length = leaf.shape[1 if batch == 0 else 0]
    dims = [
        tuple(i for i, size in enumerate(leaf.shape) if size == length and i != dim) if isinstance(leaf, Tensor) else ()
        for leaf, dim in zip(request.leaves, request.batch_dims)
    ]
    return Lengths(source.seq, tuple(dims))


# ---- outputs ----------------------------------------------------------------------------------------------------


def own_loss(output: Any, takes_scalar: bool = True) -> Tensor | None:
    """Find the loss that the model returns: a scalar output, ``loss`` in it, or the only scalar in it that needs a gradient."""
    loss = _named_loss(output)
    scalars = _scalars(output) if takes_scalar and loss is None else []
    return scalars[0][1] if len(scalars) == 1 else loss


def _named_loss(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output if output.ndim == 0 else None
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _scalars(output: Any) -> list[tuple[str, Tensor]]:
    """Scalars in a model's output that need a gradient, each with the expression for it."""
    items = [("", output)]
    if dataclasses.is_dataclass(output) and not isinstance(output, Mapping):
        items = [(f".{field.name}", getattr(output, field.name)) for field in dataclasses.fields(output)]
    leaves = [(item + keystr(path), leaf) for item, value in items for path, leaf in tree_leaves_with_path(value)]
    return [
        (f"output{place}", leaf)
        for place, leaf in leaves
        if isinstance(leaf, Tensor) and leaf.ndim == 0 and leaf.is_floating_point() and leaf.requires_grad
    ]


def note_scalars(request: Request, output: Any, loss: Tensor | None) -> None:
    """Note in the request which scalar became the loss, or which ones could be."""
    scalars = _scalars(output) if request.takes_scalar and _named_loss(output) is None else []
    request.scalar = scalars[0][0] if len(scalars) == 1 else None
    request.scalars = [place for place, _ in scalars] if loss is None else []


def named_outputs(output: Any, beside: Tensor | None = None) -> list[tuple[str, Tensor]]:
    """List the tensors of a model's output by name.

    Args:
        beside: the loss, which is left out, and with it what is neither a tensor nor a number.

    Raises:
        GraphparError: it holds something other than tensors and numbers.
    """
    if isinstance(output, Tensor):
        return [] if output is beside else [("output", output)]
    if isinstance(output, Mapping):
        items: list[tuple[str, Any]] = [(str(key), value) for key, value in output.items()]
    elif dataclasses.is_dataclass(output):
        items = [(f.name, getattr(output, f.name)) for f in dataclasses.fields(output)]
    else:
        items = [("output", output)]
    named = []
    for key, value in items:
        leaves = tree_flatten(value)[0]
        for name, leaf in zip(leaf_paths(key, value), leaves):
            if beside is not None and (leaf is beside or name == "loss"):
                continue
            if beside is None and not isinstance(leaf, Tensor | int | float | bool | type(None)):
                kind = type(leaf).__name__
                raise GraphparError(
                    f"The model's output {name!r} is of type {kind}, which is neither a tensor nor a number; return tensors in "
                    f"tuples, lists, dicts or dataclasses, or register {kind} with torch.utils._pytree if it is a container."
                )
            if isinstance(leaf, Tensor):
                named.append((name, leaf))
    return named


# ---- generation -------------------------------------------------------------------------------------------------


SHORTEST = 4
"""Positions of an example at least: a trace must see a length that is none of 0, 1 and the longest."""


def of_tokens(
    source: ModelSource, model: nn.Module, batch_dims: Mapping[str, int | None] | None
) -> tuple[ModelSource, dict[str, int | None]]:
    """Return the source with its tokens as the only input, and the dim of their positions.

    Raises:
        GraphparError: the model has no input of token ids [batch, positions], or needs others.
    """
    given = _given(source, model)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise GraphparError(
            f"{type(model).__name__} can't generate: it is an encoder and a decoder, and only models of one sequence can; compile it with "
            "--mode infer."
        )
    needed = [name for name, value in given.items() if isinstance(value, Tensor) and _is_needed(model, name)]
    tokens = [
        name
        for name, value in given.items()
        if isinstance(value, Tensor) and value.ndim == 2 and value.dtype in (torch.int64, torch.int32)
    ]
    preferred = [name for name in ("input_ids", "tokens", "idx", "ids") if name in tokens]
    chosen = next((name for name in (*needed, *preferred, *tokens) if name in tokens), None)
    if chosen is None:
        raise GraphparError(
            f"{type(model).__name__} can't generate: none of its inputs ({', '.join(given) or 'there are none'}) holds token ids, whole "
            "numbers [batch, positions]."
        )
    if given[chosen].size(1) < SHORTEST:
        raise GraphparError(
            f"The example {chosen} has {given[chosen].size(1)} positions, which is all the room for tokens; give it {SHORTEST} or more."
        )
    others = [name for name in needed if name != chosen]
    if others:
        raise GraphparError(
            f"{type(model).__name__} can't generate: its forward needs {', '.join(others)} in addition to the tokens {chosen}; give "
            f"{'them defaults' if len(others) > 1 else 'it a default'}, or wrap the model in one that takes only tokens."
        )
    if batch_dims and any(dim not in (0, None) for dim in batch_dims.values()):
        raise GraphparError("A program for generation takes tokens [batch, positions]; batch_dims can't say otherwise.")
    plain = {name: value for name, value in given.items() if not isinstance(value, Tensor) and name in source.kwargs}
    cache = {"use_cache": False} if "use_cache" in _parameters(model) else {}  # the program has its own
    tokens_given = given[chosen]
    if source.sequences is not None:
        tokens_given = tokens_given[torch.arange(source.sequences) % len(tokens_given)]
    arguments: dict[str, Any] = {**plain, **cache, chosen: tokens_given}
    return replace(source, args=(), kwargs=arguments, loss_fn=None, targets=()), {chosen: 1}


def _given(source: ModelSource, model: nn.Module) -> dict[str, Any]:
    """Return the example's arguments by name."""
    names = [name for name, p in _parameters(model).items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(source.args) > len(names):
        raise GraphparError(f"{type(model).__name__}.forward takes {len(names)} arguments; the example has more.")
    return {**dict(zip(names, source.args)), **source.kwargs}


def _parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(model.forward).parameters)


def _is_needed(model: nn.Module, name: str) -> bool:
    parameter = _parameters(model).get(name)
    return (
        parameter is not None and parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    )
