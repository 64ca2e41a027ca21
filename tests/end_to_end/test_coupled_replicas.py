"""Examples that depend on each other, on replicas: loss, gradients, parameters and buffers are those of one device."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

import graphpar as gp
from graphpar.errors import GraphparError
from graphpar.verification import Reference, reference_for, verify_all
from graphpar.verification.type_check import check_folder
from tests.models.coupled_models import MODELS, case
from tests.models.whole_modules import with_whole_modules
from tests.tools.samples import sample

MESHES = {
    "dp2": {"dp_replicate": 2},
    "dp4": {"dp_replicate": 4},
    "tp2": {"tp": 2},
    "dp2 x tp2": {"dp_replicate": 2, "tp": 2},
    "pp2 x dp2": {"pp": 2, "dp_replicate": 2},
    "shard2": {"dp_shard": 2},
    "shard4": {"dp_shard": 4},
    "shard2, zero 1": {"dp_shard": 2},
    "dp2 x shard2": {"dp_replicate": 2, "dp_shard": 2},
    "shard2 x tp2": {"dp_shard": 2, "tp": 2},
}
LEVELS = {"shard2, zero 1": 1, "shard4": 2, "shard2 x tp2": 2}


@functools.cache
def program(name: str) -> gp.Program:
    return case(name).export()


@functools.cache
def parts(name: str, mesh: str) -> gp.Parts:
    return gp.partition(program(name), gp.plan(program(name), mesh=MESHES[mesh], zero=LEVELS.get(mesh)))


@functools.cache
def reference(name: str) -> Reference:
    """Of two replicas, and of what is made of them."""
    return reference_for(parts(name, "dp2"))


def _exact(names: list[str], mesh: str) -> None:
    known = [reference(name) for name in names] if mesh == "dp2" else None
    for name, outcome in zip(names, verify_all([parts(name, mesh) for name in names], references=known, timeout_s=600)):
        assert outcome.ok, (name, outcome.problems)
        assert max(outcome.max_error.values()) < 1e-5, (name, outcome.max_error)


def test_a_sum_over_ranks_that_is_detached_has_a_price() -> None:
    plan = gp.plan(program("codebook"), gp.Cluster.parse("2xA100"), mesh=MESHES["tp2"])
    assert plan.predicted is not None and plan.predicted.step_time_s > 0


@pytest.mark.costly
@pytest.mark.sampled(1 / 2)
@pytest.mark.parametrize("name", MODELS)
def test_two_replicas_are_exact(name: str) -> None:
    assert parts(name, "dp2").plan.sharding.degrees == {"dp_replicate": 2}
    _exact([name], "dp2")


@pytest.mark.costly
@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("name", ["resnet", "clip", "router"])
def test_with_sharded_state_they_are_exact(name: str) -> None:
    """A gradient is a share of each replica, of which the sum is scattered: nothing that is whole is added up."""
    stored = parts(name, "shard2").plan.sharding.parameters
    assert {str(spec["dp_shard"]) for spec in stored.values()} == {"R"}
    _exact([name], "shard2")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", sample([mesh for mesh in MESHES if mesh != "dp2"], 2))
def test_more_replicas_and_other_axes_are_exact(mesh: str) -> None:
    _exact(list(MODELS), mesh)


@pytest.mark.costly
@pytest.mark.parametrize("mesh", ["dp2 x tp2", "shard2"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(1 / 3)
def test_the_types_of_emitted_text(name: str, mesh: str, tmp_path: Path) -> None:
    """``spmd_types`` agrees: a gradient is whole, a loss is a share of a sum."""
    parts(name, mesh).save(tmp_path / "out")
    result = check_folder(tmp_path / "out")
    assert result.ok, result.problems


def test_what_is_written() -> None:
    """Statistics and features are gathered; what examples don't share stays on its replica."""
    resnet = parts("resnet", "dp2").files["stage_0.py"]
    assert "sync_batch_norm(\n                self.stem(x)" in resnet
    clip = parts("clip", "dp2").files["stage_0.py"]
    assert clip.count("all_gather(") == 1 and "(images" in clip
    for mesh, function in (("tp2", "channel_batch_norm"), ("dp2 x tp2", "sync_batch_norm")):
        assert f"{function}(\n                    self.widen(x)" in parts("mobile", mesh).files["stage_0.py"]
    assert 'channels="tp"' in parts("mobile", "dp2 x tp2").files["stage_0.py"]


