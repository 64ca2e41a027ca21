"""Two plans side by side, and one model on several clusters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import graphpar as gp
from graphpar.cli import sweep_command
from graphpar.cli.main import main
from graphpar.cli.trace import export_file
from graphpar.ir.plan import Plan
from graphpar.report.difference import Side, difference, difference_lines
from graphpar.report.phrases import PART_NAMES
from graphpar.text import bytes_text, seconds_text, spread_text

MODEL = """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
example_inputs = (torch.ones(8, 256),)
loss_fn = torch.nn.functional.mse_loss
example_targets = torch.zeros(8, 256)
"""


def _side(name: str, width: int = 8, cluster: str = "2xCPU", **asked: object) -> Side:
    layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    program = gp.export(layers, (torch.ones(8, width),), loss_fn=lambda y: y.square().mean())
    plan: Plan = gp.plan(program, cluster, **asked)  # type: ignore[arg-type]
    return Side(name, plan, json.loads(gp.partition(program, plan).files["report.json"])["report"])


def test_every_number_is_that_of_the_plans() -> None:
    a, b = _side("a", mesh="dp_replicate=2"), _side("b", mesh="tp=2")
    data = difference(a, b)
    assert a.predicted is not None and b.predicted is not None
    step, *parts = data["times"]
    assert (step["a"], step["b"]) == (a.predicted["step_time_s"], b.predicted["step_time_s"])
    for side in "ab":
        assert sum(part[side] for part in parts) == pytest.approx(step[side])
    assert step["difference"] == step["b"] - step["a"] and step["ratio"] == step["b"] / step["a"]
    assert [entry["name"] for entry in data["decisions"]][:1] == ["mesh"]
    assert data["placements"] and all("*." in entry["parameters"] for entry in data["placements"])
    peak, *held, room = data["memory"]
    assert peak["a"] == max(a.predicted["peak_memory_bytes"]) and room["a"] == a.predicted["memory_bytes"]
    assert sum(part["b"] for part in held) == peak["b"]
    faster = "A" if step["a"] < step["b"] else "B"
    assert f"{faster} is " in data["summary"]
    assert data["summary"] in difference_lines(data)[0]
    assert f"the difference is {seconds_text(abs(step['difference']))}." in data["summary"]
    most = max(parts, key=lambda part: part["difference"] * (1 if faster == "A" else -1))
    assert f" {seconds_text(abs(most['difference']))} " in data["summary"] and "a row" not in data["summary"]
    assert {part["name"] for part in parts} <= {
        PART_NAMES.get(n, n) for n in (*a.predicted["parts_s"], *b.predicted["parts_s"])
    }


def test_a_plan_is_equal_to_itself() -> None:
    a = _side("a", mesh="pp=2")
    data = difference(a, a)
    assert data["decisions"] == data["placements"] == [] and "equally fast" in data["summary"]
    assert all(row["difference"] == 0 for row in (*data["times"], *data["memory"], *data["ranks"]))


def test_modules_that_were_moved_by_hand_are_told() -> None:
    a = _side("a", mesh="pp=2")
    one, two = a.plan.stages
    moved = (replace(one, modules=one.modules[:-1]), replace(two, modules=(one.modules[-1], *two.modules)))
    text = difference_lines(difference(a, Side("b", replace(a.plan, stages=moved), None)))
    assert " Decisions that differ" in text and any("modules of stage 0: 0-1 | 0" in line for line in text)


def test_other_batches_are_compared_for_each_row() -> None:
    a, b = _side("a", mesh="pp=2"), _side("b", mesh="tp=2", global_batch=16)
    data = difference(a, b)
    each = data["times"][0]["a"] / 8 - data["times"][0]["b"] / 16
    assert f"the difference is {seconds_text(abs(each))} a row." in data["summary"]


def test_plans_for_devices_of_several_kinds() -> None:
    mixed, equal = (_side(on, cluster=on, mesh="pp=2,dp_replicate=2") for on in ("2xH100+2xA100", "4xH100"))
    data = difference(mixed, equal)
    assert mixed.predicted is not None and data["times"][0]["a"] == mixed.predicted["step_time_s"]
    assert "2xH100-SXM-80GB+2xA100-SXM-80GB" in "\n".join(difference_lines(data))


def test_plans_for_other_models_and_without_predictions() -> None:
    a, other = _side("a", mesh="pp=2"), _side("other", width=4, mesh="pp=2")
    with pytest.raises(gp.GraphparError, match=r"parameters .*one model"):
        difference(a, other)
    data = difference(a, Side("bare.json", a.plan, None))
    assert data["times"] is None and "bare.json has no prediction" in data["summary"]


@pytest.mark.costly
def test_sweep_traces_once_and_says_what_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.py").write_text(MODEL)
    small = gp.Cluster.parse("2xCPU").to_json()
    small["device"]["memory_bytes"] = 2_000_000
    Path("small.json").write_text(json.dumps(small))
    command = ["sweep", "m.py", "--cluster", "2xCPU,small.json", "--batch", "8,16", "--html", "s.html"]
    traces = []
    monkeypatch.setattr(
        sweep_command, "export_file", lambda *given, **options: traces.append(1) or export_file(*given, **options)
    )
    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert traces == [1]
    assert [row["global_batch"] for row in rows] == [8, 16, 8, 16]
    for row in rows[:2]:
        assert row["fits"] and row["rows_per_s"] == row["global_batch"] / row["step_time_s"]
    assert all(not row["fits"] and not row["refused"] and "too much" in row["why_not"] for row in rows[2:])
    assert main(command) == 0
    table = capsys.readouterr().out
    assert all(spread_text(row["step_time_s"], row["spread_s"]) in table for row in rows[:2] if row["spread_s"] > 0)
    assert all(bytes_text(row["peak_memory_bytes"]) in table and "e+" not in table for row in rows[:2])
    page = Path("s.html").read_text()
    assert "<svg" in page and "batch 16" in page and "<script" not in page
    assert main(["sweep", "m.py", "--cluster", "2xCPU,nothing"]) == 2
    assert main(["sweep", "m.py", "--cluster", "2xCPU", "--mesh", "tp=3"]) == 2
    assert main(["diff", "m.py", "m.py"]) == 2
