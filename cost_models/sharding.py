"""Prices for the sharding search: seconds of an operator and of a transition, by roofline and by latency and bandwidth.

operator     max(flops / peak, bytes / memory bandwidth) + launch, forward and backward
transition   messages * latency + bytes / link bandwidth, forward and backward
"""

from __future__ import annotations

from dataclasses import dataclass, field

from graphpar.cost_models.collectives import Network
from graphpar.cost_models.flops import dominant_dtype
from graphpar.hardware.cluster import Cluster
from graphpar.hardware.devices import Link
from graphpar.ir.mesh import Mesh
from graphpar.ir.program import Program
from graphpar.operators.transitions import Cost, collective_cost

_LINK = Link(8e-6, 200e9)


@dataclass(frozen=True)
class ShardingCosts:
    """A device and its links. The default is of the class of an A100 with NVLink; ratios matter here more than seconds."""

    flops_per_s: float = 150e12
    memory_bytes_per_s: float = 1.5e12
    launch_s: float = 2e-6
    links: dict[str, Link] = field(default_factory=dict)

    @staticmethod
    def of(cluster: Cluster, mesh: Mesh, dtype: str) -> ShardingCosts:
        """What ``cluster`` reaches for operands of ``dtype``; collectives over each axis of ``mesh`` cost what a ring does.

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
        )

    def operator_s(self, flops: float, nbytes: float) -> float:
        """One forward of an operator."""
        return max(flops / self.flops_per_s, nbytes / self.memory_bytes_per_s) + self.launch_s

    def transition_s(self, axis: str, messages: float, nbytes: float) -> float:
        """One collective over ``axis``: how many messages in a row, how many bytes each rank sends; starting it costs one more."""
        link = self.links.get(axis, _LINK)
        return (messages + 1) * link.latency_s + nbytes / link.bytes_per_s if messages else 0.0

    def collective_s(self, axis: str, cost: Cost) -> float:
        """One collective over ``axis``; nothing where none is."""
        return self.transition_s(axis, cost.messages, cost.bytes_sent)

    def transition_rate(self, axis: str) -> float:
        """Bytes a second over ``axis``, where latency does not count."""
        return self.links.get(axis, _LINK).bytes_per_s


def loss_costs(rows: float, degree: int) -> tuple[Cost, ...]:
    """The all-reduces of a loss over cut classes: each row's largest logit, then its sum of exponentials with its label's score.

    Its backward has none.
    """
    return collective_cost("all-reduce", 4 * rows, degree), collective_cost("all-reduce", 8 * rows, degree)


def statistics_costs(channels: float, degree: int, train: bool) -> tuple[Cost, ...]:
    """BatchNorm's mean and variance are gathered from replicas; backward their gradients are summed and scattered."""
    nbytes = 8 * channels * degree
    backward = (collective_cost("reduce-scatter", nbytes, degree),) if train else ()
    return collective_cost("all-gather", nbytes, degree), *backward


def costs_for(program: Program, mesh: Mesh, cluster: Cluster | None) -> ShardingCosts:
    """The prices under which ``program`` is planned: those of ``cluster`` for the dtype of most flops, or the default."""
    return ShardingCosts() if cluster is None else ShardingCosts.of(cluster, mesh, dominant_dtype(program))
