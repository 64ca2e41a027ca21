"""A trained and a frozen network in one module, on every kind of mesh, against the module itself on one device."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import graphpar as gp
from graphpar.errors import GraphparError
from graphpar.ir.program import Program
from graphpar.verification import verify_all
from tests.models import two_networks
from tests.models.two_networks import BATCHED_KTO, CASES, PrecomputedDPO, log_probability, preferences
from tests.ranks import two_networks_script
from tests.tools.rank_pool import RankPool
from tests.tools.samples import sample

ONE_F = {"schedule": "1F1B"}
MESHES: dict[str, dict[str, Any]] = {
    "pp": {"mesh": {"pp": 2}, **ONE_F},
    "tp": {"mesh": {"tp": 2}},
    "zero 3": {"mesh": {"dp_shard": 2}, "zero": 3},
    "zero 3, gathered after": {"mesh": {"dp_shard": 2}, "zero": 3, "prefetch": "post"},
    "zero 1": {"mesh": {"dp_shard": 2}, "zero": 1},
    "recomputed": {"mesh": {"pp": 2}, "recompute": "full", **ONE_F},
    "zero bubble": {"mesh": {"pp": 2}, "schedule": "ZBVZeroBubble"},
    "pp x tp": {"mesh": {"pp": 2, "tp": 2}, **ONE_F},
    "pp x tp, interleaved": {"mesh": {"pp": 2, "tp": 2}, "schedule": "Interleaved1F1B"},
    "pp x zero 3": {"mesh": {"pp": 2, "dp_shard": 2}, "zero": 3, **ONE_F},
}


@functools.cache
def program_of(name: str) -> Program:
    return CASES[name].export()


def parts_of(name: str, mesh: str) -> gp.Parts:
    return gp.partition(program_of(name), gp.plan(program_of(name), **MESHES[mesh]))


def stages_of(program: Program, **pins: Any) -> list[set[str]]:
    plan = gp.plan(program, **pins)
    return [set(stage.modules) for stage in plan.stages]


# ---- exact -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> dict[str, Any]:
    """DPO on 2 stages, and the same steps on one device."""
    return trained("DPO", ["pp"], tmp_path_factory.mktemp("dpo"), pool)


def trained(name: str, meshes: list[str], folder: Path, pool: RankPool) -> dict[str, Any]:
    case, program = CASES[name], program_of(name)
    torch.manual_seed(5)
    model, batch = case.build(), case.inputs()
    save_file({key: value.clone() for key, value in model.state_dict().items()}, folder / "weights.safetensors")
    targets = {
        entry.name: value for entry, value in zip(program.inputs[len(batch) :], case.targets)
    }  # named by the program
    save_file({**batch, **targets}, folder / "batch.safetensors")
    found = {"alone": _alone(model, batch, case), "start": model.state_dict()}
    for mesh in meshes:
        gp.partition(program, gp.plan(program, **MESHES[mesh])).save(folder / mesh)
        degree = gp.plan(program, **MESHES[mesh]).mesh.size
        pool.torchrun(Path(two_networks_script.__file__), [str(folder), mesh], nproc=degree, timeout_s=300)
        ranks = [json.loads((folder / f"{mesh}-rank_{rank}.json").read_text()) for rank in range(degree)]
        found[mesh] = ranks, load_file(folder / f"{mesh}.safetensors")
    return found


def _alone(
    model: nn.Module, batch: dict[str, Tensor], case: two_networks.Case
) -> tuple[list[float], dict[str, Tensor]]:
    model = copy.deepcopy(model)
    fixture = two_networks_script
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=fixture.LR, momentum=fixture.MOMENTUM)
    losses = []
    for _ in range(fixture.STEPS):
        output = model(**batch)
        loss = output if case.loss_fn is None else case.loss_fn(output, *case.targets)
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


def agrees(seen: dict[str, Any], mesh: str, name: str = "DPO") -> None:
    case, (losses, expected), (ranks, weights) = CASES[name], seen["alone"], seen[mesh]
    assert losses[0] != pytest.approx(losses[-1], rel=1e-3)  # the steps do something
    for rank in ranks:
        assert rank["losses"] == pytest.approx(losses, rel=1e-5)
        for what in ("changed", "gradients", "stepped"):
            assert rank[what] and all(held.startswith(f"{case.trained}.") for held in rank[what]), (what, rank[what])
        assert rank["calls"] and not rank["recorded"]
    for path, value in weights.items():
        if path.startswith(f"{case.frozen}."):
            assert torch.equal(value, seen["start"][path]), path
        else:
            torch.testing.assert_close(value, expected[path], rtol=1e-4, atol=1e-6, msg=path)


@pytest.mark.costly
def test_the_reference_stays_as_it_is_and_the_policy_trains_as_alone(seen: dict[str, Any]) -> None:
    agrees(seen, "pp")


@pytest.mark.costly
def test_a_stage_runs_blocks_of_both(seen: dict[str, Any]) -> None:
    for rank in seen["pp"][0]:
        for network in ("policy", "reference"):
            assert (
                sum(held.startswith(f"{network}.layers.") and held.endswith("mix.weight") for held in rank["held"]) == 2
            )


@pytest.mark.slow
@pytest.mark.parametrize("name", sample(list(CASES), 3))
def test_frozen_networks_stay_as_they_are(name: str, tmp_path: Path, pool: RankPool) -> None:
    meshes = ["zero 3", "pp x tp, interleaved", "pp x zero 3"]
    found = trained(name, meshes, tmp_path, pool)
    for mesh in meshes:
        agrees(found, mesh, name)


@pytest.mark.costly
def test_two_networks_are_exact_on_two_ranks() -> None:
    """Losses, each gradient, and parameters after steps of SGD with momentum."""
    pairs = [("KTO", "pp"), ("DPO, the reference first", "pp"), ("a wide and deep teacher", "pp"), ("KTO", "tp")]
    for pair, found in zip(pairs, verify_all([parts_of(*pair) for pair in pairs], 3, timeout_s=300)):
        assert found.ok, (pair, found.problems, found.max_error)


PAIRS = [(name, mesh) for name in CASES for mesh in MESHES]


@pytest.mark.slow
def test_two_networks_are_exact_everywhere() -> None:
    pairs = sample(PAIRS, 24)
    for pair, found in zip(pairs, verify_all([parts_of(*pair) for pair in pairs], 3, timeout_s=600)):
        assert found.ok, (pair, found.problems, found.max_error)


@pytest.mark.costly
def test_log_probabilities_of_a_reference_may_be_inputs() -> None:
    """The loss and gradients are those of the model that has the reference, whose parameters are nowhere."""
    torch.manual_seed(2)
    both = two_networks.DPO()
    batch = preferences()
    with torch.no_grad():
        known = {
            f"reference_{side}": log_probability(both.reference, batch[side], batch[f"{side}_answer"])
            for side in ("chosen", "rejected")
        }
    alone = PrecomputedDPO()
    alone.policy.load_state_dict(both.policy.state_dict())
    loss = both(**batch)
    torch.testing.assert_close(alone(**batch, **known), loss)

    program = gp.export(alone, (), {**batch, **known})
    (found,) = verify_all([gp.partition(program, gp.plan(program, **MESHES["pp"]))], 3, timeout_s=300)

    assert found.ok, (found.problems, found.max_error)
    assert found.reference_losses[0] == pytest.approx(float(loss.detach()), rel=1e-5)


@pytest.mark.slow
def test_a_baseline_of_the_batch() -> None:
    """It mixes examples: exact over tp and replicas, and refused where microbatches come one after the other."""
    program = BATCHED_KTO.export()
    parts = [gp.partition(program, gp.plan(program, **MESHES[mesh])) for mesh in ("tp", "zero 3")]
    for found in verify_all(parts, 3, timeout_s=300):
        assert found.ok, (found.problems, found.max_error)
    with pytest.raises(
        GraphparError,
        match=r"clamp is not additive over examples \(.*two_networks.py:\d+\)\. Use one microbatch .*dp_replicate",
    ):
        gp.plan(program, **MESHES["pp"])


# ---- what is where ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["DPO", "DPO, the reference first"])
@pytest.mark.sampled(1 / 2)
def test_networks_alike_are_divided_alike(name: str) -> None:
    for pins in ({**MESHES["pp"]}, {"mesh": {"pp": 4}, **ONE_F}, MESHES["pp x tp, interleaved"]):
        for modules in stages_of(program_of(name), **pins):
            of_policy = {path.removeprefix("policy.") for path in modules if path.startswith("policy.layers.")}
            of_reference = {path.removeprefix("reference.") for path in modules if path.startswith("reference.layers.")}
            assert of_policy == of_reference != set()


def test_what_has_no_gradient_is_sent_one_way() -> None:
    parts = parts_of("DPO", "pp")
    (sent,) = [
        stage["sends"] for stage in json.loads(parts.files["plan.json"])["interface"]["stages"] if stage.get("sends")
    ]
    assert (
        [value["requires_grad"] for value in sent].count(False)
        == 2
        == [value["requires_grad"] for value in sent].count(True)
    )


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "divided", "other"),
    [("a wide and deep teacher", "teacher", "student"), ("a narrow and flat teacher", "student", "teacher")],
)
@pytest.mark.sampled(1 / 2)
def test_the_network_with_more_parts_is_divided(name: str, divided: str, other: str) -> None:
    """As many stages as it has layers; the other one follows by flops, its first layers first."""
    layers = {"teacher": 5, "student": 3} if divided == "teacher" else {"teacher": 2, "student": 4}
    stages = stages_of(
        program_of(name),
        mesh={"pp": layers[divided]},
        split=[f"{divided}.layers.{i}" for i in range(1, layers[divided])],
    )
    assert [f"{divided}.layers.{i}" in modules for i, modules in enumerate(stages)] == [True] * layers[divided]
    places = [
        next(at for at, modules in enumerate(stages) if f"{other}.layers.{i}" in modules) for i in range(layers[other])
    ]
    assert places == sorted(set(places)) and places[-1] >= layers[divided] // 2


def test_a_split_point_may_name_either_network() -> None:
    split = [
        stages_of(program_of("DPO"), split=[f"{network}.layers.1"], **MESHES["pp"])
        for network in ("policy", "reference")
    ]
    assert split[0] == split[1] and "reference.layers.1" in split[0][1]


def test_frozen_blocks_have_no_backward() -> None:
    parts = parts_of("DPO", "recomputed")
    for stage in ("stage_0.py", "stage_1.py"):
        again = parts.files[stage].split("def recompute_units")[1]
        assert "policy" in again and "reference" not in again
    units = parts_of("a wide and deep teacher", "zero 3").files["stage_0.py"].split("def fully_shard_units")[1]
    trained = units.split("trained = [")[1].split("]")[0]
    assert "*stage.student.layers.values()" in trained and "teacher" not in trained


@pytest.mark.costly
def test_prices_of_a_frozen_network() -> None:
    """It has no gradient, no optimizer state, no backward, and no communication of gradients."""
    programs = program_of("DPO"), gp.export(_with_trained_reference, (), preferences())
    plans = [gp.plan(program, **MESHES["zero 3"]) for program in programs]
    frozen, whole = (gp.estimate(program, plan, "2xA100-SXM-80GB") for program, plan in zip(programs, plans))

    assert sum(frozen.communication_s.values()) < sum(whole.communication_s.values())
    assert frozen.pipeline_s < whole.pipeline_s
    held = [max(each.total - each.communicators for each in found.memory) for found in (frozen, whole)]
    assert held[0] < 0.8 * held[1]


def _with_trained_reference() -> nn.Module:
    return two_networks.ReferenceFirst().requires_grad_(True)


def test_lists_of_modules_have_both_networks() -> None:
    first = ["policy.embedding", "policy.layers.0", "reference.embedding", "reference.layers.0"]
    stages = stages_of(program_of("DPO"), mesh={"pp": 2}, stages=[first, ["policy", "reference"]])
    assert stages[0] == set(first)


# ---- what is refused -------------------------------------------------------------------------------------------


def test_bad_uses() -> None:
    program = program_of("DPO")
    lists = [
        ["policy.embedding", "policy.layers.0", "reference"],
        ["policy.layers.1", "policy.layers.2", "policy.layers.3", "policy.norm", "policy.head"],
    ]
    with pytest.raises(
        GraphparError,
        match=r"^Module 'reference.layers.1' is listed in stage 0, but runs in stage 1, with 'policy.layers.1'\.$",
    ):
        gp.plan(program, mesh={"pp": 2}, stages=lists)
    with pytest.raises(GraphparError, match=r"pattern 'reference.layers.\*' matches only blocks of a frozen network"):
        gp.plan(program, mesh={"pp": 2}, recompute={"reference.layers.*": "full"})


@pytest.mark.costly
def test_a_reference_that_is_not_frozen_is_named() -> None:
    def build() -> nn.Module:
        return two_networks.DPO().requires_grad_(True)

    (warning,) = gp.export(build, (), preferences()).warnings
    assert warning.startswith("reference is used under torch.no_grad() alone, so its parameters get no gradient; call")
    assert not program_of("DPO").warnings
