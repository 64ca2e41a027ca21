"""``Pricing``: seconds and bytes of a training step, for any layout of a program's units over stages and replicas.

    units ──Compute──► seconds of each kind's phases ─┐
      │     Network──► seconds of its collectives ────┼─► seconds of each stage ──the schedule's own order──► pipeline
      └─ bytes of each kind ──────────────────────────┴─► bytes of each rank at its peak          + gradients + optimizer

A step is the pipeline of the schedule's actions, then the exposed reduction of gradients, then the optimizer. Everything is priced
for the slowest rank of each stage; ranks of one stage do the same.
"""

from __future__ import annotations

import copy
import functools
import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphpar.cost_models.collectives import Network
from graphpar.cost_models.compute import Compute, collectives_of
from graphpar.cost_models.estimates import BlockSeconds, Estimate, Layout
from graphpar.cost_models.execution import Execution
from graphpar.cost_models.layout_orders import LayoutOrders
from graphpar.cost_models.memory import HostMemory, Memory, Most
from graphpar.cost_models.offloaded_units import host_s
from graphpar.cost_models.pipeline_units import Unit, UnitClass
from graphpar.cost_models.spread import spreads
from graphpar.cost_models.stage_prices import StagePrices, StateSeconds
from graphpar.cost_models.step_costs import StageSeconds, StepCosts, continued, summed_by_axis
from graphpar.cost_models.step_ends import StepEnds
from graphpar.cost_models.timelines import Conditions, StageEstimate
from graphpar.cost_models.unit_bytes import UnitBytes
from graphpar.cost_models.unit_prices import UnitPrices
from graphpar.errors import GraphparError
from graphpar.hardware.cluster import Cluster
from graphpar.hardware.devices import DEVICES, PYTHON_S, figures_of
from graphpar.runtime.axes import AXES
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.schedule_records import get_schedule
from graphpar.schedules.action_table import forwards
from graphpar.schedules.core_sharing import SharedCores
from graphpar.schedules.order import order_of
from graphpar.schedules.simulation import (
    Timeline,
    most_of,
    peak_in_flight,
)

Array = NDArray[np.float64]


Stages = dict[tuple[tuple[Unit, ...], int, str], StagePrices]
"""By units, rows of a microbatch and recomputation: the prices of stages in which no state is gathered."""


