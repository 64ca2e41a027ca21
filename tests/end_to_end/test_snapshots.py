"""Snapshots in memory: ranks and nodes are lost at any moment, and training goes on with the numbers that it would have had."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import graphpar as gp
from graphpar.runtime import LaunchError, Pipeline, start
from graphpar.runtime.checkpoints import snapshots
from graphpar.runtime.checkpoints.folders import MEMORY
from tests.end_to_end.test_checkpoint import Bench
from tests.ranks import checkpoint_script as fixture
from tests.tools.programs import example
from tests.tools.rank_pool import RankPool

KIND, EVERY, END = "17", 2, 9


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> Bench:
    return Bench(tmp_path_factory.mktemp("snapshots"), pool)


@pytest.fixture
def nodes(tmp_path: Path) -> list[Path]:
    """The memory of four nodes, of which ranks see one each."""
    found = [tmp_path / f"memory_{node}" for node in range(4)]
    for each in found:
        each.mkdir()
    return found


def job(folder: Path, nodes: list[Path], per_node: int, **more: Any) -> dict[str, Any]:
    memory = [node for node in nodes for _ in range(per_node)]
    return {"steps": (0, END), "folder": folder, "save_every": 100, "snapshot_every": EVERY, "memory": memory, **more}


def kept_steps(node: Path) -> list[int]:
    return sorted(int(each.name.split(".")[1]) for each in node.glob("graphpar-*/*"))


@pytest.fixture(scope="module")
def one(bench: Bench) -> Path:
    return bench.folder(KIND, "1 device")


def alone(
    program: Path, bench: Bench, folder: Path, memory: Path, end: int, save_at: int = 0
) -> tuple[int, list[float]]:
    """Train in this process until a step, and leave as if it were killed; return where it began, and the losses."""
    with start() as ranks, Pipeline(program, ranks.device) as pipeline:
        optimizer = fixture.optimizer_of(pipeline.named_parameters())
        saved = pipeline.resume(folder, optimizer, memory=memory)
        if saved is None:
            pipeline.load_weights(bench.root / f"{KIND}.safetensors")
        losses, begin = [], saved.step if saved else 0
        for step in range(begin, end):
            loss = pipeline.step(fixture.batch_of(KIND, step))
            assert loss is not None
            optimizer.step()
            pipeline.zero_grad()
            fixture.scheduled(optimizer)
            losses.append(loss.item())
            if step + 1 == save_at:
                pipeline.save_checkpoint(folder / str(step + 1), optimizer, step=step + 1)
            pipeline.save_snapshot(folder, optimizer, step=step + 1, data={"rows": step}, memory=memory)
    return begin, losses


def test_the_newest_intact_snapshot_of_the_latest_checkpoint_is_taken_up(
    one: Path, bench: Bench, tmp_path: Path, nodes: list[Path], capfd: pytest.CaptureFixture[str]
) -> None:
    memory, folder = nodes[0], tmp_path / "ckpt"
    straight = alone(one, bench, tmp_path / "other", nodes[1], 8)[1]

    assert alone(one, bench, folder, memory, 3) == (0, straight[:3])
    assert kept_steps(memory) == [2, 3]
    assert alone(one, bench, folder, memory, 5, save_at=4) == (3, straight[3:5])
    assert "training goes on from the snapshot of step 3" in capfd.readouterr().out
    assert kept_steps(memory) == [4, 5]

    (newest,) = memory.glob("graphpar-*/*.5.*/0")
    file = newest / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert alone(one, bench, folder, memory, 6) == (4, straight[4:6])  # 4 was taken after the checkpoint of step 4
    assert "__0_0.distcp does not match its checksum" in capfd.readouterr().out

    for unwritten in memory.glob("graphpar-*/*.6.*/0"):  # as if it was killed while it wrote
        unwritten.rename(unwritten.with_name(".0.part"))
    assert alone(one, bench, folder, memory, 6) == (5, straight[5:6])

    (folder / "snapshots").unlink()  # on purpose from the checkpoint
    assert alone(one, bench, folder, memory, 6) == (4, straight[4:6])
    assert f"training goes on from the checkpoint {folder / '4'}" in capfd.readouterr().out
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))  # another run, whose snapshots these are not
    assert alone(one, bench, copy, memory, 6) == (4, straight[4:6])
    shutil.rmtree(folder / "4")
    (folder / "latest").unlink()  # on purpose from the beginning, in the folder of before
    assert alone(one, bench, folder, memory, 1) == (0, straight[:1])
    assert "the snapshot of step 6 was not taken after the checkpoint that is the latest now" in capfd.readouterr().out
    assert (nodes[1] / next(nodes[1].glob("graphpar-*")).name).stat().st_mode & 0o077 == 0


def test_models_that_share_a_folder_keep_their_own(tmp_path: Path, nodes: list[Path]) -> None:
    folder, memory, programs = tmp_path / "ckpt", nodes[0], [tmp_path / "first", tmp_path / "second"]
    for width, program in enumerate(programs, 4):
        model, rows = torch.nn.Linear(width, width), torch.zeros(2, width)
        made = gp.export(model, (rows,), loss_fn=torch.nn.functional.mse_loss, targets=(rows,))
        gp.partition(made, gp.plan(made)).save(program, weights=model.state_dict())
    with start() as ranks, Pipeline(programs[0], ranks.device) as first, Pipeline(programs[1], ranks.device) as second:
        for each in (first, second):
            each.load_weights()
            each.save_snapshot(folder, step=2, memory=memory)
        second.drop_snapshots()
        assert kept_steps(memory) == [2]
        assert second.resume(folder, memory=memory) is None
        first.save_checkpoint(folder / "first-4", step=4)  # the only one, and of the other model
        first.drop_snapshots()
        second.save_snapshot(folder, step=3, memory=memory)  # into what the first one has removed
        assert [each.stat().st_mode & 0o077 for each in memory.iterdir()] == [0]
    assert kept_steps(memory) == [3]
    with start() as ranks, Pipeline(programs[1], ranks.device) as second:
        saved = second.resume(folder, memory=memory)
        assert saved is not None and saved.step == 3
        second.drop_snapshots()
    assert not list(memory.iterdir()) and not (folder / "snapshots").exists()


def test_too_little_memory_is_refused(
    one: Path, bench: Bench, tmp_path: Path, nodes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        f_bavail, f_frsize = 3, 4096

    monkeypatch.setattr("os.statvfs", lambda path: Full)
    with pytest.raises(SystemExit) as error:
        alone(one, bench, tmp_path / "ckpt", nodes[0], 1)
    assert "which has 12,288: name a folder with more memory with --snapshots" in str(error.value.__cause__)
    with pytest.raises(SystemExit) as error:
        alone(one, bench, tmp_path / "ckpt", tmp_path / "none", 1)
    assert f"there is no folder {tmp_path / 'none'} for snapshots" in str(error.value.__cause__)


class Pair:
    """A group of two: what is sent comes to the other one."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def rank(self) -> int:
        return 0

    def send(self, tensors: list[torch.Tensor], *_: int) -> Pair:
        self.sent += [each.clone() for each in tensors]
        return self

    def recv(self, tensors: list[torch.Tensor], *_: int) -> Pair:
        tensors[0].copy_(self.sent.pop(0))
        return self

    def wait(self) -> None:
        pass


