"""The user's modules: which of them another process can import by name, and which module an operator comes from."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import types
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._library.simple_registry import singleton

from graphpar.ir.program import is_of_torch


def importable(module: types.ModuleType) -> bool:
    """Whether a new process, started anywhere, can import this very module by its name."""
    top = module.__name__.split(".")[0]
    if module.__name__ == "__main__" or top == "__main__":
        return False
    if top == "torch" or top in sys.builtin_module_names:
        return True
    root = sys.modules.get(top)
    return root is not None and _found_elsewhere(top) == _place(root)


def _place(module: types.ModuleType) -> str:
    spec = module.__spec__
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    return str(Path((spec.origin if spec is not None else None) or (places[0] if places else "")).resolve())


@cache
def _found_elsewhere(name: str) -> str:
    """Where a new process, started elsewhere, finds the top-level module ``name``."""
    code = (
        "import importlib.util, pathlib, sys\n"
        f"spec = importlib.util.find_spec({name!r})\n"
        "places = list(spec.submodule_search_locations or []) if spec else []\n"
        "print(pathlib.Path(spec.origin or (places[0] if places else '')).resolve() if spec else '')"
    )
    found = subprocess.run([sys.executable, "-P", "-c", code], cwd="/", capture_output=True, text=True, timeout=60)
    return found.stdout.strip()


def resolved_name(module: types.ModuleType, node: ast.ImportFrom) -> str:
    """Return the full name of the module that an import statement in ``module`` refers to."""
    if not node.level:
        return node.module or ""
    return importlib.util.resolve_name("." * node.level + (node.module or ""), module.__package__ or "")


def attribute_of(module: types.ModuleType, qualname: str) -> Any:
    """Look up a dotted name in a module; None where there is nothing."""
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def is_builtin(operator: str) -> bool:
    """Whether an operator belongs to torch, or has no overload at all."""
    namespace, _, name = operator.partition("::")
    packet = getattr(getattr(torch.ops, namespace, None), name, None)
    overloads = packet.overloads() if packet is not None else []
    return not overloads or is_of_torch(getattr(packet, overloads[0]))


def module_of_kernel(name: str, target: Any) -> types.ModuleType | None:
    """Find the module that registered the fake kernel of an operator in Python; None where there is none."""
    entry = singleton.get(name) or (singleton.get(target._name) if target is not None else None)
    kernel = entry.fake_impl.kernel if entry is not None else None
    place = re.match(r"(.+):\d+$", kernel.source) if kernel is not None else None
    if place is None:
        return None
    path = Path(place[1]).resolve()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and Path(file).resolve() == path:
            return module
    return None
