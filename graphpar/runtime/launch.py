"""Starting torchrun as a child with a bounded life, and finding out why it failed.

    torchrun("out/train.py", ["--steps", "3"], nproc=2, timeout_s=300) -> LaunchResult, or LaunchError with the
    message of the rank that failed first
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphpar.runtime.errors import LaunchError

STOP_S = 5.0
"""How long torchrun may take to end its ranks before they are killed."""

TAIL_LINES = 40

SIGNALLED = re.compile(r"rank +: (\d+) .*\n +exitcode +: -(\d+)")
"""How torchrun reports a rank that left no error file because a signal ended it."""


@dataclass(frozen=True)
class LaunchResult:
    """What a launch that succeeded printed (all ranks together), and how long it took."""

    stdout: str
    stderr: str
    seconds: float


@dataclass(frozen=True)
class _Failure:
    """One rank's error file."""

    rank: int
    message: str
    trace: str
    time_ns: int
    secondary: bool
    user: bool


def torchrun(
    target: str | Path,
    args: Sequence[str] = (),
    *,
    nproc: int,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    module: bool = False,
) -> LaunchResult:
    """Run ``target`` (a script, or a module with ``module=True``) on ``nproc`` local ranks.

    Args:
        env: added to this process's environment. ``OMP_NUM_THREADS`` is 1 unless it is set.

    Raises:
        LaunchError: a rank failed (with its own message), or ``timeout_s`` passed. No process is left.
    """
    with tempfile.TemporaryDirectory(prefix="graphpar_launch_") as scratch:
        logs = Path(scratch)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
        command += [f"--log-dir={logs / 'ranks'}", *(["--module"] if module else []), str(target), *args]
        variables = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, **(env or {})}
        started = time.monotonic()
        with (logs / "stdout").open("wb") as out, (logs / "stderr").open("wb") as err:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=variables, start_new_session=True
            )
            in_time = _wait(process, timeout_s)
        seconds = time.monotonic() - started
        stdout, stderr = ((logs / name).read_text(encoding="utf-8", errors="replace") for name in ("stdout", "stderr"))
        if process.returncode == 0 and in_time:
            return LaunchResult(stdout, stderr, seconds)
        raise _error(_failures(logs / "ranks"), in_time, timeout_s, process.returncode, stderr)


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait for the launcher; when the time is up, or we are interrupted, end it and everything it started."""
    try:
        process.wait(timeout_s)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """torchrun starts each rank in a session of its own, so ending its process group is not enough."""
    family = _descendants(process.pid)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    for pid in [*family, *_descendants(process.pid)]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait()


def _descendants(root: int) -> list[int]:
    """The ids of all processes below ``root``, as ``ps`` lists them."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False).stdout
    children: dict[int, list[int]] = {}
    for line in listed.splitlines():
        pid, parent = (int(field) for field in line.split())
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _failures(folder: Path) -> list[_Failure]:
    """The error files of all ranks: first causes before consequences, early before late."""
    found: list[_Failure] = []
    for path in folder.rglob("error.json"):
        try:
            message = json.loads(path.read_text())["message"]
            extra = message["extraInfo"]
            found.append(
                _Failure(
                    rank=int(extra.get("rank", path.parent.name)),
                    message=message["message"],
                    trace=extra.get("py_callstack", ""),
                    time_ns=int(extra.get("time_ns", int(extra["timestamp"]) * 10**9)),
                    secondary=extra.get("secondary") == "True",
                    user=extra.get("user") == "True",
                )
            )
        except (ValueError, KeyError, TypeError):
            continue
    return sorted(found, key=lambda failure: (failure.secondary, failure.time_ns))


def _error(failures: list[_Failure], in_time: bool, timeout_s: float, returncode: int, stderr: str) -> LaunchError:
    if failures and (in_time or not failures[0].secondary):
        first = failures[0]
        return LaunchError(first.message, first.rank, first.trace, first.user)
    tail = "\n".join(stderr.splitlines()[-TAIL_LINES:])
    killed = SIGNALLED.search(stderr.partition("Root Cause")[2])
    if in_time and killed is not None:
        rank, number = int(killed[1]), int(killed[2])
        hint = " (often: too little memory)" if number == signal.SIGKILL else ""
        return LaunchError(f"ended by {signal.Signals(number).name}{hint}", rank, tail)
    if not in_time:
        return LaunchError(f"the launch did not finish within {timeout_s:g} s and was ended", details=tail)
    return LaunchError(f"the launch failed with exit status {returncode}", details=tail)
