"""All records, by the operator's name (:func:`graphpar.ir.program.operator_name`)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import fx

from graphpar.ir.program import Helper, operator_name
from graphpar.operators import creation, elementwise, indexing, losses, matrix, moves, reduce, shape, spatial
from graphpar.operators.composite import Composite
from graphpar.operators.record import Kind, Record, Records

__all__ = ["COMPOSITES", "PLACED", "TABLE", "UNKNOWN", "record_named", "record_of"]

FAMILIES = (matrix, elementwise, shape, moves, reduce, losses, indexing, spatial, creation)
TABLE: Records = MappingProxyType({name: record for family in FAMILIES for name, record in family.RECORDS.items()})
"""Every operator that graphpar has a record of."""
assert len(TABLE) == sum(len(family.RECORDS) for family in FAMILIES), "an operator has two records"
COMPOSITES: Mapping[str, Composite] = {
    name: record.composite for name, record in TABLE.items() if record.composite is not None
}
"""Every function of ``graphpar.emitted`` that stands for operators of torch, by its name."""
PLACED: dict[object, list[Composite]] = {}
"""By the operator of torch that they have placements of."""
for _composite in COMPOSITES.values():
    PLACED.setdefault(_composite.of, []).append(_composite)
assert all(name == composite.function.__name__ for name, composite in COMPOSITES.items())
UNKNOWN = Record(Kind.OTHER)
"""The record of an operator that graphpar does not know, such as a user's."""


def record_named(name: str) -> Record:
    """Return the record of the operator ``name``; :data:`UNKNOWN` where there is none."""
    return TABLE.get(name, UNKNOWN)


def record_of(node: fx.Node) -> Record:
    """Return the record of ``node``'s operator; without one, that of pointwise operators if torch says that it is one."""
    if node.op != "call_function" or isinstance(node.target, Helper):
        return UNKNOWN
    record = TABLE.get(operator_name(node))
    if record is not None:
        return record
    pointwise = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
    return elementwise.PLAIN if pointwise else UNKNOWN
