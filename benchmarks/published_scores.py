"""How good predictions are, as numbers: errors, ranks and regret inside groups, and outcomes.

    [Outcome(predicted, measured), ...] ──score──► Scores: mape, bias, tau, regret, oom_accuracy, false_fit, memory, bubble

Shares are fractions, bubbles are in percentage points. A score without anything to count is None.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

LEAST_GROUP = 3
"""Rows that a rank group must have to count."""


@dataclass(frozen=True)
class Outcome:
    """Predictions of a row and its measurements; None where either is missing.

    ``says``: the source says what its memory is. ``fits`` and ``ran``: predicted and measured. ``bubble``: shares.
    """

    id: str
    source: str
    counted: bool = True
    group: str | None = None
    step_time_s: tuple[float, float] | None = None
    memory_bytes: tuple[float, float] | None = None
    bubble: tuple[float, float] | None = None
    says: bool = False
    fits: bool | None = None
    ran: bool | None = None


@dataclass(frozen=True)
class Scores:
    """``rows`` have a step time; ``groups`` and ``grouped`` are rank groups and the rows in them; ``false_fit`` is of
    all outcomes; ``said`` is ``memory`` of sources that say what they print."""

    rows: int
    mape: float | None
    bias: float | None
    groups: int
    grouped: int
    tau: float | None
    regret: float | None
    outcomes: int
    oom_accuracy: float | None
    false_fit: float | None
    memories: int
    memory: float | None
    said: float | None
    bubbles: int
    bubble: float | None


def score(outcomes: Sequence[Outcome]) -> Scores:
    """Score a selection of outcomes; a score without anything to count is None."""
    times = [relative(outcome.step_time_s) for outcome in outcomes if outcome.step_time_s]
    memories = [abs(relative(outcome.memory_bytes)) for outcome in outcomes if outcome.memory_bytes]
    bubbles = [100 * abs(outcome.bubble[0] - outcome.bubble[1]) for outcome in outcomes if outcome.bubble]
    known = [
        (outcome.fits, outcome.ran) for outcome in outcomes if outcome.fits is not None and outcome.ran is not None
    ]
    groups = grouped(outcomes)
    sizes = [len(group) for group in groups]
    return Scores(
        rows=len(times),
        mape=mean([abs(error) for error in times]),
        bias=mean(times),
        groups=len(groups),
        grouped=sum(sizes),
        tau=mean([kendall(group) for group in groups], sizes),
        regret=mean([regret(group) for group in groups], sizes),
        outcomes=len(known),
        oom_accuracy=mean([float(fits == ran) for fits, ran in known]),
        false_fit=mean([float(fits and not ran) for fits, ran in known]),
        memories=len(memories),
        memory=mean(memories),
        said=mean(
            [abs(relative(outcome.memory_bytes)) for outcome in outcomes if outcome.memory_bytes and outcome.says]
        ),
        bubbles=len(bubbles),
        bubble=mean(bubbles),
    )


def relative(pair: tuple[float, float]) -> float:
    """Compute the error of (predicted, measured) relative to the measurement, with its sign."""
    return pair[0] / pair[1] - 1


def mean(values: Sequence[float], weights: Sequence[float] | None = None) -> float | None:
    """Compute the (weighted) mean; None of no values."""
    if not values:
        return None
    weights = weights or [1.0] * len(values)
    return math.fsum(value * weight for value, weight in zip(values, weights)) / math.fsum(weights)


def grouped(outcomes: Iterable[Outcome]) -> list[list[tuple[float, float]]]:
    """(predicted, measured) times of each rank group with enough rows."""
    found: Mapping[str, list[tuple[float, float]]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.group is not None and outcome.step_time_s is not None:
            found[outcome.group].append(outcome.step_time_s)
    return [group for group in found.values() if len(group) >= LEAST_GROUP]


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Compute Kendall's tau-b of predictions and measurements; 0 where either is the same everywhere."""
    agree = untied = other = 0
    for (first, one), (second, two) in itertools.combinations(pairs, 2):
        left, right = _sign(first - second), _sign(one - two)
        agree += left * right
        untied += abs(left)
        other += abs(right)
    return agree / math.sqrt(untied * other) if untied and other else 0.0


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def regret(pairs: Sequence[tuple[float, float]]) -> float:
    """Compute how much longer the row with the least prediction took than the fastest; of equal predictions the slowest
    counts."""
    least = min(predicted for predicted, _ in pairs)
    chosen = max(measured for predicted, measured in pairs if predicted == least)
    return chosen / min(measured for _, measured in pairs) - 1
