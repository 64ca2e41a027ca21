"""graphpar: from an ordinary ``nn.Module`` and a number of devices to a parallel program.

The public names are loaded on first use, so that ``import graphpar.runtime`` (what an emitted
program needs) does not import the compiler, and ``graphpar --help`` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "Cluster": "graphpar.hardware.cluster",
    "GraphparError": "graphpar.errors",
    "Mesh": "graphpar.runtime.mesh",
    "PASSES": "graphpar.passes.table",
    "Parts": "graphpar.parts",
    "Pass": "graphpar.passes.table",
    "Plan": "graphpar.api",
    "Program": "graphpar.api",
    "Recorded": "graphpar.verification.recorded",
    "SplitPoint": "graphpar.ir.split_points",
    "check": "graphpar.api",
    "estimate": "graphpar.api",
    "export": "graphpar.api",
    "lora": "graphpar.annotations.lora",
    "merge_plans": "graphpar.annotations.files",
    "partition": "graphpar.api",
    "plan": "graphpar.api",
    "register_rule": "graphpar.operators.rules",
    "verify": "graphpar.api",
    "what_if": "graphpar.api",
}

if TYPE_CHECKING:
    from graphpar.annotations.files import merge_plans
    from graphpar.annotations.lora import lora
    from graphpar.api import check, estimate, export, partition, plan, verify, what_if
    from graphpar.errors import GraphparError
    from graphpar.hardware.cluster import Cluster
    from graphpar.ir.plan import Plan
    from graphpar.ir.program import Program
    from graphpar.ir.split_points import SplitPoint
    from graphpar.operators.rules import register_rule
    from graphpar.parts import Parts
    from graphpar.passes.table import PASSES, Pass
    from graphpar.runtime.mesh import Mesh
    from graphpar.verification.recorded import Recorded

__all__ = [
    "PASSES",
    "Cluster",
    "GraphparError",
    "Mesh",
    "Parts",
    "Pass",
    "Plan",
    "Program",
    "Recorded",
    "SplitPoint",
    "__version__",
    "check",
    "estimate",
    "export",
    "lora",
    "merge_plans",
    "partition",
    "plan",
    "register_rule",
    "verify",
    "what_if",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'graphpar' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
