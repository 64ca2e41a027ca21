"""``Explored``: the state of a search: the plans that it found, and the candidates that it has yet to try."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from graphpar.passes.planning.candidates import Candidate, Point, Priced
from graphpar.runtime.mesh import Mesh
from graphpar.text import plural, seconds_text

Entry = tuple[float, int, int, int]
"""A bound, the order of candidates that have the same, the number of one in its space, and its level."""


@dataclass
class Explored:
    """What a search has found so far, and what it has yet to try. Candidates go by their numbers in the space.

    Attributes:
        bounds: the first bound of each candidate that is tried; doubtful ones have one that needs no placements.
        heap: what is left to try, the most promising first.
        later: doubtful candidates that are left for when nothing else fits, as time is over.
        best: the fastest that fits, of each mesh.
        fastest: of all of these.
        hopeless: candidates that can't fit.
        lower: no candidate takes fewer seconds a step.
        exact: the best of each mesh with every microbatch simulated, once the search has ended.
        points: those that were priced.
        open: how many were not, for want of time.
        able: candidates that can run, those with a doubtful tp only once they are ``expanded``: tried after all, since no bound was above
            the best.
        impossible: how many of those that were looked at can't run.
        shown_at: when it was last told what the search is at.
        times: the seconds of the best of each mesh, ascending.
    """

    bounds: dict[int, float]
    able: list[int]
    impossible: int
    heap: list[Entry]
    later: list[Entry] = field(default_factory=list)
    best: dict[Mesh, Priced] = field(default_factory=dict)
    fastest: Priced | None = None
    misfits: list[Priced] = field(default_factory=list)
    hopeless: list[Candidate] = field(default_factory=list)
    lower: float = math.inf
    exact: list[Priced] = field(default_factory=list)
    points: dict[Candidate, Point] = field(default_factory=dict)
    open: int = 0
    expanded: list[int] = field(default_factory=list)
    shown_at: float = -math.inf
    times: list[float] = field(default_factory=list)
    _refined: dict[tuple[str, int], tuple[Priced, Priced]] = field(default_factory=dict)  # with what it was made of

    @property
    def least_s(self) -> float:
        """What is left to try takes no fewer seconds; infinity where nothing is."""
        return self.heap[0][0] if self.heap else math.inf

    def fits(self, priced: Priced) -> None:
        """Take a plan that fits, where it is the fastest of its mesh."""
        known = self.best.get(priced.candidate.mesh)
        if known is None or priced.rank_key < known.rank_key:
            self.best[priced.candidate.mesh] = priced
            self.times = sorted(each.estimate.step_time_s for each in self.best.values())
            if self.fastest is None or priced.rank_key < self.fastest.rank_key:
                self.fastest = priced

    def noted(self, priced: Priced) -> Priced:
        """Keep a priced candidate in short; of the same one the last price counts."""
        self.points[priced.candidate] = Point.of(priced)
        return priced

    def refined(self, priced: Priced, way: Callable[[Priced], Priced]) -> Priced:
        """Return what ``way`` makes of a plan, done once, and keep it in short."""
        key = way.__name__, id(priced)
        if key not in self._refined:
            self._refined[key] = priced, way(priced)
        return self.noted(self._refined[key][1])

    def text(self, candidates: int) -> str:
        """Say how far the search is, and the best plan so far."""
        text = f"planning: {len(self.points)} priced of {plural(candidates, 'plan')}"
        if self.fastest is None:
            return text
        return f"{text}, best so far {seconds_text(self.fastest.estimate.step_time_s)} a step ({self.fastest.candidate.mesh})"
