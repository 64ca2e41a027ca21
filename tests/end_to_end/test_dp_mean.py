"""The loss as DDP has it: the mean of the replicas' own losses. Compared with DDP itself, and with one device."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor, nn

import graphpar as gp
from graphpar.errors import GraphparError
from graphpar.report.report import render
from graphpar.verification import reference_for, verify_all
from tests.ranks import ddp_script
from tests.tools.rank_pool import RankPool

ROWS, LENGTH, WORDS, RANKS = 8, 5, 11, 2
IGNORED = -100


class Layer(nn.Module):
    """A normalised product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.product = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.product(torch.tanh(self.norm(h)))


class Language(nn.Module):
    """Words to words."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, 6)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(6, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(self.words(x))
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def mean(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def total(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="sum")


def masked(output: Tensor, target: Tensor) -> Tensor:
    mask = (target != IGNORED).float()
    each = F.cross_entropy(output.flatten(0, 1), target.clamp(min=0).flatten(), reduction="none").view_as(mask)
    return (each * mask).sum() / mask.sum() + 0.1 * output.square().mean() + (each * mask).sum() / mask.sum().sqrt()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mean": mean, "total": total, "masked": masked}


def batch() -> tuple[Tensor, Tensor]:
    """Words, and targets of which the first replica ignores more than the second."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
    y = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)
    y[: ROWS // 2, 2:] = IGNORED
    y[-1, 0] = IGNORED
    return x, y


def parts_of(
    loss: Callable[[Tensor, Tensor], Tensor], mesh: dict[str, int], model: nn.Module | None = None, **asked: Any
) -> gp.Parts:
    x, y = batch()
    program = gp.export(model or Language(), (x,), loss_fn=loss, targets=(y,))
    return gp.partition(program, gp.plan(program, mesh=mesh, **{"microbatch_size": 2, **asked}))


CASES: dict[str, tuple[str, dict[str, int], bool]] = {
    "mean": ("mean", {"dp_replicate": 2}, True),
    "total": ("total", {"dp_replicate": 2}, True),
    "masked": ("masked", {"dp_shard": 2}, True),
    "of the global batch": ("mean", {"dp_replicate": 2}, False),
    "total of the global batch": ("total", {"dp_shard": 2}, False),
}


@pytest.mark.costly
def test_it_is_what_ddp_computes(pool: RankPool, tmp_path: Path) -> None:
    x, y = batch()
    for name, (loss, mesh, dp_mean) in CASES.items():
        parts, model = parts_of(LOSSES[loss], mesh, dp_mean=dp_mean), Language()
        parts.save(tmp_path / name / "program", weights=model.state_dict())
        torch.save((model, LOSSES[loss]), tmp_path / name / "model.pt")
        target = next(entry.name for entry in parts.program.inputs if entry.name != "x")
        save_file({"x": x, target: y}, tmp_path / name / "batch.safetensors")
    folders = [str(tmp_path / name) for name in CASES]
    pool.torchrun(Path(ddp_script.__file__), folders, nproc=RANKS, timeout_s=120)

    for name, (_, _, dp_mean) in CASES.items():
        for rank in range(RANKS):
            found = json.loads((tmp_path / name / f"{rank}.json").read_text())
            assert (found["difference"] < 1e-5) == dp_mean, (name, found)
            assert (found["loss"] == pytest.approx(found["ddp"], rel=1e-5)) == dp_mean, (name, found)
            if name == "total of the global batch":  # as many times as there are ranks
                assert found["loss"] == pytest.approx(RANKS * found["ddp"], rel=1e-5)


MESHES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp_replicate": 2}, {}),
    ({"dp_shard": 2}, {"zero": 1}),
    ({"dp_shard": 2}, {"zero": 3}),
]
MORE_MESHES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp_shard": 4}, {"zero": 2}),
    ({"dp_replicate": 2, "dp_shard": 2}, {}),
    ({"dp_replicate": 2, "tp": 2}, {}),
    ({"pp": 2, "dp_replicate": 2}, {"microbatch_size": 1}),
]


@pytest.mark.costly
def test_verify_compares_with_the_same_loss() -> None:
    model = Language(0.2)
    parts = [
        parts_of(LOSSES[loss], mesh, model, dp_mean=True, **asked)
        for loss, (mesh, asked) in zip(LOSSES, MESHES, strict=True)
    ]
    for outcome in verify_all(parts, 2, timeout_s=300):
        assert outcome.ok, outcome.problems


@pytest.mark.slow
def test_verify_on_more_meshes() -> None:
    models = {loss: Language(0.2) for loss in LOSSES}
    parts = [
        parts_of(LOSSES[loss], mesh, model, dp_mean=True, **asked)
        for mesh, asked in [*MESHES, *MORE_MESHES]
        for loss, model in models.items()
    ]
    for each, outcome in zip(parts, verify_all(parts, 2, timeout_s=600)):
        assert outcome.ok, (each.plan.mesh, outcome.problems)


@pytest.mark.costly
def test_a_program_of_the_other_loss_is_found(tmp_path: Path) -> None:
    parts = parts_of(mean, {"dp_replicate": 2}, dp_mean=True)
    folder = parts.save(tmp_path / "program")
    record = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(record | {"dp_mean": False}))

    (outcome,) = verify_all([folder], 2, references=[reference_for(parts, 2)])

    assert not outcome.ok


def _printed(parts: gp.Parts) -> str:
    console = Console(file=io.StringIO(), width=160)
    render(parts.report, console)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


@pytest.mark.costly
def test_it_is_said_and_kept(tmp_path: Path) -> None:
    parts = parts_of(mean, {"dp_replicate": 2}, dp_mean=True)

    assert "the mean of the replicas' own losses, as in DDP" in _printed(parts)
    assert "means over the replicas, each of its own rows, as in DDP" in " ".join(parts.files["train.py"].split())
    assert gp.Plan.from_json(json.loads(parts.files["plan.json"])).dp_mean
    other = parts_of(mean, {"dp_replicate": 2})
    assert "that of the global batch" in _printed(other)
    assert "Losses and gradients are those of the global batch." in " ".join(other.files["train.py"].split())


def test_what_cannot_be_is_refused() -> None:
    x = torch.randn(8, 6)
    norm = gp.export(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), (x,), loss_fn=lambda o: o.square().mean())
    with pytest.raises(GraphparError, match=r"batch_norm mixes examples.*over the rows of all replicas"):
        gp.plan(norm, mesh={"dp_replicate": 2}, dp_mean=True)
    plain = gp.export(nn.Linear(6, 6), (x,), loss_fn=lambda o: o.square().mean())
    with pytest.raises(GraphparError, match="needs mesh dp_replicate=2 or more"):
        gp.plan(plain, mesh={"tp": 2}, dp_mean=True)
    with pytest.raises(GraphparError, match="needs mesh dp_replicate=2 or more"):
        gp.plan(plain, dp_mean=True)
    assert gp.plan(plain, devices=2, dp_mean=True).mesh.replicas == 2  # searched among replicas
    with pytest.raises(GraphparError, match="dp_mean is for training"):
        gp.plan(gp.export(nn.Linear(6, 6), (x,), mode="infer"), mesh={"dp_replicate": 2}, dp_mean=True)
