"""What a model returns: the loss, if it is among it, and tensors by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_leaves_with_path

from graphpar.errors import GraphparError
from graphpar.frontend.inputs import Request
from graphpar.runtime.batches import leaf_paths


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


def named_outputs(output: Any) -> list[tuple[str, Tensor]]:
    """List the tensors of a model's output by name.

    Raises:
        GraphparError: it holds something other than tensors and numbers.
    """
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
        for name, leaf in zip(leaf_paths(key, value), leaves):
            if not isinstance(leaf, Tensor | int | float | bool | type(None)):
                kind = type(leaf).__name__
                raise GraphparError(
                    f"The model's output {name!r} is of type {kind}, which is neither a tensor nor a number; return tensors in "
                    f"tuples, lists, dicts or dataclasses, or register {kind} with torch.utils._pytree if it is a container."
                )
            if isinstance(leaf, Tensor):
                named.append((name, leaf))
    return named
