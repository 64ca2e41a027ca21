"""What the loop of train.py decides between steps is decided on all ranks in the same step, and again after a restart."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphpar.cli.main import main
from graphpar.frontend.modelfile import example_batch
from graphpar.runtime import LaunchError, load_manifest
from graphpar.runtime.checkpoints.folders import find, read_record
from tests.tools.programs import example_file
from tests.tools.rank_pool import RankPool

FILE = example_file("gpt")
MESHES = {"pp": "pp=2", "tp": "tp=2", "zero3": "dp_shard=2"}
LOSS = "loss = pipeline.step(batches, step=step)\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hooks")
    for name, mesh in MESHES.items():
        more = ["--zero", "3"] if name == "zero3" else []
        arguments = ["compile", str(FILE.path), "--mesh", mesh, *more, "--eval", "-o", str(folder / name)]
        assert main(arguments) == 0
    return folder


def planted(program: Path, line: str) -> Path:
    """A train.py with another line after the loss is known."""
    text = (program / "train.py").read_text()
    assert LOSS in text
    script = program / "planted.py"
    script.write_text(text.replace(LOSS, f"{LOSS}{' ' * 16}{line}\n"))
    return script


def run(pool: RankPool, script: Path, *options: Any, env: Mapping[str, str] | None = None) -> None:
    pool.torchrun(script, [str(option) for option in options], nproc=2, timeout_s=120, env=env)


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


NAN = 'if loss is not None and step in (1, 2): loss = loss * float("nan")'


@pytest.mark.costly
@pytest.mark.parametrize("name", MESHES)
def test_an_update_is_skipped_on_all_ranks(name: str, folder: Path, pool: RankPool, tmp_path: Path) -> None:
    """Under pp the first stage does not know the loss. Parameters are those of one device that skips the same updates."""
    program = folder / name
    script = planted(program, NAN)
    batch = example_batch(FILE, load_manifest(program).inputs)
    save_file(batch, tmp_path / "batch.safetensors")
    log, saved = tmp_path / "log.jsonl", tmp_path / "trained.safetensors"
    options = ["--steps", 4, "--lr", 1e-2, "--batch", tmp_path / "batch.safetensors", "--skip-spikes", "inf"]
    run(pool, script, *options, "--log-file", log, "--save", saved)
    assert [each.get("skipped") for each in records(log)] == [None, "the loss is nan", "the loss is nan", None]

    model = FILE.model()
    model.load_state_dict(load_file(program / "weights" / "model.safetensors"), strict=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids, labels = batch.values()
    for _ in range(2):
        FILE.loss_fn(model(ids), labels).backward()  # type: ignore[misc]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for key, value in load_file(saved).items():
        torch.testing.assert_close(value, model.state_dict()[key], rtol=1e-3, atol=5e-4)  # of updates of 1e-2

    with pytest.raises(LaunchError, match=r"of 2 steps in a row .*\(step 2: the loss is nan\), and --max-skips is 1"):
        run(pool, script, *options, "--max-skips", 1)
    if name == "tp":
        script.write_text(script.read_text().replace("training.accepts(loss, norm)", "True"))
        with pytest.raises(LaunchError, match=r"--skip-spikes has no effect in this loop: write `if training.accepts"):
            run(pool, script, *options)


@pytest.mark.costly
@pytest.mark.parametrize("name", ["pp", "zero3"])
def test_a_resumed_run_decides_as_one_that_was_not_interrupted(
    name: str, folder: Path, pool: RankPool, tmp_path: Path
) -> None:
    """Training ends when the held-out loss is no better, and the best checkpoint stays."""
    script = planted(folder / name, 'if loss is not None and step == 3: loss = loss * float("inf")')
    logs = []
    for kind, parts in (("whole", [12]), ("interrupted", [4, 12])):
        log, checkpoints = tmp_path / f"{kind}.jsonl", tmp_path / kind
        for steps in parts:
            options = ["--steps", steps, "--lr", 1e-2, "--warmup", 3, "--log-file", log, "--skip-spikes", 6]
            watching = ["--eval-every", 2, "--eval-batches", 2, "--patience", 3, "--keep-best", "--keep", 1]
            run(pool, script, *options, *watching, "--checkpoint", checkpoints)
        logs.append(records(log))
    losses = [
        [
            (each["step"], each["loss"], each["lr"], each.get("skipped"))
            for each in log
            if "loss" in each and each["loss"] < 9e9
        ]
        for log in logs
    ]
    held_out = [[(each["step"], each["held_out_loss"]) for each in log if "held_out_loss" in each] for log in logs]
    assert losses[0] == losses[1] and held_out[0] == held_out[1]
    assert [rate for *_, rate, _ in losses[0][:4]] == [2.5e-3, 5e-3, 7.5e-3, 1e-2]
    values = [value for _, value in held_out[0]]
    best = values.index(min(values))
    assert best == len(values) - 4 or len(values) == 6
    whole, interrupted = tmp_path / "whole", tmp_path / "interrupted"
    for checkpoints in (whole, interrupted):
        assert find(checkpoints / "best").name == str(held_out[0][best][0] + 1)
        kept = {find(checkpoints).name, find(checkpoints / "best").name, "latest", "best"}
        assert {path.name for path in checkpoints.iterdir()} == kept
    data = [dict(read_record(find(checkpoints))["data"]) for checkpoints in (whole, interrupted)]
    for each, checkpoints in zip(data, (whole, interrupted)):
        assert str(checkpoints) in each.pop("arguments")
    assert data[0] == data[1] and data[0]["spikes"]["skipped"] == 1 and data[0]["best"]["value"] == min(values)
    assert main(["checkpoint", "merge", str(whole / "best"), "-o", str(tmp_path / "best.safetensors")]) == 0


FAKES = {
    "wandb": """
