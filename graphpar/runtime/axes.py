"""The axes of the device mesh, one record for each. How an axis is treated follows from what it divides.

    pp             layers      stages, one after the other; tensors have no type on it
    dp_replicate   rows        every rank has all weights and its own rows of the batch; gradients are all-reduced
    dp_shard       rows        the same, and each rank stores a shard of the weights
    dp_expert      rows        the same, but each rank has other experts, to which all send their rows
    cp             sequence    operators are sharded along the sequence; weights are computed with whole
    ep             experts     weights of experts are sharded, whole experts on each rank
    tp             weights     weights are sharded, and the operators that take them

A new axis is a record here, its degree in :class:`graphpar.runtime.mesh.Mesh`, and the code that only this axis needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Divides(Enum):
    """What an axis divides over its ranks."""

    LAYERS = "layers"
    ROWS = "rows"
    SEQUENCE = "sequence"
    EXPERTS = "experts"
    WEIGHTS = "weights"


@dataclass(frozen=True)
class Axis:
    """An axis of the mesh.

    Attributes:
        ranks: what its ranks do in relation to each other, as words for the emitted script.
        usual_names: its names in other libraries.
        sharing: ``ranks`` from ZeRO-2 on, where that is something else.
        searched: whether a planner chooses its degree wherever the user does not; cp and ep it chooses where they may help.
    """

    name: str
    divides: Divides
    ranks: str
    usual_names: tuple[str, ...] = ()
    sharing: str = ""
    searched: bool = False

    @property
    def typed(self) -> bool:
        """Whether tensors have a type (R, I, S, P) on it."""
        return self.divides is not Divides.LAYERS

    @property
    def compute(self) -> bool:
        """Whether the search places operators on it."""
        return self.divides in (Divides.SEQUENCE, Divides.EXPERTS, Divides.WEIGHTS)

    @property
    def replicas(self) -> bool:
        """Whether every rank runs all of a stage, on its own rows; gradients are then partial unless a plan says otherwise."""
        return self.divides is Divides.ROWS

    @property
    def exchanges(self) -> bool:
        """Whether replicas hold different experts and send rows to each other: these weights are sharded in what they compute with."""
        return self.name == "dp_expert"

    @property
    def stores_shards(self) -> bool:
        """Whether ranks store shards of what they compute with whole, so that gradients are always sums over it."""
        return self.name == "dp_shard"

    @property
    def shares_state(self) -> bool:
        """Whether its ranks compute with the same whole weights on other data, so that ZeRO stores shards of state over it."""
        return self.stores_shards or self.divides is Divides.SEQUENCE


_RECORDS = (
    Axis("pp", Divides.LAYERS, "hold other stages", ("pipeline",), searched=True),
    Axis(
        "dp_replicate", Divides.ROWS, "hold the same weights and take other rows of the batch", ("dp", "ddp", "data"),
        searched=True,
    ),
    Axis(
        "dp_shard", Divides.ROWS, "hold shards of the weights and take other rows of the batch", ("fsdp", "zero"),
        searched=True,
    ),
    Axis("dp_expert", Divides.ROWS, "take other rows of the batch and hold other experts, to which they send rows"),
    Axis(
        "cp", Divides.SEQUENCE, "hold the same weights and take other parts of the sequence", ("context",),
        sharing="hold shards of the weights and take other parts of the sequence",
    ),
    Axis("ep", Divides.EXPERTS, "hold other experts of the same layers", ("expert",)),
    Axis("tp", Divides.WEIGHTS, "hold shards of the same layers", ("mp", "sp", "tensor"), searched=True),
)  # fmt: skip
AXIS = {axis.name: axis for axis in _RECORDS}
"""The axes by name, outermost first: neighbouring ranks share a tp group."""
AXES = tuple(AXIS)
REPLICAS = tuple(name for name, axis in AXIS.items() if axis.replicas)
"""The axes whose ranks run the same code on different rows."""
STATE_AXES = tuple(name for name, axis in AXIS.items() if axis.shares_state)
"""The axes over which ZeRO shards state, all of them together."""
GROUPS = {
    "batch": REPLICAS,
    "loss": (*REPLICAS, "cp"),
    "fsdp": STATE_AXES,
    "efsdp": STATE_AXES,
    "expert": ("dp_expert", "ep"),
    "expert_data": tuple(name for name in (*REPLICAS, "cp") if not AXIS[name].exchanges),
}
"""Groups of ranks as axes: other rows of the batch, parts of the loss, shards of the state, of the state of the same experts (no axis of
these divides experts, so no other ranks than of all state), different experts, and the same experts on other data, whose gradients are
summed."""
SHARDING_ORDER = tuple(sorted(AXES, key=lambda name: (AXIS[name].replicas, not AXIS[name].exchanges)))
"""The order in which axes divide a tensor: what ranks store divides the shards that they compute with, and of the experts that ranks of
other axes share out, replicas share out each share."""
