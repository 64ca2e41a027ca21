"""Units whose blocks keep in the memory of the host what they keep between forward and backward.

    kept by a block ──► moved; on the device that of two blocks at one time: the one that runs, and the one before it, which is leaving
                        in the forward and coming in the backward (graphpar.runtime.stages.offloaded_activations)

What a stage keeps outside of blocks stays on the device, and so does all that a unit keeps in which something runs besides blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphpar.cost_models.node_sizes import has_tensors
from graphpar.cost_models.pipeline_units import Bytes, Unit, UnitClass, UnitMemory
from graphpar.errors import GraphparError
from graphpar.hardware.devices import Device
from graphpar.operators.table import record_of

HOST_BYTES_PER_S = 40e9
"""A rank's share of the bandwidth of its host's memory, for an update on the host (assumed): 80 % of an eighth of two sockets with eight
channels of DDR4-3200 each, as a DGX A100 has for eight GPUs."""


def host_s(device: Device, nbytes: float) -> float:
    """Return the seconds of copying ``nbytes`` between ``device`` and its host, one way.

    Raises:
        GraphparError: the link between them is not known.
    """
    link = device.host_link
    if link is None:
        raise GraphparError(
            f"offload copies between {device.name} and its host, and the rate is not known; give the device a host_link with latency_s "
            "and bytes_per_s, or leave offload out."
        )
    return link.latency_s + nbytes / (link.bytes_per_s * link.efficiency) if nbytes else 0.0


def offloaded(units: Sequence[Unit]) -> list[Unit]:
    """Return ``units`` with what their blocks keep moved; equal ones stay equal."""
    kinds: dict[UnitClass, UnitClass] = {}
    return [_offloaded(unit, kinds) if _is_of_blocks(unit) else unit for unit in units]


def _offloaded(unit: Unit, kinds: dict[UnitClass, UnitClass]) -> Unit:
    kind = unit.kind
    if kind not in kinds:
        kinds[kind] = UnitClass(kind.work, kind.sends, lambda: _moved(kind.memory), kind.again, moves=True)
    return replace(unit, kind=kinds[kind])


def _moved(memory: UnitMemory) -> UnitMemory:
    kept = memory.inside + memory.given
    return replace(
        memory,
        inside=Bytes(),
        given=Bytes(),
        held=False,
        forward=memory.forward + kept + kept,
        backward=memory.backward + kept + kept,
        splits=False,
        moved=kept,
    )


def _is_of_blocks(unit: Unit) -> bool:
    """Whether blocks are all that runs in a unit, but for views and what every stage computes again."""
    nodes = [node for node in unit.stage.graph.nodes if node.name not in unit.stage.recomputed]
    others = [node for node in nodes if node.op == "call_function" and has_tensors(node) and not record_of(node).free]
    return not others and any(node.op == "call_module" for node in nodes)
