"""Training with train.py that is ended in the middle, by whatever, goes on from its last checkpoint with the losses it would have had."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import graphpar as gp
from graphpar.runtime.launching.process_supervisor import descendants
from tests.tools.programs import example, example_file
from tests.tools.rank_pool import RankPool
from tests.tools.samples import sample

STEPS = 12
STEP = re.compile(r"^step +(\d+) +loss (\S+) +gradient norm (\S+)", re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two programs of a model, without weights, so that ranks make them."""
    folder = tmp_path_factory.mktemp("training")
    for name, mesh, options in (("tp", {"tp": 2}, {}), ("zero", {"dp_shard": 2}, {"zero": 1})):
        plan = gp.plan(example("gpt"), mesh=mesh, **options)  # type: ignore[arg-type]
        gp.partition(example("gpt"), plan, model_file=str(example_file("gpt").path.resolve())).save(folder / name)
    return folder


def _start(program: Path, *options: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    return subprocess.Popen(
        [*command, "--steps", str(STEPS), *options],
        cwd=program,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@contextlib.contextmanager
def _bounded(started: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait(60)


def _whole(pool: RankPool, program: Path, *options: str) -> dict[int, tuple[float, float]]:
    """The losses and norms of all steps of a run that nothing ends."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "log.jsonl")
        pool.torchrun(
            program / "train.py", ["--steps", str(STEPS), "--log-file", str(log), *options], nproc=2, timeout_s=240
        )
        records = map(json.loads, log.read_text().splitlines())
        return {each["step"]: (each["loss"], each["gradient_norm"]) for each in records if "loss" in each}


def _until(started: subprocess.Popen[str], step: int) -> str:
    """Read what is printed until this step has been taken."""
    assert started.stdout is not None
    printed = ""
    for line in started.stdout:
        printed += line
        if line.startswith(f"step {step:4} "):
            return printed
    raise AssertionError(printed)


def _ranks(started: subprocess.Popen[str]) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(started.pid)], capture_output=True, text=True).stdout
    return [int(pid) for pid in found.split()]


@pytest.fixture(scope="module")
def expected(folder: Path, pool: RankPool) -> Mapping[int, tuple[float, float]]:
    losses = _whole(pool, folder / "tp")
    assert sorted(losses) == list(range(STEPS))
    return losses


def _goes_on(
    pool: RankPool,
    folder: Path,
    program: str,
    checkpoints: Path,
    expected: Mapping[int, tuple[float, float]],
    tolerance: float,
) -> None:
    last = int((checkpoints / "latest").read_text())
    losses = _whole(pool, folder / program, "--checkpoint", str(checkpoints), "--checkpoint-every", "3")
    assert sorted(losses) == list(range(last, STEPS))
    for step, values in losses.items():
        assert values == pytest.approx(expected[step], rel=tolerance), step


@pytest.mark.costly
def test_a_request_to_end_saves_first(
    pool: RankPool, folder: Path, expected: Mapping[int, tuple[float, float]], tmp_path: Path
) -> None:
    """Training then goes on under another plan."""
    options = ["--checkpoint", str(tmp_path / "ck"), "--json", str(tmp_path / "history.json")]
    started = _start(folder / "tp", *options, GRAPHPAR_DELAY="after_loss:100")
    with _bounded(started):
        printed = _until(started, 2)
        os.kill(started.pid, signal.SIGTERM)
        printed += started.communicate(timeout=60)[0]
        left = _ranks(started)
    last = max(int(step) for step, _, _ in STEP.findall(printed))

    assert 2 <= last < STEPS - 1 and not left
    assert int((tmp_path / "ck" / "latest").read_text()) == last + 1
    assert len(json.loads((tmp_path / "history.json").read_text())) == last + 1
    _goes_on(pool, folder, "zero", tmp_path / "ck", expected, 1e-4)


WAYS: dict[str, list[tuple[float, bool, bool]]] = {  # after how many seconds, torchrun, its ranks and their workers
    "the ranks, then torchrun": [(0.0, False, True), (0.02, True, False)],
    "the ranks long before torchrun": [(0.0, False, True), (0.5, True, False)],
    "all at once, as Slurm": [(0.0, True, True)],
    "torchrun twice": [(0.0, True, False), (0.2, True, False)],
    "all twice": [(0.0, True, True), (0.3, True, True)],
}


@pytest.mark.costly
@pytest.mark.parametrize("way", sample(list(WAYS), 1))
def test_however_a_request_to_end_arrives_it_saves(
    way: str, pool: RankPool, folder: Path, expected: Mapping[int, tuple[float, float]], tmp_path: Path
) -> None:
    checkpoints = tmp_path / "ck"
    options = ["--checkpoint", str(checkpoints), "--workers", "1"]
    started = _start(folder / "tp", *options, GRAPHPAR_DELAY="after_loss:200")
    with _bounded(started):
        _until(started, 2)
        below = descendants(started.pid)
        for pause, launcher, others in WAYS[way]:
            time.sleep(pause)
            for process in [*([started.pid] if launcher else []), *(below if others else [])]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGTERM)
        printed = started.communicate(timeout=120)[0]
    assert [path.name for path in checkpoints.glob(".*.part")] == [], printed
    assert 3 <= int((checkpoints / "latest").read_text()) < STEPS, printed
    _goes_on(pool, folder, "tp", checkpoints, expected, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("every", sample(range(4), 2))
def test_after_a_kill_at_any_moment(
    every: int, pool: RankPool, folder: Path, expected: Mapping[int, tuple[float, float]], tmp_path: Path
) -> None:
    """A rank alone, or all at once, in a step or in a save."""
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")  # pytest shows it where the test fails
    chance = random.Random(seed)
    started = _start(folder / "tp", "--checkpoint", str(tmp_path / "ck"), "--checkpoint-every", "1")
    with _bounded(started):
        _until(started, chance.randrange(1, STEPS - 4))
        time.sleep(chance.random() * 0.2)
        if every % 2:
            for process in (started.pid, *_ranks(started)):
                os.kill(process, signal.SIGKILL)
        else:
            os.kill(chance.choice(_ranks(started)), signal.SIGKILL)
        started.communicate(timeout=120)
        assert started.returncode
    _goes_on(pool, folder, "tp", tmp_path / "ck", expected, 0.0)
