"""What a search keeps of its best plans, and their prices where something else holds: another batch, network, device, or number of them.

    search ──its best plans, as units with work and bytes──► KeptPlans ──kept.json──► KeptPlans ──Change──► Answer

Placements of tensors and stages' boundaries are those that were found. Microbatches and replicas follow the change, as far as the rules
for decisions allow, and of each plan the recomputations that were measured are tried where its own does not fit.
"""

from __future__ import annotations

import hashlib
import json
import operator
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

from graphpar.cost_models.estimates import Estimate, Layout
from graphpar.cost_models.execution import Execution
from graphpar.cost_models.pipeline_units import Unit
from graphpar.cost_models.plain_records import TYPES, decode, encode
from graphpar.cost_models.pricing import Pricing
from graphpar.cost_models.spread import of_difference
from graphpar.errors import GraphparError
from graphpar.hardware.cluster import Cluster
from graphpar.hardware.devices import check_number
from graphpar.ir.plan import Plan
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.options import Decisions, check_decisions
from graphpar.text import plural

KEPT_PLANS = "kept.json"
"""The file of a program's folder in which they are."""
SIZES = (1.0, 0.5, 2.0)
"""By which times a microbatch may have other rows than in the kept plan."""


@dataclass(frozen=True)
class KeptPlan:
    """A plan with what its price needs.

    Attributes:
        recompute: of its own units.
        units: with its own recomputation, and then of each other kind that was measured, by its name.
    """

    mesh: Mesh
    layout: Layout
    execution: Execution
    recompute: Any
    units: tuple[Unit, ...]
    others: Mapping[str, tuple[Unit, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class KeptPlans:
    """The best plans of a search, the chosen one first.

    Attributes:
        dtype: see :class:`~graphpar.cost_models.pricing.Pricing`.
        symbolic: whether microbatches may have other sizes than those of the trace.
        splits: whether the batch may be split into microbatches.
        coupled: whether what a replica computes depends on how many there are.
    """

    cluster: Cluster
    global_batch: int
    dtype: str
    train: bool
    symbolic: bool
    splits: bool
    coupled: bool
    plans: tuple[KeptPlan, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        plans = [[getattr(plan, each.name) for each in fields(KeptPlan)] for plan in self.plans]
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("cluster", "plans")}
        data = own | {"cluster": self.cluster.to_json(), "plans": encode(plans)}
        return {**data, "digest": _digest(data)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> KeptPlans:
        """Read what :meth:`to_json` returns.

        Raises:
            GraphparError: it is not as it was written, or was by another version.
        """
        if data.get("digest") != _digest({name: value for name, value in data.items() if name != "digest"}):
            raise GraphparError(
                "what a search kept is not as it was written, or is of another version; compile the model again."
            )
        plans = tuple(KeptPlan(*values) for values in decode(data["plans"]))
        cluster = Cluster.from_json(data["cluster"])
        own = {each.name: data[each.name] for each in fields(KeptPlans) if each.name not in ("cluster", "plans")}
        return KeptPlans(cluster=cluster, plans=plans, **own)


@dataclass(frozen=True)
class Change:
    """What is to hold instead; None: as it was.

    Attributes:
        cluster: other hardware, of the same kind of device.
        network: times the bandwidth between nodes, or in the node where there is one.
        devices: how many there are, of the same cluster otherwise.
        memory_headroom: the share of a device's memory that plans leave free.
        mesh: degrees that plans must have.
    """

    cluster: Cluster | None = None
    network: float | None = None
    devices: int | None = None
    global_batch: int | None = None
    microbatch_size: int | None = None
    memory_headroom: float | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.network is not None:
            check_number("network", self.network)
        for name in ("devices", "global_batch", "microbatch_size"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), whole=True)
        if self.cluster is not None and self.devices is not None:
            raise GraphparError("the cluster says how many devices there are; leave --devices out.")

    def on(self, old: Cluster) -> Cluster:
        """Return the cluster that there is then.

        Raises:
            GraphparError: the devices are of another kind, or fill no nodes.
        """
        found = old if self.cluster is None else self.cluster
        if found.device.kind != old.device.kind:
            raise GraphparError(
                f"the plan is for {old}; programs for a {found.device.kind} device are others: compile the model for {found}."
            )
        if self.devices is not None:
            found = _resized(found, self.devices)
        if self.network is not None:
            found = found.with_network(self.network)
        kept = old.headroom if found.headroom is None else found.headroom
        return found.with_headroom(kept if self.memory_headroom is None else self.memory_headroom)


def _resized(cluster: Cluster, devices: int) -> Cluster:
    if cluster.groups and devices != cluster.size:
        raise GraphparError(
            f"{cluster} has devices of several kinds; give --cluster instead of --devices, to say how many of each."
        )
    if devices == cluster.size:
        return cluster
    if devices <= cluster.devices_per_node or (cluster.nodes == 1 and cluster.device.kind == "cpu"):
        return replace(cluster, nodes=1, devices_per_node=devices)
    if devices % cluster.devices_per_node:
        raise GraphparError(
            f"{devices} devices fill no whole number of nodes of {cluster.devices_per_node}; give the cluster with --cluster."
        )
    return replace(cluster, nodes=devices // cluster.devices_per_node)


@dataclass(frozen=True)
class Repriced:
    """A kept plan, or what follows of it, at other conditions; ``recompute``: of its blocks."""

    mesh: Mesh
    layout: Layout
    recompute: Any
    zero: int
    estimate: Estimate

    @property
    def fits(self) -> bool:
        """Whether every rank fits in its device's memory."""
        return self.estimate.missing_bytes <= 0

    def to_json(self) -> dict[str, Any]:
        """Return the decisions, seconds and bytes as plain data."""
        found = self.estimate
        return {
            "mesh": self.mesh.degrees(),
            "schedule": self.layout.schedule,
            "microbatches": self.layout.microbatches,
            "microbatch_size": self.layout.microbatch_size,
            "zero": self.zero,
            "recompute": self.recompute if isinstance(self.recompute, str) else dict(self.recompute),
            "fits": self.fits,
            "host_missing_bytes": max(0, found.host_missing_bytes),
            **{
                name: found.to_json()[name]
                for name in (
                    "step_time_s", "spread_s", "mfu", "bubble_fraction", "peak_memory_bytes", "compute_s", "communication_s",
                    "exposed_communication_s",
                )
            },
        }  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What a change does.

    Attributes:
        before: the chosen plan as it was priced.
        same: the same plan now, with as many replicas as make up the devices; None where it can't be that.
        why_not: why it can't.
        best: the fastest of the kept plans that fits now, or the same one where that is as fast as far as prices are known; None where
            none fits.
        plans: all that were priced, the fastest that fit first.
        seconds: that this took.
    """

    cluster: Cluster
    global_batch: int
    before: Repriced
    same: Repriced | None
    why_not: str | None
    best: Repriced | None
    plans: tuple[Repriced, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        parts = {name: each and each.to_json() for name in ("before", "same", "best") for each in [getattr(self, name)]}
        return {
            "cluster": str(self.cluster),
            "devices": self.cluster.size,
            "global_batch": self.global_batch,
            **parts,
            "why_not": self.why_not,
            "plans": [each.to_json() for each in self.plans],
            "seconds": self.seconds,
        }


def _digest(data: Mapping[str, Any]) -> str:
    """Return what changes with any of the numbers of ``data``, or with what they mean."""
    known = {name: [each.name for each in fields(kind)] for name, kind in TYPES.items() if is_dataclass(kind)}
    return hashlib.sha256(json.dumps([data, known], sort_keys=True).encode()).hexdigest()


def what_if(kept: KeptPlans, change: Change, decided: Plan) -> Answer:
    """Price the plans that a search kept under ``change``; ``decided``: the plan that it chose.

    Raises:
        GraphparError: the change is not possible, or no kept plan can have it; the message says why.
    """
    began = time.perf_counter()
    cluster, batch = change.on(kept.cluster), change.global_batch or kept.global_batch
    decided.precision.check_units(cluster.device)
    prices, chosen, wanted = _Prices(kept, cluster), kept.plans[0], Mesh.pinned(change.mesh, cluster.size)
    before = _Prices(kept, kept.cluster).priced(chosen, chosen.mesh, chosen.layout, exact=True)
    found: list[tuple[Repriced, Callable[[], Repriced]]] = []  # each with what prices all of its microbatches
    same: Repriced | None = None
    why_not: str | None = None
    for plan in kept.plans:
        own = change.microbatch_size or plan.layout.microbatch_size
        try:
            scaled = _scaled(kept, plan, cluster.size, wanted)
        except GraphparError as error:
            why_not = str(error) if plan is chosen else why_not
            continue
        for size in _sizes(kept, own, batch // scaled.mesh.replicas, change.microbatch_size is not None):
            same_size = plan is chosen and size == own
            try:
                layout = _layout(kept, decided, scaled, batch, size)
                how, priced = prices.fitted(scaled, scaled.mesh, layout)
            except GraphparError as error:  # that, or no legal schedule of so many microbatches
                why_not = str(error) if same_size else why_not
                continue
            found.append((priced, partial(prices.priced, scaled, scaled.mesh, layout, how, exact=True)))
            if same_size:
                same = prices.priced(scaled, scaled.mesh, layout, exact=True)
    if not found:
        raise GraphparError(
            f"none of the {len(kept.plans)} kept plans can have a batch of {batch} on {plural(cluster.size, 'device')}"
            f"{' with this mesh' if change.mesh else ''}: {str(why_not).removesuffix('.')}. Only microbatches and replicas are changed; "
            "compile the model for it."
        )
    ranked = sorted(
        found,
        key=lambda each: (
            not each[0].fits,
            max(0, each[0].estimate.missing_bytes),
            each[0].estimate.step_time_s,
        ),
    )
    (first, exactly), best = ranked[0], None
    if first.fits:
        best = same if same is not None and same.fits and _equal(first.estimate, same.estimate) else exactly()
    plans = tuple(priced for priced, _ in ranked)
    return Answer(cluster, batch, before, same, why_not, best, plans, time.perf_counter() - began)


def _equal(first: Estimate, second: Estimate) -> bool:
    """Whether two steps are as long as each other, as far as prices are known."""
    return abs(second.step_time_s - first.step_time_s) <= of_difference(first.spreads_s, second.spreads_s)


def _scaled(kept: KeptPlans, plan: KeptPlan, devices: int, wanted: Mapping[str, int]) -> KeptPlan:
    """Return the plan on ``devices`` by more or fewer replicas; where one rank holds all of the state, it is not sharded.

    Raises:
        GraphparError: there is none, or not of the degrees that are ``wanted``.
    """
    mesh, degrees, run = plan.mesh, plan.mesh.degrees(), plan.execution
    axis = "dp_shard" if mesh.dp_shard > 1 else "dp_replicate"
    if devices < mesh.size and mesh.dp_replicate > 1 and mesh.dp_replicate * devices % mesh.size == 0:
        axis = "dp_replicate"
    if degrees[axis] * devices % mesh.size:
        raise GraphparError(
            f"the plan has the mesh {mesh.text}, of which no number of replicas makes up {plural(devices, 'device')}"
        )
    mesh = replace(mesh, **{axis: degrees[axis] * devices // mesh.size})
    if any(mesh.degrees().get(axis) != degree for axis, degree in wanted.items()):
        raise GraphparError(f"the plan has the mesh {mesh.text}")
    if kept.coupled and mesh != plan.mesh:
        raise GraphparError("replicas compute the batch together, so that another number of them runs another program")
    if run.zero and mesh.shards == 1 and not run.shards_on_host:
        run = replace(run, zero=0, reshard="default", units=None, prefetch=False, gathered=1)
    return replace(plan, mesh=mesh, execution=run)


def _sizes(kept: KeptPlans, own: int, rows: int, given: bool) -> list[int]:
    """Return which rows microbatches may have of the ``rows`` of a replica: ``own``, and if that is not ``given`` half and twice, or where
    none of them divides these the largest that does."""
    if given or not kept.symbolic:
        return [own]
    able = [size for times in SIZES if (size := int(own * times)) >= 1 and rows % size == 0]
    return sorted({own, *(able or [max(size for size in range(1, own + 1) if rows % size == 0)])})


def _layout(kept: KeptPlans, decided: Plan, plan: KeptPlan, batch: int, size: int) -> Layout:
    """Return the plan's layout with microbatches of ``size`` rows that make up the batch.

    Raises:
        GraphparError: there is none, or the plan can't be run so.
    """
    run, mesh = plan.execution, plan.mesh
    given = Decisions(
        global_batch=batch, microbatch_size=size, zero=run.zero, reshard=run.reshard, units=run.units, offload=run.offload or None,
        reduce_dtype=decided.reduce_dtype, dp_mean=decided.dp_mean or None,
    )  # fmt: skip
    check_decisions(given, mesh, decided.mode)
    layout = replace(plan.layout, microbatch_size=size, microbatches=batch // (mesh.replicas * size))
    if not kept.symbolic and (batch != kept.global_batch or size != plan.layout.microbatch_size):
        raise GraphparError(
            f"the model was traced for a batch of {kept.global_batch} in microbatches of {plan.layout.microbatch_size} alone"
        )
    if not kept.splits and layout.microbatches > 1:
        raise GraphparError("the batch is computed at once, and can't be split into microbatches")
    return layout


class _Prices:
    """Prices of kept plans on ``cluster``; those of equal units are computed once."""

    def __init__(self, kept: KeptPlans, cluster: Cluster) -> None:
        self.kept, self.cluster = kept, cluster
        self._like: Pricing | None = None
        self._known: dict[tuple[int, Mesh], Pricing] = {}

    def of(self, plan: KeptPlan, mesh: Mesh, units: tuple[Unit, ...]) -> Pricing:
        key = id(units), mesh
        if key not in self._known:
            kept = self.kept
            made = Pricing(
                units, mesh, self.cluster, plan.execution, dtype=kept.dtype, train=kept.train, like=self._like
            )
            self._like = self._like or made
            self._known[key] = made
        return self._known[key]

    def priced(
        self, plan: KeptPlan, mesh: Mesh, layout: Layout, how: str | None = None, *, exact: bool = False
    ) -> Repriced:
        """Price the plan with its own recomputation, or with ``how``."""
        units = plan.units if how is None else plan.others[how]
        estimate = self.of(plan, mesh, units).estimate(layout, exact=exact)
        return Repriced(mesh, layout, plan.recompute if how is None else how, plan.execution.zero, estimate)

    def fitted(self, plan: KeptPlan, mesh: Mesh, layout: Layout) -> tuple[str | None, Repriced]:
        """Price the plan with the recomputation that is the fastest that fits: its own (None), or one of the others for all blocks."""
        ways, missing = [None, *plan.others], {}
        for how in ways:
            pricing = self.of(plan, mesh, plan.units if how is None else plan.others[how])
            missing[how] = max(map(operator.sub, pricing.totals(layout), pricing.rooms))
        able = [how for how in ways if missing[how] <= 0] or [min(ways, key=missing.__getitem__)]
        found = [(how, self.priced(plan, mesh, layout, how)) for how in able]
        return min(found, key=lambda each: (max(0, each[1].estimate.missing_bytes), each[1].estimate.step_time_s))
