"""Samples of long matrices of tests: others in each run; all of them with ``GRAPHPAR_SAMPLE=all``, or those of a seed."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
SEED = os.environ.get("GRAPHPAR_SAMPLE") or os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(random.randrange(10**6))
"""The same in all processes of a run, which collect the same tests."""


def sample(items: Sequence[T], number: int) -> list[T]:
    """Draw ``number`` of the items, in their order."""
    if SEED == "all" or number >= len(items):
        return list(items)
    chosen = set(random.Random(SEED).sample(range(len(items)), number))
    return [item for place, item in enumerate(items) if place in chosen]


def drawn(items: Sequence[Any], fast: int, slow: int = 0) -> list[Any]:
    """Draw ``fast`` of a matrix's items for the fast tests, and ``slow`` of the others for the slow ones; return pytest's parameters."""
    if SEED == "all" or fast >= len(items):
        return list(items)
    order = random.Random(f"{SEED} drawn").sample(range(len(items)), min(fast + slow, len(items)))
    marks = {place: (pytest.mark.slow,) if number >= fast else () for number, place in enumerate(order)}
    found = []
    for place in sorted(marks):
        item = items[place]
        found.append(pytest.param(*(item if isinstance(item, tuple) else (item,)), marks=marks[place]))
    return found
