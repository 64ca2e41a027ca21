"""Rows that are gathered in 8 bits: bitwise the products of rows that are gathered first, the bytes that are sent, and the price."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import graphpar as gp
from graphpar.cost_models.work import Collective, Phase
from graphpar.cost_models.workload import Works
from graphpar.emitted import collectives, fp8_gathers
from graphpar.emitted.fp8 import fp8_linear
from graphpar.emitted.fp8_gathers import all_gather_rounded
from graphpar.ir.recomputation import GATHERS
from graphpar.operators.rank_threads import on_ranks
from graphpar.passes.planning.planned import sharded_as
from graphpar.verification import verify_all
from graphpar.verification.reference import run_reference
from tests.end_to_end.test_recompute import FIXTURE, same_bits
from tests.tools.programs import example_file, exported_once
from tests.tools.rank_pool import RankPool

STEPS = 2


def _program(**options: Any) -> gp.Program:
    file = example_file("llama")
    asked = {"loss_fn": file.loss_fn, "targets": file.targets, "dtype": "bf16", "fp8": "**", **options}
    return exported_once(("llama", "fp8 gathers", str(options)), file.model, file.kwargs, **asked)


def _shards(dtype: torch.dtype, count: int) -> list[Tensor]:
    """Rows of many sizes: of nothing, almost nothing, the largest that rounds up and down, and what is not finite."""
    torch.manual_seed(0)
    whole = torch.randn(2, 6 * count, 48) * 2.0 ** torch.randint(-40, 40, (2, 6 * count, 1))
    whole[0, 0], whole[0, 1], whole[0, 2] = 0, 1e-38, 2.0**-133
    whole[0, 3, 5], whole[0, 4, 5], whole[1, 0, 0] = 225.0 * 2**90, 449.0 * 2**90, torch.inf
    whole[1, 2] *= 2.0**-126
    return [shard.to(dtype) for shard in whole.chunk(count, 1)]


def _made(function: Callable[..., Any], weights: list[Tensor], x: Tensor) -> list[Tensor]:
    return [fp8_linear(whole := function(x, "tp", dim=1), weights[0]), fp8_linear(whole, weights[1])]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("kept", [True, False])
def test_products_have_the_same_bits(dtype: torch.dtype, count: int, kept: bool) -> None:
    shards, upstream = _shards(dtype, count), torch.randn(2, 6 * count, 24).to(dtype)
    weights = [torch.randn(24, 48).to(dtype) for _ in range(2)]

    def run(function: Callable[..., Any], rank: int) -> list[Tensor]:
        x = shards[rank].detach().requires_grad_()
        with torch.no_grad():
            plain = _made(function, weights, x)
        results = _made(function, weights, x)
        return [*plain, *results, *torch.autograd.grad(results, [x], [upstream, upstream])]

    modules = [fp8_gathers, collectives]
    expected = on_ranks(partial(run, collectives.all_gather), count, modules)
    watching = [] if kept else [lambda *args: None]
    with mock.patch.object(fp8_gathers, "watchers", watching):
        found = on_ranks(partial(run, all_gather_rounded), count, modules)
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(ours, theirs, strict=True))
    assert not expected[0][0][0].isnan().any() and expected[0][0][1, 0].isnan().all()


class _Read(nn.Module):
    """Two layers, of which something else may read what the second does."""

    def __init__(self, also: bool) -> None:
        super().__init__()
        self.also = also
        self.norm1, self.norm2, self.head = nn.LayerNorm(16), nn.LayerNorm(16), nn.Linear(16, 2)
        self.up1, self.up2, self.down1, self.down2 = (
            nn.Linear(*sizes) for sizes in ((16, 32), (16, 48), (32, 16), (48, 16))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down1(self.up1(self.norm1(x)).relu())
        h = self.norm2(x)
        x = x + self.down2(self.up2(h).relu())
        return (self.head(x).square().mean() + (h.cumsum(1).square().mean() if self.also else 0)).float()


@pytest.mark.costly
def test_only_what_nothing_else_reads_is_rounded() -> None:
    for also in (False, True):
        torch.manual_seed(0)
        program = gp.export(_Read(also), (torch.randn(4, 8, 16),), dtype="bf16", fp8=["up*", "down*"])
        parts = gp.partition(program, gp.plan(program, mesh={"tp": 2}, sp=True))
        text = parts.files["stage_0.py"]
        assert ("all_gather_rounded(" in text) is not also, text


@pytest.mark.costly
def test_programs_have_the_same_bits_and_send_fewer_bytes(pool: RankPool, tmp_path: Path) -> None:
    program = _program()
    asked = {"mesh": {"tp": 2}, "sp": True, "microbatch_size": 2, "global_batch": 4}
    kinds = ("none", "gathers", "full")
    plans = [gp.plan(program, recompute=kind, **asked) for kind in kinds]  # type: ignore[arg-type]
    assert program.source is not None
    reference = run_reference(program.source, plans[0], program.inputs, STEPS, layouts=program.stream_layouts)
    folders = []
    for kind, plan in zip(kinds, plans, strict=True):
        for function in ("all_gather", "all_gather_rounded"):
            folder = gp.partition(program, plan).save(tmp_path / f"{kind} {function}")
            text = (folder / "blocks.py").read_text()
            assert text.count("= all_gather_rounded(") == 2
            if function == "all_gather":
                text = text.replace("all_gather_rounded", function).replace("from .fp8_gathers", "from .collectives")
                (folder / "blocks.py").write_text(text)
            folders.append(folder)
    batches = [str(reference.batch_file(step)) for step in range(STEPS)]
    cases = [{"program": str(each), "weights": str(reference.weights), "batches": batches} for each in folders]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    pool.torchrun(FIXTURE, [str(tmp_path / "cases.json")], nproc=2, timeout_s=300)

    same_bits(folders)
    nbytes = [json.loads((folder / "bytes_0.json").read_text())["all_gather_into_tensor"] for folder in folders]
    saved = [plain - rounded for plain, rounded in zip(nbytes[::2], nbytes[1::2], strict=True)]
    rows, features = 2 * 16 // 2, 64
    gathers = 2 * 8 * plans[0].microbatches * STEPS  # two of each layer
    assert saved == [0, gathers * rows * (2 * features - features - 2), 0]
    expected = {kind: _sent(program, plan) for kind, plan in zip(kinds, plans, strict=True)}
    assert expected["none"] - expected["gathers"] == 2 * 8 * 2 * rows * (2 * features - features - 2)


def _sent(program: gp.Program, plan: gp.Plan) -> float:
    """The bytes of the all-gathers of a forward, as they are priced."""
    local = sharded_as(program, plan).local
    works, shards = Works(local, {"tp": 2}), set[str]()
    if plan.recompute == GATHERS:
        shards = {path for block in local.blocks.values() for path in block.instances}
    rows = works.of(local.graph, shards=shards).rows
    return sum(
        times * row.nbytes.at(2)
        for row, times in rows.items()
        if isinstance(row, Collective) and row.kind == "all-gather" and row.phase is Phase.FORWARD
    )


@pytest.mark.costly
def test_a_program_without_a_backward_is_priced_in_8_bits() -> None:
    file = example_file("llama")
    inputs = {name: value for name, value in file.kwargs.items() if name != "labels"}
    sent = []
    for options in ({"fp8": "**"}, {}):
        program = gp.export(file.model, kwargs=inputs, mode="infer", dtype="bf16", **options)
        plan = gp.plan(program, mesh={"tp": 2}, sp=True)
        sent.append(_sent(program, plan))
        parts = gp.partition(program, plan)
        assert ("all_gather_rounded(" in parts.files["blocks.py"]) == ("fp8" in options)
        result = verify_all([parts])[0]
        assert result.ok, vars(result)
    assert sent[1] - sent[0] == 2 * 8 * 2 * 16 * (2 * 64 - 64 - 2)


@pytest.mark.costly
def test_verify_finds_rounded_rows_in_gradients_of_weights() -> None:
    program = _program()
    good, bad = (
        gp.partition(program, gp.plan(program, mesh={"tp": 2}, sp=True, recompute="gathers")) for _ in range(2)
    )
    text = (bad.folder / "fp8_gathers.py").read_text()
    wrong = text.replace(
        "_watched(x, result, lambda x: _gather(x, axis, dim, parts, size))",
        "_watched(x, result, lambda x: _in_8_bits(x, axis, dim, parts, size, block))",
    )
    assert wrong != text
    (bad.folder / "fp8_gathers.py").write_text(wrong)
    results = verify_all([good, bad])

    assert [result.ok for result in results] == [True, False]
    assert "_proj" in results[1].worst.get("gradient", ""), vars(results[1])
