"""``StepEnds``: what each pp rank does once a step, after its pipeline.

gradients ──► reduced over replicas, behind the backwards ──► optimizer ──► parameters gathered, behind the next forwards
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from graphpar.cost_models.collectives import Group, Network
from graphpar.cost_models.compute import Compute
from graphpar.cost_models.offloaded_units import HOST_BYTES_PER_S, host_s
from graphpar.cost_models.overlapped_state import StageWindow, exposed_gather, exposed_reduce
from graphpar.cost_models.step_costs import StageSeconds
from graphpar.cost_models.timelines import StepEnd
from graphpar.cost_models.unit_bytes import UnitBytes
from graphpar.hardware.cluster import Cluster
from graphpar.runtime.axes import REPLICAS, STATE_AXES
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.state.gradient_buckets import BUCKET_BYTES
from graphpar.runtime.state.offloaded_state import AT_ONCE

BETWEEN_PASSES = 2
"""Tensors that an optimizer that is not fused makes of each parameter, between its passes."""


class _Once(NamedTuple):
    """Of a rank: the elements of each stage's parameters, :meth:`StepEnds.gradients`, the seconds of the optimizer and of sums of a few
    numbers, and the axis to report."""

    elements: tuple[int, ...]
    gradients: tuple[float, float, float, float]
    optimizer: float
    axis: str | None


class StepEnds:
    """Prices the reduction of gradients, the optimizer and the gathering of parameters; stages are (first unit, the one after the last).

    Args:
        bytes: those of the units, under their ``execution``.
        crowd: ranks for each core where they outnumber the cores of a host, else 1.
    """

    def __init__(
        self, mesh: Mesh, cluster: Cluster, network: Network, compute: Compute, bytes: UnitBytes, crowd: float
    ) -> None:
        self.mesh, self.cluster, self.network, self.compute, self.crowd = mesh, cluster, network, compute, crowd
        self.bytes, self.execution = bytes, bytes.execution
        self._known: dict[tuple[tuple[int, int], ...], _Once] = {}  # whatever is recomputed
        self._elements: dict[tuple[int, int], int] = {}

    def with_bytes(self, bytes: UnitBytes) -> StepEnds:
        """Return the prices of the same program with other recomputation."""
        other = copy.copy(self)
        other.bytes = bytes
        return other

    @cached_property
    def _replicas(self) -> list[str]:
        return [axis for axis in REPLICAS if self.mesh.degrees()[axis] > 1]

    @cached_property
    def sharing(self) -> Group:
        """The ranks that share state."""
        return self.network.group_of_axes(self.mesh, self.mesh.state_axes)

    @cached_property
    def _zero(self) -> int:
        return self.execution.zero if self.mesh.shards > 1 else 0

    def elements(self, stage: tuple[int, int]) -> int:
        """Return the elements of parameters that a rank of ``stage`` holds."""
        if stage not in self._elements:
            self._elements[stage] = sum(held.elements * count for held, count in self.bytes.counted([stage]).items())
        return self._elements[stage]

    def of_rank(
        self,
        stages: Sequence[tuple[int, int]],
        costs: Sequence[StageSeconds],
        places: Sequence[int],
        around: Mapping[int, StageWindow],
    ) -> StepEnd:
        """Return the end of the step on a rank with the stages at ``places``."""
        own = [stages[place] for place in places]
        once = self._of(own)
        reduce, gather, nbytes, gathered = once.gradients
        # On a CPU the cores that compute also add and copy gradients.
        beside = self.execution.overlap_gradients and self.cluster.device.kind != "cpu"
        last = reduce * BUCKET_BYTES / max(nbytes, BUCKET_BYTES)
        elements = once.elements
        shares = {place: count / max(1, sum(elements)) for place, count in zip(places, elements)}
        exposed, delay = max(reduce, last), gather
        if beside:
            exposed = exposed_reduce({place: reduce * share for place, share in shares.items()}, costs, last, around)
        if self.execution.prefetch:
            delay = exposed_gather({place: gather * share for place, share in shares.items()}, costs, around)
        return StepEnd(reduce, exposed, gather, delay, once.optimizer, once.axis, round(nbytes), round(gathered))

    def _of(self, stages: Sequence[tuple[int, int]]) -> _Once:
        """Return what a rank's stages do once a step, whatever else runs then."""
        key = self.bytes.alike(stages)
        if key not in self._known:
            elements = tuple(self.elements(stage) for stage in stages)
            gradients, optimizer = self.gradients(stages), self.optimizer(stages) + self._agreed_s
            self._known[key] = _Once(elements, gradients, optimizer, self._summed_over(stages))
        return self._known[key]

    def gradients(self, stages: Sequence[tuple[int, int]]) -> tuple[float, float, float, float]:
        """Return the seconds of reducing a rank's gradients and of gathering its parameters after the optimizer; the bytes of both."""
        replicas = self._replicas
        zero = self._zero
        by_axes: dict[tuple[str, ...], float] = {}
        beyond: dict[tuple[str, ...], float] = {}  # by the axes of replicas over which shards of the sums are summed
        parameters = 0.0
        for held, count in self.bytes.counted(stages).items():
            if held.trained:
                own = count * self.bytes.reduced_sizes([held])
                over = (
                    tuple(axis for axis in held.axes if axis not in STATE_AXES) if zero else held.summed_over(replicas)
                )
                by_axes[over] = by_axes.get(over, 0.0) + own
                over = tuple(axis for axis in replicas if axis not in (*STATE_AXES, *held.apart))
                beyond[over] = beyond.get(over, 0.0) + own
                stored = held.elements * self.bytes.stored_bytes(held)
                parameters += count * (stored if self.execution.zero < 2 else self.execution.gathered_bytes([held]))
        total, reduced, gathered = sum(by_axes.values()), 0.0, 0.0
        for over, nbytes in by_axes.items():
            if over:
                reduced += 2 * self.by_link_s(nbytes / self.mesh.shards)
                reduced += self.network.seconds("all-reduce", nbytes, self.network.group_of_axes(self.mesh, over))
        if zero:
            shards, count = self.sharing, self.execution.broadcasts
            owners = zero == 1 and self.execution.zero1_by != "flat"
            whole = zero == 1 and self.execution.sums_whole
            if whole:
                everyone = self.network.group_of_axes(self.mesh, [*replicas, *self.mesh.state_axes])
                reduced += self.network.seconds("all-reduce", total, everyone)
            elif zero == 1:
                reduced += self._by_unit("reduce" if owners else "reduce-scatter", total, stages)
            if zero == 1 and count:
                gathered = count * self.network.seconds("broadcast", parameters / count, shards)
            elif zero == 1 or (zero == 2 and self.mesh.pp == 1):
                gathered = self._by_unit("broadcast" if owners else "all-gather", parameters, stages)
                gathered += self.by_link_s(self.bytes.parameter_sizes(self.bytes.held(stages)) / self.mesh.shards)
            for over, nbytes in beyond.items() if not whole else ():
                if over:
                    group = self.network.group_of_axes(self.mesh, over)
                    reduced += self.network.seconds("all-reduce", nbytes / self.mesh.shards, group)
                    reduced += 2 * self.by_link_s(nbytes / self.mesh.shards)
        return reduced, gathered, total, parameters

    def _by_unit(self, kind: str, nbytes: float, stages: Sequence[tuple[int, int]]) -> float:
        """Return the seconds of collectives over the ranks that share state, together of ``nbytes``."""
        count = self.messages(stages)
        return count * self.network.seconds(kind, nbytes / count, self.sharing)

    def messages(self, stages: Sequence[tuple[int, int]]) -> int:
        """Return how many collectives sum the gradients of a rank's stages over the ranks that share state, or gather its parameters: one
        for each unit of FSDP2 or ZeRO 1; where ranks own full parameters one for each of its owners, which are in runs of parameters
        (``contiguous``: as many more as there are other owners) or anywhere (``longest``: as many as parameters allow).

        A unit is a block, what a stage has besides, or a parameter that other ranks hold, too.
        """
        if not self.execution.copies_gradients:  # they lie in one tensor
            return 1
        sizes, elsewhere, tied = [], self.bytes.tied_beyond(stages), set[str]()
        for first, after in stages:
            rest = 0
            for unit in self.bytes.units[first:after]:
                trained = [part for part in unit.held if part.trained and part.tied not in tied]
                tied |= {part.tied for part in trained if part.tied is not None}
                own = sum(part.count for part in trained if part.tied not in elsewhere)
                sizes += [own] * unit.has_blocks
                rest += own * (not unit.has_blocks)
            sizes.append(rest)
        sizes = [size for size in (*sizes, *[1] * len(tied & elsewhere)) if size]
        owners, ranks = self.execution.zero1_by if self._zero == 1 else "flat", self.sharing.size
        if owners == "longest":
            return max(1, sum(min(size, ranks) for size in sizes))
        return max(1, min(len(sizes) + (ranks - 1) * (owners == "contiguous"), sum(sizes)))

    def by_link_s(self, nbytes: float) -> float:
        """Return the seconds of copying shards of parameters or gradients between a device and its host, one way, where they live there."""
        return host_s(self.cluster.device, nbytes) if self.execution.shards_on_host else 0.0

    @cached_property
    def _agreed_s(self) -> float:
        """The seconds in which a program's ranks sum a few numbers, if it trains: over replicas the loss, and which gradients there are
        where they are not sharded; over all ranks the norm of gradients."""
        trains = any(part.trained for unit in self.bytes.units for part in unit.held)
        if not self.execution.copies_gradients or not trains:
            return 0.0
        replicas = self.network.group_of_axes(self.mesh, self._replicas)
        everyone = self.network.group_of_axes(self.mesh, list(self.mesh.degrees()))
        times = 2 if self._zero < 2 else 1
        return times * self.network.seconds("all-reduce", 8, replicas) + self.network.seconds("all-reduce", 8, everyone)

    def _summed_over(self, stages: Sequence[tuple[int, int]]) -> str | None:
        """Return the axis to report the reduction of gradients under: the innermost of replicas, else the first of partial gradients."""
        trained = [held for held in self.bytes.held(stages) if held.trained]
        partial = [axis for held in trained for axis in held.axes]
        return next(iter([*reversed(self._replicas), *partial]), None) if trained else None

    def optimizer(self, stages: Sequence[tuple[int, int]]) -> float:
        """Return the seconds of reading gradients and state and writing state and parameters, in several passes where not fused, of
        what else is done with gradients, and of casting parameters for the next step.
        """
        nbytes, trained = 0.0, 0
        for held, count in self.bytes.counted(stages, copies=True).items():
            if held.trained:
                main, stored = self.bytes.main_bytes(held), self.bytes.stored_bytes(held)
                updated = 2 * main * (1 + self.execution.optimizer.tensors) + 2 * self.bytes.gradient_bytes(held)
                nbytes += count * held.elements * (updated + (stored if main != stored else 0))
                trained += count * held.elements
        shards = self.execution.shards if self.execution.zero else 1
        if not nbytes:
            return 0.0
        moved = self._copied(stages) + trained * self.execution.moved_bytes
        nbytes *= (1 if self.execution.fused else 3) / shards
        if self.execution.shards_on_host:
            return nbytes / HOST_BYTES_PER_S + self.crowd * float(self.compute.traffic_s(moved + self._cast(stages)))
        seconds = self.crowd * float(self.compute.traffic_s(nbytes + moved + self._cast(stages)))
        if not self.execution.fused and self.cluster.device.fresh_bytes_per_s is not None:
            parts = {each: count for each, count in self.bytes.counted(stages, copies=True).items() if each.trained}
            sizes = np.array([each.elements * self.bytes.main_bytes(each) / shards for each in parts])
            seconds += self.crowd * BETWEEN_PASSES * float(self.compute.fresh_s(sizes) @ list(parts.values()))
        return self._streamed(stages, seconds) if "optimizer" in self.execution.offload else seconds

    def _streamed(self, stages: Sequence[tuple[int, int]], update: float) -> float:
        """Return the seconds of an ``update`` whose state comes from the host and goes back, a piece at a time.

        A piece comes while the one before it is updated and sent; the first and the last have nothing beside them. Two pieces are on the
        device at one time, so that one can't come before the one two places before it has left.
        """
        held = self.bytes.copies(stages)
        state = self.bytes.optimizer_state(held)
        way = host_s(self.cluster.device, state)
        first = min(1.0, self.bytes.piece_state(held) / max(state, 1))
        return first * (2 * way + update) + (1 - first) * max(update, way + update / AT_ONCE)

    def _copied(self, stages: Sequence[tuple[int, int]]) -> float:
        """Return the bytes of copying gradients that a rank sums at the end of a step to flat tensors, and its shards out of those."""
        zero = self._zero
        if not self.execution.copies_gradients or zero >= 2:  # those of sharded gradients are counted beside their sums
            return 0.0
        held = self.bytes.counted(stages).items()
        summed = [(part, count) for part, count in held if part.trained and part.summed_over(self._replicas)]
        nbytes = sum(count * part.elements * self.bytes.gradient_bytes(part) for part, count in summed)
        return 2 * nbytes * (1 + (1 / self.mesh.shards if zero else 0))

    def _cast(self, stages: Sequence[tuple[int, int]]) -> float:
        """Return the bytes of reading parameters and writing their copies, of a rank's shards before they are gathered."""
        held = self.bytes.counted(stages, copies=True).items()
        copied = [
            (part, count) for part, count in held if part.copied and self.bytes.stored_bytes(part) == part.itemsize
        ]
        nbytes = sum(count * part.elements * (part.itemsize + part.copied) for part, count in copied)
        return nbytes / (self.execution.shards if self.execution.zero >= 2 else 1)
