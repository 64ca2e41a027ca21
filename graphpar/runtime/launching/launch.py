"""Start torchrun as a child that never outlives this process, pass on what it prints, and find out why it failed.

torchrun("out/train.py", ["--steps", "3"], nproc=2, timeout_s=300) -> LaunchResult, or LaunchError with the
message of the rank that failed first

this process ──pipe──► supervisor ──► torchrun ──► ranks      process_supervisor.py: whatever ends this process, nothing below it is left
                                                 └ stderr of each rank in a file: kept apart from what torchrun itself prints
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from graphpar.runtime.distributed import LAUNCHED
from graphpar.runtime.errors import LaunchError
from graphpar.runtime.launching import process_supervisor
from graphpar.runtime.launching.nccl_failures import named
from graphpar.runtime.rendezvous import DEVICE, on_gpus

ENDING_S = process_supervisor.STOP_S + 2 * process_supervisor.KILLED_S
"""How long the supervisor may take to end everything."""
PEEK_S = 0.2
"""Seconds between two readings of the ranks' files."""
TAIL_LINES = 40

ROOT_CAUSE = re.compile(r"rank +: (\d+) .*\n +exitcode +: (-?\d+)")
"""How torchrun reports the rank that failed first."""

WHY: dict[int, str] = {
    signal.SIGKILL: "Most often the system kills a process because memory runs out (`dmesg` says so then): run fewer processes on "
    "this machine, or plan for less memory with smaller microbatches, a smaller batch, or more devices.",
    signal.SIGBUS: "Most often /dev/shm is full, through which processes share memory: make it larger.",
}
"""Signals by which the system ends a process, the usual reason, and what to do."""
CRASHES = (signal.SIGSEGV, signal.SIGILL, signal.SIGFPE)
CRASH = "That is a crash in native code, such as an operator's, not an error of Python."
GAVE_UP = re.compile(r"^ *what\(\): *(.+)", re.MULTILINE)
"""What an exception of C++ says that nothing has caught: the process ends by SIGABRT."""

Lines = Callable[[str], None]


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
    lost: str  # what the backend said of a lost peer
    agreed: bool  # every rank has the same error, so that none need be named

    @property
    def error(self) -> LaunchError:
        """What the launch raises where this is the first cause."""
        return LaunchError(self.message, None if self.agreed else self.rank, self.trace, self.user)