class Pricing(LayoutOrders):
    """Prices layouts of ``units`` over ``mesh`` on ``cluster``.

    Args:
        units: of the program that each rank of the compute axes runs; equal ones share a kind, which is priced once a size.
        mesh: its cp, ep and tp are those of the units.
        dtype: of 16-bit products, see :class:`Compute`.
        train: whether backwards run.
        like: prices of other layouts on the same cluster in the same dtype, whose tables are used on.

    Raises:
        GraphparError: the mesh has more devices than the cluster, or a stage devices of two kinds; or the device no rate for the dtype.

    On a cluster of several kinds of devices its own prices are lower bounds, and those of a stage are of :meth:`on` its rank.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        mesh: Mesh,
        cluster: Cluster,
        execution: Execution | None = None,
        *,
        dtype: str = "bf16",
        train: bool = True,
        like: Pricing | None = None,
    ) -> None:
        self.units, self.mesh, self.cluster, self.train = tuple(units), mesh, cluster, train
        self.execution = replace(execution or Execution(), shards=mesh.shards)
        self.bytes: UnitBytes = UnitBytes(units, mesh, self.execution, None if like is None else like.bytes)
        dispatch = self.execution.dispatch_s
        # A framework's time for an operator has its Python in it.
        python: dict[str, Any] = {} if dispatch is None else {**dict.fromkeys(PYTHON_S, 0.0), "dispatch_s": dispatch}
        device = replace(cluster.device, **python)
        self.compute: Compute = Compute(device, dtype, self.execution.cast_bytes) if like is None else like.compute
        self.network: Network = Network(cluster) if like is None else like.network
        self.dtype = dtype
        groups = {
            axis: self.network.group_of_axes(mesh, [axis]) for axis, degree in mesh.degrees().items() if degree > 1
        }
        self._ends = StepEnds(mesh, cluster, self.network, self.compute, self.bytes, self.crowd)
        # Units of equal groups take equal seconds, however many replicas and stages there are.
        self._axes: dict[tuple[Unit, ...], tuple[str, ...]] = {} if like is None else like._axes
        if self.units not in self._axes:
            kinds = {unit.kind for unit in self.units}
            found = {axis for kind in kinds for work in (kind.work, kind.again.work) for axis in collectives_of(work)}
            self._axes[self.units] = tuple(axis for axis in AXES if axis in found)
        self.groups = tuple((axis, groups[axis]) for axis in self._axes[self.units] if axis in groups)
        self._by_groups: dict[object, tuple[UnitPrices, Stages]] = {} if like is None else like._by_groups
        key = self.groups, self.execution.overlap_tp
        if key not in self._by_groups:
            self._by_groups[key] = UnitPrices(self.compute, self.network, groups, self.execution.overlap_tp), {}
        self.of_units, self._without_state = self._by_groups[key]
        self._stage_prices: dict[int, StagePrices] = {}
        self._flops: dict[tuple[int, int], float] = {}
        on = cluster.kinds_of_stages(mesh.pp, mesh.size // mesh.pp)
        if on is None:
            raise GraphparError(
                f"Stages of {mesh.size // mesh.pp} ranks have devices of several kinds on {cluster}: take another pp."
            )
        self.kinds_of_ranks = on
        self._kinds: Sequence[Pricing] = (self,)
        if cluster.groups:
            self._kinds = [
                Pricing(
                    units,
                    mesh,
                    each,
                    execution,
                    dtype=dtype,
                    train=train,
                    like=None if like is None else like._kinds[place],
                )
                for place, each in enumerate(cluster.kinds)
            ]

    def on(self, rank: int) -> Pricing:
        """Return the prices of the devices of a pp rank."""
        return self if len(self._kinds) == 1 else self._kinds[self.kinds_of_ranks[rank]]

    @property
    def rooms(self) -> list[int]:
        """What each pp rank may take of its device's memory."""
        return [self.on(rank).cluster.room_bytes for rank in range(self.mesh.pp)]

    def with_units(self, units: Sequence[Unit]) -> Pricing:
        """Return the prices of the same program with other recomputation, which its units say."""
        other = copy.copy(self)
        other.units, other._stage_prices = tuple(units), {}
        other.bytes = self.bytes.with_units(units)
        other._ends = self._ends.with_bytes(other.bytes)
        if self.cluster.groups:
            other._kinds = [each.with_units(units) for each in self._kinds]
        return other

    # ---- seconds ----

    def least_s(self, unit: Unit, rows: int) -> tuple[float, float]:
        """Return lower bounds of the seconds that a unit adds to a stage, and of those it recomputes."""
        return self.of_units.least_s(unit.kind, rows)

    @cached_property
    def least_end_s(self) -> float:
        """A lower bound of the seconds after the pipeline: the mean rank's optimizer, and on a CPU its sums of gradients."""
        whole = [(0, len(self.units))]
        reduce = self._ends.gradients(whole)[0] if self.cluster.device.kind == "cpu" and not self._sharded else 0.0
        return (self._ends.optimizer(whole) + reduce) / self.mesh.pp

    def stage_seconds(self, first: int, after: int, rows: int, apart: bool = False) -> StageSeconds:
        """Return the seconds of a stage of the units from ``first`` up to ``after``, exclusive; ``apart``: of a schedule that runs the
        halves of backwards apart.
        """
        return self.stage_prices(rows).stage(first, after, apart)

    def stage_prices(self, rows: int) -> StagePrices:
        """Return the prices of all stages for microbatches of ``rows``."""
        if rows not in self._stage_prices:
            key = self.units, rows, self.execution.recompute
            if key not in self._without_state:
                self._without_state[key] = self._stage_prices_without_state(rows)
            found, run = self._without_state[key], self.execution
            if self._sharded and (self.mesh.pp == 1 or not run.kept_for_step):
                found = found.with_state(
                    lambda: self._of_state, self.mesh.state_axis, run, self.mesh.pp, self.bytes.numbers
                )
            self._stage_prices[rows] = found
        return self._stage_prices[rows]

    def _stage_prices_without_state(self, rows: int) -> StagePrices:
        return StagePrices(
            [self.of_units.seconds(unit.kind, rows) for unit in self.units],
            [self.of_units.again(unit.kind, rows) for unit in self.units],
            [bool(unit.kind.again.work.rows) or unit.kind.moves for unit in self.units],
            self.compute,
            self.execution,
            self._moved_s(rows),
        )

    def _moved_s(self, rows: int) -> Array | None:
        """Return the seconds of copying what each unit keeps to the host, one way; None where nothing is moved."""
        if "activations" not in self.execution.offload or not self.train:
            return None
        return np.array([host_s(self.cluster.device, unit.kind.bytes_at(rows).moved) for unit in self.units])

    @cached_property
    def _of_state(self) -> StateSeconds:
        """What sharded state costs each unit."""
        group, run, last = self._ends.sharing, self.execution, len(self.units) - 1
        kinds = ("all-gather", "all-gather again", "reduce-scatter")
        linked = dict(zip(kinds, self._linked))

        @functools.cache
        def moved(kind: str, nbytes: float) -> float:
            if not nbytes:
                return 0.0
            sent = self.network.seconds(kind.removesuffix(" again"), nbytes, group)
            return sent + self._copied_s(nbytes, group.size) + self._ends.by_link_s(nbytes * linked[kind] / group.size)

        default, seen, alone = run.reshard == "default", set[str](), self.mesh.pp == 1
        sizes = []
        for place, unit in enumerate(self.units):
            parts = [part for part in unit.held if part.tied not in seen]
            seen |= {part.tied for part in parts if part.tied is not None and alone}  # stages have a copy each
            kept = default and place == last and not unit.has_blocks  # its backward follows at once
            again = [part for part in parts if part.backward and not (kept or (default and part.rest))]
            sizes.append([run.gathered_bytes(parts), run.gathered_bytes(again), self.bytes.reduced_sizes(parts)])
        for place in range(
            last, 0, -1
        ):  # units that are gathered together: for the first of a forward, or of a backward
            before, own = sizes[place - 1], sizes[place]
            if self.units[place].joins and alone:
                before[0], own[0], before[2], own[2] = before[0] + own[0], 0, before[2] + own[2], 0
        for place in range(last):
            if self.units[place + 1].joins and alone:
                sizes[place + 1][1], sizes[place][1] = sizes[place + 1][1] + sizes[place][1], 0
        gathers, repeated, scatters = np.array([[moved(*each) for each in zip(kinds, own)] for own in sizes]).T
        return StateSeconds(gathers, repeated, scatters, np.array([unit.has_blocks for unit in self.units]))

    @property
    def _linked(self) -> tuple[float, float, float]:
        """The bytes that pass the host's link for each that is gathered for a forward, for a backward, or reduced: shards pass as they are
        stored, and those of fewer ranks that stay on devices after a forward don't."""
        run, parts = self.execution, [part for unit in self.units for part in unit.held]
        if not run.shards_on_host:
            return 0.0, 0.0, 0.0
        gathered = self.bytes.parameter_sizes(parts) / max(1, run.gathered_bytes(parts))
        reduced = self.bytes.gradient_sizes(parts) / max(1, self.bytes.reduced_sizes(parts))
        return gathered, 0.0 if isinstance(run.reshard, int) else gathered, reduced

    def _copied_s(self, nbytes: float, shards: int) -> float:
        """Return the seconds of copying a unit's parameters or gradients: a rank's shard to or from the flat tensor, and all of it."""
        copies = self.execution.copies_gradients and nbytes
        return self.crowd * float(self.compute.traffic_s(2 * nbytes * (1 + 1 / shards))) if copies else 0.0

    def _by_table(self, stage: tuple[int, int]) -> tuple[float, float]:
        """Return the seconds of a stage's UNSHARD and REDUCE_GRAD, where a pipeline's table has them."""
        if not self._sharded or self.mesh.pp == 1:
            return 0.0, 0.0
        state = self._of_state.of(slice(*stage))
        there, back = float(state.gathers.sum()), float(state.reduces.sum())
        if self.cluster.device.kind == "cpu":  # elsewhere the host is ahead of the device
            there += state.times(state.gathers) * self.compute.device.fsdp_gather_s
            back += state.times(state.reduces) * self.compute.device.fsdp_reduce_s
        return there if self.execution.kept_for_step else 0.0, back

    # ---- a step ----

    def estimate(self, layout: Layout, *, exact: bool = True) -> Estimate:
        """Estimate a step of ``layout``.

        Without ``exact`` a schedule of many microbatches is simulated for few of them and extrapolated, which is faster.

        Raises:
            GraphparError: the schedule is not legal for so many stages and microbatches.
        """
        step = self._step(layout, exact)
        busiest = max(range(self.mesh.pp), key=lambda pp: step.timeline.busy[pp])
        memory = self._memories(layout, [stage.units for stage in step.staged], step.own, exact)
        fullest = max(range(self.mesh.pp), key=lambda pp: memory[pp].total - self.rooms[pp])
        devices = [self.on(pp).cluster for pp in range(self.mesh.pp)]
        compute, sent, exposed, parts = self._parts(layout, step, busiest)
        return Estimate(
            step_time_s=step.seconds,
            mfu=self.flops(layout) / (step.seconds * self._peak),
            bubble_fraction=step.timeline.bubble,
            memory=memory,
            reduced_bytes=tuple(self.bytes.reduced([stage.units for stage in step.staged], own) for own in step.own),
            host_memory=self._host_memories(layout, [stage.units for stage in step.staged], step.own, exact),
            compute_s=compute,
            communication_s=sent,
            exposed_s=exposed,
            parts_s=parts,
            pipeline_s=step.pipeline,
            gradients_s=step.summed - step.pipeline,
            optimizer_s=step.after,
            stages=tuple(
                replace(stage, kept_bytes=kept, left_bytes=left, gathered_bytes=gathered, gradient_bytes=gradients)
                for stage, kept, left in zip(
                    step.staged, *self._kept_and_left(layout, [each.units for each in step.staged])
                )
                for gathered, gradients in [self.bytes.whole([stage.units])]
            ),
            conditions=step.conditions,
            closings=step.closings,
            cluster=str(self.cluster),
            optimizer=self.execution.optimizer.name,
            device=self.cluster.device.name,
            memory_bytes=devices[fullest].device.memory_bytes,
            headroom_bytes=devices[fullest].device.memory_bytes - devices[fullest].room_bytes,
            host_memory_bytes=self._host_share,
            figures="; ".join(dict.fromkeys(figures_of(each.device) for each in self.cluster.kinds)),
            devices=tuple(each.device.name for each in devices) if self.cluster.groups else (),
            rooms=tuple(self.rooms) if self.cluster.groups else (),
            blocks=self._blocks(layout),
            spreads_s=spreads(parts, self._crossed, self.cluster.device == DEVICES["CPU"]),
            crossed=self._crossed,
            exact=exact or self.is_simulated_whole(layout),
        )

    @property
    def _crossed(self) -> dict[str, dict[str, int]]:
        """Over how many nodes, pods and so on the collectives of each axis are spread, of those that leave a node."""
        groups = {axis: self.network.group_of_axes(self.mesh, [axis]) for axis in self.mesh.degrees()}
        groups["pp"] = self.network.boundary(self.mesh)
        return {
            axis: {level.name: parts for level, (parts, _) in zip(self.cluster.levels, group.crossed)}
            for axis, group in groups.items()
            if group.crossed
        }

    @property
    def _peak(self) -> float:
        """The flop/s of all devices at most."""
        rates = [self.on(rank).compute.rate(self._itemsize) for rank in range(self.mesh.pp)]
        return self.mesh.size * (sum(rates) / self.mesh.pp)

    def _blocks(self, layout: Layout) -> tuple[BlockSeconds, ...]:
        named: dict[tuple[float, float], list[str]] = {}
        ranks = self._ranks(layout, len(layout.starts))
        for place, unit in enumerate(self.units):
            if len(unit.modules) == 1:
                pricing = self.on(ranks[bisect_right(layout.starts, place) - 1])
                found = pricing.stage_seconds(place, place + 1, layout.microbatch_size, self._runs_apart(layout))
                forward = found.forward - sum(found.forward_exposed.values())
                backward = found.backward - sum(found.backward_exposed.values())
                named.setdefault((forward, backward), []).append(*unit.modules)
        return tuple(BlockSeconds(tuple(modules), *seconds) for seconds, modules in named.items())

    def step_s(self, layout: Layout) -> float:
        """Return the seconds of :meth:`estimate`, without measuring memory."""
        return self._step(layout, exact=True).seconds

    def pipeline_s(self, layout: Layout) -> float:
        """Return the seconds of a step until its last action, every microbatch simulated."""
        staged, costs = self._staged(layout)
        return max(self._timeline(layout, staged, costs, self._conditions(layout, costs), exact=True).ends)

    def _step(self, layout: Layout, exact: bool) -> StepCosts:
        (staged, costs), own = self._staged(layout), self.places(layout)
        conditions = self._conditions(layout, costs)
        timeline = self._timeline(layout, staged, costs, conditions, exact)
        closings = tuple(
            self.on(pp)._ends.of_rank(
                [each.units for each in staged], costs, places, self._windows(layout, costs, pp, exact)
            )
            for pp, places in enumerate(own)
        )
        return StepCosts(staged, costs, own, conditions, timeline, closings)

    def _staged(self, layout: Layout) -> tuple[tuple[StageEstimate, ...], list[StageSeconds]]:
        """Return the stages of a layout, and the seconds of a microbatch of each."""
        stages = self.stages_of(layout)
        ranks, apart = self._ranks(layout, len(stages)), self._runs_apart(layout)
        costs = [self.on(pp).stage_seconds(*stage, layout.microbatch_size, apart) for pp, stage in zip(ranks, stages)]
        there, back = ([*crossing, 0.0] for crossing in self._crossings(layout, stages))
        staged = tuple(
            StageEstimate(
                place, ranks[place], stage, cost.forward, cost.backward, cost.weight, self._ends.elements(stage), there[place], back[place],
                cost.forward_exposed, cost.backward_exposed, *self.on(ranks[place])._by_table(stage), state_axis=self.mesh.state_axis,
                forward_sent_s=cost.forward_sent, backward_sent_s=cost.backward_sent,
            )
            for place, (stage, cost) in enumerate(zip(stages, costs))
        )  # fmt: skip
        return staged, costs

    def _runs_apart(self, layout: Layout) -> bool:
        """Whether the schedule runs the halves of some backwards apart, for which a program has no functions that run both."""
        if layout.order is not None:
            return layout.order.splits_backwards
        return self.train and self.mesh.pp > 1 and get_schedule(layout.schedule).splits_backward

    def _parts(
        self, layout: Layout, step: StepCosts, rank: int
    ) -> tuple[float, dict[str, float], dict[str, float], dict[str, float]]:
        """Return of a pp rank its compute, its communication and exposed communication by axis, and the parts of its step, in seconds."""
        count, own, busy = layout.microbatches, step.own[rank], step.timeline.busy[rank]
        waiting = step.timeline.waiting[rank]
        compute = count * sum(step.costs[place].compute for place in own)
        sent, exposed = (
            summed_by_axis(
                [{axis: count * value for axis, value in getattr(step.costs[place], name).items()} for place in own]
            )
            for name in ("sent", "exposed")
        )
        host = "host" if self.crowd == 1 else "turns"  # where ranks share cores the host is the device
        by_table = sum(step.staged[place].gather_s + step.staged[place].reduce_s for place in own)
        if by_table:
            sent, exposed = (summed_by_axis([each, {self.mesh.state_axis: by_table}]) for each in (sent, exposed))
        parts = {"compute": compute, host: max(0.0, busy - compute - sum(exposed.values())), **exposed}
        if self.mesh.pp > 1:
            sent["pp"] = count * self._transfers(step, own)
            exposed["pp"] = parts["pp"] = waiting
        parts["bubble"] = max(0.0, step.pipeline - busy - waiting)
        parts |= {"gradients": step.summed - step.pipeline, "optimizer": step.after}
        closing = step.closings[rank]
        if closing.axis is not None:
            sent = summed_by_axis([sent, {closing.axis: closing.reduce + closing.gather}])
            exposed = summed_by_axis([exposed, {closing.axis: closing.exposed + closing.gather_exposed}])
        return compute, sent, exposed, parts

    @cached_property
    def crowd(self) -> float:
        """Ranks for each core where they outnumber the cores of a host, else 1."""
        cores = self.cluster.device.cores
        return 1.0 if cores is None else max(1.0, min(self.mesh.size, self.cluster.host_devices) / cores)

    @property
    def _itemsize(self) -> int:
        return 4 if self.dtype in ("fp32", "tf32", "fp64") else 2

    @property
    def _host_share(self) -> int | None:
        """The bytes of a host for each of the ranks on it."""
        cluster = self.cluster
        share = min(self.mesh.size, cluster.host_devices)
        return None if cluster.host_memory_bytes is None else cluster.host_memory_bytes // share

    def flops(self, layout: Layout) -> float:
        """Return the model's flops in a step, without recomputation and without what several ranks compute alike."""
        once = sum(self._kind_flops(unit.kind, layout.microbatch_size) for unit in self.units)
        return once * layout.microbatches * self.mesh.size / self.mesh.pp

    def _kind_flops(self, kind: UnitClass, rows: int) -> float:
        key = id(kind), rows
        if key not in self._flops:
            self._flops[key] = kind.work.own_flops(rows)
        return self._flops[key]

    def _timeline(
        self,
        layout: Layout,
        stages: Sequence[StageEstimate],
        seconds: Sequence[StageSeconds],
        conditions: Conditions,
        exact: bool,
    ) -> Timeline:
        if self.mesh.pp == 1 and layout.order is None:
            waiting = sum(sum(cost.exposed.values()) for cost in seconds)
            busy = sum(cost.forward + cost.backward for cost in seconds) - waiting
            total = layout.microbatches * (busy * self.crowd + waiting)
            return Timeline((), (), total, total, 0.0, (total,), (0.0,), (0.0,), (total,), (1,))

        def run(microbatches: int) -> Timeline:
            order = self._order(layout, len(stages), microbatches)
            order = order if self.train else order_of(forwards(order.table))
            return conditions.timeline(order, stages, spans=False)

        few = self._few(layout)
        if exact or few is None:
            return run(layout.microbatches)
        return continued(run(few), run(few + self.mesh.pp), (layout.microbatches - few) / self.mesh.pp)

    def _conditions(self, layout: Layout, seconds: Sequence[StageSeconds]) -> Conditions:
        # torch's schedules wait for their sends; that stops a CPU's rank, but on a GPU only a stream.
        waits = self.execution.wait_for_sends or self.cluster.device.kind == "cpu"
        turns = None
        if self.crowd > 1:
            shares = tuple(
                1 - sum(cost.exposed.values()) / max(cost.forward + cost.backward, 1e-12) for cost in seconds
            )
            turns = SharedCores(self.mesh.size / self.crowd, self.mesh.size / self.mesh.pp, shares)
        scheduled = self.mesh.pp > 1 or layout.order is not None
        action_s = max(each.device.action_s for each in self.cluster.kinds)
        return Conditions(waits, action_s if scheduled else 0.0, turns)

    @staticmethod
    def _transfers(step: StepCosts, own: Sequence[int]) -> float:
        """Return the seconds of transfers to the stages of a rank from other ranks, for a microbatch; and back, where senders wait."""
        stages, both = step.staged, step.conditions.sender_waits
        total = 0.0
        for here, after in itertools.pairwise(stages):
            if here.rank != after.rank:
                total += here.sent_s * ((after.index in own) + (both and here.index in own))
                total += here.returned_s * ((here.index in own) + (both and after.index in own))
        return total

    def _crossings(self, layout: Layout, stages: Sequence[tuple[int, int]]) -> tuple[list[float], list[float]]:
        """Return the seconds of each stage's transfer to the next, and of the gradients back."""
        if self.mesh.pp == 1:
            return [0.0] * (len(stages) - 1), [0.0] * (len(stages) - 1)
        group, ranks = self.network.boundary(self.mesh), self._ranks(layout, len(stages))
        there: list[float] = []
        back: list[float] = []
        for (_, after), ends in zip(stages[:-1], itertools.pairwise(ranks)):
            networks = [self.on(rank).network for rank in ends]  # the slower of the two links counts
            sends = self.units[after - 1].kind.sends
            for costs, flags in ((there, (True, False)), (back, (True,))):
                nbytes = sum(size.at(layout.microbatch_size) for size, gradient in sends if gradient in flags)
                costs.append(max(each.seconds("send", nbytes, group) for each in networks) if nbytes else 0.0)
        return there, back

    # ---- bytes ----

    def totals(self, layout: Layout, *, halves: bool = True) -> list[int]:
        """Return the bytes of each rank in :meth:`estimate` without ``exact``, without simulating a step; without ``halves`` fewer: where a
        backward runs in halves, a microbatch counts as what its forward keeps."""
        stages, rows, count = self.stages_of(layout), layout.microbatch_size, layout.microbatches
        own, peaks = self.places(layout), self._most(layout, stages, exact=False, halves=halves)
        return [self.bytes.total(stages, places, rows, count, peak) for places, peak in zip(own, peaks)]

    def _memories(
        self, layout: Layout, stages: Sequence[tuple[int, int]], own: Sequence[Sequence[int]], exact: bool
    ) -> tuple[Memory, ...]:
        rows, count = layout.microbatch_size, layout.microbatches
        peaks = self._most(layout, stages, exact)
        return tuple(self.bytes.memory(stages, places, rows, count, peak) for places, peak in zip(own, peaks))

    def _host_memories(
        self, layout: Layout, stages: Sequence[tuple[int, int]], own: Sequence[Sequence[int]], exact: bool
    ) -> tuple[HostMemory, ...]:
        """Return what each pp rank has in the memory of its host; nothing where nothing is offloaded."""
        run, rows = self.execution, layout.microbatch_size
        if not run.offload or not self.train:
            return ()
        held = [self.bytes.copies([stages[place] for place in places]) for places in own]
        moved = [self.bytes.moved(first, after, rows) for first, after in stages]
        peaks = self._most_kept(layout, moved, exact)
        return tuple(replace(self.bytes.on_host(own), activations=peak) for own, peak in zip(held, peaks))

    def _most(
        self, layout: Layout, stages: Sequence[tuple[int, int]], exact: bool, *, halves: bool = True
    ) -> list[Most]:
        """Return the most bytes that each pp rank has of what comes and goes."""
        (saved, left), rows = self._kept_and_left(layout, stages, halves=halves), layout.microbatch_size
        state = list(zip(*(self.bytes.whole([stage]) for stage in stages)))
        whole = sum(map(sum, state))
        apart = halves and self.execution.halves and self._runs_apart(layout)
        if (not whole and left is saved) or (self.mesh.pp == 1 and layout.order is None):
            return [Most(kept, whole) for kept in self._most_kept(layout, saved, exact)]
        parts = [self.bytes.halves(*stage, rows) for stage in stages] if apart else []

        def peaks(microbatches: int) -> list[int]:
            order = self._ordered(layout, len(saved), microbatches)
            found = most_of(order, saved, left, *(state if whole else ()))
            return [each for fullest in found for action in fullest for each in action]

        found = list(map(int, self._peaks(layout, peaks, exact=exact)))
        most = []
        for place, own in enumerate(self.places(layout)):
            on_top = map(max, zip(*(parts[stage].on_top for stage in own))) if apart else (None, None, None)
            each = [
                Most(found[2 * at], found[2 * at + 1], top) for at, top in zip(range(3 * place, 3 * place + 3), on_top)
            ]
            most.append(max(each, key=lambda peak: peak.activations + peak.whole + (peak.transient or 0)))
        return most

    def _kept_and_left(
        self, layout: Layout, stages: Sequence[tuple[int, int]], *, halves: bool = True
    ) -> tuple[list[int], list[int]]:
        """Return :meth:`kept_by`, and what each stage keeps of a microbatch whose backward has run its first half; without ``halves`` the
        least."""
        saved, rows = self.kept_by(layout, stages), layout.microbatch_size
        if not (self.execution.halves and self._runs_apart(layout)):
            return saved, saved
        left = [self.bytes.halves(*stage, rows).left if halves or not stage[0] else 0 for stage in stages]
        return saved, [
            own + more - self.bytes.kept(*stage, rows)[0] if more else 0
            for own, more, stage in zip(saved, left, stages)
        ]

    def kept_by(self, layout: Layout, stages: Sequence[tuple[int, int]]) -> list[int]:
        """Return the bytes of each microbatch in flight of each stage; a message between two stages of a rank is a tensor of the first."""
        rows, ranks = layout.microbatch_size, self._ranks(layout, len(stages))
        received = self.train and self.mesh.pp > 1
        return [
            self.bytes.in_flight(*stage, rows)
            if received and place and ranks[place] != ranks[place - 1]
            else self.bytes.kept(*stage, rows)[0]
            for place, stage in enumerate(stages)
        ]

    def _most_kept(self, layout: Layout, saved: Sequence[int], exact: bool) -> list[int]:
        """Return the most bytes that each pp rank keeps at once, of so many of a microbatch of each stage."""
        if self.bytes.infers or (self.mesh.pp == 1 and layout.order is None):
            return [sum(saved[place] for place in places) for places in self.places(layout)]

        def peaks(microbatches: int) -> tuple[int, ...]:
            return peak_in_flight(self._ordered(layout, len(saved), microbatches), saved)

        return [int(peak) for peak in self._peaks(layout, peaks, exact=exact)]
