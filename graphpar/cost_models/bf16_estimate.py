"""The units of an fp32 program as if they computed in 16 bits: the same operators, half of the bytes, and casts of the parameters.

This estimates the gain of ``--dtype bf16`` without a second trace. Parameters and their gradients stay in 32 bits. Indices and masks are
halved with the rest; they hardly count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from graphpar.cost_models.pipeline_units import Unit, UnitClass
from graphpar.cost_models.work import Collective, Phase, Row, Size, Traffic, Work


def halved(units: Sequence[Unit]) -> list[Unit]:
    """Return units for estimating seconds only: their memory is still that of fp32."""
    kinds = {id(unit.kind): _bf16_unit(unit.kind, sum(held.elements for held in unit.held)) for unit in units}
    return [
        replace(unit, kind=kinds[id(unit.kind)], held=tuple(replace(held, copied=2, working=2) for held in unit.held))
        for unit in units
    ]


def _bf16_unit(kind: UnitClass, parameters: int) -> UnitClass:
    casts = Work({Traffic(Phase.WEIGHT, Size(6.0 * parameters)): 1})  # of gradients: 2 bytes of an element, and 4
    sends = tuple((0.5 * size, gradient) for size, gradient in kind.sends)
    return UnitClass(
        casts + _work(kind.work), sends, lambda: kind.memory, replace(kind.again, work=_work(kind.again.work))
    )


def _work(work: Work) -> Work:
    rows = Counter[Row]()
    for row, times in work.rows.items():
        rows[_row(row)] += times
    return Work(dict(rows))


def _row(row: Row) -> Row:
    if isinstance(row, Collective):
        row = row._replace(
            beside=tuple(each._replace(itemsize=2) if each.itemsize == 4 else each for each in row.beside)
        )
    if isinstance(row, Traffic | Collective):
        return row._replace(nbytes=0.5 * row.nbytes)
    return row._replace(itemsize=2) if row.itemsize == 4 else row
