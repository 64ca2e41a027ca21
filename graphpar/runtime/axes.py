"""The axes of the device mesh: a record each. What else is done on an axis follows from what it divides.

    pp             layers      stages, one after the other; tensors have no type on it
    dp_replicate   rows        every rank has all weights and other rows of the batch; gradients are summed
    dp_shard       rows        the same, and each rank keeps a piece of the weights
    cp             sequence    operators are cut along the sequence; weights stay whole
    ep             experts     weights of experts are cut, an expert at a time
    tp             weights     weights are cut, and the operators that take them

A new axis is a record here, its degree in :class:`graphpar.ir.mesh.Mesh`, and what only it does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Divides(Enum):
    """What the ranks of an axis have different pieces of."""

    LAYERS = "layers"
    ROWS = "rows"
    SEQUENCE = "sequence"
    EXPERTS = "experts"
    WEIGHTS = "weights"


@dataclass(frozen=True)
class Axis:
    """An axis of the mesh.

    Attributes:
        ranks: what its ranks do, beside each other; for the emitted script and its readers.
        usual_names: what others call it.
        searched: whether a planner chooses its degree where the user does not.
    """

    name: str
    divides: Divides
    ranks: str
    usual_names: tuple[str, ...] = ()
    searched: bool = False

    @property
    def typed(self) -> bool:
        """Whether tensors have a type on it."""
        return self.divides is not Divides.LAYERS

    @property
    def compute(self) -> bool:
        """Whether the search places operators on it."""
        return self.divides in (Divides.SEQUENCE, Divides.EXPERTS, Divides.WEIGHTS)

    @property
    def replicas(self) -> bool:
        """Whether every rank runs all of a stage, on other rows of the batch. Gradients are then partial, unless a plan says otherwise."""
        return self.divides is Divides.ROWS


_RECORDS = (
    Axis("pp", Divides.LAYERS, "hold other stages", ("pipeline",), searched=True),
    Axis(
        "dp_replicate", Divides.ROWS, "hold the same weights and take other rows of the batch", ("dp", "ddp", "data"),
        searched=True,
    ),
    Axis("dp_shard", Divides.ROWS, "hold pieces of the weights and take other rows of the batch", ("fsdp", "zero")),
    Axis("cp", Divides.SEQUENCE, "hold the same weights and take other parts of the sequence", ("context",)),
    Axis("ep", Divides.EXPERTS, "hold other experts of the same layers", ("expert",)),
    Axis("tp", Divides.WEIGHTS, "hold pieces of the same layers", ("mp", "sp", "tensor"), searched=True),
)  # fmt: skip
AXIS = {axis.name: axis for axis in _RECORDS}
"""The axes by name, outermost first: neighbouring ranks share a tp group."""
AXES = tuple(AXIS)
REPLICAS = tuple(name for name, axis in AXIS.items() if axis.replicas)
"""The axes on which every rank runs the same on other rows."""
