"""The functions of an emitted package in the types of ``spmd_types``, for :mod:`graphpar.verification.type_check`.

collectives          the table of transitions (:mod:`graphpar.operators.transitions`)
composite operators  what they declare (:mod:`graphpar.operators.composite`): on their axis their types, on others those of their parts
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types import rules
from torch import Tensor

from graphpar.emitted import collectives as all_collectives
from graphpar.operators.composite import Composite, axes_of
from graphpar.operators.table import COMPOSITES
from graphpar.operators.transitions import EXCHANGES, FUNCTIONS, HALVES, ROUNDED, Transition
from graphpar.runtime.layout import R, Shard, Type

Axes = Mapping[str, dist.ProcessGroup]
Kinds = dict[Any, Any]
"""The type of a value by the name of the axis: ``spmd.R``, ``I``, ``V`` ("varying", any shard) or ``P``."""
_KINDS = {"R": spmd.R, "I": spmd.I, "P": spmd.P}


@contextlib.contextmanager
def untyped() -> Iterator[None]:
    """Run without the checker."""
    with spmd.no_typecheck(), torch._C.DisableTorchFunction():
        yield


def kind_of(kind: Type) -> Any:
    """Return the checker's type for one of ours."""
    return spmd.V if isinstance(kind, Shard) else _KINDS[kind.letter]


def kinds_of(value: Any, axes: Axes) -> Kinds:
    """Return the type of ``value`` on each axis where it has one."""
    found = {axis: spmd.maybe_get_axis_local_type(value, group) for axis, group in axes.items()}
    return {axis: kind for axis, kind in found.items() if kind is not None}


def give(value: Tensor, kinds: Kinds, axes: Axes) -> Tensor:
    """Tell the checker the types of ``value``, and return it."""
    spmd.assert_type(value, {axes[axis]: kind for axis, kind in kinds.items()})
    return value


def types_text(value: Tensor, axes: Axes) -> str:
    """Return the types of ``value``, as ``V@tp, R@cp``."""
    return ", ".join(f"{kind}@{axis}" for axis, kind in kinds_of(value, axes).items())


# ---- collectives -----------------------------------------------------------------------------------------------


def _rule(row: Transition) -> Callable[..., Any]:
    """Return a transition in the rules of ``spmd_types``, which refuses those that its type system does not have."""
    source, target = row.source, row.target

    def rule(x: Tensor, on: Any, *dims: int) -> Any:
        if row in EXCHANGES:
            if spmd.maybe_get_axis_local_type(x, on) is not spmd.V:
                raise spmd.SpmdTypeError("rows that go to other ranks and come back are the same on every rank")
            return x
        ends = [
            spmd.V if kind == "E" else spmd.S(dims[-(end == 1)]) if kind == "S" else _KINDS[kind]
            for end, kind in enumerate((source, target))
        ]
        if row.forward_collective is not None:
            if source == "P" and spmd.maybe_get_axis_local_type(x, on) is spmd.V:
                ends[0] = spmd.V  # no rule made a sum of sharded operands P
            name = row.forward_collective.replace("-", "_")
            return getattr(rules, name)(x, on, src=ends[0], dst=ends[1])
        change = rules.reinterpret if "E" in (source, target) else rules.convert
        return change(x, on, src=ends[0], dst=ends[1])

    return rule


def _dims(row: Transition) -> tuple[str, ...]:
    """Name the arguments of a transition that are dims."""
    count = (row.source, row.target).count("S")
    return ("from_dim", "to_dim") if count == 2 else ("dim",) if count and "E" not in (row.source, row.target) else ()


def _transition(
    function: Callable[..., Tensor], rule: Callable[..., Any], dims: tuple[str, ...], axes: Axes
) -> Callable[..., Tensor]:
    def typed(x: Tensor, axis: str, *arguments: Any, **options: Any) -> Tensor:
        if not spmd.is_type_checking():
            return function(x, axis, *arguments, **options)
        with untyped():
            value = function(x, axis, *arguments, **options)
            value = value.view_as(value) if value is x else value
            alias = x.view_as(x)  # a rule notes the dim on its operand, which another axis may shard in another dim
        kinds = kinds_of(x, axes)
        if kinds.get(axis) is spmd.I and not x.is_floating_point():  # without a gradient I is R
            kinds[axis] = spmd.R
        give(alias, kinds, axes)
        given = dict(zip(dims, arguments)) | {name: options[name] for name in dims if name in options}
        typed_as = rule(alias, axes[axis], *(given[name] for name in dims)) if axis in axes else alias
        return give(value, kinds_of(typed_as, axes), axes)

    return typed


