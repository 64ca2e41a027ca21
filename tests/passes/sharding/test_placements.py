"""Where things lie at real sizes, and what is said about sizes that do not divide."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import graphpar as gp
from graphpar.cost_models.sharding import ShardingCosts
from graphpar.errors import GraphparError
from graphpar.ir.plan import Plan
from graphpar.ir.program import Program, operator_name, value_of
from graphpar.operators.table import record_of
from graphpar.operators.transitions import TABLE
from graphpar.passes.normalize.graph_matching import sizes
from graphpar.passes.rank_passes import prepared
from graphpar.passes.sharding.costs import Workload
from graphpar.passes.sharding.linear_bias import separate_biases
from graphpar.passes.sharding.lowering import lower
from graphpar.passes.sharding.problem import build_problem
from graphpar.passes.sharding.search import search
from graphpar.passes.sharding.shard import shard
from graphpar.runtime.layout import Shard
from graphpar.verification import verify_all
from tests.tools.programs import example, norms_pinned

MOVES = {row.function for row in TABLE}


def moved_in(program: Program, plan: Plan) -> dict[str, Counter[str]]:
    """How often each transition stands in each block of the lowered program, and in the root (``""``)."""
    sharding = plan.sharding
    local = lower(prepared(program, sharding, plan.microbatch_size), sharding)
    graphs = {"": local.graph} | {name: block.graph for name, block in local.blocks.items()}
    return {
        name: Counter(operator_name(node) for node in graph.nodes if operator_name(node) in MOVES)
        for name, graph in graphs.items()
    }


def weights_in(plan: Plan, prefix: str) -> dict[str, str]:
    """Types on tp of the weights below a module, and of the biases that are cut."""
    found = {
        name.removeprefix(prefix): str(spec["tp"])
        for name, spec in plan.parameters().items()
        if name.startswith(prefix)
    }
    return {name: kind for name, kind in found.items() if kind.startswith("S") or "norm" in name or "ln_" in name}


# ---- Megatron's placement, unasked -----------------------------------------------------------------------------


@pytest.mark.costly
@pytest.mark.parametrize("degree", [2, 8])
@pytest.mark.sampled(1 / 2)
def test_llama_3_8b(degree: int) -> None:
    program = example("llama3_8b")
    plan = gp.plan(program, mesh={"tp": degree})
    assert weights_in(plan, "model.layers.17.") == {
        **{f"self_attn.{name}_proj.weight": "S(0)" for name in "qkv"},
        "self_attn.o_proj.weight": "S(1)",
        "mlp.gate_proj.weight": "S(0)",
        "mlp.up_proj.weight": "S(0)",
        "mlp.down_proj.weight": "S(1)",
        "input_layernorm.weight": "R",
        "post_attention_layernorm.weight": "R",
    }
    assert str(plan.parameters()["model.embed_tokens.weight"]["tp"]) == "S(0)"
    assert str(plan.parameters()["lm_head.weight"]["tp"]) == "S(0)"
    moved = moved_in(program, plan)
    assert moved["LlamaDecoderLayer"] == {"all_gather": 2, "reduce_scatter": 2}
    assert moved[""] == {"all_gather": 1, "reduce_scatter": 1}  # and the vocabulary-parallel loss
    assert plan.sharding.gap <= 1e-6


def test_no_value_of_llama_3_8b_is_the_sequence_squared() -> None:
    """Causal masks of 8,192 rows and columns, and scores, are never made; a layer runs 19 operators besides views."""
    program = example("llama3_8b")
    plan = gp.plan(program, mesh={"tp": 4})
    local = shard(program, plan.sharding)
    block = next(iter(local.blocks.values()))
    nodes = [node for graph in (local.graph, *(each.graph for each in local.blocks.values())) for node in graph.nodes]
    rows = [
        [size for size in sizes(node) if size in (8192, 2048)] for node in nodes if isinstance(value_of(node), Tensor)
    ]

    assert max(map(len, rows)) == 1
    calls = [node for node in block.graph.nodes if node.op == "call_function"]
    assert len([node for node in calls if not record_of(node).free]) == 19


def test_without_sequence_parallelism_a_block_has_two_all_reduces() -> None:
    program = example("llama3_8b")
    pins = {path: {**pin, "outputs": ["I@tp"]} for path, pin in norms_pinned(program, "I").items()}
    plan = gp.plan(program, mesh={"tp": 8}, shard_plan=pins)
    assert moved_in(program, plan)["LlamaDecoderLayer"] == {"all_reduce": 2, "sum_gradient": 2}


@pytest.mark.parametrize(
    ("batch", "norm", "moved"),
    [(4, "I", {"all_reduce": 2, "sum_gradient": 2}), (64, "R", {"all_gather": 2, "reduce_scatter": 2})],
)
@pytest.mark.sampled(1 / 2)
def test_gpt_2_with_few_tokens_and_with_many(batch: int, norm: str, moved: Mapping[str, int]) -> None:
    program = example("gpt2")
    plan = gp.plan(program, mesh={"tp": 2}, global_batch=batch)
    assert weights_in(plan, "transformer.h.3.") == {
        "attn.c_attn.weight": "S(1:768)",  # [in, q + k + v]: each rank has its heads of each
        "attn.c_attn.bias": "S(0:768)",
        "attn.c_proj.weight": "S(0)",
        "mlp.c_fc.weight": "S(1)",
        "mlp.c_fc.bias": "S(0)",
        "mlp.c_proj.weight": "S(0)",
        **{f"ln_{i}.{what}": norm for i in (1, 2) for what in ("weight", "bias")},
    }
    assert str(plan.parameters()["transformer.wte.weight"]["tp"]) == "S(0)"
    assert moved_in(program, plan)["GPT2Block"] == moved


# ---- sizes that do not divide ----------------------------------------------------------------------------------


@functools.cache
def llama(heads: int = 6, vocab: int = 96) -> Program:
    """Two layers of width 48, whose feed-forward part divides by 2, 3, 4 and 6."""
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=heads, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(vocab, (4, 16), generator=torch.Generator().manual_seed(0))
    return gp.export(lambda: LlamaForCausalLM(config), (), {"input_ids": ids, "labels": ids})


WHOLE_ATTENTION = {"model.layers.*.self_attn": "replicate"}


@pytest.mark.costly
def test_heads_that_a_degree_does_not_divide_are_refused() -> None:
    with pytest.raises(
        GraphparError,
        match=r"tp=4 divides the heads of no attention, such as the 6 of model.layers.0.self_attn.*Take tp=2, 3, 6, or accept",
    ):
        gp.plan(llama(), mesh={"tp": 4})


class _Bare(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q)


class _Attends(nn.Module):
    """The attention is in a module without parameters; its heads are merged with the batch, or apart."""

    def __init__(self, merged: bool) -> None:
        super().__init__()
        self.up, self.bare, self.merged = nn.Linear(24, 24), _Bare(), merged

    def forward(self, x: Tensor) -> Tensor:
        q = self.up(x).unflatten(-1, (6, 4)).transpose(1, 2)
        return self.bare(q.flatten(0, 1) if self.merged else q).square().mean()


@pytest.mark.parametrize("merged", [False, True])
def test_heads_are_those_of_an_example_and_pinned_by_the_module_around_them(merged: bool) -> None:
    class Net(nn.Sequential):
        pass

    program = gp.export(lambda: Net(_Attends(merged)), (torch.randn(8, 5, 24),))
    with pytest.raises(GraphparError, match=r"the 6 of 0: .*with the pin \{'\*': 'replicate'\}"):
        gp.plan(program, mesh={"tp": 4})
    gp.plan(program, mesh={"tp": 4}, shard_plan={"0": "replicate"})
    gp.plan(program, mesh={"tp": 3})
    alone = gp.export(lambda: _Attends(merged), (torch.randn(8, 5, 24),))
    with pytest.raises(GraphparError, match=r"the 6 of _Attends: .*with the pin \{'\*\*': 'replicate'\}"):
        gp.plan(alone, mesh={"tp": 4})
    gp.plan(alone, mesh={"tp": 4}, shard_plan={"**": "replicate"})


def test_heads_that_do_not_divide_are_named_and_the_rest_is_cut() -> None:
    plan = gp.plan(llama(), mesh={"tp": 4}, shard_plan=WHOLE_ATTENTION)
    (warning,) = (line for line in plan.sharding.undivided if "heads" in line)
    assert "self_attn: 6 heads don't divide over tp=4" in warning and warning in plan.warnings
    assert weights_in(plan, "model.layers.0.mlp.") == {
        "gate_proj.weight": "S(0)", "up_proj.weight": "S(0)", "down_proj.weight": "S(1)",
    }  # fmt: skip


@pytest.mark.costly
@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize(
    ("sizes", "mesh"),
    [({}, {"tp": 4}), ({"vocab": 97}, {"tp": 3}), ({"vocab": 97}, {"tp": 2, "dp_replicate": 2})],
    ids=str,
)
def test_uneven_heads_and_vocabularies_are_exact(sizes: dict[str, int], mesh: dict[str, int]) -> None:
    program = llama(**sizes)
    whole = WHOLE_ATTENTION if mesh == {"tp": 4} else {}
    (result,) = verify_all([gp.partition(program, gp.plan(program, mesh=mesh, shard_plan=whole))])
    assert result.ok, result.max_error


@pytest.mark.costly
def test_a_vocabulary_of_50257_is_padded_over_three() -> None:
    program = example("gpt2")
    plan = gp.plan(program, mesh={"tp": 3})
    assert str(plan.parameters()["transformer.wte.weight"]["tp"]) == "S(0)"
    table = gp.partition(program, plan).program.parameters["transformer.wte.weight"]
    assert table.whole == (50257, 768) and table.shape == (16753, 768)  # 3 * 16753 = 50259


@pytest.mark.parametrize(
    ("degree", "shard_plan", "message"),
    [
        (2, {"model.layers.*.self_attn.q_prj": "colwise"}, "Did you mean 'q_proj'"),
        (
            2,
            {"**.up_proj": "colwise", "model.layers.*.mlp.*_proj": "rowwise"},
            r"disagrees about .*up_proj\.weight.*'\*\*\.up_proj'",
        ),
        (
            5,
            {"**.up_proj": "colwise", **WHOLE_ATTENTION},
            r"up_proj\.weight of shape \(96, 48\).*tp=5.*A dim can be sharded where the degree divides",
        ),
        (2, {"**.input_layernorm.weight": "S(3)@tp"}, "S\\(3\\)"),
    ],
)
def test_plans_that_cannot_be_are_refused(degree: int, shard_plan: Mapping[str, Any], message: str) -> None:
    with pytest.raises(GraphparError, match=message):
        gp.plan(llama(), mesh={"tp": degree}, shard_plan=shard_plan)


def test_pins_that_fight_cost_transitions_and_no_more() -> None:
    """A gated product of a column-parallel and a row-parallel linear is odd, but it can be had."""
    pins = {"**.up_proj": "colwise", "**.gate_proj": "rowwise"}
    plan = gp.plan(llama(), mesh={"tp": 2}, shard_plan=pins)
    assert weights_in(plan, "model.layers.1.mlp.") == {
        "gate_proj.weight": "S(1)", "up_proj.weight": "S(0)", "down_proj.weight": "S(1)",
    }  # fmt: skip
    assert sum(plan.sharding.cost.values()) > sum(gp.plan(llama(), mesh={"tp": 2}).sharding.cost.values())


def test_a_memory_that_nothing_fits() -> None:
    problem = build_problem(separate_biases(llama()), {"tp": 2})
    roomy = search(problem, Workload(4, 1, memory_limit=1e9), ShardingCosts())
    assert roomy.seconds > 0
    with pytest.raises(GraphparError, match="fits the memory"):
        search(problem, Workload(4, 1, memory_limit=1e4), ShardingCosts())


@pytest.mark.costly
def test_a_plan_with_pinned_modules_survives_its_file() -> None:
    """One instance of the block is pinned in another way, so it has a definition of its own."""
    pins: dict[str, Any] = {
        "model.layers.0.input_layernorm": {"inputs": ["S(1)@tp"]},
        "model.norm": {"inputs": ["I@tp"]},
    }
    plan = gp.plan(llama(), mesh={"tp": 2}, shard_plan=pins)
    assert plan.sharding.variants and plan.sharding.points
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert gp.partition(llama(), again).files == gp.partition(llama(), plan).files


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def test_each_value_of_a_rank_has_the_shape_that_its_types_say() -> None:
    """The result of the last block is had in two cuts, and neither of them is whole."""
    model = nn.Sequential(_Layer(), _Layer(), nn.Linear(16, 16))
    program = gp.export(model, (torch.zeros(4, 6, 16),), loss_fn=lambda output: output.square().mean())
    plan = gp.plan(program, mesh={"cp": 2, "tp": 2}, shard_plan={"2": "rowwise"})

    shapes = set()
    for node in shard(program.at_batch(plan.microbatch_size), plan.sharding).graph.nodes:
        if "types" in node.meta and isinstance(node.meta["val"], Tensor):
            expected = list(value_of(node.meta["origin"]).shape)
            for kind in node.meta["types"].values():
                if isinstance(kind, Shard):
                    expected[kind.dim] //= 2
            assert list(node.meta["val"].shape) == expected, (node, node.meta["types"])
            shapes.add(tuple(map(str, expected[1:])))
    assert {("3", "16"), ("3", "8")} <= shapes


class Rows(nn.Module):
    """Examples without a sequence: [batch, features]."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), norm, nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)))


