"""Ranks that stay up between launches: starting Python and torch takes longer than most of the programs that tests verify.

    parent:  pool.torchrun(script, [argument], nproc=2)   writes a line to each of two ranks, and reads one back
    nursery: python -m tests.tools.rank_pool SOCKET             imports torch once, and forks a rank for each that connects
    rank:    for each line: becomes that rank of a new process group, and runs the script (or the runtime's worker), as torchrun
             would have started it

Neighbouring ranks come from different nurseries, so that they iterate over sets in different orders, as ranks of torchrun do. A launch
that fails or takes too long ends all of the ranks; the next one forks others. The workers of one test session share its nurseries.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from graphpar.runtime.errors import LaunchError
from graphpar.runtime.launching import worker
from graphpar.runtime.rendezvous import DEVICE, on_gpus
from tests.tools.recording import recorded
from tests.tools.session_folder import goes_on, new_session_folder, session_folder

ROOT = Path(__file__).parents[2]
NURSERIES = 2
OF_THE_RUN = ("PYTHONPATH", "PYTEST_XDIST_TESTRUNUID", "PYTEST_CURRENT_TEST")
"""Variables that a rank has from the process that launches it."""
STARTING_S = 300.0
"""How long a nursery may take to import what ranks need."""
LOOKING_S = 1.0
"""How often a nursery looks whether it is still needed."""


@dataclass
class _Rank:
    pid: int
    line: socket.socket
    answers: TextIO


WITHOUT_A_WORD = "ended without a word"
"""Of a rank that did not raise: gloo's threads can end a process while it lets go of a group. Such a launch is done again, once."""


class RankPool:
    """The processes of one test session (of one worker of it)."""

    def __init__(self) -> None:
        self.own = contextlib.ExitStack()
        self.folder: Path | None = None
        self.ranks: list[_Rank] = []
        atexit.register(self.close)

    def torchrun(
        self,
        target: str | Path,
        args: Sequence[str] = (),
        *,
        nproc: int,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        killed: bool = False,
        **options: Any,
    ) -> None:
        """In the place of :func:`graphpar.runtime.launching.launch.torchrun`: the worker on the ranks that stay up, all else on new ones.

        ``killed``: its ranks are killed on purpose, so that it is not done again.
        """
        try:
            self._run(target, args, nproc, timeout_s, env or {})
        except LaunchError as error:
            if killed or WITHOUT_A_WORD not in str(error):
                raise
            warnings.warn(f"{target} runs again on new ranks: {error}", stacklevel=2)
            self._run(target, args, nproc, timeout_s, env or {})

    def _run(
        self, target: str | Path, args: Sequence[str], nproc: int, timeout_s: float, env: Mapping[str, str]
    ) -> None:
        kept = self.ranks if target == worker.__name__ else None
        ranks: list[_Rank] = [] if kept is None else kept
        try:
            while len(ranks) < nproc:
                ranks.append(self._forked(len(ranks) % NURSERIES))
            self._launch(ranks[:nproc], str(target), args, timeout_s, env)
        except BaseException:
            _end(ranks)
            raise
        if kept is None:
            _end(ranks)

    def _launch(
        self, ranks: Sequence[_Rank], target: str, arguments: Sequence[str], timeout_s: float, env: Mapping[str, str]
    ) -> None:
        with tempfile.TemporaryDirectory(prefix="graphpar-pool-") as folder, socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
            free.close()
            for rank, process in enumerate(ranks):
                places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": len(ranks), "LOCAL_WORLD_SIZE": len(ranks)}
                address = {
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "TORCHELASTIC_ERROR_FILE": f"{folder}/{rank}",
                    DEVICE: "cuda" if on_gpus(len(ranks)) else "cpu",
                }
                environment = {name: str(value) for name, value in (places | address).items()}
                environment |= {name: os.environ.get(name, "") for name in OF_THE_RUN} | dict(env)
                request = {"environment": environment, "arguments": list(arguments), "target": target}
                process.line.sendall(json.dumps(request).encode() + b"\n")
            _wait(ranks, time.monotonic() + timeout_s, Path(folder))

    def _forked(self, nursery: int) -> _Rank:
        if self.folder is None:
            self.folder = session_folder() or self.own.enter_context(new_session_folder())
            _start_nurseries(self.folder)
        line = _connected(self.folder / str(nursery), time.monotonic() + STARTING_S)
        answers = line.makefile("r")
        return _Rank(int(answers.readline()), line, answers)

    def close(self) -> None:
        """End the processes."""
        _end(self.ranks)
        self.own.close()
        self.folder = None


