"""A temporary folder that goes away however the process that made it ends."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import weakref

from graphpar.runtime import process_supervisor


class KeptFolder:
    """A temporary folder, removed with this object, or by a supervisor if the process is killed before."""

    def __init__(self, prefix: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix=prefix)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", process_supervisor.__file__, self.name, "--"],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", start_new_session=True,
        )  # fmt: skip
        weakref.finalize(self, _close, process, self._folder)

    @property
    def name(self) -> str:
        """Its path."""
        return self._folder.name


def _close(process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
    folder.cleanup()
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    process.wait()
