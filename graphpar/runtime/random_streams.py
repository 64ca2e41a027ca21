"""Keys for dropout that do not depend on how the batch is split.

A key is a function of (seed, step, index of the example in the global batch) alone, so a mask that is drawn
from it is the same on one device and in any pipeline, with any number of microbatches. The mixing function
is splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), in
int64 arithmetic that wraps around.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def sample_keys(seed: int, step: int, count: int, device: torch.device | str | None = None) -> Tensor:
    """Return one key for each of the ``count`` examples of the global batch of this step: int64 ``[count]``."""
    start = _mix(torch.tensor(_wrapped(seed), dtype=torch.int64))
    start = _mix(start ^ _wrapped(step * _GAMMA))
    index = torch.arange(count, dtype=torch.int64)
    return _mix(start + (index + 1) * _wrapped(_GAMMA)).to(device or "cpu")


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _wrapped(_MIX_1)
    x = (x ^ _shifted(x, 27)) * _wrapped(_MIX_2)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A logical right shift; torch's is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _wrapped(value: int) -> int:
    """The int64 with the same 64 low bits as ``value``."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value
