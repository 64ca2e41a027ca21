"""Programs that run: what is seen of them meanwhile, what is left when something ends them, and what their failures say."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphpar.cli import passes_command
from graphpar.cli.main import main
from graphpar.cli.output import write_text
from graphpar.runtime.launching import process_supervisor
from graphpar.runtime.launching.process_supervisor import descendants
from tests.tools.samples import sample

GPT = str(Path(__file__).parents[2] / "examples" / "gpt.py")
LIMIT_S = 180.0
"""What a launch may take on a machine that others use."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPT in two stages, compiled once for all."""
    folder = tmp_path_factory.mktemp("running") / "out"
    assert main(["compile", GPT, "--mesh", "pp=2", "-o", str(folder)]) == 0
    return folder


def sabotaged(program: Path, folder: Path, file: str, after: str, line: str) -> Path:
    """A copy of the program with ``line`` under the line of ``file`` that begins with ``after``, and as far to the right as the next."""
    shutil.copytree(program, folder)
    lines = (folder / file).read_text().splitlines()
    place = next(place for place, text in enumerate(lines) if text.lstrip().startswith(after)) + 1
    indent = len(lines[place]) - len(lines[place].lstrip())
    (folder / file).write_text("\n".join([*lines[:place], " " * indent + line, *lines[place:]]) + "\n")
    return folder


