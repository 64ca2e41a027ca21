"""Collectives of tp in one function with their products: the numbers of an eager loop, the layouts in memory, and faults that are found."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import graphpar as gp
from graphpar.verification import verify_all
from tests.models.whole_modules import with_whole_modules
from tests.tools.programs import example, norms_pinned

GPT2 = {"**.ln_1": "sequence", "**.ln_2": "sequence", "transformer.ln_f": "sequence"}
WHOLE = {"**.ln_1": {"inputs": ["I@tp"]}, "**.ln_2": {"inputs": ["I@tp"]}, "transformer.ln_f": {"inputs": ["I@tp"]}}
KINDS: dict[str, dict[str, Any]] = {
    "kept": {},
    "gathered again": {"recompute": "gathers"},
    "in pieces": {"overlap_tp": True},
    "in pieces, gathered again": {"overlap_tp": True, "recompute": "gathers"},
}


@functools.cache
def parts(name: str, degree: int, kind: str, whole: bool = False) -> gp.Parts:
    program = example(name)
    sequence = norms_pinned(program, "S(1)") if name == "llama" else WHOLE if whole else GPT2
    return gp.partition(program, gp.plan(program, mesh={"tp": degree}, shard_plan=sequence, **KINDS[kind]))


def check(each: gp.Parts) -> None:
    result = gp.check(each)
    assert result.ok, result.problems
    (outcome,) = verify_all([each])
    assert not isinstance(outcome, Exception), outcome
    assert outcome.ok, outcome


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["gathered again", "in pieces"])
@pytest.mark.sampled(1 / 2)
def test_conv1d_trains_as_the_unpartitioned_model(kind: str) -> None:
    check(parts("gpt2_tiny", 2, kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", ["gpt2_tiny", "llama"])
def test_it_trains_as_the_unpartitioned_model(name: str, degree: int, kind: str) -> None:
    check(parts(name, degree, kind))


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 4])
def test_the_whole_sequence_trains_as_the_unpartitioned_model(degree: int) -> None:
    check(parts("gpt2_tiny", degree, "kept", whole=True))


class Gate(torch.nn.Module):
    """A layer whose result is scaled, row by row, by a number that a weight of one dim gives."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.after = torch.nn.LayerNorm(8), torch.nn.LayerNorm(8)
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.scale, self.shift = torch.nn.Parameter(torch.randn(8)), torch.nn.Parameter(torch.randn(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x)
        scales = F.linear(rows, self.scale, self.shift).unsqueeze(-1)
        return self.after(x + self.down(F.gelu(self.up(rows))) * scales).sin().mean()


@pytest.mark.costly
def test_a_weight_of_one_dim_stays_a_product_of_its_own() -> None:
    torch.manual_seed(0)
    program = gp.export(Gate(), (torch.randn(4, 8, 8),))
    made = gp.partition(program, gp.plan(program, mesh={"tp": 2}, shard_plan={"norm": "sequence", "after": "sequence"}))
    text = made.files["stage_0.py"]
    assert "scattered_product(" in text and "F.linear(" in text
    check(made)


@pytest.mark.costly
def test_products_take_their_collectives() -> None:
    text = parts("gpt2_tiny", 2, "kept").files["blocks.py"]
    assert text.count("= gathered_product(") == text.count("= scattered_product(") == 2
    assert "flatten(0, 1)" not in text and "all_gather(" not in text and "in_order" not in text
    text = parts("gpt2_tiny", 2, "kept", whole=True).files["blocks.py"]
    assert text.count("= shared_product(") == text.count("all_reduce(") == 2


@pytest.mark.costly
def test_logits_lie_in_order_where_their_rows_are_joined() -> None:
    text = parts("llama", 2, "kept").files
    assert "in_order=True" in text["stage_0.py"] and "in_order" not in text["blocks.py"]


def test_schedules_that_split_backwards_keep_them_apart() -> None:
    program = example("gpt2_tiny")
    plan = gp.plan(program, mesh={"tp": 2, "pp": 2}, schedule="ZBVZeroBubble", shard_plan=GPT2)
    files = gp.partition(program, plan).files
    assert "parallel_products.py" not in files and "all_gather(" in files["blocks.py"]


def test_conv1d_runs_beside_pieces_and_the_report_says_what_does_not() -> None:
    found = parts("gpt2_tiny", 2, "in pieces").report["overlapped"]
    layers = 8
    assert found["gathers"] == 2 * layers + 1 and found["reduce_scatters"] == 2 * layers
    assert found["products"] == 4 * layers + 1
    assert sum(found["others"].values()) == 2  # the embeddings' sum, and the logits


FAULTS = {
    "a sum left out": ("total.addmm_(gradient, weight)", "pass"),
    "a gather left out": ("lambda g: _done(_gathered(g.contiguous(), axis, 0))", "lambda g: g.repeat(2, 1, 1)"),
    "a scatter of the wrong dim": ("pieces = _pieces(x, dim, (), count)", "pieces = _pieces(x, dim, (), count).flip(0)"),
    "a gradient that is not summed": ('return _operators.all_reduce(x, "sum", group)', "return x"),
}  # fmt: skip


@pytest.mark.costly
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sampled(1 / 2)
def test_faults_are_found(fault: str) -> None:
    program = example("llama")
    made = gp.partition(program, parts("llama", 2, "kept").plan)
    text = (with_whole_modules(made.folder) / "parallel_products.py").read_text()
    assert FAULTS[fault][0] in text
    (made.folder / "parallel_products.py").write_text(text.replace(*FAULTS[fault]))
    problems = gp.check(made.folder).problems
    assert problems and all(problem.startswith("parallel_products.py: on 2 ranks ") for problem in problems)


@pytest.mark.costly
def test_the_search_sends_pieces_where_that_is_faster() -> None:
    with torch.device("meta"):
        layer = torch.nn.LayerNorm(4096), torch.nn.Linear(4096, 16384), torch.nn.GELU(), torch.nn.Linear(16384, 4096)
        model, x = torch.nn.Sequential(torch.nn.Sequential(*layer)), torch.randn(2, 4096, 4096)
    program = gp.export(model, (x,), loss_fn=lambda y: y.square().mean(), dtype="bf16")
    styles = {"*.0": "sequence", "*.1": "colwise", "*.3": "rowwise"}

    def planned(cluster: str, **options: Any) -> gp.Plan:
        return gp.plan(program, cluster, mesh={"tp": 4}, shard_plan=styles, recompute="none", **options)

    searched, without = planned("4xA100"), planned("4xA100", overlap_tp=False)
    assert searched.overlap_tp and not without.overlap_tp and not planned("4xCPU").overlap_tp
    assert searched.predicted is not None and without.predicted is not None
    assert searched.predicted.step_time_s < without.predicted.step_time_s
