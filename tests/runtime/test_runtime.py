"""The runtime runs hand-written programs and gives the numbers of the single-process model."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from graphpar.runtime import (
    LaunchError,
    Pipeline,
    RuntimeProgramError,
    load_manifest,
    sample_keys,
)
from graphpar.runtime.checkpoints import checkpoint
from graphpar.runtime.launching.launch import torchrun
from graphpar.runtime.launching.worker import JobResult, run_jobs
from graphpar.runtime.schedule_records import SCHEDULES
from graphpar.runtime.state import replicas
from graphpar.runtime.torch_versions import SPLITS_BACKWARD
from tests.ranks import runtime_script as fixture
from tests.tools.rank_pool import RankPool

STEPS, OPTIMIZER = 3, {"lr": 0.1, "momentum": 0.9}
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
LOOP, V = [0, 1, 0, 1], [0, 1, 1, 0]
UNEVEN = {  # ranks 0, 1, 1, 1: three stages on one rank, backwards interleaved with forwards
    "0": [*[f"0F{i}" for i in range(4)], *[f"0B{i}" for i in range(4)]],
    "1": [action for i in range(4) for action in (f"1F{i}", f"2F{i}", f"3F{i}", f"3B{i}", f"2B{i}", f"1B{i}")],
}
PROGRAMS = {
    "GPipe": {"stages": 2, "ranks": [0, 1]},
    "1f1b": {"stages": 2, "ranks": [0, 1]},
    "Interleaved1F1B": {"stages": 4, "ranks": LOOP},
    "LoopedBFS": {"stages": 4, "ranks": LOOP},
    "InterleavedZeroBubble": {"stages": 4, "ranks": LOOP},
    "ZBVZeroBubble": {"stages": 4, "ranks": V},
    "DualPipeV": {"stages": 4, "ranks": V},
    "table": {"stages": 4, "ranks": [0, 1, 1, 1], "actions": UNEVEN},
}


class Expected:
    """Losses, gradients, parameters and buffers of the single-process model."""

    def __init__(self) -> None:
        model, batch = fixture.reference(), fixture.batch()
        optimizer = torch.optim.SGD(model.parameters(), **OPTIMIZER)
        self.losses: list[float] = []
        self.tensors: dict[str, torch.Tensor] = {}
        for step in range(STEPS):
            loss = model(**batch, sample_keys=sample_keys(7, step, fixture.BATCH))
            loss.backward()
            self.losses.append(loss.item())
            for name, parameter in model.named_parameters(remove_duplicate=False):
                self.tensors[f"grad/{step}/{name}"] = parameter.grad.clone()
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.tensors[f"param/{name}"] = parameter.detach()


def make_job(folder: Path, program: Path, batch: dict[str, torch.Tensor] | None = None) -> Path:
    return fixture.make_job(folder, program, batch or fixture.batch(), STEPS, OPTIMIZER)


@pytest.fixture(scope="module")
def expected() -> Expected:
    return Expected()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JobResult]:
    """All two-rank jobs, in one launch (and a second one, after the job that breaks the first)."""
    root = tmp_path_factory.mktemp("jobs")
    jobs: dict[str, Path] = {}
    for name, options in PROGRAMS.items():
        schedule = (
            name if name.lower() in {row.name.lower() for row in SCHEDULES.values() if row.torch_class} else "1F1B"
        )
        jobs[name] = make_job(root / name, fixture.emit(root / f"{name}-out", schedule=schedule, **options))
    good = root / "GPipe-out"
    jobs["uneven batch"] = make_job(root / "uneven", good, {name: v[:7] for name, v in fixture.batch().items()})
    jobs["misplaced"] = make_job(
        root / "misplaced", fixture.emit(root / "misplaced-out", stages=4, ranks=LOOP, schedule="ZBVZeroBubble")
    )
    jobs["broken stage"] = make_job(
        root / "broken", fixture.emit(root / "broken-out", stages=2, ranks=[0, 1], schedule="GPipe", fail_in=1)
    )
    jobs["after the broken one"] = make_job(root / "after", good)
    return dict(zip(jobs, run_jobs(list(jobs.values()), world_size=2, timeout_s=150, group_timeout_s=30)))


@pytest.mark.parametrize("name", [*PROGRAMS, "after the broken one"])
def test_three_steps_equal_the_single_process_model(
    name: str, results: dict[str, JobResult], expected: Expected
) -> None:
    result = results[name]
    assert result.error is None
    assert result.missing_gradients == ((), ())
    assert result.losses == pytest.approx(expected.losses, rel=1e-5)
    seen: set[str] = set()
    for rank in range(2):
        for key, value in result.tensors(rank).items():  # "gain" is on both ranks, under one name
            if not key.startswith(("buffer/", "begun/")):
                seen.add(key)
                torch.testing.assert_close(value, expected.tensors[key], **TOLERANCE, msg=lambda m, k=key: f"{k}: {m}")
            elif key.startswith("buffer/") and key.endswith(".calls"):
                assert value == STEPS * fixture.MICROBATCHES
    assert seen == set(expected.tensors)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.startswith(("ZBV", "InterleavedZ", "DualPipeV"))])
def test_only_the_stage_that_uses_a_parameter_twice_has_a_whole_backward(
    name: str, results: dict[str, JobResult]
) -> None:
    assert results[name].whole_backward_stages == ((fixture.GAINED_TWICE,) if SPLITS_BACKWARD else (1, 2, 3))


@pytest.mark.parametrize("name", PROGRAMS)
def test_tied_copies_stay_bitwise_equal(name: str, results: dict[str, JobResult]) -> None:
    tensors = {key: value for rank in range(2) for key, value in results[name].tensors(rank).items()}
    assert torch.equal(tensors["param/wte.weight"], tensors["param/lm_head.weight"])
    assert torch.equal(*(results[name].tensors(rank)["param/gain"] for rank in range(2)))


def test_an_uneven_batch_is_refused_on_all_ranks_and_the_next_job_runs(results: dict[str, JobResult]) -> None:
    error = results["uneven batch"].error
    assert error is not None
    assert "input_ids has 7 rows along dim 0; the program expects 8 (4 microbatches of 2)" in error


def test_a_schedule_that_places_stages_elsewhere_is_refused(results: dict[str, JobResult]) -> None:
    error = results["misplaced"].error
    assert error is not None
    assert "places stages on ranks [0, 1, 1, 0]; the plan places them on [0, 1, 0, 1]" in error


def test_a_failing_stage_ends_its_launch_with_its_own_message(results: dict[str, JobResult]) -> None:
    assert results["broken stage"].error == "rank 1: FloatingPointError: the bearings are too hot"


def test_accumulation_clipping_evaluation_saving_and_inference(
    tmp_path: Path, expected: Expected, pool: RankPool
) -> None:
    program = fixture.emit(tmp_path / "out", stages=4, ranks=V, schedule="ZBVZeroBubble")
    inference = fixture.emit(tmp_path / "inference", stages=4, ranks=LOOP, infer=True)
    pool.torchrun(Path(fixture.__file__), [str(program), str(inference), str(tmp_path)], nproc=2, timeout_s=180)
    seen = [json.loads((tmp_path / f"drive_{rank}.json").read_text()) for rank in range(2)]
    model = fixture.reference()
    keys = sample_keys(0, 0, fixture.BATCH)
    for _ in range(2):
        loss = model(**fixture.batch(), sample_keys=keys)
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert [values["norm"] for values in seen] == pytest.approx([norm.item()] * 2, rel=1e-5)
    assert [values["clipped"] for values in seen] == pytest.approx([0.5] * 2, rel=1e-4)
    assert seen[0]["losses"] == seen[1]["losses"] == pytest.approx([loss.item()] * 2, rel=1e-5)
    assert seen[0]["eval"] == pytest.approx({"loss": loss.item()}, rel=1e-5)
    assert seen[1]["eval"] == {}
    for values in seen:
        assert "ranks 0 and 1 got different values of target" in values["wrong"]
        assert "rank 1: the input input_ids has 7 rows" in values["uneven"]
        for name, total in values["grads"].items():
            assert total == pytest.approx(model.get_parameter(name).grad.sum().item(), rel=1e-2, abs=1e-4)
    saved = load_file(tmp_path / "saved.safetensors")
    assert {name: value.shape for name, value in saved.items()} == {
        name: value.shape for name, value in model.state_dict().items()
    }
    assert [values["whole"] for values in seen] == ([[], [2]] if SPLITS_BACKWARD else [[3], [1, 2]])
    with torch.no_grad():
        logits = fixture.reference()(fixture.batch()["input_ids"], None, keys)
    torch.testing.assert_close(load_file(tmp_path / "outputs.safetensors")["logits"], logits, **TOLERANCE)
    model.load_state_dict(saved, strict=True)
    for name, value in fixture.reference().named_parameters():
        assert torch.equal(model.get_parameter(name), value)


@pytest.mark.costly
def test_the_training_script_trains(tmp_path: Path) -> None:
    program = fixture.emit(tmp_path / "my-program.1", stages=2, ranks=[0, 1])
    save_file(fixture.batch(), str(tmp_path / "batch.safetensors"))
    files = [f"--batch={tmp_path}/batch.safetensors", f"--save={tmp_path}/trained.safetensors"]
    result = torchrun(
        program / "train.py",
        ["--steps=3", "--lr=0.01", f"--json={tmp_path}/history.json", *files],
        nproc=2,
        timeout_s=180,
    )
    history = json.loads((tmp_path / "history.json").read_text())
    assert result.stdout.count("loss") == len(history) == 3
    model = fixture.reference()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step, record in enumerate(history):
        loss = model(**fixture.batch(), sample_keys=sample_keys(0, step, fixture.BATCH))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert record == pytest.approx({"loss": loss.item(), "gradient_norm": norm.item()}, rel=1e-4)
    trained = load_file(tmp_path / "trained.safetensors")
    assert torch.equal(trained["wte.weight"], trained["lm_head.weight"])
    assert not torch.equal(trained["wte.weight"], fixture.reference().wte.weight)
    assert not list(program.rglob("__pycache__"))


@pytest.mark.costly
def test_a_launch_with_another_number_of_ranks_tells_the_user(tmp_path: Path) -> None:
    program = fixture.emit(tmp_path / "out", stages=2, ranks=[0, 1])
    with pytest.raises(LaunchError, match=r"runs on 2 ranks .* torchrun --nproc-per-node 2 \S*out/train.py") as caught:
        torchrun(program / "train.py", nproc=1, timeout_s=180)
    assert caught.value.user
    assert caught.value.rank is None  # all of them say so


@pytest.mark.costly
def test_a_launch_that_takes_too_long_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "sleep.py"
    script.write_text(f"import os, pathlib, time\npathlib.Path({str(tmp_path)!r}, f'{{os.getpid()}}.pid').touch()\n"
                      "time.sleep(600)\n")  # fmt: skip
    started = time.monotonic()
    with pytest.raises(LaunchError, match="did not finish within 6 s"):
        torchrun(script, nproc=1, timeout_s=6)
    assert time.monotonic() - started < 60
    pids = [int(path.stem) for path in tmp_path.glob("*.pid")]  # none where a busy machine had not started it by then
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.fixture
def alone() -> object:
    """A process group of one in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_one_stage_needs_no_other_rank(alone: object, tmp_path: Path, expected: Expected) -> None:
    pipeline = Pipeline(fixture.emit(tmp_path / "out", stages=1, ranks=[0]), seed=7)
    pipeline.load_weights()
    assert pipeline.stages[0].lm_head.weight is pipeline.stages[0].wte.weight
    optimizer = torch.optim.SGD(pipeline.parameters(), **OPTIMIZER)
    losses = []
    for step in range(STEPS):
        losses.append(pipeline.step(fixture.batch()).item())
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter.grad, expected.tensors[f"grad/{step}/{name}"], **TOLERANCE)
        optimizer.step()
        pipeline.zero_grad()
    assert losses == pytest.approx(expected.losses, rel=1e-5)


