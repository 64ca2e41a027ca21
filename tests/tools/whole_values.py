"""The values of a checkpoint, in one process."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from graphpar.runtime.checkpoints.conversion import model_in


def whole_values(folder: Path) -> dict[str, Tensor]:
    """Read all whole parameters and buffers."""
    return {name: tensor.read() for name, tensor in model_in(folder).items()}
