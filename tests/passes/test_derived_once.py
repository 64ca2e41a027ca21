"""A compilation derives nothing twice: one solution and one lowering for each tp degree, one measurement of each kind of unit."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import graphpar as gp
from graphpar.cli.main import main
from graphpar.cost_models import activation_memory, kept_results
from graphpar.cost_models.compute import Compute
from graphpar.cost_models.execution import Execution
from graphpar.cost_models.storage_tracker import CountedFakes, Live
from graphpar.cost_models.work import Phase, Product, Size, Work
from graphpar.frontend.modelfile import load_model_file
from graphpar.hardware.cluster import Cluster
from graphpar.hardware.devices import DEVICES
from graphpar.ir.recomputation import POINTWISE
from graphpar.passes import measured_units, rank_passes
from graphpar.passes.measured_units import RankUnits
from graphpar.passes.planning import choose
from graphpar.passes.planning.constraints import PlanConstraints
from graphpar.passes.planning.search import Planner
from graphpar.passes.sharding import problem
from tests.tools.programs import EXAMPLES, example


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, Any]]:
    """How often each thing is derived: (what, of what)."""
    counts: Counter[tuple[str, Any]] = Counter()

    def count(what: str, key: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any) -> Any:
            counts[what, key(*arguments)] += 1
            return real(*arguments)

        return counting

    def degrees(of: Any, *_: Any) -> tuple[tuple[str, int], ...]:
        return tuple(of.degrees.items())

    monkeypatch.setattr(choose, "search", count("solved", degrees, choose.search))
    lower = count("lowered", lambda program, sharding: degrees(sharding), rank_passes.lower)
    monkeypatch.setattr(rank_passes, "lower", lower)
    built = count("built", lambda builder: degrees(builder), problem._Builder.build)
    monkeypatch.setattr(problem._Builder, "build", lambda builder: built(builder))
    measured = count(
        "measured",
        lambda of, stage, rows, at: (tuple(of.degrees.items()), stage.modules, (rows, bool(of.casts))),  # copies count
        activation_memory._measure_reach,
    )
    monkeypatch.setattr(activation_memory, "_measure_reach", measured)
    return counts


def of(counts: Counter[tuple[str, Any]], what: str) -> dict[Any, int]:
    return {key: count for (name, key), count in counts.items() if name == what}


@pytest.mark.costly
@pytest.mark.parametrize("pins", [["--mesh", "tp=2"], []], ids=["tp pinned", "searched"])
def test_the_command_solves_and_lowers_each_tp_degree_once(
    pins: list[str], counted: Counter[tuple[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--cluster", "4xA100", "--batch", "8", "--no-weights", "-o", "out", *pins]
    assert main(["compile", str(EXAMPLES / "llama.py"), *options]) == 0
    tried = {(("tp", 2),)} if pins else {(("tp", 2),), (("tp", 4),)}
    for what in ("solved", "lowered", "built"):
        found = of(counted, what)
        assert set(found) <= tried and set(found.values()) == {1}, (what, found)
    measured = of(counted, "measured")
    layers = Counter((degrees, rows) for degrees, modules, rows in measured if any(".layers." in m for m in modules))
    assert set(measured.values()) == {1} and set(layers.values()) == {1}, measured  # one layer stands for all


def test_units_are_split_once_for_all_ways_to_run_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The units are those that each way alone has, and the operators that a block runs again are measured once."""
    program, counts = example("llama"), Counter[str]()
    for module, name in ((measured_units, "split"), (kept_results, "_made_again")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, name=name, real=real: (counts.update([name]), real(*args))[1])
    blocks = tuple((path, POINTWISE) for block in program.blocks.values() for path in block.instances)
    hows = (False, False, False), (False, True, True), (True, False, False), (True, True, True)
    ways = [Execution(joined=joined, rings=rings, compiled=fused, blocks=blocks) for joined, rings, fused in hows]

    def described(units: RankUnits, way: Execution) -> list[Any]:
        return [(each.kind.work, each.kind.again, each.kind.memory, each.held, each.inputs) for each in units.of(way)]

    together = RankUnits(program, {})
    found = [described(together, way) for way in ways]
    once = Counter(counts)
    assert once["_made_again"] == len(program.blocks)
    assert found == [described(RankUnits(program, {}), way) for way in ways]
    assert counts == Counter({name: count * (1 + len(ways)) for name, count in once.items()})


def test_a_plan_brings_its_solution_to_the_partition(counted: Counter[tuple[str, Any]]) -> None:
    program = example("llama")
    plan = gp.plan(program, mesh={"pp": 2, "tp": 2})
    parts = gp.partition(program, plan)
    assert [of(counted, what) for what in ("solved", "lowered", "built")] == [{(("tp", 2),): 1}] * 3

    read = gp.Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert gp.partition(program, read).files == parts.files
    assert of(counted, "solved") == {(("tp", 2),): 1} and of(counted, "lowered") == {(("tp", 2),): 2}


@pytest.mark.costly
def test_what_a_plan_brings_is_of_its_program_alone(counted: Counter[tuple[str, Any]]) -> None:
    """Another trace of the model is lowered itself."""
    plan = gp.plan(example("llama"), mesh={"tp": 2})
    file = EXAMPLES / "llama.py"
    again = gp.export(*_arguments(file))
    gp.partition(again, plan)
    assert of(counted, "lowered") == {(("tp", 2),): 2}


def _arguments(path: Path) -> tuple[Any, ...]:
    file = load_model_file(path)
    return file.model, file.args, file.kwargs, file.loss_fn, file.targets, file.batch_dims


# ---- in a search -----------------------------------------------------------------------------------------------


def test_an_operator_beside_others_is_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Product(Phase.INPUT, Size(1), Size(512), Size(256), Size(128), 2)
    compute = Compute(DEVICES["H100-SXM-80GB"])
    seconds = compute.seconds(Work({row: 1}), 4)[Phase.INPUT].busy
    assert compute.alone_s(row, 4) == seconds > 0
    monkeypatch.setattr(compute, "_computed", None)
    assert compute.alone_s(row, 4) == seconds


def test_state_that_does_not_fit_needs_no_measure_of_what_is_kept() -> None:
    cluster = replace(Cluster.parse("2xH100"), device=replace(DEVICES["H100-SXM-80GB"], memory_bytes=1))
    planner = Planner(example("gpt"), PlanConstraints(cluster=cluster))
    for candidate in planner.bounded()[0]:
        assert planner.bounds.in_all_memory(candidate) == math.inf
        assert not any(unit.kind.is_measured for unit in planner.prices.known(candidate).units)


def test_questions_for_a_device_are_not_counted_as_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    live, mode, asked = Live(), CountedFakes(), torch.ops.prim.device.default
    with mode, mode.counted_by(live):
        x = torch.ones(4)
        monkeypatch.setattr(live, "counted", None)
        assert mode.__torch_dispatch__(asked, (), (x,)) == torch.device("cpu")
    assert live.now == 16


@pytest.mark.costly
def test_compiling_does_not_load_what_runs_programs() -> None:
    asked = "import sys, graphpar.cli.compile_command; print('graphpar.runtime.pipeline' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True).stdout == "False\n"