def test_another_number_of_ranks_is_an_error_with_both_numbers(alone: object, tmp_path: Path) -> None:
    program = fixture.emit(tmp_path / "out", stages=2, ranks=[0, 1])
    with pytest.raises(RuntimeProgramError, match=r"runs on 2 ranks \(pp=2\), but 1 was started"):
        Pipeline(program)


def test_missing_and_misshapen_weights_are_named(alone: object, tmp_path: Path) -> None:
    pipeline = Pipeline(fixture.emit(tmp_path / "out", stages=1, ranks=[0]))
    state = load_file(tmp_path / "out" / "weights" / "model.safetensors")
    state["h.1.proj.bais"] = state.pop("h.1.proj.bias")
    save_file(state, str(tmp_path / "wrong.safetensors"))
    with pytest.raises(RuntimeProgramError, match=r"no value for h.1.proj.bias. Did you mean 'h.1.proj.bais'\?"):
        pipeline.load_weights(tmp_path / "wrong.safetensors")
    state["h.1.proj.bias"] = torch.zeros(3)
    save_file(state, str(tmp_path / "wrong.safetensors"))
    with pytest.raises(RuntimeProgramError, match=r"h.1.proj.bias \(expected \(16,\), found \(3,\)\)"):
        pipeline.load_weights(tmp_path / "wrong.safetensors")
    with pytest.raises(RuntimeProgramError, match="there is no weight file"):
        pipeline.load_weights(tmp_path / "nowhere.safetensors")
    state["h.1.proj.bias"] = torch.zeros(16)
    save_file(state, str(tmp_path / "more.safetensors"))
    with pytest.raises(
        RuntimeProgramError, match=r"no stage of the program takes: h.1.proj.bais. Did you mean 'h.1.proj.bias'\?"
    ):
        pipeline.load_weights(tmp_path / "more.safetensors")
    pipeline.load_weights(tmp_path / "more.safetensors", strict=False)


