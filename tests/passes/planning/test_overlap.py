"""Whether collectives of tp run beside products is one of the decisions of a search."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphpar as gp
from graphpar.hardware.cluster import Cluster
from graphpar.hardware.devices import DEVICES
from graphpar.ir.program import Program
from graphpar.passes.planning.candidates import SearchResult
from graphpar.passes.planning.constraints import PlanConstraints
from graphpar.passes.planning.search import Planner
from graphpar.runtime.option_kinds import AUTO
from tests.passes.planning.test_planner import program_of

A100 = DEVICES["A100-SXM-80GB"]
STYLES = {"*.norm": "sequence", "*.up": "colwise", "*.down": "rowwise"}


class Layer(nn.Module):
    """Products that can hide what tp gathers and scatters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4096), nn.Linear(4096, 16384), nn.Linear(16384, 4096)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@functools.cache
def layers() -> Program:
    with torch.device("meta"):
        model, x = nn.Sequential(*(Layer() for _ in range(4))), torch.randn(8, 4096, 4096)
    return gp.export(model, (x,), loss_fn=lambda y: y.square().mean(), dtype="bf16")


def search(cluster: Cluster, **pins: Any) -> SearchResult:
    asked: dict[str, Any] = {"recompute": AUTO, "shard_plan": STYLES, "mesh": {"dp_shard": 1}} | pins
    return Planner(layers(), PlanConstraints(cluster=cluster, **asked)).search()


def seconds(found: SearchResult) -> float:
    return float("inf") if found.best is None else found.best.estimate.step_time_s


@pytest.mark.parametrize("share", [0.8, 1.5])
def test_the_faster_of_both_is_found(share: float) -> None:
    """Where memory is short plans without overlap may recompute to budgets, which those with it can't."""
    mesh = {"dp_replicate": 1, "pp": 1}
    whole = search(Cluster.of(A100, 1, 4), overlap_tp=False, recompute="none", mesh=mesh)
    assert whole.best is not None
    device = replace(A100, memory_bytes=int(share * max(whole.best.estimate.peak_memory_bytes)))
    free, without, beside = (
        search(Cluster.of(device, 1, 4), mesh=mesh, overlap_tp=each) for each in (None, False, True)
    )
    assert free.best is not None
    assert seconds(free) == pytest.approx(min(seconds(without), seconds(beside)), rel=1e-9)
    assert free.best.candidate.overlap_tp == (seconds(beside) < seconds(without))
    assert free.tried is not None and free.tried.values["overlap_tp"] == (False, True)


def test_it_is_found_where_it_is_faster() -> None:
    found = search(Cluster.of(A100, 1, 4), mesh={"tp": 4}, recompute="none")
    assert found.best is not None and found.best.candidate.overlap_tp
    assert gp.plan(layers(), Cluster.of(A100, 1, 4), mesh={"tp": 4}, shard_plan=STYLES).overlap_tp


def test_it_is_tried_only_where_products_may_hide_collectives() -> None:
    """Within a node of GPUs, on ranks whose program has such products, and without budgets of recomputation."""

    def tried(cluster: Cluster, program: Program | None = None, **pins: Any) -> set[tuple[int, bool]]:
        asked: dict[str, Any] = {"shard_plan": STYLES if program is None else None} | pins
        planner = Planner(program or layers(), PlanConstraints(cluster=cluster, **asked))
        return {(each.mesh.tp, each.overlap_tp) for each in planner.bounded(all_degrees=True)[0]}

    assert tried(Cluster.of(A100, 2, 2)) == {(1, False), (2, False), (2, True), (4, False)}
    assert not any(overlap for _, overlap in tried(Cluster.of(DEVICES["CPU"], 1, 4)))
    assert not any(overlap for _, overlap in tried(Cluster.of(A100, 1, 4), program_of("uneven")))
    assert not any(overlap for _, overlap in tried(Cluster.of(A100, 1, 4), recompute="budget:0.5"))
