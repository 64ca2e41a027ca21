"""Lets masks that are computed by equal expressions choose the same number of rows, while a model is traced.

    mse_loss(o[t > 0], t[t > 0])

A trace gives the number of rows that a mask chooses a name, one for each mask tensor, and ``t > 0`` written twice are two
tensors: the loss would compare two unknown names. Here they get one name. Each keeps its own operator and its own
tensor, so that writing to one of them changes nothing in the other. No mask is assumed to choose no row, since the program made
from the trace works on all rows (:mod:`graphpar.passes.normalize.unchosen`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from graphpar.frontend.modes import FunctionMode
from graphpar.operators.record import Kind
from graphpar.operators.table import record_named

_CASTS = ("bool", "int", "long")
"""Methods of tensors that no operator is called like."""


class EqualMasks(FunctionMode):
    """Gives masks of equal expressions one number of chosen rows."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[
            int, tuple[Tensor, int, Hashable]
        ] = {}  # by identity: the tensor, its version then, its expression
        self.chosen: dict[Hashable, Any] = {}

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        name = getattr(function, "__name__", "").strip("_")
        masks = [leaf for leaf in tree_leaves((args, options)) if _is_mask(leaf)] if _chooses(name) else []
        for mask in masks:
            known = self.chosen.get(self._expression(mask))
            if known is not None:
                mask.nonzero_memo = known
        result = function(*args, **options)
        for mask in masks:
            if mask.nonzero_memo is not None and self._expression(mask) not in self.chosen:
                self.chosen[self._expression(mask)] = mask.nonzero_memo
                torch._check(mask.nonzero_memo >= 1)
        if _is_plain(name) and isinstance(result, Tensor) and not result.is_floating_point():
            leaves = tree_leaves((args, options))
            words = tuple(self._expression(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
            self.made[id(result)] = (result, result._version, (name, *words))
        return result

    def _expression(self, tensor: Tensor) -> Hashable:
        made = self.made.setdefault(id(tensor), (tensor, tensor._version, id(tensor)))
        return made[2] if made[1] == tensor._version else (id(tensor), tensor._version)


def _chooses(name: str) -> bool:
    """Whether a function of torch, or a method, may choose rows by a mask."""
    return name in ("getitem", "setitem") or name == "where" or record_named(name).kind is Kind.INDEX


def _is_plain(name: str) -> bool:
    """Whether it gives equal masks of equal operands."""
    return name in _CASTS or record_named(name).pure or record_named(f"__{name}__").pure


def _is_mask(leaf: Any) -> bool:
    return isinstance(leaf, FakeTensor) and leaf.dtype is torch.bool
