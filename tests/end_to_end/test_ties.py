"""Parameters that are used in more than one place, or not trained: the emitted program against the eager model.

Fast: one program for each fault that was found, on two ranks. Slow: 300 random programs (``tests/tools/drawn_ties.py``), 25 on each mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import graphpar as gp
from graphpar.ir.sharding import Sharding
from graphpar.passes.normalize.applications import first_applications
from graphpar.passes.rank_passes import prepared
from graphpar.passes.sharding.check_types import check_types
from graphpar.passes.sharding.lowering import lower
from graphpar.passes.sharding.problem import build_problem
from graphpar.runtime.layout import I, R
from graphpar.verification import Verification, verify_all
from tests.tools.drawn_ties import MESHES, Drawn, Layer, Model, draw, tie
from tests.tools.samples import sample

pytestmark = pytest.mark.usefixtures("unpriced")
DRAWN = 300


def frozen_but(model: Model, layer: str) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(layer))


def used_again(model: Model) -> None:
    model.again += [("plain", "layers.1.o.weight"), ("add", "layers.2.q.bias"), ("transposed", "layers.0.k.weight")]


def penalised(model: Model) -> None:
    model.penalised += [name for name, _ in model.named_parameters()]


FOUND: dict[str, tuple[dict[str, int], Callable[[Model], object]]] = {
    "a tie in the first instance": ({"pp": 2}, lambda model: tie(model, "layers.0.q.weight", "layers.0.k.weight")),
    "a tie in every other instance": (
        {"dp_replicate": 2},
        lambda model: [tie(model, f"layers.{i}.q.weight", f"layers.{i}.k.weight") for i in (0, 2)],
    ),
    "a tie between instances": ({"tp": 2}, lambda model: tie(model, "layers.1.n.bias", "layers.2.q.bias")),
    "a tie of a block and the root": ({"tp": 2}, lambda model: tie(model, "layers.2.o.weight", "head.weight")),
    "a block's weights used by the root": ({"tp": 2}, used_again),
    "a penalty on all parameters": ({"tp": 2}, penalised),
    "a penalty on all parameters, on cp": ({"cp": 2}, penalised),
    "all frozen but one layer": ({"tp": 2}, lambda model: frozen_but(model, "layers.1.")),
}


def plain(count: int = 3) -> Model:
    torch.manual_seed(0)
    model = Model(count, bias=True, transposed=False).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


@functools.cache
def found(name: str) -> gp.Parts:
    mesh, change = FOUND[name]
    model = plain()
    change(model)
    return Drawn(0, mesh, model).compile()


def wrong(outcome: Verification) -> str:
    return "" if outcome.ok else f"{outcome.problems} {outcome.max_error} {outcome.worst}"


@pytest.mark.costly
@pytest.mark.sampled(1 / 2)
@pytest.mark.parametrize("name", FOUND)
def test_fault_is_gone(name: str) -> None:
    (outcome,) = verify_all([found(name)], 2, timeout_s=600)
    assert not wrong(outcome)


@pytest.mark.parametrize(
    "name", ["a tie of a block and the root", "all frozen but one layer", "a penalty on all parameters, on cp"]
)
@pytest.mark.sampled(1 / 3)
def test_types_are_right(name: str) -> None:
    assert gp.check(found(name)).problems == []


@pytest.mark.slow
@pytest.mark.parametrize("place", sample(range(len(MESHES)), 3), ids=lambda place: str(MESHES[place]))
def test_drawn_programs_are_exact(place: int) -> None:
    programs = [draw(seed) for seed in range(place, DRAWN, len(MESHES))]
    parts = [program.compile() for program in programs]

    outcomes = verify_all(parts, 2, timeout_s=1800)

    faults = [f"{program}: {wrong(outcome)}" for program, outcome in zip(programs, outcomes) if not outcome.ok]
    faults += [
        f"{program}: {gp.check(made).problems}" for program, made in zip(programs, parts) if not gp.check(made).ok
    ]
    assert not faults, "\n".join(faults)


# ---- how it is done ------------------------------------------------------------------------------------------------


def exported(model: nn.Module) -> gp.Program:
    ids = torch.zeros(4, 4, dtype=torch.int64)
    return gp.export(model, (ids, ids))


@pytest.mark.costly
def test_instances_of_one_class_have_the_same_ties_inside() -> None:
    model = plain(4)
    for i in (1, 3):
        tie(model, f"layers.{i}.q.weight", f"layers.{i}.k.weight")

    blocks = exported(model).blocks

    assert sorted(block.instances for block in blocks.values()) == [["layers.0", "layers.2"], ["layers.1", "layers.3"]]


@pytest.mark.costly
def test_an_instance_that_shares_a_parameter_does_not_decide_for_the_others() -> None:
    model = plain(4)
    tie(model, "layers.1.q.weight", "layers.2.o.weight")  # cut over its rows in one, over its columns in the other

    plan = gp.plan(exported(model), mesh={"tp": 2})

    specs = {
        name: str(plan.sharding.parameters[f"layers.{name}.weight"]["tp"])
        for name in ("0.q", "0.o", "1.q", "2.o", "3.q", "3.o")
    }
    assert set(plan.sharding.variants) == {"layers.1", "layers.2"}
    assert (
        specs["0.q"] == specs["3.q"] == "S(0)"
        and specs["0.o"] == specs["3.o"] == "S(1)"
        and specs["1.q"] == specs["2.o"]
    )


@pytest.mark.costly
def test_what_all_instances_share_alike_needs_no_variants() -> None:
    model = plain(4)
    penalised(model)
    for i in (1, 2, 3):
        tie(model, "layers.0.v.weight", f"layers.{i}.v.weight")

    plan = gp.plan(exported(model), mesh={"tp": 2})

    assert not plan.sharding.variants


@pytest.mark.costly
@pytest.mark.parametrize("name", ["layers.2.n.bias", "head.bias"])
def test_a_type_that_differs_in_one_instance_or_under_one_name_is_seen(name: str) -> None:
    model = plain()
    tie(model, "layers.0.down.bias", "head.bias")
    program = exported(model)
    plan = gp.plan(program, mesh={"tp": 2})
    ready = prepared(program, plan.sharding, program.batch)
    local = lower(ready, plan.sharding)
    problem = build_problem(ready, {"tp": 2})
    assert check_types(problem, local) == []

    other = R if plan.sharding.parameters[name]["tp"] != R else I
    changed = Sharding(
        plan.sharding.degrees, plan.sharding.decisions, {**plan.sharding.parameters, name: {"tp": other}}
    )
    problems = check_types(problem, lower(ready, changed))

    assert any(name in problem for problem in problems)


# ---- one network, several inputs -----------------------------------------------------------------------------------


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(16, 16), nn.ModuleList(Layer(True, False) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x.mean(1)


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = Network()

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return (self.network(first) - self.network(second)).square().mean()


@pytest.mark.costly
def test_a_network_on_two_inputs_is_divided_into_its_layers() -> None:
    program = exported(Siamese())

    plan = gp.plan(program, mesh={"pp": 4})

    assert [stage.modules[-1] for stage in plan.stages] == [f"network.layers.{i}" for i in range(4)]
    names = [name for stage in plan.stages for name in stage.modules]
    assert len(set(names)) == len(names)  # both applications run where the weights are


@pytest.mark.costly
def test_the_end_of_a_module_applied_twice_is_the_beginning_of_the_next() -> None:
    program = exported(Siamese())

    ends = gp.plan(program, mesh={"pp": 2}, split=[{"network.layers.1": "end"}])

    assert ends.stages == gp.plan(program, mesh={"pp": 2}, split=["network.layers.2"]).stages
    lists = [["network.embed", "network.layers.0", "network.layers.1"], ["network.layers.2", "network.layers.3"]]
    assert ends.stages == gp.plan(program, mesh={"pp": 2}, stages=lists).stages


def test_a_recurrence_stays_one_block() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layer = nn.Embedding(16, 16), Layer(True, False)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return self.layer(self.layer(self.embed(ids))).square().mean()

    program = exported(Recurrent())
    calls = [node for node in program.graph.nodes if node.op == "call_module"]

    assert [call.target for call in calls] == ["layer", "layer"]
    assert not first_applications(program)


@pytest.mark.costly
def test_a_network_on_its_own_result_is_divided_too() -> None:
    class Recycled(Siamese):
        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            made = self.network(first)
            return (self.network(second + (made.argmax(-1, keepdim=True) > 3)) - made).square().mean()

    plan = gp.plan(exported(Recycled()), mesh={"pp": 2})

    assert "network.layers.0" in plan.stages[1].modules and "network.layers.0" in plan.stages[0].modules
