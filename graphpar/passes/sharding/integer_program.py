"""``IntegerProgram``: an integer program for HiGHS, whose linear relaxation is solved by column generation.

    columns in groups, rows ──► relaxation over some groups ──duals──► groups that are worth adding ──► ... ──► its optimum

Hardly any of the possible transitions is taken, so most columns are never added: a group is when the duals say that the optimum may
fall with it. When there is none, the optimum is that over all columns. Where it is fractional, branching goes over the whole program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np

ALWAYS = -1
"""The group of columns and rows that are always part of the model."""
_TOLERANCE = 1e-10  # the smallest that HiGHS takes; the largest price is scaled to _SCALE
_SCALE = 1e4


@dataclass(frozen=True)
class Optimum:
    """The value of each column, and how far it may be from the best (relative)."""

    values: np.ndarray
    gap: float


class IntegerProgram:
    """Minimise ``objective``; every column is between 0 and 1, an ``integral`` one is 0 or 1.

    A group of columns is added together with its rows. Its leader is the column whose number names it; the others can be no larger
    than the leader.
    """

    def __init__(self) -> None:
        self.objective: list[float] = []
        self.integral: list[int] = []
        self.first: list[np.ndarray] = []  # groups of the initial model besides ALWAYS
        self._groups: list[np.ndarray] = []
        self._entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # rows, columns, coefficients
        self._bounds: list[tuple[int, float, float]] = []  # rows of equal bounds: how many, lower, upper
        self._row_groups: list[np.ndarray] = []
        self._rows = 0

    # ---- columns and rows ----

    def column(self, price: float, integral: bool) -> int:
        """Add one column to the initial model, and return its number."""
        number = len(self.objective)
        self.objective.append(price)
        self._groups.append(np.array([ALWAYS]))
        if integral:
            self.integral.append(number)
        return number

    def columns(self, prices: np.ndarray, groups: np.ndarray | None = None) -> np.ndarray:
        """Add columns, and return their numbers; each leads a new group where ``groups`` is None or -1."""
        numbers = np.arange(len(self.objective), len(self.objective) + len(prices))
        self.objective.extend(prices.tolist())
        self._groups.append(numbers if groups is None else np.where(groups < 0, numbers, groups))
        return numbers

    def row(self, terms: Sequence[tuple[int, float]], lower: float, upper: float) -> None:
        """Add one row, ``lower <= sum of terms <= upper``, to the initial model."""
        columns, coefficients = np.array([t[0] for t in terms], dtype=int), np.array([t[1] for t in terms])
        self.rows(1, np.zeros(len(terms), dtype=int), columns, coefficients, lower, upper)

    def rows(
        self,
        count: int,
        rows: np.ndarray,
        columns: np.ndarray,
        coefficients: np.ndarray,
        lower: float,
        upper: float,
        groups: np.ndarray | None = None,
    ) -> None:
        """Add ``count`` rows with equal bounds; ``rows``, ``columns`` and ``coefficients`` are their entries, rows counted from 0."""
        self._entries.append((rows + self._rows, columns, coefficients))
        self._bounds.append((count, lower, upper))
        self._row_groups.append(np.full(count, ALWAYS) if groups is None else groups)
        self._rows += count

    # ---- the optimum ----

    def solve(self, objective: Sequence[float] | None = None) -> Optimum | None:
        """Minimise ``objective`` (by default the columns' prices); None where it is infeasible."""
        prices = np.zeros(len(self.objective))
        given = self.objective if objective is None else objective
        prices[: len(given)] = given
        prices *= _SCALE / (float(np.abs(prices).max(initial=0.0)) or 1.0)
        model = _Model(self, prices)
        values = model.relaxed()
        if values is None:
            return None
        chosen = values[self.integral]
        if np.all(np.abs(chosen - np.round(chosen)) <= 1e-6):
            return Optimum(values, 0.0)
        return model.branched(np.array(self.integral))


class _Model:
    """The part of the program that HiGHS has."""

    def __init__(self, program: IntegerProgram, prices: np.ndarray) -> None:
        self.prices = prices
        rows, columns, self.coefficients = (np.concatenate(part) for part in zip(*program._entries))
        order = np.argsort(columns, kind="stable")
        self.entry_rows, self.coefficients = rows[order], self.coefficients[order]
        self.entry_columns = columns[order]
        self.lengths = np.bincount(columns, minlength=len(prices))
        counts = [bound[0] for bound in program._bounds]
        self.lower, self.upper = (np.repeat([bound[i] for bound in program._bounds], counts) for i in (1, 2))
        self.groups, self.row_groups = np.concatenate(program._groups), np.concatenate(program._row_groups)
        self.leads = self.groups == np.arange(len(prices))
        self.first = np.concatenate([*program.first, np.zeros(0, dtype=int)])
        self.start()

    def start(self) -> None:
        """Begin with an empty model."""
        self.highs = highspy.Highs()
        options: dict[str, bool | int | float | str] = {
            "output_flag": False,
            "threads": 1,
            "random_seed": 1,
            "presolve": "off",  # the relaxation is fast without
            "dual_feasibility_tolerance": _TOLERANCE,  # small enough for the tie-breaks between equal prices
            "mip_rel_gap": 1e-6,
            "mip_abs_gap": 0.0,
        }
        for name, option in options.items():
            self.highs.setOptionValue(name, option)
        self.place = np.full(len(self.prices), -1)  # of each column in HiGHS
        self.row_place = np.full(len(self.lower), -1)

    def relaxed(self) -> np.ndarray | None:
        """Return the optimum of the linear relaxation; None where it is infeasible."""
        self.add(np.concatenate(([ALWAYS], self.first)))
        while True:
            self.highs.run()
            if self.highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
                worth = np.unique(self.groups[self.place < 0])  # perhaps feasible with the rest
                if not len(worth):
                    return None
            else:
                worth = self.worth_adding()
                if not len(worth):
                    return self.values()
            self.add(worth)
            self.highs.setOptionValue("simplex_strategy", 4)  # primal: the last optimum is still feasible

    def values(self) -> np.ndarray:
        """Return the value of each column of the program; 0 where HiGHS does not have it."""
        found = np.zeros(len(self.prices))
        inside = self.place >= 0
        found[inside] = np.array(self.highs.getSolution().col_value)[self.place[inside]]
        return found

    def worth_adding(self) -> np.ndarray:
        """Return the groups with a negative reduced cost: with them the optimum may fall."""
        duals = np.zeros(len(self.lower))
        inside = self.row_place >= 0
        duals[inside] = np.array(self.highs.getSolution().row_dual)[self.row_place[inside]]
        gain = np.bincount(self.entry_columns, self.coefficients * duals[self.entry_rows], len(self.prices))
        reduced = self.prices - gain
        outside = np.flatnonzero(self.place < 0)
        own = np.where(self.leads, reduced, np.minimum(reduced, 0.0))[outside]
        return np.flatnonzero(np.bincount(self.groups[outside], own, len(self.prices)) < -_TOLERANCE)

    def add(self, groups: np.ndarray) -> None:
        """Add groups to the model: their rows, then their columns."""
        needed = np.zeros(len(self.prices) + 1, dtype=bool)  # the last is ALWAYS
        needed[groups] = True
        rows = np.flatnonzero(needed[self.row_groups] & (self.row_place < 0))
        self.row_place[rows] = self.highs.getNumRow() + np.arange(len(rows))
        none = np.zeros(0, dtype=np.int32)
        self.highs.addRows(len(rows), self.lower[rows], self.upper[rows], 0, none, none, np.zeros(0))
        inside = needed[self.groups] & (self.place < 0)
        columns = np.flatnonzero(inside)
        self.place[columns] = self.highs.getNumCol() + np.arange(len(columns))
        entries = inside[self.entry_columns]
        starts = np.cumsum(self.lengths[columns]) - self.lengths[columns]
        self.highs.addCols(
            len(columns),
            self.prices[columns],
            np.zeros(len(columns)),
            np.ones(len(columns)),
            int(entries.sum()),
            starts.astype(np.int32),
            self.row_place[self.entry_rows[entries]].astype(np.int32),
            self.coefficients[entries],
        )

    def branched(self, integral: np.ndarray) -> Optimum | None:
        """Return the integer optimum over all columns; None where it is infeasible."""
        self.start()
        self.add(np.unique(np.concatenate(([ALWAYS], self.groups))))
        self.highs.setOptionValue("presolve", "choose")
        kinds = np.full(len(integral), highspy.HighsVarType.kInteger.value, dtype=np.uint8)
        self.highs.changeColsIntegrality(len(integral), self.place[integral].astype(np.int32), kinds)
        self.highs.run()
        if self.highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        gap = self.highs.getInfo().mip_gap
        return Optimum(self.values(), float(gap) if math.isfinite(gap) else 0.0)
