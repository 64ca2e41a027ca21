"""Random numbers that nobody keeps: torch's generator on a CPU goes on as if it had drawn them.

    weights of other stages ──► how many 32-bit words their draws take ──► the generator's state after these, in a fifth of a second

The generator is a Mersenne twister: each word is a linear function over bits, of the 624 words before. So the words that begin n later are
a sum (xor) of those that begin 0, 1, 2, ... later: of those whose power of x is in ``x^n`` modulo the characteristic polynomial. (Haramoto,
Matsumoto, Nishimura, Panneton, L'Ecuyer: Efficient Jump Ahead for F2-Linear Random Number Generators, 2008.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

aten = torch.ops.aten

_WORDS, _DEGREE = 624, 19937
_DRAWN = 2**22
"""Up to so many words are drawn, which is faster."""
_LEFT, _NEXT, _STATE = slice(8, 12), slice(16, 24), slice(24, 24 + 8 * _WORDS)
"""Where the bytes of a generator's state have how many words are left of its block (and one), the index of the next, and the block."""
_NORMAL = aten.normal_.default, aten.randn.default
_UNIFORM = aten.uniform_.default, aten.rand.default


def words(operator: Any, shape: Sequence[int], dtype: torch.dtype) -> int | None:
    """Return how many words ``operator`` draws for a contiguous tensor on a CPU; None where that isn't known."""
    count = math.prod(shape)
    if operator not in (*_NORMAL, *_UNIFORM) or not dtype.is_floating_point or count < 16:
        return None
    return _count(operator, count, dtype) if _is_known(operator, dtype, count % 16) else None


def _count(operator: Any, count: int, dtype: torch.dtype) -> int:
    # Normal numbers are made 16 at a time; the last 16 are drawn again where some are left over.
    again = 16 if operator in _NORMAL and count % 16 else 0
    return (count + again) * (2 if dtype == torch.float64 else 1)


@functools.cache
def _is_known(operator: Any, dtype: torch.dtype, rest: int) -> bool:
    """Whether this version of torch draws as many words as :func:`_count` says."""
    shape, after = (160 + rest,), []
    for drawn in (True, False):
        generator = torch.Generator().manual_seed(rest)
        torch.empty(1).normal_(generator=generator)  # which keeps a second one for later
        if not drawn:
            _jump(generator, _count(operator, math.prod(shape), dtype))
        elif operator in (aten.normal_.default, aten.uniform_.default):
            operator(torch.empty(shape, dtype=dtype), generator=generator)
        else:
            (torch.randn if operator in _NORMAL else torch.rand)(shape, dtype=dtype, generator=generator)
        after.append([torch.empty(1).normal_(generator=generator), torch.rand(2 * _WORDS, generator=generator)])
    return all(torch.equal(one, other) for one, other in zip(*after))


def skip(generator: torch.Generator, count: int) -> None:
    """Leave out the next ``count`` words of a generator on a CPU."""
    if count > _DRAWN:
        _jump(generator, count)
    elif count:
        torch.empty(count).uniform_(generator=generator)


def _jump(generator: torch.Generator, count: int) -> None:
    kept = generator.get_state()
    state: Any = kept.numpy()
    left, following, block = state[_LEFT].view(np.int32), state[_NEXT].view(np.int64), state[_STATE].view(np.uint64)
    coming = _sequence(block.astype(np.uint32))[_WORDS - int(left[0]) :]  # from the last word that was drawn on
    powers = np.frombuffer(_power(count).to_bytes(_DEGREE // 8 + 1, "little"), np.uint8)
    (chosen,) = np.unpackbits(powers, bitorder="little").nonzero()
    block[:] = np.bitwise_xor.reduce(np.lib.stride_tricks.sliding_window_view(coming, _WORDS)[chosen], axis=0)
    left[0], following[0] = _WORDS, 1
    generator.set_state(kept)


def _sequence(block: np.ndarray[Any, np.dtype[np.uint32]]) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return a block and the words after it, before they are tempered."""
    found = np.concatenate([block, np.zeros(_DEGREE + _WORDS, np.uint32)])
    step = _WORDS - 397
    for begin in range(_WORDS, len(found), step):
        end = min(begin + step, len(found))
        first, second = (found[begin - back : end - back] for back in (_WORDS, _WORDS - 1))
        mixed = (first & np.uint32(0x80000000)) | (second & np.uint32(0x7FFFFFFF))
        twisted = (mixed >> np.uint32(1)) ^ ((mixed & np.uint32(1)) * np.uint32(0x9908B0DF))
        found[begin:end] = found[begin - step : end - step] ^ twisted
    return found


@functools.lru_cache(64)
def _power(exponent: int) -> int:
    """Return ``x^exponent`` modulo the characteristic polynomial; bit i of a number is the coefficient of ``x^i``."""
    found = 1
    for bit in f"{exponent:b}":
        found = int("0".join(f"{found:b}"), 2) << int(bit)  # its square
        while high := found >> _DEGREE:
            found &= (1 << _DEGREE) - 1
            for power in _lower_powers():
                found ^= high << power
    return found


@functools.cache
def _lower_powers() -> tuple[int, ...]:
    """Return the powers of x in the characteristic polynomial, apart from the highest: by the algorithm of Berlekamp and Massey."""
    drawn = torch.empty(2 * _DEGREE, dtype=torch.int64).random_(2**32, generator=torch.Generator().manual_seed(1))
    connection, before, length, since, seen = 1, 1, 0, 1, 0
    for number, bit in enumerate((drawn & 1).tolist()):
        seen = seen << 1 | bit
        if (connection & seen).bit_count() % 2 == 0:
            since += 1
        elif 2 * length <= number:
            connection, before, length, since = connection ^ before << since, connection, number + 1 - length, 1
        else:
            connection, since = connection ^ before << since, since + 1
    assert length == _DEGREE
    return tuple(length - power for power in range(1, length + 1) if connection >> power & 1)
