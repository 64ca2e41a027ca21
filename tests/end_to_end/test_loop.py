"""The loop of the emitted train.py: what it logs, evaluates, checks and refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import graphpar as gp
from graphpar.cli.main import main
from graphpar.runtime import LaunchError, Log, RuntimeProgramError, count, load_manifest
from graphpar.runtime.checkpoints.folders import is_in
from graphpar.runtime.training import log as log_module
from graphpar.runtime.training.balance import Balance
from graphpar.runtime.training.lr_schedules import build_lr_schedule
from tests.tools.programs import example, example_file
from tests.tools.rank_pool import RankPool

GPT = str(example_file("gpt").path)
METRICS = """

def entropy(outputs, batch):
    chances = outputs["output"].softmax(-1)
    return -(chances * chances.log()).sum(-1).mean(-1)


metrics = {"entropy": entropy}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loop") / "out"
    model = folder.parent / "model.py"
    model.write_text(Path(GPT).read_text() + METRICS)
    assert main(["compile", str(model), "--mesh", "dp_replicate=2", "--eval", "--check-values", "-o", str(folder)]) == 0
    return folder


def run(pool: RankPool, program: Path, *options: Any) -> None:
    pool.torchrun(program / "train.py", [str(option) for option in options], nproc=2, timeout_s=120)


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.costly
def test_each_step_is_logged_beside_its_prediction(pool: RankPool, program: Path, tmp_path: Path) -> None:
    file, history = tmp_path / "log.jsonl", tmp_path / "history.json"
    options = ["--log-file", file, "--json", history, "--accumulate", 2]
    saving = ["--checkpoint", tmp_path / "ck", "--checkpoint-every", 3, "--checkpoint-async"]
    run(pool, program, "--steps", 4, *options, *saving, "--log-every", 3, "--eval-every", 2, "--eval-batches", 2)
    run(pool, program, "--steps", 1, *options)

    steps = [record for record in records(file) if "loss" in record]
    held_out = [record for record in records(file) if "held_out_loss" in record]
    assert [record["step"] for record in steps] == [0, 1, 2, 3, 0]  # appended
    assert [record["step"] for record in held_out] == [1, 3]
    saved = [record for record in records(file) if "checkpoint" in record]
    assert [record["step"] for record in saved] == [2, 3]
    assert all(is_in(record["checkpoint"]) and 0 < record["waited_s"] < 60 for record in saved)
    assert all(record["held_out_loss"] == pytest.approx(5.35, abs=0.3) for record in held_out)
    assert all(4 < record["entropy"] <= math.log(211) for record in held_out)
    assert steps[4]["loss"] == steps[0]["loss"] and steps[4]["gradient_norm"] == steps[0]["gradient_norm"]
    batch = load_manifest(program).inputs[0].shape
    meant = json.loads((program / "report.json").read_text())["report"]["predicted"]
    for record in steps:
        assert record["tokens_per_s"] == pytest.approx(2 * batch[0] * batch[1] / record["seconds"])
        assert record["lr"] == 1e-3 and record["mfu"] is None  # no CPU has a peak
        assert record["peak_memory_bytes"] > 2**20
        assert record["predicted"]["seconds"] == pytest.approx(2 * meant["step_time_s"])
        assert record["predicted"]["peak_memory_bytes"] == meant["allocated_memory_bytes"][0]
    (one,) = json.loads(history.read_text())
    assert one.keys() == {"loss", "gradient_norm", "seconds"} and one["loss"] == steps[4]["loss"]


@pytest.mark.slow
def test_accumulated_training_goes_on_where_it_was_in_the_data(pool: RankPool, program: Path, tmp_path: Path) -> None:
    run(pool, program, "--steps", 4, "--accumulate", 3, "--json", tmp_path / "whole.json")
    for steps, name in ((2, "first.json"), (4, "then.json")):
        options = ["--checkpoint", tmp_path / "ck", "--log-file", tmp_path / "log", "--json", tmp_path / name]
        run(pool, program, "--steps", steps, "--accumulate", 3, *options)
    whole, first, then = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("whole", "first", "then"))
    assert [each["loss"] for each in first + then] == [each["loss"] for each in whole]
    assert [each["step"] for each in records(tmp_path / "log") if "loss" in each] == [0, 1, 2, 3]


@pytest.mark.costly
def test_the_first_step_is_checked(pool: RankPool, program: Path) -> None:
    run(pool, program, "--check")
    stored = program / "check" / "first_step.json"
    text = stored.read_text()
    values = json.loads(text)
    try:
        stored.write_text(json.dumps({**values, "gradient_norm": values["gradient_norm"] * 1.01}))
        with pytest.raises(LaunchError, match=r"not the model's: gradient norm (\S+), the model's (\S+), which differ"):
            run(pool, program, "--check")
        stored.unlink()
        with pytest.raises(LaunchError, match="nothing is stored to compare with: compile with --check-values"):
            run(pool, program, "--check")
    finally:
        stored.write_text(text)