import json, os
def write(*what):
    with open(os.environ["SEEN"], "a") as file:
        file.write(json.dumps(["wandb", int(os.environ["RANK"]), *what]) + "\\n")
class Run:
    def log(self, values, step): write("log", step, values)
    def finish(self): write("end")
def init(project, config):
    write("begin", project, config)
    return Run()
""",
    "mlflow": """
import json, os
def write(*what):
    with open(os.environ["SEEN"], "a") as file:
        file.write(json.dumps(["mlflow", int(os.environ["RANK"]), *what]) + "\\n")
def set_experiment(name): write("begin", name, {})
def start_run(): pass
def log_params(values): write("config", values)
def log_metrics(values, step): write("log", step, values)
def end_run(): write("end")
""",
}


@pytest.mark.costly
def test_loggers_see_every_step_once_and_on_one_rank(folder: Path, pool: RankPool, tmp_path: Path) -> None:
    for name, text in FAKES.items():
        (tmp_path / f"{name}.py").write_text(text)
    seen = tmp_path / "seen.jsonl"
    env = {"PYTHONPATH": str(tmp_path), "SEEN": str(seen)}
    options = ["--steps", 5, "--log-every", 2, "--eval-every", 4, "--wandb", "proj", "--mlflow", "exp"]
    run(pool, folder / "pp" / "train.py", *options, "--log-file", tmp_path / "log.jsonl", env=env)
    lines = [json.loads(line) for line in seen.read_text().splitlines()]
    assert {rank for _, rank, *_ in lines} == {1}  # of the last stage
    written = records(tmp_path / "log.jsonl")
    for kind, name in (("wandb", "proj"), ("mlflow", "exp")):
        own = [rest for each, _, *rest in lines if each == kind]
        assert own[0][:2] == ["begin", name] and own[-1] == ["end"]
        logged = [(step, values) for what, *rest in own if what == "log" for step, values in [rest]]
        assert [step for step, values in logged if "loss" in values] == list(range(5))
        assert [(step, values["held_out_loss"]) for step, values in logged if "held_out_loss" in values] == [
            (each["step"], each["held_out_loss"]) for each in written if "held_out_loss" in each
        ]
        assert [values["loss"] for _, values in logged if "loss" in values] == [
            each["loss"] for each in written if "loss" in each
        ]
    for name in ("tensorboard", *FAKES):
        if importlib.util.find_spec(name) is None:
            with pytest.raises(LaunchError, match=f"--{name} needs a package .* not installed: pip install {name}"):
                run(pool, folder / "pp" / "train.py", f"--{name}", tmp_path / "there")


@pytest.mark.costly
def test_a_condition_of_the_users_own_ends_all_ranks_together(folder: Path, pool: RankPool, tmp_path: Path) -> None:
    script = planted(folder / "pp", "training.end_if(loss is not None and step == 2)")
    run(pool, script, "--steps", 9, "--checkpoint", tmp_path / "ck", "--log-file", tmp_path / "log.jsonl")
    assert find(tmp_path / "ck").name == "3"
    assert [each["step"] for each in records(tmp_path / "log.jsonl") if "loss" in each] == [0, 1, 2]


@pytest.mark.costly
def test_a_rank_that_breaks_off_alone_is_named(folder: Path, pool: RankPool, tmp_path: Path) -> None:
    """Also where it waits for the others, to save."""
    run(pool, planted(folder / "tp", "if step == 1: break"), "--save", tmp_path / "all.safetensors")
    assert (tmp_path / "all.safetensors").is_file()
    script = planted(folder / "tp", "if step == 1 and pipeline.rank == 1: break")
    said = r"(rank 1 ended without an error|rank 1: this).* left its loop early.*training.end_if"
    with pytest.raises(LaunchError, match=said):
        run(pool, script, "--steps", 4, "--timeout", 3, "--save", tmp_path / "trained.safetensors")


@pytest.mark.costly
def test_steps_are_traced_garbage_is_collected_between_and_the_data_are_timed(
    folder: Path, pool: RankPool, tmp_path: Path
) -> None:
    program, traces = folder / "pp", tmp_path / "traces"
    script = planted(program, f'import gc; open("{tmp_path}/gc", "a").write(f"{{gc.isenabled()}} ")')
    head = "def random_example(generator: torch.Generator) -> dict[str, Tensor]:\n"
    script.write_text(script.read_text().replace(head, f"{head}    import time; time.sleep(0.01)\n"))
    options = ["--profile", "1-2", "--profile-folder", traces, "--gc-every", 2, "--log-file", tmp_path / "log.jsonl"]
    run(pool, script, "--steps", 4, *options)
    for rank in range(2):
        names = {event.get("name") for event in json.loads((traces / f"rank{rank}.json").read_text())["traceEvents"]}
        assert {"aten::linear", "aten::add_"} & names and [
            each for each in names if str(each).startswith("Optimizer.step")
        ]
    assert (tmp_path / "gc").read_text().split() == ["False"] * 8
    assert all(each["data_seconds"] >= 0.08 for each in records(tmp_path / "log.jsonl"))
    with pytest.raises(LaunchError, match="--memory-snapshot records allocations on GPUs, but these ranks are on CPUs"):
        run(pool, script, "--memory-snapshot", tmp_path / "memory")


@pytest.mark.costly
def test_a_schedule_of_the_model_file_and_one_of_the_flags_are_refused(folder: Path, pool: RankPool) -> None:
    file = folder / "zero3" / "optimizer.py"
    file.write_text("import torch\ndef lr_schedule(made): return torch.optim.lr_scheduler.ConstantLR(made)\n")
    try:
        with pytest.raises(
            LaunchError, match=r"the model file has an lr_schedule, .* leave --schedule and --warmup out"
        ):
            run(pool, folder / "zero3" / "train.py", "--warmup", 3)
    finally:
        file.unlink()
