"""What the units of an fp32 program would be in 16 bits: the same operators, with half of the bytes.

It says what ``--dtype bf16`` is about worth without a second trace. Indices and masks are halved with the rest, which is next to nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from graphpar.cost_models.pipeline_units import Held, Unit, UnitClass
from graphpar.cost_models.workload import Collective, Row, Traffic, Work


def halved(units: Sequence[Unit]) -> list[Unit]:
    """Units for seconds alone: their memory is still that of fp32."""
    kinds = {id(unit.kind): _kind(unit.kind) for unit in units}
    return [replace(unit, kind=kinds[id(unit.kind)], held=tuple(map(_held, unit.held))) for unit in units]


def _kind(kind: UnitClass) -> UnitClass:
    rows = Counter[Row]()
    for row, times in kind.work.rows.items():
        rows[_row(row)] += times
    return UnitClass(
        Work(dict(rows)), tuple((0.5 * size, gradient) for size, gradient in kind.sends), lambda: kind.memory
    )


def _row(row: Row) -> Row:
    if isinstance(row, Traffic | Collective):
        return row._replace(nbytes=0.5 * row.nbytes)
    return row._replace(itemsize=2) if row.itemsize == 4 else row


def _held(held: Held) -> Held:
    return replace(held, nbytes=held.nbytes // 2, itemsize=2) if held.itemsize == 4 else held
