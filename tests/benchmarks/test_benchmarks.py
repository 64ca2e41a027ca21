"""The benchmarks run, and both sides of a comparison do the same work."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from benchmarks import experts, gpt, megatron, planning, runtime, search_times


def test_the_handwritten_split_is_the_model() -> None:
    torch.manual_seed(0)
    model, batch = gpt.GPT(), gpt.example_batch(2)
    with torch.no_grad():
        split = gpt.LastStage(model)(gpt.FirstStage(model)(batch["ids"]))
        assert torch.equal(split, model(batch["ids"]))


@pytest.fixture
def alone() -> dist.ProcessGroup:  # type: ignore[misc]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD  # type: ignore[misc]
    dist.destroy_process_group()


@pytest.mark.costly
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.sampled(1 / 2)
def test_the_megatron_style_model_is_the_model(alone: dist.ProcessGroup, sequence: bool) -> None:
    torch.manual_seed(0)
    model, batch = gpt.GPT(), gpt.example_batch(2)
    by_hand = megatron.MegatronGPT(alone, sequence)
    megatron.load(by_hand, model.state_dict())
    loss = gpt.loss_fn(model(batch["ids"]), batch["labels"])
    loss.backward()
    own = by_hand(batch["ids"], batch["labels"])
    own.backward()
    megatron.finish_gradients(by_hand)
    assert_close(own, loss)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_close({name: parameter.grad for name, parameter in by_hand.named_parameters()}, expected)


def test_experts_by_hand_are_the_model(alone: dist.ProcessGroup) -> None:
    torch.manual_seed(0)
    rows = torch.randn(2, 32, gpt.WIDTH)
    model, by_hand = experts.Mixture(experts.Experts), experts.Mixture(experts.SharedExperts)
    by_hand.load_state_dict(model.state_dict())
    found = []
    for mixture in (model, by_hand):
        y = mixture(rows)
        y.square().sum().backward()
        found.append((y, {name: parameter.grad for name, parameter in mixture.named_parameters()}))
    assert_close(*found)


@pytest.mark.slow
@pytest.mark.parametrize(("only", "rows"), [("pipeline 1F1B*", 1), ("tensor*", 5), ("cp*", 1), ("experts*", 1)])
def test_runtime_compares_equal_losses(capsys: pytest.CaptureFixture[str], only: str, rows: int) -> None:
    runtime.main(["--json", "--rounds", "1", "--only", only])
    found = json.loads(capsys.readouterr().out)["comparisons"]
    assert len(found) == rows
    for row in found:
        assert row["loss_difference"] < 1e-5
        assert row["ratio"] > 0 and row["cpu_ratio"] > 0


def test_patterns_that_fit_nothing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for main, name in ((runtime.main, "tensor / DTensor"), (planning.main, "search llama3_8b")):
        with pytest.raises(SystemExit):
            main(["--only", "no such row"])
        assert name in capsys.readouterr().err


@pytest.mark.costly
def test_searches_are_timed_at_any_depth() -> None:
    shallow, deep = search_times.Model("llama3_405b", 2), search_times.Model("llama3_405b", 3)
    times, ratios = search_times.measure([shallow, deep], repetitions=1)
    assert [(time.layers, time.mesh) for time in times] == [(n, mesh) for n in (2, 3) for mesh in search_times.MESHES]
    assert all(time.plan_s >= max(time.build_s, time.solve_s, time.read_s) > 0 and time.lower_s > 0 for time in times)
    assert times[0].operators == times[2].operators  # instances share their decision
    assert [ratio.what for ratio in ratios] == [f"{model.label}: two axes over one" for model in (shallow, deep)]


@pytest.mark.slow
def test_planning_measures(capsys: pytest.CaptureFixture[str]) -> None:
    planning.main(["--json", "--only", "* gpt2", "--repetitions", "1"])
    found = json.loads(capsys.readouterr().out)
    assert [row["emitted"] for row in found["measurements"]] == [False, True]
    assert all(
        row["process_s"] > row["capture_s"] > 0 and row["peak_memory_bytes"] > 1e8 for row in found["measurements"]
    )
    assert [row["mesh"] for row in found["searches"]] == list(search_times.MESHES)
    assert len(found["ratios"]) == 1
