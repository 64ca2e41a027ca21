"""Write safetensors files, and say what a disk says that takes none."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: Mapping[str, Tensor], path: str | Path, metadata: dict[str, str] | None = None) -> None:
    """Write ``tensors`` to ``path``. Where that fails, no part of the file stays.

    Raises:
        OSError: the system's own, which safetensors tells in words alone.
    """
    new = not os.path.lexists(path)
    try:
        save_file(dict(tensors), str(path), metadata=metadata)
    except SafetensorError as error:
        if new:
            Path(path).unlink(missing_ok=True)
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
