"""Samples of long matrices of tests: others in each run; all of them with ``GRAPHPAR_SAMPLE=all``, or those of a seed."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
SLOW_SHARE = 1 / 10
"""Of the slow tests a run has this share, drawn by the seed."""
COSTLY_SHARE = 1 / 15
"""Of the files with tests marked as costly a fast run has this share, and in them all that is costly: they share what costs."""
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


def set_aside(items: Sequence[pytest.Item]) -> None:
    """Mark as slow what this run does not draw of tests marked ``sampled(share)``: of each test's cases; and of tests marked
    ``costly``: those of most files.

    Two runs of one seed, the fast one and the slow one, draw from all of them together.
    """
    if SEED == "all":
        return
    groups: dict[str, list[pytest.Item]] = {}
    costly: dict[str, list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("sampled")
        if item.get_closest_marker("slow") is not None:
            continue
        if mark is not None:
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
        if item.get_closest_marker("costly") is not None:
            costly.setdefault(item.nodeid.partition("::")[0], []).append(item)
    for name, cases in groups.items():
        (share,) = {item.get_closest_marker("sampled").args[0] for item in cases}  # type: ignore[union-attr]
        number = max(1, round(share * len(cases)))
        _left_to_the_slow_run(cases, random.Random(f"{SEED} {name}").sample(range(len(cases)), number))
    number = max(1, round(COSTLY_SHARE * len(costly)))
    drawn_now = random.Random(f"{SEED} costly").sample(range(len(costly)), number) if costly else []
    for place, cases in enumerate(costly.values()):
        if place not in drawn_now:
            _left_to_the_slow_run(cases, ())


def _left_to_the_slow_run(cases: Sequence[pytest.Item], drawn_now: Sequence[int]) -> None:
    for place, item in enumerate(cases):
        if place not in drawn_now:
            item.add_marker("slow")


def drawn_slow(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the items without the slow ones that this run does not draw; all of them with the seed ``all``."""
    slow = [item for item in items if item.get_closest_marker("slow") is not None]
    if SEED == "all" or not slow:
        return list(items)
    number = max(1, round(SLOW_SHARE * len(slow)))
    kept = set(random.Random(f"{SEED} slow").sample(range(len(slow)), number))
    left = {item for place, item in enumerate(slow) if place not in kept}
    return [item for item in items if item not in left]
