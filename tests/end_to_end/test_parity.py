"""Training with sharded state gives the numbers of one device: samples of the parity matrix."""

from __future__ import annotations

import random

import pytest

from tests.tools import parity
from tests.tools.rank_pool import RankPool
from tests.tools.samples import sample


def _exact(errors: dict[parity.Combination, float]) -> None:
    wrong = {str(each): error for each, error in errors.items() if not error <= parity.TOLERANCE[each.dtype]}
    assert not wrong


@pytest.mark.costly
def test_a_sample(pool: RankPool) -> None:
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")  # pytest shows it where the test fails
    _exact(parity.run(pool, parity.chosen(seed, 3)))


def test_the_matrix_meets_every_choice_with_every_level() -> None:
    every = list(parity.combinations())

    assert len(every) >= 60 and len(set(every)) == len(every)
    for level in parity.LEVELS:
        of_level = [each for each in every if each.level == level]
        assert {each.model for each in of_level} == set(parity.MODELS)
        assert {each.schedule for each in of_level} >= set(parity.SCHEDULES)
        assert {each.accumulated for each in of_level} == {1, 3}
        assert {each.clipped for each in of_level} == {True, False}
    assert {each.prefetch for each in every if each.level == "3"} == {None, "pre", "post", "none"}


@pytest.mark.slow
def test_the_list_of_torchtitan(pool: RankPool) -> None:
    _exact(parity.run(pool, sample(list(parity.TORCHTITAN.values()), 12)))


@pytest.mark.slow
def test_twelve(pool: RankPool) -> None:
    """All are run by ``python -m tests.tools.parity``."""
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")
    _exact(parity.run(pool, random.Random(seed).sample(list(parity.combinations()), 12)))


@pytest.mark.slow
def test_in_16_bits(pool: RankPool) -> None:
    _exact(parity.run(pool, list(parity.in_16_bits())))