def test_a_file_with_two_values_for_one_tensor_is_refused(alone: object, tmp_path: Path) -> None:
    pipeline = Pipeline(fixture.emit(tmp_path / "out", stages=1, ranks=[0]))
    state = load_file(tmp_path / "out" / "weights" / "model.safetensors")
    tied = state.pop("lm_head.weight", None)
    tied = state["wte.weight"] if tied is None else tied
    save_file(state | {"wte.weight": tied, "lm_head.weight": tied.clone()}, str(tmp_path / "same.safetensors"))
    pipeline.load_weights(tmp_path / "same.safetensors")
    save_file(state | {"wte.weight": tied, "lm_head.weight": tied + 1}, str(tmp_path / "other.safetensors"))
    with pytest.raises(RuntimeProgramError, match=r"different values for lm_head.weight than for wte.weight"):
        pipeline.load_weights(tmp_path / "other.safetensors")


def test_a_checkpoint_saved_beside_training_has_the_values_of_its_step(alone: object, tmp_path: Path) -> None:
    """The thread that writes is held back until the next steps have changed every tensor."""
    pipeline = Pipeline(fixture.emit(tmp_path / "out", stages=1, ranks=[0]), seed=7)
    pipeline.load_weights()
    optimizer = torch.optim.SGD(pipeline.parameters(), **OPTIMIZER)

    def train(step: int) -> None:
        pipeline.step(fixture.batch(), step=step)
        optimizer.step()
        pipeline.zero_grad()

    train(0)
    expected = {name: value.clone() for name, value in pipeline.state_dict().items()}
    changed, write = threading.Event(), checkpoint.BoxWriter.write_data

    def held_back(*args: Any) -> Any:
        assert changed.wait(30)
        return write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.BoxWriter, "write_data", held_back)
        pipeline.save_checkpoint(tmp_path / "ckpt" / "1", optimizer, step=1, wait=False)
        train(1)
        changed.set()
        pipeline.synchronize()
        found = pipeline.load_checkpoint(tmp_path / "ckpt", optimizer)

    assert found.step == 1
    assert all(torch.equal(value, expected[name]) for name, value in pipeline.state_dict().items())


