"""Runs of units, of which stages are made: their bytes as tables, which are alike, and which units are gathered together.

units ──RunBytes──► tables [first, after] of what depends on the microbatch, to balance stages
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphpar.cost_models.equal_runs import EqualRuns
from graphpar.cost_models.pipeline_units import Held, JoinedUnits, Unit

Array = NDArray[np.float64]


@dataclass(frozen=True)
class RunBytes:
    """Bytes of every run of units that depend on the microbatch, as tables [first, after].

    Attributes:
        kept: by each microbatch in flight.
        transient: needed on top by the running one.
        message: buffers for messages.
        own: of each unit, what it adds to ``kept``.
    """

    kept: Array
    transient: Array
    message: Array
    own: Array

    @staticmethod
    def of(units: Sequence[Unit], rows: int) -> RunBytes:
        """Return the tables for microbatches of ``rows``, of whose messages a buffer is there as long as what is kept."""
        joined = JoinedUnits(units, rows)
        column = dict(zip(joined.at[0]._fields, np.array(joined.at, dtype=float).T))
        between = np.array([*joined.between, 0.0])
        returned = [0, *(unit.returned(rows) for unit in units[:-1]), 0]
        received = np.append(column["received"], 0.0)
        received[0] = 0.0
        sent = np.append(0.0, column["sent"])
        inside, shared = run_sums(column["inside"]), run_largest(column["shared"])
        return RunBytes(
            kept=inside + run_sums(between, last=False) + shared + sent[None, :] + received[:, None],
            transient=run_largest(np.maximum(column["forward"], column["backward"])),
            message=received[:, None] + np.array(returned, dtype=float)[None, :],
            own=np.asarray(column["inside"] + between),
        )


def together(units: Sequence[Unit]) -> list[list[Unit]]:
    """Return the units of a stage whose parameters are gathered together."""
    found: list[list[Unit]] = []
    for unit in units:
        if not unit.joins or not found:
            found.append([])
        found[-1].append(unit)
    return found


def parts_together(units: Sequence[Unit]) -> list[list[Held]]:
    """Return the parameters that are gathered together for units of a stage, without those that are gathered with the stage."""
    return [[part for unit in group for part in unit.held if not part.rest] for group in together(units)]


def equal_units(units: Sequence[Unit]) -> EqualRuns:
    """Return which runs of ``units`` hold the same; one with a tied parameter is like no other, as it matters which stages have that."""
    names = Counter(name for unit in units for name in unit.buffers)
    marks: list[Hashable] = []
    for place, unit in enumerate(units):
        buffers = tuple((name if names[name] > 1 else "", nbytes) for name, nbytes in unit.buffers.items())
        tied = place if any(held.tied is not None for held in unit.held) else None
        marks.append((unit.held, unit.kind.sends, buffers, tuple(unit.inputs.items()), unit.cache, tied, unit.joins))
    return EqualRuns(marks)


def run_sums(values: Array, *, last: bool = True) -> Array:
    """Return a table [first, after] of the sum of each run, with or without its last."""
    sums = np.append(0.0, np.cumsum(values))
    ends = sums if last else np.append(0.0, sums[:-1])
    return np.asarray(ends[None, :] - sums[:, None])


def run_largest(values: Array) -> Array:
    """Return a table [first, after] of the largest of each run."""
    table = np.zeros((len(values) + 1, len(values) + 1))
    for first in range(len(values)):
        table[first, first + 1 :] = np.maximum.accumulate(values[first:])
    return table
