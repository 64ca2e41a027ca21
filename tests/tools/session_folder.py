"""A folder that the processes of one test session share: the sockets of nurseries, and captures of the examples."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "GRAPHPAR_TEST_SESSION"


def session_folder() -> Path | None:
    """Return the folder; None outside of a session."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None


@contextlib.contextmanager
def new_session_folder() -> Iterator[Path]:
    """Make one for the length of the block."""
    with tempfile.TemporaryDirectory(prefix="graphpar-tests-") as name:
        folder = Path(name)
        (folder / "owner").write_text(str(os.getpid()))
        yield folder


def goes_on(folder: Path) -> bool:
    """Whether the session does: the folder is there, and the process that made it."""
    try:
        os.kill(int((folder / "owner").read_text()), 0)
    except OSError:
        return False
    return True
