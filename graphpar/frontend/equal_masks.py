"""While a model is traced, give masks of equal expressions the same number of chosen rows.

    mse_loss(o[t > 0], t[t > 0])

A trace has a symbol for the number of rows that each mask tensor chooses, and ``t > 0`` written twice makes two tensors: the loss
would compare two unknown sizes. Here both get one symbol. They stay two operators and two tensors, so that writing to one
does not change the other. Every mask is assumed to choose at least one row; that is safe, since the program made from the trace
works on all rows (:mod:`graphpar.passes.normalize.static_masking`).
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
"""Methods of tensors that have no operator of their name."""


class EqualMasks(FunctionMode):
    """Gives masks of equal expressions one number of chosen rows."""

    def __init__(self) -> None:
        super().__init__()
        # By identity of a tensor: the tensor, its version then, its expression.
        self.made: dict[int, tuple[Tensor, int, Hashable]] = {}
        self.chosen: dict[Hashable, Any] = {}

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call ``function``, with known numbers of chosen rows for the masks among its arguments."""
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
    """Whether a function returns equal masks for equal operands."""
    return name in _CASTS or record_named(name).pure or record_named(f"__{name}__").pure


def _is_mask(leaf: Any) -> bool:
    return isinstance(leaf, FakeTensor) and leaf.dtype is torch.bool
