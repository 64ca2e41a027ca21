"""Shard plans: what each form of a value pins, what is refused, and that merging and loading change nothing."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

import graphpar as gp
from graphpar.annotations.files import load_shard_plan, merge_plans
from graphpar.annotations.patterns import ModelNames, ShardConstraints, names_of, resolve
from graphpar.annotations.values import WHOLE, Spec, allows, read_value, spec_text
from graphpar.errors import GraphparError
from graphpar.frontend.capture import capture
from graphpar.ir.program import ModelSource
from graphpar.runtime import layout
from graphpar.text import matching


class Conv1D(nn.Module):
    """As in transformers: a linear layer whose weight is [in, out]."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(nn.init.zeros_(nn.Linear(n, k).weight.data)),
            nn.Parameter(nn.Linear(k, n).bias.data),
        )


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        stack = nn.Linear(6 * 8, 4).weight.data
        self.w1, self.b1 = nn.Parameter(stack.view(4, 6, 8)), nn.Parameter(stack[:, :6].clone())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(8, 8), nn.Linear(8, 8)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.attention_norm = Attention(), nn.RMSNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.experts = Experts()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.RMSNorm(8)
        self.output = nn.Linear(8, 16, bias=False)
        self.c_attn = Conv1D(8, 24)
        self.patch = nn.Conv2d(3, 8, 4)


def names(model: nn.Module, *, ties: tuple[tuple[str, ...], ...] = (), aliases: Any = ()) -> ModelNames:
    modules = {
        path: f"{type(m).__module__}.{type(m).__qualname__}" for path, m in model.named_modules(remove_duplicate=False)
    }
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    return ModelNames(modules, shapes, ties, aliases)


NAMES = names(Model())
MESH = {"tp": 2, "ep": 2, "cp": 2}


def pins(plan: Any, mesh: dict[str, int] | None = None, model: ModelNames = NAMES) -> ShardConstraints:
    return resolve(plan, model, {"tp": 2} if mesh is None else mesh)


def shown(specs: Any) -> dict[str, Any]:
    """Specs as text, so that a table of expectations is short."""
    return {
        name: spec_text(spec) if not isinstance(spec, tuple) else tuple(spec_text(entry) for entry in spec)
        for name, spec in specs.items()
    }


PARAMETER_TABLE: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"layers.0.attention.wq": "colwise"},
     {"layers.0.attention.wq.weight": "S(0)@tp", "layers.0.attention.wq.bias": "S(0)@tp"}),
    ({"layers.*.attention.wo": "rowwise"},
     {f"layers.{i}.attention.wo.{name}": spec for i in (0, 1) for name, spec in (("weight", "S(1)@tp"), ("bias", "R|I@tp"))}),
    ({"tok_embeddings": "colwise"}, {"tok_embeddings.weight": "S(1)@tp"}),
    ({"tok_embeddings": "rowwise"}, {"tok_embeddings.weight": "S(0)@tp"}),
    ({"c_attn": "colwise"}, {"c_attn.weight": "S(1)@tp", "c_attn.bias": "S(0)@tp"}),
    ({"c_attn": "rowwise"}, {"c_attn.weight": "S(0)@tp", "c_attn.bias": "R|I@tp"}),
    ({"patch": "colwise"}, {"patch.weight": "S(0)@tp", "patch.bias": "S(0)@tp"}),
    ({"patch": "rowwise"}, {"patch.weight": "S(1)@tp", "patch.bias": "R|I@tp"}),
    ({"norm": "sequence"}, {"norm.weight": "R@tp"}),
    ({"layers.1.mlp": "replicate"}, {f"layers.1.mlp.{i}.{name}": "R|I@ep, R|I@tp" for i in (0, 2) for name in ("weight", "bias")}),
    ({"layers.0.experts": "expert"}, {"layers.0.experts.w1": "S(0)@ep", "layers.0.experts.b1": "S(0)@ep"}),
    ({"c_attn.weight": "colwise"}, {"c_attn.weight": "S(1)@tp"}),
    ({"output.weight": "S(0)@tp, R@cp"}, {"output.weight": "R@cp, S(0)@tp"}),
    ({"output": "I@tp"}, {"output.weight": "I@tp"}),
    ({"output.weight": "S(-1)@tp"}, {"output.weight": "S(1)@tp"}),
    ({"c_attn.weight": "S(1:8+8+8)@tp"}, {"c_attn.weight": "S(1:8+8+8)@tp"}),
    ({"c_attn": ["colwise", {"outputs": [None]}], "c_attn.weight": "S(1:8)@tp"},
     {"c_attn.weight": "S(1:8)@tp", "c_attn.bias": "S(0)@tp"}),
    ({"output": "replicate", "output.weight": "R@tp"}, {"output.weight": "R|I@ep, R@tp"}),
    ({"output": "colwise", "**.output": "S(0)@tp", "output.weight": "S(1)@ep"}, {"output.weight": "S(1)@ep, S(0)@tp"}),
    ({"": "replicate"}, dict.fromkeys(NAMES.parameters, "R|I@ep, R|I@tp")),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "expected"), PARAMETER_TABLE, ids=lambda value: str(value)[:60])
