"""Training that goes on with fewer or more devices has the losses that one device has without an interruption."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from graphpar.cli import resume_command
from graphpar.cli.main import main
from graphpar.cli.output import stdout_console
from graphpar.runtime import Pipeline, start
from graphpar.runtime.launching.process_supervisor import descendants
from tests.tools.rank_pool import RankPool
from tests.tools.samples import SEED

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "gpt_dropout.py"


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_command_that_goes_on_can_be_typed(
    nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Paths with spaces are quoted, and a long line is whole."""
    monkeypatch.chdir(tmp_path)
    new, checkpoint = tmp_path / "my out", tmp_path / ("long " * 30) / "ck"
    options = Namespace(steps=7, checkpoint=checkpoint)
    plan = Namespace(cluster=Namespace(nodes=nodes), mesh=Namespace(size=2))
    command = resume_command._command(new, plan, options, ["--data", "a b.txt"])  # type: ignore[arg-type]
    script = "my out/train.py" if nodes == 1 else "my out/launch.sh"
    rest = [script, "--checkpoint", str(checkpoint), "--steps", "7", "--data", "a b.txt"]
    assert shlex.split(command)[-7:] == rest
    shown = {"difference": {}, "devices": 2, "given": 2, "warnings": [], "reused": False, "command": command}
    monkeypatch.setattr(resume_command, "difference_lines", lambda _: [])
    resume_command._show(shown | {"from": "out", "out": "my out"}, stdout_console())
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2:] == [f" Next       {command}", "            graphpar diff out 'my out'"]


def test_training_goes_on_with_the_options_that_it_was_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [
        "--check",
        "--lr",
        "0.1",
        "--checkpoint",
        "ckpt",
        "--steps",
        "7",
        "--data",
        "a b.txt",
        "--json=loss.json",
    ]
    monkeypatch.setattr(resume_command, "read_record", lambda _: {"data": {"arguments": arguments}})
    assert resume_command._begun_with(Path("ckpt/4")) == (["--check", "--lr", "0.1", "--data", "a b.txt"], 7)
    monkeypatch.setattr(resume_command, "read_record", lambda _: {"data": {"examples": 8}})
    assert resume_command._begun_with(Path("ckpt/4")) == ([], None)


