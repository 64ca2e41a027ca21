"""Products in 8 bits (float8_e4m3fn), with a scale for each row: torchao's recipe ``rowwise_with_gw_hp``.

                                                  rows that have a scale
    result          y   =  x @ weight.T           of x, and of weight
    gradient of x       =  g @ weight             of g, and columns of weight
    gradient of weight  =  g.T @ x                none: in the dtype of x

A scale is a power of two, the least by which the largest value of a row fits into 8 bits, so it rounds nothing
itself. Where the ranks of an axis divide what is summed, each scales the shards that it multiplies, and no scale is
sent. On CUDA the products run on the units for 8 bits; elsewhere the same rounded numbers are multiplied in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

FP8 = torch.float8_e4m3fn


def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``F.linear`` of rounded operands. x [.., d], weight [e, d] -> [.., e]"""
    result: Tensor = _Linear.apply(x, weight)
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x.reshape(-1, x.size(-1)), weight).view(*x.shape[:-1], weight.size(0))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.size(-1))
        of_x = _product(rows, weight.t()).view(x.shape) if ctx.needs_input_grad[0] else None
        of_weight = rows.t() @ x.reshape(-1, x.size(-1)) if ctx.needs_input_grad[1] else None
        return of_x, of_weight


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k], b [n, k] -> a @ b.T [m, n], both rounded"""
    if a.is_cuda and a.dtype is torch.bfloat16:
        return _product_of_whole(a, b)
    (a8, a_scale), (b8, b_scale) = _rounded(a), _rounded(b)
    wide = torch.float64 if a.dtype is torch.float64 else torch.float32
    return ((a8.to(wide) @ b8.to(wide).t()) * a_scale * b_scale.t()).to(a.dtype)


def _product_of_whole(a: Tensor, b: Tensor) -> Tensor:
    """The same on the units for 8 bits, which take 16 values at a time."""
    k, n = -a.size(1) % 16, b.size(0)
    if k or n % 16:
        a, b = F.pad(a, (0, k)), F.pad(b, (0, k, 0, -n % 16))
    (a8, a_scale), (b8, b_scale) = _rounded(a), _rounded(b)
    made = torch._scaled_mm(a8, b8.t(), a_scale, b_scale.t(), out_dtype=a.dtype, use_fast_accum=True)
    return made[:, :n]


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of ``x`` in 8 bits, and what they are to be multiplied by: [m, k] -> [m, k] in order, [m, 1]

    A row that is not finite has no such scale, and gives nan.
    """
    largest = x.abs().amax(1, keepdim=True)
    mantissa, exponent = torch.frexp(largest if x.dtype is torch.float64 else largest.float())
    exponent = (exponent - 9 + (mantissa > 0.875)).clamp(min=-126)  # the largest of 8 bits is 448 = 0.875 * 2 ** 9
    scale = torch.where(largest.isfinite(), torch.ldexp(torch.ones_like(mantissa), exponent), largest)
    return (x / scale).to(FP8).contiguous(), scale
