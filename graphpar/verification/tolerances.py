"""Tolerances of the comparison: by the dtype of each tensor, in one table.

Errors are relative (:func:`graphpar.verification.comparison.relative_error`). A run whose errors are all within ``clear`` is correct as
far as its dtype can show. Above that, rounding and a small bug can't be told apart, so both sides are run again in float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

KINDS = ("loss", "gradient", "norm", "parameter", "buffer", "optimizer", "output")


@dataclass(frozen=True)
class Precision:
    """The tolerances of a dtype. ``allowed``: the largest error of each kind; ``clear``: errors up to this can't hide a bug."""

    name: str
    allowed: Mapping[str, float]
    clear: float


def _alike(error: float) -> dict[str, float]:
    return dict.fromkeys(KINDS, error)


# A gradient that consists of rounding in float32, where it may reach a thousandth of the largest one, is wrong by some 1e-9 in float64.
# Rounding of correct programs in float32 is 1e-7 to 1e-6; an eps that is off by 1e-6 gives 1e-5 and less. In 16 bits a bug of a percent
# looks like rounding, so nothing is clear there.
PRECISIONS: dict[torch.dtype, Precision] = {
    torch.float64: Precision("fp64", _alike(1e-8), 1e-8),
    torch.float32: Precision("fp32", _alike(1e-5), 3e-6),
    torch.float16: Precision("fp16", {**_alike(5e-3), "gradient": 2e-2, "norm": 2e-2}, 0.0),
    torch.bfloat16: Precision("bf16", {**_alike(2e-2), "gradient": 1e-1, "norm": 1e-1}, 0.0),
}
EXACT = Precision("exact", _alike(0.0), 0.0)
"""For integers and booleans."""

_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def precision(dtype: torch.dtype) -> Precision:
    """Return the tolerances of a dtype."""
    return PRECISIONS.get(_REAL.get(dtype, dtype), EXACT)


def least_precise(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the least precise of the floating dtypes; float32 where there is none."""
    floating = [dtype for dtype in dtypes if dtype in PRECISIONS]
    return max(floating, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
