"""Searches on clusters whose nodes are in pods: what is heavy stays inside of them, and bounds are below prices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import graphpar as gp
from graphpar.cost_models.kept_plans import Change
from graphpar.hardware.cluster import Cluster, Pod
from graphpar.hardware.devices import Link
from graphpar.passes.planning.prices import estimate_plan
from graphpar.report.data import report_data
from graphpar.report.page import html
from tests.passes.planning.test_every_plan import Case, check_best
from tests.passes.planning.test_planner import planner_of, small


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024, bias=False), nn.Linear(1024, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def program() -> gp.Program:
    return gp.export(
        nn.Sequential(*(Block() for _ in range(4))), (torch.randn(512, 256),), loss_fn=lambda y: y.square().mean()
    )


def spine(times: float) -> Cluster:
    """Eight nodes of one device, whose optimizer takes long; in pods of 4 nodes, of which devices have ``times`` the rate outside."""
    fast = {"flops": {"fp32": 2e12}, "half_reduction": 0.0, "compute_units": None}
    device = replace(small(), **fast, memory_bytes_per_s=1e11)
    flat = replace(Cluster.of(device, 8, 1), inter_node=Link(1e-6, 1e10))
    return flat if times == 1 else replace(flat, pods=(Pod(4, flat.inter_node.times(times)),))


def test_shards_stay_in_pods_where_little_leaves_them(program: gp.Program) -> None:
    """At a quarter of the rate a ring, which enters each pod once with the shares of its four members, loses nothing."""
    wide, quarter, sixteenth = (
        gp.plan(program, spine(times), mesh={"tp": 1, "pp": 1}, zero=3) for times in (1, 1 / 4, 1 / 16)
    )
    assert wide.mesh == quarter.mesh == gp.Mesh(dp_shard=8)
    assert sixteenth.mesh == gp.Mesh(dp_replicate=2, dp_shard=4)
    assert quarter.predicted is not None and sixteenth.predicted is not None
    assert quarter.predicted.crossed == {"dp_shard": {"nodes": 8, "pods": 2}}
    assert sixteenth.predicted.crossed == {"dp_replicate": {"nodes": 2, "pods": 2}, "dp_shard": {"nodes": 4}}
    there = estimate_plan(program, wide, spine(1 / 16).with_headroom()).step_time_s
    assert there > 1.3 * sixteenth.predicted.step_time_s


def test_the_report_says_what_collectives_leave(program: gp.Program) -> None:
    plan = gp.plan(program, spine(1 / 16), mesh={"tp": 1, "pp": 1}, zero=3)
    data = report_data(gp.partition(program, plan).compilation)
    said = "dp_replicate 2 nodes in 2 pods · dp_shard 4 nodes"
    assert f" Spread over  {said}" in str(plan).splitlines() and f"spread over: {said}." in html(data)


def test_a_slower_network_is_slower_on_each_level() -> None:
    made = spine(1 / 4)
    slow = Change(network=0.5).on(made)
    assert (slow.inter_node.bytes_per_s, slow.pods[0].link.bytes_per_s) == (5e9, 1.25e9)
    assert slow.intra_node == made.intra_node


@pytest.mark.costly
def test_bounds_are_below_the_price() -> None:
    flat = Cluster.of(small(), 4, 1)
    around = (Pod(2, flat.inter_node.times(1 / 100)),)
    planner = planner_of("uneven", replace(flat, pods=around))
    candidates, _ = planner.bounded()
    assert len(candidates) > 50
    for candidate in candidates:
        step_s = planner.fitting.exactly(planner.fitting.price(candidate)).estimate.step_time_s
        assert candidate.bound <= step_s * (1 + 1e-9)
        assert planner.bounds.of_stages(candidate) <= step_s * (1 + 1e-9)
        assert planner.bounds.in_order(candidate) <= step_s * (1 + 1e-9)


@pytest.mark.costly
@pytest.mark.parametrize(
    "case",
    [
        Case("equal", (4, 1), {}, {"recompute": "none"}, 1.0, 1e-2, 2e-6, pod=2),
        Case("two rows", (4, 1), {"pp": 1}, {}, 100.0, 1e-3, 1e-7, pod=2),
        Case("experts", (4, 1), {"pp": 1}, {"recompute": "none"}, 1.0, 1e-2, 2e-6, pod=2),
    ],
    ids=str,
)
@pytest.mark.sampled(1 / 3)
def test_the_best_of_every_plan(case: Case) -> None:
    check_best(case)
