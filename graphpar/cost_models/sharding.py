"""Rates for the sharding search: seconds of an operator by roofline, and of a collective by latency and bandwidth.

operator     max(flops / peak, bytes / memory bandwidth) + launch, forward and backward
collective   messages * latency + bytes / link bandwidth, forward and backward
"""

from __future__ import annotations

from dataclasses import dataclass, field

from graphpar.cost_models.collectives import Network
from graphpar.cost_models.flops import dominant_dtype
from graphpar.hardware.cluster import Cluster
from graphpar.hardware.devices import Link
from graphpar.ir.program import Program
from graphpar.operators.transitions import Cost
from graphpar.runtime.mesh import Mesh

_LINK = Link(8e-6, 200e9)


@dataclass(frozen=True)
class ShardingCosts:
    """The rates of a device and its links; the default is about an A100 with NVLink, since ratios matter more than seconds.

    ``hides``: sums of gradients of what enters products run beside the products of the gradients of their weights.
    """

    flops_per_s: float = 150e12
    memory_bytes_per_s: float = 1.5e12
    launch_s: float = 2e-6
    links: dict[str, Link] = field(default_factory=dict)
    hides: bool = False

    @staticmethod
    def of(cluster: Cluster, mesh: Mesh, dtype: str) -> ShardingCosts:
        """Return the rates of ``cluster`` for operands of ``dtype``, with a ring over each axis of ``mesh``.

        Raises:
            GraphparError: the mesh does not fit the cluster, or its device has no rate for the dtype.
        """
        device, network = cluster.device, Network(cluster)
        return ShardingCosts(
            device.peak(dtype) * device.matrix_efficiency,
            device.memory_bytes_per_s * device.memory_efficiency,
            device.launch_s,
            {
                axis: network.ring(network.group_of_axes(mesh, (axis,)))
                for axis, degree in mesh.degrees().items()
                if degree > 1
            },
            device.kind != "cpu",
        )

    def operator_s(self, flops: float, nbytes: float) -> float:
        """Return the seconds of one forward of an operator."""
        return max(flops / self.flops_per_s, nbytes / self.memory_bytes_per_s) + self.launch_s

    def transition_s(self, axis: str, messages: float, nbytes: float) -> float:
        """Return the seconds of a collective over ``axis``, of consecutive ``messages`` and ``nbytes`` sent by each rank.

        Starting it costs one more latency.
        """
        link = self.links.get(axis, _LINK)
        return (messages + 1) * link.latency_s + nbytes / link.bytes_per_s if messages else 0.0

    def collective_s(self, axis: str, cost: Cost) -> float:
        """Return the seconds of a collective over ``axis``."""
        return self.transition_s(axis, cost.messages, cost.bytes_sent)

    def transition_rate(self, axis: str) -> float:
        """Return the bytes a second over ``axis``, without latency."""
        return self.links.get(axis, _LINK).bytes_per_s


def costs_for(program: Program, mesh: Mesh, cluster: Cluster | None) -> ShardingCosts:
    """Return the rates of ``cluster`` for the dtype of most flops of ``program``, or the default rates."""
    return ShardingCosts() if cluster is None else ShardingCosts.of(cluster, mesh, dominant_dtype(program))
