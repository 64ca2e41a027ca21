"""Tolerances of the comparison: by the dtype of each tensor, in one table.

Errors are relative: see :func:`graphpar.verification.comparison.relative_error`. A run whose errors are all within ``clear`` is
right as far as its dtype can show. Above that, rounding and a small fault look alike, so both sides are run again in float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

KINDS = ("loss", "gradient", "norm", "parameter", "buffer", "output")


@dataclass(frozen=True)
class Precision:
    """The tolerances of a dtype. ``allowed``: the largest error of each kind; ``clear``: errors up to this can't hide a fault."""

    name: str
    allowed: Mapping[str, float]
    clear: float


def _alike(error: float) -> dict[str, float]:
    return dict.fromkeys(KINDS, error)


# A gradient that is nothing but rounding in float32, where it passes for as large as a thousandth of the largest one, is wrong by some 1e-9
# in float64. Rounding of honest programs in float32 is 1e-7 to 1e-6; an eps that is off by 1e-6 gives 1e-5 and less. In 16 bits a fault of
# a percent is like rounding, so nothing is clear there.
PRECISIONS: dict[torch.dtype, Precision] = {
    torch.float64: Precision("fp64", _alike(1e-8), 1e-8),
    torch.float32: Precision("fp32", _alike(1e-5), 3e-6),
    torch.float16: Precision("fp16", {**_alike(5e-3), "gradient": 2e-2, "norm": 2e-2}, 0.0),
    torch.bfloat16: Precision("bf16", {**_alike(2e-2), "gradient": 1e-1, "norm": 1e-1}, 0.0),
}
EXACT = Precision("exact", _alike(0.0), 0.0)
"""Of integers and truth values."""

_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def precision(dtype: torch.dtype) -> Precision:
    """Look up the tolerances of a dtype."""
    return PRECISIONS.get(_REAL.get(dtype, dtype), EXACT)


def least_precise(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Choose the least precise of the floating dtypes; float32 where there is none."""
    return max((dtype for dtype in dtypes if dtype in PRECISIONS), key=_coarseness, default=torch.float32)


def _coarseness(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps
