"""``--explain mesh`` and other decisions: what the next best value would cost, in the seconds and bytes of the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphpar.cost_models.estimates import Estimate
from graphpar.passes.planning.next_best import DECISIONS, Alternatives, NextBest, costs
from graphpar.report.predicted import PART_NAMES, named
from graphpar.text import bytes_text, seconds_text

ALL = "plan"
"""The name that stands for all decisions."""
_LEAST = 1e-3
"""Differences below this share of a step, or of the peak memory, are not listed."""
_MOST = 12
"""How many blocks and cuts are priced for one pattern."""


class DecisionExplainer:
    """Explains decisions by name, and blocks and cuts by path."""

    def __init__(self, decisions: Alternatives) -> None:
        self.decisions = decisions
        self.found: list[NextBest] = []

    def named(self, pattern: str) -> list[str]:
        """Explain the decision ``pattern``, or all of them where it is ``plan``; empty where it is no decision."""
        names = DECISIONS if pattern == ALL else (pattern,) if pattern in DECISIONS else ()
        lines: list[str] = []
        for name in names:
            entries = self.decisions.next_best(name)
            self.found += entries
            lines += [f" {self._title(name, each)}: {self.text(each)}" for each in entries]
            if not entries:
                lines.append(f" {name}: there is one stage")
        return lines

    @staticmethod
    def _title(name: str, each: NextBest) -> str:
        return f"cut {each.decision}" if name == "cuts" else name

    def lines(self, name: str) -> list[str]:
        """Explain the recomputation of the block ``name``, and the cuts there; empty for anything else."""
        if len(self.found) >= _MOST:
            return []
        points = self.decisions.plan.split_points
        found = [self.decisions.cut(number) for number, point in enumerate(points) if point.path == name]
        block = self.decisions.block(name)
        found += [] if block is None else [block]
        self.found += found
        return [self.text(each) for each in found]

    def text(self, each: NextBest) -> str:
        """Write ``1F1B; next best GPipe (4 microbatches of 2): 45 ms a step instead of 43 ms (+4.7%): bubble +2 ms; peak ...``."""
        decided = "as in the given plan" if self.decisions.given else "pinned"
        pinned = f", {decided}" if each.pinned else ", not searched" if each.by_default else ""
        if each.estimate is None:
            return f"{each.value}{pinned}; no next best: {each.note}"
        note = f" ({each.note})" if each.note else ""
        with_ = f" ({_rest(each)})" if each.candidate is not None else ""
        searched = each.pinned and each.candidate is not None
        costs_text = compared(self.decisions.estimate, each.estimate, searched)
        return f"{each.value}{pinned}; next best {each.other}{with_}{note}: {costs_text}"

    def to_json(self) -> list[dict[str, Any]]:
        """Return what was explained as plain data, in seconds and bytes; ``costs`` are those of the next best above the plan's own."""
        taken = self.decisions.estimate
        return [
            {
                "decision": each.decision,
                "value": each.value,
                "pinned": each.pinned,
                "next_best": None
                if each.estimate is None
                else {
                    "value": each.other,
                    "plan": each.candidate,
                    "step_time_s": each.estimate.step_time_s,
                    "peak_memory_bytes": max(each.estimate.peak_memory_bytes),
                    "fits": each.estimate.missing_bytes <= 0,
                    "costs": costs(taken, each.estimate),
                },
                "note": each.note or None,
            }
            for each in self.found
        ]


def compared(taken: Estimate, other: Estimate, pinned: bool = False) -> str:
    """Write the step time and peak memory of ``other`` beside those of ``taken``, with the parts that differ.

    ``pinned``: ``other`` is the fastest without a pin of ``taken``, so the difference is what the pin costs.
    """
    data = costs(taken, other)
    least_s, least_bytes = _LEAST * taken.step_time_s, _LEAST * max(taken.peak_memory_bytes)
    parts = [
        f"{PART_NAMES.get(name, name)} {_signed(seconds_text(abs(more)), more)}"
        for name, more in _largest(data["parts_s"])
        if abs(more) >= least_s
    ]
    nbytes = [
        f"{name.replace('_', ' ')} {_signed(bytes_text(int(abs(more))), more)}"
        for name, more in _largest(data["memory"])
        if abs(more) >= least_bytes
    ]
    peaks = [max(each.peak_memory_bytes) for each in (other, taken)]
    text = f"{seconds_text(other.step_time_s)} a step instead of {seconds_text(taken.step_time_s)} ({data['relative']:+.1%}"
    text += f": {', '.join(parts)})" if parts else ")"
    text += f", peak {bytes_text(peaks[0])} instead of {bytes_text(peaks[1])}"
    text += f" ({', '.join(nbytes)})" if nbytes else ""
    if other.missing_bytes > 0:
        return f"{text}; it does not fit in {bytes_text(other.memory_bytes)}"
    if taken.missing_bytes > 0:
        return f"{text}; it fits, which this plan does not"
    if pinned:
        cost = taken.step_time_s - other.step_time_s
        return f"{text}; the pin costs {seconds_text(cost) + ' a step' if cost > 0 else 'nothing'}"
    return text


def _rest(each: NextBest) -> str:
    """Write what else the other plan has."""
    assert each.candidate is not None
    mesh, rest = named(each.candidate)
    return rest if each.decision == "mesh" else f"{mesh}, {rest}"


def _largest(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(parts.items(), key=lambda entry: -abs(entry[1]))


def _signed(text: str, value: float) -> str:
    return f"{'+' if value > 0 else '-'}{text}"
