"""Join the tensors that the ranks of a verified program wrote, by mesh coordinates.

    rank_0: wq.weight [2, 8]   rank_1: wq.weight [2, 8]  ──►  wq.weight [4, 8]     S(0) over tp=2
    rank_2: wq.weight [2, 8]   rank_3: wq.weight [2, 8]  ──►  wq.weight [4, 8]     its replica over dp_replicate=2

Every replica is kept as a separate copy, so that one that differs is found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from graphpar.runtime.layout import coordinates, joined_all, local_shape, local_shard, rank_at, shard_places
from graphpar.runtime.manifest import Manifest


class GatheredTensors:
    """The tensors that ranks wrote, with their shards joined: every copy of a tensor on the mesh."""

    def __init__(
        self,
        ranks: Sequence[Mapping[str, Tensor]],
        degrees: Mapping[str, int],
        program: Manifest | None,
        problems: list[str],
    ) -> None:
        self.ranks, self.degrees, self.program, self.problems = ranks, degrees, program, problems

    def holders(self, key: str) -> list[int]:
        """Return the ranks that wrote ``key``."""
        return [rank for rank, tensors in enumerate(self.ranks) if key in tensors]

    def copies(self, kind: str, key: str, name: str, shape: Sequence[int]) -> list[tuple[int, Tensor]]:
        """Return the joined copies of ``name`` that were written as ``key``, each with the rank of its first shard.

        A missing shard, a wrong shape, or padding that is not zero is added to ``problems``.
        """
        spec = self.program.stored(name) if self.program is not None else {}
        places = shard_places(spec, self.degrees)
        local = local_shape(shape, spec, self.degrees)
        sharded = dict.fromkeys((axis for place in places for axis in place), 0)
        found = []
        firsts = {rank_at(coordinates(rank, self.degrees) | sharded, self.degrees) for rank in self.holders(key)}
        for first in sorted(firsts):
            ranks = [rank_at(coordinates(first, self.degrees) | place, self.degrees) for place in places]
            missing = [rank for rank in ranks if key not in self.ranks[rank]]
            if missing:
                self.problems.append(f"{kind} {name}: rank {missing[0]} lacks its shard")
                continue
            pieces = [self.ranks[rank][key] for rank in ranks]
            wrong = next((piece.shape for piece in pieces if tuple(piece.shape) != local), None)
            if wrong is not None:
                self.problems.append(f"{kind} {name}: shape {tuple(wrong)} instead of {local}")
                continue
            whole = joined_all(pieces, shape, spec, self.degrees)
            found.append((first, whole))
            for rank, piece in zip(ranks, pieces) if sharded else ():
                if not same(local_shard(whole, spec, self.degrees, coordinates(rank, self.degrees)), piece):
                    self.problems.append(f"{kind} {name}: the padding of rank {rank}'s shard is not zero")
        return found


def same(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have equal values, where NaN equals NaN."""
    return torch.equal(first, second) or bool(((first == second) | (first.isnan() & second.isnan())).all())
