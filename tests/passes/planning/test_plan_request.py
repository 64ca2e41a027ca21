"""What is asked of a plan is checked before a program is traced or searched, from Python and from the command line."""

from __future__ import annotations

import html
import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphpar as gp
from graphpar import api
from graphpar.hardware.cluster import HEADROOM
from graphpar.passes.planning.plan_request import plan_request
from graphpar.passes.planning.search import Planner
from graphpar.passes.planning.validate_plan import check_alone
from graphpar.runtime.manifest import load_manifest
from graphpar.runtime.plan_record import decisions_of
from graphpar.verification import Verification
from tests.tools.programs import example

NAMED = [
    ({"cluster": "h100x8"}, "Did you mean '8xH100-SXM-80GB'"),
    ({"cluster": "8 H100"}, "Did you mean '8xH100-SXM-80GB'"),
    ({"cluster": "8xh1000"}, "There is no device 'h1000'; known are H100"),
    ({"cluster": 2.5}, "cluster is a float; it must be a Cluster, a name such as '2xH100'"),
    ({"cluster": 0}, "the number of devices is 0"),
    ({"cluster": "2xCPU", "devices": 4}, "devices is 4, but the cluster 2xCPU has 2"),
    ({"devices": 0}, "devices is 0; it must be at least 1"),
    ({"devices": "2"}, "devices is '2'; it must be a whole number"),
    ({"mesh": "tp=two"}, "Mesh axis tp: 'two' is not a whole number"),
    ({"mesh": "dp=2"}, "Did you mean 'dp_replicate'?"),
    ({"mesh": {"fsdp": 2}}, "Did you mean 'dp_shard'?"),
    ({"mesh": {"dp_repl": 2}}, "Did you mean 'dp_replicate'?"),
    ({"mesh": "tp2"}, "'tp2' is not one"),
    ({"mesh": "tp=2,TP=4"}, "tp is given twice"),
    ({"mesh": ","}, "has no axis"),
    ({"mesh": ["tp", 2]}, "it must be degrees of axes"),
    ({"mesh": {"tp": 2.0}}, "tp has degree 2.0; it must be a whole number"),
    ({"mesh": {"tp": 0}}, "tp has degree 0"),
    ({"mesh": "dp_shard=-1"}, "takes what the other axes leave of the devices"),
    ({"devices": 6, "mesh": "pp=4"}, "6 devices don't divide by the mesh's pp=4"),
    ({"devices": 4, "mesh": {"pp": 2, "tp": 1, "dp_replicate": 1}}, "= 2 != 4 devices"),
    ({"devices": 2, "schedule": "1f2b"}, "Did you mean '1F1B'?"),
    ({"global_batch": 0}, "global_batch is 0; it must be at least 1"),
    ({"global_batch": True}, "global_batch is True; it must be a whole number"),
    ({"microbatch_size": -1}, "microbatch_size is -1"),
    ({"global_batch": 8, "microbatch_size": 3}, "A global batch of 8 does not divide into microbatches of 3"),
    (
        {"global_batch": 8, "microbatch_size": 4, "mesh": "dp_replicate=4"},
        "The 2 rows of a replica do not divide into microbatches of 4",
    ),
    ({"global_batch": 6, "mesh": "dp_replicate=4"}, "does not divide over dp_replicate=4"),
    ({"layers_per_stage": 0}, "layers_per_stage is 0"),
    ({"edge_layers": (1, -1)}, "edge_layers is -1"),
    ({"edge_layers": 3}, "it must be two numbers"),
    ({"dtype": "bf61"}, "dtype is 'bf61'; it must be one of fp32, bf16, fp16. Did you mean 'bf16'"),
    ({"top": -1}, "top is -1"),
    ({"split": ["a"], "layers_per_stage": 2}, "not both"),
    ({"split": lambda program: ["a"], "stages": [["a"], ["b"]]}, "not both"),
    ({"split": [{"a": "middle"}]}, "must be 'beginning' or 'end'"),
    ({"shard_plan": {"a": "colwize"}}, "colwize"),
    ({"shard_plan": ["a"]}, "shard_plan is a list"),
    ({"table": "0F0,0B0\n1B0,1F0"}, "rank 1"),
    ({"table": "0F0,0B0\n1F0,1B0", "mesh": "pp=4"}, "2 rows, but the mesh has pp=4"),
    ({"table": "0F0,0B0\n1F0,1B0", "schedule": "GPipe"}, "not both"),
    *(
        ({"mesh": {"tp": 2}, "schedule": name}, "the mesh tp=2 has pp=1")
        for name in ("zbv", "Interleaved1F1B", "LoopedBFS", "DualPipeV")
    ),
    ({"devices": 2, "mesh": "pp=1,tp=2,dp_replicate=1", "schedule": "zbv"}, "the mesh tp=2 has pp=1"),
    ({"schedule": "zbv"}, "but the mesh has pp=1"),
]


