"""Seconds of a collective over a group of ranks, by latency and bandwidth of the algorithms that a communication library chooses from.

    ranks, or axes of a mesh ──Network.group──► Group: how many ranks, on how many nodes, in how many pods ──Network.seconds──► seconds

Each algorithm costs ``latency + x + 2 sqrt(l x)``, where ``x`` is what its busiest device sends over its bandwidth. The last term is
the cost of pipelining a message in chunks: with few, the last hop waits for a long one; with many, each costs its latency; the best
number costs this much. So ``l`` grows with the hops of a ring; else it is the latency of a link inside a node. The cheapest algorithm
counts:

algorithm    sends, of a tensor of S bytes over n ranks                                            latencies
ring         all-reduce 2 (n-1)/n S, all-gather and reduce-scatter (n-1)/n S, broadcast S          of each step around it
tree         all-reduce: 2 S (S where there are two), a chain in a node and a tree over nodes      of the chain and log2 nodes
switch       all-reduce (n+1)/n S, at least 9/8 S, others S: the switch adds and copies             as of a ring of 8
switch tree  all-reduce: the switch in a node, a tree over nodes                                   of both
pairs        all-to-all (n-1)/n^2 S, send S                                                        of members in the node, others at once
gloo         reduce-scatter: as an all-reduce, and copies (on CPUs)                                as of an all-reduce

Rings over nodes enter a node by the adapters of all members there, so their bandwidth is that of these adapters together, but at most
that of the links inside. ``Link.bytes_per_s`` between nodes is per device, and a group uses the shares of its members only: the other
groups of the axis send at the same time. All-to-all and sends are between pairs: each device uses its share.

Pods of nodes are priced as nodes are, at the share that a device has of what leaves its pod. A ring over pods enters each once, and has the
shares of all members there, so that a pod with many slows it little; a tree has one or two edges out of each; an all-to-all sends all that
is for other pods, and a group with a member a pod has one share. Of pods with rails a group leaves its node by what is outside of the pod,
unless it has the same places in each of its nodes: then each message stays on a rail (where places differ inside, NVLink takes it to the
rail first). Other jobs are not modelled; they belong into the cluster's figures.

Against 75 all-reduces and all-gathers of 1 MiB and more on 8 H200, 8 and 16 and 32 B200, 16 H100, 16 H200 and 16 A100 (sources in
``tests/cost_models/test_collective_costs.py``) the error is 6 % in the median, 19 % at the 90th percentile and 45 % at worst (an
all-gather of 1 MiB).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from graphpar.errors import GraphparError, near_match
from graphpar.hardware.cluster import Cluster
from graphpar.hardware.devices import Link
from graphpar.runtime.axes import AXES
from graphpar.runtime.mesh import Mesh

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "reduce", "send")

_SWITCH_MESSAGES = 14
"""Latencies of a reduction in the switch, however many ranks: 39 us for 32 to 512 KiB on 8 H200 (stas00/ml-engineering)."""
_SWITCH_LEAST = 9 / 8
"""Beyond 8 devices there is no further gain: 8 and 64 GB300 take 35.7 and 36.4 ms for 16 GiB, 72 GB200 20.3 ms for 8 GiB (Oracle's
GPU quick starts; coreweave/nccl-tests, pull request 43)."""
_TREE_SHARE = 0.94
"""The share of the links' bandwidth that trees reach: 445 to 487 GB/s of bus bandwidth on two nodes of H100 (NCCL's own model: 0.92)."""
_HOPS = 15
"""Hops of a ring for which chunks cost one latency: all-gathers of 16 B200 and 16 H200; reduce-scatters on 4 to 128 nodes of H100 fall
from 360 to 260 GB/s of bus bandwidth (NVIDIA/nccl, issue 1229, which gives no size; 8 GiB do so here)."""
_AT_ONCE = 4
"""Messages to other nodes that an all-to-all sends at once: 48 us for small ones on two nodes of 8."""
_COPY = 1.08
"""The bandwidth of a copy to one neighbour in the node over that of rings: 396 and 364 GB/s of 8 H200 (stas00/ml-engineering)."""


@dataclass(frozen=True)
class Group:
    """The size of a group of ranks, and how its ranks are spread over nodes.

    ``per_node``: members in the fullest node. ``fewest``: in the emptiest node that has any; 0 for the same as ``per_node``.
    ``pods``: of each level of pods that it leaves, from the inside out: how many it is in, and its members in the emptiest.
    """

    size: int
    nodes: int
    per_node: int
    fewest: int = 0
    pods: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.fewest:
            object.__setattr__(self, "fewest", self.per_node)

    @property
    def crossed(self) -> tuple[tuple[int, int], ...]:
        """Of each level that it leaves, nodes first: how many parts it is in, and its members in the emptiest."""
        return ((self.nodes, self.fewest), *self.pods) if self.nodes > 1 else ()


@dataclass(frozen=True)
class _Line:
    """An algorithm for one kind of collective: seconds of an empty message, of each byte, and ``l`` of the module's docstring."""

    latency_s: float
    byte_s: float
    filling_s: float


