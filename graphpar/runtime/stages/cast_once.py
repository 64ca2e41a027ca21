"""Parameters that a program reads in another dtype than that in which they are stored, cast once a step and not once a microbatch.

    a step ──first forward of a module──► copies of its parameters ──all microbatches──► their backwards ──end of the step──► dropped

The emitted text casts where it reads: ``F.linear(x, self.up.weight.bfloat16())``. Autograd would keep such a copy for each microbatch
in flight. In a step ``self.up.weight`` is the copy, whose cast does nothing; its gradient is cast back and arrives at the parameter as
that of any other cast would. A parameter that is stored as it is read (:mod:`graphpar.runtime.state.units`) is its own copy. State that
FSDP2 shards needs none of this: it is gathered in the dtype in which it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from graphpar.runtime.debugging.fp64 import current

Slot = tuple[nn.Module, str, torch.dtype]
"""A module, the name of its parameter, and the dtype in which that is read."""


class Cast(torch.autograd.Function):
    """A parameter in another dtype: ``copy`` has its values. The gradient is cast back."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copy: Tensor) -> Tensor:
        """Return ``copy`` as a result of ``parameter``. [...], [...] -> [...]"""
        ctx.dtype = parameter.grad_dtype or parameter.dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Return the gradient in the dtype of the parameter."""
        return gradient.to(ctx.dtype), None


class CastOnce:
    """The copies of one stage's parameters.

    Args:
        stage: before its blocks are recomputed, so that a forward that runs again reads the same copies.
        blocks: modules in it that read their own parameters; the stage reads all others.
        dtypes: that in which each parameter is read, by name; parameters that are read in their own are not listed.

    Attributes:
        storages: where the copies are that a step has made so far.
    """

    def __init__(self, stage: nn.Module, blocks: Sequence[nn.Module], dtypes: Mapping[str, torch.dtype]) -> None:
        self._copies: dict[tuple[nn.Parameter, torch.dtype], Tensor] = {}
        self.storages: set[int] = set()
        self._active = self._hooked = False
        slots = list(_slots(stage, dtypes))
        inside = {module: block for block in blocks for module in block.modules()}
        self._readers = {
            reader: [slot for slot in slots if inside.get(slot[0], stage) is reader] for reader in (stage, *blocks)
        }
        for reader, own in self._readers.items():
            if own:
                reader.forward = self._reading(reader.forward, own)

    def share(self, other: CastOnce) -> None:
        """Have the copies of ``other``, of another stage of this rank, so that a parameter of both is cast once."""
        self._copies, self.storages = other._copies, other.storages

    @contextmanager
    def step(self) -> Iterator[None]:
        """Read copies inside, which are dropped at the end."""
        if not self._hooked:  # after older hooks, by which a module waits for the values of its parameters
            self._hooked = True
            for reader, own in self._readers.items():
                if own:
                    reader.register_forward_pre_hook(self._makes(own))
        self._active = True
        try:
            yield
        finally:
            self._active = False
            self._copies.clear()
            self.storages.clear()

    def left(self) -> Iterator[str]:
        """Say what a step has left behind."""
        if self._copies:
            yield f"{len(self._copies)} parameters are cast for a step"

    def _makes(self, slots: Sequence[Slot]) -> Callable[..., None]:
        def make(module: nn.Module, args: Any) -> None:
            for parameter, dtype in self._to_cast(slots) if self._active else ():
                if (parameter, dtype) not in self._copies:
                    copy = parameter.detach().to(dtype)
                    self._copies[parameter, dtype] = copy
                    self.storages.add(copy.untyped_storage()._cdata)

        return make

    def _reading(self, forward: Callable[..., Any], slots: Sequence[Slot]) -> Callable[..., Any]:
        """Return ``forward`` with copies in the place of parameters; each call has results of its own, and so gradients of its own."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._copies:
                return forward(*args, **kwargs)
            given: list[tuple[dict[str, Any], str]] = []
            try:
                for module, name, dtype in slots:
                    parameter = module._parameters[name]
                    copy = self._copies.get((parameter, dtype)) if parameter is not None else None
                    if copy is not None:
                        # An attribute of its own hides the parameter, which the module keeps.
                        module.__dict__[name] = Cast.apply(parameter, copy)
                        given.append((module.__dict__, name))
                return forward(*args, **kwargs)
            finally:
                for attributes, name in given:
                    attributes.pop(name, None)

        return run

    def _to_cast(self, slots: Sequence[Slot]) -> Iterator[tuple[nn.Parameter, torch.dtype]]:
        for module, name, dtype in slots:
            parameter, read = module._parameters[name], current(dtype)
            if parameter is not None and read is not None and (parameter.grad_dtype or parameter.dtype) != read:
                yield parameter, dtype


def _slots(stage: nn.Module, dtypes: Mapping[str, torch.dtype]) -> Iterator[Slot]:
    for path, module in stage.named_modules():
        for name in module._parameters:
            dtype = dtypes.get(f"{path}.{name}" if path else name)
            if dtype is not None:
                yield module, name, dtype