@pytest.mark.parametrize(("asked", "expected"), NAMED, ids=[expected for _, expected in NAMED])
def test_what_is_wrong_by_itself(asked: dict[str, Any], expected: str) -> None:
    with pytest.raises(gp.GraphparError) as refused:
        plan_request(**asked)
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    "pins",
    [{"mesh": "dp=2"}, {"devices": 2, "schedule": "1f2b"}, {"global_batch": 0}, {"mesh": {"tp": 2}, "schedule": "zbv"}],
)
def test_plan_says_so_before_it_plans(pins: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "planned", lambda *_: pytest.fail("planned what can't be"))
    with pytest.raises(gp.GraphparError):
        gp.plan(example("head_first"), **pins)


def test_names_mean_what_objects_mean(tmp_path: Path) -> None:
    program = example("head_first")
    assert gp.plan(program, "2xH100", mesh="tp=2") == gp.plan(program, gp.Cluster.parse("2xH100"), mesh={"tp": 2})
    plan = gp.plan(program, mesh=" PP=2 ", schedule="gpipe")
    assert plan == gp.plan(program, mesh={"pp": 2}, schedule="GPipe")
    assert gp.estimate(program, plan, "2xA100") == gp.estimate(program, plan, gp.Cluster.parse("2xA100"))
    (tmp_path / "own.toml").write_text('nodes = 1\ndevices_per_node = 2\ndevice = "A100"\n')
    assert gp.plan(program, tmp_path / "own.toml", mesh="pp=2").cluster == replace(
        gp.Cluster.parse("2xA100"), headroom=HEADROOM
    )


SEARCHED = [
    ({"devices": 4, "zero": 3}, {}),
    ({"devices": 4, "zero": 2, "mesh": "tp=2"}, {"tp": 2, "dp_shard": 2}),
    ({"devices": 4, "zero": 1, "mesh": "dp_replicate=2"}, {"dp_replicate": 2, "dp_shard": 2}),
    ({"devices": 4, "mesh": "tp=2,dp_shard=-1"}, {"tp": 2, "dp_shard": 2}),
    ({"devices": 2, "mesh": "tp=2,dp_shard=-1"}, {"tp": 2, "dp_shard": 1}),
]


@pytest.mark.parametrize(("asked", "expected"), SEARCHED, ids=[str(asked) for asked, _ in SEARCHED])
def test_a_level_makes_dp_shard_the_axis_of_the_data(asked: dict[str, Any], expected: dict[str, int]) -> None:
    plan = gp.plan(example("head_first"), **asked)
    degrees = plan.mesh.degrees()
    assert degrees.items() >= expected.items()
    assert (degrees["dp_shard"] > 1) == (plan.zero > 0)
    assert "dp_replicate" in expected or degrees["dp_replicate"] == 1


