"""The benchmark of regret: what it predicts, how it sums up, and measuring while others are quiet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import regret
from benchmarks.regret import Score, plan_name, predicted, spearman
from benchmarks.regret_models import MODELS
from graphpar.cost_models import contention as quiet
from graphpar.cost_models.contention import OTHERS, Watch
from graphpar.hardware.cluster import Cluster
from graphpar.runtime.distributed import Ranks
from tests.tools.samples import drawn

# ---- the benchmark ---------------------------------------------------------------------------------------------


def test_rank_correlation() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 400]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(3**0.5 / 2)  # as scipy.stats.spearmanr


@pytest.mark.parametrize("count", [1, 2, 11, 12, 40])
def test_every_plan_is_in_one_chunk_and_the_first_in_all(count: int) -> None:
    plans = [f"plan {index}" for index in range(count)]
    chunks = regret._chunks(plans)
    assert all(chunk[0] == "plan 0" for chunk in chunks)
    assert sorted(plan for chunk in chunks for plan in chunk[1:]) == sorted(plans[1:])
    assert max(map(len, chunks)) <= regret.CHUNK + 1


@pytest.mark.costly
@pytest.mark.parametrize("name", drawn(list(MODELS), 1, 1))
@pytest.mark.sampled(1 / 2)
def test_plans_of_all_kinds_are_predicted_under_names_of_their_own(name: str) -> None:
    _, program = MODELS[name].program()
    priced = predicted(program, Cluster.parse("4xCPU"))
    names = [plan_name(each) for each in priced]
    assert len(set(names)) == len(names) > 50
    assert {name.rpartition(" x")[0] for name in names} >= {
        "dp4",
        "tp4",
        "pp2 dp2 1F1B/1",
        "pp2 tp2 ZBVZeroBubble/2",
        "dp2 tp2",
        "fsdp4 zero3 full",
        "dp2 fsdp2 zero1 budget:0.4",
        "pp2 fsdp2 zero2 selective 1F1B/1",
        "pp2 fsdp2 zero3 always full GPipe/1",
    }
    times = [each.estimate.step_time_s for each in priced]
    assert times == sorted(times)
    drawn = [plan_name(each) for each in regret.sampled(priced, 60)]
    assert drawn == [plan_name(each) for each in regret.sampled(priced, 60)] and len(set(drawn)) == 60
    assert all(any(f" {kind} " in f"{name} " for name in drawn) for kind in ("full", "selective", "budget:0.4"))
    assert regret.sampled(priced, 0) == priced


def test_times_are_relative_to_the_plan_that_all_chunks_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second chunk was measured while everything took twice as long."""
    found = [{"a": [1.0, 1.0, 1.1], "b": [2.0, 2.0, 9.0]}, {"a": [2.0, 2.0, 2.2], "c": [6.0, 6.0, 6.0]}]

    def launched(*_: Any, **__: Any) -> None:
        (tmp_path / "steps.json").write_text(
            json.dumps({"chunks": found, "work_s": [3.0, 5.0, 4.0], "disturbed": 0.25})
        )

    monkeypatch.setattr(regret, "torchrun", launched)
    times, disturbed, work_s = regret._timed(tmp_path, 2, [["a", "b"], ["a", "c"]], 3, 0.0)
    assert disturbed == 0.25 and work_s == 4.0
    assert times["b"] / times["a"] == pytest.approx(2)
    assert times["c"] / times["a"] == pytest.approx(3)


@pytest.mark.slow
def test_plans_are_measured_on_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [
        plan
        for plan in predicted(MODELS["mlp"].program()[1], Cluster.parse("2xCPU"))
        if plan.candidate.microbatches == 2
    ]
    monkeypatch.setattr(regret, "predicted", lambda *_: kept[:4])
    monkeypatch.setattr(regret, "FINAL_ROUNDS", 2)
    score: Score = regret.score("mlp", Cluster.parse("2xCPU"), 2, 0.0, 0, 1.0)
    assert len(score.rows) == 4
    assert score.chosen == plan_name(kept[0])
    assert score.regret >= 1
    assert all(row.measured_s > 0 for row in score.rows)


# ---- the watch -------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    monkeypatch.setattr(quiet, "gather_objects", lambda value: [value])
    return Ranks(0, 1, 0, torch.device("cpu"), "gloo")


def readings(monkeypatch: pytest.MonkeyPatch, busy: Iterator[float]) -> None:
    monkeypatch.setattr(quiet, "busy_s", lambda: next(busy))
    monkeypatch.setattr("time.process_time", lambda: 0.0)
    monkeypatch.setattr("time.sleep", lambda _: None)
    clock = iter(float(tick) for tick in range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))  # everything takes a second
    monkeypatch.setattr(quiet, "_cores", lambda: 2)


def test_what_others_disturb_is_measured_again(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    # before and after: the first call, a look that finds quiet, the second call
    readings(monkeypatch, iter([0.0, 1.0, 5.0, 5.0, 6.0, 6.0 + OTHERS]))
    watch, results = Watch(alone, 60.0), iter(["disturbed", "quiet"])
    assert watch.undisturbed(lambda: next(results)) == "quiet"
    assert (watch.measured, watch.disturbed) == (1, 0)


def test_without_patience_the_first_counts(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    readings(monkeypatch, iter([0.0, 1.0]))
    watch = Watch(alone, 0.0)
    assert watch.undisturbed(lambda: "disturbed") == "disturbed"
    assert (watch.measured, watch.disturbed) == (1, 1)


def test_without_patience_one_may_give_up(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    readings(monkeypatch, iter([0.0, 1.0]))
    with pytest.raises(quiet.Disturbed):
        Watch(alone, 0.0, gives_up=True).undisturbed(lambda: "disturbed")


def test_a_tick_of_each_core_is_no_disturbance(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    readings(monkeypatch, iter([0.0, 2.0]))
    monkeypatch.setattr(quiet, "_TICK_S", 1.0)  # as a call that takes no longer than one
    watch = Watch(alone, 60.0)
    assert watch.undisturbed(lambda: "short") == "short"
    assert watch.disturbed == 0


def test_work_of_ones_own_is_no_disturbance(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    readings(monkeypatch, iter([0.0, 1.0]))
    own = iter([0.0, 1.0])
    monkeypatch.setattr("time.process_time", lambda: next(own))
    watch = Watch(alone, 60.0)
    assert watch.undisturbed(lambda: "own") == "own"
    assert watch.disturbed == 0


def test_the_kernel_counts_busy_seconds() -> None:
    if not Path("/proc/stat").is_file():
        pytest.skip("no /proc/stat")
    before = quiet.busy_s()
    sum(range(3_000_000))
    assert quiet.busy_s() >= before > 0
