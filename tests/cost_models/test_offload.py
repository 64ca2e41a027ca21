"""What offloading to the host takes and saves: bytes that leave the device, seconds of copies, and errors."""

from __future__ import annotations

from dataclasses import replace

import pytest

import graphpar as gp
from graphpar.cost_models.offloaded_units import HOST_BYTES_PER_S
from graphpar.errors import GraphparError
from graphpar.runtime.state.offloaded_state import AT_ONCE, PIECE_BYTES
from tests.tools.programs import example

A100 = gp.Cluster.parse("2xA100-SXM-80GB")
PINNED = {"mesh": {"pp": 2}, "schedule": "1F1B", "microbatch_size": 1, "global_batch": 8, "recompute": "none"}


def small(cluster: gp.Cluster, memory_bytes: int) -> gp.Cluster:
    return replace(cluster, device=replace(cluster.device, memory_bytes=memory_bytes, communicator_bytes=0))


@pytest.mark.costly
def test_state_leaves_the_device_but_for_what_is_updated() -> None:
    program = example("gpt2")
    plain, away = (gp.plan(program, A100, offload=what, **PINNED).predicted for what in ((), "optimizer"))
    assert plain is not None and away is not None
    assert not plain.host_memory and plain.host_missing_bytes == 0
    link = A100.device.host_link
    assert link is not None
    largest = max(info.nbytes for info in program.parameters.values())
    resident = AT_ONCE * 2 * max(PIECE_BYTES, largest)
    for before, after, host in zip(plain.memory, away.memory, away.host_memory):
        assert (host.optimizer, host.activations) == (before.optimizer, 0)
        assert after.optimizer == min(before.optimizer, resident)
        assert replace(after, optimizer=before.optimizer) == before
    most = max(host.optimizer for host in away.host_memory)
    way = most / (link.bytes_per_s * link.efficiency)
    assert way < away.optimizer_s < 2 * way + plain.optimizer_s + 1e-3


def test_what_blocks_keep_leaves_the_device_but_for_two_blocks() -> None:
    """The first of two stages has two microbatches in flight, the second one."""
    program = example("gpt")
    plain, away = (gp.plan(program, A100, offload=what, **PINNED).predicted for what in ((), "activations"))
    assert plain is not None and away is not None
    first, second = away.host_memory
    assert first.activations > 1.5 * second.activations > 0  # 2 microbatches in flight, and 1
    for before, after, host in zip(plain.memory, away.memory, away.host_memory):
        assert before.activations == pytest.approx(after.activations + host.activations, rel=0.15)
        assert after.activations < before.activations / 2
        assert after.transient > before.transient
    assert away.step_time_s >= plain.step_time_s
    assert 0 < away.communication_s["host link"] < 1


SHARDED = {"mesh": {"dp_shard": 2}, "zero": 3, "global_batch": 8, "microbatch_size": 1, "recompute": "none"}


def test_shards_leave_the_device_and_pass_the_link() -> None:
    """Each microbatch gathers twice, and reduces once; the host updates."""
    program = example("gpt2")
    plain, away = (gp.plan(program, A100, offload=what, **SHARDED).predicted for what in ((), "params"))
    assert plain is not None and away is not None
    (before,), (after,), (host,) = plain.memory, away.memory, away.host_memory
    assert before.parameters == before.gradients == host.parameters == host.gradients > 0
    assert (host.optimizer, host.activations) == (before.optimizer, 0)
    assert after.parameters == after.gradients == after.optimizer == 0
    block = sum(info.nbytes for name, info in program.parameters.items() if ".h.0." in name)
    assert after.buckets == before.buckets + block // 2  # the shard of a unit, on its way
    assert after.total < before.total - 0.8 * host.total
    link = A100.device.host_link
    assert link is not None
    sent, least = (each.communication_s["dp_shard"] for each in (away, plain))
    ways = 4 * 3 * host.parameters / (link.bytes_per_s * link.efficiency)
    assert 0.8 * ways < sent - least < 1.1 * ways + 0.01  # the last unit is gathered once
    assert away.optimizer_s > (host.total + host.parameters + host.optimizer) / HOST_BYTES_PER_S > plain.optimizer_s
    assert away.step_time_s > plain.step_time_s


def test_zero_2_keeps_what_it_gathers_and_sums_over_replicas_pass_the_link_twice() -> None:
    program, four = example("gpt"), replace(A100, devices_per_node=4)
    pins = {**SHARDED, "mesh": {"dp_shard": 2, "dp_replicate": 2}, "zero": 2}
    plain, away = (gp.plan(program, four, offload=what, **pins).predicted for what in ((), "params"))
    assert plain is not None and away is not None
    (before,), (after,), (host,) = plain.memory, away.memory, away.host_memory
    assert after.total == replace(before, gradients=0, optimizer=0).total  # at another moment, with as much
    assert after.parameters == before.parameters and after.gradients == after.optimizer == 0
    assert host.parameters == host.gradients == before.gradients
    (more,), (less,) = away.closings, plain.closings
    assert more.gather > less.gather and more.reduce > less.reduce


