"""The sharding search: exact on small problems, Megatron at real sizes, deterministic, and clear where nothing is possible."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import graphpar as gp
from graphpar.ir.program import Program
from graphpar.ir.sharding import Sharding
from graphpar.passes.rank_passes import prepared
from graphpar.passes.sharding import search as passes_search
from graphpar.passes.sharding.costs import Workload
from graphpar.passes.sharding.problem import Problem, build_problem
from graphpar.passes.sharding.search import SearchConstraints, search
from graphpar.runtime.layout import I, R, Shard
from tests.tools.search_reference import eliminated, integer

WIDTH, VOCAB, LENGTH = 16, 32, 8


@pytest.fixture
def exact_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal prices are left to the solver."""
    monkeypatch.setattr(passes_search, "_TIE_BREAK", 0.0)


# ---- small models ----------------------------------------------------------------------------------------------


class TiedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.table(ids)
        h = h + self.down(F.gelu(self.up(h)))
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


class Attention(nn.Module):
    """``groups`` heads of keys and values, repeated for four heads of queries."""

    def __init__(self, groups: int = 4) -> None:
        super().__init__()
        self.groups, self.norm = groups, nn.LayerNorm(WIDTH)
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = nn.Linear(WIDTH, 4 * groups, bias=False), nn.Linear(WIDTH, 4 * groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.groups < 4:
            k, v = (t[:, :, None].expand(-1, -1, 4 // self.groups, -1, -1).flatten(1, 2) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (x + self.o(y.transpose(1, 2).flatten(2))).square().mean()


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class GatedNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.into = RMSNorm(), RMSNorm(), nn.Linear(WIDTH, WIDTH)
        self.up, self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        h = self.first(x)
        return self.last(x + self.down(F.silu(self.gate(h)) * self.up(h))).mean()


class Diamond(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(torch.sigmoid(h) * (torch.tanh(h) * self.scale) + h).square().sum()


class Rotary(nn.Module):
    """Its tables are buffers: whole on cp, where each rank takes its piece of them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("cos", torch.randn(LENGTH, 4))
        self.register_buffer("sin", torch.randn(LENGTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        q = q * self.cos + torch.cat((-q[..., 2:], q[..., :2]), -1) * self.sin
        return self.o(q.transpose(1, 2).flatten(2)).square().mean()


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.gelu(self.a(F.gelu(x)))
        return h * 2, self.b(h)


class Layer(nn.Module):
    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.residual = residual
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(x)))
        return x + y if self.residual else y


class Layers(nn.Module):
    def __init__(self, count: int, residual: bool) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(residual) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class TiedLayers(nn.Module):
    """A weight of two instances, one of the root and an instance, and one that the root uses again."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.layers = nn.Linear(WIDTH, WIDTH, bias=False), nn.ModuleList(Square() for _ in range(4))
        self.layers[1].down.weight = self.layers[2].down.weight
        self.into.weight = self.layers[3].down.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean() + self.layers[0].up.weight.square().sum()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied MLP": TiedMLP,
    "attention": Attention,
    "grouped attention": lambda: Attention(2),
    "gated MLP and norms": GatedNorms,
    "diamond": Diamond,
    "rotary": Rotary,
    "two outputs": TwoOutputs,
    "layers": lambda: Layers(3, residual=True),
    "tied layers": TiedLayers,
    "layers without residual": lambda: Layers(3, residual=False),
}


def export(model: nn.Module) -> Program:
    """The program of a small model on a batch of two."""
    if isinstance(model, TiedMLP):
        ids = torch.zeros(2, LENGTH, dtype=torch.int64)
        return gp.export(model, (ids, ids))
    return gp.export(model, (torch.zeros(2, LENGTH, WIDTH),))


def of_example(program: Program) -> Program:
    """The program that is searched, at the rows of the example and without pins."""
    return prepared(program, Sharding(), program.batch)


@functools.cache
def small(name: str) -> Program:
    return of_example(export(MODELS[name]()))


def workload_of(problem: Problem, rows: int) -> Workload:
    return Workload(rows, 2, problem.program.mode == "train")


# ---- the search finds the best of all combinations ---------------------------------------------------------------


@pytest.mark.sampled(1 / 2)
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"tp": 4}, {"cp": 2}, {"tp": 8}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_on_one_axis_no_combination_of_choices_is_cheaper(name: str, degrees: dict[str, int], exact_ties: None) -> None:
    problem = build_problem(small(name), degrees)
    for rows in (2, 4096):  # latency counts, bandwidth counts
        workload = workload_of(problem, rows)

        found = search(problem, workload)

        assert found.seconds == pytest.approx(eliminated(problem, workload), rel=1e-12)
        assert found.seconds == pytest.approx(sum(found.parts.values()), rel=1e-12)


@pytest.mark.parametrize("name", ["tied MLP", "diamond", "rotary", "two outputs", "layers"])
def test_on_two_axes_nothing_is_dropped_that_is_needed(name: str, exact_ties: None) -> None:
    problem = build_problem(small(name), {"cp": 2, "tp": 2})
    workload = workload_of(problem, 64)

    assert search(problem, workload).seconds == pytest.approx(integer(problem, workload), rel=1e-12)


@pytest.mark.parametrize(
    "pins",
    [
        {"up.weight": {"tp": R}, "down.weight": {"tp": R}},
        {"up.weight": {"tp": Shard(1)}},
        {"table.weight": {"tp": Shard(1)}},
        {"up.bias": {"tp": I}, "down.bias": {"tp": Shard(0)}},
    ],
    ids=str,
)
def test_pins_leave_the_rest_exact(pins: Mapping[str, Mapping[str, Any]], exact_ties: None) -> None:
    problem = build_problem(small("tied MLP"), {"tp": 2})
    workload = workload_of(problem, 64)
    given_pins = SearchConstraints(
        {name: {axis: frozenset({kind}) for axis, kind in spec.items()} for name, spec in pins.items()}
    )

    found = search(problem, workload, pins=given_pins)

    assert found.seconds == pytest.approx(eliminated(problem, workload, given_pins), rel=1e-12)
    for operator in problem.operators:
        if operator.kind == "parameter" and str(operator.node.target) in pins:
            assert found.types(operator) == (pins[str(operator.node.target)]["tp"],)


class Drawn(nn.Module):
    """A small network drawn by numbers: each step takes earlier values of the same shape."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        numbers = random.Random(seed)
        self.steps: list[tuple[str, int, int]] = []
        self.layers = nn.ModuleList()
        for place in range(numbers.randint(3, 6)):
            kind = numbers.choice(["linear", "linear", "mlp", "norm", "gelu", "add", "mul", "rotate", "heads"])
            self.steps.append((kind, numbers.randint(0, place), numbers.randint(0, place)))
            made: nn.Module = nn.Identity()
            if kind == "linear":
                made = nn.Linear(WIDTH, WIDTH, bias=numbers.random() < 0.5)
            elif kind == "mlp":
                made = Layer(residual=numbers.random() < 0.5)
            elif kind == "norm":
                made = nn.LayerNorm(WIDTH) if numbers.random() < 0.5 else RMSNorm()
            self.layers.append(made)

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for (kind, first, second), layer in zip(self.steps, self.layers):
            a, b = values[first], values[second]
            if kind == "gelu":
                a = F.gelu(a)
            elif kind in ("add", "mul"):
                a = a + b if kind == "add" else a * b
            elif kind == "rotate":
                a = torch.cat((a[..., WIDTH // 2 :], -a[..., : WIDTH // 2]), -1)
            elif kind == "heads":
                a = a.unflatten(-1, (4, 4)).softmax(-1).flatten(2)
            values.append(layer(a))
        return values[-1].square().mean() + values[-2].mean()


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.sampled_from([{"tp": 2}, {"tp": 4}, {"cp": 2}]), st.sampled_from([2, 4096]))
@pytest.mark.costly
def test_drawn_models_are_solved_exactly(seed: int, degrees: dict[str, int], rows: int) -> None:
    model = Drawn(seed)
    assume(model(torch.zeros(1, 2, WIDTH)).requires_grad)  # else there is nothing to train
    check_solved(model, degrees, rows)


def test_a_block_of_the_input_and_of_its_own_result_is_solved_exactly() -> None:
    """The block takes the input, which all ranks have whole, and its own result, which may not be moved to its next instance."""
    check_solved(Drawn(1060), {"tp": 2}, 2)


def check_solved(model: nn.Module, degrees: dict[str, int], rows: int) -> None:
    problem = build_problem(of_example(export(model)), degrees)
    workload = workload_of(problem, rows)
    tie_break, passes_search._TIE_BREAK = passes_search._TIE_BREAK, 0.0
    try:
        found, best = search(problem, workload).seconds, eliminated(problem, workload)
    finally:
        passes_search._TIE_BREAK = tie_break
    assert found == pytest.approx(best, rel=1e-12)
