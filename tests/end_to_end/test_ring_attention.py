"""Programs whose attention is a ring over ``cp``: against the unpartitioned model, under the type check, and their memory."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpar as gp
from graphpar.verification import verify_all
from tests.models.whole_modules import with_whole_modules

RECOMPUTED = ("selective", "full", "budget:0.6")
WIDTH, HEADS, GROUPS, WORDS = 32, 4, 2, 64


class Attention(nn.Module):
    """Grouped queries: a module of its own, so that a shard plan can name what it takes."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal, enable_gqa=True)


class Block(nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH // HEADS * GROUPS)
        self.attention, self.out = Attention(is_causal), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, kv = (y.unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2) for y in (self.q(h), self.kv(h)))
        k, v = kv.chunk(2, 1)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        down: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + down


class Model(nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block(is_causal) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@functools.cache
def program(rows: int, length: int, is_causal: bool = True) -> gp.Program:
    torch.manual_seed(0)
    ids = torch.randint(WORDS, (rows, length))
    return gp.export(Model(is_causal), args=(ids,), loss_fn=loss_fn, targets=(ids.roll(-1, 1),))


def ring(mesh: dict[str, Any]) -> dict[str, Any]:
    """The pins of a plan with a ring."""
    rows = {"inputs": ["S(2)@cp"] * 3, "outputs": ["S(2)@cp"]}
    axes = {axis: degree for axis, degree in mesh.items() if axis != "recompute"}
    shard_plan = {"blocks.*.attention": rows} if "cp" in mesh else None
    return {"mesh": axes, "shard_plan": shard_plan, "recompute": mesh.get("recompute", "none")}


CASES: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "causal, cp 2": (16, True, {"cp": 2}),
    "padded, cp 2": (13, False, {"cp": 2}),
    "causal, padded, cp 4": (13, True, {"cp": 4}),
    "causal, cp 2 x tp 2": (16, True, {"cp": 2, "tp": 2}),
    **{f"causal, cp 2, recompute {kind}": (16, True, {"cp": 2, "recompute": kind}) for kind in RECOMPUTED},
}


@functools.cache
def parts(name: str) -> gp.Parts:
    length, is_causal, mesh = CASES[name]
    traced = program(4, length, is_causal)
    return gp.partition(traced, gp.plan(traced, **ring(mesh)))


@pytest.mark.costly
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(1 / 2)
def test_a_ring_trains_as_the_unpartitioned_model(name: str) -> None:
    (outcome,) = verify_all([parts(name)])
    assert outcome.ok, outcome


@pytest.mark.costly
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(1 / 2)
def test_a_ring_has_complete_gradients_by_its_types(name: str) -> None:
    text = parts(name).files["blocks.py"]
    assert "ring_attention(" in text and "from .ring_attention import ring_attention" in text
    result = gp.check(parts(name))
    assert result.ok, result.problems


def test_the_check_refuses_whole_keys(tmp_path: Path) -> None:
    with_whole_modules(parts("causal, cp 2").save(tmp_path / "out"))
    file = tmp_path / "out" / "blocks.py"
    text = file.read_text()
    called = next(line for line in text.splitlines() if "ring_attention(" in line)
    key = called.split("ring_attention(")[1].split(", ")[1]
    wrong = called.replace(f", {key}, ", f', all_gather({key}, "cp", 2), ')
    file.write_text(
        text.replace(called, wrong).replace("from .ring", "from .collectives import all_gather\nfrom .ring")
    )
    (problem,) = gp.check(tmp_path / "out").problems
    assert "ring_attention takes query, key, value S(2) on cp, not query V@cp, key R@cp, value V@cp" in problem


def growth(mesh: dict[str, int]) -> float:
    """The bytes that a rank keeps for its backward, for each further token."""
    kept = []
    for length in (2**14, 2**15):
        plan = gp.plan(program(1, length), cluster=f"{mesh.get('cp', 1)}xCPU", **ring(mesh))
        assert plan.predicted is not None
        kept.append(plan.predicted.stages[0].kept_bytes)
    return (kept[1] - kept[0]) / 2**14


@pytest.mark.costly
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.sampled(1 / 2)
def test_what_a_rank_keeps_grows_by_its_share_of_the_sequence(degree: int) -> None:
    """To 1 %: every rank keeps the ids and the labels of the whole sequence."""
    assert growth({"cp": degree}) == pytest.approx(growth({}) / degree, rel=0.01)
