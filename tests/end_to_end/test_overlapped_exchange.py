"""Rows that travel to experts beside a shared expert: which operators run meanwhile, and that the numbers are the model's."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import graphpar as gp
from graphpar.ir.program import Program
from graphpar.runtime.torch_versions import COMPILES_COLLECTIVES
from tests.ranks import shared_expert_script as script
from tests.tools.rank_pool import RankPool
from tests.tools.samples import sample

TWO: dict[str, Any] = {"mesh": {"dp_expert": 2}}
ZERO_BUBBLE = {"schedule": "ZBVZeroBubble", "microbatch_size": 1}
PLANS: dict[str, dict[str, Any]] = {
    "plain": TWO,
    "room": {**TWO, "expert_room": 1.8},
    "compiled": TWO,
    "compiled room": {**TWO, "expert_room": 1.8},
    "captured room": {**TWO, "expert_room": 2.0},
    "again": {**TWO, "recompute": "full"},
    "selective": {**TWO, "recompute": "selective"},
    "budget": {**TWO, "recompute": "budget:0.5"},
}
FOUR: dict[str, dict[str, Any]] = {
    "zero bubble": {"mesh": {"pp": 2, "dp_expert": 2}, **ZERO_BUBBLE},
    "tp": {"mesh": {"tp": 2, "dp_expert": 2}, "expert_room": 1.8},
    "ep": {"mesh": {"ep": 2, "dp_expert": 2}, "expert_room": 1.8},
    "sharded": {"mesh": {"dp_shard": 2, "dp_expert": 2}, "zero": 3},
}


@functools.cache
def shared(first: bool = False) -> Program:
    pytest.importorskip(
        "transformers.integrations.moe"
    )  # it registers the product by groups that can be traced in fp32
    torch.manual_seed(0)
    return gp.export(script.Shared(first), (), script.batch(0))


def made(first: bool = False, **pins: Any) -> gp.Partitioned:
    return gp.partition(shared(first), gp.plan(shared(first), **pins))


def trained(programs: Mapping[str, gp.Partitioned], folder: Path, pool: RankPool, ranks: int = 2) -> dict[str, Any]:
    for name, parts in programs.items():
        parts.save(folder / name)
        save_file(script.weights(), folder / name / "weights.safetensors")
    pool.torchrun(Path(script.__file__), [str(folder), *programs], nproc=ranks, timeout_s=300)
    found = {}
    for name in programs:
        states = [load_file(folder / name / f"step_{step}.safetensors") for step in range(script.steps_of(name))]
        found[name] = json.loads((folder / name / "seen.json").read_text()) | {"states": states}
    return found


def differ(found: Mapping[str, Any]) -> bool:
    """Whether losses or weights after each step are not those of one process."""
    losses, states = script.eager(len(found["states"]))
    own: list[dict[str, Tensor]] = found["states"]
    return found["losses"] != pytest.approx(losses, rel=1e-5) or not all(
        torch.allclose(mine[name], state[name], rtol=1e-4, atol=1e-6)
        for mine, state in zip(own, states)
        for name in state
    )


@pytest.mark.costly
def test_programs_are_the_model_and_products_of_the_shared_expert_run_while_rows_travel(
    tmp_path: Path, pool: RankPool
) -> None:
    names = [name for name in PLANS if COMPILES_COLLECTIVES or "compiled" not in name]
    programs = {name: made(**PLANS[name]) for name in ["plain", *sample([n for n in names if n != "plain"], 3)]}
    for name, found in trained(programs, tmp_path, pool).items():
        assert not differ(found), name
        assert found["replays"] == (script.REPLAYED - 3 if "captured" in name else 0), name
        if name == "plain":
            calls = " ".join(found["calls"])
            forward = "send product wait experts experts send product wait"
            backward = "send product product wait experts experts experts experts send product product wait"
            assert calls.count(forward) == script.LAYERS, calls
            assert calls.count(backward) == script.LAYERS, calls


@pytest.mark.costly
@pytest.mark.sampled(1 / 2)
def test_programs_of_four_ranks_are_the_model(tmp_path: Path, pool: RankPool) -> None:
    programs = {name: made(first=name != "tp", **FOUR[name]) for name in sample(list(FOUR), 2)}
    for name, parts in programs.items():
        assert "start_send(" in parts.files["blocks.py"] and gp.check(parts).problems == [], name
    for name, found in trained(programs, tmp_path, pool, 4).items():
        assert not differ(found), name


FAULTS = {
    "gradients in another order": (
        "lambda g: _begin_all_to_all(_unsorted(g, exchange), axis",
        "lambda g: _begin_all_to_all(g, axis",
    ),
    "rows in another order": ("lambda given: _sorted(_done(rows), exchange)", "lambda given: _done(rows)"),
    "rows that do not come": ("_unpacked(_done(rows), exchange)", "torch.zeros_like(rows)"),
}


def test_products_of_experts_in_fp64_are_whole_on_lines_that_are_broken() -> None:
    pytest.importorskip("transformers.integrations.moe")
    torch.manual_seed(0)
    program = gp.export(script.Shared(False).double(), (), {name: wide(each) for name, each in script.batch(0).items()})
    parts = gp.partition(program, gp.plan(program, **TWO))
    text = parts.files["blocks.py"]
    compile(text, "blocks.py", "exec")
    assert "torch.matmul" in text and "grouped_mm" not in text


def wide(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@pytest.mark.costly
@pytest.mark.sampled(1 / 2)
def test_faults_are_found(tmp_path: Path, pool: RankPool) -> None:
    parts, programs = made(**TWO), {}
    for name in sample(list(FAULTS), 2):
        right, wrong = FAULTS[name]
        assert right in parts.files["expert_rows.py"]
        text = parts.files["expert_rows.py"].replace(right, wrong)
        programs[name] = replace(parts, files={**parts.files, "expert_rows.py": text})
    for name, found in trained(programs, tmp_path, pool).items():
        assert differ(found), name
