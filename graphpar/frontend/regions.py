"""The user's own ``torch.utils.checkpoint`` regions: run as they are, since they change no value, and noted with the modules they run."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn


@contextlib.contextmanager
def plain_regions(note: Callable[[Any], None] = lambda function: None) -> Iterator[None]:
    """Run regions without ``torch.utils.checkpoint``; ``note`` is called with the function of each."""
    checkpoint: Any = torch.utils.checkpoint
    before = checkpoint._checkpoint_without_reentrant_generator

    def without_reentrance(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        note(function)
        yield

    def reentrant(function: Any, preserve: bool, *args: Any) -> Any:
        note(function)
        with torch.set_grad_enabled(any(isinstance(value, Tensor) and value.requires_grad for value in args)):
            return function(*args)

    checkpoint._checkpoint_without_reentrant_generator = without_reentrance
    checkpoint.CheckpointFunction.apply = staticmethod(reentrant)
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = before
        del checkpoint.CheckpointFunction.apply


def region_of(model: nn.Module, function: Any) -> str:
    """Return the path of the module that ``function`` runs: itself, what a method belongs to, or the one that it holds; else ""."""
    paths: dict[int, str] = {}
    for path, module in model.named_modules():
        paths.setdefault(id(module), path)
    held: list[Any] = []
    while isinstance(function, functools.partial):
        held += function.args
        function = function.func
    held += [function, getattr(function, "__self__", None)]
    if inspect.isfunction(function):
        held += inspect.getclosurevars(function).nonlocals.values()
    modules = {id(value): paths[id(value)] for value in held if isinstance(value, nn.Module) and id(value) in paths}
    return next(iter(modules.values())) if len(modules) == 1 else ""