@functools.cache
def _rows(coupled: bool = False) -> gp.Program:
    norm = nn.BatchNorm1d(32) if coupled else nn.LayerNorm(32)
    return gp.export(Rows(norm), (torch.randn(8, 16),), loss_fn=lambda found: found.square().mean())


@pytest.mark.parametrize(
    ("pin", "asked", "reason"),
    [
        ({"up.weight": "S(1)@dp_shard"}, {"mesh": {"dp_shard": 3}, "global_batch": 6}, "its dim 1, 16 on a rank, does not divide evenly"),
        ({"up.weight": "S(1)@dp_shard"}, {"mesh": {"dp_shard": 2}, "zero": 1}, "zero=1 it is replicated on the 2 ranks of dp_shard"),
        ({"up.weight": "R@dp_shard"}, {"mesh": {"dp_shard": 2}}, r"zero=3 stores it as S\(0\) over dp_shard=2"),
        ({"up": "S(0)@dp_shard"}, {"mesh": {"dp_shard": 2}, "zero": 1}, "zero=1 it is replicated on the 2 ranks of dp_shard"),
        ({"up.weight": "S(0)@dp_replicate"}, {"mesh": {"dp_replicate": 2}}, "the 2 ranks of dp_replicate compute with it"),
        ({"norm": {"inputs": ["S(1)@dp_shard"]}}, {"mesh": {"dp_shard": 2}}, "take different rows"),
        ({"norm": "sequence"}, {"mesh": {"tp": 2}}, r"whose 2 dims \(batch, 32\) have no sequence"),
        ({"norm": {"outputs": ["S(1)@tp"]}}, {"mesh": {"tp": 3}}, "norm can't .* tp=3: 32 is not divisible by 3; "),
        ({}, {"mesh": {"cp": 2}}, r"no matrix product of Rows has one; its inputs are x \[8, 16\]"),
    ],
)  # fmt: skip
def test_a_pin_that_can_not_be_is_refused(pin: dict[str, object], asked: dict[str, Any], reason: str) -> None:
    with pytest.raises(GraphparError, match=reason):
        gp.plan(_rows(), shard_plan=pin, **asked)


