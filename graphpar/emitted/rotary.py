"""Rotary position embeddings (RoFormer, arXiv:2104.09864): pairs of features are turned by the angle of their position.

    (a, b)  ->  (a cos - b sin, b cos + a sin)

Three kernels forward and three backward, which turns back; of ``x`` nothing is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x [..., n] -> [..., n]. Features i and i + n / 2 are a pair; with ``interleaved`` 2 i and 2 i + 1.

    cos, sin: broadcast to x, or [..., n / 2] with one number a pair. They have no gradient.
    """
    if has_torch_function((x,)):  # what recomputes pointwise operators sees the call, as one of torch's
        turned: Tensor = handle_torch_function(apply_rotary, (x,), x, cos, sin, interleaved=interleaved)
        return turned
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():  # less work for the host
        return _rotated(x, cos, sin, interleaved)
    result: Tensor = _Rotary.apply(x, cos, sin, interleaved)
    return result


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    if not interleaved and x.size(-1) == cos.size(-1) == sin.size(-1):  # the same, with fewer views
        made = x * cos
        (a, b), (first, second), (left, right) = (each.chunk(2, -1) for each in (x, sin, made))
        left.addcmul_(b, first, value=-1)
        right.addcmul_(a, second)
        return made
    x, cos, sin = (_pairs(each, x.size(-1), interleaved) for each in (x, cos, sin))
    dim = -1 if interleaved else -2
    return _turned(x, cos, sin.select(dim, 0), sin.select(dim, -1), dim, 1)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        x, cos, sin = (_pairs(each, x.size(-1), interleaved) for each in (x, cos, sin))
        dim = -1 if interleaved else -2
        return _turned(x, cos, sin.select(dim, 0), sin.select(dim, -1), dim, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        width = gradient.size(-1)
        gradient, cos, sin = (_pairs(each, width, ctx.interleaved) for each in (gradient, *ctx.saved_tensors))
        dim = -1 if ctx.interleaved else -2
        return _turned(gradient, cos, sin.select(dim, -1), sin.select(dim, 0), dim, -1), None, None, None


def _pairs(x: Tensor, width: int, interleaved: bool) -> Tensor:
    """[..., n] -> [..., 2, n / 2], or [..., n / 2, 2] with ``interleaved``; 1 instead of 2 for one number a pair."""
    pair = min(2, 2 * x.size(-1) // width)
    made: Tensor = x.unflatten(-1, (-1, pair) if interleaved else (pair, -1))
    return made


def _turned(x: Tensor, cos: Tensor, first: Tensor, second: Tensor, dim: int, sign: int) -> Tensor:
    """Return (a cos - b first, b cos + a second) of the pairs of ``x`` in ``dim``, both sines times ``sign``."""
    made, (a, b) = x * cos, x.unbind(dim)
    made.select(dim, 0).addcmul_(b, first, value=-sign)
    made.select(dim, 1).addcmul_(a, second, value=sign)
    result: Tensor = made.flatten(-2)
    return result
