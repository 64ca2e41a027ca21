"""What an emitted program needs at run time. It imports torch, safetensors and nothing else of graphpar.

The names are loaded on first use: the compiler takes axes and types from here, and needs neither pipelines nor checkpoints.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphpar.runtime.arguments import count, generate_arguments, infer_arguments, train_arguments
    from graphpar.runtime.check import check_first_step
    from graphpar.runtime.checkpoint import Checkpoint
    from graphpar.runtime.data import TokenDataset, first_batches, load, pad
    from graphpar.runtime.distributed import Ranks, StopSignal, start
    from graphpar.runtime.errors import AgreedError, LaunchError, RuntimeProgramError
    from graphpar.runtime.log import Log
    from graphpar.runtime.manifest import Manifest, load_manifest
    from graphpar.runtime.pipeline import Pipeline
    from graphpar.runtime.random_streams import sample_keys
    from graphpar.runtime.texts import text_file
    from graphpar.runtime.training import RandomExamples, Training, batches

_MODULES = {
    "AgreedError": "errors",
    "Checkpoint": "checkpoint",
    "LaunchError": "errors",
    "Log": "log",
    "Manifest": "manifest",
    "Pipeline": "pipeline",
    "RandomExamples": "training",
    "Ranks": "distributed",
    "RuntimeProgramError": "errors",
    "StopSignal": "distributed",
    "TokenDataset": "data",
    "Training": "training",
    "batches": "training",
    "check_first_step": "check",
    "count": "arguments",
    "first_batches": "data",
    "generate_arguments": "arguments",
    "infer_arguments": "arguments",
    "load": "data",
    "load_manifest": "manifest",
    "pad": "data",
    "sample_keys": "random_streams",
    "start": "distributed",
    "text_file": "texts",
    "train_arguments": "arguments",
}

__all__ = [
    "AgreedError",
    "Checkpoint",
    "LaunchError",
    "Log",
    "Manifest",
    "Pipeline",
    "RandomExamples",
    "Ranks",
    "RuntimeProgramError",
    "StopSignal",
    "TokenDataset",
    "Training",
    "batches",
    "check_first_step",
    "count",
    "first_batches",
    "generate_arguments",
    "infer_arguments",
    "load",
    "load_manifest",
    "pad",
    "sample_keys",
    "start",
    "text_file",
    "train_arguments",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'graphpar.runtime' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"graphpar.runtime.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