@pytest.mark.parametrize(
    ("pin", "asked"),
    [
        ({"up.weight": "S(0)@dp_shard"}, {"mesh": {"dp_shard": 2}}),
        ({"up.weight": "S(1)@dp_shard"}, {"mesh": {"dp_shard": 2}}),
        ({"up.weight": "R@dp_shard"}, {"mesh": {"dp_shard": 2}, "zero": 1}),
        ({"up.weight": "R@dp_replicate"}, {"mesh": {"dp_replicate": 2}}),
        ({"up.weight": "S(1)@tp"}, {"mesh": {"tp": 2}}),
        ({"up.weight": "R@tp"}, {"mesh": {"tp": 2}}),
    ],
)
@pytest.mark.parametrize("coupled", [False, True])
def test_a_pin_that_can_be_is_in_the_plan(pin: dict[str, str], asked: dict[str, Any], coupled: bool) -> None:
    plan = gp.plan(_rows(coupled), shard_plan=pin, **asked)

    ((name, text),) = pin.items()
    kind, _, axis = text.partition("@")
    assert plan.parameters().get(name, {}).get(axis, "R") == kind  # what is not listed is R on replicas


def test_a_degree_that_does_not_divide_the_sequence_is_refused() -> None:
    class Tokens(Rows):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.norm(self.up(x)).cumsum(1))

    def planned(length: int) -> gp.Plan:
        model = Tokens(nn.LayerNorm(32))
        return gp.plan(
            gp.export(model, (torch.randn(4, length, 16),), loss_fn=lambda found: found.sum()), mesh={"cp": 4}
        )

    with pytest.raises(GraphparError, match="cp=4 divides sequences, but up takes 10 positions of each example"):
        planned(10)
    assert planned(8).mesh.cp == 4