def test_a_level_that_no_mesh_can_have() -> None:
    with pytest.raises(gp.GraphparError, match="does not divide over dp_shard=3"):
        gp.plan(example("head_first"), devices=3, zero=3, mesh={"cp": 1})


def test_a_level_is_met_by_ranks_that_divide_sequences_where_rows_do_not_divide() -> None:
    program = gp.export(torch.nn.Linear(32, 32), (torch.zeros(8, 6, 32),), loss_fn=torch.sum)
    plan = gp.plan(program, devices=3, zero=3)
    assert (plan.mesh.shards, plan.mesh.cp, plan.zero) == (3, 3, 3)


def test_a_schedule_of_one_stage_a_rank_runs_without_a_pipeline() -> None:
    assert gp.plan(example("head_first"), mesh="tp=2", schedule="gpipe").schedule == "GPipe"


def test_the_dtype_is_the_programs() -> None:
    program = gp.export(
        lambda: torch.nn.Linear(4, 4), (torch.zeros(2, 4, dtype=torch.bfloat16),), dtype="bf16", mode="infer"
    )
    assert gp.plan(program).dtype == "bf16"
    with pytest.raises(gp.GraphparError, match="'fp16', but the program was exported in 'bf16'"):
        gp.plan(program, dtype="fp16")


def test_what_comes_first_is_named() -> None:
    model, program = torch.nn.Linear(4, 4), example("head_first")
    plan = gp.plan(program, mesh="pp=2")
    for call, expected in (
        (
            lambda: gp.plan(model, 2),
            r"first argument of plan is a Linear \(a model\); it must be a Program, which graphpar\.export",
        ),
        (lambda: gp.plan(torch.nn.Linear, 2), "is the class Linear"),
        (lambda: gp.estimate(model, plan), "first argument of estimate"),
        (lambda: gp.partition(plan, program), "first argument of partition is a Plan"),
        (lambda: gp.partition(program, {"pp": 2}), "second argument of partition is a dict; it must be a Plan"),
        (lambda: gp.verify(plan), "argument of verify is a Plan"),
        (lambda: gp.check(program), "argument of check is a Program"),
    ):
        with pytest.raises(gp.GraphparError, match=expected):
            call()


# ---- plans that were edited ------------------------------------------------------------------------------------

EDITS = [
    ({"zero": 3}, "zero=3 shards state over dp_shard and cp, which have one rank"),
    ({"zero": 4}, "zero is 4; it must be one of 0, 1, 2, 3"),
    ({"zero1_by": "flat"}, "zero1_by=flat says how ZeRO-1 divides the state"),
    ({"zero1_by": "flta"}, "zero1_by is 'flta'"),
    ({"prefetch_distance": -1}, "it must be at least 1"),
    ({"recompute": "ful"}, "recompute is 'ful'; it must be one of"),
    ({"microbatch_size": 3}, "does not divide into microbatches of 3"),
    ({"schedule": "ZB-H1"}, "actions is "),
    ({"schedule": "zbv", "mesh": gp.Mesh()}, "has pp=1"),
    ({"mesh": gp.Mesh(pp=2, dp_shard=2)}, "dp_shard=2"),
    ({"mesh": gp.Mesh(pp=2, tp=2)}, "its sharding is for one device, but its mesh has {'tp': 2}"),
    ({"cluster": gp.Cluster.parse("4xCPU")}, "its mesh has 2 devices, but its cluster 4xCPU has 4"),
]


@pytest.mark.costly
def test_a_whole_mesh_on_a_cluster_leaves_the_rest_to_the_search() -> None:
    program, cluster = example("gpt"), gp.Cluster.parse("4xA100-SXM-40GB")

    def asked(**pins: Any) -> gp.Plan:
        return gp.plan(program, cluster, global_batch=64, mesh={"pp": 2, "tp": 2}, **pins)

    free, pinned = asked(), asked(schedule="GPipe", microbatch_size=32, recompute="full")

    assert free.found is not None and free.found.considered > 10
    assert free.mesh == pinned.mesh == gp.plan(program, mesh={"pp": 2, "tp": 2}).mesh
    assert (pinned.schedule, pinned.microbatch_size, pinned.recompute) == ("GPipe", 32, "full")
    assert free.predicted is not None and pinned.predicted is not None
    assert free.predicted.step_time_s < pinned.predicted.step_time_s


