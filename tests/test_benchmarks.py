"""The benchmarks run, and both sides of the comparison do the same work."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import gpt, planning, runtime


def test_the_handwritten_split_is_the_model() -> None:
    torch.manual_seed(0)
    model, batch = gpt.GPT(), gpt.example_batch(2)
    with torch.no_grad():
        split = gpt.LastStage(model)(gpt.FirstStage(model)(batch["ids"]))
        assert torch.equal(split, model(batch["ids"]))


@pytest.mark.slow
def test_runtime_compares_equal_losses(capsys: pytest.CaptureFixture[str]) -> None:
    runtime.main(["--json", "--rounds", "2", "--schedule", "1F1B"])
    (found,) = json.loads(capsys.readouterr().out)["comparisons"]
    assert found["loss_difference"] < 1e-5
    assert 0.3 < found["ratio"] < 3


@pytest.mark.slow
def test_planning_measures(capsys: pytest.CaptureFixture[str]) -> None:
    planning.main(["--json", "--model", "gpt2"])
    found = json.loads(capsys.readouterr().out)["measurements"]
    assert [row["emitted"] for row in found] == [False, True]
    assert all(row["process_s"] > row["capture_s"] > 0 and row["peak_memory_bytes"] > 1e8 for row in found)
