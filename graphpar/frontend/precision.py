"""A model traced as it computes in 16 bits, though its parameters are stored in 32.

    parameters    in the compute dtype while the model is traced, so x.to(self.weight.dtype) means what it should
    inputs        floating ones are cast where the model is called; targets and buffers stay as they are
    losses        F.cross_entropy(logits, labels) inside of the model takes its arguments in fp32
    outputs       cast to fp32 before loss_fn, which takes the model's parameters in fp32, too

The parameters of BatchNorm and its kin stay as they are, since torch computes their statistics in fp32. So do those of modules that are
kept in fp32: what enters these is cast to fp32, and what they return to the compute dtype. The pass ``cast_weights`` declares the dtype in
which parameters are stored, and casts them where they are read.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from graphpar.errors import GraphparError, near_match
from graphpar.frontend.trace_guards import FunctionMode
from graphpar.ir.precision import Precision
from graphpar.text import is_below, matching

_CAST = (torch.float32, torch.bfloat16, torch.float16)
_HALF = (torch.bfloat16, torch.float16)


def kept_modules(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Return the outermost modules that ``patterns`` match, by path.

    Raises:
        GraphparError: one matches none, or a parameter is also read in another module.
    """
    modules = {path: module for path, module in model.named_modules(remove_duplicate=False) if path}
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        matched = matching(pattern, modules)
        if not matched:
            ends = {f"**.{path.rpartition('.')[2]}" for path in modules}  # of which paths a pattern may be short
            hint = near_match(pattern, modules) or near_match(f"**.{pattern}", ends)
            raise GraphparError(f"keep_fp32: the pattern {pattern!r} matches no module.{hint}")
        found |= {path: modules[path] for path in matched}
    found = {path: module for path, module in found.items() if not any(is_below(path, other) for other in found)}
    inside = {
        id(each): name for name, each in model.named_parameters(remove_duplicate=False) if _is_inside(name, found)
    }
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in inside and not _is_inside(name, found):
            raise GraphparError(
                f"keep_fp32: {inside[id(parameter)]} is also {name}, whose module computes in 16 bits; match that module, too, or leave "
                "both out."
            )
    return found


def _is_inside(name: str, modules: Iterable[str]) -> bool:
    return any(is_below(name, path) for path in modules)


def cast_parameters(model: nn.Module, precision: Precision) -> dict[int, nn.Parameter]:
    """Find the parameters that are cast to the compute dtype where they are read, by their ids.

    Raises:
        GraphparError: one is in a dtype from which nothing is cast, such as fp64.
    """
    found: dict[int, nn.Parameter] = {}
    dtype, inside = precision.computed, kept_modules(model, precision.keep_fp32)
    kept = {id(parameter) for module in inside.values() for parameter in module.parameters()}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, nn.modules.batchnorm._NormBase):
                kept.add(id(parameter))
            elif parameter.dtype in _CAST:
                found[id(parameter)] = parameter
            elif parameter.dtype is torch.float64:
                raise GraphparError(
                    f"The parameter {f'{path}.{name}' if path else name!r} is in float64, which a dtype of "
                    f"{str(dtype).removeprefix('torch.')} would round "
                    "away; build the model in float32, or leave the dtype out."
                )
    return {key: parameter for key, parameter in found.items() if key not in kept}


@contextmanager
def computed_in(model: nn.Module, precision: Precision) -> Iterator[None]:
    """Have the parameters in the compute dtype inside, the same objects with other data, and modules that are kept in fp32 cast what
    enters and leaves them."""
    dtype = precision.cast_to
    cast = cast_parameters(model, precision).values() if dtype is not None else []
    before = [(each, each.data, dtype) for each in cast]
    inside = kept_modules(model, precision.keep_fp32).values() if dtype is not None else []
    for parameter in {parameter for module in inside for parameter in module.parameters()}:
        if parameter.dtype in _HALF:
            before.append((parameter, parameter.data, torch.float32))
    handles = []
    try:
        for parameter, data, to in before:
            parameter.data = data.to(to)
        for module in inside:
            handles.append(module.register_forward_pre_hook(_enter_in_full, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(lambda _, args, output: cast_floating(output, dtype)))
        yield
    finally:
        for parameter, data, _ in before:
            parameter.data = data
        for handle in handles:
            handle.remove()


def _enter_in_full(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return in_full(args), in_full(kwargs)


def cast_floating(value: Any, dtype: torch.dtype | None) -> Any:
    """Cast the floating tensors in ``value`` to ``dtype``, those in 64 bits excepted; None changes nothing."""
    if dtype is None:
        return value
    return tree_map(lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.dtype in _CAST else leaf, value)


def in_full(output: Any) -> Any:
    """Cast the tensors of 16 bits in a model's output to fp32; objects that are no containers of torch keep theirs."""
    if (isinstance(output, Mapping) and type(output) is not dict) or dataclasses.is_dataclass(output):
        changed = copy.copy(output)  # such as a ModelOutput, which has its tensors as items and as attributes
        items = list(output.items()) if isinstance(output, Mapping) else list(vars(output).items())
        for name, value in items:
            full = in_full(value)
            if isinstance(output, Mapping):
                changed[name] = full  # type: ignore[index]
            else:
                object.__setattr__(changed, name, full)
        return changed
    if isinstance(output, Tensor):
        return output.float() if output.dtype in _HALF else output
    if type(output) in (tuple, list, dict):
        values = output.values() if isinstance(output, dict) else output
        full = [in_full(value) for value in values]
        return dict(zip(output, full)) if isinstance(output, dict) else type(output)(full)
    return tree_map(lambda leaf: leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in _HALF else leaf, output)


class LossesInFull(FunctionMode):
    """Gives losses of ``torch.nn.functional`` their arguments in fp32; with ``parameters`` all functions take parameters so."""

    def __init__(self, parameters: bool = False) -> None:
        super().__init__()
        self.parameters = parameters

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call ``function``, with floating arguments in fp32 where it is a loss."""
        if _is_loss(function):
            args, options = in_full(args), in_full(options)
        elif self.parameters and getattr(function, "__name__", "") != "__get__":
            args, options = tree_map(
                lambda leaf: leaf.float() if isinstance(leaf, nn.Parameter) and leaf.dtype in _HALF else leaf,
                (args, options),
            )
        return function(*args, **options)


@functools.cache
def _is_loss(function: Callable[..., Any]) -> bool:
    """Whether this is a loss of ``torch.nn.functional``: they alone there are asked how to reduce."""
    if getattr(function, "__module__", "") != "torch.nn.functional":
        return False
    try:
        return "reduction" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
