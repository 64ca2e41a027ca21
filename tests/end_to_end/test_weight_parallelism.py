"""Ranks that divide a sequence store shards of the weights (weight parallelism): numbers, bytes, gathers and what is refused."""

from __future__ import annotations

import functools
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import graphpar as gp
from graphpar.errors import GraphparError
from graphpar.runtime.debugging.events import EVENTS_VARIABLE
from graphpar.runtime.layout import R, Shard, Stored, joined_all, local_shape, local_shard, shard_places
from graphpar.runtime.mesh import Mesh
from graphpar.verification import verify_all
from graphpar.verification.type_check import check_folder
from tests.ranks import steps_script, zero_script
from tests.tools.rank_pool import RankPool

RANKS, ROWS, TOKENS, BLOCKS, MICROBATCHES = 4, 4, 8, 5, 2


class Block(nn.Module):
    """Attention and a product; four ranks can't share most of its rows evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)
        self.up, self.down = nn.Linear(6, 13), nn.Linear(13, 6)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 3)).transpose(1, 2) for part in self.qkv(h).chunk(3, -1))
        h = h + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return h + self.down(torch.tanh(self.up(h)))


class Layered(nn.Module):
    """Blocks and the rest."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.scale = nn.Parameter(torch.tensor(1.5))  # has no dim to be sharded

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for layer in self.layers:
            h = layer(h)
        return self.last(h * self.scale)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randn(ROWS, TOKENS, size, generator=generator) for name, size in (("x", 5), ("y", 3))}


@functools.cache
def program(mode: str = "train") -> gp.Program:
    x, y = batch().values()
    if mode == "infer":
        return gp.export(Layered(), (x,), mode="infer")
    return gp.export(Layered(), (x,), loss_fn=lambda o, y: F.mse_loss(o, y), targets=(y,))


def parted(**asked: Any) -> gp.Parts:
    whole = program()
    return gp.partition(whole, gp.plan(whole, **{"mesh": {"cp": RANKS}, "microbatch_size": 2, **asked}))


# ---- what a rank holds, gathers and sends --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> tuple[Path, gp.Parts]:
    out, parts = tmp_path_factory.mktemp("weights"), parted(zero=3)
    folder = parts.save(out / "program", weights=Layered().state_dict())
    names = [each["name"] for each in json.loads((folder / "plan.json").read_text())["interface"]["inputs"]]
    assert names[0] == "x"
    save_file(dict(zip(names, batch().values(), strict=True)), out / "batch.safetensors")
    pool.torchrun(Path(zero_script.__file__), [str(folder), str(out)], nproc=RANKS, timeout_s=240)
    case = {"name": "events", "program": str(folder), "batch": str(out / "batch.safetensors"), "out": str(out), "steps": 1,
            "environment": {EVENTS_VARIABLE: str(out / "events")}}  # fmt: skip
    (out / "cases.json").write_text(json.dumps([case]))
    pool.torchrun(Path(steps_script.__file__), [str(out / "cases.json")], nproc=RANKS, timeout_s=240)
    return out, parts


@pytest.mark.costly
def test_a_rank_holds_its_shard_as_predicted(ran: tuple[Path, gp.Parts]) -> None:
    out, parts = ran
    reports = [json.loads((out / f"rank_{rank}.json").read_text()) for rank in range(RANKS)]
    for name, value in Layered().named_parameters():
        each = math.ceil(len(value) / RANKS) if value.ndim else 0
        for rank, report in enumerate(reports):
            rows = (min(each, max(0, len(value) - rank * each)), *value.shape[1:]) if value.ndim else ()
            assert tuple(report["stored"][name]) == rows, name
    assert all(report["gradients"] == report["held"] for report in reports)
    held = 4 * reports[0]["held"]
    written = json.loads(parts.files["report.json"])["report"]["state"]
    assert written["rank_bytes"] == {"parameters": held, "gradients": held, "optimizer": 2 * held}


@pytest.mark.costly
def test_collectives_of_a_step(ran: tuple[Path, gp.Parts]) -> None:
    """The gradients of each block, and of the modules before and after them, are reduce-scattered once a microbatch."""
    out, _ = ran
    for rank in range(RANKS):
        counts = json.loads((out / f"rank_{rank}.json").read_text())["counts"]
        assert counts["reduce-scatter"] == MICROBATCHES * (BLOCKS + 2)


@pytest.mark.costly
def test_at_most_two_blocks_are_gathered_at_once(ran: tuple[Path, gp.Parts]) -> None:
    out, _ = ran
    lines = [json.loads(line) for line in (out / "events.rank1").read_text().splitlines()]
    alive: set[str] = set()
    most, order = 0, []
    for line in lines:
        if line["event"] == "gather" and line["unit"].startswith("layers."):
            alive.add(line["unit"])
            order.append(line["unit"])
        elif line["event"] == "free":
            alive.discard(line["unit"])
        most = max(most, len(alive))
    there = [f"layers.{index}" for index in range(BLOCKS)]
    assert most == 2 and not alive
    # The last block is free between its forward and its backward, too.
    assert order == MICROBATCHES * [*there, *reversed(there)]


@pytest.mark.costly
def test_saved_weights_are_those_of_one_device(ran: tuple[Path, gp.Parts]) -> None:
    out, _ = ran
    model, saved = Layered(), load_file(out / "half.safetensors")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(model(batch()["x"]), batch()["y"]).backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=1e-5, atol=1e-6)
    report = json.loads((out / "rank_0.json").read_text())
    assert report["rest"] == pytest.approx(report["losses"][2:], rel=1e-6)


