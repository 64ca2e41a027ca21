"""The bytes and seconds of the collectives of a rank's program, node by node.

    lowered node ──Works.collectives──► rows ──Network──► Sent: bytes and seconds, forward and backward

Added up over a stage they are the collectives of its forward and backward in :class:`graphpar.cost_models.pricing.Pricing`, before
computation hides any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from graphpar.cost_models.collectives import Network
from graphpar.cost_models.work import Collective, Phase
from graphpar.cost_models.workload import Works
from graphpar.hardware.cluster import Cluster
from graphpar.ir.program import Program, operator_name
from graphpar.operators.table import COMPOSITES
from graphpar.operators.transitions import FUNCTIONS, Transition, collective_cost
from graphpar.runtime.mesh import Mesh
from graphpar.text import plural


@dataclass(frozen=True)
class Sent:
    """The collectives of one node over an axis in a microbatch: bytes that a rank sends in a ring, and seconds (None without a cluster)."""

    axis: str
    source: str
    target: str
    forward: str
    backward: str
    forward_bytes: float
    backward_bytes: float
    forward_s: float | None
    backward_s: float | None


class SentPrices:
    """Prices the collectives of a lowered ``program``, in microbatches of ``rows`` over ``mesh`` on ``cluster``.

    ``shards``: the names of blocks that keep shards of what they gather.
    """

    def __init__(
        self, program: Program, mesh: Mesh, rows: int, cluster: Cluster | None, shards: Collection[str] = ()
    ) -> None:
        self.mesh, self.rows, self.shards = mesh, rows, shards
        self.works = Works(program, mesh.degrees())
        self._network = None if cluster is None else Network(cluster)

    def sent(self, node: fx.Node, scope: str) -> Sent | None:
        """Return the collectives of a node, None where it has none; ``scope`` is its block's name, or empty."""
        if "transition" in node.meta:
            return self._transition(node, scope)
        rows = self.works.collectives(node, scope)
        if not rows:
            return None
        ways = [Counter(row.kind for row in rows if (row.phase is Phase.FORWARD) == way) for way in (True, False)]
        forward, backward = (", ".join(plural(count, kind) for kind, count in way.items()) for way in ways)
        composite = COMPOSITES.get(operator_name(node))
        declared = composite.types if composite is not None else None
        ends = ("P", "R") if declared is None else (str(next(iter(declared.operands.values()))), str(declared.result))
        words = forward, backward or ("nothing" if self.works.train else "")
        return self._priced(rows, rows[0].axis, ends, words)

    def _transition(self, node: fx.Node, scope: str) -> Sent:
        row = FUNCTIONS[operator_name(node)]
        source = node.args[0]
        assert isinstance(source, fx.Node)
        back = row.backward if self.works.has_gradient(source, scope) else ""
        return self._priced(
            self.works.collectives(node, scope, scope in self.shards),
            str(node.args[1]),
            node.meta["transition"],
            (row.forward, back),
        )

    def _priced(self, rows: list[Collective], axis: str, types: tuple[str, str], words: tuple[str, str]) -> Sent:
        ways = [[row for row in rows if (row.phase is Phase.FORWARD) == forward] for forward in (True, False)]
        nbytes = [
            sum(collective_cost(row.kind, row.nbytes.at(self.rows), self._degree(axis)).bytes_sent for row in way)
            for way in ways
        ]
        seconds = [self.seconds([(row.kind, row.nbytes.at(self.rows)) for row in way], axis) for way in ways]
        return Sent(axis, *types, *words, nbytes[0], nbytes[1], seconds[0], seconds[1])

    def step_s(self, row: Transition, axis: str, nbytes: float, differentiable: bool) -> float | None:
        """Return the seconds of a transition, forward and backward; ``nbytes`` is the size of the tensor unsharded on ``axis``."""
        back = row.backward_collective if differentiable and self.works.train else None
        return self.seconds([(kind, nbytes) for kind in (row.forward_collective, back) if kind], axis)

    def seconds(self, collectives: list[tuple[str, float]], axis: str) -> float | None:
        """Return the seconds of collectives, (kind, bytes of the whole tensor), one after the other; None without a cluster."""
        if self._network is None:
            return None
        group = self._network.group_of_axes(self.mesh, [axis])
        return sum(self._network.seconds(kind, nbytes, group) for kind, nbytes in collectives)

    def _degree(self, axis: str) -> int:
        return self.mesh.degrees()[axis]