def test_what_can_not_be_kept_keeps_nobody_waiting(tmp_path: Path) -> None:
    pair: Any = Pair()
    (source := tmp_path / "source").mkdir()
    for name, size in (("a", 5), ("b", 0), ("c", 7)):
        (source / name).write_bytes(bytes(range(size)))
    snapshots._send(pair, sorted(source.iterdir()))
    snapshots._received(pair, tmp_path / "kept", "0")
    there = {each.name: each.read_bytes() for each in (tmp_path / "kept" / "0").iterdir()}
    assert there == {"a": bytes(range(5)), "b": b"", "c": bytes(range(7))}

    snapshots._send(pair, [])  # it could not write its own
    snapshots._received(pair, tmp_path / "none", "0")
    assert not (tmp_path / "none").exists()

    snapshots._send(pair, sorted(source.iterdir()))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / ".0.part").write_text("")  # so that no file can be written there
    with pytest.raises(OSError, match="part"):
        snapshots._received(pair, tmp_path / "full", "0")
    assert not pair.sent


def test_each_rank_sends_to_the_same_place_of_the_next_node() -> None:
    assert [snapshots._on_next(rank, ["a", "a", "b", "b"]) for rank in range(4)] == [2, 3, 0, 1]
    assert [snapshots._on_next(rank, ["a", "b", "b", "c"]) for rank in range(4)] == [1, 3, 3, 0]
    assert snapshots._on_next(0, ["a", "a"]) is None


