"""Collectives of tp that run in pieces beside products: the same numbers and bytes, found by the types, and faults in them found."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpar as gp
from graphpar.errors import GraphparError
from graphpar.runtime.option_kinds import Recompute
from graphpar.verification import verify_all
from tests.end_to_end.test_recompute import STEPS, run, same_bits, sent
from tests.models.whole_modules import with_whole_modules
from tests.tools.programs import example, norms_pinned
from tests.tools.rank_pool import RankPool

WIDTH, WORDS, LAYERS = 32, 64, 8
SEQUENCE = {"**.norm1": "sequence", "**.norm2": "sequence", "norm": "sequence"}


class Block(nn.Module):
    """Biases on both sides, and products by two and by one of what is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.a, self.b, self.out = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64, bias=False), nn.Linear(64, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.out(F.silu(self.a(h)) * self.b(h).cumsum(1))
        down: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + down


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.norm, self.blocks = nn.LayerNorm(WIDTH), nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@functools.cache
def program() -> gp.Program:
    torch.manual_seed(0)
    ids = torch.randint(WORDS, (4, 16))
    loss = lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten())  # noqa: E731
    return gp.export(Model(), (ids,), loss_fn=loss, targets=(ids.roll(-1, 1),))


CASES: dict[str, dict[str, Any]] = {
    "tp 2": {"mesh": {"tp": 2}},
    "tp 4": {"mesh": {"tp": 4}},
    "tp 2, pp 2": {"mesh": {"tp": 2, "pp": 2}, "schedule": "ZBVZeroBubble", "microbatch_size": 1},
    "tp 2, ZeRO 3": {"mesh": {"tp": 2, "dp_shard": 2}},
}


@functools.cache
def parts(name: str) -> gp.Parts:
    return gp.partition(program(), gp.plan(program(), shard_plan=SEQUENCE, overlap_tp=True, **CASES[name]))


@pytest.mark.costly
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(1 / 2)
def test_it_trains_as_the_unpartitioned_model(name: str) -> None:
    (outcome,) = verify_all([parts(name)])
    assert outcome.ok, outcome


@pytest.mark.costly
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(1 / 2)
def test_its_gradients_are_complete_by_their_types(name: str) -> None:
    text = parts(name).files["blocks.py"]
    assert (
        "a, b = ring_gathered_products(" in text
        and "ring_gathered_product(" in text
        and text.count("= ring_scattered_product(") == 2
    )
    result = gp.check(parts(name))
    assert result.ok, result.problems


FAULTS = {
    "a piece left out": ("for source, piece in _travelling(x, axis):", "for source, piece in [*_travelling(x, axis)][:-1]:"),
    "pieces in the wrong order": ("yield (rank(axis) - step) % size(axis), piece", "yield (rank(axis) + 1 - step) % size(axis), piece"),
    "sums for the wrong rank": ("made((own - 1) % count)", "made(own)"),
    "a sum left out": ("return part + _done(sent), rest", "return part + 0 * _done(sent), rest"),
    "a gradient left out": ("functools.reduce(torch.add, terms)", "terms[0]"),
}  # fmt: skip


@pytest.mark.costly
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sampled(2 / 5)
def test_faults_are_found(fault: str) -> None:
    made = gp.partition(program(), parts("tp 2").plan)
    text = (made.folder / "parallel_products.py").read_text()
    assert FAULTS[fault][0] in text
    (made.folder / "parallel_products.py").write_text(text.replace(*FAULTS[fault]))
    problems = gp.check(made.folder).problems
    assert problems and all(problem.startswith("parallel_products.py: on 2 ranks ") for problem in problems)
    assert not gp.verify(made, steps=1).ok


def test_a_whole_operand_is_found_by_its_type(tmp_path: Path) -> None:
    folder = with_whole_modules(parts("tp 2").save(tmp_path / "out"))
    text = (folder / "blocks.py").read_text()
    wrong = text.replace(
        "ring_gathered_product(self.norm2(x)", 'ring_gathered_product(all_gather(self.norm2(x), "tp", dim=1)'
    )
    assert wrong != text
    (folder / "blocks.py").write_text(wrong.replace("from .ring", "from .collectives import all_gather\nfrom .ring"))
    assert not gp.check(folder).ok


KINDS: tuple[Recompute, ...] = ("gathers", "full", "selective")


