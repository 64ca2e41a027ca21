"""Steps that are replayed are those that run, to the bit; what can't be captured runs, and its reason is said."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import graphpar as gp
from graphpar.cli.main import main
from graphpar.cli.trace import export_file
from graphpar.frontend.modelfile import example_batch, initial_weights
from graphpar.ir.precision import Precision
from graphpar.runtime.manifest import load_manifest
from graphpar.runtime.stages.captured import IDLE, KEPT, Captured, _Calls, _hooks, _Step, _unseen, _watched
from tests.ranks import captured_script
from tests.tools.programs import example, example_file
from tests.tools.rank_pool import RankPool
from tests.tools.samples import sample

PLANS: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"tp": 2}},
    "replicas": {"mesh": {"dp_replicate": 2}, "microbatch_size": 1},
    "zero 1": {"mesh": {"dp_shard": 2}, "zero": 1},
    "zero 3": {"mesh": {"dp_shard": 2}, "zero": 3},
    "selective": {"mesh": {"tp": 2}, "sp": True, "recompute": "selective"},
    "full": {"mesh": {"dp_replicate": 2}, "recompute": "full"},
    "pointwise": {"mesh": {"tp": 2}, "sp": True, "recompute": "gathers+pointwise"},
    "bf16": {"mesh": {"dp_shard": 2}, "zero": 1},
    "compiled": {"mesh": {"dp_replicate": 2}},
    "compiled tp": {"mesh": {"tp": 2}},
    "one microbatch": {"mesh": {"dp_replicate": 2}},
    "GPipe": {"mesh": {"pp": 2}},
    "1F1B": {"mesh": {"pp": 2}, "schedule": "1F1B", "microbatch_size": 1},
    "interleaved": {"mesh": {"pp": 2}, "schedule": "Interleaved1F1B", "microbatch_size": 1},
    "ZBV": {"mesh": {"pp": 2}, "schedule": "ZBVZeroBubble", "microbatch_size": 1},
    "cp": {"mesh": {"cp": 2}},
    "ep": {"mesh": {"ep": 2}},
    "room": {"mesh": {"ep": 2}, "expert_room": 2.0},
    "little room": {"mesh": {"dp_expert": 2}, "expert_room": 1.0},
}
REFUSED = {
    "zero 3": r"ZeRO 3 frees and allocates parameters",
    "ep": r"Tensor\.tolist waits for the device, in line \d+ of collectives\.py",
}
PAIRS = [
    *(("gpt_dropout", plan) for plan in ("tp", "replicas", "compiled tp", "full", "selective")),
    *(("llama", plan) for plan in ("selective", "pointwise", "cp", "bf16", "compiled", "tp", "zero 1")),
    *(("resnet_batchnorm", plan) for plan in ("one microbatch", "zero 1")),
    *(("t5", plan) for plan in ("tp", "zero 1")),
    *(("gpt_dropout", plan) for plan in ("GPipe", "1F1B", "interleaved", "ZBV")),
    *(("llama", plan) for plan in ("1F1B", "ZBV")),
    *(("mixtral", plan) for plan in ("room", "little room")),
]


def check(cases: Sequence[tuple[str, str]], folder: Path, pool: RankPool) -> Mapping[str, Mapping[str, Any]]:
    """Train programs with and without captured steps, and compare."""
    for name in {name for name, _ in cases}:
        file = example_file(name)
        for plan in [plan for other, plan in cases if other == name]:
            given = Precision("bf16") if plan == "bf16" else None
            program = export_file(file, None, given) if given else example(name)
            gp.partition(program, gp.plan(program, **PLANS[plan])).save(folder / name / plan)
        save_file(
            {key: value.clone() for key, value in initial_weights(file).items()}, folder / name / "weights.safetensors"
        )
        save_file(example_batch(file, load_manifest(folder / name / plan).inputs), folder / name / "batch.safetensors")
    pool.torchrun(Path(captured_script.__file__), [str(folder)], nproc=2, timeout_s=600)
    seen: dict[str, dict[str, Any]] = json.loads((folder / "rank_0.json").read_text())
    assert seen.keys() == {f"{name} {plan}" for name, plan in cases}
    for name, found in seen.items():
        assert found["names"] and not found["differ"], (name, found)
        refused = REFUSED.get(name.split(" ", 1)[1])
        assert (found["replays"] > 0) == (refused is None), (name, found)
    return seen


@pytest.mark.costly
def test_replayed_steps_are_those_that_run(tmp_path: Path, pool: RankPool) -> None:
    check([("gpt_dropout", "replicas"), ("gpt_dropout", "zero 1")], tmp_path, pool)


@pytest.mark.costly
def test_what_cant_be_captured_runs_and_says_why(tmp_path: Path, pool: RankPool) -> None:
    seen = check([("mixtral", "ep")], tmp_path, pool)
    (said,) = seen["mixtral ep"]["said"]
    assert said.startswith("steps are not captured: ")


@pytest.mark.slow
def test_replayed_steps_of_other_plans_are_those_that_run(tmp_path: Path, pool: RankPool) -> None:
    check([*sample(PAIRS, 6), ("llama", "zero 3")], tmp_path, pool)


def test_a_list_of_calls_writes_where_it_wrote_first() -> None:
    x, weight = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True)
    results: list[Tensor] = []
    calls = _Calls()

    def run() -> None:
        hidden = (x @ weight).relu_().view(2, 6)
        (gradient,) = torch.autograd.grad(hidden.square().sum(), weight)
        results.extend([hidden, gradient])

    calls.capture(run)
    hidden, gradient = results
    for seed in range(2):
        with torch.no_grad():
            x.copy_(torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)))
        calls.replay()
        results.clear()
        run()
        assert torch.equal(hidden, results[0]) and torch.equal(gradient, results[1])


@pytest.mark.parametrize(
    ("reads", "said"),
    [
        (lambda x: x.sum().item(), "aten._local_scalar_dense waits"),
        (lambda x: x.tolist(), "Tensor.tolist waits"),
        (lambda x: x.nonzero(), "aten.nonzero waits"),
        (lambda x: x[x > 0], "aten.index waits"),
        (lambda x: x.to("meta"), "takes or makes a tensor on the host"),
        (lambda x: x[torch.tensor([0, 1])] + x.sum(), ""),
    ],
)
def test_what_waits_for_the_device_is_found(reads: Any, said: str) -> None:
    with _watched("program") as found:
        reads(torch.ones(3))
    assert bool(found) == bool(said) and (not said or said in found[0])


def test_what_a_list_of_calls_does_not_see_is_not_captured() -> None:
    cpu = torch.device("cpu")
    assert "inductor compiles" in str(_unseen(cpu, "inductor")) and _unseen(torch.device("cuda"), "inductor") is None
    assert _unseen(cpu, None) is None and _unseen(cpu, "aot_eager") is None


def test_a_fifth_step_has_a_place_once_another_is_idle() -> None:
    captured = Captured.__new__(Captured)
    captured._steps = {place: _Step([], seen=3, last=place, graph=_Calls()) for place in range(KEPT)}
    captured._ran = IDLE
    assert not captured._has_place() and len(captured._steps) == KEPT
    captured._ran = IDLE + 1
    assert captured._has_place() and list(captured._steps) == [*range(1, KEPT)]
    assert captured._has_place() and len(captured._steps) == KEPT - 1


def test_other_hooks_are_another_step() -> None:
    layer = torch.nn.Linear(2, 2)
    seen = [list(_hooks(layer))]
    layer.weight.register_hook(lambda gradient: gradient)
    seen.append(list(_hooks(layer)))
    layer.register_forward_hook(lambda *_: None)
    seen.append(list(_hooks(layer)))
    assert [len(hooks) for hooks in seen] == [0, 1, 2]


def test_only_training_is_captured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = export_file(example_file("gpt"), "infer", None)
    gp.partition(program, gp.plan(program)).save(tmp_path / "out")
    assert main(["run", str(tmp_path / "out"), "--cuda-graphs"]) != 0
    assert "--cuda-graphs is for programs that train" in capsys.readouterr().err
