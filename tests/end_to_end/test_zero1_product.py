"""Sharded optimizer state on eight ranks, with every combination of its choices: a sample, and all of them (slow)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.tools import zero1_product as product
from tests.tools.rank_pool import RankPool
from tests.tools.samples import sample


def _exact(errors: dict[product.Choice, float]) -> None:
    assert {each: error for each, error in errors.items() if not error <= product.TOLERANCE[each.dtype]} == {}


@pytest.mark.costly
def test_a_sample(pool: RankPool) -> None:
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")  # pytest shows it where the test fails
    drawn = random.Random(seed).sample([each for each in product.CHOICES if each.groups == 1 and each.shared > 1], 2)
    again = [replace(each, groups=2) for each in drawn]  # of the same program, which loads its weights again
    _exact(product.run(pool, [*drawn, *again]))


@pytest.mark.slow
def test_a_larger_sample(pool: RankPool) -> None:
    assert len(product.CHOICES) == 144
    _exact(product.run(pool, sample(product.CHOICES, 48)))
