"""A program that recomputes otherwise than its plan says is found before it runs out of memory, or is harmless."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import graphpar as gp
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.manifest import load_manifest
from graphpar.runtime.option_kinds import Recompute
from graphpar.verification.type_check import check_folder
from tests.tools.programs import example, norms_pinned

pytestmark = pytest.mark.usefixtures("unpriced")

BY_BLOCK = {
    "model.layers.0": "full",
    "model.layers.1": "full",
    "model.layers.2": "selective",
    "model.layers.5": "budget:0.5",
    "model.layers.6": "gathers",
}


def emitted(folder: Path, recompute: Recompute, name: str = "gpt", **mesh: int) -> Path:
    program = example(name)
    pinned = norms_pinned(program, "S(1)") if "tp" in mesh else {}
    return gp.partition(program, gp.plan(program, mesh=mesh, recompute=recompute, shard_plan=pinned)).save(folder)


def edited(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    plan = json.loads((folder / "plan.json").read_text())
    change(plan)
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


@pytest.mark.costly
@pytest.mark.parametrize(
    ("recompute", "mesh"),
    [
        ("full", {"pp": 2}),
        ("selective", {"tp": 2}),
        ("budget:0.5", {}),
        ("budget:0", {"dp_shard": 2}),
        ("budget:1.0", {}),
        ("gathers", {"tp": 2}),
        ({"blocks.*": "full", "blocks.3": "none"}, {"pp": 2}),
    ],
)
def test_programs_recompute_what_their_plans_say(tmp_path: Path, recompute: Recompute, mesh: dict[str, int]) -> None:
    assert check_folder(emitted(tmp_path / "out", recompute, **mesh)).problems == []


@pytest.mark.costly
def test_blocks_each_in_their_way(tmp_path: Path) -> None:
    assert check_folder(emitted(tmp_path / "out", BY_BLOCK, "llama", pp=2, tp=2)).problems == []


@pytest.mark.costly
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda kinds: kinds.pop("model.layers.1"), "stage 0, stage_0.py: recompute is called for model.layers.1, but .* says none"),
        (lambda kinds: kinds.update({"model.layers.4": "full"}), "nothing is called for model.layers.4, but .* says full"),
        (lambda kinds: kinds.update({"model.layers.2": "full"}), "recompute_selectively is called for model.layers.2, but .* says full"),
        (lambda kinds: kinds.update({"model.layers.5": "selective"}), "recompute_but is called for model.layers.5, but .* says selective"),
        (lambda kinds: kinds.update({"model.layers.6": "none"}), "gather_again is called for model.layers.6, but .* says none"),
        (lambda kinds: kinds.update({"model.layers.8": "full"}), "recompute names 'model.layers.8', but the program has no such block"),
    ],
)  # fmt: skip
def test_another_list_in_the_plan_is_found(
    tmp_path: Path, change: Callable[[dict[str, str]], object], found: str
) -> None:
    folder = edited(emitted(tmp_path / "out", BY_BLOCK, "llama", pp=2, tp=2), lambda plan: change(plan["recompute"]))

    (problem,) = check_folder(folder).problems

    assert re.search(found, problem)


def test_another_kind_of_all_is_found(tmp_path: Path) -> None:
    folder = edited(emitted(tmp_path / "out", "full"), lambda plan: plan.update(recompute="selective"))

    (problem,) = check_folder(folder).problems

    assert (
        "recompute is called for blocks.0, blocks.1, blocks.2, blocks.3 and 4 more, but plan.json's recompute says selective"
        in problem
    )


def test_an_edited_program_is_found(tmp_path: Path) -> None:
    folder = emitted(tmp_path / "out", {"blocks.0": "full", "blocks.3": "full"})
    text = (folder / "stage_0.py").read_text()
    (line,) = [line for line in text.splitlines(keepends=True) if line.endswith('recompute(stage.blocks["3"])\n')]
    (folder / "stage_0.py").write_text(text.replace(line, ""))

    (problem,) = check_folder(folder).problems

    assert "nothing is called for blocks.3, but plan.json's recompute says full" in problem


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["ful", "budget:1.5", "budget:much", 3, ["full"]])
def test_an_unknown_kind_is_refused(tmp_path: Path, kind: object) -> None:
    folder = emitted(tmp_path / "out", BY_BLOCK, "llama", tp=2)
    edited(folder, lambda plan: plan["recompute"].update({"model.layers.0": kind}))

    with pytest.raises(
        RuntimeProgramError,
        match=r"must be one of none, pointwise, gathers|the share of a budget is from 0 to 1",
    ):
        load_manifest(folder)


def test_another_share_changes_nothing_that_runs(tmp_path: Path) -> None:
    """Which results are kept is in the program; the share only says how they were chosen."""
    folder = emitted(tmp_path / "out", "budget:0.5")
    before = {file.name: file.read_bytes() for file in folder.glob("*.py")}

    edited(folder, lambda plan: plan.update(recompute="budget:0.6"))

    assert check_folder(folder).problems == [] and load_manifest(folder).recompute == "budget:0.6"
    assert {file.name: file.read_bytes() for file in folder.glob("*.py")} == before
