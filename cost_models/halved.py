"""The units of an fp32 program as if they were in 16 bits: the same operators, half of the bytes.

This estimates the gain of ``--dtype bf16`` without a second trace. Indices and masks are halved with the rest; they hardly count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from graphpar.cost_models.pipeline_units import Held, Unit, UnitClass
from graphpar.cost_models.workload import Collective, Row, Traffic, Work


def halved(units: Sequence[Unit]) -> list[Unit]:
    """Return units for estimating seconds only: their memory is still that of fp32."""
    kinds = {id(unit.kind): _kind(unit.kind) for unit in units}
    return [replace(unit, kind=kinds[id(unit.kind)], held=tuple(map(_held, unit.held))) for unit in units]


def _kind(kind: UnitClass) -> UnitClass:
    rows = Counter[Row]()
    for row, times in kind.work.rows.items():
        rows[_row(row)] += times
    sends = tuple((0.5 * size, gradient) for size, gradient in kind.sends)
    return UnitClass(Work(dict(rows)), sends, lambda: kind.memory)


def _row(row: Row) -> Row:
    if isinstance(row, Traffic | Collective):
        return row._replace(nbytes=0.5 * row.nbytes)
    return row._replace(itemsize=2) if row.itemsize == 4 else row


def _held(held: Held) -> Held:
    return replace(held, nbytes=held.nbytes // 2, itemsize=2) if held.itemsize == 4 else held
