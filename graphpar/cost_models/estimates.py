"""The argument of a price, a :class:`Layout`, and its result, an :class:`Estimate`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from graphpar.cost_models.memory import HostMemory, Memory
from graphpar.cost_models.spread import together
from graphpar.cost_models.timelines import Conditions, StageEstimate, StepEnd
from graphpar.ir.program import ADAMW
from graphpar.runtime.option_kinds import Recompute
from graphpar.runtime.records import packed
from graphpar.schedules.order import Order
from graphpar.text import as_page, bytes_text, share_text, spread_text


@dataclass(frozen=True)
class Layout:
    """How units are run: stages, schedule, microbatches.

    ``starts``: the first unit of each stage. ``order``: the actions of a user's schedule table, instead of the name.
    """

    schedule: str
    microbatch_size: int
    microbatches: int
    starts: tuple[int, ...] = (0,)
    order: Order | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Alone:
    """A step of the same batch on one device, named in ``cluster``; where nothing fits, the plan nearest to fitting."""

    cluster: str
    step_time_s: float
    microbatch_size: int
    peak_memory_bytes: int
    memory_bytes: int
    recompute: Recompute = "none"

    def to_json(self) -> dict[str, Any]:
        """Return plain data, with whether it ``fits``."""
        return asdict(self) | {"fits": self.peak_memory_bytes <= self.memory_bytes}


@dataclass(frozen=True)
class BlockSeconds:
    """A microbatch in each of some equal modules, in seconds without exposed communication.

    ``modules``: their paths. Each is a unit by itself.
    """

    modules: tuple[str, ...]
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Estimate:
    """The time and memory of a step.

    Attributes:
        step_time_s: from the first forward to the end of the optimizer's step.
        mfu: model flops utilisation: flops of products and attention, without recomputation, over the devices' peak in that time.
        bubble_fraction: the share of ranks x pipeline time in which a rank computes nothing.
        memory: of each pp rank at its peak; ``reduced_bytes``: of its gradients when the optimizer's step begins.
        host_memory: of each pp rank in the memory of its host; empty where nothing is offloaded.
        host_memory_bytes: of the host of a device, its share of the node's; None: not known.
        compute_s: of the busiest rank.
        communication_s: of the busiest rank, by axis, hidden or not.
        exposed_s: the part of it that computation does not hide.
        parts_s: the step of the busiest rank, adding up to ``step_time_s``: ``compute``, ``host`` (its device waits for operators to be
            launched) or ``turns`` (ranks outnumber cores), exposed collectives by axis, ``pp`` (it waits for transfers), ``bubble``
            (it has nothing to do), then ``gradients`` and ``optimizer`` as below, until the last rank is done with them.
        pipeline_s, gradients_s, optimizer_s: until the last action; exposed reduction of gradients; optimizer with exposed gathers.
        blocks: the seconds of single modules.
        stages, conditions, closings: for simulating the step (:mod:`graphpar.cost_models.timelines`); closings are of each pp rank.
        cluster, device: the hardware it is for.
        memory_bytes: of a device.
        headroom_bytes: of these, what the plan should leave free.
        figures: the sources of the device's figures.
        spreads_s: by how many seconds each part of the step may be off (:mod:`graphpar.cost_models.spread`).
        exact: whether every microbatch was simulated, and not a few of them.
        devices, rooms: of each pp rank its device, and what it may take of that one's memory; empty where all have the same.
            ``memory_bytes`` and ``headroom_bytes`` are of the fullest one then.
        crossed: over how many ``nodes``, ``pods`` and so on the collectives of an axis are spread, of axes that leave a node.
    """

    step_time_s: float
    mfu: float
    bubble_fraction: float
    memory: tuple[Memory, ...]
    compute_s: float
    communication_s: Mapping[str, float]
    exposed_s: Mapping[str, float]
    parts_s: Mapping[str, float]
    pipeline_s: float
    gradients_s: float
    optimizer_s: float
    stages: tuple[StageEstimate, ...]
    conditions: Conditions
    closings: tuple[StepEnd, ...]
    cluster: str
    device: str
    memory_bytes: int
    figures: str
    headroom_bytes: int = 0
    host_memory: tuple[HostMemory, ...] = ()
    host_memory_bytes: int | None = None
    optimizer: str = ADAMW.name
    blocks: tuple[BlockSeconds, ...] = ()
    spreads_s: Mapping[str, float] = field(default_factory=dict)
    exact: bool = True
    crossed: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    rooms: tuple[int, ...] = ()
    reduced_bytes: tuple[int, ...] = ()

    @property
    def spread_s(self) -> float:
        """By how many seconds the step may be off, one standard deviation."""
        return together(self.spreads_s)

    @property
    def host_missing_bytes(self) -> int:
        """Bytes by which what is offloaded exceeds a device's share of its host's memory; not positive where it fits, or is not known."""
        if self.host_memory_bytes is None:
            return 0
        return max((each.total for each in self.host_memory), default=0) - self.host_memory_bytes

    @property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        """The peak of each pp rank, in bytes that the allocator reserves."""
        return tuple(memory.total for memory in self.memory)

    @property
    def allocated_memory_bytes(self) -> tuple[int, ...]:
        """The part of each peak that tensors take."""
        return tuple(memory.allocated for memory in self.memory)

    @property
    def exposed_communication_s(self) -> float:
        """All exposed communication of the busiest rank."""
        return math.fsum(self.exposed_s.values())

    @property
    def missing_bytes(self) -> int:
        """Bytes by which the fullest rank exceeds what it may take of the device's memory; not positive where all fit."""
        rank = self.fullest[0]
        return self.peak_memory_bytes[rank] - self.room_bytes

    @property
    def room_bytes(self) -> int:
        """What a rank may take of the device's memory."""
        return self.memory_bytes - self.headroom_bytes

    @property
    def room_text(self) -> str:
        """What a rank may take, and why that is not all."""
        free = f" ({share_text(self.headroom_bytes / self.memory_bytes)} of {bytes_text(self.memory_bytes)} stay free)"
        return f"{bytes_text(self.room_bytes)}{free if self.headroom_bytes else ''}"

    @property
    def fullest(self) -> tuple[int, tuple[int, ...]]:
        """The pp rank that has the least left at its peak, and its stages."""
        rooms = self.rooms or (0,) * len(self.memory)
        rank = max(range(len(self.memory)), key=lambda pp: self.memory[pp].total - rooms[pp])
        return rank, tuple(stage.index for stage in self.stages if stage.rank == rank)

    def __repr__(self) -> str:
        peak, room = self.peak_memory_bytes[self.fullest[0]], self.memory_bytes
        return (
            f"Estimate({spread_text(self.step_time_s, self.spread_s)} a step on {self.cluster}, MFU {share_text(self.mfu)}, "
            f"peak {bytes_text(peak)} of {bytes_text(room)})"
        )

    def _repr_html_(self) -> str:
        return as_page(self)

    def to_json(self) -> dict[str, Any]:
        """Return plain data; peaks and parts of memory are of each pp rank."""
        names = ("step_time_s", "spread_s", "mfu", "bubble_fraction", "compute_s", "communication_s", "exposed_communication_s",
                 "exposed_s", "parts_s", "pipeline_s", "gradients_s", "optimizer_s", "cluster", "device", "memory_bytes", "headroom_bytes",
                 "figures")  # fmt: skip
        data = {name: getattr(self, name) for name in names}
        return data | {
            "communication_s": dict(self.communication_s),
            "exposed_s": dict(self.exposed_s),
            "parts_s": dict(self.parts_s),
            "crossed": {axis: dict(parts) for axis, parts in self.crossed.items()},
            "peak_memory_bytes": list(self.peak_memory_bytes),
            "allocated_memory_bytes": list(self.allocated_memory_bytes),
            "memory": [asdict(memory) for memory in self.memory],
            "reduced_bytes": list(self.reduced_bytes),
            "host_memory": [asdict(memory) for memory in self.host_memory],
            "host_memory_bytes": self.host_memory_bytes,
            **({"devices": list(self.devices), "rooms": list(self.rooms)} if self.devices else {}),
            "conditions": asdict(self.conditions),
            "closings": [asdict(closing) for closing in self.closings],
            "blocks": [
                asdict(block) | {"modules": list(packed(dict.fromkeys(block.modules)))} for block in self.blocks
            ],
            "stages": [asdict(stage) | {"units": list(stage.units)} for stage in self.stages],
        }
