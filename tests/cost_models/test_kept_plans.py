"""Plans that a search kept, at other conditions: the prices are those that the model itself would give."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import graphpar as gp
from graphpar.cli.main import main
from graphpar.cost_models.kept_plans import KEPT_PLANS, Answer, Change, KeptPlans, what_if
from graphpar.errors import GraphparError
from graphpar.hardware.cluster import Cluster
from graphpar.passes.planning.planned import Planned
from tests.tools.programs import example

CLUSTER = Cluster.parse("2x4xA100-40GB")
asked = partial(what_if, decided=gp.plan(example("gpt"), mesh={}))


@pytest.fixture(scope="module")
def program() -> gp.Program:
    return example("gpt")


@pytest.fixture(scope="module")
def chosen(program: gp.Program) -> Planned:
    found = gp.plan(program, CLUSTER, global_batch=64)
    assert isinstance(found, Planned)
    return found


@pytest.fixture(scope="module")
def kept(chosen: Planned) -> KeptPlans:
    """As it is read from a file."""
    assert chosen.found is not None and chosen.found.kept is not None
    return KeptPlans.from_json(json.loads(json.dumps(chosen.found.kept.to_json())))


def seconds(answer: Answer) -> float:
    assert answer.same is not None
    return answer.same.estimate.step_time_s


def test_what_was_written_has_the_prices_of_the_search(kept: KeptPlans, chosen: Planned) -> None:
    assert chosen.found is not None and chosen.predicted is not None
    assert kept.plans[0].mesh == chosen.mesh and kept.global_batch == 64 and kept.cluster == chosen.cluster
    before = asked(kept, Change(global_batch=64)).before.estimate
    assert replace(before, blocks=(), cluster="") == replace(chosen.predicted, blocks=(), cluster="")
    others = {tuple(each.candidate.mesh.degrees().values()): each.estimate for each in chosen.found.alternatives}
    for plan in kept.plans[1:]:
        found = asked(replace(kept, plans=(plan,)), Change(microbatch_size=plan.layout.microbatch_size)).before
        known = others.get(tuple(plan.mesh.degrees().values()))
        assert known is None or found.estimate.step_time_s == pytest.approx(known.step_time_s, rel=1e-12)
    assert others


@pytest.mark.parametrize(
    "change",
    [{"network": 0.25}, {"cluster": "2x4xH100"}, {"cluster": "2x4xA100-40GB", "memory_headroom": 0.3}],
    ids=str,
)
def test_the_same_plan_has_the_price_that_the_model_gives_it(
    change: dict[str, Any], kept: KeptPlans, chosen: Planned, program: gp.Program
) -> None:
    given = change | ({"cluster": Cluster.parse(change["cluster"])} if "cluster" in change else {})
    answer = asked(kept, Change(**given))
    direct = gp.estimate(program, chosen, Change(**given).on(kept.cluster))
    assert seconds(answer) == pytest.approx(direct.step_time_s, rel=1e-9)
    assert answer.same is not None and answer.same.estimate.peak_memory_bytes == direct.peak_memory_bytes


def test_a_batch_is_made_up_by_microbatches_and_devices_by_replicas(kept: KeptPlans, program: gp.Program) -> None:
    twice = asked(kept, Change(global_batch=128)).same
    assert twice is not None
    own = kept.plans[0]
    assert twice.layout.microbatches == 2 * own.layout.microbatches and twice.mesh == own.mesh
    grown = asked(kept, Change(devices=16, global_batch=128)).same
    assert grown is not None and grown.mesh.size == 16 and grown.layout == own.layout
    for priced, cluster in ((twice, CLUSTER), (grown, Cluster.parse("4x4xA100-40GB"))):
        plan = gp.plan(
            program, cluster, mesh=priced.mesh.degrees(), global_batch=128, schedule=priced.layout.schedule, zero=priced.zero,
            microbatch_size=priced.layout.microbatch_size, recompute=own.recompute, top=0,
        )  # fmt: skip
        assert priced.estimate.step_time_s == pytest.approx(gp.estimate(program, plan, cluster).step_time_s, rel=0.02)


def test_the_best_fits_and_is_no_slower_than_the_same_plan_beyond_what_is_known(kept: KeptPlans) -> None:
    for change in (Change(network=0.01), Change(network=10), Change(global_batch=32), Change(devices=4)):
        answer = asked(kept, change)
        assert answer.best is not None and answer.best.fits
        fitting = [each.estimate.step_time_s for each in answer.plans if each.fits]
        assert answer.plans[0].estimate.step_time_s == min(fitting)
        if answer.best is not answer.same:
            assert answer.best.estimate.step_time_s == min(fitting)


def test_where_memory_is_short_other_recomputation_is_tried_and_else_nothing_fits(
    kept: KeptPlans, chosen: Planned
) -> None:
    own = max(asked(kept, Change(global_batch=64)).before.estimate.peak_memory_bytes)
    device = replace(kept.cluster.device, memory_bytes=int(own * 0.9))
    short = replace(kept.cluster, device=device, headroom=0.0)
    answer = asked(kept, Change(cluster=short))
    assert answer.same is not None and not answer.same.fits
    assert answer.best is None or max(answer.best.estimate.peak_memory_bytes) <= short.room_bytes
    none = asked(kept, Change(cluster=replace(short, device=replace(device, memory_bytes=2**16))))
    assert none.best is None and none.plans


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"global_batch": 7}, "can have a batch of 7 on 8 devices: A global batch of 7 does not divide"),
        ({"microbatch_size": 3}, "do not divide into microbatches of 3; sizes that do: 1, 2, 4"),
        ({"devices": 6}, "fill no whole number of nodes"),
        ({"devices": 1}, "of which no number of replicas makes up 1 device"),
        ({"mesh": {"foo": 2}}, "There is no mesh axis 'foo'"),
        ({"mesh": {"tp": 8, "pp": 1}}, "with this mesh"),
        ({"network": -1.0}, "network is -1.0"),
        ({"cluster": Cluster.parse("8xCPU")}, "compile the model for 8xCPU"),
        ({"cluster": CLUSTER, "devices": 4}, "leave --devices out"),
    ],
)
def test_what_no_kept_plan_can_have_is_refused(change: dict[str, Any], why: str, kept: KeptPlans) -> None:
    with pytest.raises(GraphparError, match=why):
        asked(replace(kept, plans=kept.plans[:1]), Change(**change))


def _found(program: gp.Program, cluster: str, **pins: Any) -> tuple[KeptPlans, Planned]:
    plan = gp.plan(program, Cluster.parse(cluster), **pins)
    assert isinstance(plan, Planned) and plan.found is not None and plan.found.kept is not None
    return plan.found.kept, plan


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_state_that_one_rank_holds_is_not_sharded(zero: int, program: gp.Program) -> None:
    kept, plan = _found(program, "4xH100", global_batch=32, zero=zero, mesh={"pp": 1, "dp_shard": 4})
    alone = what_if(kept, Change(devices=1), plan).same
    assert alone is not None and alone.zero == 0 and alone.mesh.size == 1
    size, cluster = alone.layout.microbatch_size, Cluster.parse("1xH100")
    there = gp.plan(program, cluster, mesh={"pp": 1}, global_batch=32, microbatch_size=size, recompute=plan.recompute)
    direct = gp.estimate(program, there, cluster)
    assert alone.estimate.step_time_s == pytest.approx(direct.step_time_s, rel=1e-9)
    assert alone.estimate.peak_memory_bytes == direct.peak_memory_bytes


def test_what_the_rules_of_an_option_refuse_is_no_plan(program: gp.Program) -> None:
    mesh = {"dp_shard": 4}
    kept, plan = _found(program, "4xH100", global_batch=32, zero=3, reshard=2, mesh=mesh)
    with pytest.raises(GraphparError, match=r"reshard=2 must be a proper divisor of dp_shard=2"):
        what_if(kept, Change(devices=2), plan)
    kept, plan = _found(program, "4xH100", global_batch=32, zero=3, offload="params", mesh=mesh)
    with pytest.raises(GraphparError, match=r"zero=3 shards state over dp_shard and cp, which have one rank"):
        what_if(kept, Change(devices=1), plan)
    kept, plan = _found(program, "4xH100", global_batch=32, reduce_dtype="bf16", mesh=mesh)
    with pytest.raises(GraphparError, match=r"reduce_dtype=bf16 is for sums of gradients"):
        what_if(kept, Change(devices=1), plan)


def test_replicas_that_compute_the_batch_together_keep_their_number_and_one_microbatch() -> None:
    program = example("resnet_batchnorm")
    kept, plan = _found(program, "4xA100", global_batch=32)
    assert kept.coupled and not kept.splits and len({each.mesh for each in kept.plans}) > 3
    for change in (Change(network=0.5), Change(global_batch=64), Change(global_batch=16)):
        priced = what_if(kept, change, plan).plans
        assert priced and all(each.layout.microbatches == 1 for each in priced)
        assert {each.mesh for each in priced} <= {each.mesh for each in kept.plans}
    answer = what_if(kept, Change(global_batch=64), plan)
    assert answer.same is None and answer.why_not is not None and "can't be split" in answer.why_not
    for devices in (2, 8):
        with pytest.raises(GraphparError, match="replicas compute the batch together"):
            what_if(kept, Change(devices=devices), plan)


def test_a_model_that_is_traced_for_one_batch_has_no_other(kept: KeptPlans) -> None:
    static = replace(kept, symbolic=False)
    assert asked(static, Change(network=0.5)).same
    for change in (Change(global_batch=128), Change(microbatch_size=kept.plans[0].layout.microbatch_size // 2)):
        with pytest.raises(GraphparError, match="traced for a batch of 64 in microbatches of"):
            asked(static, change)


def test_microbatches_have_the_rows_that_are_asked_for_or_can_be(kept: KeptPlans) -> None:
    given = asked(kept, Change(microbatch_size=2))
    assert given.same is not None and {each.layout.microbatch_size for each in given.plans} == {2}
    small = asked(kept, Change(devices=32))
    assert small.best is not None and small.same is None and "microbatches of" in str(small.why_not)
    for each in small.plans:
        assert each.layout.microbatch_size * each.layout.microbatches * each.mesh.replicas == 64
        assert each.layout.microbatches == 1


def test_devices_without_the_units_of_a_program_are_refused(kept: KeptPlans, chosen: Planned) -> None:
    eight, blocks = (replace(chosen, dtype="bf16", fp8=("**",), fp8_recipe=recipe) for recipe in ("rowwise", "mxfp8"))
    hopper, blackwell = (Change(cluster=Cluster.parse(f"8x{name}")) for name in ("H100", "B200"))
    with pytest.raises(GraphparError, match="no units for 8 bits"):
        what_if(kept, Change(network=0.5), eight)
    with pytest.raises(GraphparError, match="no units for blocks"):
        what_if(kept, hopper, blocks)
    assert what_if(kept, hopper, eight).same and what_if(kept, blackwell, blocks).same


def test_python_and_the_command_line_give_the_same_answer(
    tmp_path: Path, chosen: Planned, program: gp.Program, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    gp.partition(program, chosen).save(folder)
    assert main(["what-if", str(folder), "--network", "0.5x", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    answer = gp.what_if(chosen, network=0.5)
    expected = json.loads(json.dumps({"change": {"network": 0.5}, **answer.to_json()}))
    assert {**printed, "seconds": 0} == {**expected, "seconds": 0}
    assert main(["what-if", str(folder / "plan.json"), "--batch", "128", "--mesh", f"tp={chosen.mesh.tp}"]) == 0
    assert "times the rows a second" in capsys.readouterr().out
    for arguments, why in (
        ([str(folder)], "Give what is to be different"),
        ([str(folder), "--network", "0"], "must be a number above 0"),
        ([str(folder), "--network", "half"], "no number of times"),
        ([str(folder), "--devices", "2.5"], "whole number"),
    ):
        assert main(["what-if", *arguments]) == 2
        assert why in capsys.readouterr().err
    record = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(record | {"schedule": "GPipe"}))
    assert main(["what-if", str(folder), "--network", "0.5x"]) == 2
    (folder / "plan.json").write_text(json.dumps(record))
    known = json.loads((folder / KEPT_PLANS).read_text())
    changed = known["plans"] | {"records": [*known["plans"]["records"][1:], known["plans"]["records"][0]]}
    capsys.readouterr()
    for damaged in ({}, known | {"global_batch": 32}, known | {"plans": changed}):
        (folder / KEPT_PLANS).write_text(json.dumps(damaged))
        assert main(["what-if", str(folder), "--network", "0.5x"]) == 2
        assert f"{KEPT_PLANS}: what a search kept is not as it was written" in capsys.readouterr().err
    (folder / KEPT_PLANS).unlink()
    assert main(["what-if", str(folder), "--network", "0.5x"]) == 2
    with pytest.raises(GraphparError, match="no search"):
        gp.what_if(gp.plan(program, mesh={"tp": 2}), network=0.5)