@pytest.mark.costly
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.sampled(1 / 2)
def test_other_levels_are_exact(zero: int) -> None:
    parts = [parted(zero=zero), parted(mesh={"dp_shard": 2, "cp": 2}, zero=zero)]
    for each, outcome in zip(parts, verify_all(parts, 3, timeout_s=300)):
        assert outcome.ok, (each.plan.mesh, outcome.problems)


def test_types_are_right(tmp_path: Path) -> None:
    assert check_folder(parted(zero=3).save(tmp_path / "out")).problems == []


# ---- bytes, and the search -----------------------------------------------------------------------------------------


@pytest.mark.costly
def test_state_is_divided_by_all_ranks() -> None:
    cluster, whole = gp.Cluster.parse("4xA100"), program()
    found = {
        zero: gp.plan(whole, cluster, mesh={"cp": RANKS}, zero=zero, microbatch_size=ROWS, recompute="none").predicted
        for zero in (0, 1, 2, 3)
    }
    memory = {zero: estimate.memory[0] for zero, estimate in found.items() if estimate is not None}
    # At level 2 a rank stores its shards too; what it gathers once a step is among the buckets.
    for field, level in (("optimizer", 1), ("gradients", 2), ("parameters", 2)):
        for zero in (0, 1, 2, 3):
            shards = RANKS if zero >= level else 1
            if (field, zero) == ("gradients", 1):  # some are summed before the others are there
                continue
            assert getattr(memory[zero], field) == -(-getattr(memory[0], field) // shards), (field, zero)


@pytest.mark.costly
def test_the_search_divides_state_where_only_that_fits() -> None:
    """One row, so no replicas: on devices that can't hold all of the state the sequence is divided and weights are gathered."""
    whole = program()
    roomy = gp.plan(whole, gp.Cluster.parse("4xA100"), mesh={"cp": RANKS}, zero=0, global_batch=1, recompute="none")
    assert roomy.predicted is not None
    needed = max(roomy.predicted.peak_memory_bytes)
    cluster = gp.Cluster.parse("4xA100")
    tight = replace(cluster, device=replace(cluster.device, memory_bytes=round(0.9 * needed)))
    plan = gp.plan(whole, tight, mesh={"cp": RANKS}, global_batch=1, recompute="none")
    assert plan.zero > 0 and plan.predicted is not None and max(plan.predicted.peak_memory_bytes) < needed


# ---- layouts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 5, 7, 8, 13])
def test_axes_that_store_shards_divide_a_dim_together(size: int) -> None:
    """As one axis of as many ranks would, after the axes that are computed with."""
    spec: dict[str, Any] = {"dp_replicate": R, "dp_shard": Stored(0), "cp": Stored(0), "tp": Shard(0)}
    degrees = {"dp_replicate": 1, "dp_shard": 2, "cp": 2, "tp": 2}
    whole = torch.randn(2 * size, 3)
    pieces = [local_shard(whole, spec, degrees, {"dp_replicate": 0, **place}) for place in shard_places(spec, degrees)]
    assert {tuple(piece.shape) for piece in pieces} == {local_shape(whole.shape, spec, degrees)}
    assert torch.equal(joined_all(pieces, whole.shape, spec, degrees), whole)
    one = {"dp_shard": Shard(0), "tp": Shard(0)}
    for tp, (outer, inner) in itertools.product(range(2), itertools.product(range(2), range(2))):
        together = local_shard(whole, spec, degrees, {"tp": tp, "dp_shard": outer, "cp": inner})
        alone = local_shard(whole, one, {"dp_shard": 4, "tp": 2}, {"tp": tp, "dp_shard": 2 * outer + inner})
        assert torch.equal(together, alone)


def test_ranks_that_share_state() -> None:
    mesh = Mesh(dp_shard=2, cp=2, tp=2)
    assert mesh.shards == 4 and mesh.groups("fsdp") == [[0, 2, 4, 6], [1, 3, 5, 7]]


# ---- what is refused -----------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "nobody to share with": ({"mesh": {"tp": 2}, "zero": 3}, "over dp_shard and cp, which have one rank"),
    "weights that are pinned to be sharded": (
        {"zero": 3, "shard_plan": {"layers.0.up.weight": "S(1)@cp"}},
        r"layers.0.up.weight is pinned to S\(1\)@cp, but zero=3 stores shards over cp=2 of parameters that are R@cp",
    ),
    "parts that don't divide": ({"zero": 3, "reshard": 3}, "reshard=3 must be a proper divisor of cp=2"),
    "prefetch of what is kept": ({"zero": 2, "prefetch": "pre"}, "prefetch=pre requires ZeRO-3"),
    "a policy without state": ({"reshard": "never"}, "with cp=2 and zero=0 they are not sharded"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused(name: str) -> None:
    asked, message = WRONG[name]
    with pytest.raises(GraphparError, match=message):
        gp.plan(program(), **{"mesh": {"cp": 2}, **asked})


@pytest.mark.costly
def test_inference_shares_no_state() -> None:
    with pytest.raises(GraphparError, match="Mesh cp=2 with zero=3 shards what training stores"):
        gp.plan(program("infer"), mesh={"cp": 2}, zero=3)
