"""Operators whose memory needs more than running them on fake tensors.

These are attention and norms by CUDA's kernels where there is no GPU, grouped products of any dtype, rows of experts whose number is
known only at run time, custom functions, and sharded random streams.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from graphpar.emitted import chunks, collectives, expert_rows, kv_cache, packed_attention
from graphpar.errors import GraphparError
from graphpar.ir.program import Chunked
from graphpar.operators.functions import OPERATORS, plain_apply
from graphpar.operators.transitions import HALVES

_SDPA = torch.ops.aten.scaled_dot_product_attention.default


def call_on_fakes(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: str, even_experts: bool) -> Any:
    """Run ``target`` with the memory it takes on ``device``; ``even_experts`` is as in
    :class:`graphpar.cost_models.activation_memory.Activations`.
    """
    if target in OPERATORS:
        made = plain_apply(OPERATORS[target].function, *OPERATORS[target].given(args))
        return made[0] if OPERATORS[target].alone else made
    if target is _SDPA and device == "cuda":
        return _attention_on_cuda(*args, **kwargs)
    if target in (
        packed_attention.packed_attention,
        packed_attention.balanced_packed_attention,
    ):  # of one document a row
        keys = args[1:3] if len(args) == 4 else [collectives.all_gather(x, args[4], 2) for x in args[1:3]]
        options = {name: value for name, value in kwargs.items() if name != "window"}
        return call_on_fakes(_SDPA, (args[0], *keys, None, 0.0, True), options, device, even_experts)
    if target is kv_cache.cached_attention and device == "cuda":
        return _cached_attention_on_cuda(*args, **kwargs)
    if kwargs.get("kernel"):
        return _attention_by_kernel(*args, **kwargs, device=device)
    if target is torch.ops.aten.rms_norm.default and device == "cuda":
        return rms_norm(*args[:3])
    if target in _OF_EXPERTS:
        return _OF_EXPERTS[target](even_experts, *args, **kwargs)
    if target is F.grouped_mm:
        return _grouped_product(*args, **kwargs)
    if "sharded" in kwargs:
        kwargs = kwargs | {"sharded": [_piece(*entry) for entry in kwargs["sharded"]]}
    return target(*args, **kwargs)


def two_chunks(function: Chunked, args: Sequence[Tensor]) -> Tensor:
    """Run a function in chunks on two of them, however many rows there are; the gradients of all rows are kept beside."""
    first = [_Chunks.apply(row, 2 * function.tokens) for row in args[: function.rows]]
    return chunks.in_chunks(function, first, args[function.rows :], function.tokens)


class _Chunks(torch.autograd.Function):
    """So many rows, whatever the argument's are; keeps what is as large as the argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(torch.empty_like(x) if x.requires_grad else None)
        return x.new_empty(rows, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


def _attention_by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    *args: Any,
    device: str,
    kernel: bool,
    training: bool = True,
    sharded: Any = (),
    **options: Any,
) -> Tensor:
    """Run :func:`graphpar.emitted.random_streams.dropout_attention` whose kernel draws; CPUs have none, so torch writes it out there."""
    run = _attention_on_cuda if device == "cuda" else F.scaled_dot_product_attention
    return run(query, key, value, *args, **options)


def _attention_on_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run ``F.scaled_dot_product_attention`` by CUDA's kernels."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    widths = query.size(-1), value.size(-1)
    if half and attn_mask is None and widths[0] == widths[1] <= 256 and widths[0] % 8 == 0:
        flash: Any = torch.ops.aten._scaled_dot_product_flash_attention
        result: Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return result
    if enable_gqa:
        plain: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=True
        )[0]
        return plain
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
        padding = -attn_mask.size(-1) % 16  # the kernel wants aligned rows
        attn_mask = F.pad(attn_mask, [0, padding]).narrow(-1, 0, attn_mask.size(-1)) if padding else attn_mask
        attn_mask = attn_mask.expand(*query.shape[:-1], key.size(-2))
    efficient: Any = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]


def _cached_attention_on_cuda(
    query: Tensor, key: Tensor, value: Tensor, length: int, *, sliding_window: int | None = None, **options: Any
) -> Tensor:
    """Run :func:`graphpar.emitted.kv_cache.cached_attention` by CUDA's kernels."""
    if options.get("softcap") is not None:  # no kernel's
        return kv_cache.cached_attention(query, key, value, length, sliding_window=sliding_window, **options)
    key, value, mask, causal = kv_cache.seen(query, key, value, length, sliding_window)
    return _attention_on_cuda(query, key, value, mask, is_causal=causal, **options)


def rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None) -> Tensor:
    """``F.rms_norm`` by CUDA's kernel, which keeps its operands and a statistic of each row; a CPU has no such kernel."""
    seen = has_torch_function((x,))
    made: Tensor = (
        handle_torch_function(rms_norm, (x,), x, shape, weight) if seen else _FusedNorm.apply(x, shape, weight)
    )
    return made


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None = None) -> Tensor:
        rows = x.new_empty((*x.shape[: x.ndim - len(shape)], *[1] * len(shape)), dtype=torch.float32)
        ctx.save_for_backward(x, rows, *([] if weight is None else [weight]))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        x, _, *weights = ctx.saved_tensors
        return torch.empty_like(x), None, torch.empty_like(weights[0]) if weights else None


