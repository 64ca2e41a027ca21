"""Clusters of several kinds of devices: each stage is priced on its own, and stages are cut by their speeds and memory."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphpar as gp
from graphpar.codegen.scripts import launch_files
from graphpar.cost_models.kept_plans import Change
from graphpar.hardware.cluster import Cluster
from graphpar.hardware.devices import DEVICES, Device, Link
from graphpar.passes.planning.constraints import PlanConstraints
from graphpar.passes.planning.prices import estimate_plan, pricing_of
from graphpar.passes.planning.search import Planner
from graphpar.report.data import report_data
from graphpar.report.page import html
from graphpar.runtime.manifest import load_manifest
from graphpar.runtime.rendezvous import read_plan
from tests.passes.planning.test_planner import planner_of, small
from tests.passes.planning.test_pods import Block

LINK = Link(1e-6, 1e10)


def device(name: str, flops: float, memory: float = 1e12) -> Device:
    return replace(small(memory), name=name, flops={"fp32": flops}, half_reduction=0.0, compute_units=None)


def cluster(given: Device, nodes: int, per_node: int = 1, between: Link = LINK) -> Cluster:
    return replace(Cluster.of(given, nodes, per_node), inter_node=between)


FAST, SLOW = device("fast", 2.5e11), device("slow", 1e11)
MIX = Cluster.mixed([cluster(FAST, 1), cluster(SLOW, 2)])


@pytest.fixture(scope="module")
def program() -> gp.Program:
    blocks = nn.Sequential(*(Block() for _ in range(12)))
    return gp.export(blocks, (torch.randn(256, 256),), loss_fn=lambda y: y.square().mean())


def starts_of(plan: gp.Plan) -> list[int]:
    return [0, *(int(each.path) for each in plan.split_points)]


def test_stages_are_cut_by_the_speed_of_their_devices(program: gp.Program) -> None:
    """One device is 2.5 times as fast as the two others: with equal stages it waits."""
    pins: dict[str, Any] = {"mesh": {"pp": 3}, "schedule": "1F1B", "microbatch_size": 8}
    plan, equal = (gp.plan(program, MIX, **pins, **more) for more in ({}, {"split": ("4", "8")}))
    assert starts_of(plan)[1] in (6, 7) and starts_of(equal) == [0, 4, 8]  # of 12 blocks
    assert plan.predicted is not None and equal.predicted is not None
    assert equal.predicted.step_time_s > 1.3 * plan.predicted.step_time_s
    assert plan.predicted.devices == ("fast", "slow", "slow")
    fast, *slow = plan.predicted.stages
    assert fast.forward_s / starts_of(plan)[1] == pytest.approx(slow[0].forward_s / 3 / 2.5, rel=0.05)


def test_a_stage_costs_what_it_does_where_all_devices_are_its_own(program: gp.Program) -> None:
    near, far = (replace(LINK, bytes_per_s=rate) for rate in (1e10, 1e9))
    mix = Cluster.mixed([cluster(FAST, 2, between=near), cluster(SLOW, 2, between=far)])
    plan = gp.plan(program, mix, mesh={"pp": 4}, schedule="1F1B", microbatch_size=8)
    there = estimate_plan(program, plan, mix.with_headroom())
    alone = [estimate_plan(program, plan, cluster(kind, 4, between=link)) for kind, link in ((FAST, near), (SLOW, far))]
    for stage, kind, sends in zip(there.stages, (0, 0, 1, 1), (0, 1, 1, 1)):
        own, link = alone[kind].stages[stage.index], alone[sends].stages[stage.index]
        assert (stage.forward_s, stage.backward_s) == (own.forward_s, own.backward_s)
        assert (stage.sent_s, stage.returned_s) == (link.sent_s, link.returned_s)
        assert there.closings[stage.rank] == alone[kind].closings[stage.rank]
    assert there.memory == alone[0].memory
    assert alone[0].step_time_s < there.step_time_s < alone[1].step_time_s
    flops = pricing_of(program, plan, mix)[0].flops(pricing_of(program, plan, mix)[1])
    assert there.mfu == pytest.approx(flops / there.step_time_s / (2 * 2.5e11 + 2 * 1e11))


def test_equal_devices_in_groups_are_one_cluster(program: gp.Program) -> None:
    groups = Cluster.mixed([cluster(SLOW, 2), cluster(SLOW, 1)])
    assert groups.device == SLOW
    found, whole = (gp.plan(program, each, mesh={"pp": 3}) for each in (groups, cluster(SLOW, 3)))
    assert found.predicted is not None and whole.predicted is not None
    assert found.split_points == whole.split_points and found.predicted.step_time_s == whole.predicted.step_time_s


@pytest.mark.parametrize("recompute", ["none", "auto"])
def test_stages_are_cut_by_the_memory_of_their_devices(program: gp.Program, recompute: str) -> None:
    """The fast device has no room for all that it would compute: the slow ones take more."""
    pins: dict[str, Any] = {"mesh": {"pp": 3}, "schedule": "1F1B", "microbatch_size": 8, "recompute": recompute}
    free = gp.plan(program, MIX, **pins).predicted
    assert free is not None
    room = int(free.peak_memory_bytes[0] * 4.4 / 6)
    tight = Cluster.mixed([cluster(replace(FAST, memory_bytes=room), 1), cluster(SLOW, 2)])
    plan = gp.plan(program, replace(tight, headroom=0.0), **pins)
    assert plan.predicted is not None
    assert plan.predicted.missing_bytes <= 0 and plan.predicted.peak_memory_bytes[0] <= room == plan.predicted.rooms[0]
    assert plan.predicted.fullest[0] == 0 and plan.predicted.memory_bytes == room
    assert starts_of(plan)[1] < 6 and free.peak_memory_bytes[0] > room


@pytest.mark.parametrize(("fast", "slow"), [(1, 2), (2, 1), (3, 1)])
def test_the_slowest_stage_is_as_fast_as_units_allow(program: gp.Program, fast: int, slow: int) -> None:
    """Against every cut, each stage at the seconds of its own devices."""
    mix = Cluster.mixed([cluster(FAST, fast), cluster(SLOW, slow)])
    stages = fast + slow
    planner = Planner(program, PlanConstraints(cluster=mix, mesh={"pp": stages}, schedule="1F1B", microbatch_size=8))
    (candidate,) = planner.bounded()[0]
    pricing = planner.prices.known(candidate)

    def slowest(starts: tuple[int, ...]) -> float:
        runs = zip(starts, (*starts[1:], len(pricing.units)))
        costs = [pricing.on(rank).stage_seconds(*run, 8) for rank, run in enumerate(runs)]
        return max(cost.forward + cost.backward for cost in costs)

    cuts = [(0, *rest) for rest in itertools.combinations(range(1, len(pricing.units)), stages - 1)]
    found = planner.prices.starts(candidate)
    assert slowest(found) == pytest.approx(min(map(slowest, cuts)))
    widest = planner.prices.balancer(candidate).within([1.0] * stages, [1e12] * stages)[1]
    assert widest is not None and slowest(widest) == pytest.approx(slowest(found))


@pytest.mark.costly
def test_leaving_out_what_can_not_win_changes_nothing() -> None:
    """Of all meshes whose stages have devices of one kind, and of groups of tp and replicas inside of stages."""
    mix = Cluster.mixed([cluster(FAST, 1, per_node=2), cluster(SLOW, 1, per_node=2)])
    planner = planner_of("gpt", mix)
    pruned, everything = planner.search(), planner.search(prune=False)
    assert pruned.best is not None and everything.best is not None
    assert pruned.best.candidate == everything.best.candidate and pruned.best.layout == everything.best.layout
    assert {(each.mesh.pp, each.mesh.tp) for each in planner.space.all} >= {(2, 1), (2, 2), (4, 1)}


@pytest.mark.costly
def test_bounds_are_below_the_price() -> None:
    planner = planner_of("uneven", Cluster.mixed([cluster(FAST, 2), cluster(SLOW, 2)]))
    candidates, _ = planner.bounded()
    assert len(candidates) > 50 and all(each.mesh.pp > 1 for each in candidates)
    for candidate in candidates:
        step_s = planner.fitting.exactly(planner.fitting.price(candidate)).estimate.step_time_s
        assert candidate.bound <= step_s * (1 + 1e-9)
        assert planner.bounds.of_stages(candidate) <= step_s * (1 + 1e-9)
        assert planner.bounds.in_order(candidate) <= step_s * (1 + 1e-9)
        assert planner.bounds.in_memory(candidate) <= step_s * (1 + 1e-9)


# ---- as text and files -----------------------------------------------------------------------------------------


def test_text_and_data() -> None:
    made = Cluster.parse("8xH100 + 16xA100")
    assert (made.size, made.nodes, made.devices_per_node) == (24, 3, 8)
    assert str(made) == "8xH100-SXM-80GB+2x8xA100-SXM-80GB" and Cluster.parse(str(made)) == made
    assert Cluster.from_json(json.loads(json.dumps(made.to_json()))) == made
    with_room = made.with_headroom(0.1)
    assert Cluster.from_json(with_room.to_json()) == with_room
    assert [each.room_bytes for each in with_room.kinds] == [
        int(DEVICES[n].memory_bytes * 0.9) for n in ("H100-SXM-80GB", "A100-SXM-80GB")
    ]
    assert made.kinds_of_stages(6, 4) == (0, 0, 1, 1, 1, 1) and made.kinds_of_stages(2, 12) is None


def test_the_best_of_two_devices_is_nowhere_worse() -> None:
    made, one, other = Cluster.parse("8xMI300X+8xV100").device, DEVICES["MI300X-192GB"], DEVICES["V100-SXM2-16GB"]
    for dtype in made.flops:
        assert made.peak(dtype) >= max(one.peak(dtype), other.peak(dtype))
    assert (
        "fp8" not in made.flops
        and made.memory_bytes == one.memory_bytes
        and made.launch_s == min(one.launch_s, other.launch_s)
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8xH100+4xA100", "nodes of all groups must have as many devices; they have 4, 8"),
        ("2xCPU+2xA100", "groups of GPUs and of CPUs run no program together"),
        ("8xH100+", "write devices x kind"),
    ],
)
def test_what_is_wrong_in_groups_is_named(text: str, expected: str) -> None:
    with pytest.raises(gp.GraphparError) as caught:
        Cluster.parse(text)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ({"headroom": 0.3}, "headroom is of all groups; leave it out of each"),
        ({"nodes": 0}, "groups[1]: nodes is 0; it must be a whole number above 0"),
        ({"device": {"kind": "cuda"}}, "groups[1]: device: the field 'flops' is missing"),
    ],
)
def test_what_is_wrong_in_a_group_is_named(field: dict[str, Any], expected: str) -> None:
    group = {"nodes": 1, "devices_per_node": 8, "device": "A100"}
    with pytest.raises(gp.GraphparError) as caught:
        Cluster.from_json({"groups": [group, group | field]})
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ({"pp": 2, "dp_replicate": 12}, "+2x8xA100-SXM-80GB has 8 of H100-SXM-80GB, 16 of A100-SXM-80GB: take a pp"),
        ({"pp": 1}, "so 3 or a multiple"),
    ],
)
def test_a_stage_has_devices_of_one_kind(program: gp.Program, mesh: dict[str, int], expected: str) -> None:
    with pytest.raises(gp.GraphparError) as caught:
        gp.plan(program, "8xH100+16xA100", mesh=mesh)
    assert expected in str(caught.value)


def test_a_plan_for_other_hardware_says_so(program: gp.Program) -> None:
    plan = gp.plan(program, cluster(SLOW, 4), mesh={"dp_replicate": 4})
    with pytest.raises(gp.GraphparError, match="Stages of 4 ranks have devices of several kinds on 2x1xfast"):
        estimate_plan(program, plan, Cluster.mixed([cluster(FAST, 2), cluster(SLOW, 2)]))
    with pytest.raises(gp.GraphparError, match="kinds; give --cluster instead of --devices"):
        Change(devices=6).on(MIX)


@pytest.mark.parametrize("change", [{"network": 0.25}, {"cluster": cluster(SLOW, 3)}, {"cluster": "before"}], ids=str)
def test_what_if_prices_each_stage_on_its_devices(program: gp.Program, change: dict[str, Any]) -> None:
    plan = gp.plan(program, cluster(SLOW, 3) if change.get("cluster") == "before" else MIX, mesh={"pp": 3})
    answer = gp.what_if(plan, **change | ({"cluster": MIX} if change.get("cluster") == "before" else {}))
    direct = gp.estimate(program, plan, answer.cluster)
    assert answer.same is not None and answer.same.estimate.devices == direct.devices
    assert answer.same.estimate.step_time_s == pytest.approx(direct.step_time_s, rel=1e-9)
    assert answer.same.estimate.rooms == direct.rooms
    assert plan.predicted is not None
    assert answer.before.estimate.step_time_s == pytest.approx(plan.predicted.step_time_s, rel=1e-9)


def test_reports_and_launch_files_name_the_kinds(program: gp.Program) -> None:
    plan = gp.plan(program, MIX, mesh={"pp": 3})
    assert gp.Plan.from_json(json.loads(json.dumps(plan.to_json()))).cluster == plan.cluster
    text = " ".join(str(plan).split())
    assert "pp 0: fast · pp 1-2: slow" in text
    data = report_data(gp.partition(program, plan).compilation)
    assert data["predicted"]["devices"] == ["fast", "slow", "slow"] and "pp 0: fast · pp 1-2: slow" in html(data)
    files = launch_files("Model", plan)
    assert (
        "torchrun numbers nodes in the order of their names: first 1 of fast, then 2 of slow.\n" in files["launch.sh"]
    )


def test_a_program_knows_what_it_runs_on(program: gp.Program, tmp_path: Path) -> None:
    gp.partition(program, gp.plan(program, MIX, mesh={"pp": 3})).save(tmp_path / "out")
    assert load_manifest(tmp_path / "out").device_kind == read_plan(tmp_path / "out")[0] == "cuda"
    with pytest.raises(gp.GraphparError, match="groups have devices of their own; leave the field 'device' out"):
        Cluster.from_json({**MIX.to_json(), "device": "A100"})
