"""Compute values of tensors that were made under fake tensors, by replaying only the operators that made them.

A model of any size is built under ``FakeTensorMode``, where nothing has a value; but the values of its
non-persistent buffers (rotary tables, masks) belong to the program. The tape records what the constructor
did, and ``materialize`` replays the few operators that a wanted tensor depends on (``.item()`` in the constructor does too):

    with FakeTensorMode(), Tape() as tape: model = build()
    tape.materialize([model.rotary.inv_freq])  ->  real tensors, everything else stays fake
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from graphpar.ir.program import memory_of


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Tape(TorchDispatchMode):
    """Records every operator that runs under it, with its fake arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            with contextlib.suppress(KeyError), _disable_current_modes():
                return self.materialize([args[0]])[0].item()
        result = func(*args, **(kwargs or {}))
        self.entries.append((func, args, kwargs or {}, result))
        return result

    def materialize(self, wanted: Sequence[Tensor]) -> list[Tensor]:
        """Compute real values of the fake tensors ``wanted``, in order. Raises ``KeyError`` for one that is not on the tape."""
        storages = {memory_of(tensor) for tensor in wanted}
        needed = []
        for entry in reversed(self.entries):
            func, args, kwargs, result = entry
            touched = _tensors(result) + (_tensors((args, kwargs)) if func._schema.is_mutable else [])
            if any(memory_of(tensor) in storages for tensor in touched):
                needed.append(entry)
                storages.update(memory_of(tensor) for tensor in _tensors((args, kwargs)))
        real: dict[int, Tensor] = {}
        twins: dict[tuple[Any, ...], Tensor] = {}

        def lookup(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) in real:
                return real[id(leaf)]
            twin = twins.get(_identity(leaf))
            # A Python constant (torch.tensor(3.0)) reaches the tape as a real tensor.
            if twin is None and not isinstance(leaf, torch._subclasses.FakeTensor):
                return leaf
            if twin is None:
                constant = getattr(leaf, "constant", None)
                if constant is not None:
                    return constant
                raise KeyError("a tensor made outside of the recorded constructor")
            return twin

        with torch.no_grad():
            for func, args, kwargs, result in reversed(needed):
                values = func(*tree_map(lookup, args), **tree_map(lookup, kwargs))
                for fake, value in zip(tree_leaves(result), tree_leaves(values)):
                    if isinstance(fake, Tensor):
                        real[id(fake)] = value
                        twins[_identity(fake)] = value
            return [lookup(tensor).detach().clone() for tensor in wanted]


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """A key that is equal for two tensor objects that are the same view of the same memory."""
    return (memory_of(tensor), tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype)
