"""What a report says of collectives that run in pieces beside products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphpar.text import plural


def overlap_text(data: Mapping[str, Any]) -> str:
    """Say how many collectives run beside products, and whether that hides anything."""
    found = data["overlapped"]
    kinds = ("gathers", "gather"), ("reduce_scatters", "reduce-scatter")
    pairs = " and ".join(plural(found[key], name) for key, name in kinds if found[key])
    beside = f"{pairs} of tp beside {plural(found['products'], 'product')}, in {data['mesh']['tp']} pieces each"
    cpu = str(data.get("assumed", {}).get("device", "")).startswith("CPU")
    others = ", ".join(name if count == 1 else f"{name} ({count})" for name, count in found.get("others", {}).items())
    beside += f"; waited for: what is gathered or summed of {others}" if others else ""
    return beside + ("; a CPU, whose cores send and multiply, hides nothing" if cpu else "")
