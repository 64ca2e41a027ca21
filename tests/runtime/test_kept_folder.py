"""A temporary folder goes away with its object, and with its process however that ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from graphpar.runtime.launching.launch import KeptFolder

CODE = """
import os, signal, sys
from graphpar.runtime.launching.launch import KeptFolder
folder = KeptFolder("graphpar-test-")
print(folder.name, flush=True)
os.kill(os.getpid(), int(sys.argv[1]))
"""


def test_it_goes_with_its_object() -> None:
    folder = KeptFolder("graphpar-test-")
    path = Path(folder.name)
    (path / "file").write_text("a")
    del folder
    assert not path.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_goes_with_its_process(number: int) -> None:
    ran = subprocess.run([sys.executable, "-c", CODE, str(number)], capture_output=True, text=True, timeout=120)
    path = Path(ran.stdout.strip())
    assert path.name.startswith("graphpar-test-"), ran
    deadline = time.monotonic() + 30
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not path.exists()
