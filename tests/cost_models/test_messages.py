"""How many collectives end a step: those that are priced, and those that a rank of the program starts."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import graphpar as gp
from graphpar.passes.planning.prices import estimate_plan, pricing_of
from graphpar.runtime import Pipeline, start
from graphpar.runtime.debugging.rank_alone import WARM_UP, Clock, run
from tests.tools.programs import example_file, traced_once

PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "contiguous": ("gpt", {"mesh": {"dp_shard": 4}}),
    "longest": ("gpt", {"mesh": {"dp_shard": 4}, "zero1_by": "longest"}),
    "tied over stages": ("gpt", {"mesh": {"pp": 2, "dp_shard": 2}, "schedule": "interleaved1f1b"}),
    "two stages a rank": ("llama", {"mesh": {"pp": 2, "dp_shard": 2}, "schedule": "zbv"}),
    "experts": ("mixtral", {"mesh": {"dp_expert": 2, "dp_shard": 2}}),
}


def counted(name: str, send: Callable[..., Any], started: list[str]) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        started.append(name)
        return send(*given, **named)

    return call


@pytest.mark.costly
@pytest.mark.parametrize("name", PLANS)
def test_zero_1_sends_as_many_messages_as_are_priced(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, pins = PLANS[name]
    program, world = traced_once(example_file(model), None, None), math.prod(pins["mesh"].values())
    cluster = gp.Cluster.parse(f"{world}xCPU")
    plan = gp.plan(program, cluster, global_batch=16, zero=1, **pins)
    gp.partition(program, plan).save(tmp_path / "out")
    pricing, layout = pricing_of(program, plan, cluster)
    stages, started, steps = pricing.stages_of(layout), list[str](), WARM_UP + 1
    for name in ("reduce", "broadcast"):
        monkeypatch.setattr(dist, name, counted(name, getattr(dist, name), started))
    for pp, places in enumerate(pricing.places(layout)):
        started.clear()
        with start(alone=(pp * world // plan.mesh.pp, world)) as ranks, Pipeline(tmp_path / "out", ranks.device) as own:
            run(own, Clock(ranks.device), None)
        expected = pricing._ends.messages([stages[place] for place in places])
        assert started.count("reduce") / steps == pytest.approx(expected, rel=0.1, abs=1)
        assert started.count("reduce") <= started.count("broadcast") <= (steps + 1) / steps * started.count("reduce")


def test_a_program_that_only_infers_ends_with_nothing() -> None:
    program = traced_once(example_file("gpt"), "infer", None)
    plan = gp.plan(program, "2xA100", mesh={"dp_replicate": 2}, global_batch=16)
    assert estimate_plan(program, plan, gp.Cluster.parse("2xA100")).optimizer_s == 0
