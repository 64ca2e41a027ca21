"""Repeated modules become one definition, and stages one after the other compute what the whole program does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import graphpar as gp
from graphpar.errors import GraphparError
from graphpar.ir.program import Program
from graphpar.ir.split_points import SplitAt, SplitPoint
from graphpar.ir.stage import Stage
from graphpar.passes.split import _boundary_names, positions_of, split
from tests.tools.equality import Case, assert_exact, assert_same, eager, run

X = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(6))
IDS = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(7))


def square(output: Tensor) -> Tensor:
    return output.pow(2).mean()


class Layer(nn.Module):
    def __init__(self, width: int = 8, bias: bool = True) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 12, bias), nn.Linear(12, width, bias)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        h = self.down(F.gelu(self.up(self.norm(x))))
        return x + (h if scale is None else h * scale)


class Chain(nn.Module):
    """``wiring(layers, x)`` between an embedding-like and a head-like layer."""

    def __init__(self, layers: Sequence[nn.Module], wiring: Callable[[Any, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)  # registered first, used last
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(layers)
        self.wiring = wiring

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.wiring is not None:
            return self.head(self.wiring(self.layers, x))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def case_of(model: nn.Module, x: Tensor = X) -> Case:
    return Case(model, (x,), {}, square)


def instances(program: Program) -> dict[str, list[str]]:
    return {name: block.instances for name, block in program.blocks.items()}


# ---- outline ---------------------------------------------------------------------------------------------------


def test_isomorphic_layers_share_a_definition_whatever_they_are_called() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.entry, self.middle, self.zz = Layer(), nn.Sequential(Layer()), nn.ModuleDict({"k": Layer()})

        def forward(self, x: Tensor) -> Tensor:
            return self.zz["k"](self.middle(self.entry(x)))

    case = case_of(Named())
    program = case.export()

    assert instances(program) == {"Layer": ["entry", "middle.0", "zz.k"]}
    assert_same(run(program, case), eager(case))


def test_layers_of_other_sizes_are_other_blocks() -> None:
    program = case_of(Chain([Layer(), Layer(), Layer(bias=False), Layer(bias=False)])).export()

    assert sorted(map(len, instances(program).values())) == [2, 2]
    assert len({id(block.graph) for block in program.blocks.values()}) == 2


@pytest.mark.costly
def test_two_kinds_that_alternate() -> None:
    class Windowed(Layer):
        def __init__(self, window: int) -> None:
            super().__init__()
            self.window = window

        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            mask = torch.ones(x.size(1), x.size(1)).tril().triu(-self.window).bool()
            return super().forward(F.scaled_dot_product_attention(x, x, x, attn_mask=mask))

    program = case_of(Chain([Windowed(1 + 3 * (index % 2)) for index in range(4)])).export()

    assert sorted(instances(program).values()) == [["layers.0", "layers.2"], ["layers.1", "layers.3"]]


def test_one_layer_applied_many_times_is_called_many_times() -> None:
    program = case_of(Chain([Layer()], lambda layers, x: layers[0](layers[0](layers[0](x))))).export()

    calls = [node for node in program.graph.nodes if node.op == "call_module"]
    assert len(calls) == 3 and {str(node.target) for node in calls} == {"layers.0"}
    assert list(program.parameters).count("layers.0.up.weight") == 1


@pytest.mark.costly
def test_layers_with_an_input_from_outside_and_experts_within() -> None:
    class Experts(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([Layer() for _ in range(2)])

        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            gate = x.softmax(-1)
            return super().forward(sum(gate[..., i : i + 1] * e(x) for i, e in enumerate(self.experts)), scale)

    def wiring(layers: Any, x: Tensor) -> Tensor:
        scale = x.mean(-1, keepdim=True).sigmoid()
        for layer in layers:
            x = layer(x, scale)
        return x

    case = case_of(Chain([Experts() for _ in range(3)], wiring))
    program = case.export()

    assert instances(program) == {"Experts": ["layers.0", "layers.1", "layers.2"]}
    assert len([n for n in next(iter(program.blocks.values())).graph.nodes if n.op == "placeholder"]) == 2


@pytest.mark.costly
def test_residual_blocks_inside_of_stages_that_differ() -> None:
    def stage(width: int, count: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, width), *[Layer(width) for _ in range(count)], nn.Linear(width, 8))

    program = case_of(Chain([stage(8, 2), stage(6, 2)])).export()

    assert sorted(instances(program).values()) == [["layers.0.1", "layers.0.2"], ["layers.1.1", "layers.1.2"]]


def test_constants_inside_layers_do_not_tell_them_apart() -> None:
    class Scaled(Layer):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return super().forward(torch.cat([torch.tensor([]), x], 1) * torch.tensor([1.5]))

    assert instances(case_of(Chain([Scaled() for _ in range(3)])).export()) == {
        "Scaled": ["layers.0", "layers.1", "layers.2"]
    }


def test_streams_of_dropout_stay_their_own() -> None:
    class Dropping(Layer):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return F.dropout(super().forward(F.dropout(x, 0.2)), 0.3)

    case, steps = case_of(Chain([Dropping() for _ in range(3)])), {}
    program = case.export(after_pass=lambda row, step: steps.setdefault(row.name, step))

    assert len(program.blocks) == 1 and program.random_calls == 6
    assert_same(run(program, case), run(steps["share_loss"], case))


# ---- split -----------------------------------------------------------------------------------------------------


def stages_of(program: Program, *cuts: str | tuple[str, str]) -> list[Stage]:
    points = [SplitAt(cut) if isinstance(cut, str) else SplitAt(cut[0], SplitPoint(cut[1])) for cut in cuts]
    return split(program, positions_of(program, points))


def assert_stages_exact(case: Case, *cuts: str | tuple[str, str]) -> list[Stage]:
    program = case.export()
    stages = stages_of(program, *cuts)
    whole = run(program, case)
    assert_same(run(program, case, stages=stages), whole, what="in stages")
    if not program.couplings:
        assert_same(run(program, case, [1, 3], stages=stages), whole, what="in stages and microbatches")
    return stages


@pytest.mark.costly
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.sets(st.integers(1, 5), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=3),
)
def test_any_cut_of_any_chain_with_skips(cuts: set[int], skips: list[tuple[int, int]]) -> None:
    def wiring(layers: Any, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for index, layer in enumerate(layers):
            for source, target in skips:
                if target == index and source < index:
                    x = x + kept[source] * 0.5
            x = layer(x)
            kept.append(x)
        return x

    torch.manual_seed(0)
    case = case_of(Chain([nn.Linear(8, 8) for _ in range(6)], wiring))

    stages = assert_stages_exact(case, *(f"layers.{index}" for index in sorted(cuts)))

    for before, after in itertools.pairwise(stages):
        assert [boundary.name for boundary in before.sends] == [boundary.name for boundary in after.receives]


@pytest.mark.costly
def test_one_tensor_crosses_where_one_is_needed() -> None:
    def wiring(layers: Any, x: Tensor) -> Tensor:
        mask = torch.ones(x.size(1), x.size(1)).tril().bool()  # made where it is needed, not sent
        for layer in layers:
            x = layer(F.scaled_dot_product_attention(x, x, x, attn_mask=mask))
        return x

    stages = assert_stages_exact(case_of(Chain([Layer() for _ in range(4)], wiring)), "layers.1", "layers.3")

    assert [[len(stage.receives), len(stage.sends)] for stage in stages] == [[0, 1], [1, 1], [1, 0]]
    assert all(boundary.requires_grad for stage in stages for boundary in stage.sends)


def test_integers_and_booleans_cross_without_gradients() -> None:
    def wiring(layers: Any, x: Tensor) -> Tensor:
        chosen, positive = x.argmax(-1), x > 0
        for layer in layers:
            x = layer(x)
        return x * positive + F.one_hot(chosen, 8)

    stages = assert_stages_exact(case_of(Chain([Layer() for _ in range(3)], wiring)), "layers.1", "layers.2")

    assert [sum(boundary.requires_grad for boundary in stage.sends) for stage in stages] == [1, 1, 0]
    assert [len(stage.sends) for stage in stages] == [3, 3, 0]


def test_what_later_stages_detach_comes_back_without_a_gradient() -> None:
    """One of zeros would let optimizers step parameters that have none in the model."""

    def wiring(layers: Any, x: Tensor) -> Tensor:
        once, twice = layers[0](x), layers[1](x)
        x = layers[2](once)
        return layers[3](x + once) + twice.detach()

    stages = assert_stages_exact(case_of(Chain([nn.Linear(8, 8) for _ in range(4)], wiring)), "layers.2", "layers.3")

    found = [{boundary.name: boundary.requires_grad for boundary in stage.sends} for stage in stages]
    assert [sorted(each.values()) for each in found] == [[False, True], [False, True], []]


@pytest.mark.costly
def test_a_parameter_used_on_two_stages_and_a_head_registered_first() -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.head = nn.Linear(8, 11, bias=False)
            self.embed, self.gain = nn.Embedding(11, 8), nn.Parameter(torch.ones(8))
            self.layers = nn.ModuleList([Layer() for _ in range(4)])
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x) * self.gain
            return self.head(x)

    stages = assert_stages_exact(Case(Language(), (IDS,), {}, lambda o, y: F.cross_entropy(o.flatten(0, 1), y.flatten()), (IDS,)),
                                 "layers.2")  # fmt: skip

    assert stages[0].modules[0] == "embed" and stages[1].modules[-1] == "head"
    assert [stage.inputs for stage in stages] == [("ids",), ("y",)]
    assert stages[1].counts and not stages[0].counts


@pytest.mark.costly
@pytest.mark.parametrize(
    ("cuts", "why"),
    [
        (["layer.1"], "names no module.*layers.1"),
        (["layers.1.up"], "inside the block 'layers.1'"),
        (["layers.1", ("layers.0", "end")], "are the same place"),
        (["first"], "Stage 0 would be empty"),
        ([("head", "end")], "Stage 1 would be empty"),
    ],
)
def test_split_points_that_can_not_be(cuts: list[Any], why: str) -> None:
    program = case_of(Chain([Layer() for _ in range(3)])).export()

    with pytest.raises(gp.GraphparError, match=why):
        stages_of(program, *cuts)


def test_values_that_meet_at_any_boundary_have_different_names() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.ops.aten.relu.default, (x,))
    second = graph.call_function(torch.ops.aten.relu.default, (first,))
    graph.output(second)
    names = _boundary_names(SimpleNamespace(graph=graph), [[first], [first, second], [second]])  # type: ignore[arg-type]
    assert names[first] != names[second] and "x" not in names.values()


class _Flagged(nn.Module):
    """A layer that computes something else by a flag, and by the length of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.down(torch.tanh(self.up(x))).reshape(x.shape[0], x.shape[1], 6)


