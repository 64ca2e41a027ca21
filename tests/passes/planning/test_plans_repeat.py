"""One program has one plan: whatever the order of hashes, and however many layers it has."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import graphpar as gp
from tests.passes.sharding.test_search import Layers, export
from tests.tools.programs import example
from tests.tools.rank_pool import RankPool

PLANS: dict[str, dict[str, Any]] = {"gpt": {"cluster": "4xA100"}, "llama": {"mesh": {"tp": 2, "cp": 2}}}


def planned(name: str) -> str:
    """The plan, and for a search what else it saw."""
    plan = gp.plan(example(name), **PLANS[name])
    others = [] if plan.found is None else [str(other.candidate) for other in plan.found.alternatives]
    seconds = None if plan.predicted is None else plan.predicted.step_time_s
    return json.dumps([plan.to_json(), others, seconds])


@pytest.mark.costly
@pytest.mark.parametrize("name", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_plan_does_not_depend_on_hashes(name: str, tmp_path: Path, pool: RankPool) -> None:
    """A process with other hashes makes the same one."""
    pool.torchrun(Path(__file__), [name, str(tmp_path)], nproc=1, timeout_s=300)
    plan = planned(name)

    assert int((tmp_path / "hash").read_text()) != hash("a text")
    assert plan == (tmp_path / "plan.json").read_text()
    assert json.loads(plan)[0]["sharding"].get("decisions") or name == "gpt"


@pytest.mark.parametrize("mesh", [{"dp_expert": 2, "ep": 2}, {"dp_expert": 2, "tp": 2}, {"dp_expert": 2, "pp": 2}])
def test_a_plan_that_divides_experts_twice_is_read_again(mesh: dict[str, int]) -> None:
    plan = gp.plan(example("mixtral"), mesh=mesh)
    again = gp.Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert (
        gp.partition(example("mixtral"), again).files["plan.json"]
        == gp.partition(example("mixtral"), plan).files["plan.json"]
    )


@pytest.mark.costly
def test_decisions_in_a_block_do_not_depend_on_how_many_there_are() -> None:
    few, many = (
        gp.plan(export(Layers(count, residual=True)), mesh={"tp": 2, "cp": 2}).sharding.decisions["Layer"]
        for count in (4, 12)
    )

    assert few == many


@pytest.mark.costly
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


if __name__ == "__main__":
    (Path(sys.argv[2]) / "plan.json").write_text(planned(sys.argv[1]))
    (Path(sys.argv[2]) / "hash").write_text(str(hash("a text")))
