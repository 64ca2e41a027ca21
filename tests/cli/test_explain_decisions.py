"""``--explain plan``: the next best of each decision costs what a plan does that is pinned to it."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

import graphpar as gp
from graphpar.cli.explain import DecisionExplainer
from graphpar.hardware.cluster import Cluster
from graphpar.passes.planning.explain import DECISIONS, Alternatives
from graphpar.passes.planning.plan_request import plan_request, planned
from tests.tools.programs import example

CLUSTER = "1x4xA100-SXM-80GB"


def explained(**pins: Any) -> tuple[gp.Plan, dict[str, dict[str, Any]], list[str]]:
    program, cluster = example("gpt"), Cluster.parse(CLUSTER)
    asked = plan_request(cluster, **pins)
    plan = planned(program, asked)
    explainer = DecisionExplainer(Alternatives(program, plan, cluster, asked))
    lines = explainer.named("plan")
    return plan, {row["decision"]: row for row in explainer.to_json()}, lines


@functools.cache
def time_of(mesh: str, schedule: str | None, size: int, zero: int, recompute: str) -> float:
    """Seconds of a step where all of this is pinned."""
    plan = gp.plan(
        example("gpt"), Cluster.parse(CLUSTER), mesh=mesh, schedule=schedule, microbatch_size=size, zero=zero or None,
        recompute=recompute,
    )  # fmt: skip
    assert plan.predicted is not None
    return plan.predicted.step_time_s


@pytest.mark.costly
@pytest.mark.parametrize(
    "pins",
    [
        {},
        {"mesh": {"pp": 2}},
        {"mesh": {"pp": 2, "dp_replicate": 2}, "schedule": "GPipe"},
        {"mesh": {"tp": 2}, "zero": 3},
    ],
    ids=str,
)
def test_the_next_best_is_the_fastest_of_all_pins(pins: dict[str, Any]) -> None:
    plan, found, lines = explained(**pins)
    assert plan.predicted is not None
    assert set(DECISIONS) - {"cuts"} <= set(found) and len(found) == 5 + len(plan.split_points)
    for name, pin in (("mesh", "mesh"), ("schedule", "schedule"), ("zero", "zero")):
        assert found[name]["pinned"] == (pin in pins)
    for name in ("mesh", "schedule", "microbatches", "zero"):
        best = found[name]["next_best"]
        if best is None:
            assert found[name]["note"]
            continue
        other, mesh = best["plan"], plan.mesh.degrees()
        free = {"mesh": set(mesh), "zero": {"dp_replicate", "dp_shard"}}.get(name, set())
        assert all(other["mesh"][axis] == mesh[axis] for axis in set(mesh) - free)
        text = ",".join(f"{axis}={degree}" for axis, degree in other["mesh"].items())
        schedule = other["schedule"] if other["mesh"]["pp"] > 1 else None
        if other["stages_per_rank"] == 1 and other["reshard"] == "default":
            seconds = time_of(text, schedule, other["microbatch_size"], other["zero"], other["recompute"])
            assert best["step_time_s"] <= seconds * (1 + 1e-9)  # its cuts were searched
            if plan.mesh.pp == 1:
                assert best["step_time_s"] == pytest.approx(seconds)
        assert best["costs"]["step_time_s"] == pytest.approx(best["step_time_s"] - plan.predicted.step_time_s)
        assert sum(best["costs"]["parts_s"].values()) == pytest.approx(best["costs"]["step_time_s"])
        assert sum(best["costs"]["memory"].values()) == best["costs"]["peak_memory_bytes"]
        if best["fits"] and not pins:
            assert best["costs"]["step_time_s"] >= 0
        text = next(line for line in lines if line.startswith(f" {name}: "))
        assert ("the pin costs" in text) == (found[name]["pinned"] and best["fits"])


@pytest.mark.costly
def test_pins_of_one_zero_level_do_not_keep_others_out() -> None:
    _, found, _ = explained(mesh={"dp_shard": 4}, zero=1, zero1_by="longest")
    assert found["zero"]["next_best"] is not None and found["zero"]["next_best"]["plan"]["zero"] != 1


@pytest.mark.costly
def test_blocks_and_cuts_by_path() -> None:
    program, cluster = example("gpt"), Cluster.parse("1x2xA100-SXM-80GB")
    cluster = replace(
        cluster, device=replace(cluster.device, communicator_bytes=0)
    )  # next to which a toy's tensors are nothing
    asked = plan_request(cluster, mesh={"pp": 2}, split=["blocks.3"])
    plan = planned(program, asked)
    explainer = DecisionExplainer(Alternatives(program, plan, cluster, asked))
    cut, block = explainer.lines("blocks.3")
    assert cut.startswith("stage 1 begins there, pinned; next best it begins at ")
    assert block.startswith("recompute none; next best recompute ")
    assert "compute +" in block and "gradients" in cut and "parameters" in cut
    assert explainer.lines("tokens") == []
    moved, changed = explainer.to_json()
    path = moved["next_best"]["value"].removeprefix("it begins at ")
    kind = changed["next_best"]["value"].removeprefix("recompute ")
    for row, pins in (
        (moved, {"split": [path]}),
        (changed, {"split": ["blocks.3"], "recompute": {"blocks.3": kind}}),
    ):
        pinned = gp.plan(program, cluster, mesh={"pp": 2}, **pins)  # type: ignore[arg-type]
        assert pinned.predicted is not None
        assert row["next_best"]["step_time_s"] == pytest.approx(pinned.predicted.step_time_s)
        assert row["next_best"]["peak_memory_bytes"] == max(pinned.predicted.peak_memory_bytes)
