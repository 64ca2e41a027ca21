"""Rotary embeddings that are written out, and the function that they become."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphpar.emitted.rotary import apply_rotary
from tests.tools.idiom_checks import LENGTH, WIDTH, check_idioms


def _half(x: Tensor) -> Tensor:
    return torch.cat([-x[..., x.size(-1) // 2 :], x[..., : x.size(-1) // 2]], -1)


def _every_two(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _angles(x: Tensor) -> Tensor:
    return torch.arange(LENGTH).to(x)[:, None] * 0.3 + torch.arange(WIDTH // 2).to(x)


def _tables(x: Tensor, twice: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    angles = twice(_angles(x))
    return angles.cos(), angles.sin()


def _joined(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, -1)
    turned = a * cos - b * sin, b * cos + a * sin
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


def _each(x: Tensor) -> Tensor:
    return x


def _rotated(x: Tensor, half: Callable[[Tensor], Tensor], twice: Callable[[Tensor], Tensor]) -> Tensor:
    cos, sin = _tables(x, twice)
    return x * cos + half(x) * sin


def _doubled(x: Tensor) -> Tensor:
    return torch.cat([x, x], -1)


def _interleaved(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, -1)


def _table(x: Tensor) -> Tensor:
    angles = _angles(x)
    return torch.polar(torch.ones_like(angles), angles)


def _pairs(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))


def _complex(x: Tensor, table: Tensor) -> Tensor:
    """Meta's Llama."""
    return torch.view_as_real(_pairs(x) * table).flatten(-2).type_as(x)


ROTARY: dict[str, Callable[[Tensor], Tensor]] = {
    "halves": lambda x: _rotated(x, _half, _doubled),
    "interleaved": lambda x: _rotated(x, _every_two, _interleaved),
    "a number a pair": lambda x: _joined(x, *_tables(x, _each)),
    "a number a pair, interleaved": lambda x: _joined(x, *_tables(x, _each), interleaved=True),
    "a part of the features": lambda x: torch.cat(
        [_joined(x[..., :4], *(each[:, :2] for each in _tables(x, _each))), x[..., 4:]], -1
    ),
    "complex numbers": lambda x: _complex(x, _table(x)),
    "complex numbers, of heads": lambda x: _complex(x.unflatten(-1, (2, -1)), _table(x)[:, None, :2]).flatten(2),
    "complex numbers, conjugated": lambda x: _complex(x, _table(x).conj()),
    "heads": lambda x: _rotated(x[:, None] * x[:, :2, None], _half, _doubled).sum(1),
}
NO_ROTARY: dict[str, Callable[[Tensor], Tensor]] = {
    "the other way": lambda x: x * _tables(x, _doubled)[0] - _half(x) * _tables(x, _doubled)[1],
    "other pairs": lambda x: _rotated(x, lambda each: each.flip(-1), _doubled),
    "of two tensors": lambda x: x * _tables(x, _doubled)[0] + _half(x * x) * _tables(x, _doubled)[1],
    "other positions": lambda x: _rotated(x, lambda each: _half(each).roll(1, 1), _doubled),
    "without a part of the gradient": lambda x: (
        x * _tables(x, _doubled)[0] + _half(x.detach()) * _tables(x, _doubled)[1]
    ),
    "complex numbers, one for all features": lambda x: _complex(x, _table(x)[:, :1]),
    "complex numbers, x conjugated": lambda x: torch.view_as_real(_pairs(x).conj() * _table(x)).flatten(-2),
    "complex numbers, parts exchanged": lambda x: torch.view_as_real(_pairs(x) * _table(x)).flip(-1).flatten(-2),
    "complex numbers with a gradient": lambda x: _complex(x, torch.complex(x[..., 0::2], x[..., 1::2])),
    "almost": lambda x: _rotated(x, lambda each: _half(each) * 1.0001, _doubled),
    "angles with a gradient": lambda x: x * x.mean(1, True).cos() + _half(x) * x.mean(1, True).sin(),
}


@pytest.mark.sampled(1 / 2)
@pytest.mark.parametrize("name", [*ROTARY, *NO_ROTARY])
def test_rotary_embeddings_that_are_written_out(name: str) -> None:
    function = (ROTARY | NO_ROTARY)[name]
    check_idioms(lambda x, m: function(m.weight * x).sin(), {"rotary": 1} if name in ROTARY else {}, torch.float64)


@settings(max_examples=20, deadline=None)
@given(
    rows=st.lists(st.integers(1, 3), min_size=0, max_size=3),
    pairs=st.integers(1, 5),
    interleaved=st.booleans(),
    whole=st.booleans(),
)
def test_apply_rotary(rows: list[int], pairs: int, interleaved: bool, whole: bool) -> None:
    """Any tables, also those in which the features of a pair have different numbers, forward and backward."""
    x = torch.randn(*rows, 2 * pairs, dtype=torch.float64, requires_grad=True)
    cos, sin = (torch.randn(*rows[-1:], (1 + whole) * pairs, dtype=torch.float64) for _ in range(2))
    twice, half = (_interleaved, _every_two) if interleaved else (_doubled, _half)
    expected = x * (cos if whole else twice(cos)) + half(x) * (sin if whole else twice(sin))
    found = apply_rotary(x, cos, sin, interleaved)

    torch.testing.assert_close(found, expected)
    gradient = torch.randn_like(x)
    ours, theirs = (torch.autograd.grad(each, x, gradient)[0] for each in (found, expected))
    torch.testing.assert_close(ours, theirs)
