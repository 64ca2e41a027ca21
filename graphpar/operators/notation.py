"""Factor notation: one line says how an operator can be sharded.

    linear    "... k, n k -> ... n"          shard n: x R, weight S(0) -> S(-1)      shard k: x S(-1), weight S(1) -> P
    softmax   "... i -> ... i" fixed i       shard anything but i

Each tensor operand and result lists its factors, one for each dim. Sharding a factor that the result has gives ``S``; one that the
result lacks is summed, and gives ``P``. ``1`` stands for a dim of size 1 that is broadcast.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Factors = tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """An operator's factors. ``operands`` and ``results`` hold only tensors, in order.

    Attributes:
        fixed: factors that can't be sharded.
        padded: factors whose last shard may hold padding (the operator neither mixes nor sums their elements).
        linear: groups of operands in which the operator is linear while the others are fixed: all P gives P.
        uneven: the shards of a dim may have any sizes, zero included, since the operator works on each element by itself.
    """

    operands: tuple[Factors, ...]
    results: tuple[Factors, ...]
    fixed: frozenset[str] = frozenset()
    padded: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    uneven: bool = False

    def __str__(self) -> str:
        text = f"{_factors_text(self.operands)} -> {_factors_text(self.results)}"
        return f"{text}  fixed {' '.join(sorted(self.fixed))}" if self.fixed else text


def labelled(rank: int) -> Factors:
    """Name one factor for each dim."""
    return tuple(f"d{dim}" for dim in range(rank))


def _factors_text(tensors: Sequence[Factors]) -> str:
    return ", ".join(" ".join(factors) or "()" for factors in tensors)


def parse_rule(
    text: str,
    ranks: Sequence[int],
    result_ranks: Sequence[int],
    *,
    fixed: str | Iterable[str] = (),
    padded: str | Iterable[str] = (),
    linear: Iterable[Iterable[int]] = (),
) -> Rule:
    """Parse ``"... k, n k, n? -> ... n"`` for tensors with these numbers of dims; operands beyond ``ranks`` are left out.

    ``...`` stands for the leading dims, aligned at the right; a trailing ``?`` marks an optional operand.

    Raises:
        ValueError: the notation does not fit the tensors.
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise ValueError(f"rule {text!r} has no ->")
    operands = _tensors(left, ranks, text)
    results = _tensors(right, result_ranks, text)
    names = fixed.split() if isinstance(fixed, str) else fixed
    tolerant = padded.split() if isinstance(padded, str) else padded
    expanded = {name for factors in (*operands, *results) for name in factors if name.startswith("...")}
    return Rule(
        operands,
        results,
        frozenset(names),
        frozenset(tolerant) | (frozenset(expanded) if "..." in tolerant else frozenset()),
        tuple(frozenset(group) for group in linear),
    )


def _tensors(text: str, ranks: Sequence[int], rule: str) -> tuple[Factors, ...]:
    words = [part.split() for part in text.split(",")]
    required = [part for part in words if not any(word.endswith("?") for word in part)]
    if not len(required) <= len(ranks) <= len(words):
        raise ValueError(f"rule {rule!r} names {len(words)} tensors, but there are {len(ranks)}")
    found = []
    for part, rank in zip(words, ranks):
        names = [word.rstrip("?") for word in part]
        if "..." in names:
            place, free = names.index("..."), rank - (len(names) - 1)
            if free < 0:
                raise ValueError(f"rule {rule!r}: {' '.join(part)!r} does not fit a tensor of {rank} dims")
            names[place : place + 1] = [f"...{free - index}" for index in range(free)]
        if len(names) != rank:
            raise ValueError(f"rule {rule!r}: {' '.join(part)!r} does not fit a tensor of {rank} dims")
        found.append(tuple(names))
    return tuple(found)
