"""Products in 8 bits (float8_e4m3fn), by recipes of torchao's. Values that have a scale together are

                                    of fp8_linear (rowwise_with_gw_hp)     of mxfp8_linear (mxfp8)
    result          y   =  x @ weight.T    a row of x, of weight           32 values of such a row
    gradient of x       =  g @ weight      a row of g, a column of weight  32 values of these
    gradient of weight  =  g.T @ x         none: in the dtype of x         32 tokens of a column of g, of x

mxfp8_linear_with_gw_hp has a gradient of the weight as that of fp8_linear. A scale is a power of two, the least by
which the largest of its values fits into 8 bits (torchao's RCEIL), so it rounds nothing itself. Where the ranks of an
axis divide what is summed, each scales the shards that it multiplies, and no scale is sent. On CUDA the products run
on the units for 8 bits, and those of blocks from compute capability 10 on; elsewhere the same rounded numbers are
multiplied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

FP8 = torch.float8_e4m3fn
BLOCK = 32


def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``F.linear`` of rounded operands. x [.., d], weight [e, d] -> [.., e]"""
    result: Tensor = _Linear.apply(x, weight, 0, False)
    return result


def mxfp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """The same with scales of blocks, also for the gradient of the weight. x [.., d], weight [e, d] -> [.., e]"""
    result: Tensor = _Linear.apply(x, weight, BLOCK, True)
    return result


def mxfp8_linear_with_gw_hp(x: Tensor, weight: Tensor) -> Tensor:
    """The same, but for the gradient of the weight. x [.., d], weight [e, d] -> [.., e]"""
    result: Tensor = _Linear.apply(x, weight, BLOCK, False)
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, block: int, rounds_all: bool) -> Tensor:
        reads_weight, reads_x = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if reads_x else None, weight if reads_weight else None)
        ctx.block, ctx.rounds_all = block, rounds_all
        return _product(x.reshape(-1, x.size(-1)), weight, block).view(*x.shape[:-1], weight.size(0))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        rows, of_x, of_weight = gradient.reshape(-1, gradient.size(-1)), None, None
        if weight is not None:
            of_x = _product(rows, weight.t(), ctx.block).view(*gradient.shape[:-1], weight.size(1))
        if x is not None:
            columns = x.reshape(-1, x.size(-1))
            of_weight = _product(rows.t(), columns.t(), ctx.block) if ctx.rounds_all else rows.t() @ columns
        return of_x, of_weight, None, None


def _product(a: Tensor, b: Tensor, block: int) -> Tensor:
    """a [m, k], b [n, k] -> a @ b.T [m, n], both rounded; every ``block`` values of k have a scale, or all (0)"""
    if a.is_cuda and a.dtype is torch.bfloat16 and (not block or _scales_blocks(a.device)):
        return _product_of_whole(a, b, block)
    wide = a.dtype if a.is_cuda or a.dtype is torch.float64 else torch.float32
    rows, columns = (_values(*_rounded(each, block))[:, : a.size(1)].to(wide) for each in (a, b))
    return (rows @ columns.t()).to(a.dtype)


def _scales_blocks(device: torch.device) -> bool:
    """Whether products take a scale for each block."""
    return torch.version.cuda is not None and bool(torch.cuda.get_device_properties(device).major >= 10)


def _product_of_whole(a: Tensor, b: Tensor, block: int) -> Tensor:
    """The same on the units for 8 bits, which take 16 values at a time."""
    k, n = -a.size(1) % (block or 16), b.size(0)
    if k or n % 16:
        a, b = F.pad(a, (0, k)), F.pad(b, (0, k, 0, -n % 16))
    (a8, a_scale), (b8, b_scale) = _rounded(a, block), _rounded(b, block)
    scales = (_in_tiles(a_scale), _in_tiles(b_scale)) if block else (a_scale.flatten(1), b_scale.flatten(1).t())
    made: Tensor = torch._scaled_mm(a8.flatten(1), b8.flatten(1).t(), *scales, out_dtype=a.dtype, use_fast_accum=True)
    return made[:, :n]


def _rounded(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return ``x`` in 8 bits, and what each of its blocks is to be multiplied by: [m, k] -> [m, blocks, block] in
    order, the last filled up with zeros, [m, blocks, 1]

    A block that is not finite has no such scale, and gives nan.
    """
    size = block or x.size(1)
    rest = -x.size(1) % size
    whole = (
        torch.cat([x, x.new_zeros(x.size(0), rest)], 1) if rest else x
    )  # F.pad would fix the number of rows in a trace
    blocks = whole.unflatten(1, (-1, size))
    largest = blocks.abs().amax(2, keepdim=True)
    mantissa, exponent = torch.frexp(largest if x.dtype is torch.float64 else largest.float())
    exponent = (exponent - 9 + (mantissa > 0.875)).clamp(min=-126)  # the largest of 8 bits is 448 = 0.875 * 2 ** 9
    scale = torch.where(largest.isfinite(), torch.ldexp(torch.ones_like(mantissa), exponent), largest)
    return (blocks / scale).to(FP8).contiguous(), scale


def _values(blocks: Tensor, scale: Tensor) -> Tensor:
    """Return what ``_rounded`` made as one dim: [.., blocks, block], [.., blocks, 1] -> [.., blocks * block]"""
    return (blocks.to(scale.dtype) * scale).flatten(-2)


def _in_tiles(scale: Tensor) -> Tensor:
    """Return scales [m, blocks, 1] as cuBLAS reads those of blocks: tiles of 128 rows and 4 blocks, in each of which
    the rows 0, 32, 64 and 96 begin, then 1, 33, .. (docs.nvidia.com/cuda/cublas: 1D block scaling factors layout).

    A byte has the exponent of a scale in 32 bits, as e8m0 does: + 127, and 255 of what is not finite."""
    exponents = (scale.squeeze(2).view(torch.int32) >> 23 & 255).to(torch.uint8)
    tiles = F.pad(exponents, (0, -exponents.size(1) % 4, 0, -exponents.size(0) % 128)).unflatten(0, (-1, 4, 32))
    in_order: Tensor = tiles.unflatten(3, (-1, 4)).permute(0, 3, 2, 1, 4)
    return in_order.reshape(-1).view(torch.float8_e8m0fnu)