@pytest.mark.costly
def test_one_gather_serves_all_products_that_read_it(pool: RankPool, tmp_path: Path) -> None:
    """q, k, v and gate, up: one gather each, one reduce-scatter of the summed gradient, and of what is gathered again one gather."""
    pinned = norms_pinned(example("llama"), "S(1)")
    folders = run(pool, tmp_path, "llama", {"tp": 2}, ("gathers",), shard_plan=pinned)
    same_bits(folders)
    microbatches = gp.Plan.load(folders[0]).microbatches * STEPS
    plain, again = ({name: count / microbatches for name, count in sent(folder).items()} for folder in folders)
    # Besides: the embedding's sum, scattered; what the head reads, gathered; logits, gathered.
    assert plain["all_gather_into_tensor"] == LAYERS * (2 + 2) + 3
    assert plain["reduce_scatter_tensor"] == again["reduce_scatter_tensor"] == LAYERS * (2 + 2) + 2
    assert again["all_gather_into_tensor"] == plain["all_gather_into_tensor"] + LAYERS * 2


@pytest.mark.costly
def test_rings_send_once_for_all_products_and_recompute(pool: RankPool, tmp_path: Path) -> None:
    pinned = norms_pinned(example("llama"), "S(1)")
    folders = run(pool, tmp_path, "llama", {"tp": 2}, KINDS, shard_plan=pinned, overlap_tp=True)
    same_bits(folders)
    microbatches = gp.Plan.load(folders[0]).microbatches * STEPS
    plain, gathers, full, selective = (
        {name: count / microbatches for name, count in sent(folder).items()} for folder in folders
    )
    # One message for each collective of a layer and for what the head reads, forward and backward.
    assert plain["all_to_all_single"] == gathers["all_to_all_single"] == LAYERS * (4 + 4) + 2
    assert plain["all_gather_into_tensor"] == 2 and plain["reduce_scatter_tensor"] == 1
    assert gathers["all_gather_into_tensor"] == 2 + LAYERS * 2
    assert selective == plain
    assert full["all_to_all_single"] > plain["all_to_all_single"]


def test_the_report_counts_and_an_option_without_effect_is_an_error() -> None:
    found = parts("tp 2").report["overlapped"]
    assert {key: count for key, count in found.items() if key != "others"} == {
        "gathers": 5,
        "reduce_scatters": 4,
        "products": 11,
    }
    assert (
        "5 gathers and 4 reduce-scatters of tp overlapped with 11 products, in 2 pieces each"
        in parts("tp 2").files["report.html"]
    )
    with pytest.raises(GraphparError, match="overlap_tp requires tensor parallelism; give mesh tp=2"):
        gp.plan(program(), mesh={"dp_replicate": 2}, overlap_tp=True)
    with pytest.raises(
        GraphparError, match=r"recompute=budget:0.5 is incompatible with overlap_tp.* take gathers, selective or full"
    ):
        gp.plan(program(), mesh={"tp": 2}, overlap_tp=True, recompute={"blocks.*": "budget:0.5"})
    whole = gp.plan(program(), mesh={"tp": 2}, shard_plan={"**": "replicate"}, overlap_tp=True)
    with pytest.raises(GraphparError, match="overlap_tp: Model has no all-gather before a product"):
        gp.partition(program(), whole)


def test_a_plan_keeps_it() -> None:
    plan = parts("tp 2").plan
    assert plan.overlap_tp and gp.Plan.from_json(plan.to_json()) == plan


def step_s(cluster: str, overlap_tp: bool) -> tuple[float, float]:
    """Seconds of a step and those of tp that are waited for, of layers of some size."""
    with torch.device("meta"):
        layer = nn.LayerNorm(4096), nn.Linear(4096, 16384), nn.GELU(), nn.Linear(16384, 4096)
        model = nn.Sequential(*(nn.Sequential(*layer) for _ in range(2)))
        x = torch.randn(2, 4096, 4096)
    traced = gp.export(model, (x,), loss_fn=lambda y: y.square().mean(), dtype="bf16")
    styles = {"*.0": "sequence", "*.1": "colwise", "*.3": "rowwise"}
    plan = gp.plan(traced, cluster, mesh={"tp": 4}, shard_plan=styles, overlap_tp=overlap_tp, recompute="none")
    assert plan.predicted is not None
    return plan.predicted.step_time_s, plan.predicted.exposed_s["tp"]


@pytest.mark.costly
def test_prices_hide_what_a_device_can_hide() -> None:
    (plain, waited), (beside, left) = (step_s("4xA100", overlap_tp) for overlap_tp in (False, True))
    assert beside < plain and left < waited / 2
    (plain, waited), (beside, left) = (step_s("4xCPU", overlap_tp) for overlap_tp in (False, True))
    assert beside >= plain and left == waited
