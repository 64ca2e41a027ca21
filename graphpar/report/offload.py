"""What lives in the memory of the host, as the report says it: its bytes on a rank, and where that is more than the host has.

plan, predicted ──► Offload   optimizer and activations live in the host's memory: 31.2 GiB a rank at most (optimizer 14.0 GiB, ...)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphpar.text import bytes_text

NOTHING = "nothing: the device is a CPU, whose memory is the host's"


def offload_text(data: Mapping[str, Any]) -> str:
    """Say what lives there, and with a prediction how much on the rank that has most."""
    what, predicted = " and ".join(data["offload"]), data.get("predicted")
    if predicted and predicted["device"].startswith("CPU"):
        return f"{what}: {NOTHING}"
    if not predicted or not predicted.get("host_memory"):
        return f"{what} live in the host's memory, where the device is no CPU"
    most = max(predicted["host_memory"], key=lambda each: sum(each.values()))
    parts = ", ".join(f"{name} {bytes_text(nbytes)}" for name, nbytes in most.items() if nbytes)
    room = predicted.get("host_memory_bytes")
    of = f" of {bytes_text(room)}" if room is not None else ""
    verb = "live" if len(data["offload"]) > 1 or "activations" in data["offload"] else "lives"
    return f"{what} {verb} in the host's memory: at most {bytes_text(sum(most.values()))} a rank{of} ({parts})"


def host_misfit(missing: int, room: int | None, cluster: str) -> list[str]:
    """Return a warning where what is offloaded is ``missing`` bytes more than a device's share of its host's memory."""
    if missing <= 0 or room is None:
        return []
    return [
        f"What this plan offloads does not fit in the hosts of {cluster}: a rank has {bytes_text(room)} there, {bytes_text(missing)} too "
        "little; offload less, or take more nodes."
    ]