def declare_collectives(module: ModuleType, axes: Axes) -> None:
    """Type the functions of an emitted ``collectives.py``, those that it has, before other files import them by name."""
    groups = {axis: axes.get(axis) for axis in ("pp", *axes, "dp_shard", "dp_expert", "cp", "ep", "tp")}
    for each in (module, all_collectives):
        each.bind(groups)
    everywhere = dict.fromkeys(axes, spmd.R)
    own: dict[str, Any] = {name: getattr(module, name, None) for name in ("rank", "global_index", "_piece")}

    def rank(axis: str) -> Any:
        """Return the rank as a number that differs between ranks."""
        number = own["rank"](axis)
        kinds: Kinds = {axes[name]: spmd.V if name == axis else spmd.R for name in axes}
        return spmd.Scalar(number, kinds) if spmd.is_type_checking() and axis in axes else number

    def global_index(size: int, axis: str, *arguments: Any, **options: Any) -> Tensor:
        with untyped():
            value: Tensor = own["global_index"](size, axis, *arguments, **options)
        return give(value, everywhere | _on(axis, spmd.V, axes), axes)

    def piece(*arguments: Any) -> Tensor:
        """Run it untyped, as in the backward, where nothing has a type."""
        with untyped():
            value: Tensor = own["_piece"](*arguments)
        return value

    for name, row in FUNCTIONS.items():  # those that it lacks may be what a product beside a collective is typed as
        if not row.of_rows and row is not ROUNDED:
            function = getattr(module, str(name), row.called)
            _declare(module, {str(name): _transition(function, _rule(row), _dims(row), axes)}, lacking=True)
    _declare(module, {"rank": rank, "global_index": global_index, "_piece": piece})
    if hasattr(module, "own_group"):
        _declare(module, {"own_group": _transition(module.own_group, _to_own, (), axes)})
    declare_composites(module, axes, module)


def declare_expert_rows(module: ModuleType, axes: Axes) -> None:
    """Type the functions of an emitted ``expert_rows.py``, those that it has; :func:`declare_collectives` comes before."""
    own: dict[str, Any] = {name: getattr(module, name, None) for name in ("rank_ends", "own_offsets")}
    exchange = getattr(module, "Exchange", None)

    def rank_ends(offs: Tensor, axis: str, *room: Any, **factor: float) -> Any:
        if axis in axes and kinds_of(offs, axes)[axis] not in (spmd.R, spmd.I):
            raise spmd.SpmdTypeError(f"the offsets of rows are not the same on every rank: {types_text(offs, axes)}")
        with untyped():
            return own["rank_ends"](offs, axis)

    def own_offsets(offs: Tensor, axis: str, *ends: Any) -> Tensor:
        with untyped():
            value: Tensor = own["own_offsets"](offs, axis)
        return give(value, kinds_of(offs, axes) | {axis: spmd.V}, axes)

    def exchange_of(offs: Tensor, axis: str, *room: Any, **factor: float) -> Any:
        """Nothing travels here, so as many rows come as go; every expert gets equally many."""
        count = offs.size(0) // module.size(axis)
        with untyped():
            ends = offs.new_ones(count).cumsum(0, dtype=offs.dtype)
            ends = ends if offs.is_meta else (ends * offs[-1]).div(count, rounding_mode="floor").to(offs.dtype)
        give(ends, kinds_of(offs, axes) | _on(axis, spmd.V, axes), axes)
        assert exchange is not None
        return exchange([], [], ends, ends)

    def kept(x: Tensor, axis: str, exchange: Any) -> Tensor:
        return x.clone()

    halves = {function.__name__ for pair in HALVES.values() for function in pair}
    for name, row in FUNCTIONS.items():
        if row.of_rows:
            function = kept if name in halves else getattr(module, str(name), row.called)
            _declare(module, {str(name): _transition(function, _rule(row), _dims(row), axes)})
    _declare(module, {"rank_ends": rank_ends, "own_offsets": own_offsets, "exchange_of": exchange_of})
    _declare(module, {"_sent": kept, "_returned": kept})


