"""An emitted folder with all of graphpar's functions, also those that it does not call: for texts that are changed to call others."""

from __future__ import annotations

from pathlib import Path

from graphpar import emitted


def with_whole_modules(folder: Path) -> Path:
    """Write each copied module of ``folder`` whole."""
    for source in Path(str(emitted.__file__)).parent.glob("*.py"):
        copy = folder / source.name
        if copy.is_file() and source.stem != "__init__":
            copy.write_text(source.read_text().replace("from graphpar.emitted.", "from ."))
    return folder
