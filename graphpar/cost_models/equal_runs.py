"""``EqualRuns``: which runs of a model's units are alike, so that of 126 equal layers a stage of any 9 has one price.

units   a b b b b c        runs (2, 4) and (3, 5) are (2, 4): b b after a b
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

Run = tuple[int, int]
"""The first unit, and the one after the last."""


class EqualRuns:
    """Runs of units of which equal ones have equal ``marks``.

    Runs are alike where their units are, in order, and the unit before the first; those that begin or end the model are like no others.

    Attributes:
        numbers: of each unit; equal ones have the same.
    """

    def __init__(self, marks: Sequence[Hashable]) -> None:
        numbers: dict[Hashable, int] = {}
        self.numbers = tuple(numbers.setdefault(mark, len(numbers)) for mark in marks)
        self._first: dict[object, Run] = {}
        self._known: dict[Run, Run] = {}

    def first(self, run: Run) -> Run:
        """Return the first run that was asked for of those like ``run``."""
        if run not in self._known:
            first, after = run
            before = self.numbers[first - 1] if first else None
            key = before, self.numbers[first:after], after == len(self.numbers)
            self._known[run] = self._first.setdefault(key, run)
        return self._known[run]