def _grouped_product(x: Tensor, weight: Tensor, offs: Tensor | None = None) -> Tensor:
    """``F.grouped_mm`` of any dtype; torch's own supports fake tensors in bfloat16 only, though it multiplies others."""
    made: Tensor = _GroupedProduct.apply(x, weight, offs)
    return made


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offs: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, offs)
        return x.new_empty((*x.shape[:-1], weight.size(-1)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, _ = ctx.saved_tensors
        needed = ctx.needs_input_grad
        return torch.empty_like(x) if needed[0] else None, torch.empty_like(weight) if needed[1] else None, None


def _piece(dim: int, axis: str, parts: tuple[int, ...]) -> tuple[Any, ...]:
    """Return a sharded dim as the functions of random streams take it."""
    return (dim, collectives.rank(axis), collectives.size(axis), *([parts] if parts else []))


@dataclass(eq=False)
class _Even:
    """Replaces the ends of each rank's rows, or how they are exchanged: every rank has the same number, or ``room`` times it."""

    rows: int = field(default=0)
    offsets: Tensor | None = None
    order: Tensor | None = None
    places: Tensor | None = None
    rows_sent: Tensor | None = None
    room: float | None = None

    def held(self, rows: int, axis: str) -> int:
        """How many of all rows a rank has."""
        return min(rows, math.ceil(rows * (self.room or 1) / collectives.size(axis)))


def _rank_ends(even: bool, offs: Tensor, axis: str, rows: Tensor | None = None, room: float | None = None) -> _Even:
    if not even and room is None:
        raise GraphparError(
            "How many rows the experts of a rank get is known only when the program runs, and so is its memory. "
            "Set even_experts to assume that every rank gets the same number."
        )
    return _Even(room=room)


def _expert_rows(even: bool, x: Tensor, axis: str, ends: _Even) -> Tensor:
    ends.rows = x.size(0)
    own = x.narrow(0, 0, ends.held(x.size(0), axis))
    return own if ends.room is None else own.clone()


def _expert_sums(even: bool, x: Tensor, axis: str, ends: _Even) -> Tensor:
    assert ends.rows, "rows are summed before any were taken"
    return F.pad(x, [0, 0] * (x.ndim - 1) + [0, ends.rows - x.size(0)])


def _without_padding(even: bool, x: Tensor, ends: _Even) -> Tensor:
    return x.where(x.new_empty(x.size(0), dtype=torch.bool).view(-1, *[1] * (x.ndim - 1)), 0)


def _exchange_of(even: bool, offs: Tensor, axis: str, rows: Tensor | None = None, room: float | None = None) -> _Even:
    own = offs.size(0) // collectives.size(axis)
    return replace(_rank_ends(even, offs, axis, rows, room), offsets=offs.new_empty(own))


def _sent_rows(even: bool, x: Tensor, axis: str, exchange: _Even) -> Tensor:
    return _Moved.apply(x, _laid_out(x, axis, exchange).order, exchange)  # type: ignore[no-any-return]


def _laid_out(x: Tensor, axis: str, exchange: _Even) -> _Even:
    """As many rows come as go, or as there is room for; the order of those that came is kept, and with room the places of both."""
    if exchange.order is None:
        came = x.size(0) if exchange.room is None else collectives.size(axis) * exchange.held(x.size(0), axis)
        exchange.order = exchange.places = x.new_empty(came, dtype=torch.int64)
        if exchange.room is not None:
            exchange.rows_sent = torch.empty_like(exchange.order)
            exchange.places = x.new_empty(x.size(0), dtype=torch.int64)
    return exchange


def _half(function: Any) -> Any:
    """A function that begins to send rows, or ends that, as it is."""

    def run(even: bool, x: Tensor, axis: str, exchange: _Even) -> Any:
        order = _laid_out(x, axis, exchange).order
        assert order is not None and exchange.offsets is not None
        rows = [order.size(0), *[0] * (collectives.size(axis) - 1)]
        places = None if exchange.room is None else exchange.places
        return function(x, axis, expert_rows.Exchange(rows, rows, order, exchange.offsets, exchange.rows_sent, places))

    return run


def _returned_rows(even: bool, x: Tensor, axis: str, exchange: _Even) -> Tensor:
    assert exchange.places is not None, "rows return before any were sent"
    return _Moved.apply(x, exchange.places, exchange)  # type: ignore[no-any-return]


class _Moved(torch.autograd.Function):
    """Keeps what the exchange has, for the backward; a second tensor is there while rows are put in order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, exchange: _Even) -> Tensor:
        ctx.exchange, ctx.rows = exchange, x.size(0)
        return _in_order(x, order.size(0))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _in_order(gradient, ctx.rows), None, None


def _in_order(x: Tensor, rows: int) -> Tensor:
    return x.new_empty(max(x.size(0), rows), *x.shape[1:])[:rows].clone()


_OF_EXPERTS: dict[Any, Any] = {
    expert_rows.exchange_of: _exchange_of,
    expert_rows.send_rows: _sent_rows,
    expert_rows.return_rows: _returned_rows,
    **{function: _half(function) for halves in HALVES.values() for function in halves},
    expert_rows.received_ends: lambda even, exchange: exchange.offsets,
    expert_rows.rank_ends: _rank_ends,
    expert_rows.expert_rows: _expert_rows,
    expert_rows.expert_sums: _expert_sums,
    expert_rows.without_padding: _without_padding,
}
