"""Ranks whose kernels round apart, as those of GPUs may: what they should hold alike stays so, and they choose the same experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import graphpar as gp
from tests.ranks import noise_script
from tests.tools.rank_pool import RankPool

STEPS = {"tp": 200, "zero 1": 20, "zero 3": 20}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (3, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        y: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(12)
        self.up, self.down = nn.Linear(12, 48), nn.Linear(48, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """Three heads, which two ranks can't share, so each computes all attention."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, target)


def _program(model: nn.Module, batch: dict[str, Tensor], folder: Path, mesh: dict[str, int], **options: Any) -> Path:
    program = gp.export(model, (), batch)
    save_file(batch, folder / "batch.safetensors")
    parts = gp.partition(program, gp.plan(program, mesh=mesh, **options))
    return parts.save(folder / "out", weights=model.state_dict())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.manual_seed(0)
    model, batch = Net(), {"x": torch.randn(4, 6, 12), "target": torch.randn(4, 6, 12)}
    pins = {"blocks.*.attention": "replicate"}
    return {
        name: _program(model, batch, tmp_path_factory.mktemp("whole"), mesh, shard_plan=pins, **options)
        for name, mesh, options in [
            ("tp", {"tp": 2}, {}),
            ("zero 1", {"tp": 2, "dp_shard": 2}, {"zero": 1}),
            ("zero 3", {"tp": 2, "dp_shard": 2}, {"zero": 3}),
        ]
    }


def _run(pool: RankPool, program: Path, ranks: int, folder: Path, steps: int, mended: bool, kernel: str) -> None:
    arguments = [program, program.parent / "batch.safetensors", folder, steps, int(mended), kernel]
    pool.torchrun(Path(noise_script.__file__), list(map(str, arguments)), nproc=ranks, timeout_s=120)


def _after(
    pool: RankPool, program: Path, ranks: int, folder: Path, steps: int, mended: bool
) -> list[dict[str, Tensor]]:
    _run(pool, program, ranks, folder, steps, mended, "attention")
    return [load_file(folder / f"rank_{rank}.safetensors") for rank in range(ranks)]


def _differing(program: Path, held: list[dict[str, Tensor]]) -> set[str]:
    """Names of what two neighbours on tp should hold alike and do not."""
    manifest = gp.runtime.load_manifest(program)
    alike = [name for name in held[0] if str(manifest.stored(name)["tp"]) == "I"]
    assert {"blocks.0.attention.qkv.weight", "blocks.0.norm.weight"} <= set(alike)
    pairs = list(zip(held[::2], held[1::2]))
    return {name for name in alike for one, other in pairs if not torch.equal(one[name], other[name])}


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "ranks"),
    [("tp", 2), pytest.param("zero 1", 4, marks=pytest.mark.slow), pytest.param("zero 3", 4, marks=pytest.mark.slow)],
)
def test_weights_of_ranks_that_compute_the_same_gradient_stay_equal(
    name: str, ranks: int, whole: dict[str, Path], pool: RankPool, tmp_path: Path
) -> None:
    program = whole[name]
    apart = _differing(program, _after(pool, program, ranks, tmp_path, STEPS[name], mended=False))
    assert "blocks.0.attention.qkv.weight" in apart and len(apart) > 4
    assert not _differing(program, _after(pool, program, ranks, tmp_path, STEPS[name], mended=True))


class Mixture(nn.Module):
    """Rows sorted by the experts that a router chooses; in the beginning all scores are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(4, 16, 16) / 4) for _ in range(2))
        nn.init.zeros_(self.gate.weight)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        gates, experts = F.softmax(self.gate(rows), dim=-1).topk(2)
        experts, order = experts.flatten().sort()
        offs = experts.float().histc(4, 0, 3).cumsum(0, dtype=torch.int32)
        product = torch.ops.transformers.grouped_mm_fallback
        y = product(F.gelu(product(rows[order // 2], self.up, offs)), self.down, offs)
        y = torch.zeros_like(rows).index_add(0, order // 2, y * gates.flatten()[order].unsqueeze(-1))
        return F.mse_loss(y.view_as(x), target)


@pytest.mark.costly
def test_ranks_choose_the_same_experts(pool: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("transformers.integrations.moe")  # it registers the product that can be traced in fp32
    torch.manual_seed(0)
    model, batch = Mixture(), {"x": torch.randn(8, 6, 16), "target": torch.randn(8, 6, 16)}
    program = _program(model, batch, tmp_path, {"tp": 2}, shard_plan={"up": "expert", "down": "expert"})
    assert "agree_on(" in (program / "stage_0.py").read_text()
    expected = model(**batch).item()

    def ran(mended: bool) -> list[dict[str, Any]]:
        _run(pool, program, 2, tmp_path, 1, mended, "softmax")
        return [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2)]

    one, other = ran(mended=False)
    assert one["rows"] != other["rows"] and one["loss"] != pytest.approx(expected, rel=1e-3)
    one, other = ran(mended=True)
    assert one["rows"] == other["rows"] and one["loss"] == pytest.approx(expected, rel=1e-5)