def test_a_whole_mesh_without_a_pipeline_takes_any_schedule_of_one_stage_a_rank() -> None:
    program, cluster = example("gpt"), gp.Cluster.parse("4xA100-SXM-40GB")

    plan = gp.plan(program, cluster, global_batch=64, mesh={"dp_shard": 4}, schedule="1F1B")

    assert plan.mesh == gp.Mesh(dp_shard=4) and plan.found is not None and plan.found.considered > 1
    with pytest.raises(gp.GraphparError, match="needs a pipeline with 2 stages a rank"):
        gp.plan(program, cluster, global_batch=64, mesh={"dp_shard": 4}, schedule="ZBV")


def test_a_plan_is_what_its_file_holds_and_what_was_found_beside_it_is_another_value() -> None:
    made = gp.plan(example("head_first"), "2xA100", mesh={"tp": 2})
    read = gp.Plan.from_json(made.to_json())

    assert isinstance(made, gp.Plan) and made.predicted is not None and made.found is not None
    assert type(read) is type(made.plan) is gp.Plan
    assert {each.name for each in fields(read)} - {"split_points", "fully_sharded"} <= set(read.to_json())
    assert made == read and read == made and read == made.plan and made == replace(made, predicted=None)
    assert made != replace(made, microbatch_size=1) and read != replace(made, microbatch_size=1)
    assert "a step on 2xA100" in repr(made) and "a step on" not in repr(read)
    assert "MFU" in str(made) and "MFU" not in str(read)


def test_a_file_leaves_out_what_is_as_usual() -> None:
    plan = gp.plan(example("head_first"), mesh={"pp": 2}, recompute="full")
    parts = gp.partition(example("head_first"), plan)
    record = json.loads(parts.files["plan.json"])

    assert set(plan.to_json()) - set(record) == {
        *(
            "allow_batch_coupling",
            "dp_mean",
            "expert_room",
            "dropout",
            "zero1_by",
            "reshard",
            "units",
            "prefetch",
            "prefetch_distance",
        ),
        *("sp", "loss_parallel", "seq"),
        *(
            "overlap_tp",
            "offload",
            "reduce_dtype",
            "output_dtype",
            "keep_fp32",
            "fp8",
            "fp8_recipe",
            "actions",
            "cluster",
        ),
    }
    assert (record["zero"], record["recompute"], record["sharding"]) == (0, "full", {})
    assert gp.Plan.from_json(record) == plan and load_manifest(parts.folder).reshard == plan.reshard
    assert decisions_of(record) == decisions_of(plan.to_json())


@pytest.mark.costly
def test_a_whole_mesh_that_does_not_fit_is_taken_all_the_same() -> None:
    program = example("gpt")
    cluster = replace(
        gp.Cluster.parse("2xA100-SXM-40GB"), device=replace(gp.Cluster.parse("A100").device, memory_bytes=2**20)
    )

    plan = gp.plan(program, cluster, mesh={"tp": 2})

    assert plan.mesh.tp == 2 and plan.predicted is not None and plan.predicted.missing_bytes > 0
    nearest = Planner(program, plan_request(cluster, mesh={"tp": 2}, recompute="auto")).search().nearest
    assert nearest is not None and plan.predicted == nearest.estimate


def test_stages_are_the_same_under_another_schedule() -> None:
    program = example("head_first")
    plan = gp.plan(program, mesh={"pp": 2}, schedule="1F1B", microbatch_size=2)
    before, after = (gp.partition(program, each).files for each in (plan, replace(plan, schedule="GPipe")))

    files = ["blocks.py", "stage_0.py", "stage_1.py"]
    assert [before[name] for name in files] == [after[name] for name in files]