def torchrun(
    target: str | Path,
    args: Sequence[str] = (),
    *,
    nproc: int,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    module: bool = False,
    folders: Sequence[str | Path] = (),
    on_stdout: Lines | None = None,
    on_stderr: Lines | None = None,
) -> LaunchResult:
    """Run ``target`` (a script, or a module with ``module=True``) on ``nproc`` local ranks.

    Args:
        env: added to this process's environment. ``OMP_NUM_THREADS`` is 1 unless it is set.
        folders: temporary folders of the caller, to be removed if this process is killed meanwhile.
        on_stdout, on_stderr: called with each line that a rank prints, as soon as it does.

    Raises:
        LaunchError: a rank failed (with its own message), or ``timeout_s`` passed. No process is left.
    """
    with tempfile.TemporaryDirectory(prefix="graphpar_launch_") as scratch:
        logs = Path(scratch)
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={nproc}", "--local-addr=localhost"]
        # Ranks meet in a file, so that torchrun listens nowhere; theirs is the store of graphpar.runtime.start().
        command += ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--rdzv-endpoint={logs / 'rendezvous'}"]
        command += [f"--rdzv-id={logs.name}", f"--log-dir={logs / 'ranks'}", "--redirects=2"]
        command += [*(["--module"] if module else []), str(target), *args]
        kept = [sys.executable, "-I", "-S", process_supervisor.__file__, scratch, *map(str, folders), "--", *command]
        usual = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", DEVICE: "cuda" if on_gpus(nproc) else "cpu"}
        variables = {**usual, **os.environ, LAUNCHED: "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **(env or {})}
        started = time.monotonic()
        printed = _Printed(logs / "ranks", on_stdout, on_stderr)
        with (logs / "stderr").open("wb") as err:
            process = subprocess.Popen(
                kept, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, env=variables, start_new_session=True
            )
            try:
                in_time = printed.follow(process, started + timeout_s)
            finally:
                _end(process)
        seconds = time.monotonic() - started
        own = (logs / "stderr").read_text(encoding="utf-8", errors="replace")
        if process.returncode == 0 and in_time:
            return LaunchResult(printed.stdout, printed.stderr + own, seconds)
        raise _error(_failures(logs / "ranks"), nproc, in_time, timeout_s, process.returncode, own, printed)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Have the supervisor end what it started, if it still runs: when the time is up, or this process is interrupted."""
    assert process.stdin is not None and process.stdout is not None
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(ENDING_S)
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


@dataclass
class _Printed:
    """What the ranks print: standard output from the launcher's pipe, standard error from a file of each rank."""

    folder: Path
    on_stdout: Lines | None
    on_stderr: Lines | None
    lines: list[str] = field(default_factory=list)
    _begun: bytes = b""  # of a line
    _read: dict[Path, int] = field(default_factory=dict)  # bytes of whole lines

    def follow(self, process: subprocess.Popen[bytes], deadline: float) -> bool:
        """Pass lines on until the launcher has ended; False where that is not before ``deadline``."""
        assert process.stdout is not None
        while (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([process.stdout], [], [], min(left, PEEK_S))
            chunk = os.read(process.stdout.fileno(), 1 << 16) if ready else None
            if chunk:
                self._take(chunk)
            self._look()
            if chunk == b"":
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
                    return True
        return False

    def _take(self, chunk: bytes) -> None:
        *lines, self._begun = (self._begun + chunk).split(b"\n")
        for line in lines:
            self.lines.append(line.decode(errors="replace"))
            if self.on_stdout is not None:
                self.on_stdout(self.lines[-1])

    def _look(self) -> None:
        """New whole lines of the ranks' files."""
        for path in sorted(self.folder.glob("*/attempt_*/*/stderr.log")):
            with path.open("rb") as file:
                file.seek(self._read.setdefault(path, 0))
                new = file.read()
            new = new[: new.rfind(b"\n") + 1]
            self._read[path] += len(new)
            if self.on_stderr is not None:
                for line in new.decode(errors="replace").splitlines():
                    self.on_stderr(f"[rank {path.parent.name}] {line}")

    @property
    def stdout(self) -> str:
        """All lines of standard output so far."""
        return "".join(f"{line}\n" for line in self.lines)

    @property
    def stderr(self) -> str:
        """Of all ranks; what several of them print alike is there once."""
        return "".join(dict.fromkeys(self.of(int(path.parent.name)) for path in self._read))

    def untold(self, lines: Sequence[str]) -> str:
        """Return the end of ``lines`` of standard error, as details of an error, unless they have been passed on."""
        return "" if self.on_stderr is not None else "\n".join(lines[-TAIL_LINES:])

    def of(self, rank: int) -> str:
        """Read the standard error of ``rank``."""
        files = self.folder.glob(f"*/attempt_*/{rank}/stderr.log")
        return "".join(path.read_text(encoding="utf-8", errors="replace") for path in files)


# ---- what went wrong -------------------------------------------------------------------------------------------


def _failures(folder: Path) -> list[_Failure]:
    """The error files of all ranks: first causes before consequences, early before late."""
    found: list[_Failure] = []
    for path in folder.rglob("error.json"):
        try:
            message = json.loads(path.read_text(encoding="utf-8"))["message"]
            extra = message["extraInfo"]
            found.append(
                _Failure(
                    rank=int(extra.get("rank", path.parent.name)),
                    message=message["message"],
                    trace=extra.get("frames", ""),
                    time_ns=int(extra.get("time_ns", int(extra["timestamp"]) * 10**9)),
                    secondary=extra.get("secondary") == "True",
                    user=extra.get("user") == "True",
                    lost=extra.get("lost", ""),
                    agreed=extra.get("agreed") == "True",
                )
            )
        except (ValueError, KeyError, TypeError):
            continue
    return sorted(found, key=lambda failure: (failure.secondary, failure.time_ns))


def _error(
    failures: list[_Failure], nproc: int, in_time: bool, timeout_s: float, returncode: int, own: str, printed: _Printed
) -> LaunchError:
    """The first cause that is known: a rank's own error, how a rank ended, a lost peer, the time, torchrun itself."""
    first = failures[0] if failures else None
    if first is not None and not first.secondary:
        return first.error
    ended = ROOT_CAUSE.search(own.partition("Root Cause")[2])
    if in_time and ended is not None and (first is None or first.rank != int(ended[1])):
        return _ended(int(ended[1]), int(ended[2]), printed, nproc)
    if in_time and first is not None:
        silent = sorted(set(range(nproc)) - {failure.rank for failure in failures})
        if silent:  # all that lost a peer have said so
            what = f"ended without an error while rank {first.rank} waits for it, left its loop early, or takes no part"
            return LaunchError(f"{what} ({first.lost})", silent[0])
        return first.error
    if not in_time:
        details = printed.untold(printed.stderr.splitlines())
        return LaunchError(f"the launch did not finish within {timeout_s:g} s and was ended", details=details)
    tail = "\n".join(own.splitlines()[-TAIL_LINES:])
    if returncode > 128:
        return LaunchError(f"torchrun was ended by {_signal_name(returncode - 128)}", details=tail)
    return LaunchError(f"torchrun failed with exit status {returncode}", details=tail)


def _ended(rank: int, exitcode: int, printed: _Printed, nproc: int) -> LaunchError:
    """A rank that left no error file: a signal ended it, or it failed outside of ``start()``."""
    lines = printed.of(rank).strip().splitlines()
    if exitcode >= 0:
        message = lines.pop() if lines else f"exited with status {exitcode} and printed nothing"
        return LaunchError(message, rank, printed.untold(lines))
    why = WHY.get(-exitcode, CRASH if -exitcode in CRASHES else "")
    if -exitcode == signal.SIGABRT:
        thrown = GAVE_UP.search("\n".join(lines))
        sentence = named({each: printed.of(each) for each in range(nproc)}, nproc)
        why = (
            f"NCCL ended it: {sentence}"
            if sentence
            else f"Native code gave up: {thrown[1] if thrown else 'it says no more'}"
        )
    message = f"was ended by {_signal_name(-exitcode)}. {why}".rstrip()
    return LaunchError(message, rank, printed.untold(lines), signal=-exitcode)


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


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