def test_what_fails_beside_training_is_said_by_the_next_call(
    alone: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    pipeline = Pipeline(fixture.emit(tmp_path / "out", stages=1, ranks=[0]), seed=7)
    pipeline.load_weights()
    monkeypatch.setattr(checkpoint.BoxWriter, "write_data", full)
    pipeline.save_checkpoint(tmp_path / "ckpt" / "1", step=1, wait=False)
    with pytest.raises(
        RuntimeProgramError,
        match=r"ckpt/1 can't be saved: rank 0: \[Errno 28\] No space left on device \([\d,.]+ MiB are free there\)",
    ):
        pipeline.close()
    assert list((tmp_path / "ckpt").iterdir()) == []


def test_a_batch_with_other_names_or_dtypes_is_refused(alone: object, tmp_path: Path) -> None:
    pipeline = Pipeline(fixture.emit(tmp_path / "out", stages=1, ranks=[0]))
    batch = fixture.batch()
    with pytest.raises(RuntimeProgramError, match="the batch has no target"):
        pipeline.step({"input_ids": batch["input_ids"]})
    with pytest.raises(RuntimeProgramError, match=r"has no input 'targets'. Did you mean 'target'\?"):
        pipeline.step({**batch, "targets": batch["target"]})
    with pytest.raises(RuntimeProgramError, match=r"input_ids is torch.float32; the program expects torch.int64"):
        pipeline.step({**batch, "input_ids": batch["input_ids"].float()})
    length = batch["input_ids"].shape[1]
    shorter, longer = (
        {**batch, "input_ids": torch.zeros(len(batch["input_ids"]), length + more).long()} for more in (-1, 1)
    )
    said = rf"traced with {length} along dim 1, not {length - 1}; pad it to {length} .*, or compile the model with example inputs"
    with pytest.raises(RuntimeProgramError, match=said):
        pipeline.step(shorter)
    with pytest.raises(
        RuntimeProgramError, match=rf"dim 1, not {length + 1}; compile the model with example inputs of that size"
    ):
        pipeline.step(longer)


def test_a_broken_plan_says_what_is_broken(tmp_path: Path) -> None:
    program = fixture.emit(tmp_path / "out", stages=2, ranks=[0, 1])
    plan = json.loads((program / "plan.json").read_text())
    (program / "plan.json").write_text(json.dumps({**plan, "global_batch": 9}))
    with pytest.raises(
        RuntimeProgramError, match=r"plan\.json is broken: 4 microbatches of 2 are not a global batch of 9"
    ):
        load_manifest(program)
    (program / "plan.json").write_text(json.dumps({**plan, "recompute": "full"}))
    with pytest.raises(RuntimeProgramError, match="recompute is 'full', but no stage recomputes"):
        load_manifest(program)
    plan["interface"]["stages"][1]["recomputes"] = True
    (program / "plan.json").write_text(json.dumps({**plan, "recompute": "none"}))
    with pytest.raises(RuntimeProgramError, match="recompute is 'none', but stage 1 recomputes"):
        load_manifest(program)
    del plan["schedule"]
    (program / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(RuntimeProgramError, match="the field 'schedule' is missing"):
        load_manifest(program)


def test_sample_keys_depend_on_seed_step_and_example_alone() -> None:
    keys = sample_keys(3, 5, 64)
    assert keys.dtype == torch.int64
    assert torch.equal(keys[:8], sample_keys(3, 5, 8))
    assert len(set(keys.tolist() + sample_keys(3, 6, 64).tolist() + sample_keys(4, 5, 64).tolist())) == 3 * 64
    bits = torch.stack([(sample_keys(0, 0, 4096) >> bit) & 1 for bit in range(64)]).float().mean(1)
    assert (bits - 0.5).abs().max() < 0.05


def test_ranks_with_another_copy_of_the_program_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = load_manifest(fixture.emit(tmp_path / "program", stages=2, ranks=[0, 1], schedule="GPipe"))
    everyone = []

    def gathered(own: dict[str, str]) -> list[dict[str, str]]:
        everyone.append(own)
        return everyone

    monkeypatch.setattr(replicas, "gather_objects", gathered)
    replicas.check_program(program)
    (program.folder / "stage_1.py").write_text("# changed on this node\n")
    with pytest.raises(RuntimeProgramError, match=r"ranks 0 and 1 run different programs: their stage_1.py differs"):
        replicas.check_program(program)
