"""Replicas that hold different experts: programs against the model, what they send, what is refused, and faults that are found."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import graphpar as gp
from graphpar.cost_models.work import Phase
from graphpar.cost_models.workload import Works
from graphpar.emitted import expert_rows
from graphpar.errors import GraphparError
from graphpar.ir.program import Program, operator_name
from graphpar.passes.sharding.check_exchange import check_exchange
from graphpar.passes.sharding.exchange import exchangeable
from graphpar.report.groups import expert_axes, group_axes, ranks_of
from graphpar.runtime.layout import coordinates
from graphpar.verification import verify_all
from tests.models.idle_experts import CHOSEN, EXPERTS, WIDTH, Idle, trained
from tests.tools.programs import example
from tests.tools.rank_pool import RankPool
from tests.tools.samples import sample

MESHES: tuple[dict[str, int], ...] = (
    {"dp_expert": 2},
    {"dp_expert": 4},
    {"dp_expert": 2, "tp": 2},
    {"dp_expert": 2, "cp": 2},
    {"dp_expert": 2, "pp": 2},
)


WHOLE = {"model.layers.*.mlp.experts": "expert"}
OVER_CP = {"model.layers.*.mlp.experts.*": "S(0)@cp"}


@pytest.mark.costly
@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize(
    "pins",
    [*({"mesh": mesh} for mesh in MESHES), {"mesh": {"dp_shard": 2, "dp_expert": 2}, "recompute": "full"}],
    ids=str,
)
def test_programs_are_the_model_beside_every_other_axis(pins: dict[str, Any]) -> None:
    program = example("mixtral")
    parts = gp.partition(program, gp.plan(program, **pins))

    assert gp.check(parts).problems == []
    (outcome,) = verify_all([parts], 3, timeout_s=300)
    assert outcome.ok, (outcome.problems, outcome.max_error, outcome.worst)


def test_experts_are_sharded_and_all_else_is_as_on_replicas() -> None:
    plan = gp.plan(example("mixtral"), mesh={"dp_expert": 2, "tp": 2})

    specs = {name: str(spec["dp_expert"]) for name, spec in plan.parameters().items()}
    assert set(specs) >= set(example("mixtral").parameters)
    assert {name for name, kind in specs.items() if kind == "S(0)"} == {name for name in specs if ".experts." in name}
    assert {kind for name, kind in specs.items() if ".experts." not in name} == {"R"}


class SortedExperts(nn.Module):
    """Rows sorted by expert in the root of the program, and taken back to their order; no expert but the first gets any."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(shape) / 4) for shape in ((4, 16, 32), (4, 32, 16)))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        gates, experts = (self.gate(rows) + torch.tensor([9.0, 0.0, 0.0, 0.0])).softmax(-1).topk(1)
        experts, order = experts.flatten().sort()
        offs = experts.float().histc(4, 0, 3).cumsum(0, dtype=torch.int32)
        hidden = F.gelu(torch.ops.transformers.grouped_mm_fallback(rows[order], self.up, offs))
        y = torch.ops.transformers.grouped_mm_fallback(hidden * 2, self.down, offs)
        back = torch.empty_like(order).index_put((order,), torch.arange(order.shape[0]))
        return F.mse_loss((y * gates.flatten()[order].unsqueeze(-1))[back].view_as(x), target)


@pytest.mark.costly
def test_rows_in_the_root_of_a_program_travel_and_experts_without_any_have_zero_gradients() -> None:
    pytest.importorskip(
        "transformers.integrations.moe"
    )  # it registers the product by groups that can be traced in fp32
    torch.manual_seed(0)
    program = gp.export(SortedExperts(), (), {"x": torch.randn(8, 6, 16), "target": torch.randn(8, 6, 16)})
    parts = gp.partition(program, gp.plan(program, mesh={"dp_expert": 2}))

    text = parts.files["stage_0.py"]
    assert [text.count(f"{name}(") for name in ("exchange_of", "send_rows", "return_rows")] == [1, 1, 1]
    assert gp.check(parts).problems == []
    assert gp.verify(parts).ok


