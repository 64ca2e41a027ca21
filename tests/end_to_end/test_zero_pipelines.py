"""Sharded state under pipelines, over accumulated steps, and freed as asked: the numbers of one device, and the collectives of
the formulas on the wire."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import graphpar as gp
from tests import accumulation_fixture
from tests.end_to_end.test_zero import _partitioned
from tests.rank_pool import RankPool

SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "ZB-H1"]
STEPS = [False, True, True, False, True, False]
"""Which steps accumulate."""


class Layer(nn.Module):
    """Two products, neither of an even size."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 5), nn.Linear(5, 7)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(torch.tanh(self.up(h)))


class Tied(nn.Module):
    """Four blocks between two products with one weight, on the first stage and on the last; a frozen block; a scale without a dim."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 7)
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(7, 7)
        self.last.weight = self.first.weight
        self.layers[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for layer in self.layers:
            h = layer(h)
        return self.last(h * self.scale)


def _program() -> gp.Program:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 7, generator=generator), torch.randn(24, 7, generator=generator)
    return gp.export(Tied(), (x,), loss_fn=lambda o, y: nn.functional.mse_loss(o, y), targets=(y,))


def _parts(mesh: dict[str, int], microbatches: int, **asked: Any) -> gp.Parts:
    rows = 24 // (mesh.get("dp_shard", 1) * mesh.get("dp_replicate", 1))
    return _partitioned(_program(), mesh=mesh, microbatch_size=rows // microbatches, **asked)


def _by_hand(batches: list[dict[str, Tensor]]) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train in fp64 on one device, without graphpar: losses, norms and weights."""
    model = Tied().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=accumulation_fixture.LEARNING_RATE)
    losses, norms = [], []
    for batch, accumulate in zip(batches, STEPS):
        x, y = (batch[name].double() for name in ("x", "y"))
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        losses.append(loss.item())
        if not accumulate:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms, dict(model.state_dict())


def _trained(parts: gp.Parts, out: Path, pool: RankPool) -> list[dict[str, Any]]:
    """Run the steps on ranks, hold losses, norms and weights against the loop by hand, and return the ranks' reports."""
    folder = parts.save(out / "program", weights=Tied().state_dict())
    inputs = json.loads((folder / "plan.json").read_text())["interface"]["inputs"]
    x, y = (each["name"] for each in inputs)
    batches = []
    for step in range(len(STEPS)):
        generator = torch.Generator().manual_seed(100 + step)
        batches.append({name: torch.randn(24, 7, generator=generator) for name in ("x", "y")})
        save_file({x: batches[-1]["x"], y: batches[-1]["y"]}, out / f"batch_{step}.safetensors")
    (out / "job.json").write_text(json.dumps({"accumulate": STEPS}))
    ranks = parts.plan.mesh.size
    pool.torchrun(Path(accumulation_fixture.__file__), [str(folder), str(out)], nproc=ranks, timeout_s=200)
    reports = [json.loads((out / f"rank_{rank}.json").read_text()) for rank in range(ranks)]
    losses, norms, weights = _by_hand(batches)
    for report in reports:
        assert report["losses"] == pytest.approx(losses, rel=1e-5)
        assert report["norms"] == pytest.approx(norms, rel=1e-5)
        assert len(report["refused"]) == 2 * sum(STEPS)
        assert all("accumulate=True" in text for text in report["refused"])
    saved = load_file(out / "final.safetensors")
    for name, value in weights.items():
        torch.testing.assert_close(saved[name].double(), value, rtol=1e-5, atol=1e-6)
    return reports


# ---- what is sent, and that it is right whatever is accumulated --------------------------------------------------

UNITS, REDUCED = 5, 4  # the frozen block has no gradients to reduce
A_STAGE, REDUCED_OF = 3, (2, 3)  # of each of two stages

COUNTED: list[tuple[dict[str, int], int, dict[str, Any], int]] = [
    # mesh, microbatches, what is asked, all-gathers of a rank in a step
    ({"dp_shard": 2}, 3, {"zero": 2}, UNITS),
    ({"dp_shard": 2}, 2, {"zero": 3}, 2 * (2 * UNITS - 1)),
    ({"dp_shard": 2}, 2, {"reshard": "always"}, 2 * 2 * UNITS),
    ({"dp_shard": 2}, 3, {"reshard": "never"}, 3 * UNITS),
    ({"pp": 2, "dp_shard": 2}, 2, {"zero": 2}, A_STAGE),
    ({"pp": 2, "dp_shard": 2}, 3, {"zero": 3}, A_STAGE),
    ({"pp": 2, "dp_shard": 2}, 3, {"reshard": "always"}, 2 * 3 * A_STAGE),
    ({"pp": 2, "dp_shard": 2}, 2, {"schedule": "ZB-H1"}, A_STAGE),
]
MORE_COUNTED: list[tuple[dict[str, int], int, dict[str, Any], int]] = [
    ({"dp_shard": 2}, 1, {"zero": 2}, UNITS),
    ({"dp_shard": 2}, 1, {"zero": 3}, 2 * UNITS - 1),
    ({"dp_shard": 2}, 3, {"zero": 3}, 3 * (2 * UNITS - 1)),
    ({"dp_shard": 4}, 2, {"reshard": 2}, 2 * 2 * UNITS),
    ({"dp_replicate": 2, "dp_shard": 2}, 2, {"zero": 2}, UNITS),
    ({"pp": 2, "dp_shard": 2}, 1, {"schedule": "GPipe"}, A_STAGE),
    ({"pp": 2, "dp_shard": 2}, 4, {"schedule": "GPipe"}, A_STAGE),
    ({"pp": 2, "dp_replicate": 2, "dp_shard": 2}, 3, {}, A_STAGE),
]


def _check_counts(
    mesh: dict[str, int], microbatches: int, asked: dict[str, Any], gathers: int, out: Path, pool: RankPool
) -> None:
    parts = _parts(mesh, microbatches, **asked)
    reports = _trained(parts, out, pool)
    for rank, report in enumerate(reports):
        pipelined = parts.plan.mesh.pp > 1
        stage = rank // (parts.plan.mesh.size // 2)
        reductions = REDUCED_OF[stage] if pipelined else microbatches * REDUCED
        for accumulate, counts in zip(STEPS, report["counts"]):
            assert counts.get("all-gather") == gathers, (mesh, asked)
            assert counts.get("reduce-scatter", 0) == (0 if accumulate else reductions), (mesh, asked)


@pytest.mark.parametrize("case", range(len(COUNTED)))
def test_collectives_of_a_step(case: int, tmp_path: Path, pool: RankPool) -> None:
    _check_counts(*COUNTED[case], tmp_path, pool)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(MORE_COUNTED)))
def test_collectives_of_a_step_on_more_meshes(case: int, tmp_path: Path, pool: RankPool) -> None:
    _check_counts(*MORE_COUNTED[case], tmp_path, pool)


def test_replicas_and_one_device_accumulate(tmp_path: Path, pool: RankPool) -> None:
    for number, mesh in enumerate([{"dp_replicate": 2}, {"pp": 2}, {"dp_replicate": 2, "pp": 2}]):
        (tmp_path / str(number)).mkdir()
        _trained(_parts(mesh, 3), tmp_path / str(number), pool)
