"""``Lengths``: the lengths of the sequence that a program takes, and where examples have them.

seq 128..4096    input_ids [8, 1024], labels [8, 1024]  ──resized──►  [8, 4096], [8, 4096]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from graphpar.runtime.option_kinds import Seq, ends_of, listed_lengths

T = TypeVar("T")


@dataclass(frozen=True)
class Lengths:
    """The lengths of a range, or of a list.

    Attributes:
        seq: the ends of the range, both included; or the list.
        dims: of each leaf of the example (arguments, then targets), the dims that are as long as the sequence.
        multiple: the lengths that a rank's program takes are multiples of it.
        fills: why results would change if a batch were padded to one of these; or the value of what is added to each input, by name: of
            the labels that the loss ignores. Other inputs repeat their last position.
    """

    seq: Seq
    dims: tuple[tuple[int, ...], ...]
    multiple: int = 1
    fills: str | Mapping[str, int] = field(default_factory=dict)

    @property
    def ends(self) -> tuple[int, int]:
        """The shortest and the longest length."""
        return ends_of(self.seq)

    @property
    def most(self) -> int:
        """The longest length."""
        return self.ends[1]

    @property
    def listed(self) -> tuple[int, ...]:
        """The lengths of a list, the shortest first; of a range nothing."""
        return listed_lengths(self.seq)

    def resized(self, example: T, length: int) -> T:
        """Return the example with sequences of this length: their beginnings, or repeated."""
        leaves, spec = tree_flatten(example)
        return tree_unflatten([_resized(leaf, dims, length) for leaf, dims in zip(leaves, self.dims)], spec)  # type: ignore[no-any-return]


def _resized(leaf: Any, dims: tuple[int, ...], length: int) -> Any:
    return at_length(leaf, dims, length) if isinstance(leaf, Tensor) else leaf


def at_length(value: Tensor, dims: Sequence[int], length: int) -> Tensor:
    """Return ``value`` with so many positions along each of ``dims``: its first ones, or its own repeated."""
    for dim in dims:
        value = value.index_select(dim, torch.arange(length, device=value.device) % value.shape[dim])
    return value


SIZES = "sizes_of_length"
"""Node metadata: for each dim of a value a :class:`Size`, where its size follows the length; of a dim that follows the batch, how many
times the batch it is."""


@dataclass(frozen=True)
class Size:
    """``each * length + rest``: a size that follows the length of the sequence."""

    each: Fraction
    rest: int

    def __str__(self) -> str:
        times = "" if self.each.numerator == 1 else f"{self.each.numerator} "
        over = "" if self.each.denominator == 1 else f"/{self.each.denominator}"
        return f"{times}s{over}{f'{self.rest:+}' if self.rest else ''}"


def per_position(
    sizes: Sequence[Size | None], coefficients: Sequence[int | None], rows: int, multiple: int
) -> tuple[int, ...]:
    """Return by how many elements each dim of a value of ``rows`` grows with ``multiple`` positions; nothing where none does."""
    found = tuple(
        0 if size is None else int(size.each * multiple) * (1 if coefficient is None else rows)
        for size, coefficient in zip(sizes, coefficients)
    )
    return found if any(found) else ()