class AdaptedExperts(SortedExperts):
    """What multiplies rows is no parameter."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        rows, offs = x.flatten(0, 1), torch.arange(1, 5, dtype=torch.int32) * x.shape[0]
        hidden = torch.ops.transformers.grouped_mm_fallback(rows, self.up + self.down.mT, offs)
        return F.mse_loss(hidden.sum(-1).view(*x.shape[:2], 1) + 0 * target, target)


def test_experts_whose_weights_are_computed_are_refused_with_their_line() -> None:
    pytest.importorskip("transformers.integrations.moe")
    program = gp.export(AdaptedExperts(), (), {"x": torch.randn(8, 4, 16), "target": torch.randn(8, 4, 16)})
    with pytest.raises(gp.GraphparError, match=r"computes the weights of its experts \(test_exchange.py:\d+\)"):
        gp.plan(program, mesh={"dp_expert": 2})


@pytest.mark.parametrize(
    ("mesh", "pins", "shares"),
    [({"dp_expert": 2}, None, 1), ({"dp_expert": 4}, None, 1), ({"dp_expert": 2, "tp": 2}, WHOLE, 2)],
    ids=str,
)
def test_what_is_priced_is_each_row_for_an_expert_of_another_rank_once_each_way(
    mesh: dict[str, int], pins: Any, shares: int
) -> None:
    """Of a replica's ranks each sends the rows of its share."""
    program = example("mixtral")
    plan = gp.plan(program, mesh=mesh, shard_plan=pins)
    assert plan.sharded is not None
    local = plan.sharded.local
    works = Works(local, plan.mesh.degrees())
    (block,) = local.blocks.values()

    rows = [row for node in block.graph.nodes for row in works.collectives(node, block.name) if row.axis == "dp_expert"]
    tokens, top_k, width, itemsize = 16 * plan.microbatch_size, 2, 64, 4
    sent = tokens * top_k * width * itemsize // shares
    whole = plan.mesh.dp_expert * sent  # of all ranks; collective_cost sends (n - 1) / n of a rank's
    assert [(row.kind, row.phase) for row in rows] == [
        ("all-to-all", phase) for _ in range(2) for phase in (Phase.FORWARD, Phase.INPUT)
    ]
    assert {row.nbytes.at(plan.microbatch_size) for row in rows} == {whole}


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"dp_expert": 3}, r"has 4 experts, which 3 ranks can't share evenly"),
        ({"dp_expert": 2, "ep": 4}, r"has 4 experts, which the 8 ranks of dp_expert=2 x ep=4 can't share evenly"),
    ],
)
def test_meshes_that_experts_can_not_be_divided_over_are_explained(mesh: dict[str, int], message: str) -> None:
    with pytest.raises(GraphparError, match=message):
        gp.plan(example("mixtral"), mesh=mesh, global_batch=12)


@pytest.mark.costly
def test_experts_are_divided_over_the_ranks_of_several_axes() -> None:
    """Each rank has other experts; of those that a rank of tp or cp has in common with other replicas each has some."""
    program = example("mixtral")
    for mesh, pins in (({"ep": 2}, None), ({"tp": 2}, WHOLE), ({"cp": 2}, OVER_CP)):
        plan = gp.plan(program, mesh={"dp_expert": 2, **mesh}, shard_plan=pins)
        parts = gp.partition(program, plan)
        (axis,) = mesh
        spec = plan.parameters()["model.layers.2.mlp.experts.down_proj"]
        assert (spec["dp_expert"], spec[axis]) == ("S(0)", "S(0)")
        assert gp.check(parts).problems == []
        text = parts.files["blocks.py"]
        assert [text.count(f"{name}(") for name in ("exchange_of", "own_offsets", "send_rows", "return_rows")] == [
            1
        ] * 4
        assert group_axes(plan)["expert"] == ("dp_expert", axis) and "efsdp" not in group_axes(plan)
        assert ranks_of(plan, "expert") == [[0, 1, 2, 3]]
    plan = gp.plan(program, mesh={"dp_shard": 2, "dp_expert": 2})
    assert ranks_of(plan, "efsdp") == ranks_of(plan, "fsdp") == [[0, 2], [1, 3]]


OVERLAID: dict[str, tuple[dict[str, int], Any]] = {
    "ep2": ({"ep": 2}, None),
    "ep4": ({"ep": 4}, None),
    "dp4": ({"dp_expert": 4}, None),
    "dp2 x ep2": ({"dp_expert": 2, "ep": 2}, None),
    "dp2 x tp2": ({"dp_expert": 2, "tp": 2}, {"up": "S(0)@tp", "down": "S(0)@tp"}),
    "dp2 x cp2": ({"dp_expert": 2, "cp": 2}, {"up": "S(0)@cp", "down": "S(0)@cp"}),
    "dp2 x tp2 by features": ({"dp_expert": 2, "tp": 2}, None),
    "dp2 x dp2 x tp2": ({"dp_shard": 2, "dp_expert": 2, "tp": 2}, {"up": "S(0)@tp", "down": "S(0)@tp"}),
    "dp2 x ep4": ({"dp_expert": 2, "ep": 4}, None),
}


@pytest.mark.costly
def test_experts_without_rows_have_zero_gradients_routers_exact_ones_and_only_rows_that_move_are_sent(
    tmp_path: Path, pool: RankPool
) -> None:
    pytest.importorskip("transformers.integrations.moe")
    torch.manual_seed(0)
    model, batch = Idle(), {"x": torch.randn(8, 8, WIDTH), "target": torch.randn(8, 8, WIDTH)}
    program = gp.export(model, (), {name: torch.randn_like(value) for name, value in batch.items()})
    loss = model(**batch)
    loss.backward()
    made = {}
    for name in sample(list(OVERLAID), 2):
        mesh, pins = OVERLAID[name]
        made[name] = gp.partition(program, gp.plan(program, mesh=mesh, shard_plan=pins))

    for name, found in trained(made, model, batch, tmp_path, pool).items():
        assert found.loss == pytest.approx(loss.item(), rel=1e-6), name
        torch.testing.assert_close(
            found.gradients, {key: parameter.grad for key, parameter in model.named_parameters()}
        )
        for key in ("up", "down"):
            assert [expert for expert in range(EXPERTS) if found.gradients[key][expert].any()] == list(CHOSEN), name
        assert found.sent == _sent_bytes(made[name].plan, model.routed(model.first(batch["x"]).flatten(0, 1))[1]), name