class _CalledAgain(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(_Flagged() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x[:, :3] if self.how == "length" else x
        for layer in self.layers:
            x = layer(x)
        if self.how == "between":
            x = torch.relu(x)
        z = y if self.how == "length" else x
        for layer in self.layers:
            z = layer(z, 2.0 if self.how != "length" else 1.0)
        return x.square().mean() + z.square().mean()


@pytest.mark.costly
@pytest.mark.parametrize("how", ["flag", "between", "length"])
def test_a_module_that_computes_something_else_when_it_is_called_again_is_no_block(how: str) -> None:
    program = assert_exact(Case(_CalledAgain(how), (torch.randn(4, 5, 6),)), [4], [2, 2])

    classes: dict[str, set[str]] = {}
    for block in program.blocks.values():
        for path in block.instances:
            classes.setdefault(path, set()).add(block.name)
    assert all(len(names) == 1 for names in classes.values()), classes
    parts = gp.partition(program, gp.plan(program, mesh={"pp": 2}, schedule="GPipe"))
    assert sum(text.count("2.0") for name, text in parts.files.items() if name.endswith(".py")) >= (how != "length")


class _Shifted(nn.Module):
    """Layers take a buffer, which is written before or afterwards."""

    def __init__(self, written_first: bool) -> None:
        super().__init__()
        self.written_first = written_first
        self.layers = nn.ModuleList(_Shift() for _ in range(2))
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.written_first:
            self.shift.mul_(0.5)
        for layer in self.layers:
            x = layer(x, self.shift)
        if not self.written_first:
            self.shift.mul_(0.5)
        return x


class _Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return torch.tanh(self.linear(x + shift))


@pytest.mark.parametrize("written_first", [False, True])
def test_blocks_that_run_again_take_copies_of_buffers_that_are_written(written_first: bool) -> None:
    """What is read is one copy, before a write and after it: the buffer has the value of the next microbatch when blocks run again."""
    model = _Shifted(written_first)
    program = gp.export(model, (torch.randn(4, 8),), loss_fn=lambda y: y.square().mean())
    for recompute in ("none", "full"):
        parts = gp.partition(program, gp.plan(program, 1, microbatch_size=4, recompute=recompute))
        assert parts.files["stage_0.py"].count(".clone()") == 1


class _Normed(nn.Module):
    """A layer with one BatchNorm under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.second = self.norm

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.relu(self.norm(self.linear(x))))
        return y


def test_a_buffer_with_several_names_is_stored_under_the_one_that_is_written() -> None:
    program = gp.export(nn.Sequential(_Normed(), _Normed()), (torch.randn(4, 8),), loss_fn=square)
    kept = [name for name in program.buffers if name.endswith("running_mean")]
    assert len(kept) == 2
    assert {frozenset(group) for group in program.ties if group[0] in kept} == {
        frozenset((f"{layer}.norm.running_mean", f"{layer}.second.running_mean")) for layer in range(2)
    }
    text = gp.partition(program, gp.plan(program, 1, microbatch_size=4)).files["stage_0.py"]
    assert "running_mean =" not in text


def test_a_block_that_writes_the_buffers_of_another_is_not_recomputed() -> None:
    layers = [_Normed(), _Normed()]
    program = gp.export(nn.Sequential(*layers, layers[0]), (torch.randn(4, 8),), loss_fn=square)
    with pytest.raises(
        GraphparError, match="can't run again in the backward: it writes a buffer that another module has"
    ):
        gp.plan(program, 1, microbatch_size=4, recompute="full")
    gp.plan(program, 1, microbatch_size=4)
