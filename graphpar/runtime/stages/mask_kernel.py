"""Dropout masks in one kernel of Triton, with the bits that the emitted ``random_streams.drawn`` has.

Written out, the hash of one element is a dozen kernels that read and write eight bytes each; here it is computed in registers, and one
byte is written.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

BLOCK = 1024
"""Elements of a row that one program of the kernel computes."""

if importlib.util.find_spec("triton") is not None:  # torch for CPUs comes without
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def _drawn(rows, columns, mask, width, least, block: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        places = tl.program_id(1) * block + tl.arange(0, block)
        inside = places < width
        bits = tl.load(rows + row) + tl.load(columns + places, mask=inside, other=0)
        bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
        bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
        bits = bits ^ ((bits >> 31) & 0x1FFFFFFFF)
        tl.store(mask + row * width + places, ((bits >> 40) & 0xFFFFFF) >= least, mask=inside)


def drawn(rows: Tensor, columns: Tensor, least: int) -> Tensor:
    """Compute ``random_streams.drawn``: rows int64 [..., 1], columns int64 [1, ..., n] -> bool [..., n]."""
    width = columns.shape[-1]
    mask = torch.empty((*rows.shape[:-1], width), dtype=torch.bool, device=rows.device)
    if mask.numel():
        grid = (rows.numel(), triton.cdiv(width, BLOCK))
        _drawn[grid](rows.contiguous(), columns.contiguous(), mask, width, least, BLOCK)
    return mask