def _sent_bytes(plan: gp.Plan, chosen: Tensor) -> list[int]:
    """What each rank sends to others: its rows for experts elsewhere, and back those of others; twice, for gradients; and the counts."""
    mesh, axes = plan.mesh, expert_axes(plan)
    shares = math.prod(mesh.degrees()[axis] for axis in axes if axis != "dp_expert")
    held, replicas = EXPERTS // shares, mesh.dp_expert
    found = []
    for rank in range(mesh.size):
        place = coordinates(rank, mesh.degrees())
        share = sum(place[axis] for axis in axes if axis != "dp_expert")  # one of them has several ranks
        rows = chosen.unflatten(0, (mesh.dp_shard, replicas, -1))[place["dp_shard"]].flatten(1)
        home = (rows % held).where(rows // held == share, -held) // (held // replicas)  # of each row of each replica
        own = place["dp_expert"]
        gone = int(((home[own] >= 0) & (home[own] != own)).sum())
        came = int((home == own).sum() - (home[own] == own).sum())
        counts = (replicas - 1) * (held // replicas) * 8
        found.append((2 * (gone + came) * WIDTH * 4 + counts) * (replicas > 1))
    return found


def test_a_model_without_sorted_rows_is_refused() -> None:
    assert exchangeable(example("gpt")) == {}

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.rand(2, 8, 8))

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.weights.unbind()
            return (x @ first @ second).square().mean()

    assert exchangeable(gp.export(Parts(), (torch.rand(4, 8),))) == {}
    with pytest.raises(GraphparError, match=r"Mesh dp_expert=2: GPT.* has no experts that rows can be sent to"):
        gp.plan(example("gpt"), mesh={"dp_expert": 2})


# ---- faults ----------------------------------------------------------------------------------------------------


def _planted(local: Program, change: str) -> Program:
    """Return ``local`` with a fault in its block."""
    ((name, block),) = local.blocks.items()
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(block.graph, copies))
    for old, new in copies.items():
        new.meta = dict(old.meta)
    found = {operator_name(node): node for node in graph.nodes if node.op == "call_function"}
    sent, back, ends = found["send_rows"], found["return_rows"], found["received_ends"]
    if change == "rows stay":
        sent.replace_all_uses_with(sent.args[0])  # type: ignore[arg-type]
    elif change == "rows do not come back":
        back.replace_all_uses_with(back.args[0])  # type: ignore[arg-type]
    elif change == "own ends":
        for product in [node for node in graph.nodes if operator_name(node) == "grouped_mm"]:
            product.kwargs = product.kwargs | {"offs": ends.args[0].args[0]}  # type: ignore[union-attr]
    elif change == "rows travel twice":
        with graph.inserting_after(sent):
            twice = graph.call_function(expert_rows.send_rows, sent.args)
        sent.replace_all_uses_with(twice)
        twice.args = (sent, *sent.args[1:])
    return local.with_graph(local.graph, blocks={name: replace(block, graph=graph)})


@pytest.mark.parametrize("change", ["rows stay", "rows do not come back", "own ends", "rows travel twice"])
def test_rows_that_are_elsewhere_are_found(change: str) -> None:
    plan = gp.plan(example("mixtral"), mesh={"dp_expert": 2})
    assert plan.sharded is not None
    local, experts = plan.sharded.local, exchangeable(example("mixtral"))

    assert check_exchange(local, experts) == []
    assert check_exchange(_planted(local, change), experts)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        ("expert_rows.py", "torch.empty_like(x).index_copy(0, exchange.order, x)", "x"),
        ("expert_rows.py", "lambda g: _returned(g, axis, exchange)", "lambda g: _returned(g.flip(0), axis, exchange)"),
        ("plan.json", '"dp_expert": "S(0)"', '"dp_expert": "R"'),
    ],
    ids=["an order that is not undone", "gradients of other rows", "experts that are summed over ranks"],
)
@pytest.mark.sampled(1 / 3)
def test_programs_that_exchange_wrongly_fail(file: str, right: str, wrong: str) -> None:
    parts = gp.partition(example("mixtral"), gp.plan(example("mixtral"), mesh={"dp_expert": 2}))
    assert right in parts.files[file]
    planted = replace(parts, files={**parts.files, file: parts.files[file].replace(right, wrong)})

    (outcome,) = verify_all([planted], 2, timeout_s=120)
    assert not outcome.ok
