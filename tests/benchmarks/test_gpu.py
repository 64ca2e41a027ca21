"""The benchmark for one GPU: its rows say what they mean, and its checks run on a CPU."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import gpu, gpu_facts
from benchmarks.gpu_programs import Programs, Row


def test_a_row_is_held_against_its_bar() -> None:
    assert Row("seconds", 1.2, 1.0, "s", 0.9, 1.1).ok is False
    assert Row("seconds", 1.0, 1.0, "s", 0.9, 1.1).ok is True
    assert Row("waits", 2, most=1).ok is False and Row("waits", 1, most=1).ok is True
    assert Row("a figure", 2.0).ok is None and Row("not here", most=1).ok is None
    assert Row("nothing", failed=True).ok is False
    assert Row("seconds", 1.2, 1.0, "s", 0.9, 1.1).bar == "at least 0.9, at most 1.1"


def test_names_of_torch_are_read_from_imports_and_chains(tmp_path: Path) -> None:
    text = (
        "import torch\nimport torch.distributed as dist\nfrom torch.distributed.pipelining.schedules import _Action as A\n"
        "def f():\n    return torch._C._current_graph_task_id(), dist._nowhere.x, torch.nn.Linear, A.__name__\n"
    )
    names = set(gpu_facts._torch_names(ast.parse(text)))
    assert names == {
        "torch.distributed.pipelining.schedules._Action", "torch._C._current_graph_task_id", "torch._C",
        "torch.distributed._nowhere.x", "torch.distributed._nowhere",
    }  # fmt: skip
    assert gpu_facts._has("torch._C._current_graph_task_id") and not gpu_facts._has("torch.distributed._nowhere.x")
    assert gpu_facts._has("torch.ops._c10d_functional.all_to_all_single")
    (row,) = gpu_facts.names_of_torch(Programs(tmp_path, toy=True))
    assert row.ok


def test_a_check_that_raises_is_a_row_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raises(programs: Programs) -> Iterator[Row]:
        yield Row("fine", 1.0, most=1.0)
        raise ValueError("no such kernel")

    monkeypatch.setattr(gpu, "CHECKS", (gpu.Check("D9", "a kernel", raises),))
    assert gpu.main(["--toy", "--only", "D9", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["what"], row["ok"], row["check"]) for row in rows] == [
        ("fine", True, "D9"),
        ("a kernel failed", False, "D9"),
    ]
    assert rows[1]["note"] == "ValueError: no such kernel"


def test_exactness_runs_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--toy", "--only", "D1,D3,D4"]) == 0
    shown = capsys.readouterr().out
    assert "ring, float32, causal: gradient of keys" in shown and "bits of masks that differ" in shown


@pytest.mark.costly
def test_a_rank_alone_is_compared_with_its_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--toy", "--only", "B5,B6", "--json"]) == 0
    rows = {row["what"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["dp_expert, rank 1 of 2, allocated"]["ok"] and "error of 2 actions" in rows
