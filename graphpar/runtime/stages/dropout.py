"""Dropout that does not depend on how the batch is split: keys of examples, and the seeds that torch's own kernel draws with.

A key is a function of (seed, step, index of the example in the global batch) alone, so a mask that is drawn
from it is the same on one device and in any pipeline, with any number of microbatches. The mixing function
is splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), in
int64 arithmetic that wraps around.

    with watch_seeds(package): the emitted attention computes without dropout  ──►  [Drawn(seed, what the query was), ...]

The emitted ``random_streams.py`` makes those seeds from the keys; nothing of them is kept between steps.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphpar.runtime.option_kinds import DROPOUTS

_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_ALL = (1 << 64) - 1


def sample_keys(seed: int, step: int, count: int, device: torch.device | str | None = None) -> Tensor:
    """Return one key for each of the ``count`` examples of the global batch of this step: int64 ``[count]``."""
    start = _mixed(_mixed(seed) ^ step * _GAMMA)
    x = (torch.arange(1, count + 1, device=device) * _wrapped(_GAMMA)) + _wrapped(start)
    for bits, factor in ((30, _MIX_1), (27, _MIX_2)):
        x = (x ^ _shifted(x, bits)) * _wrapped(factor)
    return x ^ _shifted(x, 31)


def step_key(seed: int, step: int, device: torch.device | str | None = None) -> Tensor:
    """Return the key of what no dim of follows the batch, the same for all rows and ranks of a step: int64 ``[1]``."""
    return sample_keys(~seed, step, 1, device)


def _mixed(x: int) -> int:
    """Mix one number as the keys are mixed."""
    x &= _ALL
    for bits, factor in ((30, _MIX_1), (27, _MIX_2)):
        x = (x ^ x >> bits) * factor & _ALL
    return x ^ x >> 31


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A logical right shift; torch's is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _wrapped(value: int) -> int:
    """The int64 with the same 64 low bits as ``value``."""
    value &= _ALL
    return value - (1 << 64) if value >= 1 << 63 else value


def draw_in_one_kernel(package: str, device: torch.device) -> None:
    """Have an emitted package draw its masks by a kernel of Triton, where there is one for ``device``; the masks stay what they are."""
    streams: Any = sys.modules.get(f"{package}.random_streams")
    if streams is not None and device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from graphpar.runtime.stages import mask_kernel

        streams.drawn = mask_kernel.drawn


EXACT, KERNEL = DROPOUTS


@dataclass(frozen=True)
class Drawn:
    """One dropout of attention: its seed, and its query by its elements, its norm and its product with a fixed vector."""

    seed: int
    elements: int
    norm: float
    product: float

    @staticmethod
    def of(seed: int, query: Tensor) -> Drawn:
        """Describe ``query``, whose rounding changes the figures by no more than its own."""
        flat = query.detach().double().flatten()
        fixed = torch.arange(1, len(flat) + 1, dtype=torch.float64, device=flat.device).sin()
        return Drawn(seed, len(flat), float(flat.norm()), float(flat @ fixed))


def watch_seeds(package: str) -> list[Drawn]:
    """Turn the dropout that kernels draw off in an emitted package, and return a list to which each call adds."""
    streams: Any = sys.modules[f"{package}.random_streams"]
    plain, drawn = streams.kernel_attention, []

    def attention(
        query: Tensor, key: Tensor, value: Tensor, seed: int, mask: Tensor | None, dropout_p: float, *options: Any
    ) -> Tensor:
        if dropout_p > 0.0:
            drawn.append(Drawn.of(seed, query))
        result: Tensor = plain(query, key, value, seed, mask, 0.0, *options)
        return result

    streams.kernel_attention = attention
    return drawn