def test_recomputation_of_a_part_of_a_block_is_refused_with_what_there_is() -> None:
    said = r"matches body.0.up, which is inside the block body.0: .* give body.0 selective or a budget"
    with pytest.raises(gp.GraphparError, match=said):
        gp.plan(example("head_first"), mesh={"pp": 2}, recompute={"body.*.up": "full"})


@pytest.mark.parametrize(("edit", "expected"), EDITS, ids=[expected for _, expected in EDITS])
def test_a_plan_that_can_not_be_is_not_partitioned(edit: dict[str, Any], expected: str) -> None:
    program = example("head_first")
    edited = replace(gp.plan(program, mesh={"pp": 2}), **edit)
    for call in (
        lambda: check_alone(edited),
        lambda: gp.partition(program, edited),
        lambda: gp.estimate(program, edited),
    ):
        with pytest.raises(gp.GraphparError) as refused:
            call()
        assert expected in str(refused.value)


SEARCHES = {
    "sums of gradients": ({"reduce_dtype": "bf16"}, lambda plan: plan.mesh.replicas > 1),
    "losses of replicas": ({"dp_mean": True}, lambda plan: plan.mesh.replicas > 1),
    "kept parameters": ({"zero": 3, "reshard": "never"}, lambda plan: plan.mesh.dp_shard > 1),
    "fewer shards": ({"zero": 3, "reshard": 2}, lambda plan: plan.mesh == gp.Mesh(dp_shard=4)),
    "gathers ahead": (
        {"zero": 3, "prefetch": "post"},
        lambda plan: plan.mesh.dp_shard > 1 and (plan.mesh.pp == 1 or plan.reshard == "always"),
    ),
}


def test_a_degree_of_dp_shard_pins_no_level() -> None:
    """Of the levels over a pinned dp_shard the fastest is taken, as where each is pinned; what only level 3 has keeps level 3."""
    program, cluster, mesh = example("head_first"), gp.Cluster.parse("2xH100"), {"dp_shard": 2}

    free = gp.plan(program, cluster, mesh=mesh)
    ahead = gp.plan(program, cluster, mesh=mesh, prefetch="post")

    seconds = {}
    for level in (1, 2, 3):
        predicted = gp.plan(program, cluster, mesh=mesh, zero=level).predicted
        assert predicted is not None
        seconds[level] = predicted.step_time_s
    assert seconds[1] < seconds[3] and free.zero == min(seconds, key=seconds.__getitem__)
    assert free.predicted is not None and free.predicted.step_time_s == seconds[free.zero]
    assert (ahead.zero, ahead.prefetch) == (3, "post")


@pytest.mark.parametrize("name", SEARCHES)
def test_meshes_that_cannot_do_what_is_pinned_are_not_searched(name: str) -> None:
    pins, holds = SEARCHES[name]

    plan = gp.plan(example("head_first"), devices=4, **pins)

    assert holds(plan)
    assert plan.found is not None and plan.found.best is not None


def test_a_plan_says_where_it_contradicts_itself() -> None:
    program = example("head_first")
    plan = gp.plan(program, mesh={"dp_shard": 2})
    name = min(plan.fully_sharded)
    for spec, expected in (("R", f"parameters.{name} is None"), ("P", f"{name} is stored as P@dp_shard")):
        data = plan.to_json()
        data["parameters"][name] = {"dp_shard": spec}
        with pytest.raises(gp.GraphparError) as refused:
            gp.partition(program, gp.Plan.from_json(data))
        assert expected in str(refused.value)


def test_a_plan_whose_stages_are_others_is_not_partitioned() -> None:
    program = example("head_first")
    plan = gp.plan(program, mesh={"pp": 2})
    for edited in (
        replace(plan, split_points=()),
        replace(plan, stages=plan.stages[::-1]),
        replace(plan, mesh=gp.Mesh(pp=4)),
    ):
        with pytest.raises(gp.GraphparError):
            gp.partition(program, edited)