def test_a_pin_over_an_axis_of_one_rank_is_told() -> None:
    pins = {"up.weight": "S(0)@tp", "down": "rowwise", "norm.weight": "R@tp"}
    (line,) = gp.plan(_rows(), mesh={"dp_replicate": 2}, shard_plan=pins).warnings
    assert line.startswith("The shard plan divides 'up.weight', 'down' over tp, which has one rank in this plan")
    assert not gp.plan(_rows(), mesh={"tp": 2}, shard_plan=pins).warnings


@pytest.mark.costly
def test_heads_that_do_not_divide_are_told_however_little_they_compute() -> None:
    config = LlamaConfig(
        vocab_size=96, hidden_size=384, intermediate_size=3072, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=4, use_cache=False,
    )  # fmt: skip
    ids = torch.zeros(4, 4, dtype=torch.int64)
    program = gp.export(lambda: LlamaForCausalLM(config), (), {"input_ids": ids, "labels": ids})
    plan = gp.plan(program, mesh={"tp": 3}, shard_plan=WHOLE_ATTENTION)
    (line,) = (line for line in plan.sharding.undivided if "heads" in line)
    assert "4 heads don't divide over tp=3" in line and float(line.rpartition("(")[2].split("%")[0]) < 1


class BiasedRouter(nn.Module):
    """Scores with a bias, too few to be sharded, by which each row chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scores, self.chosen, self.last = (
            nn.Linear(8, 7),
            nn.Linear(7, 5),
            nn.Embedding(5, 8),
            nn.Linear(8, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.scores(self.first(x).tanh()).argmax(-1)
        return (self.last(x) + self.chosen(chosen)).square().mean()


def test_ranks_agree_on_scores_that_have_a_bias() -> None:
    program = gp.export(BiasedRouter(), (torch.randn(4, 8),))
    text = gp.partition(program, gp.plan(program, mesh={"tp": 2})).files["stage_0.py"]

    assert "agree_on(" in text and "self.scores(" in text
