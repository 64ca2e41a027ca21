"""Sharded optimizer state on eight ranks, with every combination of its choices: a sample, and all of them (slow)."""

from __future__ import annotations

import random

import pytest

from tests import zero1_product as product
from tests.rank_pool import RankPool


def _exact(errors: dict[product.Choice, float]) -> None:
    assert {each: error for each, error in errors.items() if not error <= product.TOLERANCE[each.dtype]} == {}


def test_a_sample(pool: RankPool) -> None:
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")  # pytest shows it where the test fails
    _exact(product.run(pool, random.Random(seed).sample(product.CHOICES, 4)))


@pytest.mark.slow
def test_all(pool: RankPool) -> None:
    assert len(product.CHOICES) == 144
    _exact(product.run(pool, product.CHOICES))
