"""A model that computes something else in evaluation: ``pipeline.eval`` of a program for training is ``model.eval()`` on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import graphpar as gp
from graphpar.ir.program import Program
from graphpar.runtime.manifest import load_manifest
from tests.models import training_loop_model, two_modes
from tests.ranks import two_modes_script
from tests.tools.rank_pool import RankPool

FAST: dict[str, dict[str, Any]] = {
    "language, pp": {"mesh": {"pp": 2}},
    "averaged, tp": {"mesh": {"tp": 2}},
    "scaled, tp": {"mesh": {"tp": 2}},
    "early, dp_shard": {"mesh": {"dp_shard": 2}, "zero": 3},
}
SLOW: dict[str, dict[str, Any]] = {
    "language, tp": {"mesh": {"tp": 2}},
    "language, dp_shard": {"mesh": {"dp_shard": 2}, "zero": 3, "prefetch": "pre"},
    "language, cp": {"mesh": {"cp": 2}},
    "scaled, cp": {"mesh": {"cp": 2}},
    "early, pp": {"mesh": {"pp": 2}},
    "averaged, pp": {"mesh": {"pp": 2}},
    "averaged, dp_shard": {"mesh": {"dp_shard": 2}, "zero": 1},
    "routed, pp": {"mesh": {"pp": 2}},
    "routed, tp": {"mesh": {"tp": 2}},
    "routed, dp_shard": {"mesh": {"dp_shard": 2}, "zero": 2},
    "routed, cp": {"mesh": {"cp": 2}},
    "batch_norm, dp_shard": {"mesh": {"dp_shard": 2}, "zero": 3, "microbatch_size": 4},
    "batch_norm, pp": {"mesh": {"pp": 2}, "microbatch_size": 8},
    "batch_norm, tp": {"mesh": {"tp": 2}, "microbatch_size": 8},
    "instance_norm, pp": {"mesh": {"pp": 2}, "microbatch_size": 8},
    "instance_norm, dp_shard": {"mesh": {"dp_shard": 2}, "zero": 3, "microbatch_size": 4},
}


def exported(name: str) -> Program:
    build, loss_fn = two_modes.MODELS[name]
    batch = two_modes.example()
    torch.manual_seed(0)
    if loss_fn is None:
        return gp.export(build(), tuple(batch.values()), evaluates=True)
    return gp.export(build(), (batch["x"],), loss_fn=loss_fn, targets=(batch["labels"],), evaluates=True)


def evaluated(name: str, weights: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what one device computes in evaluation: the loss and the logits."""
    build, loss_fn = two_modes.MODELS[name]
    model = build()
    model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        if loss_fn is None:
            found: dict[str, Tensor] = model.eval()(**batch)
            return found
        logits = model.eval()(batch["x"])
        return {"loss": loss_fn(logits, batch["labels"]), "logits": logits}


def run(pool: RankPool, root: Path, cases: dict[str, dict[str, Any]]) -> None:
    batch = two_modes.example()
    for case, asked in cases.items():
        program = exported(case.partition(",")[0])
        assert program.source is not None
        out = gp.partition(program, gp.plan(program, **asked)).save(root / case)
        assert load_manifest(out).evaluates_apart, load_manifest(out).no_eval
        state = program.source.model.state_dict()
        held = {name for names in load_manifest(out).ties for name in names[1:]}
        save_file({name: value for name, value in state.items() if name not in held}, out / "weights.safetensors")
        save_file(batch, out / "batch.safetensors")
    pool.torchrun(Path(two_modes_script.__file__), [str(root)], nproc=2, timeout_s=500)
    ranks = [torch.load(root / f"rank_{rank}.pt") for rank in range(2)]
    for case in cases:
        weights, after, straight = (
            load_file(root / case / f"{name}.safetensors") for name in ("two", "three", "straight")
        )
        assert all(torch.equal(value, straight[name]) for name, value in after.items()), case
        assert any(not torch.equal(value, weights[name]) for name, value in after.items()), case
        expected = evaluated(case.partition(",")[0], weights, batch)
        last = [rank[case] for rank in ranks if rank[case]["plain"] is not None]
        assert len(last) == (1 if "pp" in case else 2)
        for found in last:
            check(case, found, expected, batch)


def check(case: str, found: dict[str, Any], expected: dict[str, Tensor], batch: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found["plain"]["loss"], expected["loss"], rtol=1e-5, atol=1e-6, msg=case)
    logits = expected["logits"]
    (name,) = set(found["whole"]) - {"loss", "accuracy"}
    torch.testing.assert_close(found["whole"][name], torch.cat([logits, logits]), rtol=1e-4, atol=1e-5, msg=case)
    right, count = two_modes_script.accuracy({name: logits}, batch)
    assert float(found["whole"]["accuracy"]) == pytest.approx(float(right / count)), case


