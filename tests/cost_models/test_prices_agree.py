"""A plan has one price, however it is asked for, and better hardware makes it no slower."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

import graphpar as gp
from graphpar.cost_models.estimates import Estimate
from graphpar.hardware.cluster import Cluster, Pod
from graphpar.passes.planning.planned import Planned
from tests.tools.programs import example
from tests.tools.samples import sample

PINS: list[dict[str, Any]] = [
    {},
    {"mesh": {"tp": 2}},
    {"mesh": {"pp": 2}},
    {"mesh": {"pp": 2, "tp": 2}, "schedule": "InterleavedZeroBubble"},
    {"mesh": {"dp_shard": 2}, "zero": 1},
    {"mesh": {"dp_shard": 2}, "zero": 3},
    {"recompute": "full"},
    {"offload": ("optimizer",)},
]
MODELS = ("gpt", "llama", "mixtral", "t5", "two_networks", "two_towers", "vit")
CASES = [
    (model, f"{nodes}x{devices}x{kind}", pins)
    for model in MODELS
    for nodes, devices in ((2, 2), (1, 4), (4, 2))
    for kind in ("A100", "H100", "CPU")
    for pins in PINS
]
ENDS = "two_towers", "2x2xH100", {"mesh": {"tp": 2}}
"""After the last block its result is redistributed before the next stage may begin."""


def planned(model: str, cluster: str, pins: dict[str, Any]) -> tuple[gp.Program, Planned, Estimate]:
    program = example(model)
    plan = gp.plan(program, cluster, global_batch=32, **pins)
    assert isinstance(plan, Planned) and plan.predicted is not None
    return program, plan, plan.predicted


def same(one: Estimate, other: Estimate) -> bool:
    return (
        one.step_time_s == pytest.approx(other.step_time_s, rel=1e-9)
        and one.peak_memory_bytes == other.peak_memory_bytes
    )


def test_a_stage_ends_where_the_program_is_split() -> None:
    program, plan, predicted = planned(*ENDS)
    assert same(gp.estimate(program, plan, plan.cluster), predicted)


@pytest.mark.costly
@pytest.mark.parametrize(("model", "name", "pins"), sample(random.Random(3).sample(CASES, 40), 2), ids=str)
def test_a_plan_has_one_price(model: str, name: str, pins: dict[str, Any]) -> None:
    program, plan, predicted = planned(model, name, pins)
    cluster = plan.cluster
    assert cluster is not None and same(gp.estimate(program, plan, cluster), predicted)
    assert sum(predicted.parts_s.values()) == pytest.approx(predicted.step_time_s, rel=1e-9)
    equal = [replace(cluster, device=replace(cluster.device, memory_bytes=2 * cluster.device.memory_bytes))]
    if cluster.nodes > 1:
        half = replace(cluster, nodes=cluster.nodes // 2, headroom=None)
        groups = replace(Cluster.mixed([half, half]), headroom=cluster.headroom)
        equal.append(replace(cluster, pods=(Pod(cluster.nodes // 2, cluster.inter_node),)))
        equal += [groups] if groups.kinds_of_stages(plan.mesh.pp, plan.mesh.size // plan.mesh.pp) else []
    assert all(same(gp.estimate(program, plan, each), predicted) for each in equal)
    device = cluster.device
    better = [
        cluster.with_network(2),
        replace(cluster, intra_node=cluster.intra_node.times(2)),
        replace(cluster, device=replace(device, flops={name: 2 * rate for name, rate in device.flops.items()})),
        replace(cluster, device=replace(device, memory_bytes_per_s=2 * device.memory_bytes_per_s)),
    ]
    for each in better:
        assert gp.estimate(program, plan, each).step_time_s <= predicted.step_time_s * (1 + 1e-9)
    answer = gp.what_if(plan, network=0.5)
    assert same(answer.before.estimate, predicted) and answer.same is not None
    assert same(answer.same.estimate, gp.estimate(program, plan, answer.cluster))
    assert answer.same.estimate.step_time_s >= predicted.step_time_s * (1 - 1e-9)
