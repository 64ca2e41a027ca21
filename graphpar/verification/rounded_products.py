"""Linear layers of the unpartitioned model in 8 bits: each part of what is summed has the scales of the rank that multiplies it.

Scales are of a row of such a part, or of 32 of its values; where gradients of weights are rounded, of 32 tokens of the
global batch, as a program rounds them only where these are of one sequence and one rank.

Written apart from the emitted functions (:mod:`graphpar.emitted.fp8`), so that neither can hide a mistake of the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphpar.runtime.layout import Shard, parse_type, shard_of

_LARGEST = 448.0
_plain_linear = F.linear  # which may be replaced by what calls this


class RoundedProducts:
    """``F.linear`` by weights that are rounded, and by others.

    Args:
        parameters: the model's, by name.
        weights: the names of those that are rounded, with the recipe of each and how it is divided: ``tp S(0)``, the
            outermost first.
        degrees: of the mesh.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        weights: Mapping[str, Sequence[str]],
        degrees: Mapping[str, int],
    ) -> None:
        self.rounded = {
            id(parameters[name]): _Rounded(
                _BLOCKS[recipe], recipe == "mxfp8", [_division(text, degrees) for text in texts]
            )
            for name, (recipe, *texts) in weights.items()
        }

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return what ``F.linear`` does, of rounded operands where the weight is one of those."""
        found = self.rounded.get(id(weight))
        if found is None:
            return _plain_linear(x, weight, bias)
        made: Tensor = _Linear.apply(x, weight, found)
        return made if bias is None else made + bias


class _Division(NamedTuple):
    shard: Shard
    degree: int


_BLOCKS = {"rowwise": None, "mxfp8": 32, "mxfp8_with_gw_hp": 32}
"""How many values have a scale, by recipe; None: all that are summed."""


class _Rounded(NamedTuple):
    """How a layer rounds: ``block`` values at a time, perhaps for the gradient of its weight, which is ``divided``."""

    block: int | None
    of_weight: bool
    divided: Sequence[_Division]

    def product(self, a: Tensor, b: Tensor, dim: int | None) -> Tensor:
        """a [.., k], b [n, k] -> [.., n], of parts of k as the weight's ``dim`` is divided, each with its own scales."""
        pairs = [(a, b)]
        for each in (each for each in self.divided if each.shard.dim == dim):
            pairs = [
                tuple(shard_of(x, replace(each.shard, dim=x.ndim - 1), each.degree, index) for x in pair)  # type: ignore[misc]
                for pair in pairs
                for index in range(each.degree)
            ]
        total = sum(self.rounded(x).flatten(0, -2) @ self.rounded(y).t() for x, y in pairs)
        assert isinstance(total, Tensor)
        return total.to(a.dtype).view(*a.shape[:-1], len(b))

    def rounded(self, x: Tensor) -> Tensor:
        """Return the values that 8 bits have of ``x``, by a power of two for each block of the last dim."""
        return torch.cat([_rounded(part) for part in x.split(self.block or x.size(-1), -1)], -1)


def _division(text: str, degrees: Mapping[str, int]) -> _Division:
    axis, _, kind = text.partition(" ")
    shard = parse_type(kind)
    assert isinstance(shard, Shard)
    return _Division(shard, degrees[axis])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, by: _Rounded) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.by = by
        return by.product(x, weight, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        of_x = ctx.by.product(gradient, weight.t(), 0)
        rows, columns = gradient.flatten(0, -2).t(), x.flatten(0, -2).t()
        return of_x, ctx.by.product(rows, columns, None) if ctx.by.of_weight else rows @ columns.t(), None


def _rounded(x: Tensor) -> Tensor:
    """Return the same by a power of two for each row of the last dim."""
    wide = x.double()
    largest = wide.abs().amax(-1, keepdim=True)
    scale = 2.0 ** (largest / _LARGEST).log2().ceil().clamp(min=-126)
    return (wide / scale).to(torch.float8_e4m3fn).double() * scale
