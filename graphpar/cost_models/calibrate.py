"""``calibrate``: measure a profile of this machine, which can be used wherever a cluster can.

    calibrate("cpu", 2) ──torchrun──► rows of times (measure) ──fit──► Cluster, errors ──► PROFILE.json ──Cluster.parse──► Cluster

A profile holds the figures as :meth:`~graphpar.hardware.cluster.Cluster.to_json` writes them, the measured times, and the errors of the
fit. Ranks on a CPU have the threads that the runtime gives them (``OMP_NUM_THREADS``, or one).
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import graphpar
from graphpar.cost_models.contention import OTHERS
from graphpar.cost_models.fit_device import COLLECTIVES, Error, fit_actions, fit_device, fit_link, kind_of
from graphpar.cost_models.measure import Request, Row
from graphpar.errors import GraphparError
from graphpar.hardware.cluster import Cluster
from graphpar.hardware.devices import DEVICES, Device, Link, device_named, usable
from graphpar.hardware.this_machine import cores, cpu, processor_name, threads
from graphpar.runtime.launching.launch import torchrun

TIMEOUT_S = 1800.0
MOST_PROCESSES = 64
PATIENCE_S = 60.0
MOST_DISTURBED = 0.1
"""The largest share of measurements during which others may have used the machine."""
MOST_OFF, MOST_USUALLY_OFF = 20.0, 1.5
"""The largest plausible errors of one fitted time, and in the median of a kind; undisturbed machines have up to 4.4 and 0.6."""
_UNKNOWN_LINK = Link(5e-6, 31e9)  # PCIe 4 x16, for a single device


@dataclass(frozen=True)
class Profile:
    """A measured machine, as a cluster.

    Attributes:
        machine: names and versions, for people.
        rows: the measured times.
        errors: of the fit, by kind of row.
        disturbed: the share of measurements during which other processes used more than ``OTHERS`` of the cores.
    """

    cluster: Cluster
    machine: Mapping[str, Any]
    rows: tuple[Row, ...]
    errors: Mapping[str, Error]
    disturbed: float = 0.0

    @property
    def doubts(self) -> list[str]:
        """Why this profile should not be used, by its own measurements; empty where nothing speaks against it."""
        found = []
        if self.disturbed > MOST_DISTURBED:
            when = f"during {self.disturbed:.0%} of the measurements"
            found.append(f"others used more than {OTHERS:.0%} of the cores {when}; {MOST_DISTURBED:.0%} may be")
        for kind, error in self.errors.items():
            if error.worst > MOST_OFF:
                found.append(
                    f"the fit of {kind} is off by {error.worst:,.0%} for {error.worst_row}; {MOST_OFF:,.0%} may be"
                )
            if error.median > MOST_USUALLY_OFF:
                found.append(
                    f"the fit of {kind} is off by {error.median:,.0%} in the median; {MOST_USUALLY_OFF:.0%} may be"
                )
        return found

    def to_json(self) -> dict[str, Any]:
        """Return plain data, which :meth:`Cluster.parse` reads from a file."""
        figures = self.cluster.to_json()
        del figures["inter_node"]  # not measured: there is one node
        return {
            "graphpar": graphpar.__version__,
            "machine": dict(self.machine),
            "disturbed": self.disturbed,
            **figures,
            "error": {kind: asdict(error) for kind, error in self.errors.items()},
            "measured": [asdict(row) for row in self.rows],
        }


def calibrate(
    kind: str = "cpu",
    processes: int | None = None,
    *,
    quick: bool = False,
    patience_s: float = PATIENCE_S,
    gives_up: bool = False,
) -> Profile:
    """Measure this machine.

    Args:
        kind: ``cpu`` or ``cuda``.
        processes: ranks that exchange data; by default as many as there are GPUs, or cores for their threads.
        quick: few shapes: seconds instead of a minute, less accurate.
        patience_s: seconds to wait, in all, while others use the machine.
        gives_up: then measure no more.

    Raises:
        GraphparError: there is no such device here, or not as many; or others use the machine.
    """
    most = _places(kind)
    count = processes if processes is not None else min(most, MOST_PROCESSES)
    if count < 1 or count > (most if kind == "cuda" else MOST_PROCESSES):
        limit = f"{most} GPUs are here" if kind == "cuda" else f"at most {MOST_PROCESSES} are measured"
        raise GraphparError(f"processes is {count}; it must be at least 1, and {limit}.")
    at_once = tuple(sorted({1, min(count, most)}))
    rows, disturbed = _measured(Request(at_once, 0.01 if quick else 0.08, quick, patience_s, gives_up), kind, count)
    return profile_of(rows, _blank(kind, count, most), count, machine(kind), disturbed)


def profile_of(
    rows: list[Row], start: Device, processes: int, described: Mapping[str, Any], disturbed: float = 0.0
) -> Profile:
    """Fit a profile to ``rows``, those with the most ranks at once.

    Args:
        start: see :func:`graphpar.cost_models.fit_device.fit_device`.
        processes: devices of the cluster.
    """
    sent = [row for row in rows if row.what in (*COLLECTIVES, "transfer")]
    pipeline = {row.what: row for row in rows if kind_of(row) == "pipeline"}
    computed = [row for row in rows if row not in sent and row.what not in pipeline]
    most = max(row.processes for row in computed)
    device, errors = fit_device(start, [row for row in computed if row.processes == most], _known(start))
    link = start.intra_node
    if sent:
        link, of_link = fit_link(device, sent)
        errors |= of_link
    device = replace(device, intra_node=link, inter_node=link)
    if pipeline:
        device = replace(device, action_s=fit_actions(device, link, pipeline))
    return Profile(Cluster(1, processes, device, link, link), described, tuple(rows), errors, disturbed)


def machine(kind: str) -> dict[str, Any]:
    """Describe this machine: its name, cores, threads a rank, and torch's version."""
    return cpu() if kind == "cpu" else cpu() | {"name": torch.cuda.get_device_name(), "threads": None}


