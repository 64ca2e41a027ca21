"""What a step costs the host: how often it waits for the device, and how many operators it starts beside the model's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import graphpar as gp
from graphpar.runtime.errors import LaunchError
from tests.ranks import step_costs_script
from tests.tools.rank_pool import RankPool

ROWS, WIDTH, LAYERS = 8, 12, 4
MEASURED = 3
"""A step in which nothing is compared between ranks."""


class Model(nn.Module):
    """Layers of many small parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.middle(F.gelu(self.first(x)))
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return F.mse_loss(x, y)


def _batches() -> list[dict[str, Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [
        {name: torch.randn(ROWS, WIDTH, generator=made) for name in ("x", "y")} for _ in range(step_costs_script.STEPS)
    ]


def _trained(pool: RankPool, out: Path, how: str, mesh: dict[str, int], **options: Any) -> list[dict[str, Any]]:
    model, out = Model(), out / f"{how} {mesh}"
    out.mkdir()
    program = gp.export(Model, tuple(_batches()[0].values()))
    folder = gp.partition(program, gp.plan(program, mesh=mesh, **options)).save(
        out / "program", weights=model.state_dict()
    )
    for step, batch in enumerate(_batches()):
        save_file(batch, out / f"batch_{step}.safetensors")
    pool.torchrun(Path(step_costs_script.__file__), [str(folder), str(out), how], nproc=2, timeout_s=120)
    reports: list[dict[str, Any]] = [json.loads((out / f"rank_{rank}.json").read_text()) for rank in range(2)]
    losses = [next(loss for loss in at if loss is not None) for at in zip(*(each["losses"] for each in reports))]
    expected, weights = _eager(model)
    assert losses == pytest.approx(expected, rel=1e-5)
    found = load_file(out / "final.safetensors")
    for name, value in weights.items():
        assert torch.allclose(found[name], value, rtol=2e-5, atol=2e-6), name
    return reports


def _eager(model: Model) -> tuple[list[float], dict[str, Tensor]]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step, batch in enumerate(_batches()):
        if step == step_costs_script.STEPS - 1:
            model.middle.bias.requires_grad_(False)
        loss = model(**batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


@pytest.mark.parametrize(
    ("how", "mesh", "options"),
    [
        ("fused", {"dp_replicate": 2}, {"zero": 0}),
        ("plain", {"dp_replicate": 2}, {"zero": 0}),
        pytest.param("fused", {"dp_shard": 2}, {"zero": 1}, marks=pytest.mark.costly),
        pytest.param("fused", {"dp_shard": 2}, {"zero": 3}, marks=pytest.mark.costly),
        pytest.param("fused", {"tp": 2}, {}, marks=pytest.mark.costly),
        pytest.param("fused", {"pp": 2}, {}, marks=pytest.mark.costly),
    ],
    ids=str,
)
def test_a_step_reads_nothing_and_clips_in_a_few_operators(
    how: str, mesh: dict[str, int], options: dict[str, Any], tmp_path: Path, pool: RankPool
) -> None:
    for report in _trained(pool, tmp_path, how, mesh, **options):
        # of the presence of gradients in the step before, which the host has by then
        assert report["reads"][MEASURED].keys() <= {"tolist"} and report["reads"][MEASURED].get("tolist", 0) <= 1
        assert all(operators <= 30 for operators in report["clip"]), "clipping takes operators of each parameter"
        if how == "fused":
            assert report["optimizer"][MEASURED].get("_fused_adamw_") == 1


def test_a_gradient_that_one_rank_has_alone_is_refused(tmp_path: Path, pool: RankPool) -> None:
    with pytest.raises(LaunchError, match=r"others began or ceased to have a gradient of first\.bias"):
        _trained(pool, tmp_path, "one rank", {"dp_replicate": 2}, zero=0)
