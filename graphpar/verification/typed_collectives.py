"""The functions of the emitted files that send, and of ``rotary.py`` and ``gated.py``, in the types of ``spmd_types``.

For :mod:`graphpar.verification.type_check`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types import rules
from torch import Tensor
from torch.nn import functional as F

from graphpar.emitted import collectives as all_collectives

Axes = Mapping[str, dist.ProcessGroup]
Kinds = dict[Any, Any]
"""The type of a value by the name of the axis: ``spmd.R``, ``I``, ``V`` or ``P``."""


@contextlib.contextmanager
def untyped() -> Iterator[None]:
    """Run without the checker."""
    with spmd.no_typecheck(), torch._C.DisableTorchFunction():
        yield


def kinds_of(value: Any, axes: Axes) -> Kinds:
    """Return the type of ``value`` on each axis where it has one."""
    found = {axis: spmd.maybe_get_axis_local_type(value, group) for axis, group in axes.items()}
    return {axis: kind for axis, kind in found.items() if kind is not None}


def give(value: Tensor, kinds: Kinds, axes: Axes) -> Tensor:
    """Tell the checker the types of ``value``, and return it."""
    spmd.assert_type(value, {axes[axis]: kind for axis, kind in kinds.items()})
    return value


def _pending(x: Any, group: dist.ProcessGroup) -> Any:
    """Return the type to reduce from: V where no rule made a sum of sharded operands P, else P."""
    return spmd.V if spmd.maybe_get_axis_local_type(x, group) is spmd.V else spmd.P


def _rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return rows that are other ones on every rank, as those that travel must be."""
    if spmd.maybe_get_axis_local_type(x, group) is not spmd.V:
        raise spmd.SpmdTypeError("rows that go to other ranks and come back are the same on every rank")
    return x


_RULES: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda x, on: rules.all_reduce(x, on, src=_pending(x, on), dst=spmd.I),
    "all_reduce_both": lambda x, on: rules.all_reduce(x, on, src=_pending(x, on), dst=spmd.R),
    "sum_gradient": lambda x, on: rules.convert(x, on, src=spmd.I, dst=spmd.R),
    "first_only": lambda x, on: rules.convert(x, on, src=spmd.R, dst=spmd.P),
    "reduce_scatter": lambda x, on, dim: rules.reduce_scatter(x, on, src=_pending(x, on), dst=spmd.S(dim)),
    "all_gather": lambda x, on, dim: rules.all_gather(x, on, src=spmd.S(dim), dst=spmd.R),
    "all_gather_invariant": lambda x, on, dim: rules.all_gather(x, on, src=spmd.S(dim), dst=spmd.I),
    "shard": lambda x, on, dim: rules.convert(x, on, src=spmd.R, dst=spmd.S(dim)),
    "shard_invariant": lambda x, on, dim: rules.convert(x, on, src=spmd.I, dst=spmd.S(dim)),
    "expert_rows": lambda x, on: rules.reinterpret(x, on, src=spmd.R, dst=spmd.V),
    "own_group": lambda x, on, dim: rules.reinterpret(x, on, src=spmd.R, dst=spmd.V),
    "expert_sums": lambda x, on: rules.reinterpret(x, on, src=spmd.V, dst=spmd.P),
    "send_rows": lambda x, on: _rows(x, on),
    "return_rows": lambda x, on: _rows(x, on),
    "all_to_all": lambda x, on, from_dim, to_dim: rules.all_to_all(x, on, src=spmd.S(from_dim), dst=spmd.S(to_dim)),
}
"""Each transition in the rules of ``spmd_types``, which refuses those that its type system does not have."""


