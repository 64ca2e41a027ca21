"""Ranks that take turns on cores: laws of a scheduler that leaves no core free while a rank waits, and what prices make of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import graphpar as gp
from graphpar.cost_models.estimates import Estimate
from graphpar.hardware.cluster import Cluster
from graphpar.hardware.devices import DEVICES, Link
from graphpar.ir.program import Program
from graphpar.passes.planning.choose import choose
from graphpar.passes.planning.constraints import PlanConstraints
from graphpar.passes.planning.prices import estimate_plan
from graphpar.runtime.mesh import Mesh
from graphpar.schedules.core_sharing import SharedCores
from graphpar.schedules.registry import action_table
from graphpar.schedules.simulation import Transfers, simulate

SCHEDULES = (("1F1B", 4, 1), ("GPipe", 3, 1), ("Interleaved1F1B", 2, 2), ("ZBVZeroBubble", 2, 2), ("DualPipeV", 2, 2))
COSTS = st.lists(st.floats(0.1, 5.0), min_size=4, max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SCHEDULES), COSTS, COSTS, st.integers(1, 5), st.floats(0.0, 1.0))
def test_turns_are_between_the_bounds_of_every_greedy_scheduler(
    which: tuple[str, int, int], forward: list[float], backward: list[float], cores: int, transfer: float
) -> None:
    name, ranks, depth = which
    stages = ranks * depth
    table, costs = action_table(name, ranks, depth, 8), (forward[:stages], backward[:stages])
    transfers = Transfers([transfer] * (stages - 1), [transfer] * (stages - 1))
    alone = simulate(table, *costs, transfers=transfers)
    shared = simulate(table, *costs, transfers=transfers, cores=SharedCores(cores, 1, [1.0] * stages))
    work = 8 * sum(map(sum, costs))
    assert shared.makespan >= max(alone.makespan, work / cores) * (1 - 1e-9)
    assert shared.makespan <= (work / cores + alone.makespan) * (1 + 1e-9)
    if cores >= ranks:
        assert shared.makespan == pytest.approx(alone.makespan)
        assert shared.busy == pytest.approx(alone.busy)
    if cores == 1 and not transfer:
        assert shared.makespan == pytest.approx(work)


def test_two_ranks_on_one_core_take_twice_as_long_while_both_compute() -> None:
    table = action_table("GPipe", 2, 1, 2)  # F0 F1 . B: the ranks overlap in one forward and one backward
    timeline = simulate(table, [1.0, 1.0], [2.0, 2.0], cores=SharedCores(1, 1, [1.0, 1.0]))
    assert timeline.makespan == pytest.approx(12)
    assert timeline.spans[0][0].end == pytest.approx(1)
    assert timeline.spans[0][1].end == pytest.approx(3)  # beside the other rank's first forward


def test_what_takes_no_core_is_not_shared() -> None:
    table = action_table("GPipe", 2, 1, 4)
    alone = simulate(table, [1.0, 1.0], [2.0, 2.0])
    assert simulate(table, [1.0, 1.0], [2.0, 2.0], cores=SharedCores(1, 1, [0.0, 0.0])).makespan == pytest.approx(
        alone.makespan
    )
    half = simulate(table, [1.0, 1.0], [2.0, 2.0], cores=SharedCores(1, 1, [0.5, 0.5])).makespan
    assert alone.makespan < half < 24


def test_replicas_count_as_the_ranks_that_they_are() -> None:
    table = action_table("1F1B", 2, 1, 4)
    one = simulate(table, [1.0, 2.0], [2.0, 3.0], cores=SharedCores(1, 1, [1.0, 1.0]))
    two = simulate(table, [1.0, 2.0], [2.0, 3.0], cores=SharedCores(2, 2, [1.0, 1.0]))
    assert two.makespan == pytest.approx(one.makespan)


# ---- prices ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program() -> Program:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)))
    return gp.export(model, args=(torch.ones(64, 256),), loss_fn=nn.functional.mse_loss, targets=(torch.ones(64, 256),))


def priced(program: Program, cores: int | None, **mesh: int) -> Estimate:
    wire = Link(1e-7, 1e11)
    cluster = Cluster(1, 4, replace(DEVICES["CPU"], cores=cores, action_s=1e-6), wire, wire)
    plan = choose(program, Mesh(**mesh), PlanConstraints(cluster=cluster, microbatch_size=8))
    return estimate_plan(program, plan, cluster)


def test_four_replicas_on_two_cores_compute_half_as_fast(program: Program) -> None:
    own, shared = priced(program, None, dp_replicate=4), priced(program, 2, dp_replicate=4)
    assert shared.pipeline_s == pytest.approx(2 * own.pipeline_s)
    assert shared.optimizer_s == pytest.approx(2 * own.optimizer_s, rel=0.01)  # sums of a few numbers aside
    assert priced(program, 4, dp_replicate=4) == own


def test_collectives_do_not_take_turns(program: Program) -> None:
    own, shared = priced(program, None, tp=4), priced(program, 2, tp=4)
    sent = own.exposed_s["tp"]
    assert sent > 0
    assert shared.pipeline_s - sent == pytest.approx(2 * (own.pipeline_s - sent))
    assert sum(shared.parts_s.values()) == pytest.approx(shared.step_time_s)


def test_every_action_of_a_pipeline_costs_its_share(program: Program) -> None:
    mesh = Mesh(pp=2)
    wire = Link(0.0, 1e12)
    clusters = [Cluster(1, 2, replace(DEVICES["CPU"], action_s=seconds), wire, wire) for seconds in (0.0, 1e-3)]
    plan = choose(program, mesh, PlanConstraints(cluster=clusters[0], microbatch_size=8, schedule="GPipe"))
    without, costly = (estimate_plan(program, plan, cluster).pipeline_s for cluster in clusters)
    assert costly - without == pytest.approx(
        2 * (8 + 1) * 1e-3, rel=0.01
    )  # forwards and backwards of 8 microbatches and one more


def test_a_pipeline_on_two_cores_takes_at_least_its_work_over_them(program: Program) -> None:
    own, shared = priced(program, None, pp=4), priced(program, 2, pp=4)
    work = 8 * sum(stage.forward_s + stage.backward_s + 2e-6 for stage in own.stages)
    assert max(own.pipeline_s, work / 2) <= shared.pipeline_s <= work / 2 + own.pipeline_s
    assert shared.pipeline_s > own.pipeline_s
