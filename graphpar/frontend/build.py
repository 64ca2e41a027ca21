"""Make the module that is traced, from a module or a factory; one from a factory takes no memory.

module ──────────────────────────────────┐
factory ──under fake tensors, recorded───┴──► module, its FakeTensorMode, the operators of its constructor
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.modules.lazy import LazyModuleMixin

from graphpar.errors import GraphparError
from graphpar.frontend.trace_guards import OffMeta, is_on_meta, off_meta
from graphpar.runtime.stages.deferred import Recorder

ModelLike = nn.Module | Callable[[], nn.Module]


Built = tuple[nn.Module, FakeTensorMode | None, Recorder | None]
"""A module to trace, with its fake mode and the operators that made it where it was built without memory."""

SEED = 0
"""Factories are run as after ``torch.manual_seed`` of it, wherever values of what they draw are needed."""


def build(model: ModelLike) -> Built:
    """Return the module to trace, with its fake mode and recorder where a factory built it under fake tensors, without memory.

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
    # A loader that builds on the device meta, and fills what it makes of that later, needs to see that device.
    built, fake, recorder = _built(model, contextlib.nullcontext())
    if is_on_meta(built):
        built, fake, recorder = _built(model, OffMeta())
    return _with_values_apart(built, fake, recorder)


def _built(
    factory: Callable[[], nn.Module], as_on: contextlib.AbstractContextManager[object]
) -> tuple[nn.Module, FakeTensorMode | None, Recorder | None]:
    fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    recorder = Recorder(fake)
    try:
        with recorder.building(SEED), as_on:
            return _checked(factory()), fake, recorder
    except Exception:
        return build_for_real(factory, as_on)


def build_for_real(
    factory: ModelLike, as_on: contextlib.AbstractContextManager[object] | None = None
) -> tuple[nn.Module, FakeTensorMode | None, Recorder | None]:
    """Return the module that ``factory`` makes, with memory and values."""
    if isinstance(factory, nn.Module):
        return unwrapped(factory), None, None
    with torch.random.fork_rng(devices=[]), as_on or contextlib.nullcontext():
        torch.manual_seed(SEED)
        return _checked(factory()), None, None


def _checked(built: Any) -> nn.Module:
    if not isinstance(built, nn.Module):
        raise GraphparError(f"The model factory returned a {type(built).__name__}; it must return an nn.Module.")
    return unwrapped(built)


def _with_values_apart(
    model: nn.Module, fake: FakeTensorMode | None, recorder: Recorder | None
) -> tuple[nn.Module, FakeTensorMode | None, Recorder | None]:
    """Turn a model on the device meta into one as if built under fake tensors.

    Raises:
        GraphparError: a module gets its sizes when it is called first.
    """
    for name, module in model.named_modules():
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            raise GraphparError(
                f"{type(module).__name__} {name!r} has no sizes before it is called: call the model once in the function that builds it, "
                "or give sizes."
            )
    if not is_on_meta(model):
        return model, fake, recorder
    fake = fake or FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    return off_meta(model, fake), fake, recorder


def needed_arguments(factory: Callable[..., Any]) -> list[str]:
    """List the arguments without which ``factory`` can't be called."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def unwrapped(model: nn.Module) -> nn.Module:
    """Take a model out of its DataParallel or DistributedDataParallel wrappers."""
    while type(model).__name__ in ("DataParallel", "DistributedDataParallel") and hasattr(model, "module"):
        model = cast(nn.Module, model.module)
    return model