def declare_collectives(module: ModuleType, axes: Axes) -> None:
    """Type the functions of an emitted ``collectives.py``, those that it has, before other files import them by name."""
    groups = {axis: axes.get(axis) for axis in ("pp", *axes, "dp_shard", "dp_expert", "cp", "ep", "tp")}
    for each in (module, all_collectives):
        each.bind(groups)
    for name, rule in _RULES.items():  # those that it lacks may be what a product beside a collective is typed as
        setattr(module, name, _transition(getattr(module, name, getattr(all_collectives, name)), rule, axes))
    everywhere = dict.fromkeys(axes, spmd.R)
    rank, size = module.rank, module.size

    def own(name: str) -> Any:
        return getattr(module, name, None)

    index, embedding, ends, offsets = (
        own(name) for name in ("global_index", "vocab_embedding", "rank_ends", "own_offsets")
    )
    exchange, piece, losses_of = (own(name) for name in ("Exchange", "_piece", "_vocab_losses"))

    def own_rank(axis: str) -> Any:
        """Return the rank as a number that differs between ranks."""
        kinds: Kinds = {axes[name]: spmd.V if name == axis else spmd.R for name in axes}
        return spmd.Scalar(rank(axis), kinds) if spmd.is_type_checking() and axis in axes else rank(axis)

    def global_index(size: int, axis: str, *arguments: Any, **options: Any) -> Tensor:
        with untyped():
            value: Tensor = index(size, axis, *arguments, **options)
        return give(value, everywhere | ({axis: spmd.V} if axis in axes else {}), axes)

    def own_piece(*arguments: Any) -> Tensor:
        with untyped():
            value: Tensor = piece(*arguments)
        return value

    def vocab_embedding(ids: Tensor, weight: Tensor, axis: str, **options: Any) -> Tensor:
        value: Tensor = embedding(ids, weight, axis, **options)
        if axis not in axes:
            return value
        if spmd.maybe_get_axis_local_type(weight, axes[axis]) is not spmd.V:
            raise spmd.SpmdTypeError(
                f"vocab_embedding takes a table that is sharded over {axis}, not {types_text(weight, axes)}"
            )
        rules.reinterpret(value, axes[axis], src=spmd.V, dst=spmd.P, out=value)
        return value

    def vocab_losses(logits: Tensor, target: Tensor, axis: str, vocab: int) -> Tensor:
        """Type the loss by its docstring on ``axis``, and as ``F.cross_entropy`` on the others."""
        kinds = [kinds_of(operand, axes) for operand in (logits, target)]
        if axis in axes and not (kinds[0].get(axis) is spmd.V and kinds[1].get(axis) in (spmd.R, spmd.I)):
            raise spmd.SpmdTypeError(
                f"vocab_cross_entropy takes logits that are sharded over {axis} and labels that are not, "
                f"not {types_text(logits, axes)} and {types_text(target, axes)}"
            )
        own: Kinds = {axis: spmd.I} if axis in axes else {}
        with untyped():
            value: Tensor = losses_of(logits, target, axis, vocab)
            whole = logits.detach().clone(), torch.zeros_like(target)  # any class that the shard has
        for operand, given in zip(whole, kinds):
            give(operand, given | dict.fromkeys(own, spmd.R), axes)
        return give(value, kinds_of(F.cross_entropy(*whole, reduction="none"), axes) | own, axes)

    def rank_ends(offs: Tensor, axis: str) -> Any:
        if axis in axes and kinds_of(offs, axes)[axis] not in (spmd.R, spmd.I):
            raise spmd.SpmdTypeError(f"the offsets of rows are not the same on every rank: {types_text(offs, axes)}")
        with untyped():
            return ends(offs, axis)

    def own_offsets(offs: Tensor, axis: str) -> Tensor:
        with untyped():
            value: Tensor = offsets(offs, axis)
        return give(value, kinds_of(offs, axes) | {axis: spmd.V}, axes)

    def exchange_of(offs: Tensor, axis: str) -> Any:
        """Nothing travels here, so as many rows come as go; every expert gets equally many."""
        own = offs.size(0) // size(axis)
        with untyped():
            ends = offs.new_ones(own).cumsum(0, dtype=offs.dtype)
            ends = ends if offs.is_meta else (ends * offs[-1]).div(own, rounding_mode="floor").to(offs.dtype)
        give(ends, kinds_of(offs, axes) | ({axis: spmd.V} if axis in axes else {}), axes)
        return exchange([], [], ends, ends)

    def kept(x: Tensor, axis: str, exchange: Any) -> Tensor:
        return x.clone()

    replaced = {
        "exchange_of": exchange_of,
        "_sent": kept,
        "_returned": kept,
        "rank": own_rank,
        "own_offsets": own_offsets,
        "rank_ends": rank_ends,
        "global_index": global_index,
        "_piece": own_piece,  # also run in the backward, where nothing is typed
        "vocab_embedding": vocab_embedding,
        "_vocab_losses": vocab_losses,
    }
    for name, function in replaced.items():
        if hasattr(module, name):
            setattr(module, name, function)


