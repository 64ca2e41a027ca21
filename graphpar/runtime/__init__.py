"""What an emitted program needs at run time. It imports torch, safetensors and nothing else of graphpar.

The names are loaded on first use: the compiler takes axes and types from here, and needs neither pipelines nor checkpoints.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphpar.runtime.checkpoints.checkpoint import Checkpoint
    from graphpar.runtime.checkpoints.engine_layouts import EngineTensors
    from graphpar.runtime.checkpoints.weight_transfer import Peers
    from graphpar.runtime.distributed import Ranks, StopSignal, start
    from graphpar.runtime.errors import AgreedError, LaunchError, RuntimeProgramError
    from graphpar.runtime.generation.prompts import text_file
    from graphpar.runtime.launching.arguments import count, generate_arguments, infer_arguments, train_arguments
    from graphpar.runtime.manifest import Manifest, load_manifest
    from graphpar.runtime.pipeline import Pipeline
    from graphpar.runtime.stages.dropout import sample_keys
    from graphpar.runtime.training.data import TokenDataset, first_batches, load, pad
    from graphpar.runtime.training.log import Log
    from graphpar.runtime.training.loop import RandomExamples, Training, batches, check_first_step
    from graphpar.runtime.training.packing import PackedDataset

_MODULES = {
    "AgreedError": "errors",
    "Checkpoint": "checkpoints.checkpoint",
    "EngineTensors": "checkpoints.engine_layouts",
    "LaunchError": "errors",
    "Log": "training.log",
    "Manifest": "manifest",
    "PackedDataset": "training.packing",
    "Peers": "checkpoints.weight_transfer",
    "Pipeline": "pipeline",
    "RandomExamples": "training.loop",
    "Ranks": "distributed",
    "RuntimeProgramError": "errors",
    "StopSignal": "distributed",
    "TokenDataset": "training.data",
    "Training": "training.loop",
    "batches": "training.loop",
    "check_first_step": "training.loop",
    "count": "launching.arguments",
    "first_batches": "training.data",
    "generate_arguments": "launching.arguments",
    "infer_arguments": "launching.arguments",
    "load": "training.data",
    "load_manifest": "manifest",
    "pad": "training.data",
    "sample_keys": "stages.dropout",
    "start": "distributed",
    "text_file": "generation.prompts",
    "train_arguments": "launching.arguments",
}

__all__ = [
    "AgreedError",
    "Checkpoint",
    "EngineTensors",
    "LaunchError",
    "Log",
    "Manifest",
    "PackedDataset",
    "Peers",
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
