"""What a GPU holds besides tensors: NCCL's communicators, and an optimizer's copies while it steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

import graphpar as gp
from graphpar.hardware.cluster import Cluster
from graphpar.hardware.devices import COMMUNICATOR_BYTES
from graphpar.ir.program import OptimizerState
from graphpar.passes.planning.prices import estimate_plan
from graphpar.runtime.groups import communicators
from graphpar.runtime.mesh import Mesh
from tests.tools.programs import example, example_file, traced_once


@pytest.mark.parametrize(
    ("mesh", "number"),
    [
        (Mesh(), 0),
        (Mesh(tp=8), 1),  # that of all ranks
        (Mesh(dp_replicate=2, tp=4), 3),
        (Mesh(pp=2), 2),  # all ranks, and a pair
        (Mesh(pp=4, dp_shard=2), 5),  # on each axis, of all, and two pairs
        (Mesh(pp=8, dp_replicate=8, dp_shard=16, cp=2, tp=8), 11),
    ],
    ids=str,
)
def test_the_groups_of_a_mesh(mesh: Mesh, number: int) -> None:
    assert communicators(mesh.degrees()) == number


def test_a_gpu_holds_communicators_and_a_cpu_does_not() -> None:
    program = example("head_first")
    for cluster, each in (("2xH100-SXM-80GB", COMMUNICATOR_BYTES), ("2xCPU", 0)):
        plan = gp.plan(program, mesh={"tp": 2}, cluster=cluster)
        assert plan.predicted is not None
        (memory,) = plan.predicted.memory
        assert memory.communicators == each
        assert memory.total == memory.allocated + memory.slack + each == plan.predicted.peak_memory_bytes[0]


def test_an_optimizer_that_is_not_fused_needs_one_more_copy_while_it_steps() -> None:
    program = example("head_first")
    plan, cluster = gp.plan(program, mesh={"pp": 1}), Cluster.parse("1xH100-SXM-80GB")
    peaks = {}
    for name in ("AdamW", "Adagrad"):
        made = replace(program, optimizer=OptimizerState(name, 1.0))
        (memory,) = estimate_plan(made, plan, cluster).memory
        peaks[name] = memory.gradients + memory.activations + memory.transient, memory.parameters
    least, parameters = peaks["AdamW"]
    assert peaks["Adagrad"][0] == max(least, 2 * parameters)  # gradients, and the copy
    assert least < 2 * parameters, "the activations of this example hide the copy"


def test_those_of_generation_between_steps_stay_while_the_program_trains() -> None:
    program = traced_once(example_file("llama"), "train,generate", None)
    plan = gp.plan(program, mesh={"pp": 2}, cluster="2xH100-SXM-80GB", global_batch=512, microbatch_size=256)
    for memory in gp.partition(program, plan).report["predicted"]["memory"]:
        assert not memory["cache"], "the peak is in training"
        assert memory["communicators"] == 2 * communicators(plan.mesh.degrees()) * COMMUNICATOR_BYTES