def test_parameters_that_a_plan_pins(plan: dict[str, Any], expected: dict[str, str]) -> None:
    assert shown(pins(plan, MESH).parameters) == expected


def test_a_torchtitan_plan_means_what_it_means_there() -> None:
    plan = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ),
        "layers.*.attention.wq": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    }
    found = pins(plan)
    layer = {
        "attention.wq.weight": "S(0)@tp",
        "attention.wq.bias": "S(0)@tp",
        "attention.wo.weight": "S(1)@tp",
        "attention.wo.bias": "R|I@tp",
        "attention_norm.weight": "R@tp",
    }
    assert shown(found.parameters) == {
        "tok_embeddings.weight": "S(0)@tp",
        "norm.weight": "R@tp",
        "output.weight": "S(0)@tp",
        **{f"layers.{i}.{name}": spec for i in (0, 1) for name, spec in layer.items()},
    }
    inputs, outputs = shown(found.inputs), shown(found.outputs)
    assert inputs.pop("tok_embeddings") == ("R|I@tp",) and outputs.pop("tok_embeddings") == ("S(1)@tp",)
    assert inputs.pop("norm") == ("S(1)@tp",) and outputs.pop("norm") == ("S(1)@tp",)
    assert inputs.pop("output") == ("R|I@tp",) and outputs.pop("output") == ("R|I@tp",)
    for i in (0, 1):
        assert inputs.pop(f"layers.{i}.attention") == ("R|I@tp",)
        assert inputs.pop(f"layers.{i}.attention.wq") == ("R|I@tp",)
        assert outputs.pop(f"layers.{i}.attention.wq") == ("S(-1)@tp",)
        assert inputs.pop(f"layers.{i}.attention.wo") == ("S(-1)@tp",)
        assert outputs.pop(f"layers.{i}.attention.wo") == ("S(1)@tp",)
        assert inputs.pop(f"layers.{i}.attention_norm") == outputs.pop(f"layers.{i}.attention_norm") == ("S(1)@tp",)
    assert not inputs and not outputs
    assert found.styles["layers.1.attention.wo"] == ("rowwise",)
    assert found.origins["layers.1.attention.wo.bias"] == ("layers.*.attention.wo",)


