"""Owners: which of the ranks that share state updates each parameter at ZeRO level 1, so that the ranks' loads are even.

    sizes in the order of the program ──contiguous────► runs of neighbours; the largest load is the least that runs allow
                                      ──longest_first─► each to the least loaded rank, the largest first

A rank may own nothing. Experts, whose gradients come from other ranks, are assigned apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphpar.ir.program import Program
from graphpar.runtime.axes import GROUPS
from graphpar.runtime.checkpoints.weights import names_by_tie
from graphpar.runtime.layout import Shard


def contiguous(sizes: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Return the rank of each size, in runs, such that the largest of the ranks' loads is as small as can be.

    Args:
        loads: what each rank already has.
    """
    low, high = max([*loads, *sizes], default=0), max(loads) + sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if _filled(sizes, loads, middle) is None else (low, middle)
    found = _filled(sizes, loads, low)
    assert found is not None
    return found


def _filled(sizes: Sequence[int], loads: Sequence[int], most: int) -> list[int] | None:
    """Fill one rank after the other up to ``most``; None where not all fits."""
    rank, load, ranks = 0, loads[0], []
    for size in sizes:
        while load + size > most:
            rank += 1
            if rank == len(loads):
                return None
            load = loads[rank]
        load += size
        ranks.append(rank)
    return ranks


def longest_first(sizes: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Return the rank of each size: the largest first, each to the rank with the least load; ``loads``: as :func:`contiguous`."""
    filled, ranks = list(loads), [0] * len(sizes)
    for at in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        ranks[at] = min(range(len(filled)), key=lambda rank: (filled[rank], rank))
        filled[ranks[at]] += sizes[at]
    return ranks


_ASSIGN: dict[str, Callable[[Sequence[int], Sequence[int]], list[int]]] = {
    "contiguous": contiguous,
    "longest": longest_first,
}


def owners(program: Program, held: Sequence[Sequence[str]], ranks: int, policy: str) -> dict[str, int]:
    """Return the owner of each trained parameter, under the first name of a tie; nothing where ranks update slices (``flat``).

    Args:
        program: of one rank, so that sizes are those of its shards.
        held: the names of the parameters that each pp rank holds. One of several pp ranks has one owner.
        ranks: that share state.
    """
    if policy not in _ASSIGN:
        return {}
    assign = _ASSIGN[policy]
    tied = names_by_tie(program.ties)
    found: dict[str, int] = {}
    for names in held:
        firsts = dict.fromkeys(tied.get(name, (name,))[0] for name in names)
        trained = [name for name in firsts if program.parameters[name].requires_grad]
        for expert in (False, True):
            kind = [name for name in trained if _is_expert(program, name) == expert]
            new = [name for name in kind if name not in found]
            loads = [sum(program.parameters[name].numel for name in kind if found.get(name) == r) for r in range(ranks)]
            found |= zip(new, assign([program.parameters[name].numel for name in new], loads))
    return found


def _is_expert(program: Program, name: str) -> bool:
    return any(axis in GROUPS["expert"] and isinstance(kind, Shard) for axis, kind in program.parameters[name].spec)