def test_shards_on_the_host_are_searched_where_there_are_shards() -> None:
    plan = gp.plan(example("gpt"), A100, offload=["optimizer", "params"], global_batch=8)
    assert plan.offload == ("params",) and plan.mesh.dp_shard == 2 and plan.zero >= 2
    assert plan.predicted is not None and max(each.parameters for each in plan.predicted.host_memory) > 0
    assert "params live in the host's memory: at most" in " ".join(str(plan).split())


def test_a_slow_link_shows() -> None:
    program = example("gpt")
    device = A100.device
    assert device.host_link is not None
    slow = replace(A100, device=replace(device, host_link=replace(device.host_link, bytes_per_s=1e6)))
    found = gp.plan(program, slow, offload="activations", **PINNED).predicted
    assert found is not None
    moved = max(stage.activations for stage in found.host_memory)
    assert found.step_time_s > moved / 1e6
    assert found.exposed_s["host link"] > 0.5 * found.communication_s["host link"]


def test_nothing_is_priced_where_the_device_is_the_host() -> None:
    program = example("gpt")
    plain, away = (gp.plan(program, "2xCPU", offload=what, **PINNED) for what in ((), ["activations", "optimizer"]))
    assert away.offload == ("optimizer", "activations") and away.predicted == plain.predicted
    assert "Offload    optimizer and activations: nothing: the device is a CPU" in str(away)
    assert gp.Plan.from_json(away.to_json()) == away
    plain, away = (gp.plan(program, "2xCPU", offload=what, **SHARDED) for what in ((), "params"))
    assert away.offload == ("params",) and away.predicted == plain.predicted


def test_the_hosts_memory_is_a_limit_where_it_is_known() -> None:
    program = example("gpt")
    little = gp.Cluster.from_json({**A100.to_json(), "host_memory_bytes": 1000})
    assert gp.Cluster.from_json(little.to_json()) == little
    plan = gp.plan(program, little, offload="activations", **PINNED)
    assert plan.predicted is not None and plan.predicted.host_missing_bytes > 0
    assert "does not fit in the hosts of 2xA100-SXM-80GB: a rank has 500 B there" in " ".join(str(plan).split())


@pytest.mark.costly
def test_it_is_among_what_would_let_a_plan_fit() -> None:
    program, one = example("gpt"), gp.Cluster.parse("1xA100")
    pinned = {"microbatch_size": 8, "global_batch": 8, "recompute": "none"}
    plain, away = (gp.plan(program, one, offload=what, **pinned).predicted for what in ((), "activations"))
    assert plain is not None and away is not None
    room = (max(plain.peak_memory_bytes) + max(away.peak_memory_bytes)) // 2
    with pytest.raises(GraphparError, match=r"What would fit: .*offload='activations' \([^)]* a step\)") as alone:
        gp.plan(program, small(one, room), **pinned)
    assert "offload='params'" not in str(alone.value)
    two = small(A100, 2**40)
    plain, away = (gp.plan(program, two, offload=what, **SHARDED).predicted for what in ((), "params"))
    assert plain is not None and away is not None
    room = (max(plain.peak_memory_bytes) + max(away.peak_memory_bytes)) // 2
    with pytest.raises(GraphparError, match=r"What would fit: .*offload='params' \([^)]* a step\)"):
        gp.plan(program, small(A100, room), **{**SHARDED, "mesh": {"dp_replicate": 1}})


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"offload": "optimiser"}, "offload is 'optimiser'; it must be one of .* Did you mean 'optimizer'"),
        ({"offload": 3}, "offload is 3; it must be one of"),
        ({"offload": "activations", "recompute": "selective"}, "offload=activations is unsupported with recompute=selective"),
        ({"offload": "activations", "compile": True}, "offload=activations with compiled blocks is not supported yet"),
        ({"offload": "params"}, "with dp_shard=1 and zero=0 they are not sharded. Give mesh dp_shard=2 or more, or cp=2, and zero=2"),
        ({"offload": "params", "mesh": {"dp_shard": 2}, "zero": 1}, "with dp_shard=2 and zero=1 .* or take offload=optimizer"),
    ],
)  # fmt: skip
def test_what_can_not_be_is_refused(asked: dict[str, object], said: str) -> None:
    with pytest.raises(GraphparError, match=said):
        gp.plan(example("gpt"), "2xA100", **{"mesh": {"pp": 2}, **asked})


def test_an_unknown_link_is_asked_for() -> None:
    device = replace(A100.device, host_link=None)
    with pytest.raises(GraphparError, match="give the device a host_link"):
        gp.plan(example("gpt"), replace(A100, device=device), offload="optimizer", **PINNED)
