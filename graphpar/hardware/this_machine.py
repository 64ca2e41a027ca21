"""This machine: its processor, and the profile of its CPU that is kept once it was measured.

    first compile without --cluster ──calibrate, few shapes──► ~/.cache/graphpar/cpu-….json ──► Cluster.of_this_machine

A profile is of one processor, number of cores, threads a rank, and version of torch. ``GRAPHPAR_CACHE`` names another folder; empty,
nothing is kept, and plans take the figures of the table's CPU.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

VARIABLE = "GRAPHPAR_CACHE"
"""The variable of the environment that names the folder of what is kept between commands."""


def cache_folder() -> Path | None:
    """Return the folder of what is kept between commands; None where nothing is to be kept."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    home = os.environ.get("XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):  # no home
        return (Path(home) if home else Path.home() / ".cache") / "graphpar"
    return None


def profile_path() -> Path | None:
    """Return where the profile of this machine's CPU is kept, whether it is there or not; None where nothing is kept."""
    folder = cache_folder()
    if folder is None or sys.platform != "linux":  # elsewhere nothing tells whether others use the cores
        return None
    described = hashlib.sha256(json.dumps(cpu()).encode()).hexdigest()[:16]
    return folder / f"cpu-{described}.json"


def cpu() -> dict[str, Any]:
    """Describe the CPU: its name, cores, threads a rank, and torch's version."""
    import torch

    return {"name": processor_name(), "cores": cores(), "threads": threads(), "torch": torch.__version__}


def cores() -> int:
    """Return on how many cores this process may run."""
    return len(os.sched_getaffinity(0))


def threads() -> int:
    """Return the threads of a rank, as :func:`graphpar.runtime.launching.launch.torchrun` starts it."""
    given = os.environ.get("OMP_NUM_THREADS", "1")
    return int(given) if given.isdecimal() and int(given) > 0 else 1


@functools.cache
def processor_name() -> str:
    """Return the CPU's name as its vendor writes it."""
    info = Path("/proc/cpuinfo")
    found = re.search(
        r"^model name\s*:\s*(.+)$", info.read_text(encoding="utf-8") if info.is_file() else "", re.MULTILINE
    )
    return found[1].strip() if found else platform.processor() or platform.machine()