@pytest.mark.costly
def test_evaluation_of_a_model_with_two_modes(tmp_path: Path, pool: RankPool) -> None:
    run(pool, tmp_path, FAST)


@pytest.mark.slow
def test_evaluation_of_models_with_two_modes_on_every_axis(tmp_path: Path, pool: RankPool) -> None:
    run(pool, tmp_path, SLOW)


def parts_of(mesh: dict[str, int]) -> gp.Parts:
    program = exported("language")
    return gp.partition(program, gp.plan(program, mesh=mesh))


def edit(parts: gp.Parts, file: str, before: str, after: str) -> None:
    """Change what a file's classes compute in evaluation."""
    head, method, text = parts.files[file].partition("def evaluated(")
    assert before in text
    parts.files[file] = head + method + text.replace(before, after, 1)


@pytest.mark.costly
def test_a_fault_in_evaluation_alone_is_found_by_verify() -> None:
    parts = parts_of({"pp": 2})
    edit(parts, "stage_1.py", " * self.scale", " * (self.scale + 0.01)")
    found = gp.verify(parts, steps=1)
    assert not found.ok
    assert found.max_error["gradient"] < 1e-5 < found.max_error["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("asked", [{"mesh": {"pp": 2}}, {"mesh": {"tp": 2}}, {"mesh": {"dp_shard": 2}, "zero": 3}])
def test_what_draws_in_evaluation_draws_as_one_device_does(asked: dict[str, Any]) -> None:
    program = exported("noisy")
    parts = gp.partition(program, gp.plan(program, **asked))
    assert load_manifest(parts.folder).evaluates_apart
    assert gp.check(parts).ok and gp.verify(parts, steps=1).ok


@pytest.mark.costly
def test_types_of_evaluation_are_checked() -> None:
    parts = parts_of({"tp": 2})
    edit(parts, "blocks.py", 'all_reduce(out, "tp")', "out")
    (problem,) = gp.check(parts).problems
    assert problem.startswith("stage 0, blocks.py:") and "P" in problem


def test_a_split_that_evaluation_can_not_follow_is_told() -> None:
    class Backwards(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers if self.training else reversed(self.layers):
                x = layer(x).relu()
            return x.square().mean()

    program = gp.export(Backwards(), (torch.zeros(4, 8),), evaluates=True)
    assert gp.partition(program, gp.plan(program, mesh={"tp": 2})).compilation.emitted[0].no_eval is None
    reason = gp.partition(program, gp.plan(program, mesh={"pp": 2})).compilation.emitted[0].no_eval
    assert reason is not None
    assert (
        "layers.1.weight is applied to what stage 1 computes, but stage 0 holds it (layers.1, test_two_modes.py:"
        in reason
    )


@pytest.mark.costly
def test_a_buffer_of_another_stage_is_not_read_in_evaluation() -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
            self.seen = torch.nn.Buffer(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.seen.add_(1)
            for layer in self.layers:
                x = layer(x).relu()
            return (x / (1 + self.seen)).square().mean()

    program = gp.export(Counting(), (torch.zeros(4, 8),), evaluates=True)
    found = {
        pp: gp.partition(program, gp.plan(program, mesh={"pp": pp})).compilation.emitted[0].no_eval for pp in (1, 2)
    }
    assert found[1] is None
    assert "in evaluation mode stage 1 reads seen, which another stage writes in training" in str(found[2])


def test_dropout_and_batch_norm_alone_are_no_second_program() -> None:
    batch = torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64)
    program = gp.export(
        training_loop_model.Net(), batch[:1], None, training_loop_model.loss_fn, batch[1:], evaluates=True
    )
    assert program.evaluated is None and program.no_eval is None


class Mode(torch.nn.Module):
    """``kind``: what evaluation does that a program can't have."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, torch.nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.training:
            return y.square().mean()
        if self.kind == "no loss":
            return y
        if self.kind == "writes":
            self.calls.add_(1)
        if self.kind == "fails":
            raise ValueError("not there")
        return y.square().mean() * 2


@pytest.mark.costly
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("no loss", "in evaluation mode the model returns no loss"),
        ("writes", "in evaluation mode the model writes the buffer 'calls'"),
        ("fails", "the model can't be traced in evaluation mode: not there"),
    ],
)
def test_what_a_program_can_not_have_of_evaluation_is_refused_there(kind: str, reason: str) -> None:
    program = gp.export(Mode(kind), (torch.zeros(4, 8),), evaluates=True)
    assert program.evaluated is None
    assert program.no_eval == f"the program can't evaluate: {reason}"