# ---- what is shown ---------------------------------------------------------------------------------------------


@pytest.mark.costly
def test_a_short_line_each() -> None:
    program = example("head_first")
    plan = gp.plan(program, "2xH100", mesh="pp=2", schedule="gpipe", microbatch_size=4)
    estimate, parts = gp.estimate(program, plan), gp.partition(program, plan)
    assert repr(program) == "Program(HeadFirst, train, 135 K parameters, Block x 8, batch 8)"
    assert (
        repr(gp.plan(program, mesh="pp=2", schedule="gpipe"))
        == "Plan(HeadFirst, train, pp=2, GPipe, 4 microbatches of 2)"
    )
    assert re.fullmatch(
        r"Plan\(HeadFirst, train, pp=2, GPipe, 2 microbatches of 4, \S+ ± \S+ .?s a step on 2xH100-SXM-80GB\)",
        repr(plan),
    )
    assert repr(estimate).startswith("Estimate(") and " a step on 2xH100-SXM-80GB, MFU " in repr(estimate)
    assert repr(parts).startswith(f"Parts({plan!r}: __init__.py, ")
    assert repr(plan.cluster) == "Cluster('2xH100-SXM-80GB')"
    assert "its own figures" in repr(
        replace(gp.Cluster.parse("2xH100"), intra_node=gp.Cluster.parse("A100").intra_node)
    )
    assert all(
        len(repr(value)) < 300 and "\n" not in repr(value) for value in (program, plan, estimate, parts, plan.cluster)
    )


def test_a_verification_says_its_verdict() -> None:
    for error, verdict in ((1e-7, "PASS"), (2e-2, "FAIL")):
        made = Verification(2, 4, [1.5], [1.5], {"gradient": error}, {"gradient": "a.b"}, {"gradient": 1e-5})
        assert (
            repr(made) == f"Verification({verdict} in fp32, 2 devices, 4 steps, largest errors: gradient {error:.1e})"
        )


def test_notebooks_show_pages_in_frames() -> None:
    program = example("head_first")
    plan = gp.plan(program, "2xH100", mesh="pp=2")
    for kind, value in {"plan": plan, "estimate": plan.predicted, "parts": gp.partition(program, plan)}.items():
        frame = re.fullmatch(r'<iframe srcdoc="([^"]*)" style="[^"]*"></iframe>', value._repr_html_())  # type: ignore[union-attr]
        assert frame is not None, kind
        page = html.unescape(frame[1])
        assert page.startswith("<!doctype html>") and "<style>" in page and " a step" in page.replace("</b><span>", " ")
        assert not re.search(r'src=|href="[^#]|<script [^>]*src', page), kind  # nothing from elsewhere
    assert "_repr_html_" in dir(gp.plan(program, mesh="pp=2")) and gp.plan(program, mesh="pp=2")._repr_html_()


def test_the_package_lists_its_names() -> None:
    assert {name for name in dir(gp) if not name.startswith("__")} == set(gp.__all__) - {"__version__"}


@pytest.mark.parametrize(
    ("pins", "why"),
    [
        ({"mesh": {"ep": 2}}, "has no experts"),
        ({"mesh": {"cp": 2}}, "divides sequences"),
        ({"offload": ("activations",)}, "moves activations of repeated blocks"),
        ({"mesh": {"pp": 2}}, "2 stages are needed"),
    ],
    ids=str,
)
def test_an_error_is_of_what_is_pinned_and_not_of_where_other_devices_are_put(pins: dict[str, Any], why: str) -> None:
    program = gp.export(nn.Linear(3, 5), (torch.randn(12, 3),), loss_fn=lambda y: y.square().mean())
    with pytest.raises(gp.GraphparError, match=why):
        gp.plan(program, "6xH100", global_batch=12, **pins)
