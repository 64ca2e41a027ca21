"""A trace's inputs: the leaves of the user's arguments and targets, their names, and the batch dim of each."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import keyword
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import TreeSpec, tree_flatten

from graphpar.errors import GraphparError, near_match
from graphpar.frontend.between_steps import Assigned
from graphpar.ir.precision import Precision
from graphpar.ir.program import ModelSource
from graphpar.runtime.batches import leaf_paths
from graphpar.runtime.deferred import Recorder
from graphpar.runtime.modes import GENERATE, INFER

RESERVED = ("sample_keys", "self")  # names of inputs that graphpar adds


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
    assigned: list[Assigned] = dataclasses.field(default_factory=list)  # filled by the trace: what the forward assigned


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
    wanted: list[str] = []
    if loss_fn is not None and targets:
        with contextlib.suppress(TypeError, ValueError):
            _, *parameters = inspect.signature(loss_fn).parameters.values()
            wanted = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
    for index, value in enumerate(targets):
        fallback = "target" if len(targets) == 1 else f"target_{index}"
        names += leaf_paths(wanted[index] if index < len(wanted) else fallback, value)
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
