"""What an emitted program needs at run time. It imports torch, safetensors and nothing else of graphpar."""

from __future__ import annotations

from graphpar.runtime.checkpoint import Checkpoint
from graphpar.runtime.data import TokenDataset, load, pad
from graphpar.runtime.distributed import Ranks, StopSignal, start
from graphpar.runtime.errors import AgreedError, LaunchError, RuntimeProgramError
from graphpar.runtime.manifest import Manifest, load_manifest
from graphpar.runtime.pipeline import Pipeline
from graphpar.runtime.random_streams import sample_keys

__all__ = [
    "AgreedError",
    "Checkpoint",
    "LaunchError",
    "Manifest",
    "Pipeline",
    "Ranks",
    "RuntimeProgramError",
    "StopSignal",
    "TokenDataset",
    "load",
    "load_manifest",
    "pad",
    "sample_keys",
    "start",
]
