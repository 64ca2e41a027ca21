"""Plans for generation: what is in flight, what is refused, and what the search is over."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import graphpar as gp
from graphpar.errors import GraphparError
from graphpar.passes.planning.constraints import PlanConstraints
from graphpar.passes.planning.plan_request import groups_of, pins_of_generation


@pytest.mark.parametrize(
    ("mesh", "devices", "groups"),
    [
        ({}, 1, 1),
        ({"pp": 4}, 4, 4),
        ({"tp": 4}, 4, 1),
        ({"dp_replicate": 2, "pp": 2, "tp": 2}, 8, 4),
        ({"dp_replicate": 4}, 4, 4),
        ({}, 8, 8),  # pp=8, or dp_replicate=8, or anything between
        ({"tp": 2}, 8, 4),
        ({"pp": 2}, 8, 8),
    ],
)
def test_every_stage_of_every_replica_has_a_group(mesh: dict[str, int], devices: int, groups: int) -> None:
    assert groups_of(mesh, devices) == groups
    pins = pins_of_generation(PlanConstraints(mesh=mesh, devices=devices))
    assert (pins.global_batch, pins.microbatch_size) == (groups, 1)
    assert pins.mesh == {"dp_shard": 1, "dp_expert": 1, "cp": 1, **mesh}


@pytest.mark.parametrize("axis", ["dp_shard", "dp_expert", "cp"])
def test_axes_of_training_are_refused(axis: str) -> None:
    with pytest.raises(GraphparError, match=f"mesh {axis}=2 is for training.*sequences \\(dp_replicate\\)"):
        pins_of_generation(PlanConstraints(mesh={axis: 2}, devices=2))


@pytest.mark.costly
def test_replicas_are_searched_and_priced_by_the_groups_of_each() -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    program = gp.export(
        lambda: LlamaForCausalLM(config), kwargs={"input_ids": torch.zeros(3, 32).long()}, mode="generate"
    )
    plan = gp.plan(program, gp.Cluster.parse("4xH100-SXM-80GB"))
    assert (plan.mesh.dp_replicate, plan.microbatches, plan.global_batch) == (4, 1, 4)
    assert plan.predicted is not None

    alone, replicas, both = (
        gp.plan(program, gp.Cluster.parse(f"{devices}xH100-SXM-80GB"), mesh=mesh)
        for devices, mesh in ((1, {"pp": 1}), (4, {"dp_replicate": 4}), (4, {"dp_replicate": 2, "pp": 2}))
    )
    cache = 2 * 4 * 3 * 2 * 32 * 8 * 4  # keys and values: layers, sequences, heads, positions, width, bytes
    for each in (alone, replicas, both):
        estimate = gp.partition(program, each).compilation.estimate
        assert estimate is not None and {memory.cache for memory in estimate.memory} == {cache}
    assert both.microbatches == 2  # half of the layers, of two groups
    assert alone.predicted is not None and replicas.predicted is not None
    assert replicas.predicted.step_time_s == pytest.approx(alone.predicted.step_time_s, rel=0.01)