def lost(bench: Bench, layout: str, per_node: int, tmp_path: Path, nodes: list[Path], other: str, rounds: int) -> None:
    """Kill ranks and take away a node's memory, again and again; then go on under another plan."""
    folder, nodes = tmp_path / "ckpt", nodes[: 4 // per_node]
    straight = bench.run(KIND, layout, {"steps": (0, END)})[0]["losses"]
    begin, ranks = 0, per_node * len(nodes)
    for _ in range(rounds):
        killed_at, killed = random.randrange(begin + 1, max(begin + 2, END - 1)), random.randrange(ranks)
        more = {"killed_at": killed_at, "killed": [killed], "killed_after": random.uniform(0.0, 0.02)}
        with pytest.raises(LaunchError):
            bench.run(KIND, layout, job(folder, nodes, per_node, **more, steps=(0, 400)))
        gone = nodes[killed // per_node]
        shutil.rmtree(gone)
        gone.mkdir()
        print(layout, killed_at, killed, [kept_steps(node) for node in nodes])
        (report,) = bench.run(KIND, layout, job(folder, nodes, per_node, steps=(0, 0)))
        begin = report.get("step", 0)
        assert begin >= killed_at - 2 * EVERY
        (report,) = bench.run(KIND, layout, job(folder, nodes, per_node, snapshot_every=100))
        assert report["losses"] == straight[begin:]
    ranks_there = bench.ranks(other)
    where = [nodes[rank * len(nodes) // ranks_there] for rank in range(ranks_there)]
    (report,) = bench.run(KIND, other, {**job(folder, nodes, 1), "memory": where})
    assert report.get("step", 0) == begin
    assert report["losses"] == pytest.approx(fixture.eager(KIND, END)[0][begin:], rel=1e-5)


@pytest.mark.costly
def test_a_lost_node_is_restored_from_the_next_one(bench: Bench, tmp_path: Path, nodes: list[Path]) -> None:
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")
    random.seed(seed)
    lost(bench, "tp2 x pp2", 2, tmp_path, nodes, "dp2 zero 3", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "per_node", "other"),
    [("dp2 x dp2 zero 1 flat", 1, "tp2"), ("dp2 x tp2 zero 3", 1, "pp2"), ("cp2 x dp2", 2, "1 device")],
)
def test_nodes_are_lost_again_and_again(
    layout: str, per_node: int, other: str, bench: Bench, tmp_path: Path, nodes: list[Path]
) -> None:
    lost(bench, layout, per_node, tmp_path, nodes, other, 4)


KILLS = """
import os, random, signal, threading
killed = Path(__file__).parent / "killed"
if ranks.rank == 1 and len(killed.read_text()) < 3 and random.random() < 0.2:
    killed.write_text(killed.read_text() + "x")
    threading.Timer(random.uniform(0.0, 0.2), os.kill, (os.getpid(), signal.SIGKILL)).start()
"""


@pytest.mark.slow
def test_torchrun_restarts_ranks_that_are_killed(bench: Bench, tmp_path: Path) -> None:
    program, steps = example("gpt"), 30
    torch.manual_seed(0)
    weights = program.source.model().state_dict()
    out = gp.partition(program, gp.plan(program, mesh={"dp_shard": 2}, zero=3)).save(tmp_path / "out", weights=weights)
    script, memory, straight, log = (tmp_path / each for each in ("out/train.py", "memory", "straight", "log"))
    memory.mkdir()
    bench.pool.torchrun(script, ["--steps", str(steps), "--json", str(straight)], nproc=2, timeout_s=300)
    losses = [each["loss"] for each in json.loads(straight.read_text())]

    (out / "killed").touch()
    text = script.read_text()
    (line,) = (each for each in text.splitlines() if "training.log(" in each)
    script.write_text(text.replace(line, line + textwrap.indent(KILLS, line[: -len(line.lstrip())])))
    options = (
        f"--steps {steps} --checkpoint {tmp_path}/ckpt --log-file {log} --snapshot-every {EVERY} --snapshots {memory}"
    )
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "3",
    ]
    done = subprocess.run(
        [*launcher, str(script), *options.split()], timeout=500, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert (out / "killed").read_text()
    made = [each for each in map(json.loads, log.read_text().splitlines()) if "loss" in each]
    assert [each["loss"] for each in made] == [losses[each["step"]] for each in made]
    lost = [last["step"] + 1 - first["step"] for last, first in itertools.pairwise(made)]
    assert max(lost) <= 2 * EVERY and made[-1]["step"] == steps - 1, lost
    assert not any(memory.iterdir()) and not (tmp_path / "ckpt" / "snapshots").exists()

    # In the memory that every start knows, one that keeps none removes what one before it has left.
    ends = f"\nif step == {steps + 5}: import os; os._exit(1)"
    script.write_text(text.replace(line, line + textwrap.indent(ends, line[: -len(line.lstrip())])))
    launcher[-1] = "0"
    more = [*launcher, str(script), "--steps", str(steps + 9), "--checkpoint", str(tmp_path / "ckpt")]
    ended = subprocess.run([*more, "--snapshot-every", "1"], timeout=300, capture_output=True, text=True, check=False)
    assert ended.returncode
    left = snapshots._root_of(MEMORY, snapshots._run_of(tmp_path / "ckpt"), tmp_path / "ckpt")
    assert left.is_dir() and any(left.iterdir()), ended.stderr
    script.write_text(text)
    subprocess.run(more, timeout=300, capture_output=True, check=True)
    assert not left.exists()
