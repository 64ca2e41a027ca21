"""The unpartitioned model under a precision policy, as one would train it by hand: main weights beside the model's own.

    model     its parameters in the compute dtype; inputs cast, losses in fp32, outputs cast before loss_fn
    stored    what the optimizer steps; each backward's gradients are added to theirs, and each forward begins with their values

Written apart from the tracer (:mod:`graphpar.frontend.precision`), so that neither can hide a mistake of the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from graphpar.ir.precision import Precision
from graphpar.runtime.records import DTYPES
from graphpar.text import matching

_LOSS = re.compile("loss|entropy|kl_div")
_HALF = (torch.bfloat16, torch.float16)
LARGEST_SCALE = 2.0**16


@dataclass
class Policy:
    """A model under ``precision``.

    Attributes:
        own: the model's parameters, under every name.
        named: what is stored of each: itself, or the main weight beside it.
        scale: of the loss, for the backward.
    """

    model: nn.Module
    precision: Precision
    own: dict[str, nn.Parameter] = field(init=False)
    named: dict[str, nn.Parameter] = field(init=False)
    scale: float = 1.0

    def __post_init__(self) -> None:
        self.own = dict(self.model.named_parameters(remove_duplicate=False))
        kept = {
            id(parameter)
            for module in self.model.modules()
            for parameter in module.parameters(recurse=False)
            if isinstance(module, nn.modules.batchnorm._NormBase) or not parameter.is_floating_point()
        }
        kept |= self._keep(self.precision.keep_fp32) if self.precision.casts else set()
        stored: dict[int, nn.Parameter] = {}
        for parameter in self.own.values():
            if id(parameter) not in stored:
                plain = not self.precision.casts or id(parameter) in kept
                stored[id(parameter)] = parameter if plain else self._cast(parameter)
        self.named = {name: stored[id(parameter)] for name, parameter in self.own.items()}

    def _keep(self, patterns: Sequence[str]) -> set[int]:
        """Let the modules that patterns match compute in fp32; return the ids of their parameters."""
        paths = [path for path, _ in self.model.named_modules()]
        found = {path for pattern in patterns for path in matching(pattern, paths)}
        outermost = [path for path in found if not any(path.startswith(f"{other}.") for other in found)]
        kept = set()
        for module in map(self.model.get_submodule, outermost):
            module.register_forward_pre_hook(lambda _, args, kwargs: tree_map(_float, (args, kwargs)), with_kwargs=True)
            module.register_forward_hook(lambda _, args, output: self._narrowed(output))
            for parameter in module.parameters():
                parameter.data = _float(parameter.data)
                kept.add(id(parameter))
        return kept

    def _narrowed(self, output: Any) -> Any:
        return tree_map(partial(_in, self.precision.computed), output)

    def _cast(self, parameter: nn.Parameter) -> nn.Parameter:
        main = parameter.detach().to(self.precision.stored, copy=True)
        parameter.data = main.to(self.precision.computed)
        if self.precision.stored == self.precision.computed:
            return parameter
        return nn.Parameter(main, parameter.requires_grad)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The stored parameters, each once."""
        return [main for _, main in self._pairs()]

    def _pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list({id(own): (own, self.named[name]) for name, own in self.own.items()}.values())

    def inputs(self, values: Any) -> Any:
        """Cast what the model is called with."""
        if not self.precision.casts:
            return values
        to = self.precision.computed
        return tree_map(
            lambda leaf: leaf.to(to) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, values
        )

    def outputs(self, values: Any) -> Any:
        """Cast what the model returns to fp32, for the loss, or to the dtype that is asked for."""
        if not self.precision.casts:
            return values
        if isinstance(values, Mapping) and type(values) is not dict:
            for name in list(values):
                values[name] = self.outputs(values[name])  # type: ignore[index]
            return values
        to = self.precision.output_dtype
        return tree_map(partial(_in, DTYPES[to]) if to else _float, values)

    def losses(self, in_loss_fn: bool = False) -> AbstractContextManager[object]:
        """Compute losses in fp32 inside; ``in_loss_fn``: the model has been called, and the user's loss function runs."""
        return LossesInFloat(in_loss_fn) if self.precision.casts else nullcontext()

    def begin(self) -> None:
        """Give the model the values of the stored parameters."""
        for own, main in self._pairs():
            if own is not main:
                own.data.copy_(main.detach())

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss`` to those of the stored parameters."""
        if self.scale == 1 and not self.precision.casts:
            loss.backward()
            return
        before = [main.grad for main in self.parameters]
        for main in self.parameters:
            main.grad = None
        (loss * self.scale).backward()
        for (own, main), earlier in zip(self._pairs(), before):
            gradient = None if own.grad is None else own.grad.to(main.dtype) / self.scale
            own.grad = None
            main.grad = gradient if earlier is None else earlier if gradient is None else earlier + gradient


class LossesInFloat(TorchFunctionMode):
    """Losses of ``torch.nn.functional`` take fp32; in ``loss_fn`` every function takes the model's parameters so."""

    def __init__(self, in_loss_fn: bool = False) -> None:
        super().__init__()
        self.in_loss_fn = in_loss_fn

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.functional" and _LOSS.search(name):
            args, kwargs = tree_map(_float, (args, kwargs))
        elif self.in_loss_fn and name not in ("__get__", "__set__"):
            args, kwargs = tree_map(
                lambda leaf: _float(leaf) if isinstance(leaf, nn.Parameter) else leaf, (args, kwargs)
            )
        return func(*args, **kwargs)


def _in(dtype: torch.dtype, leaf: Any) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.dtype in (torch.float32, *_HALF) else leaf


def _float(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in _HALF else leaf