def _resume(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["resume", *map(str, arguments), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program for four nodes of one CPU, planned by a search, with dropout."""
    out = tmp_path_factory.mktemp("devices") / "out"
    assert main(["compile", str(MODEL), "--cluster", "4x1xCPU", "--no-weights", "-o", str(out)]) == 0
    return out


@pytest.fixture
def out(compiled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(compiled, tmp_path / "out"))


def _plan(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    return found


def test_it_is_planned_again_with_all_that_numbers_depend_on(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight rows divide over no three replicas, so three devices are used in another way; edits of the script stay."""
    (out / "train.py").write_text((out / "train.py").read_text() + "# mine\n")
    (out / "mine.py").write_text("MINE = 1\n")
    found = _resume(capsys, out, "--devices", 3)
    three = out.with_name("out-3dev")

    assert (found["out"], found["devices"], found["given"], found["reused"]) == (str(three), 3, 3, False)
    assert _plan(three)["global_batch"] == _plan(out)["global_batch"] == 8
    assert _plan(three)["mesh"] != _plan(out)["mesh"]
    assert (three / "train.py").read_text().endswith("# mine\n") and (three / "mine.py").is_file()
    written = (three / "plan.json").stat().st_mtime_ns
    assert _resume(capsys, out, "--devices", 3)["reused"]
    assert (three / "plan.json").stat().st_mtime_ns == written

    (out / "mine.py").write_text("MINE = 2\n")
    assert not _resume(capsys, out, "--devices", 3)["reused"]  # and what was written before is no obstacle
    assert (three / "mine.py").read_text() == "MINE = 2\n"
    stage = next(out.glob("stage*.py"))
    stage.write_text(stage.read_text() + "# mine\n")
    assert main(["resume", str(out), "--devices", "3"]) == 2
    assert f"{stage.name} was edited since" in capsys.readouterr().err


_SMALL = """
import torch
from torch import nn

model = lambda: nn.Sequential(nn.Linear(16, 16))
example_inputs = example_targets = (torch.zeros(8, 16),)
loss_fn = nn.functional.mse_loss
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program whose mesh is pinned, with a loss that three devices can't have: of replicas of eight rows."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "small.py").write_text(_SMALL)
    pins = ["--mesh", "dp_replicate=4", "--microbatch-size", "2", "--dp-mean"]
    assert main(["compile", str(folder / "small.py"), *pins, "--no-weights", "-o", str(folder / "out")]) == 0
    return folder / "out"


@pytest.mark.parametrize("named", ["own_file.py", "own_package.own_file"])
def test_a_model_that_was_edited_in_what_it_imports_is_another_one(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "own_package" if named.startswith("own_package") else tmp_path
    folder.mkdir(exist_ok=True)
    (folder / "own_layers.py").write_text(_SMALL)
    (folder / "own_file.py").write_text(
        "from own_layers import *\n" if folder == tmp_path else "from .own_layers import *\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["compile", named, "--mesh", "dp_replicate=2", "--no-weights", "-o", "out"]) == 0
    assert not _resume(capsys, "out", "--devices", 1)["reused"]
    assert _resume(capsys, "out", "--devices", 1)["reused"]
    (folder / "own_layers.py").write_text(_SMALL + "# other\n")
    assert main(["resume", "out", "--devices", "1"]) == 2
    assert "own_layers.py was edited since out was compiled" in capsys.readouterr().err
    assert not _resume(capsys, "out", "--devices", 1, "--force")["reused"]


def test_fewer_devices_are_used_where_no_plan_has_all(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was pinned is pinned again where it can be."""
    found = _resume(capsys, small, "--devices", 3)
    assert (found["given"], found["devices"]) == (3, 2) and found["why"]
    assert "--dp-mean" in found["warnings"][0]
    eight = _plan(Path(_resume(capsys, small, "--devices", 8)["out"]))
    assert (eight["mesh"]["dp_replicate"], eight["microbatch_size"]) == (8, 1)
    two = _plan(Path(_resume(capsys, small, "--devices", 2)["out"]))
    assert two["global_batch"] == 8


def test_files_that_were_given_are_found_from_anywhere(
    tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a shard plan, whose pins the new plan has, too; and a model file that has changed since is refused."""
    model, out = tmp_path / "model.py", tmp_path / "deep" / "out"
    model.write_text(_SMALL)
    (tmp_path / "pins.toml").write_text('"0" = "colwise"\n')
    monkeypatch.chdir(tmp_path)
    pins = ["--devices", "2", "--mesh", "tp=2", "--shard-plan", "pins.toml"]
    assert main(["compile", "model.py", *pins, "--no-weights", "-o", str(out)]) == 0
    monkeypatch.chdir(small)
    four = _plan(Path(_resume(capsys, out, "--devices", 4)["out"]))
    assert four["mesh"]["tp"] >= 2 and four["parameters"]["0.weight"]["tp"] == "S(0)"
    model.write_text(_SMALL.replace("16, 16", "16, 16, bias=False", 1))
    assert main(["resume", str(out), "--devices", "3"]) == 2
    assert "model.py was edited since" in capsys.readouterr().err


@pytest.mark.costly
def test_options_are_those_of_the_own_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its checkpoint may be beside later ones of another model, and only these are refused."""
    checkpoints, programs = tmp_path / "ck", {"1": tmp_path / "own", "2": tmp_path / "other"}
    for (name, program), layer in zip(programs.items(), ("16, 16", "16, 16, bias=False")):
        model = tmp_path / f"{program.name}.py"
        model.write_text(_SMALL.replace("16, 16", layer, 1))
        assert main(["compile", str(model), "--no-weights", "-o", str(program)]) == 0
        with start() as ranks, Pipeline(program, ranks.device) as pipeline:
            pipeline.load_weights()
            optimizer, data = pipeline.optimizer(), {"arguments": ["--lr", f"0.{name}"]}
            for place in (checkpoints / name, tmp_path / program.name / "ck" / name):
                pipeline.save_checkpoint(place, optimizer, step=1, data=data)
    own = ["resume", str(programs["1"]), "--devices", "2", "--no-run", "--checkpoint"]
    capsys.readouterr()
    assert main([*own, str(checkpoints), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["command"].endswith(f"--checkpoint {checkpoints} --lr 0.1")
    assert main(["checkpoint", "convert", str(checkpoints), "--to", str(programs["1"]), "-o", str(tmp_path / "3")]) == 0
    assert main([*own, str(programs["2"] / "ck"), "-o", str(tmp_path / "new")]) == 2
    assert "it has no value for 0.bias" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.costly
def test_what_generates_between_steps_goes_on_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    example = str(ROOT / "examples" / "grpo.py")
    assert main(["compile", example, "--mode", "train,generate", "--mesh", "dp_replicate=2", "-o", str(out)]) == 0
    capsys.readouterr()
    found = Path(_resume(capsys, out, "--devices", 4)["out"])
    assert json.loads((found / "generate" / "plan.json").read_text())["mesh"]["dp_replicate"] == 4


@pytest.mark.costly
def test_ranks_that_the_plan_does_not_use_wait_for_the_others(small: Path, tmp_path: Path) -> None:
    ended = _elastic(small, "--steps", "3", "--log-file", str(tmp_path / "log"))
    assert ended.returncode == 0, ended.stderr
    assert [step for step, *_ in _logged(tmp_path / "log")] == [0, 1, 2]


@pytest.mark.costly
def test_where_there_is_no_plan_nothing_is_started_again(small: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(small, tmp_path / "out"))  # whose model file is not there
    ended = _elastic(out, "--steps", "3")
    assert ended.returncode != 0 and ended.stderr.count("names the model file") == 1, ended.stderr


def _elastic(out: Path, *options: str, restarts: int = 5) -> subprocess.CompletedProcess[str]:
    """Start three ranks."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=3",
        f"--max-restarts={restarts}",
    ]
    command += ["-m", "graphpar.runtime.launching.elastic", str(out), *options]
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, env={**os.environ, **own})


def test_a_second_change_has_all_that_the_first_one_has(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Edits and what was requested; and the program of before is there for the way back."""
    shutil.copy(small.with_name("small.py"), tmp_path)
    out = Path(shutil.copytree(small, tmp_path / "out"))
    (out / "train.py").write_text((out / "train.py").read_text() + "# mine\n")
    (out / "mine.py").write_text("MINE = 1\n")
    two = Path(_resume(capsys, out, "--devices", 2)["out"])
    eight = Path(_resume(capsys, two, "--devices", 8)["out"])
    assert (eight / "train.py").read_text().endswith("# mine\n") and (eight / "mine.py").is_file()
    assert (eight / "request.json").read_text() == (out / "request.json").read_text()
    back = _resume(capsys, two, "--devices", 4, "-o", out)
    assert (back["reused"], back["out"]) == (True, str(out))
    found = _resume(capsys, out, "--devices", 8, "-o", two)  # for more than what it holds
    assert (found["reused"], found["devices"]) == (False, 8)

    other = Path(shutil.copytree(small, tmp_path / "out-3dev"))  # compiled by the user
    assert main(["resume", str(out), "--devices", "3"]) == 2
    assert f"{other} holds a program that resume did not write" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "snapshots").write_text("0123456789abcdef\n")
    assert main(["resume", str(out), "--devices", "2", "--checkpoint", str(tmp_path / "memory")]) == 2
    assert "has no checkpoint yet, only snapshots in the memory of nodes" in capsys.readouterr().err
    assert main(["resume", str(out), "--devices", "2", "--checkpoint", str(tmp_path / "empty")]) == 2
    assert "neither a checkpoint nor" in capsys.readouterr().err


@pytest.mark.costly
@pytest.mark.parametrize("line", ["    raise ValueError('mine')\n", "raise ValueError('mine')\n"])
def test_an_error_of_the_script_ends_it(small: Path, tmp_path: Path, line: str) -> None:
    """In the loop, or before the ranks have met: after a second time."""
    shutil.copy(small.with_name("small.py"), tmp_path)
    out = Path(shutil.copytree(small, tmp_path / "out"))
    script = (out / "train.py").read_text()
    place = script.index("                loss = pipeline") if line.startswith(" ") else script.index("PROGRAM =")
    (out / "train.py").write_text(script[:place] + 3 * line[: -len(line.lstrip())] + line + script[place:])
    ended = _elastic(out, "--steps", "3")
    assert ended.returncode != 0 and "ValueError: mine" in ended.stderr
    assert "the same error came twice" in ended.stderr and "restart" not in ended.stderr.partition("came twice")[2]


@pytest.mark.costly
def test_ranks_that_are_killed_at_one_step_are_not_started_for_ever(small: Path, tmp_path: Path) -> None:
    shutil.copy(small.with_name("small.py"), tmp_path)
    out = Path(shutil.copytree(small, tmp_path / "out"))
    script = (out / "train.py").read_text()
    place = script.index("                loss = pipeline")
    line = "                if step == 1 and ranks.rank == 1: __import__('os').kill(__import__('os').getpid(), 9)\n"
    (out / "train.py").write_text(script[:place] + line + script[place:])
    ended = _elastic(out, "--steps", "3", restarts=50)
    assert ended.returncode != 0
    assert "5 times ranks were started from step 0 and did not come to a later one" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Give how many devices"),
        (["--devices", "3", "--cluster", "2xCPU"], "--devices is 3, but the cluster"),
        (["--devices", "2", "-o", "{out}"], "is the program itself"),
    ],
)
def test_what_is_wrong_is_said(
    compiled: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["resume", str(compiled), *(each.format(out=compiled) for each in arguments)]) == 2
    assert message in capsys.readouterr().err


# ---- losses ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program for one device."""
    out = tmp_path_factory.mktemp("one") / "out"
    assert main(["compile", str(MODEL), "--no-weights", "-o", str(out)]) == 0
    return out


def _logged(log: Path) -> list[tuple[int, float, float]]:
    """The steps in a log, in the order in which they were taken."""
    lines = log.read_text().splitlines() if log.is_file() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return [(each["step"], each["loss"], each["gradient_norm"]) for each in records if "loss" in each]


def _check(log: Path, one: Path, pool: RankPool) -> None:
    """Compare all steps in a log, also those that were taken again, with those of one device that nothing interrupts."""
    taken, alone = _logged(log), log.with_name("alone")
    steps = 1 + max(step for step, *_ in taken)
    assert {step for step, *_ in taken} == set(range(steps))
    pool.torchrun(one / "train.py", ["--steps", str(steps), "--log-file", str(alone)], nproc=1, timeout_s=240)
    expected = {step: values for step, *values in _logged(alone)}
    for step, *values in taken:
        assert values == pytest.approx(expected[step], rel=1e-4), step


@pytest.mark.costly
def test_losses_are_those_of_one_device(
    out: Path, one: Path, tmp_path: Path, pool: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four devices, then three, then six, and four again."""
    log, checkpoints = tmp_path / "log", tmp_path / "ck"
    options = ["--checkpoint", str(checkpoints), "--log-file", str(log)]
    program = out
    for place, devices in enumerate((4, 3, 6, 4)):
        if devices != 4:
            program = Path(_resume(capsys, program, "--devices", devices)["out"])
        steps = ["--steps", str(3 * (place + 1))]
        pool.torchrun((out if devices == 4 else program) / "train.py", [*steps, *options], nproc=devices, timeout_s=240)
    ran = _resume(capsys, out, "--devices", 2, "--checkpoint", checkpoints, "--steps", 14)["run"]
    with log.open("a") as file:
        for step, loss, norm in zip((12, 13), ran["loss"], ran["gradient_norm"], strict=True):
            print(json.dumps({"step": step, "loss": loss, "gradient_norm": norm}), file=file)
    _check(log, one, pool)


# ---- nodes that are lost and come back -------------------------------------------------------------------------------


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Nodes:
    """Nodes, each a launch.sh with one rank."""

    def __init__(self, out: Path, folder: Path, head: str, steps: int = 100_000) -> None:
        self._command = [str(out / "launch.sh"), "--min-nodes", "3", "--max-nodes", "4", "--steps", str(steps)]
        self._command += [
            "--checkpoint",
            str(folder / "ck"),
            "--checkpoint-every",
            "2",
            "--log-file",
            str(folder / "log"),
        ]
        self._environment = {
            **os.environ, "HEAD": head, "PORT": str(_free_port()), "JOB": f"{folder.name}-{steps}",
            "DEVICES": "1", "GRAPHPAR_DELAY": "after_loss:300",
            "RENDEZVOUS": "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=5",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }  # fmt: skip
        self._folder, self._count = folder, 0
        self.up: list[subprocess.Popen[bytes]] = []

    def add(self) -> None:
        self._count += 1
        with (self._folder / f"printed{self._count}").open("wb") as printed:
            self.up.append(
                subprocess.Popen(
                    self._command,
                    env=self._environment,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def lose(self, node: subprocess.Popen[bytes]) -> None:
        """End all of its processes at once."""
        self.up.remove(node)
        for pid in (node.pid, *descendants(node.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait(60)

    def listens(self) -> bool:
        """Whether a node can be found at the port where they meet."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", int(self._environment["PORT"]))) == 0

    def ranks(self) -> int:
        """How many ranks there are, as the ranks of all nodes have been told; 0 where they disagree."""
        told = [self._told(node) for node in self.up]
        return told[0] if told and len(set(told)) == 1 else 0

    def _told(self, node: subprocess.Popen[bytes]) -> int:
        for pid in descendants(node.pid):
            with contextlib.suppress(OSError):
                for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    if variable.startswith(b"WORLD_SIZE="):
                        return int(variable.partition(b"=")[2])
        return 0

    def printed(self) -> str:
        return "\n".join(file.read_text(errors="replace")[-3000:] for file in sorted(self._folder.glob("printed*")))


def _until(done: Callable[[], bool], nodes: _Nodes, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, nodes.printed()
        time.sleep(0.2)


@contextlib.contextmanager
def _bounded(nodes: _Nodes) -> Iterator[None]:
    try:
        yield
    finally:
        for node in list(nodes.up):
            nodes.lose(node)


@pytest.mark.slow
@pytest.mark.parametrize(("head", "kills"), [("a file", 9), ("a node", 1)])
def test_training_goes_on_when_nodes_are_lost_and_come_back(
    head: str, kills: int, out: Path, one: Path, tmp_path: Path, pool: RankPool
) -> None:
    """One of four nodes is killed, any of them (but the one where they meet); others come in its place while those that are left start, or
    after some steps."""
    kept, kills = (head == "a node"), kills if SEED == "all" else 1
    head = "127.0.0.1" if kept else str(tmp_path / "rendezvous")
    draw, nodes, log = random.Random(SEED), _Nodes(out, tmp_path, head), tmp_path / "log"

    def go_on(ranks: int) -> None:
        _until(lambda: nodes.ranks() == ranks, nodes)
        taken = len(_logged(log))
        _until(lambda: len(_logged(log)) >= taken + 2, nodes)

    with _bounded(nodes):
        nodes.add()
        if kept:
            _until(nodes.listens, nodes)  # it is the one where they meet
        for _ in range(3):
            nodes.add()
        go_on(4)
        for _ in range(kills):
            nodes.lose(draw.choice(nodes.up[kept:]))
            if draw.random() < 0.5:
                go_on(3)
            nodes.add()
            go_on(4)
        nodes.lose(draw.choice(nodes.up[kept:]))
        go_on(3)
        for node in nodes.up:
            node.terminate()  # as Slurm does before the time is up
        _until(lambda: all(node.poll() is not None for node in nodes.up), nodes)
        last = int((tmp_path / "ck" / "latest").read_text())
        assert last == 1 + max(step for step, *_ in _logged(log)), nodes.printed()
        nodes = _Nodes(out, tmp_path, str(tmp_path / "again"), last + 3)
        with _bounded(nodes):
            for _ in range(3):
                nodes.add()
            _until(lambda: all(node.poll() is not None for node in nodes.up), nodes)
            assert [node.returncode for node in nodes.up] == [0] * 3, nodes.printed()
    assert int((tmp_path / "ck" / "latest").read_text()) == last + 3
    _check(log, one, pool)