def gone(pids: list[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("number", sample([signal.SIGTERM, signal.SIGKILL], 1), ids=lambda number: number.name)
@pytest.mark.costly
def test_a_run_shows_its_steps_at_once_and_leaves_nothing_when_it_is_ended(
    program: Path, tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "graphpar.cli.main", "run", str(program), "--steps", "1000000"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        watchdog = threading.Timer(LIMIT_S, process.kill)
        watchdog.start()
        assert process.stdout is not None
        step = next(line for line in process.stdout if line.startswith(" step    1 "))
        started, folders = descendants(process.pid), [entry.name for entry in tmp_path.iterdir()]
        process.send_signal(number)
        code = process.wait(LIMIT_S)
        watchdog.cancel()
    assert re.fullmatch(
        r" step    1   loss \d\.\d{6}   gradient norm \d+\.\d{4}   \d+\.\d{3} s, predicted \d+\.\d{3} s   lr 1\.00e-03   [\d,]+ tokens/s"
        r"   memory \d+\.\d\d GiB\n",
        step,
    )
    assert (
        len(started) >= 4 and len(folders) >= 2
    )  # the supervisor, torchrun, two ranks; those of the run and of its launch
    assert code == (-number if number == signal.SIGKILL else 128 + number)
    assert gone(started, 30.0)
    assert list(tmp_path.iterdir()) == []


def marked(folder: Path) -> list[int]:
    """The processes that were started with ``folder`` for temporary files."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"TMPDIR={folder}".encode() in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
    return found


def ranks_of(folder: Path) -> list[int]:
    """Those of them that are ranks."""
    found = []
    for pid in marked(folder):
        with contextlib.suppress(OSError):
            if b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
@pytest.mark.parametrize(
    ("number", "early"),
    sample(list(itertools.product(["SIGTERM", "SIGINT", "SIGKILL", "SIGKILL of a rank"], [True, False])), 4),
)
def test_nothing_is_left_soon_after_a_signal_at_any_moment(
    program: Path, tmp_path: Path, number: str, early: bool
) -> None:
    """Five seconds later, or as much more as others use of this machine."""
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")  # pytest shows it where the test fails
    chance = random.Random(seed)
    command = [sys.executable, "-m", "graphpar.cli.main", "run", str(program), "--steps", "1000000"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path.parent)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stdout is not None
        if not early:
            next(line for line in process.stdout if line.startswith(" step    1 "))
        time.sleep(chance.random() * 8)
        target = process.pid
        if number.endswith("rank"):
            ranks = ranks_of(tmp_path)
            target = chance.choice(ranks) if ranks else target
        os.kill(target, getattr(signal, number.split()[0]))
        deadline = time.monotonic() + 5 * max(1, os.getloadavg()[0] / (os.cpu_count() or 1))
        while time.monotonic() < deadline and (process.poll() is None or marked(tmp_path)):
            time.sleep(0.1)
        left = marked(tmp_path)
        assert process.returncode
        assert not left and list(tmp_path.iterdir()) == []
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextlib.contextmanager
def supervised(command: str, *folders: Path) -> Iterator[subprocess.Popen[str]]:
    """A shell's command under the supervisor, which is killed at the end."""
    shell = ["sh", "-c", command] if command else []
    with subprocess.Popen(
        [sys.executable, "-I", "-S", process_supervisor.__file__, *map(str, folders), "--", *shell],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="the system gives orphans to the supervisor")
def test_an_orphan_of_a_command_ends_with_it(tmp_path: Path) -> None:
    with supervised("(sleep 60 >&- & echo $!); exit 7", tmp_path) as process:
        assert process.stdout is not None
        orphan = int(process.stdout.readline())
        assert process.wait(LIMIT_S) == 7
    left = Path(f"/proc/{orphan}").exists()
    if left:
        os.kill(orphan, signal.SIGKILL)
    assert not left and tmp_path.exists()


@pytest.mark.parametrize("how", ["the pipe closes", "SIGTERM", "SIGKILL"])
def test_a_command_ends_in_order_with_its_supervisor(how: str, tmp_path: Path) -> None:
    """A hangup and an interrupt of the terminal are for the command alone."""
    if how == "SIGKILL" and sys.platform != "linux":
        pytest.skip("only Linux tells a process of its parent's end")
    folder = tmp_path / "scratch"
    folder.mkdir()
    command = "trap 'echo in order; exit 3' TERM; echo begun; i=0; while [ $((i+=1)) -lt 200 ]; do sleep 0.05; done"
    with supervised(command, folder) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        for ignored in (signal.SIGINT, signal.SIGHUP):
            process.send_signal(ignored)
        if how == "the pipe closes":
            process.stdin.close()
        else:
            process.send_signal(getattr(signal, how))
        assert process.wait(LIMIT_S) == (-signal.SIGKILL if how == "SIGKILL" else 3)
        assert process.stdout.readline() == "in order\n"
    assert folder.exists() == (how != "the pipe closes")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_that_the_supervisor_ignores_ends_the_command(number: signal.Signals, tmp_path: Path) -> None:
    with supervised(f"kill -{number.value} $$; exit 5", tmp_path) as process:
        assert process.wait(LIMIT_S) == 128 + number


def test_a_supervisor_without_a_command_removes_folders_when_the_pipe_closes(tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    with supervised("", folder) as process:
        assert process.stdin is not None
        process.stdin.write("still here")
        process.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        assert folder.exists()
        process.stdin.close()
        assert process.wait(LIMIT_S) == 0
    assert not folder.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_ends_a_command_in_order(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []

    def run(options: argparse.Namespace) -> None:
        try:
            signal.raise_signal(number)
        finally:
            left.append("in order")

    monkeypatch.setattr(passes_command, "run", run)
    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, usual)  # the tests themselves may have been started with it ignored, as by nohup
    try:
        assert main(["passes"]) == 128 + number
        assert left == ["in order"] and signal.getsignal(number) is usual
    finally:
        signal.signal(number, before)


SLOW_MODEL = """
import pathlib, subprocess, time
import torch
pathlib.Path("importing").touch()
time.sleep(600)
"""
INTERRUPTED = {
    "compile": ["compile", "model.py", "--devices", "2"],
    "sweep": ["sweep", "model.py", "--cluster", "2xCPU", "--batch", "8", "--html", "page.html"],
    "verify": ["verify", "PROGRAM"],
}


@pytest.mark.costly
@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
@pytest.mark.parametrize(
    ("name", "number"),
    [(name, number) for name in INTERRUPTED for number in sample([signal.SIGTERM, signal.SIGINT], 1)],
    ids=lambda each: getattr(each, "name", each),
)
@pytest.mark.sampled(1 / 3)
def test_an_interrupted_command_says_what_it_leaves(
    program: Path, tmp_path: Path, name: str, number: signal.Signals
) -> None:
    scratch, work = tmp_path / "scratch", tmp_path / "work"
    scratch.mkdir(), work.mkdir()
    (work / "model.py").write_text(SLOW_MODEL)
    slow = sabotaged(program, tmp_path / "slow", "stage_1.py", "def forward(", "import time; time.sleep(600)")
    arguments = [str(slow) if each == "PROGRAM" else each for each in INTERRUPTED[name]]
    before = sorted(slow.rglob("*"))
    with subprocess.Popen(
        [sys.executable, "-m", "graphpar.cli.main", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=work,
        env={**os.environ, "TMPDIR": str(scratch), "GRAPHPAR_CACHE": ""},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        watchdog = threading.Timer(LIMIT_S, process.kill)
        watchdog.start()
        while process.poll() is None and not ((work / "importing").exists() or ranks_of(scratch)):
            time.sleep(0.1)
        process.send_signal(number)
        _, said = process.communicate()
        watchdog.cancel()
    assert process.returncode == 128 + number
    assert said.splitlines()[-1] == "Interrupted; nothing was written." and "Traceback" not in said
    assert gone(marked(scratch), 30.0) and list(scratch.iterdir()) == []
    assert {entry.name for entry in work.iterdir()} <= {"model.py", "importing", "__pycache__"}
    assert sorted(slow.rglob("*")) == before


def test_what_was_written_before_an_interruption_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(options: argparse.Namespace) -> None:
        write_text(tmp_path / "page.html", "", options.written)
        raise KeyboardInterrupt

    monkeypatch.setattr(passes_command, "run", run)
    assert main(["passes"]) == 130
    assert capsys.readouterr().err == f"Interrupted; it had written {tmp_path / 'page.html'}.\n"


@pytest.mark.costly
def test_a_rank_that_is_killed_is_named_with_its_signal(
    program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kill = "if ranks.rank == 1: import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    folder = sabotaged(program, tmp_path / "killed", "train.py", "with start(", kill)
    capsys.readouterr()
    assert main(["run", str(folder), "--steps", "1"]) == 1
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith(
        "error: rank 1 was ended by SIGKILL. Most often the system kills a process because memory runs out"
    )
    assert re.search(r"According to the plan, its 2 processes need \S+ \wi?B together; this machine has ", message)


@pytest.mark.costly
def test_a_rank_that_raises_shows_its_own_error_once(
    program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raising = 'raise FloatingPointError("the bearings are too hot")'
    folder = sabotaged(program, tmp_path / "raising", "stage_1.py", "def forward(", raising)
    capsys.readouterr()
    assert main(["run", str(folder), "--steps", "1"]) == 1
    captured = capsys.readouterr()
    *frames, message = captured.err.strip().splitlines()
    assert message == "error: rank 1: FloatingPointError: the bearings are too hot"
    assert any("stage_1.py" in frame for frame in frames) and f"    {raising}" in frames
    shown = captured.out + captured.err
    assert shown.count("FloatingPointError: ") == 1
    assert "ChildFailedError" not in shown and "bug in graphpar" not in shown