class Network:
    """The prices of a cluster's collectives."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._step_s = cluster.intra_node.latency_s
        self._latencies_s = [self._step_s, *(level.link.latency_s for level in cluster.levels)]
        self._rates = [level.link.bytes_per_s * level.link.efficiency for level in cluster.levels]
        self._groups: dict[tuple[Mesh, frozenset[str]], Group] = {}
        self._lines: dict[tuple[str, Group], tuple[_Line, ...]] = {}

    # ---- groups ----

    def group(self, ranks: Sequence[int]) -> Group:
        """Return the group of ``ranks``.

        Raises:
            GraphparError: a rank is not on the cluster.
        """
        members = sorted(set(ranks))
        if not members or members[0] < 0 or members[-1] >= self.cluster.size:
            given = f"Ranks {members[0]} to {members[-1]}" if members else "No ranks"
            raise GraphparError(f"{given}: the cluster {self.cluster} has ranks 0 to {self.cluster.size - 1}.")
        return self._counted(np.array([members]))

    def group_of_axes(self, mesh: Mesh, axes: Sequence[str]) -> Group:
        """Return the group of ranks whose coordinates differ on ``axes`` only.

        Where groups are spread differently over nodes it is the worst case: the most nodes, the fullest and the emptiest; and of pods.

        Raises:
            GraphparError: there is no such axis, or the mesh has more devices than the cluster.
        """
        key = (mesh, frozenset(axes))
        if key not in self._groups:
            self._check(mesh, axes)
            self._groups[key] = self._group_of_axes(mesh.degrees(), key[1])
        return self._groups[key]

    def boundary(self, mesh: Mesh) -> Group:
        """Return the group of two neighbours on ``pp``: on different nodes, and in different pods, if any two neighbours are."""
        self._check(mesh, ("pp",))
        if mesh.pp == 1:
            return Group(1, 1, 1)
        nodes, *pods = self.cluster.levels
        if mesh.size <= nodes.devices:
            return Group(2, 1, 2)
        moves = mesh.size // mesh.pp % nodes.devices > 0
        return Group(2, 2, 1, pods=tuple((2, 1) for pod in pods if mesh.size > pod.devices or (pod.rails and moves)))

    def _check(self, mesh: Mesh, axes: Sequence[str]) -> None:
        for axis in axes:
            if axis not in AXES:
                raise GraphparError(
                    f"There is no mesh axis {axis!r}; the axes are {', '.join(AXES)}.{near_match(axis, AXES)}"
                )
        if mesh.size > self.cluster.size:
            raise GraphparError(
                f"The mesh has {mesh.size} devices, but the cluster {self.cluster} has {self.cluster.size}."
            )

    def _group_of_axes(self, degrees: dict[str, int], axes: frozenset[str]) -> Group:
        size = math.prod(degrees[axis] for axis in axes)
        insides = [_inside_block(degrees, axes, level.devices) for level in self.cluster.levels]
        if all(insides):
            return _grouped(size, [(size // inside, inside, inside) for inside in insides])
        shape = tuple(degrees.values())
        ours = [place for place, axis in enumerate(degrees) if axis in axes]
        ranks = np.arange(math.prod(shape)).reshape(shape)
        return self._counted(np.moveaxis(ranks, ours, range(-len(ours), 0)).reshape(-1, size))

    def _counted(self, groups: np.ndarray) -> Group:
        """Count over all groups, a row each; in each, the ranks of a node are adjacent."""
        nodes, *pods = self.cluster.levels
        spread = _spread(groups // nodes.devices)
        _, most, fewest = spread
        places = (groups % nodes.devices).reshape(len(groups), -1, most) if most == fewest else None
        aligned = places is not None and bool((places == places[:, :1]).all())
        spreads = [spread if pod.rails and not aligned else _spread(groups // pod.devices) for pod in pods]
        return _grouped(groups.shape[1], [spread, *spreads])

    # ---- prices ----

    def seconds(self, kind: str, nbytes: float, group: Group) -> float:
        """Return the seconds of one collective of ``group``.

        Args:
            kind: of :data:`KINDS`.
            nbytes: of the whole tensor: the result of an all-gather, a rank's input of a reduce-scatter, all ranks' inputs of an
                all-to-all together, the message of a send.

        Raises:
            GraphparError: there is no such kind.
        """
        if group.size == 1:
            return 0.0
        lines = self._lines.get((kind, group))
        if lines is None:
            lines = self._lines[kind, group] = self._priced(kind, group)
        best = math.inf
        for line in lines:
            sending = line.byte_s * nbytes
            best = min(best, line.latency_s + sending + 2 * math.sqrt(line.filling_s * sending))
        return best

    def ring(self, group: Group) -> Link:
        """Return the mean latency of a step of a ring over ``group``, and the bandwidth of each of its devices."""
        steps = max(1, group.size - 1)
        latency = self._messages_s([steps, *(min(parts, steps) for parts, _ in group.crossed)]) / steps
        rates = [self._inside(group)] if group.per_node > 1 or group.nodes == 1 else []
        rates += [fewest * rate for (_, fewest), rate in zip(group.crossed, self._rates)]
        return Link(latency, min(rates))

    def _messages_s(self, counts: Sequence[float]) -> float:
        """Return the latencies of messages: of how many in all, how many leave a node, how many of these a pod, and so on."""
        left = [here - beyond for here, beyond in zip(counts, [*counts[1:], 0])]
        return sum(count * seconds for count, seconds in zip(left, self._latencies_s))

    def _inside(self, group: Group) -> float:
        """Return the bytes a second of a device in a ring inside a node."""
        link = self.cluster.intra_node.among(max(2, group.fewest))
        return link.bytes_per_s * link.efficiency

    def _priced(self, kind: str, group: Group) -> tuple[_Line, ...]:
        if kind not in KINDS:
            raise GraphparError(
                f"There is no collective {kind!r}; there are {', '.join(KINDS)}.{near_match(kind, KINDS)}"
            )
        if kind == "send":
            return (self._send(group),)
        if kind == "all-to-all":
            return (self._all_to_all(group),)
        if kind == "reduce-scatter" and self.cluster.device.kind == "cpu":
            return tuple(self._with_copies(line, group) for line in self._priced("all-reduce", group))
        if kind == "reduce":  # gloo's is an all-reduce whose result one rank keeps
            return self._priced("all-reduce" if self.cluster.device.kind == "cpu" else "broadcast", group)
        ring, count = self.ring(group), group.size - 1
        passes, share = {"all-reduce": (2, 2 * count / group.size), "broadcast": (1, 1.0)}.get(
            kind, (1, count / group.size)
        )
        hops = passes * count
        lines = [_Line((hops + 1) * ring.latency_s, share / ring.bytes_per_s, hops / _HOPS * self._step_s)]
        if kind == "all-reduce" and group.nodes > 1:
            lines.append(self._tree(group))
        if self.cluster.intra_node.in_switch is not None and group.per_node > 1:
            if kind == "all-reduce":
                lines.append(self._in_switch(group))
            elif kind != "broadcast" and group.nodes == 1:
                lines.append(_Line(self._switch_s(), self._switch_byte_s(), self._step_s))
        return tuple(lines)

    def _with_copies(self, line: _Line, group: Group) -> _Line:
        """Price an all-reduce of a copy, of which each rank copies its share to the result, as torch's gloo reduce-scatters."""
        device = self.cluster.device
        copies = (2 + 2 / group.size) / (device.memory_bytes_per_s * device.memory_efficiency)
        return replace(line, byte_s=line.byte_s + copies)

    def _send(self, group: Group) -> _Line:
        if group.nodes == 1:
            link = self.cluster.intra_node.among(2)
            return self._sent_over(link, min(1.0, _COPY * link.efficiency))
        links = [level.link for level, _ in zip(self.cluster.levels, group.crossed)]
        lines = [self._sent_over(link, link.efficiency) for link in links]
        return replace(lines[-1], byte_s=max(line.byte_s for line in lines))

    def _sent_over(self, link: Link, share: float) -> _Line:
        if link.send_latency_s is not None:
            return _Line(link.send_latency_s, 1 / link.bytes_per_s, 0.0)
        return _Line(link.latency_s, 1 / (link.bytes_per_s * share), self._step_s)

    def _all_to_all(self, group: Group) -> _Line:
        """Price an all-to-all: each rank sends ``1 / size**2`` of the tensor to each other, in the node and to others at once."""
        far = [group.size - fewest for _, fewest in group.crossed]
        latency = group.per_node * self._step_s
        if far:
            latency += self._messages_s([count / _AT_ONCE for count in (far[0], *far)])
        rates = [(group.per_node - 1) / self._inside(group)] if group.per_node > 1 else []
        rates += [count / rate for count, rate in zip(far, self._rates)]
        return _Line(latency, max(rates) / group.size**2, self._step_s)

    def _tree(self, group: Group) -> _Line:
        """Price an all-reduce by a chain in each node and two binary trees over the nodes, each for half of the tensor."""
        chain = (2 if group.per_node > 2 else 1) / self._inside(group) if group.per_node > 1 else 0.0
        latency = (2 * group.per_node - 1) * self._step_s + self._climb_s(group)
        return _Line(latency, max(chain, self._climb_byte_s(group)) / _TREE_SHARE, self._step_s)

    def _in_switch(self, group: Group) -> _Line:
        """Price an all-reduce in the switch: a device sends its tensor, and receives and sends a chunk of the sum; nodes are a tree."""
        inside = self._switch_byte_s() * max(_SWITCH_LEAST, (group.fewest + 1) / group.fewest)
        if group.nodes == 1:
            return _Line(self._switch_s(), inside, self._step_s)
        slowest = max(inside, self._climb_byte_s(group))
        return _Line(self._switch_s() + self._climb_s(group), slowest / _TREE_SHARE, self._step_s)

    def _switch_s(self) -> float:
        return _SWITCH_MESSAGES * self._step_s

    def _switch_byte_s(self) -> float:
        link = self.cluster.intra_node
        assert link.in_switch is not None
        return 1 / (link.bytes_per_s * link.in_switch)

    def _climb_s(self, group: Group) -> float:
        """Return the latency up and down a tree over nodes, whose upper part is over pods."""
        depths = [2 * math.ceil(math.log2(parts)) for parts, _ in group.crossed]
        return self._messages_s([depths[0], *depths])

    def _climb_byte_s(self, group: Group) -> float:
        return max(
            (2 if parts > 2 else 1) / (fewest * rate) for (parts, fewest), rate in zip(group.crossed, self._rates)
        )


def _inside_block(degrees: dict[str, int], axes: frozenset[str], room: int) -> int:
    """Return how many members of a group are on ``room`` consecutive devices where these are a block of coordinates, else 0."""
    inside = 1
    for axis in reversed(AXES):
        here = math.gcd(degrees[axis], room)
        if here < min(degrees[axis], room):
            return 0
        inside *= here if axis in axes else 1
        room //= here
    return inside


def _spread(parts: np.ndarray) -> tuple[int, int, int]:
    """Return of groups, a row each, over how many parts one is spread at most, the most members in one, and the fewest."""
    starts = np.ones(parts.shape, bool)
    starts[:, 1:] = parts[:, 1:] != parts[:, :-1]
    counts = np.diff(np.flatnonzero(starts), append=starts.size)
    return int(starts.sum(axis=1).max()), int(counts.max()), int(counts.min())


def _grouped(size: int, spreads: Sequence[tuple[int, int, int]]) -> Group:
    """Return a group from how it is spread over the parts of each level."""
    nodes, *pods = spreads
    return Group(size, *nodes, tuple((parts, fewest) for parts, _, fewest in pods if parts > 1))
