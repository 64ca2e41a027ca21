"""Branches on values: the program has those of the example inputs; a step that takes another ends on all ranks, without an update."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import graphpar as gp
from graphpar.runtime import Pipeline, RuntimeProgramError, start
from graphpar.verification import verify_all
from tests.ranks import several_batches_script as script
from tests.tools.parity import LR, MOMENTUM
from tests.tools.rank_pool import RankPool

PADDING = 1
MESHES = {
    "pp": {"mesh": {"pp": 2}, "microbatch_size": 2},
    "tp": {"mesh": {"tp": 2}, "microbatch_size": 2},
    "replicas": {"mesh": {"dp_replicate": 2}, "microbatch_size": 2},
    "shards": {"mesh": {"dp_shard": 2}, "zero": 3, "recompute": "full"},
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            x = x.masked_fill(mask[..., None], 0.0)
        x = x + self.down(F.gelu(self.up(x)))
        if not x.isfinite().all():
            raise FloatingPointError("not finite")
        return x


class Padded(nn.Module):
    """Asks whether there is padding, as fairseq's ESM, where it begins, and on the last stage whether labels are known."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(32, 16), nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        mask = ids.eq(PADDING)
        if not mask.any():
            mask = None
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
    assert labels.max().item() < 32
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def batch_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(2, 32, (8, 6), generator=generator) for name in ("ids", "labels")}


@pytest.fixture(scope="module")
def program() -> gp.Program:
    torch.manual_seed(0)
    example = batch_of(0)
    return gp.export(Padded(), (example["ids"],), loss_fn=loss_fn, targets=(example["labels"],), evaluates=True)


def test_what_the_program_says_of_them(program: gp.Program) -> None:
    lines = [line for line in program.warnings if "for the example inputs" in line]

    assert [line.partition(" (")[0] for line in lines] == [
        "`mask.any()`", "`x.isfinite().all()`", "`labels.max().item() < 32`"
    ]  # fmt: skip
    assert "(layers.0 and 3 more, test_branches.py:" in lines[1] and "is True for the example inputs" in lines[1]
    assert len(program.branches) == 6 and "layers.3.other_branch_0" in program.branches
    assert not program.couplings and not program.steady


@pytest.mark.costly
def test_numbers_are_those_of_the_model(program: gp.Program) -> None:
    reports = verify_all([gp.partition(program, gp.plan(program, **options)) for options in MESHES.values()])

    for report in reports:
        assert report.ok, report.to_json()


@pytest.mark.costly
@pytest.mark.parametrize("name", MESHES)
def test_a_step_with_another_branch_on_one_rank_ends_on_all(
    pool: RankPool, tmp_path: Path, program: gp.Program, name: str
) -> None:
    folder = gp.partition(program, gp.plan(program, **MESHES[name])).save(tmp_path / "out")
    torch.manual_seed(0)
    model = Padded()
    save_file(model.state_dict(), folder / "initial.safetensors")
    good, bad = batch_of(1), batch_of(2)
    bad["ids"][-1, 3] = PADDING  # of the last replica, and its last microbatch
    files = [str(tmp_path / f"{i}.safetensors") for i in range(2)]
    for file, batch in zip(files, (good, bad)):
        save_file(batch, file)
    (tmp_path / "jobs.json").write_text(
        json.dumps([{"program": str(folder), "steps": [[files[0]], [files[1]], [files[0]]]}])
    )

    pool.torchrun(Path(script.__file__), [str(tmp_path / "jobs.json")], nproc=2, timeout_s=120)

    report = json.loads((folder / "trained.json").read_text())
    assert len(report["losses"]) == 1  # and none of the steps after it
    assert (
        report["refused"].startswith(
            "a branch on values is not that of the example inputs: `mask.any()` (test_branches.py:"
        )
        and "is not False" in report["refused"]
    )
    stepped = copy.deepcopy(model)
    optimizer = torch.optim.SGD(stepped.parameters(), lr=LR, momentum=MOMENTUM)
    loss_fn(stepped(good["ids"]), good["labels"]).backward()
    optimizer.step()
    trained = load_file(folder / "trained.safetensors")
    assert trained.keys() == model.state_dict().keys()  # no flags
    for key, value in stepped.state_dict().items():
        torch.testing.assert_close(trained[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_inference_and_evaluation_check_too(tmp_path: Path, program: gp.Program, mode: str) -> None:
    good, bad = batch_of(0), batch_of(0)
    bad["ids"][0, 0] = PADDING
    if mode == "infer":
        program = gp.export(Padded(), (good["ids"],), mode="infer")
        del good["labels"], bad["labels"]
    folder = gp.partition(program, gp.plan(program, microbatch_size=4)).save(tmp_path / "out")
    save_file(Padded().state_dict(), tmp_path / "weights.safetensors")

    with start() as ranks, Pipeline(folder, ranks.device) as pipeline:
        pipeline.load_weights(tmp_path / "weights.safetensors")
        run = pipeline.eval if mode == "train" else pipeline.infer
        first = run(good)
        with pytest.raises(RuntimeProgramError, match=r"a branch on values.*`mask.any\(\)`"):
            run(bad)
        again = run(good)

    assert first is not None and again is not None
    assert all(torch.equal(value, again[name]) for name, value in first.items())


def test_a_branch_is_checked_once_for_steps_that_accumulate(tmp_path: Path, program: gp.Program) -> None:
    good, bad = batch_of(0), batch_of(0)
    bad["ids"][0, 0] = PADDING
    folder = gp.partition(program, gp.plan(program, microbatch_size=4)).save(tmp_path / "out")
    save_file(Padded().state_dict(), tmp_path / "weights.safetensors")

    with start() as ranks, Pipeline(folder, ranks.device) as pipeline:
        pipeline.load_weights(tmp_path / "weights.safetensors")
        pipeline.step(bad, accumulate=True)
        with pytest.raises(RuntimeProgramError, match="a branch on values"):
            pipeline.step(good)
        assert all(parameter.grad is None for parameter in pipeline.parameters())
        pipeline.assert_idle()
        assert pipeline.step(good) is not None
