"""In-place operators of torch, and what returns a new tensor instead: from torch's schemas, not from a list.

add_.Tensor       add.Tensor            the same overload
pow_.Scalar       pow.Tensor_Scalar     the overload whose arguments have the same names and types, or else the same types
polygamma_        polygamma             these in another order
transpose_        transpose.int         an in-place view: memory stays, and the tensor object shows it in another way
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

_MEMORY = "it makes a tensor show other memory; give the result a name of its own"
_SPARSE = "it is for sparse tensors"
_LISTS = "it writes a list of tensors; write one after the other"
_INSIDE = "it is a part of another function of torch"

NO_OTHER_FORM: dict[str, str] = {
    "set_": _MEMORY,
    "resize_": "it changes the number of elements; make a tensor of the size that it needs",
    "resize_as_": "it changes the number of elements; make a tensor of the size that it needs",
    "fill_diagonal_": "it fills the diagonal of several matrices, or wraps around; write torch.where with a mask",
    "requires_grad_": "it says which values have a gradient; call it before the forward",
    "rrelu_with_noise_": "it writes the noise that it draws as well; call F.rrelu without inplace=True",
    **dict.fromkeys(("_coalesced_", "copy_sparse_to_sparse_", "resize_as_sparse_", "sparse_resize_"), _SPARSE),
    "sparse_resize_and_clear_": _SPARSE,
    **dict.fromkeys(("_fill_mem_eff_dropout_mask_", "_resize_output_"), _INSIDE),
    **dict.fromkeys(("_sobol_engine_ff_", "_sobol_engine_initialize_state_", "_sobol_engine_scramble_"), _INSIDE),
    **dict.fromkeys(("_amp_update_scale_", "_amp_foreach_non_finite_check_and_unscale_"), _INSIDE),
}
"""The in-place operators that are not replaced, each with the reason; lists of tensors are refused by their type."""

_OTHER_NAMES = {"normal_": "normal_functional"}


def is_inplace_operator(target: Any) -> bool:
    """Whether an operator writes its first argument, and returns it: ``add_``, but no ``__init__``."""
    if not isinstance(target, OpOverload) or not target._schema.arguments:
        return False
    name = target._schema.name.partition("::")[2]
    alias = target._schema.arguments[0].alias_info
    special = name.startswith("__") and not name.startswith("__i")
    return alias is not None and alias.is_write and name.endswith("_") and not special


def changes_view(target: Any) -> bool:
    """Whether an operator changes how a tensor shows its memory, and not the memory: ``transpose_``."""
    return isinstance(target, OpOverload) and torch.Tag.inplace_view in target.tags


@cache
def out_of_place(target: OpOverload) -> OpOverload | None:
    """Return the operator that returns a new tensor (or a view) instead; None where there is none."""
    name = target._schema.name.partition("::")[2]
    if name in NO_OTHER_FORM or not is_inplace_operator(target) or _writes_list(target):
        return None
    plain = f"__{name[3:]}" if name.startswith("__i") else _OTHER_NAMES.get(name, name[:-1])
    packet = getattr(getattr(torch.ops, target.namespace), plain, None)
    overloads = [getattr(packet, each) for each in packet.overloads()] if packet is not None else []
    overloads = [each for each in overloads if not each._schema.is_mutable]
    own = _arguments(target)
    tests = (
        lambda other: _arguments(other) == own,
        lambda other: [kind for _, kind in _arguments(other)] == [kind for _, kind in own],
        lambda other: sorted(_arguments(other)) == sorted(own),
    )
    return next((other for test in tests for other in overloads if test(other)), None)


def refusal_of(target: OpOverload) -> str:
    """Return why an in-place operator without another form is refused."""
    name = target._schema.name.partition("::")[2]
    other = _LISTS if _writes_list(target) else "torch has no operator that returns a new tensor instead"
    return NO_OTHER_FORM.get(name, other)


def in_order(target: OpOverload, other: OpOverload, args: Sequence[Any]) -> tuple[Any, ...]:
    """Put positional arguments of ``target`` into the order of ``other``, where the two have the same names in another order."""
    before, after = ([name for name, _ in _arguments(each)] for each in (target, other))
    if before == after or sorted(before) != sorted(after):
        return tuple(args)
    given = dict(zip(before, args))
    return tuple(given[name] for name in after if name in given)


def _writes_list(target: OpOverload) -> bool:
    return str(target._schema.arguments[0].type).startswith("List")


def _arguments(target: OpOverload) -> list[tuple[str, str]]:
    """Name and type of each argument, but for a generator, which new tensors may be made without."""
    return [(each.name, str(each.type)) for each in target._schema.arguments if each.name != "generator"]
