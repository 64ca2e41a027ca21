"""Make the module that is traced, from a module or a factory; one from a factory takes no memory.

module ──────────────────────────────┐
factory ──under fake tensors, a tape─┴──► module, its FakeTensorMode, what its constructor computed
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphpar.errors import GraphparError
from graphpar.frontend.deferred import Tape
from graphpar.frontend.watched import OffMeta, is_on_meta, off_meta

ModelLike = nn.Module | Callable[[], nn.Module]


Built = tuple[nn.Module, FakeTensorMode | None, Tape | None]
"""A module to trace, with its fake mode and tape where it was built without memory."""


def build(model: ModelLike) -> Built:
    """Return the module to trace, with its fake mode and tape where a factory built it under fake tensors, without memory.

    Some constructors can't run on fake tensors (they read values, or copy modules); those run for real.

    Raises:
        GraphparError: ``model`` is neither a module nor a function without arguments that returns one.
    """
    if isinstance(model, nn.Module):
        return _with_values_apart(unwrapped(model), None, None)
    if not callable(model):
        raise GraphparError(
            f"model is a {type(model).__name__}; it must be an nn.Module or a function that returns one."
        )
    if needed := needed_arguments(model):
        raise GraphparError(
            f"model is {'the class' if isinstance(model, type) else 'the function'} {getattr(model, '__name__', model)}, which needs "
            f"arguments ({', '.join(needed)}); give an instance, or a function without arguments that makes one."
        )
    fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    tape = Tape()
    try:
        with fake, tape, OffMeta(), _shared_by_copies(), _converted_in_place(fake), _copied_in_silence():
            built = model()
    except Exception:
        with OffMeta():
            built, fake, tape = model(), cast(Any, None), cast(Any, None)
    if not isinstance(built, nn.Module):
        raise GraphparError(f"The model factory returned a {type(built).__name__}; it must return an nn.Module.")
    return _with_values_apart(unwrapped(built), fake, tape)


def _with_values_apart(
    model: nn.Module, fake: FakeTensorMode | None, tape: Tape | None
) -> tuple[nn.Module, FakeTensorMode | None, Tape | None]:
    """Turn a model on the device meta into one as if built under fake tensors."""
    if not is_on_meta(model):
        return model, fake, tape
    fake = fake or FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    return off_meta(model, fake), fake, tape


@contextlib.contextmanager
def _copied_in_silence() -> Iterator[None]:
    """Leave out torch's warning that ``copy.deepcopy`` looks at the address of a fake tensor, of which no one makes use."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield


def needed_arguments(factory: Callable[..., Any]) -> list[str]:
    """List the arguments without which ``factory`` can't be called."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


@contextlib.contextmanager
def _shared_by_copies() -> Iterator[None]:
    """Make copies of fake tensors stay in the mode that made them (nn.Transformer deep-copies its layers)."""
    FakeTensorMode.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del FakeTensorMode.__deepcopy__  # type: ignore[attr-defined]


@contextlib.contextmanager
def _converted_in_place(fake: FakeTensorMode) -> Iterator[None]:
    """Make ``.to(dtype)`` and the like work on fake parameters: torch swaps these, which it refuses for tensors that the mode remembers."""
    swap = torch.utils.swap_tensors
    remembered = fake.fake_tensor_converter.meta_converter.tensor_memo

    def swapped(first: torch.Tensor, second: torch.Tensor) -> None:
        references = [*weakref.getweakrefs(first), *weakref.getweakrefs(second)]
        keys = [reference.key for reference in references if isinstance(reference, weakref.KeyedRef)]
        del references
        for key in keys:
            remembered.pop(key, None)
        swap(first, second)

    torch.utils.swap_tensors = swapped
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap


def unwrapped(model: nn.Module) -> nn.Module:
    """Take a model out of its DataParallel or DistributedDataParallel wrappers."""
    while type(model).__name__ in ("DataParallel", "DistributedDataParallel") and hasattr(model, "module"):
        model = cast(nn.Module, model.module)
    return model
