"""Runs a command and leaves no process of it behind, however the process that asked for it ends.

    parent ──pipe──► supervisor ──► torchrun ──► ranks          python process_supervisor.py FOLDER ... -- COMMAND ...

    the command ends            what is left below it is killed, and the supervisor exits as the command did
    SIGTERM                     the command is ended first
    the pipe closes             the parent has ended, by any signal: the command is ended, and the folders are removed

Without a command it waits for the pipe to close, and removes the folders.

A script that imports nothing of the package, so that it starts in milliseconds and needs little memory where memory is short.
On Linux processes whose parents have died become the supervisor's, so it finds them, and the command ends with the supervisor.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

STOP_S = 3.0
"""How long the command may take to end before it and all below it are killed."""
KILLED_S = 5.0
"""How long to wait until what was killed has gone."""
PEEK_S = 0.05

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class _Stop:
    """A signal handler that notes whether this process was asked to end."""

    requested = False

    def __call__(self, *_: object) -> None:
        self.requested = True


def main(arguments: Sequence[str]) -> int:
    """Run ``FOLDER ... -- COMMAND ...`` as the supervisor; returns the command's exit status."""
    split = arguments.index("--")
    folders, command = arguments[:split], arguments[split + 1 :]
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    if not command:
        while os.read(0, 1):
            pass
        _remove(folders)
        return 0
    stop = _Stop()
    signal.signal(signal.SIGTERM, stop)
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def in_child() -> None:
        for inherited in (signal.SIGINT, signal.SIGHUP):
            signal.signal(inherited, signal.SIG_DFL)
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=in_child)
    orphaned = _watch(process, stop)
    _end(process)
    if orphaned:
        _remove(folders)
    code = process.returncode
    return 128 - code if code < 0 else code


def _remove(folders: Sequence[str]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _watch(process: subprocess.Popen[bytes], stop: _Stop) -> bool:
    """Wait until the command has ended or is to end; return whether that is because the parent has ended."""
    while process.poll() is None and not stop.requested:
        ready, _, _ = select.select([0], [], [], PEEK_S)
        if ready and not os.read(0, 1):
            return True
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the command by SIGTERM, then kill every process still below this one (or once below it, where orphans are not
    adopted)."""
    family = set() if sys.platform == "linux" else set(descendants(os.getpid()))
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    deadline = time.monotonic() + KILLED_S
    while time.monotonic() < deadline:
        left = {pid for pid in {*family, *descendants(os.getpid())} if _alive(pid)}
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        if not left:
            break
        _reap(process)
        time.sleep(PEEK_S / 5)
    process.wait(KILLED_S)


def _alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, 0)
        return True
    return False


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Collect adopted processes that have ended; the command's own status is for ``process``."""
    if process.returncode is None:
        return
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def descendants(root: int) -> list[int]:
    """List the ids of all processes below ``root``."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _parents() -> list[tuple[int, int]]:
    """Every process with its parent: from the kernel, or as ``ps`` lists them."""
    if not Path("/proc/self/stat").is_file():
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False).stdout
        return [(int(pid), int(parent)) for pid, parent in (line.split() for line in listed.splitlines())]
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found.append((int(file.parent.name), int(file.read_text(encoding="utf-8").rpartition(")")[2].split()[1])))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