def _start_nurseries(folder: Path) -> None:
    """Start them unless another process of the session has; they end when the folder is gone, or the process that made it."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "started").exists():
            return
        for number in range(NURSERIES):
            _start(folder / str(number), seed=number + 1)
        (folder / "started").touch()


def _connected(place: Path, deadline: float) -> socket.socket:
    """Ask the nursery there for a rank; wait until it listens."""
    while True:
        line = socket.socket(socket.AF_UNIX)
        try:
            line.connect(str(place))
            return line
        except OSError:
            line.close()
            if time.monotonic() > deadline or not place.parent.is_dir():
                raise
        time.sleep(0.05)


def _wait(ranks: Sequence[_Rank], deadline: float, errors: Path) -> None:
    waiting = {process.line: rank for rank, process in enumerate(ranks)}
    while waiting:
        ready, _, _ = select.select(list(waiting), [], [], max(deadline - time.monotonic(), 0.0))
        if not ready:
            raise LaunchError("the launch did not finish in time and was ended")
        for line in ready:
            rank = waiting.pop(line)
            if ranks[rank].answers.readline() != "done\n":
                raise _failure(errors, rank)


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, signal.SIGKILL)  # a rank that has ended keeps its number: its nursery does not ask for it
        with contextlib.suppress(OSError):
            rank.answers.read()  # until it is gone
        rank.answers.close()
        rank.line.close()
    ranks.clear()


def _failure(errors: Path, rank: int) -> LaunchError:
    """What the first rank that failed said; another may only have lost it."""
    time.sleep(0.5)
    said = [json.loads(path.read_text())["message"] for path in sorted(errors.iterdir())]
    said.sort(key=lambda message: (message["extraInfo"]["secondary"] == "True", int(message["extraInfo"]["time_ns"])))
    if not said:
        return LaunchError(WITHOUT_A_WORD, rank)
    extra = said[0]["extraInfo"]
    return LaunchError(said[0]["message"], int(extra["rank"]), extra["frames"], extra["user"] == "True")


def _start(place: Path, seed: int) -> None:
    variables = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, "GRAPHPAR_LAUNCHED": "1"}
    variables["PYTHONHASHSEED"] = str(seed)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.tools.rank_pool", str(place)], cwd=ROOT, env=variables,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    process.returncode = 0  # it stays when this process ends


def _nursery(place: Path) -> None:
    """Fork a rank for each that connects, as long as the session goes on."""
    # What torch imports when something is first compiled: a second for each rank that does.
    importlib.import_module("torch._inductor.pattern_matcher")
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{place}~")
        listener.listen(64)
        os.rename(f"{place}~", place)
        while goes_on(place.parent):
            if not select.select([listener], [], [], LOOKING_S)[0]:
                continue
            line, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                try:
                    _serve(line.makefile("rw"))
                finally:
                    os._exit(0)
            line.close()


def _serve(requests: TextIO) -> None:
    requests.write(f"{os.getpid()}\n")
    requests.flush()
    usual = list(sys.path)
    for line in requests:
        request = json.loads(line)
        os.environ.update(request["environment"])
        sys.path[:] = [*filter(None, os.environ["PYTHONPATH"].split(os.pathsep)), *usual]
        target = request["target"]
        with recorded():
            if target == worker.__name__:
                worker.main(request["arguments"])
            else:
                sys.argv = [target, *request["arguments"]]
                sys.path.insert(0, str(Path(target).parent))
                (runpy.run_path if target.endswith(".py") else runpy.run_module)(target, run_name="__main__")
        _let_go_of_groups()
        requests.write("done\n")
        requests.flush()


def _let_go_of_groups() -> None:
    """Drop the programs, which hold their groups of processes: each group has threads that wake up a thousand times a second."""
    for name in [name for name in sys.modules if name.startswith("graphpar_program_")]:
        del sys.modules[name]
    gc.collect()


if __name__ == "__main__":
    _nursery(Path(sys.argv[1]))
