"""Collectives of tp beside products: what a stage takes lies between the longer of both and their sum."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import graphpar as gp
from graphpar.cost_models.pricing import Pricing
from graphpar.cost_models.step_costs import StageSeconds
from graphpar.cost_models.work import Collective, Phase, Product
from graphpar.hardware.cluster import Cluster
from graphpar.hardware.devices import DEVICES, Link
from graphpar.ir.plan import Plan
from graphpar.passes.planning.prices import pricing_of
from tests.tools.programs import example, norms_pinned

KINDS = ("none", "gathers", "full")
ONE = Cluster.of(DEVICES["A100-SXM-80GB"], 1, 2)


@functools.cache
def plan_of(kind: str, sequence: bool) -> Plan:
    program = example("llama")
    pins = norms_pinned(program, "S(1)" if sequence else "I")
    return gp.plan(program, mesh="tp=2", shard_plan=pins, recompute=kind)


def priced(plan: Plan, cluster: Cluster, joined: bool, rings: bool = False) -> Pricing:
    program = example("llama")
    execution = replace(pricing_of(program, plan, cluster)[0].execution, joined=joined, rings=rings)
    return pricing_of(program, plan, cluster, execution)[0]


def seconds(pricing: Pricing, apart: bool = False) -> StageSeconds:
    return pricing.stage_seconds(0, len(pricing.units), 64, apart)


@pytest.mark.costly
@settings(max_examples=5, deadline=None)
@given(st.sampled_from(KINDS), st.booleans(), st.floats(8, 12), st.floats(-7, -4))
def test_a_stage_takes_at_least_the_longer_and_at_most_the_sum(
    kind: str, sequence: bool, rate: float, latency: float
) -> None:
    plan, cluster = plan_of(kind, sequence), replace(ONE, intra_node=Link(10**latency, 10**rate))
    at_once = replace(ONE, intra_node=Link(0.0, 1e30))

    hidden, waiting = (seconds(priced(plan, cluster, joined)) for joined in (True, False))
    apart, alone = seconds(priced(plan, cluster, True), apart=True), seconds(priced(plan, at_once, False))
    sent = sum(hidden.sent.values())

    assert hidden.forward == waiting.forward
    assert hidden.backward < waiting.backward
    assert hidden.sent == waiting.sent
    assert waiting.forward_sent == pytest.approx(waiting.forward_exposed)
    assert waiting.backward_sent == pytest.approx(waiting.backward_exposed)
    assert hidden.backward >= alone.backward - 1e-12
    assert hidden.forward + hidden.backward >= sent
    assert waiting.backward - hidden.backward == pytest.approx(
        sum(waiting.backward_exposed.values()) - sum(hidden.backward_exposed.values())
    )
    assert (apart.backward, apart.backward_exposed) == (
        pytest.approx(waiting.backward),
        pytest.approx(waiting.backward_exposed),
    )


def test_a_fast_link_hides_the_sums_of_gradients_whole() -> None:
    """Of the forward's gathers and reduce-scatters, and of the backward's gathers before a product, nothing is hidden."""
    plan, cluster = plan_of("gathers", True), replace(ONE, intra_node=Link(0.0, 1e14))
    pricing = priced(plan, cluster, True)

    for unit in pricing.units:
        for row in (*unit.kind.work.rows, *unit.kind.again.work.rows):
            if isinstance(row, Collective):
                assert pricing.of_units.exposed_s(row, 64) == (0.0 if row.beside else pricing.of_units.sent_s(row, 64))
                assert all(isinstance(each, Product) for each in row.beside)
    block = pricing.units[1].kind
    beside = [row for row in block.work.rows if isinstance(row, Collective) and row.beside]
    again = [row for row in block.again.work.rows if isinstance(row, Collective)]
    assert {(row.phase, row.kind, len(row.beside)) for row in beside} == {
        (Phase.INPUT, "reduce-scatter", count) for count in (3, 2)
    }
    assert {each.phase for row in beside for each in row.beside} == {Phase.WEIGHT}
    assert sorted(len(row.beside) for row in again) == [2, 3]
    assert {each.phase for row in again for each in row.beside} == {Phase.INPUT}


def test_a_cpu_hides_nothing_and_pieces_are_gathered_again_at_once() -> None:
    cluster = Cluster.parse("2xCPU")
    for kind in ("none", "gathers"):
        plan = plan_of(kind, True)
        assert seconds(priced(plan, cluster, True)) == seconds(priced(plan, cluster, False))
    rings = priced(plan_of("gathers", True), ONE, True, rings=True)
    again = [row for row in rings.units[1].kind.again.work.rows if isinstance(row, Collective)]
    assert again and not any(row.beside for row in again)


def test_frozen_weights_hide_nothing() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
            self.up.weight.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(self.norm(x))))

    program = gp.export(
        lambda: nn.Sequential(Layer(), Layer()),
        (torch.zeros(4, 8, 64),),
        loss_fn=lambda out: out.square().mean(),
        mode="train",
    )
    plan = gp.plan(program, mesh="tp=2", shard_plan={"*.up": "colwise", "*.down": "rowwise"})
    pricing = pricing_of(program, plan, ONE)[0]
    rows = [row for unit in pricing.units for row in unit.kind.work.rows if isinstance(row, Collective)]

    assert rows and not any(row.beside for row in rows)


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_a_schedule_that_splits_backwards_waits(schedule: str) -> None:
    program = example("llama")
    pins = norms_pinned(program, "S(1)")
    plan = gp.plan(program, mesh="pp=2,tp=2", shard_plan=pins, schedule=schedule)
    pricing, layout = pricing_of(program, plan, Cluster.of(DEVICES["A100-SXM-80GB"], 1, 4))
    whole = [pricing.stage_seconds(*stage, layout.microbatch_size) for stage in pricing.stages_of(layout)]

    found = pricing.estimate(layout)

    for stage, cost in zip(found.stages, whole):
        assert (stage.backward_s > cost.backward) == (schedule != "1F1B")
        assert stage.backward_s - cost.backward == pytest.approx(
            sum(stage.backward_exposed_s.values()) - sum(cost.backward_exposed.values()), abs=1e-15
        )
    assert found.communication_s["tp"] > found.exposed_s["tp"] or schedule != "1F1B"


@pytest.mark.slow
def test_a_search_gathers_again_where_memory_is_short_and_nowhere_else() -> None:
    """On a whole mesh with a cluster, without being asked."""
    program = example("llama")
    asked = functools.partial(
        gp.plan,
        program,
        mesh="tp=2",
        shard_plan=norms_pinned(program, "S(1)"),
        global_batch=64,
        microbatch_size=32,
        memory_headroom=0,
    )
    roomy = asked(cluster=ONE)
    assert roomy.recompute == "none" and roomy.predicted is not None
    room = max(roomy.predicted.peak_memory_bytes) - 1

    short = asked(cluster=replace(ONE, device=replace(ONE.device, memory_bytes=room)))

    assert isinstance(short.recompute, dict) and set(short.recompute.values()) == {"gathers"}
    assert short.predicted is not None and max(short.predicted.peak_memory_bytes) <= room
