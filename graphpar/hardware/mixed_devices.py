"""The best of several kinds of devices in every figure: what a search bounds a cluster of all of them by.

H100, A100 ──best_device──► a device that is nowhere slower, and has no less memory, than either
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from graphpar.errors import GraphparError
from graphpar.hardware.devices import DTYPES, HOST_S, Device, Link

_LEAST = ("half_reduction", "communicator_bytes", *HOST_S)
_MOST = ("memory_bytes", "memory_bytes_per_s", "matrix_efficiency", "memory_efficiency")
_MOST_OF_ALL = ("operand_bytes_per_s", "cores", "fresh_bytes_per_s")
"""Figures without which a device is at its best."""


def best_device(devices: Sequence[Device]) -> Device:
    """Return a device with the best figures of each; its products come in no waves.

    Raises:
        GraphparError: some are GPUs and some CPUs.
    """
    if len({each.kind for each in devices}) > 1:
        raise GraphparError("groups of GPUs and of CPUs run no program together.")
    if len(set(devices)) == 1:
        return devices[0]
    found: dict[str, Any] = {name: min(values(devices, name)) for name in _LEAST}
    found |= {name: max(values(devices, name)) for name in _MOST}
    found |= {name: _unless_none(max, values(devices, name)) for name in (*_MOST_OF_ALL, "devices_per_host")}
    hosts = [each.host_link for each in devices if each.host_link is not None]
    functions = [each.function_efficiency or each.memory_efficiency for each in devices]
    return Device(
        "+".join(dict.fromkeys(each.name for each in devices)),
        devices[0].kind,
        {dtype: max(each.peak(dtype) for each in devices) for dtype in DTYPES if all(_runs(d, dtype) for d in devices)},
        intra_node=best_link([each.intra_node for each in devices]),
        inter_node=best_link([each.inter_node for each in devices]),
        devices_per_node=devices[0].devices_per_node,
        host_link=best_link(hosts) if len(hosts) == len(devices) else None,
        attention_efficiency=tuple(map(max, zip(*(each.attention_efficiency for each in devices)))),  # type: ignore[arg-type]
        function_efficiency=max(functions),
        **found,
    )


def best_link(links: Sequence[Link]) -> Link:
    """Return a link with the best figures of each."""
    switches, sends = (
        [value for value in values(links, name) if value is not None] for name in ("in_switch", "send_latency_s")
    )
    return Link(
        min(values(links, "latency_s")),
        max(values(links, "bytes_per_s")),
        _unless_none(max, values(links, "pair_bytes_per_s")),
        max(values(links, "efficiency")),
        max(switches, default=None),
        min(sends, default=None),
    )


def values(records: Sequence[Device] | Sequence[Link], name: str) -> list[Any]:
    """Return a field of each record."""
    assert any(each.name == name for each in fields(records[0]))
    return [getattr(each, name) for each in records]


def _unless_none(best: Callable[[list[Any]], Any], given: list[Any]) -> Any:
    return None if None in given else best(given)


def _runs(device: Device, dtype: str) -> bool:
    try:
        return device.peak(dtype) > 0
    except GraphparError:
        return False
