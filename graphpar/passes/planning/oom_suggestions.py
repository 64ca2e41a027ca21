"""What lets a program fit where no plan does: the changes that cost least first.

what the user pinned ──given up one by one, else all──┐
the hosts ──state or activations live there──┤
the cluster ──more devices, a device with more memory──┴─► a plan that fits ──► "recompute='auto' (3.21 s a step)"
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from graphpar.errors import GraphparError
from graphpar.hardware.cluster import Cluster
from graphpar.hardware.devices import DEVICES
from graphpar.ir.program import Program
from graphpar.passes.planning.candidates import Candidate, Priced
from graphpar.passes.planning.constraints import PlanConstraints, check_offload
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.option_kinds import AUTO, OFFLOADS
from graphpar.runtime.options import check_decisions
from graphpar.text import seconds_text

GROWTH = (2, 4, 8, 16)
"""Factors by which the number of devices is multiplied."""
Fits = Callable[[Cluster, Mapping[str, int], PlanConstraints], Priced | None]
"""Returns a plan that fits; None where there is none."""


@dataclass(frozen=True)
class Remedy:
    """A change, and a plan that fits with it."""

    change: str
    priced: Priced

    @property
    def text(self) -> str:
        """The change and the seconds of a step."""
        return f"{self.change} ({seconds_text(self.priced.estimate.step_time_s)} a step)"


@dataclass(frozen=True)
class _Change:
    """Pins that are given up; ``says`` writes what the plan that was found has instead."""

    pinned: Mapping[str, int]
    pins: PlanConstraints
    says: Callable[[Candidate], str]


def remedies(
    program: Program, cluster: Cluster, pinned: Mapping[str, int], pins: PlanConstraints, fits: Fits
) -> list[Remedy]:
    """Return changes with each of which ``program`` fits.

    Changes of the plan come first, the fastest first; then more of the same devices, as few as do, and devices with more memory, as
    little as does.

    Args:
        pinned: degrees of the mesh that the user gave.
        fits: looks for a plan.
    """
    changes = list(_given_up(program, pinned, pins))
    found = [*_found(cluster, changes, fits), *_offloaded(program, cluster, pinned, pins, fits)]
    if not found and len(changes) > 1:
        found = _found(cluster, [_all_given_up(program, pins)], fits)
    return [*sorted(found, key=lambda each: each.priced.rank_key), *_other_hardware(cluster, pinned, pins, fits)]


def _offloaded(
    program: Program, cluster: Cluster, pinned: Mapping[str, int], pins: PlanConstraints, fits: Fits
) -> list[Remedy]:
    """Return what lets ``program`` fit in the memory of the hosts as well, as little of it as does."""
    if program.mode != "train" or cluster.device.host_link is None:
        return []
    for count in range(1, len(OFFLOADS) + 1):
        wider = [each for each in itertools.combinations(OFFLOADS, count) if set(each) > set(pins.offload or ())]
        changes = [
            _Change(pinned, wanted, lambda _, each=each: f"offload={','.join(each)!r}")  # type: ignore[misc]
            for each in wider
            if _can(wanted := replace(pins, offload=each), program)
        ]
        found = [each for each in _found(cluster, changes, fits) if each.priced.estimate.host_missing_bytes <= 0]
        if found:
            return found
    return []


def _can(pins: PlanConstraints, program: Program) -> bool:
    try:
        check_decisions(PlanConstraints(offload=pins.offload, recompute=pins.recompute), Mesh(), program.mode)
        check_offload(pins, program)
    except GraphparError:
        return False
    return True


def _found(cluster: Cluster, changes: list[_Change], fits: Fits) -> list[Remedy]:
    tried = [(change, fits(cluster, change.pinned, change.pins)) for change in changes]
    found = [Remedy(change.says(priced.candidate), priced) for change, priced in tried if priced is not None]
    return list({each.change: each for each in found}.values())


def _given_up(program: Program, pinned: Mapping[str, int], pins: PlanConstraints) -> Iterator[_Change]:
    """Yield the changes that each give up one thing that the user pinned."""
    train = program.mode == "train"
    if train and pins.recompute != AUTO:
        yield _Change(pinned, replace(pins, recompute=AUTO), lambda _: f"recompute={AUTO!r}")
    if pins.microbatch_size is not None:
        yield _Change(
            pinned,
            replace(pins, microbatch_size=None),
            lambda found: f"microbatches of {found.microbatch_size} instead of {pins.microbatch_size}",
        )
    if pins.schedule is not None:
        yield _Change(
            pinned,
            replace(pins, schedule=None),
            lambda found: f"{_mesh_text(found.mesh)} with {found.schedule} instead of {pins.schedule}",
        )
    if train and pins.zero is not None and pins.zero < 3:
        without = replace(pins, zero=None, zero1_by=None)
        yield _Change(pinned, without, lambda found: f"zero={found.zero} with {_mesh_text(found.mesh)}")
    if train and not pins.zero and pinned.get("dp_replicate", 1) > 1 and "dp_shard" not in pinned:
        others = {axis: degree for axis, degree in pinned.items() if axis != "dp_replicate"}
        sharded = others | {"dp_shard": pinned["dp_replicate"]}
        yield _Change(
            sharded,
            replace(pins, zero=None),
            lambda found: f"dp_shard={found.mesh.dp_shard} instead of dp_replicate={pinned['dp_replicate']}",
        )
    for axis, degree in pinned.items():
        others = {other: value for other, value in pinned.items() if other != axis}
        yield _Change(
            others,
            pins,
            lambda found, axis=axis, degree=degree: f"{_mesh_text(found.mesh)} instead of {axis}={degree}",  # type: ignore[misc]
        )


def _all_given_up(program: Program, pins: PlanConstraints) -> _Change:
    free = replace(
        pins, recompute=AUTO if program.mode == "train" else "none", microbatch_size=None, schedule=None, zero=None,
        zero1_by=None, reshard=None, prefetch=None, prefetch_distance=None,
    )  # fmt: skip
    return _Change({}, free, lambda found: f"nothing pinned, such as {_mesh_text(found.mesh)}")


def _other_hardware(cluster: Cluster, pinned: Mapping[str, int], pins: PlanConstraints, fits: Fits) -> Iterator[Remedy]:
    larger = [cluster.grown(times) for times in GROWTH]
    device = cluster.device
    others = sorted(
        (
            each for each in DEVICES.values()
            if each.kind == device.kind and each.memory_bytes > device.memory_bytes and each.peak("bf16") >= device.peak("bf16")
        ),
        key=lambda each: (each.memory_bytes, each.peak("bf16")),
    )  # fmt: skip
    with_more = [Cluster.of(each, cluster.nodes, cluster.devices_per_node) for each in others]
    for kind in (larger, with_more):
        for each in kind:
            priced = fits(each, pinned, replace(pins, cluster=each))
            if priced is not None:
                yield Remedy(f"{each} with {_mesh_text(priced.candidate.mesh)}", priced)
                break


def _mesh_text(mesh: Mesh) -> str:
    return ", ".join(f"{axis}={degree}" for axis, degree in mesh.degrees().items() if degree > 1) or "one device"
