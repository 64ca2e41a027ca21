"""graphpar: from an ordinary ``nn.Module`` and a number of devices to a parallel program.

The public names are loaded on first use, so that ``import graphpar.runtime`` (what an emitted
program needs) does not import the compiler, and ``graphpar --help`` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "Cluster": "graphpar.cluster",
    "GraphparError": "graphpar.errors",
    "Mesh": "graphpar.mesh",
    "Parts": "graphpar.api",
    "Plan": "graphpar.plans",
    "Program": "graphpar.program",
    "SplitPoint": "graphpar.plans",
    "check": "graphpar.api",
    "estimate": "graphpar.api",
    "export": "graphpar.api",
    "merge_plans": "graphpar.shard_plans",
    "partition": "graphpar.api",
    "plan": "graphpar.api",
    "register_rule": "graphpar.rules.table",
    "verify": "graphpar.api",
}

if TYPE_CHECKING:
    from graphpar.api import Parts, check, estimate, export, partition, plan, verify
    from graphpar.cluster import Cluster
    from graphpar.errors import GraphparError
    from graphpar.mesh import Mesh
    from graphpar.plans import Plan, SplitPoint
    from graphpar.program import Program
    from graphpar.rules.table import register_rule
    from graphpar.shard_plans import merge_plans

__all__ = [
    "Cluster",
    "GraphparError",
    "Mesh",
    "Parts",
    "Plan",
    "Program",
    "SplitPoint",
    "__version__",
    "check",
    "estimate",
    "export",
    "merge_plans",
    "partition",
    "plan",
    "register_rule",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'graphpar' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