@pytest.mark.parametrize("style", [ColwiseParallel(), RowwiseParallel()], ids=["colwise", "rowwise"])
@pytest.mark.parametrize("path", ["output", "tok_embeddings", "layers.0.attention.wq"])
def test_weights_are_cut_as_torch_cuts_them(style: ParallelStyle, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own partition functions are run with ``distribute_tensor`` replaced by a recorder of placements."""
    from torch.distributed.tensor.parallel import style as torch_styles

    recorded: list[Any] = []

    def recorder(tensor: Any, mesh: Any, placements: list[Any], src_data_rank: Any = None) -> Any:
        recorded.append((tuple(tensor.shape), placements[0]))
        return tensor

    monkeypatch.setattr(torch_styles, "distribute_tensor", recorder)
    module = Model().get_submodule(path)
    kind = "linear" if isinstance(module, nn.Linear) else "embedding"
    getattr(style, f"_partition_{kind}_fn")("", module, None)

    ours = pins({path: style}).parameters
    assert len(ours) == len(recorded) == len(list(module.parameters()))
    for name, shape_and_placement in zip(dict(module.named_parameters()), recorded):
        shape, placement = shape_and_placement
        assert NAMES.parameters[f"{path}.{name}"] == shape
        expected = WHOLE if isinstance(placement, Replicate) else {layout.Shard(placement.dim)}
        assert ours[f"{path}.{name}"] == {"tp": expected}


def test_the_other_torch_styles() -> None:
    found = pins({
        "layers.0": PrepareModuleInputOutput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(),
            input_kwarg_layouts={"mask": Replicate()}, desired_input_kwarg_layouts={"mask": Shard(2)},
            output_layouts=(Partial(), None), desired_output_layouts=(Shard(1), None),
        ),
        "layers.1": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Partial()),
        "layers.*.attention_norm": SequenceParallel(sequence_dim=0),
    })  # fmt: skip
    assert shown(found.inputs)["layers.0"] == ("R|I@tp",)
    assert shown(found.keyword_inputs["layers.0"]) == {"mask": "S(2)@tp"}
    assert shown(found.outputs) == {"layers.0": ("S(1)@tp",), "layers.1": ("P@tp",),
                                    "layers.0.attention_norm": ("S(0)@tp",), "layers.1.attention_norm": ("S(0)@tp",)}  # fmt: skip


def test_a_subclass_of_a_torch_style_is_that_style_and_an_unrelated_one_is_refused() -> None:
    class Float8Colwise(ColwiseParallel):
        pass

    class Mine(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            return module

    assert read_value(Float8Colwise(), "a") == read_value(ColwiseParallel(), "a")
    with pytest.raises(GraphparError, match=r"'output'.*Mine is not one of torch's styles"):
        pins({"output": Mine()})


def test_a_torch_key_that_also_matches_parameters_is_about_modules() -> None:
    assert "layers.0.attention.wq.weight" in pins({"layers.*.attention.*": ColwiseParallel()}).parameters
    assert shown(pins({"layers.0.experts.**": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))}).outputs) \
        == {"layers.0.experts": ("S(1)@tp",)}  # fmt: skip


def test_inputs_and_outputs_of_a_module() -> None:
    plan = {"layers.0": {"style": "replicate", "inputs": [None, "S(1)@tp, S(1)@cp"], "outputs": ["S(-2)@tp", None]},
            "layers.1": {"inputs": {"mask": "R@tp", "bias": None}, "outputs": (Shard(1),)}}  # fmt: skip
    found = pins(plan, MESH)
    assert shown(found.inputs) == {"layers.0": ("free", "S(1)@cp, S(1)@tp")}
    assert shown(found.keyword_inputs["layers.1"]) == {"mask": "R@tp"}
    assert shown(found.outputs) == {"layers.0": ("S(-2)@tp",), "layers.1": ("S(1)@tp",)}
    assert found.styles["layers.0"] == ("replicate",)


@pytest.mark.parametrize("mesh", [{}, {"tp": 1, "pp": 4}, {"dp_replicate": 2}])
def test_axes_that_the_mesh_does_not_have_are_ignored(mesh: dict[str, int]) -> None:
    plan = {
        "output": ColwiseParallel(),
        "norm": "sequence",
        "layers.*.experts": "expert",
        "tok_embeddings.weight": "S(0)@tp, R@cp",
    }
    found = pins(plan, mesh)
    assert not found.parameters and not found.inputs and not found.outputs


def test_one_plan_on_several_meshes() -> None:
    plan = {"output": "colwise", "layers.*.experts": "expert", "tok_embeddings.weight": "S(0)@tp, S(1)@cp"}
    assert pins(plan, {"tp": 2}).parameters == pins(plan, {"tp": 4}).parameters
    assert shown(pins(plan, {"tp": 2}).parameters)["layers.0.experts.w1"] == "S(0)@tp"
    assert shown(pins(plan, {"tp": 2, "ep": 2}).parameters)["layers.0.experts.w1"] == "S(0)@ep"
    assert shown(pins(plan, {"cp": 2}).parameters) == {"tok_embeddings.weight": "S(1)@cp"}


ERRORS: list[tuple[Any, str]] = [
    ({"layers.*.attention.w_q": "colwise"}, r"'layers\.\*\.attention\.w_q' matches no module.*Did you mean 'wq'"),
    ({"layer.*.attention.wq": "colwise"}, r"no 'layer' in 'the model'.*Did you mean 'layers'"),
    ({"attention.wq": "colwise"}, r"Did you mean '\*\*\.attention\.wq'"),
    ({"0.attention.wq": "colwise"}, r"Did you mean 'layers\.0\.attention\.wq'"),
    ({"layers.*.attention.zzz": "colwise"}, r"There are wq, wo"),
    ({"layers.1*.norm": "colwise"}, r"no 'norm' in 'layers\.1\*'"),
    ({"output": "colwize"}, r"no style 'colwize'.*colwise, rowwise, sequence, replicate, expert.*Did you mean 'colwise'"),
    ({"output": "S(0)"}, r"names no axis; write 'S\(0\)@tp'"),
    ({"output": "S(0)@dp_shrd"}, r"no axis 'dp_shrd'.*cp, ep, tp.*Did you mean.*'dp_shard'"),
    ({"output": "S(0)@pp"}, r"split points"),
    ({"output": "X@tp"}, r"'X' is not a type"),
    ({"output": "S(0)@tp, R@tp"}, r"names the axis tp twice"),
    ({"output": "S(0)@tp, R"}, r"'R' in .* is not type@axis"),
    ({"output": ""}, r"no style ''"),
    ({"output": 3}, r"'output': 3 is not a value of a shard plan"),
    ({"output": None}, r"None is not a value"),
    ({"output": []}, r"the list is empty"),
    ({"output": {}}, r"the mapping is empty"),
    ({"output": {"input": ["R@tp"]}}, r"no key 'input'.*Did you mean 'inputs'"),
    ({"output": {"outputs": "R@tp"}}, r"must be a list"),
    ({"output": {"outputs": [3]}}, r"3 is not a spec"),
    ({"output": {"outputs": [Partial("avg")]}}, r"is not supported"),
    ({3: "colwise"}, r"one is 3"),
    (["colwise"], r"not a list"),
    ({"output.weight": "S(2)@tp"}, r"S\(2\)@tp does not fit 'output\.weight', whose shape is \[16, 8\]"),
    ({"output.weight": "S(-3)@tp"}, r"no such dim"),
    ({"layers.0.attention.wq": "S(1)@tp"}, r"does not fit 'layers\.0\.attention\.wq\.bias'"),
    ({"c_attn.weight": "S(1:7)@tp"}, r"24 is not a multiple of the parts' sum 7"),
    ({"c_attn.weight": "S(1:3+5)@tp"}, r"tp=2 does not divide every part"),
    ({"output.weight": "P@tp"}, r"can't be a partial sum"),
    ({"layers.0.mlp": "colwise"},
     r"'layers\.0\.mlp' is a Sequential without a weight\. Below it are 0 \(Linear\), 1 \(GELU\), 2 \(Linear\)"),
    ({"norm": "rowwise"}, r"'norm' is a RMSNorm with weight \[8\]"),
    ({"layers.0.mlp.1": "colwise"}, r"is a GELU without a weight"),
    ({"layers.0.mlp.1": "replicate"}, r"no parameters"),
    ({"patch": ColwiseParallel()}, r"for a Linear, Embedding, Conv1D, but 'patch' is a Conv2d"),
    ({"layers.0.mlp": "expert"}, r"stacked experts"),
    ({"output.weight": "sequence"}, r"is a parameter"),
    ({"output.weight": ColwiseParallel()}, r"is a parameter, but a torch style object"),
    ({"output.weight": {"outputs": ["R@tp"]}}, r"'inputs and outputs'"),
    ({"output": "colwise", "out*": "rowwise"},
     r"about 'output\.weight': pattern 'output' says S\(0\)@tp, and pattern 'out\*' says S\(1\)@tp"),
    ({"output": ["colwise", "replicate"]}, r"pattern 'output' says S\(0\)@tp, and pattern 'output' says R\|I@tp"),
    ({"norm": "sequence", "nor*": {"inputs": ["S(0)@tp"]}}, r"input 0 of 'norm'.*'norm' says S\(1\)@tp.*'nor\*' says S\(0\)@tp"),
    ({"c_attn.weight": "S(1:8)@tp", "c_attn.w*": "S(1:24)@tp"}, r"S\(1:8\)@tp.*S\(1:24\)@tp"),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "message"), ERRORS, ids=lambda value: str(value)[:50])
def test_what_is_refused_and_how_it_is_said(plan: Any, message: str) -> None:
    with pytest.raises(GraphparError, match=message) as found:
        pins(plan)
    assert "\n" not in str(found.value)


def test_a_wrong_plan_is_wrong_on_one_device_too() -> None:
    with pytest.raises(GraphparError, match="disagrees"):
        pins({"output": "colwise", "output.weight": "R@tp"}, {})
    program = gp.export(nn.Linear(4, 4), (torch.zeros(2, 4),))
    with pytest.raises(GraphparError, match=r"weigth.*weight"):
        gp.plan(program, devices=1, shard_plan={"weigth": "S(0)@tp"})


def test_tied_parameters_share_their_pins() -> None:
    tied = names(Model(), ties=(("tok_embeddings.weight", "output.weight"),))
    one, other = pins({"tok_embeddings": "rowwise"}, model=tied), pins({"output": "colwise"}, model=tied)
    assert one.parameters == other.parameters == {name: {"tp": {layout.Shard(0)}} for name in tied.ties[0]}
    assert other.origins["tok_embeddings.weight"] == ("output",)
    with pytest.raises(GraphparError, match=r"about 'tok_embeddings\.weight' = 'output\.weight'"):
        pins({"tok_embeddings": "colwise", "output": "colwise"}, model=tied)


class Aliased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.shared = self.k
        self.other = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.other(self.shared(self.k(x)))


@pytest.mark.parametrize("path", ["k", "shared"])
@pytest.mark.parametrize("by_ties", [True, False])
def test_a_module_under_two_names_is_pinned_under_both(path: str, by_ties: bool) -> None:
    ties = (("k.0.weight", "shared.0.weight"), ("k.0.bias", "shared.0.bias"))
    aliases = None if by_ties else (("k", "shared"), ("k.0", "shared.0"), ("k.1", "shared.1"))
    model = names(Aliased(), ties=ties, aliases=aliases)
    found = pins({path: {"outputs": ["S(1)@tp"]}, f"{path}.0": ["rowwise", {"inputs": ["S(1)@tp"]}]}, model=model)
    assert set(found.parameters) == {*ties[0], *ties[1]}
    assert set(found.outputs) == {"k", "shared"} and set(found.inputs) == {"k.0", "shared.0"}
    assert found.styles == {"k.0": ("rowwise",), "shared.0": ("rowwise",)}
    assert found.origins["k"] == found.origins["shared"] == (path,)


def test_names_of_a_program() -> None:
    program = capture(ModelSource(Aliased(), (torch.zeros(2, 4),)))
    found = names_of(program)
    assert found.modules["shared.0"] == "torch.nn.modules.linear.Linear" and found.parameters["other.bias"] == (4,)
    assert set(pins({"shared.1": {"outputs": ["R@tp"]}}, model=found).outputs) == {
        "k.1",
        "shared.1",
    }  # no parameter tells


def test_what_a_pin_allows() -> None:
    (pin,) = (constraint.spec["tp"] for constraint in read_value("S(-1)@tp", "a"))
    assert allows(pin, layout.Shard(2), 3) and allows(pin, layout.Shard(2, (4, 4)), 3)
    assert not allows(pin, layout.Shard(1), 3) and not allows(pin, layout.R, 3)
    exact = frozenset({layout.Shard(0, (8, 8))})
    assert allows(exact, layout.Shard(0, (8, 8)), 2) and not allows(exact, layout.Shard(0), 2)
    assert allows(WHOLE, layout.I, 1) and not allows(WHOLE, layout.P, 1)


# ---- patterns --------------------------------------------------------------------------------------------------

LEVEL_PATTERNS = ["a", "b", "ab", "*", "**", "a*", "*b", "?", "[ab]", "[!a]b"]


def slow_match(tokens: list[str], levels: list[str]) -> bool:
    """Every way of giving levels to tokens, with regular expressions for the levels."""
    if not tokens:
        return not levels
    if tokens[0] == "**":
        return any(slow_match(tokens[1:], levels[used:]) for used in range(len(levels) + 1))
    expression = tokens[0].replace("[!", "[^").replace("?", ".").replace("*", ".*")
    return bool(levels) and re.fullmatch(expression, levels[0]) is not None and slow_match(tokens[1:], levels[1:])


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(LEVEL_PATTERNS), min_size=1, max_size=5),
    st.lists(st.text("ab", min_size=1, max_size=2), max_size=5),
)
def test_patterns_match_as_the_definition_says(tokens: list[str], levels: list[str]) -> None:
    assert bool(matching(".".join(tokens), [".".join(levels)])) == slow_match(tokens, levels)


def test_patterns_are_globs_over_whole_levels() -> None:
    paths = ["", "layers", "layers.1", "layers.10", "layers.0.mlp", "layers.0.x.mlp", "layersX1", "odd[0]"]
    assert matching("layers.1", paths) == ["layers.1"]
    assert matching("layers.*.mlp", paths) == ["layers.0.mlp"]
    assert matching("layers.**.mlp", paths) == ["layers.0.mlp", "layers.0.x.mlp"]
    assert matching("layers.**", paths) == ["layers", "layers.1", "layers.10", "layers.0.mlp", "layers.0.x.mlp"]
    assert matching("**", paths) == paths
    assert matching("", paths) == [""]
    assert matching("odd[0]", paths) == ["odd[0]"]


# ---- merging ---------------------------------------------------------------------------------------------------

values = st.sampled_from(["colwise", "rowwise", "S(0)@tp", ["colwise", "R@cp"], {"outputs": ["R@tp", None]}])
small_plans = st.dictionaries(st.sampled_from(["", "q", "*.k", "m.q"]), values, max_size=4)


@pytest.mark.costly
@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(["", "m", "layers.*"]), small_plans, max_size=3))
def test_merging_is_pure_and_deterministic(plans: dict[str, Any]) -> None:
    before = copy.deepcopy(plans)
    try:
        merged = merge_plans(plans)
    except GraphparError as error:
        assert "disagree about" in str(error)
        merged = None
    assert plans == before
    if merged is None:
        return
    again = merge_plans(plans)
    assert list(merged.items()) == list(again.items())
    assert merge_plans({"": merged}) == merged
    for value in merged.values():  # the result shares nothing with its inputs
        if isinstance(value, list):
            value.append("changed")
        elif isinstance(value, dict):
            value["outputs"].append("changed")
    assert plans == before


def test_plans_nest_three_levels_deep() -> None:
    attention = {"q": "colwise", "o": "rowwise", "": {"inputs": ["R@tp"]}}
    layer = merge_plans({"": {"norm": "sequence"}, "attention": attention})
    encoder = merge_plans({"layers.*": layer})
    assert merge_plans({"": {"head": "colwise"}, "encoder": encoder}) == {
        "head": "colwise",
        "encoder.layers.*.norm": "sequence",
        "encoder.layers.*.attention.q": "colwise",
        "encoder.layers.*.attention.o": "rowwise",
        "encoder.layers.*.attention": {"inputs": ["R@tp"]},
    }


def test_merged_plans_that_disagree_name_both_origins() -> None:
    with pytest.raises(
        GraphparError, match=r"'m\.q'.*'m\.q' in the plan of '' says 'colwise'.*'q' in the plan of 'm' says 'rowwise'"
    ):
        merge_plans({"": {"m.q": "colwise"}, "m": {"q": "rowwise"}})
    assert merge_plans({"": {"m.q": ColwiseParallel()}, "m": {"q": ColwiseParallel()}}).keys() == {"m.q"}
    with pytest.raises(GraphparError, match="no style"):
        merge_plans({"m": {"q": "colwize"}})


# ---- files -----------------------------------------------------------------------------------------------------

PLAN = {"layers.*.q": "colwise", "norm": {"style": "sequence", "outputs": ["S(1)@tp"]}}
TEXTS = {
    "plan.json": json.dumps(PLAN),
    "plan.toml": '"layers.*.q" = "colwise"\n[norm]\nstyle = "sequence"\noutputs = ["S(1)@tp"]\n',
    "plan.py": f"shard_plan = {PLAN!r}\n",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_plan_from_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(TEXTS[name])
    assert load_shard_plan(tmp_path / name) == PLAN


BAD_FILES = [
    ("plan.json", "{", "is not JSON"),
    ("plan.json", '{"a": "colwise", "a": "rowwise"}', "the key 'a' twice"),
    ("plan.json", "[1]", "not a list"),
    ("plan.json", '{"a": "colwize"}', r"plan\.json: Shard plan, 'a': there is no style 'colwize'"),
    ("plan.toml", "a = ", "is not TOML"),
    ("plan.toml", 'layers.q = "colwise"', "no key 'q'.*one quoted key"),
    ("plan.py", "shard_plam = {}", "no 'shard_plan'.*shard_plam"),
    ("plan.py", "shard_plan = 1 / 0", "ZeroDivisionError.*line 1"),
    ("plan.txt", "", "must end in"),
]


@pytest.mark.parametrize(("name", "text", "message"), BAD_FILES)
def test_files_that_hold_no_plan(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(GraphparError, match=message):
        load_shard_plan(tmp_path / name)


def test_a_missing_file_names_a_near_one(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(GraphparError, match=r"Did you mean 'plan\.json'"):
        load_shard_plan(tmp_path / "plan.jsn")


def test_spec_text_shows_free_tensors() -> None:
    spec: Spec = {}
    assert spec_text(None) == spec_text(spec) == "free"
