"""``search_together``: the fastest plan of several planners, whose searches exclude each other's candidates.

planners ──the most promising candidate of all of them──► the fastest of each ──► the winner's search goes on to its alternatives

A planner whose bounds are above the fastest plan of another one stops there, so that ways to run a program that can't win cost no more
than their bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphpar.passes.planning.candidates import Priced, SearchResult
from graphpar.passes.planning.planner import NEAR, Planner
from graphpar.passes.planning.search_state import Explored


@dataclass
class _Rival:
    """A planner, what it has found so far, whether its search has ended, and whether that was the wider one."""

    planner: Planner
    found: Explored
    ended: bool = False
    widened: bool = False

    def tried(self) -> None:
        """Try the most promising candidate; where none fits and nothing is left, the wider search begins."""
        self.ended = not self.planner.step(self.found)
        if self.ended and not self.found.best and not self.widened:
            wider, self.widened = self.planner.wider(), True
            self.found, self.ended = (self.found, True) if wider is None else (wider, False)


def search_together(
    planners: Sequence[tuple[Planner, Explored]], wins: Callable[[int, Priced], bool]
) -> tuple[int, SearchResult]:
    """Return which planner has the fastest plan, and the result of its search, as if it alone had searched.

    Args:
        planners: each with its search as it begins; of equally fast plans that of an earlier one wins.
        wins: whether the fastest plan of a planner, by its number, is to be compared with those of the others.
    """
    rivals = [_Rival(planner, found) for planner, found in planners]
    seconds = 0.0
    while True:
        fastest = _explored(rivals, wins, seconds)
        best_s = max(min(fastest), seconds)
        ends: list[tuple[float, int]] = []
        for number, rival in enumerate(rivals):
            if fastest[number] <= NEAR * best_s and math.isfinite(fastest[number]):
                ranked = rival.planner.ranked(rival.found)
                if ranked and wins(number, ranked[0]):
                    ends.append((ranked[0].estimate.step_time_s, number))
        seconds, number = min(ends, default=(0.0, 0))
        if seconds <= best_s:
            break  # else simulating few microbatches underestimated it, and others may be faster after all
    winner = rivals[number]
    while not winner.ended:
        winner.tried()
    return number, winner.planner.result(winner.found)


def _explored(rivals: Sequence[_Rival], wins: Callable[[int, Priced], bool], least_s: float) -> list[float]:
    """Search until nothing that is left takes less than the fastest plan so far, or than ``least_s``; return the fastest of each."""
    while True:
        fastest = [_fastest_s(rival, number, wins) for number, rival in enumerate(rivals)]
        best_s = max(min(fastest), least_s)
        first = fastest.index(min(fastest))
        left = [
            (rival.found.least_s, number)
            for number, rival in enumerate(rivals)
            if not rival.ended and _may_win(rival, number < first, best_s)
        ]
        if not left:
            return fastest
        rivals[min(left)[1]].tried()


def _fastest_s(rival: _Rival, number: int, wins: Callable[[int, Priced], bool]) -> float:
    """Return the seconds of the rival's fastest plan so far; infinity where there is none, or it does not win anyway."""
    best = rival.found.fastest
    return math.inf if best is None or not wins(number, best) else best.estimate.step_time_s


def _may_win(rival: _Rival, earlier: bool, best_s: float) -> bool:
    """Whether what is left of the rival's search may take less than ``best_s``, or as much if it is ``earlier`` than the fastest, or the
    rival has yet to search wider."""
    bound = rival.found.least_s
    unsearched = not rival.found.heap and not rival.found.best
    return bound < best_s or (bound == best_s and earlier) or unsearched or not math.isfinite(best_s)
