"""Whether dropout that kernels draw is seeded as it must be: alike for the same tensor, otherwise for any other.

Nothing here knows how a seed is made. Two tensors are told apart by their values: a rank's queries while dropout of attention is off, so
that ranks which hold the same tensor compute the same numbers. Where two are neither the same nor clearly others, nothing is said.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from graphpar.runtime.axes import REPLICAS
from graphpar.runtime.layout import coordinates
from graphpar.runtime.stages.dropout import Drawn

_SAME, _OTHER = 1e-5, 1e-3
"""Up to which difference two tensors are the same but for rounding, and from which they are others, over their norm."""


def seed_problems(drawn: Sequence[Sequence[Drawn]], mesh: Mapping[str, int]) -> list[str]:
    """Return what is wrong with the seeds that each rank drew with, in the order of its forward; the first of each kind."""
    if not any(drawn):
        return ["attention dropout: no rank drew any, though the plan says that kernels draw it"]
    return [problem for problem in (_drawn_twice(drawn), _drawn_apart(drawn, mesh)) if problem is not None]


def _drawn_twice(drawn: Sequence[Sequence[Drawn]]) -> str | None:
    """Find two different tensors with one seed."""
    first: dict[int, tuple[int, int, Drawn]] = {}
    for rank, calls in enumerate(drawn):
        for number, call in enumerate(calls):
            other_rank, other_number, other = first.setdefault(call.seed, (rank, number, call))
            if call.elements != other.elements or _difference(call, other) > _OTHER:
                return (
                    f"attention dropout: draw {other_number} of rank {other_rank} and draw {number} of rank {rank} have the same seed, but "
                    "different queries, so they drop by the same mask"
                )
    return None


def _drawn_apart(drawn: Sequence[Sequence[Drawn]], mesh: Mapping[str, int]) -> str | None:
    """Find a tensor that several ranks of one replica and stage hold, with different seeds."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(len(drawn)):
        place = coordinates(rank, mesh)
        groups.setdefault(tuple(place.get(axis, 0) for axis in ("pp", *REPLICAS)), []).append(rank)
    for first, rank in (pair for ranks in groups.values() for pair in itertools.combinations(ranks, 2)):
        if len(drawn[first]) != len(drawn[rank]):
            return f"attention dropout: rank {first} draws {len(drawn[first])} times, and rank {rank} {len(drawn[rank])} times"
        for number, (one, other) in enumerate(zip(drawn[first], drawn[rank])):
            same = one.elements == other.elements and one.norm > 0.0 and _difference(one, other) < _SAME
            if same and one.seed != other.seed:
                return (
                    f"attention dropout: draw {number} has different seeds on ranks {first} and {rank}, which hold the same query, so they "
                    "drop by different masks"
                )
    return None


def _difference(one: Drawn, other: Drawn) -> float:
    norm = max(one.norm, other.norm)
    return max(abs(one.norm - other.norm), abs(one.product - other.product)) / norm if norm else 0.0