def declare_ring(module: ModuleType, axes: Axes) -> None:
    """Type the function of an emitted ``ring_attention.py``: sharded on its axis, as attention on the others."""
    ring = module.ring_attention

    def ring_attention(query: Tensor, key: Tensor, value: Tensor, axis: str, **options: Any) -> Tensor:
        operands = (query, key, value)
        kinds = [kinds_of(operand, axes) for operand in operands]
        if axis in axes and any(own.get(axis) is not spmd.V for own in kinds):
            found = ", ".join(types_text(operand, axes) for operand in operands)
            raise spmd.SpmdTypeError(f"ring_attention takes queries, keys and values sharded over {axis}, not {found}")
        with untyped():
            result: Tensor = ring(*operands, axis, **options)
            copies = [operand.detach().clone() for operand in operands]
        query, key, value = (give(operand, own, axes) for operand, own in zip(copies, kinds))
        local = F.scaled_dot_product_attention(query, key, value, enable_gqa=options.get("enable_gqa", False))
        return give(result, kinds_of(local, axes), axes)

    def plain_rank(axis: str) -> int:
        """Return the rank as a number: it is used where nothing is typed, also in the backward."""
        found: int = module._axes[axis][2]
        return found

    for name, function in {"ring_attention": ring_attention, "rank": plain_rank}.items():
        if hasattr(module, name):
            setattr(module, name, function)


def declare_rotary(module: ModuleType, axes: Axes) -> None:
    """Type the function of an emitted ``rotary.py``, whose backward is written out, as the products that it consists of."""
    rotary, pairs = module.apply_rotary, module._pairs

    def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
        operands = (x, cos, sin)
        kinds = [kinds_of(operand, axes) for operand in operands]
        with untyped():
            result: Tensor = rotary(*operands, interleaved)
            copies = [pairs(operand.detach(), x.size(-1), interleaved).clone() for operand in operands]
        for axis in (axis for axis, kind in kinds[0].items() if kind is spmd.I):  # tables have no gradient: R is I
            for table in kinds[1:]:
                table[axis] = spmd.I if table.get(axis) is spmd.R else table[axis]
        x, cos, sin = (give(operand, own, axes) for operand, own in zip(copies, kinds))
        return give(result, kinds_of(x * cos + x * sin, axes), axes)

    setattr(module, "apply_rotary", apply_rotary)  # noqa: B010  a module's type has no such name


def declare_gated(module: ModuleType, axes: Axes) -> None:
    """Type the functions of an emitted ``gated.py``, whose backward is written out, as an activation and a product."""

    def declared(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def gated(gate: Tensor, up: Tensor, *options: Any, **named: Any) -> Tensor:
            with untyped():
                result = function(gate, up, *options, **named)
            return give(result, kinds_of(F.silu(gate) * up, axes), axes)

        return gated

    for name in ("swiglu", "geglu"):
        if hasattr(module, name):
            setattr(module, name, declared(getattr(module, name)))


def declare_products(module: ModuleType, collectives: ModuleType) -> None:
    """Type the functions of an emitted ``parallel_products.py`` or ``ring_products.py`` as the collectives and products that they are."""
    Biases = Sequence[Tensor | None] | None

    def products(whole: Tensor, weights: Sequence[Tensor], biases: Biases) -> tuple[Tensor, ...]:
        return tuple(F.linear(whole, *pair) for pair in zip(weights, biases or [None] * len(weights)))

    def gathered_products(
        x: Tensor, weights: Sequence[Tensor], axis: str, dim: int, biases: Biases = None, in_order: bool = False
    ) -> tuple[Tensor, ...]:
        return products(collectives.all_gather(x, axis, dim=dim), weights, biases)

    def gathered_product(
        x: Tensor, weight: Tensor, axis: str, dim: int, bias: Tensor | None = None, in_order: bool = False
    ) -> Tensor:
        return gathered_products(x, [weight], axis, dim, [bias])[0]

    def scattered_product(x: Tensor, weight: Tensor, axis: str, dim: int) -> Tensor:
        result: Tensor = collectives.reduce_scatter(F.linear(x, weight), axis, dim=dim)
        return result

    def shared_products(x: Tensor, weights: Sequence[Tensor], axis: str, biases: Biases = None) -> tuple[Tensor, ...]:
        return products(collectives.sum_gradient(x, axis), weights, biases)

    def shared_product(x: Tensor, weight: Tensor, axis: str, bias: Tensor | None = None) -> Tensor:
        return shared_products(x, [weight], axis, [bias])[0]

    functions = (
        gathered_products,
        gathered_product,
        scattered_product,
        shared_products,
        shared_product,
    )
    for function in functions:
        for name in (function.__name__, f"ring_{function.__name__}"):
            if hasattr(module, name):
                setattr(module, name, function)


def _transition(function: Callable[..., Tensor], rule: Callable[..., Any], axes: Axes) -> Callable[..., Tensor]:
    dims = ("dim",) if "dim" in rule.__code__.co_varnames else rule.__code__.co_varnames[2:]

    def typed(x: Tensor, axis: str, *arguments: Any, **options: Any) -> Tensor:
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


def types_text(value: Tensor, axes: Axes) -> str:
    """Return the types of ``value``, as ``V@tp, R@cp``."""
    return ", ".join(f"{kind}@{axis}" for axis, kind in kinds_of(value, axes).items())
