"""Experts divided over ranks: what the emitted functions do, which weights count as experts', and what can't be divided."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, fx, nn
from transformers import MixtralConfig, MixtralForCausalLM

import graphpar as gp
from graphpar.annotations.values import allows
from graphpar.cli.main import main
from graphpar.codegen.spelling import spell
from graphpar.emitted import collectives, expert_rows
from graphpar.errors import GraphparError
from graphpar.ir.program import Program
from graphpar.operators.spelling import Expression
from graphpar.report.report import render, report_data
from graphpar.runtime.layout import ExpertRows, Shard, parse_type
from graphpar.text import bytes_text, count_text
from graphpar.verification import verify_all
from tests.tools.programs import EXAMPLES, example, example_file

ENDS = {
    "all have rows": [3, 5, 6, 10],
    "an expert without rows": [3, 3, 6, 10],
    "a rank without rows": [0, 0, 6, 10],
    "one has all": [10, 10, 10, 10],
}


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[list[int]]:
    yield list(range(request.param))
    collectives.bind({})


def _be(rank: int, degree: int) -> None:
    collectives._axes["ep"] = ("", degree, rank)


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 12), (torch.float32, 6), (torch.float64, 8)])
def test_grouped_products_of_any_width_are_written_so_that_kernels_take_them(dtype: torch.dtype, width: int) -> None:
    ends = torch.tensor([3, 3, 10], dtype=torch.int32)
    given = [
        torch.randn(10, width, dtype=dtype).requires_grad_(),
        torch.randn(3, width, 5, dtype=dtype).requires_grad_(),
    ]
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("x", "w", "ends")]
    for node, value in zip(nodes, (*given, ends)):
        node.meta["val"] = value
    product = graph.call_function(F.grouped_mm, tuple(nodes[:2]), {"offs": nodes[2]})
    product.meta["val"] = given[0].new_empty(10, 5)
    text = spell(product, lambda item: Expression(item.name), "x").text
    found: Tensor = eval(text, {"torch": torch, "F": F, "x": given[0], "w": given[1], "ends": ends})
    whole = [value.detach().double().requires_grad_() for value in given]
    expected = torch.cat([whole[0][:3] @ whole[1][0], whole[0][3:] @ whole[1][2]])
    pairs = zip(
        (found, *torch.autograd.grad(found.sum(), given)), (expected, *torch.autograd.grad(expected.sum(), whole))
    )
    for own, theirs in pairs:
        torch.testing.assert_close(own, theirs.to(dtype))


# ---- the functions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS.keys())
@pytest.mark.parametrize("ranks", [1, 2, 4], indirect=True)
def test_ranks_have_the_rows_of_their_experts_and_their_gradients_add_up(ranks: list[int], ends: list[int]) -> None:
    offs = torch.tensor(ends, dtype=torch.int32)
    x = torch.randn(10, 3, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(10, 3, dtype=torch.float64)
    pieces, gradients = [], []
    for rank in ranks:
        _be(rank, len(ranks))
        piece = expert_rows.expert_rows(x, "ep", expert_rows.rank_ends(offs, "ep"))
        begin = sum(len(piece) for piece in pieces)
        gradients += torch.autograd.grad(piece, x, upstream[begin : begin + len(piece)])
        pieces.append(piece)

    assert torch.equal(torch.cat(pieces), x)
    assert torch.equal(torch.stack(gradients).sum(0), upstream)
    per_rank = len(ends) // len(ranks)
    assert [len(piece) for piece in pieces] == torch.tensor([0, *ends[per_rank - 1 :: per_rank]]).diff().tolist()


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS.keys())
@pytest.mark.parametrize("ranks", [1, 2, 4], indirect=True)
def test_rows_of_all_ranks_are_a_sum_whose_gradient_each_rank_takes_its_rows_of(
    ranks: list[int], ends: list[int]
) -> None:
    offs = torch.tensor(ends, dtype=torch.int32)
    x, upstream = torch.randn(10, 3), torch.randn(10, 3)
    terms, gradients = [], []
    for rank in ranks:
        _be(rank, len(ranks))
        own = expert_rows.expert_rows(x, "ep", expert_rows.rank_ends(offs, "ep")).detach().requires_grad_()
        terms.append(expert_rows.expert_sums(own, "ep", expert_rows.rank_ends(offs, "ep")))
        gradients += torch.autograd.grad(terms[-1], own, upstream)

    assert torch.equal(torch.stack(terms).sum(0), x)
    assert torch.equal(torch.cat(gradients), upstream)


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS.keys())
@pytest.mark.parametrize("ranks", [1, 2, 4], indirect=True)
def test_products_of_own_rows_are_the_rows_of_the_product(ranks: list[int], ends: list[int]) -> None:
    offs = torch.tensor(ends, dtype=torch.int32)
    x, weight = torch.randn(10, 8), torch.randn(4, 8, 4)
    found = []
    for rank in ranks:
        _be(rank, len(ranks))
        own = weight.chunk(len(ranks))[rank]
        rows = expert_rows.expert_rows(x, "ep", expert_rows.rank_ends(offs, "ep"))
        found.append(F.grouped_mm(rows, own, offs=expert_rows.own_offsets(offs, "ep")))

    torch.testing.assert_close(torch.cat(found), F.grouped_mm(x, weight, offs=offs))


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
def test_experts_without_rows_have_gradients_of_zeros(ranks: list[int]) -> None:
    offs = torch.tensor(ENDS["a rank without rows"], dtype=torch.int32)
    for rank in ranks[: len(ranks) // 2]:  # those that have no rows
        _be(rank, len(ranks))
        x = torch.randn(10, 8, requires_grad=True)
        own = torch.randn(4 // len(ranks), 8, 4, requires_grad=True)
        ends = expert_rows.rank_ends(offs, "ep")
        rows = expert_rows.expert_rows(x, "ep", ends)
        y = F.grouped_mm(rows, own, offs=expert_rows.own_offsets(offs, "ep"))
        expert_rows.expert_sums(y, "ep", ends).backward(torch.randn(10, 4))

        assert len(rows) == 0
        assert own.grad is not None and not own.grad.any()
        assert x.grad is not None and not x.grad.any()


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_row_without_an_expert_is_an_error(ranks: list[int]) -> None:
    _be(0, 2)

    with pytest.raises(RuntimeError, match="every row must be one of an expert"):
        expert_rows.expert_rows(torch.ones(11, 3), "ep", [3, 10])


def test_the_type_reads_as_it_prints() -> None:
    kind = ExpertRows(offsets="cumsum_1")

    assert parse_type(str(kind)) == kind == ExpertRows(offsets="cumsum_1") and hash(kind) == hash(
        ExpertRows(offsets="cumsum_1")
    )
    assert kind != ExpertRows(offsets="cumsum") and kind != Shard(0) and Shard(0) != kind


# ---- programs --------------------------------------------------------------------------------------------------


def test_on_ep_experts_are_cut_and_all_else_is_whole() -> None:
    plan = gp.plan(example("mixtral"), mesh={"ep": 2})

    specs = {name: str(spec["ep"]) for name, spec in plan.parameters().items()}
    assert {name for name, kind in specs.items() if kind == "S(0)"} == {name for name in specs if ".experts." in name}
    assert {kind for name, kind in specs.items() if ".experts." not in name} <= {"R", "I"}
    assert plan.sharding.undivided == ()


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(GraphparError, match=r"Mesh ep=2: GPT.* has no experts to divide"):
        gp.plan(example("gpt"), mesh={"ep": 2})


def test_experts_that_the_degree_does_not_divide_are_named() -> None:
    with pytest.raises(GraphparError, match=r"Mesh ep=3: .*experts.* has 4 experts, which 3 ranks can't share evenly"):
        gp.plan(example("mixtral"), mesh={"ep": 3})


def test_the_report_counts_experts_apart() -> None:
    program = example("mixtral")
    whole = {name: info.numel for name, info in program.parameters.items()}
    experts = sum(count for name, count in whole.items() if ".experts." in name)
    parts = gp.partition(program, gp.plan(program, mesh={"ep": 2}))

    data = report_data(parts.compilation)

    assert data["experts"] == {
        "parameters": experts,
        "other_parameters": sum(whole.values()) - experts,
        "rank_bytes": 4 * experts // 2,
        "other_rank_bytes": 4 * (sum(whole.values()) - experts),
    }
    console = Console(width=100)
    with console.capture() as captured:
        render(data, console, "out")
    assert f"Experts    {count_text(experts)} parameters, a rank has {bytes_text(2 * experts)}" in captured.get()


class DenseExperts(nn.Module):
    """Every expert sees every token; gates weigh what they give."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.gate = nn.Linear(16, 4)
        self.up = nn.Parameter(torch.randn(4, 16, 32) / 4)
        self.bias = nn.Parameter(torch.randn(4, 1, 32))
        self.down = nn.Parameter(torch.randn(4, 32, 16) / 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)  # [b, s, 4]
        if self.how == "einsum":
            hidden = torch.einsum("bsd,edf->ebsf", x, self.up) + self.bias.unsqueeze(1)
            y = torch.einsum("ebsf,efd->ebsd", F.gelu(hidden), self.down)
        else:
            rows = x.flatten(0, 1).unsqueeze(0).expand(4, -1, -1)
            y = torch.bmm(F.gelu(torch.bmm(rows, self.up) + self.bias), self.down).unflatten(1, (-1, 6))
        return F.mse_loss((y * gates.permute(2, 0, 1).unsqueeze(-1)).sum(0), target)