@pytest.mark.costly
def test_what_ranks_should_hold_alike_is_compared_every_few_steps(pool: RankPool, program: Path) -> None:
    script = program / "train.py"
    text = script.read_text()
    planted = "if step == 2 and pipeline.rank == 1: next(pipeline.parameters()).data[0] += 1e-3\n" + " " * 16
    run(pool, program, "--steps", 3, "--check-replicas", 1)
    try:
        script.write_text(text.replace("pipeline.zero_grad()", f"{planted}pipeline.zero_grad()"))
        with pytest.raises(
            LaunchError,
            match=r"(\S+) should be the same on all ranks of the dp_replicate axis, but ranks 0 and 1 have "
            "different values after 3 steps",
        ):
            run(pool, program, "--steps", 4, "--check-replicas", 3)
    finally:
        script.write_text(text)


@pytest.mark.costly
def test_what_cannot_be_done_is_refused_at_once(pool: RankPool, tmp_path: Path) -> None:
    folder = gp.partition(example("gpt"), gp.plan(example("gpt"), mesh={"dp_replicate": 2}), model_file=GPT).save(
        tmp_path / "out"
    )
    with pytest.raises(LaunchError, match="--eval"):
        run(pool, folder, "--eval-every", 5)
    for text in ("0", "-1", "1.5", "x"):
        with pytest.raises(Exception, match=f"it is {text}; it must be a whole number of at least 1"):
            count(text)
    assert count("12") == 12
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with pytest.raises(RuntimeProgramError, match="ReduceLROnPlateau, which needs a metric at each step"):
        build_lr_schedule(lr_scheduler.ReduceLROnPlateau, optimizer)


def _pipeline(program: Path) -> Any:
    groups: Any = SimpleNamespace(place={"pp": 0})
    return SimpleNamespace(
        reports=True,
        device=torch.device("cpu"),
        groups=groups,
        balance=lambda: Balance(groups, ""),
        program=load_manifest(program),
    )


@pytest.mark.costly
def test_nothing_is_read_between_the_steps_that_are_shown(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file has a line of a step before the next step begins."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    reads: list[int] = []
    stack = torch.stack
    monkeypatch.setattr(log_module.torch, "stack", lambda values: reads.append(len(values)) or stack(values))
    seen = []
    with Log(_pipeline(program), 7, every=3, file=tmp_path / "log") as log:
        for step in range(7):
            log.step(step, torch.tensor(float(step)), torch.tensor(1.0), optimizer)
            seen.append(len(records(tmp_path / "log")))
    assert reads == [6, 6, 2] and seen == [0, 0, 3, 3, 3, 6, 7]
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["2", "5", "6"]


@pytest.mark.costly
def test_on_a_gpu_of_the_plan_mfu_and_memory_stand_beside_what_is_predicted(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = json.loads((program / "report.json").read_text())
    kept["report"]["predicted"] |= {
        "device": "H200-SXM-141GB",
        "mfu": 0.5,
        "step_time_s": 0.2,
        "peak_memory_bytes": [4 * 2**30],
        "allocated_memory_bytes": [3 * 2**30],
    }
    (tmp_path / "plan.json").write_text((program / "plan.json").read_text())
    (tmp_path / "report.json").write_text(json.dumps(kept))
    pipeline = _pipeline(tmp_path)
    pipeline.device = torch.device("cuda")
    names = ["NVIDIA H200", "NVIDIA H100 80GB HBM3"]
    cuda = {
        "get_device_name": lambda _: names.pop(0),
        "max_memory_allocated": lambda _: 2**31,
        "reset_peak_memory_stats": lambda _: None,
    }
    for name, function in cuda.items():
        monkeypatch.setattr(log_module.torch.cuda, name, function)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    for file in (tmp_path / "same", tmp_path / "other"):
        with Log(pipeline, 1, file=file) as log:
            log.step(0, torch.tensor(1.0), torch.tensor(1.0), optimizer)
    (same,), (other,) = records(tmp_path / "same"), records(tmp_path / "other")
    assert same["mfu"] == pytest.approx(0.5 * 0.2 / same["seconds"]) and other["mfu"] is None
    assert same["predicted"]["here"] and not other["predicted"]["here"]
    line, elsewhere = capsys.readouterr().out.splitlines()
    assert "predicted 0.200 s" in line and line.endswith(", predicted 50.0%   memory 2.00 GiB, predicted 3.00 GiB")
    assert "predicted" not in elsewhere
