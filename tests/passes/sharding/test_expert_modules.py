"""Experts that are modules of their own: which loops are found, what ep makes of them, and why rows can't be sent to them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpar as gp
from graphpar.errors import GraphparError
from graphpar.ir.program import Program
from graphpar.passes.sharding.expert_modules import expert_modules
from graphpar.verification import verify_all

WIDTH, EXPERTS, TOP = 16, 4, 2


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(*size) for size in ((WIDTH, 32), (WIDTH, 32), (32, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Mlp() for _ in range(EXPERTS))

    def routed(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.router(rows).softmax(-1).topk(TOP)
        return weights / weights.sum(-1, keepdim=True), chosen


class Positions(Mixture):
    """As Hugging Face's first Mixtral."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.routed(rows)
        mask, y = F.one_hot(chosen, EXPERTS).permute(2, 1, 0), torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            slot, token = torch.where(mask[e])
            y.index_add_(0, token, expert(rows[None, token].reshape(-1, WIDTH)) * weights[token, slot, None])
        return y.view_as(x)


class TokenFirst(Mixture):
    """As Hugging Face's first DeepSeek, without asking whether an expert has tokens."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.routed(rows)
        mask, y = F.one_hot(chosen, EXPERTS).permute(2, 0, 1), torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(mask[e])
            y.index_add_(0, token, expert(rows[token]) * weights[token, slot].unsqueeze(-1))
        return y.view_as(x)


class Asks(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.routed(rows)
        mask, y = F.one_hot(chosen, EXPERTS).permute(2, 0, 1), torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(mask[e])
            if token.numel() > 0:
                y.index_add_(0, token, expert(rows[token]) * weights[token, slot].unsqueeze(-1))
        return y.view_as(x)


class Unweighed(Mixture):
    """What is added is no multiple of a weight; the indices of topk are distinct, so each token comes once."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        _, chosen = self.routed(rows)
        mask, y = F.one_hot(chosen, EXPERTS).permute(2, 1, 0), torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            _, token = torch.where(mask[e])
            y.index_add_(0, token, expert(rows[token]))
        return y.view_as(x)


class Written(Mixture):
    """Each copy of a token is written by its expert."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.routed(x.flatten(0, 1))
        rows, chosen = x.flatten(0, 1).repeat_interleave(TOP, 0), chosen.flatten()
        y = torch.empty_like(rows)
        for e, expert in enumerate(self.experts):
            y[chosen == e] = expert(rows[chosen == e])
        return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1).view_as(x)


class Weighed(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        weights, y = self.router(x).softmax(-1), torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            y = y + weights[..., e : e + 1] * expert(x)
        return y


class Stacked(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.stack([expert(x) for expert in self.experts], -2)
        return (y * self.router(x).softmax(-1).unsqueeze(-1)).sum(-2)


class Branches(Mixture):
    """Modules side by side that nothing chooses."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert in self.experts:
            y = y + expert(x)
        return y * self.router(x).softmax(-1)[..., :1]


class Chain(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        for e, expert in enumerate(self.experts):
            x = weights[..., e : e + 1] * expert(x)
        return x


class Model(nn.Module):
    def __init__(self, mixture: type[Mixture], layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mixture() for _ in range(layers))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.mse_loss(x, target)


def exported(mixture: type[Mixture], layers: int = 2) -> Program:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(8, 6, WIDTH), "target": torch.randn(8, 6, WIDTH)}
    return gp.export(Model(mixture, layers), (), inputs)


def found(program: Program) -> dict[str, int]:
    graphs = (program.graph, *(block.graph for block in program.blocks.values()))
    return {path: count for graph in graphs for path, count in expert_modules(graph).items()}


@pytest.mark.costly
@pytest.mark.parametrize("mixture", [Positions, TokenFirst, Written, Weighed, Stacked])
@pytest.mark.sampled(1 / 3)
def test_loops_over_experts_are_found_by_their_structure(mixture: type[Mixture]) -> None:
    assert found(exported(mixture)) == {"experts": EXPERTS}


@pytest.mark.costly
@pytest.mark.parametrize(("mixture", "warned"), [(Positions, True), (Written, True), (Weighed, False)])
@pytest.mark.sampled(1 / 3)
def test_products_of_all_rows_are_warned_of(mixture: type[Mixture], warned: bool) -> None:
    lines = [line for line in exported(mixture).warnings if "of rows that a mask selects" in line]
    assert len(lines) == warned
    assert not warned or "are computed for all rows" in lines[0]


def test_experts_of_one_layer_which_are_blocks_themselves_are_found_and_divided() -> None:
    program = exported(Weighed, layers=1)
    assert found(program) == {"layers.0.experts": EXPERTS} and len(program.blocks) == 1

    specs = {name: str(spec["ep"]) for name, spec in gp.plan(program, mesh={"ep": 2}).parameters().items()}
    weights = {name for name in specs if ".experts." in name and name.endswith("weight")}
    assert len(weights) == 3 * EXPERTS and all(specs[name].startswith("S(") for name in weights)


@pytest.mark.costly
@pytest.mark.parametrize("mixture", [Branches, Chain])
@pytest.mark.sampled(1 / 3)
def test_modules_that_no_router_weighs_side_by_side_are_no_experts(mixture: type[Mixture]) -> None:
    assert found(exported(mixture)) == {}


@pytest.mark.costly
def test_ep_divides_each_expert_by_its_features_and_nothing_else() -> None:
    program = exported(Positions)
    plan = gp.plan(program, mesh={"ep": 2})
    parts = gp.partition(program, plan)

    specs = {name: str(spec["ep"]) for name, spec in plan.parameters().items()}
    weights = {name for name in specs if ".experts." in name and name.endswith("weight")}
    assert {name for name, kind in specs.items() if kind.startswith("S(")} >= weights
    assert specs["layers.0.router.weight"] == "R"
    assert gp.check(parts).problems == []
    assert gp.verify(parts).ok


@pytest.mark.slow
@pytest.mark.parametrize("mixture", [Positions, TokenFirst, Unweighed, Written, Weighed, Stacked])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.sampled(1 / 3)
def test_programs_are_the_model(mixture: type[Mixture], layers: int) -> None:
    program = exported(mixture, layers)
    meshes = ({"ep": 2}, {"ep": 4}, {"ep": 2, "tp": 2}, {"dp_replicate": 2, "ep": 2}, {"dp_shard": 2, "tp": 2})
    made = [gp.partition(program, gp.plan(program, mesh=mesh)) for mesh in meshes]

    for parts, outcome in zip(made, verify_all(made, 3, timeout_s=300)):
        assert outcome.ok, (parts.plan.mesh, outcome.problems, outcome.max_error, outcome.worst)


@pytest.mark.costly
def test_why_rows_are_not_sent_to_them_is_said() -> None:
    with pytest.raises(
        GraphparError, match=r"dp_expert=2: the experts layers.0.experts of Model are modules of their own"
    ):
        gp.plan(exported(Weighed), mesh={"dp_expert": 2})


@pytest.mark.costly
@pytest.mark.parametrize(("mixture", "message"), [(Asks, "an expert without tokens adds nothing")])
def test_loops_that_can_not_be_traced_are_explained(mixture: type[Mixture], message: str) -> None:
    with pytest.raises(GraphparError, match=message):
        exported(mixture)
