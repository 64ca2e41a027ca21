"""Dropout of attention that torch's own kernel draws: which seeds it is drawn with.

    with watch_seeds(package): the emitted attention computes without dropout  ──►  [Drawn(seed, what the query was), ...]

The seeds are made by the emitted ``random_streams.py``, from the keys of the examples; nothing of them is kept between steps.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphpar.runtime.option_kinds import DROPOUTS

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
