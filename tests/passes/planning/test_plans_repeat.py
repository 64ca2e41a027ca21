"""One program has one plan: whatever the order of hashes, and however many layers it has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import Tensor, nn

import graphpar as gp
from tests.passes.sharding.test_search import Layers, export

ROOT = Path(__file__).parents[3]
PLAN = """
import json, sys
import graphpar as gp
from tests.programs import example
plan = gp.plan(example(sys.argv[1]), mesh={"tp": 2, "cp": 2})
json.dump(plan.to_json(), sys.stdout)
"""


def planned(name: str, seed: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PLAN, name],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.slow
def test_a_plan_does_not_depend_on_hashes() -> None:
    first = planned("llama", "0")

    assert first == planned("llama", "1")
    assert json.loads(first)["sharding"]["decisions"]


def test_decisions_in_a_block_do_not_depend_on_how_many_there_are() -> None:
    few, many = (
        gp.plan(export(Layers(count, residual=True)), mesh={"tp": 2, "cp": 2}).sharding.decisions["Layer"]
        for count in (4, 12)
    )

    assert few == many


def test_decisions_are_keyed_by_module_operator_and_occurrence() -> None:
    """What stands before a block renames fx's nodes, and no decision."""
    plain = gp.plan(export(Layers(4, residual=True)), mesh={"tp": 2}).sharding.decisions
    assert all("/" in key or "." in key or key == "output" for rows in plain.values() for key in rows)

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Layers(4, residual=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner((x + 1) + 2)

    shifted = gp.plan(export(Shifted()), mesh={"tp": 2}).sharding.decisions
    assert list(shifted["Layer"]) == list(plain["Layer"])
    moved = {key.replace("inner.", "", 1).replace("inner/", "/", 1) for key in shifted[""]}
    assert set(plain[""]) <= moved and "/add#1" in moved - set(plain[""])
