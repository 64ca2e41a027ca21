"""What an emitted program needs at run time. It imports torch, safetensors and nothing else of graphpar."""

from __future__ import annotations

from graphpar.runtime.arguments import count
from graphpar.runtime.check import check_first_step
from graphpar.runtime.checkpoint import Checkpoint
from graphpar.runtime.data import TokenDataset, first_batches, load, pad
from graphpar.runtime.distributed import Ranks, StopSignal, start
from graphpar.runtime.errors import AgreedError, LaunchError, RuntimeProgramError
from graphpar.runtime.log import Log
from graphpar.runtime.manifest import Manifest, load_manifest
from graphpar.runtime.pipeline import Pipeline
from graphpar.runtime.random_streams import sample_keys

__all__ = [
    "AgreedError",
    "Checkpoint",
    "LaunchError",
    "Log",
    "Manifest",
    "Pipeline",
    "Ranks",
    "RuntimeProgramError",
    "StopSignal",
    "TokenDataset",
    "check_first_step",
    "count",
    "first_batches",
    "load",
    "load_manifest",
    "pad",
    "sample_keys",
    "start",
]