FAULTS = {
    "running statistics that have a rank's own channels alone": (
        "mobile", "collectives.py", "mean, var = all_gather(own, axis, 1)", "mean, var = own.repeat(1, size(axis))", "tp2",
    ),
    "running statistics of the first rank's channels": (
        "mobile", "collectives.py", "own = shard(torch.stack([running_mean, running_var]), axis, 1)",
        "own = torch.stack([running_mean, running_var])[:, : x.size(1)]", "tp2",
    ),
    "statistics of a replica's own rows": (
        "resnet", "collectives.py", "pieces = all_gather(pieces, axis, 0)", "pieces = pieces",
    ),
    "gradients of statistics that are not summed": (
        "resnet", "collectives.py", "pieces = all_gather(pieces, axis, 0)", "pieces = all_gather_invariant(pieces, axis, 0)",
    ),
    "labels that each replica counts for itself": (
        "clip", "stage_0.py", 'all_reduce((labels != -100).sum(), "dp_replicate")', "(labels != -100).sum()",
    ),
    "a mean of pieces that is added up": (
        "largest", "stage_0.py", "F.mse_loss(net, wanted) / 2", "F.mse_loss(net, wanted)",
    ),
    "a loss that each replica returns whole": (
        "codebook", "stage_0.py", "import all_gather, first_only\n", "import all_gather\n\nfirst_only = lambda x, axis: x\n",
    ),
}  # fmt: skip


@pytest.mark.costly
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sampled(2 / 5)
def test_planted_faults_are_found(fault: str, tmp_path: Path) -> None:
    name, file, before, after, *others = FAULTS[fault]
    (mesh,) = others or ["dp2"]
    folder = with_whole_modules(parts(name, mesh).save(tmp_path / "faulty"))
    text = (folder / file).read_text()
    assert before in text, text
    (folder / file).write_text(text.replace(before, after))
    (outcome,) = verify_all(
        [folder], references=[reference_for(parts(name, mesh)) if others else reference(name)], timeout_s=600
    )
    assert not outcome.ok
    assert outcome.max_error, outcome.problems  # it ran


@pytest.mark.costly
def test_microbatches_stay_refused_unless_allowed() -> None:
    with pytest.raises(
        GraphparError, match="can't be split into 2 microbatches: examples depend on each other: batch_norm"
    ):
        gp.plan(program("resnet"), mesh={"dp_replicate": 2}, microbatch_size=2)
    with pytest.raises(GraphparError, match=r"microbatches: the loss .*matmul mixes examples \(.*py:\d+\)\. Use one"):
        gp.plan(program("clip"), mesh={"dp_replicate": 2}, microbatch_size=2, allow_batch_coupling=True)
    made = []
    for name in ("resnet", "mobile"):  # one with a BatchNorm that nothing calls, so that it counts nothing
        plan = gp.plan(program(name), mesh={"dp_replicate": 2}, microbatch_size=2, allow_batch_coupling=True)
        assert plan.microbatches == 2 and plan.sharding.degrees == {"dp_replicate": 2}
        made.append(gp.partition(program(name), plan))
    assert [outcome.ok for outcome in verify_all(made)] == [True, True]  # a microbatch's statistics are of all replicas


def test_a_plan_that_was_written_is_read_again() -> None:
    for mesh in ("dp2", "shard2"):
        plan = parts("clip", mesh).plan
        again = gp.Plan.from_json(plan.to_json())
        assert gp.partition(program("clip"), again).files == parts("clip", mesh).files
