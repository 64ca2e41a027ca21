"""Ranks that stay up between launches: starting Python and torch takes longer than most of the programs that tests verify.

    parent: POOL.launch([timeout, job, ...], nproc=2)   writes a line to each of two processes, and reads one back
    rank:   python -m tests.rank_pool                    for each line: becomes that rank of a new process group, and runs
                                                         graphpar.runtime.worker, as torchrun would have started it

A launch that fails or takes too long ends all of the processes; the next one starts others.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphpar.runtime import worker
from graphpar.runtime.errors import LaunchError
from graphpar.runtime.launch import torchrun

ROOT = Path(__file__).parents[1]


class RankPool:
    """The processes of one test session (of one worker of it)."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        atexit.register(self.close)

    def torchrun(
        self, target: str | Path, args: Sequence[str] = (), *, nproc: int, timeout_s: float, **options: Any
    ) -> None:
        """In the place of :func:`graphpar.runtime.launch.torchrun`, for the worker."""
        if target != worker.__name__:
            torchrun(target, args, nproc=nproc, timeout_s=timeout_s, **options)
            return
        try:
            self.launch(args, nproc, timeout_s)
        except BaseException:
            self.close()
            raise

    def launch(self, arguments: Sequence[str], nproc: int, timeout_s: float) -> None:
        while len(self.processes) < nproc:
            self.processes.append(_started())
        with tempfile.TemporaryDirectory(prefix="graphpar-pool-") as folder, socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
            free.close()
            for rank, process in enumerate(self.processes[:nproc]):
                places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc}
                address = {
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "TORCHELASTIC_ERROR_FILE": f"{folder}/{rank}",
                }
                environment = {name: str(value) for name, value in (places | address).items()}
                environment["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
                assert process.stdin is not None
                process.stdin.write(json.dumps({"environment": environment, "arguments": list(arguments)}) + "\n")
                process.stdin.flush()
            self._wait(nproc, time.monotonic() + timeout_s, Path(folder))

    def _wait(self, nproc: int, deadline: float, errors: Path) -> None:
        waiting = {process.stdout: rank for rank, process in enumerate(self.processes[:nproc])}
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise LaunchError("the launch did not finish in time and was ended")
            for stream in ready:
                rank = waiting.pop(stream)
                if stream.readline() != "done\n":
                    raise _failure(errors, rank)

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                stream.close()
        self.processes.clear()


def _failure(errors: Path, rank: int) -> LaunchError:
    """What the first rank that failed said; another may only have lost it."""
    time.sleep(0.5)
    said = [json.loads(path.read_text())["message"] for path in sorted(errors.iterdir())]
    said.sort(key=lambda message: (message["extraInfo"]["secondary"] == "True", int(message["extraInfo"]["time_ns"])))
    if not said:
        return LaunchError("ended without a word", rank)
    extra = said[0]["extraInfo"]
    return LaunchError(said[0]["message"], int(extra["rank"]), extra["frames"], extra["user"] == "True")


def _started() -> subprocess.Popen[str]:
    variables = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, "GRAPHPAR_LAUNCHED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.rank_pool"],
        cwd=ROOT, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a program prints is no answer
    usual = list(sys.path)
    for line in sys.stdin:
        request = json.loads(line)
        os.environ.update(request["environment"])
        sys.path[:] = [*filter(None, os.environ["PYTHONPATH"].split(os.pathsep)), *usual]
        worker.main(request["arguments"])
        answers.write("done\n")


if __name__ == "__main__":
    _serve()