class SortedExperts(nn.Module):
    """Rows sorted by expert, in the root of the program, and added to their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4, bias=False)
        self.up = nn.ParameterDict({"weight": nn.Parameter(torch.randn(4, 16, 32) / 4)})
        self.down = Product()
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        gates, experts = self.gate(rows).softmax(-1).topk(2)
        experts, order = experts.flatten().sort()
        offs = experts.float().histc(4, 0, 3).cumsum(0, dtype=torch.int32)
        tokens = order // 2
        hidden = torch.ops.transformers.grouped_mm_fallback(rows[tokens], self.up["weight"], offs)
        y = self.down(F.gelu(hidden), offs) * gates.flatten()[order].unsqueeze(-1)
        added = torch.zeros_like(rows).index_add(0, tokens, y)
        return F.mse_loss(self.out(added.view_as(x) + x), target)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 32, 16) / 4)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        y: Tensor = torch.ops.transformers.grouped_mm_fallback(x, self.weight, offs)
        return y


@pytest.fixture(scope="module")
def sorted_experts() -> Program:
    pytest.importorskip(
        "transformers.integrations.moe"
    )  # it registers the product by groups that can be traced in fp32
    torch.manual_seed(0)
    return gp.export(SortedExperts(), (), {"x": torch.randn(8, 6, 16), "target": torch.randn(8, 6, 16)})


@pytest.mark.costly
def test_rows_are_gathered_weighed_and_added_by_the_rank_that_has_their_expert(sorted_experts: Program) -> None:
    parts = gp.partition(sorted_experts, gp.plan(sorted_experts, mesh={"ep": 2}))

    assert gp.verify(parts).ok
    text = parts.files["stage_0.py"]
    assert text.count("rank_ends(") == 1 and "index_add" in text
    assert gp.check(parts).problems == []


def test_rows_of_experts_cross_no_stage_boundary(sorted_experts: Program) -> None:
    options = {"mesh": {"ep": 2, "pp": 2}, "microbatch_size": 8, "schedule": "GPipe"}
    gp.partition(sorted_experts, gp.plan(sorted_experts, split=["out"], **options))  # type: ignore[arg-type]

    with pytest.raises(GraphparError, match="rows of a rank's own experts"):
        gp.partition(sorted_experts, gp.plan(sorted_experts, split=["down"], **options))  # type: ignore[arg-type]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("mesh", "style", "expected"),
    [
        ({"tp": 2}, "expert", "S(0)@tp"),
        ({"ep": 2}, "expert", "S(0)@ep"),
        ({"ep": 2}, "replicate", "R@ep"),
        ({"tp": 2}, None, "S(1:128)@tp"),
    ],
)
@pytest.mark.sampled(1 / 2)
def test_styles_say_what_experts_are_cut_over(mesh: dict[str, int], style: str | None, expected: str) -> None:
    shard_plan = {"model.layers.*.mlp.experts": style} if style else None
    plan = gp.plan(example("mixtral"), mesh=mesh, shard_plan=shard_plan)

    spec = plan.parameters()["model.layers.3.mlp.experts.gate_up_proj"]
    assert ", ".join(f"{kind}@{axis}" for axis, kind in spec.items()) == expected
    gp.partition(example("mixtral"), plan)  # what it lowers to is checked


def test_no_plan_can_pin_rows_of_experts() -> None:
    with pytest.raises(GraphparError, match=r"E\(cumsum\)"):
        gp.plan(example("mixtral"), mesh={"ep": 2}, shard_plan={"model.layers.*.mlp": {"outputs": ["E(cumsum)@ep"]}})
    assert not allows(frozenset({Shard(0)}), ExpertRows(offsets="cumsum"), 2)


@pytest.mark.costly
def test_dense_experts_are_cut_and_exact() -> None:
    made = []
    for how in ("einsum", "bmm"):
        torch.manual_seed(0)
        program = gp.export(DenseExperts(how), (), {"x": torch.randn(4, 6, 16), "target": torch.randn(4, 6, 16)})
        plan = gp.plan(program, mesh={"ep": 2})
        specs = {name: str(spec["ep"]) for name, spec in plan.parameters().items()}
        assert specs["up"] == specs["down"] == "S(0)", specs
        made.append(gp.partition(program, plan))

    for outcome in verify_all(made, 3, timeout_s=120):
        assert outcome.ok, (outcome.problems, outcome.max_error, outcome.worst)


@pytest.mark.costly
@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_torch_compile_takes_rows_of_experts_whole_and_once(ranks: list[int]) -> None:
    def step(x: Tensor, weight: Tensor, offs: Tensor, index: Tensor, gates: Tensor) -> Tensor:
        ends = expert_rows.rank_ends(offs, "ep")
        rows = x[expert_rows.expert_rows(index, "ep", ends) // 2]
        y = F.silu(F.grouped_mm(rows, weight, offs=expert_rows.own_offsets(offs, "ep")))
        return expert_rows.expert_sums(y, "ep", ends) * gates

    _be(1, 2)
    torch._dynamo.reset()
    x, weight = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((8, 16), (2, 16, 16)))
    others = torch.randperm(16), torch.randn(16, 1, dtype=torch.bfloat16)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for ends in ([4, 6, 9, 16], [16, 16, 16, 16], [0, 0, 0, 16]):
        offs = torch.tensor(ends, dtype=torch.int32)
        found, expected = compiled(x, weight, offs, *others), step(x, weight, offs, *others)
        assert torch.equal(found, expected)
        for one, other in zip(*(torch.autograd.grad(y, (x, weight), torch.ones_like(y)) for y in (found, expected))):
            assert torch.equal(one, other)

    assert counter.frame_count == 1


@pytest.mark.slow
def test_public_architectures_with_experts_are_exact() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("spmd_types")
    from tests.models.architectures import program_of

    made = {}
    for name in ("qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2", "deepseek_v3"):
        program = program_of(name)
        plan = gp.plan(program, mesh={"ep": 2})
        weights = {
            name: spec["ep"] for name, spec in plan.parameters().items() if name.endswith(("gate_up_proj", "down_proj"))
        }
        assert weights and set(map(str, weights.values())) == {"S(0)"}
        made[name] = gp.partition(program, plan)
        assert gp.check(made[name]).problems == []

    for name, outcome in zip(made, verify_all(list(made.values()), 3, timeout_s=300)):
        assert outcome.ok, (name, outcome.problems, outcome.max_error, outcome.worst)


@pytest.mark.costly
@pytest.mark.parametrize("mesh", ["ep=2", "tp=2"])
@pytest.mark.sampled(1 / 2)
def test_a_module_with_several_results_of_an_operator_is_explained(
    mesh: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(EXAMPLES / "mixtral.py")

    assert main(["compile", model, "--mesh", mesh, "--explain", "model.layers.0.mlp.experts", "--no-emit"]) == 0

    assert "holds mlp.experts.gate_up_proj as" in capsys.readouterr().out


@pytest.mark.costly
def test_outputs_without_a_loss_equal_the_models() -> None:
    file = example_file("mixtral")
    program = gp.export(file.model, (), {"input_ids": file.kwargs["input_ids"]}, mode="infer")
    outcome = gp.verify(gp.partition(program, gp.plan(program, mesh={"ep": 2})))

    assert outcome.ok, (outcome.problems, outcome.max_error)


def _mixture(**sizes: int) -> Program:
    size = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1} | sizes
    model = MixtralForCausalLM(MixtralConfig(**size, num_experts_per_tok=1, sliding_window=None, use_cache=False))
    ids = torch.randint(61, (8, 8), generator=torch.Generator().manual_seed(0))
    return gp.export(model, kwargs={"input_ids": ids, "labels": ids.clone()})


BY_HEADS = {
    "model.layers.*.self_attn.q_proj.weight": "S(0)@ep, S(0)@tp",
    "model.layers.*.self_attn.o_proj.weight": "S(1)@ep, S(1)@tp",
}


@pytest.mark.costly
def test_heads_of_one_group_over_two_axes_take_their_group_once() -> None:
    """On the outer axis: the inner one divides the heads of that group. With one group this is exact on 4 ranks."""
    for groups, degree, heads in ((2, 4, 32), (1, 2, 8)):
        program = _mixture(num_attention_heads=heads, num_key_value_heads=groups, num_local_experts=4)
        plan = gp.plan(program, mesh={"ep": degree, "tp": degree}, shard_plan=BY_HEADS)
        parts = gp.partition(program, plan)
        calls = re.findall(
            r'own_group\(\w+, "(\w+)"', "".join(parts.files[name] for name in parts.files if "stage" in name)
        )
        assert calls == ["ep", "ep"]
    result = gp.verify(parts, steps=1)
    assert result.ok, result


@pytest.mark.costly
def test_a_rank_with_fewer_experts_than_shards_stores_a_share_of_each() -> None:
    """Each rank of dp_shard as many bytes, as the price says; a pin of the first dim is obeyed."""
    program = _mixture(num_attention_heads=4, num_key_value_heads=2, num_local_experts=2)
    mesh, name = {"dp_expert": 2, "dp_shard": 2}, "model.layers.0.mlp.experts.down_proj"
    plan = gp.plan(program, mesh=mesh, zero=3)
    assert plan.fully_sharded[name] == 1 and plan.fully_sharded["lm_head.weight"] == 0
    parts = gp.partition(program, plan)
    stored, priced = parts.report["state"]["rank_bytes"], parts.report["predicted"]["memory"][0]
    assert stored["parameters"] == pytest.approx(priced["parameters"], rel=0.01)
    result = gp.verify(parts, steps=1)
    assert result.ok, result
    pinned = gp.plan(program, mesh=mesh, zero=3, shard_plan={"model.layers.*.mlp.experts.down_proj": "S(0)@dp_shard"})
    assert pinned.fully_sharded[name] == 0