def _measured(request: Request, kind: str, processes: int) -> tuple[list[Row], float]:
    """Return the rows, and the share of measurements that others disturbed."""
    with tempfile.TemporaryDirectory(prefix="graphpar_calibrate_") as scratch:
        folder = Path(scratch)
        (folder / "request.json").write_text(json.dumps(asdict(request)), encoding="utf-8")
        env = {"CUDA_VISIBLE_DEVICES": ""} if kind == "cpu" else {}
        torchrun(
            "graphpar.cost_models.measure", [scratch], nproc=processes, timeout_s=TIMEOUT_S + request.patience_s, env=env, module=True,
            folders=[scratch],
        )  # fmt: skip
        found = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
    if not found["rows"]:
        raise GraphparError(f"others use more than {OTHERS:.0%} of the cores")
    return [Row(**{**row, "shape": tuple(row["shape"])}) for row in found["rows"]], found["disturbed"]


# ---- this machine ----------------------------------------------------------------------------------------------


def _places(kind: str) -> int:
    """Return how many ranks can compute at once, each with its own cores or GPU."""
    if kind == "cpu":
        return max(1, cores() // threads())
    if kind != "cuda":
        raise GraphparError(f"device is {kind!r}; it must be cpu or cuda.")
    if not torch.cuda.is_available():
        raise GraphparError("device is cuda, but torch finds no GPU here; use --device cpu.")
    return torch.cuda.device_count()


def _known(device: Device) -> Device | None:
    """Return this GPU's row of the device table; suffixes that a driver adds to the name are dropped."""
    if device.kind == "cpu":
        return None
    try:
        return device_named(re.sub(r"\s+HBM\w*$", "", device.name))
    except GraphparError:
        return None


def _blank(kind: str, processes: int, places: int) -> Device:
    """Return this machine's device before anything is measured: name, memory, and how many there are."""
    usual = DEVICES["CPU"]
    if kind == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // processes
        return replace(usual, name=f"CPU {processor_name()}", memory_bytes=memory, cores=places, sources={})
    properties = torch.cuda.get_device_properties(0)
    return replace(
        usual,
        name=torch.cuda.get_device_name(),
        kind="cuda",
        memory_bytes=usable(properties.total_memory, 1),
        intra_node=_UNKNOWN_LINK,
        inter_node=_UNKNOWN_LINK,
        devices_per_node=places,
        compute_units=properties.multi_processor_count,
        sources={},
    )