DECLARED = {"collectives": declare_collectives, "expert_rows": declare_expert_rows}
"""What types the functions of a file of the package, in this order and before those of others."""


def _declare(module: ModuleType, functions: Mapping[str, Callable[..., Any]], lacking: bool = False) -> None:
    """Put functions in the place of those that a module has, and of those that are ``lacking``."""
    for name, function in functions.items():
        if lacking or hasattr(module, name):
            setattr(module, name, function)


def _on(axis: str, kind: Any, axes: Axes) -> Kinds:
    return {axis: kind} if axis in axes else {}


def _to_own(x: Tensor, on: Any) -> Any:
    return rules.reinterpret(x, on, src=spmd.R, dst=spmd.V)


# ---- composite operators ---------------------------------------------------------------------------------------


def declare_composites(module: ModuleType, axes: Axes, collectives: ModuleType) -> None:
    """Type the composite operators of a file of the package, before other files import them by name."""
    for name, composite in COMPOSITES.items():
        if (function := getattr(module, name, None)) is not None:
            typed = (
                functools.partial(composite.parts, collectives)
                if composite.composed
                else _typed(function, composite, axes)
            )
            setattr(module, name, typed)
    if module is not collectives and hasattr(module, "rank"):
        # a number in a function that is typed as a whole, whose backward runs where nothing has a type
        setattr(module, "rank", lambda axis: collectives._axes[axis][2])  # noqa: B010  a module's type has no such name


def _typed(function: Callable[..., Tensor], composite: Composite, axes: Axes) -> Callable[..., Tensor]:
    """Return a function that is typed by its declaration on its axes, and by its parts on the others."""
    signature, declared = inspect.signature(function), composite.types

    def typed(*arguments: Any, **options: Any) -> Tensor:
        if not spmd.is_type_checking():
            return function(*arguments, **options)
        given = signature.bind(*arguments, **options).arguments
        own = [axis for axis in axes_of(given) if axis in axes]
        operands = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        kinds = {name: kinds_of(value, axes) for name, value in operands.items()}
        if declared is not None:
            fits = {
                axis: all(_fits(operands[n], kinds[n].get(axis), declared.operands.get(n, R)) for n in operands)
                for axis in own
            }
            wrong = [axis for axis in own if not fits[axis]]
            if wrong:
                found = ", ".join(f"{name} {types_text(value, axes)}" for name, value in operands.items())
                raise spmd.SpmdTypeError(f"{function.__name__} takes {declared.text} on {wrong[0]}, not {found}")
        for axis in axes:  # without a gradient R is I
            if any(kind.get(axis) is spmd.I for kind in kinds.values()):
                still = (name for name, value in operands.items() if not value.requires_grad)
                kinds |= {name: kinds[name] | {axis: spmd.I} for name in still if kinds[name].get(axis) is spmd.R}
        degree = math.prod(axes[axis].size() for axis in own)
        with untyped():
            result = function(*arguments, **options)
            sharded = (
                {n for n, kind in declared.operands.items() if isinstance(kind, Shard)}
                if declared is not None
                else set()
            )
            whole = {
                n: _copy(value, declared.operands[n].dim if n in sharded else None, degree)  # type: ignore[union-attr]
                for n, value in operands.items()
            }
        for name, value in whole.items():
            give(value, kinds[name] | dict.fromkeys(own, spmd.R), axes)
        plain = {name: value for name, value in given.items() if name not in ("axis", "axes")} | whole
        types = kinds_of(composite.parts(**plain), axes)
        return give(result, types | dict.fromkeys(own, declared and kind_of(declared.result)), axes)

    return typed


def _fits(operand: Tensor, found: Any, expected: Type) -> bool:
    """Whether an operand has the type that is wanted on an axis; without a gradient I is R."""
    return found is kind_of(expected) or (expected is R and found is spmd.I and not operand.requires_grad)


def _copy(operand: Tensor, dim: int | None, degree: int) -> Tensor:
    """Return an operand as large as all shards together, of numbers that any index may have."""
    copy = operand.detach().clone()
    if dim is not None and degree > 1:
        copy = torch.cat([copy] * degree, dim)
    return copy if copy.is_floating_point() or copy.is_complex() else copy.zero_()
