"""Which operators a rank computes while rows travel to experts, and what that is priced at."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, fx, nn

import graphpar as gp
from graphpar.cost_models.pricing import Pricing
from graphpar.cost_models.work import Collective, Phase
from graphpar.hardware.cluster import Cluster
from graphpar.hardware.devices import DEVICES, Link
from graphpar.ir.program import Program, operator_name
from graphpar.operators.table import record_of
from graphpar.operators.transitions import SENDS, travelling_beside
from graphpar.passes.planning.prices import pricing_of
from graphpar.report.report import render, report_data
from tests.ranks import shared_expert_script as script
from tests.tools.programs import example

ROWS = 64


class Watched(script.Layer):
    """Counts rows in a buffer, by which its shared expert is scaled, and has a scale that needs no row."""

    seen: Tensor

    def __init__(self, first: bool) -> None:
        super().__init__(first)
        self.register_buffer("seen", torch.ones(()))
        self.scale = nn.Linear(script.WIDTH, script.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x * self.seen)
        self.seen += 1
        return found + self.scale(x * self.seen)


@functools.cache
def traced(layer: type[nn.Module] = script.Layer, first: bool = False) -> Program:
    pytest.importorskip("transformers.integrations.moe")
    torch.manual_seed(0)
    model = script.Shared()
    model.layers = nn.ModuleList(layer(first) for _ in range(script.LAYERS))
    return gp.export(model, (), script.batch(0))


def block_of(program: Program, **pins: Any) -> fx.Graph:
    plan = gp.plan(program, mesh={"dp_expert": 2}, **pins)
    assert plan.sharded is not None
    (block,) = plan.sharded.local.blocks.values()
    return block.graph


@pytest.mark.parametrize("room", [None, 1.5])
@pytest.mark.parametrize("first", [True, False])
def test_each_way_has_half_of_the_products_beside_it_wherever_the_model_computes_them(
    first: bool, room: float | None
) -> None:
    graph = block_of(traced(first=first), expert_room=room)
    starts = [node for node in graph.nodes if travelling_beside(node)]

    assert [operator_name(node) for node in starts] == ["start_send", "start_return"]
    for start, weight in zip(starts, ("up.weight", "down.weight")):
        (product,) = [node for node in travelling_beside(start) if record_of(node).multiplies]
        assert weight in [str(operand.target) for operand in product.all_input_nodes]


def test_without_products_that_need_no_rows_ranks_wait() -> None:
    graph = block_of(example("mixtral"))

    assert [operator_name(node) for node in graph.nodes if operator_name(node) in SENDS] == ["send_rows", "return_rows"]


def test_what_reads_a_buffer_that_is_written_stays_where_it_stands() -> None:
    graph = block_of(traced(Watched))
    nodes = list(graph.nodes)
    writes = next(node for node in nodes if operator_name(node) == "add_")
    (scaled,) = [node for node in nodes if any("scale.weight" in str(each.target) for each in node.all_input_nodes)]

    assert nodes.index(scaled) > nodes.index(writes)
    assert not any(scaled in travelling_beside(node) for node in nodes)


# ---- prices ----------------------------------------------------------------------------------------------------


def priced(rate: float, travelling: bool, kind: str = "A100-SXM-80GB") -> Pricing:
    program, cluster = traced(), replace(Cluster.of(DEVICES[kind], 1, 2), intra_node=Link(0.0, rate))
    plan = gp.plan(program, mesh={"dp_expert": 2})
    execution = replace(pricing_of(program, plan, cluster)[0].execution, travelling=travelling)
    return pricing_of(program, plan, cluster, execution)[0]


@pytest.mark.parametrize("rate", [1e4, 1e7, 1e9, 1e13])
def test_rows_take_the_time_that_products_beside_them_leave(rate: float) -> None:
    beside, waiting = priced(rate, True), priced(rate, False)
    rows = [
        row
        for unit in beside.units
        for row in unit.kind.work.rows
        if isinstance(row, Collective) and row.kind == "all-to-all"
    ]

    assert {row.phase for row in rows} == {Phase.FORWARD, Phase.INPUT} and all(row.beside for row in rows)
    for row in rows:
        others = sum(beside.of_units.compute.alone_s(each, ROWS) for each in row.beside)
        sent = beside.of_units.sent_s(row, ROWS)
        assert beside.of_units.exposed_s(row, ROWS) == pytest.approx(max(0.0, sent - others))
        assert {each.phase for each in row.beside} == (
            {Phase.FORWARD} if row.phase is Phase.FORWARD else {Phase.INPUT, Phase.WEIGHT}
        )
    stages = [pricing.stage_seconds(0, len(pricing.units), ROWS) for pricing in (beside, waiting)]
    assert stages[0].sent == stages[1].sent
    hidden = [sum(stage.exposed.values()) for stage in stages]
    assert hidden[0] < hidden[1]
    total = [stage.forward + stage.backward for stage in stages]
    assert total[1] - total[0] == pytest.approx(hidden[1] - hidden[0], rel=1e-6)


def test_the_report_says_how_often_rows_travel_beside_products() -> None:
    program = traced()
    data = report_data(gp.partition(program, gp.plan(program, mesh={"dp_expert": 2})).compilation)

    assert (data["experts"]["moves"], data["experts"]["beside"]) == (2 * script.LAYERS, 2 * script.LAYERS)
    console = Console(width=200)
    with console.capture() as captured:
        render(data, console, "out")
    assert f"rows travel {2 * script.LAYERS} times, {2 * script.LAYERS} of them overlapped with products" in " ".join(
        captured.get().split()
    )


def test_compiled_blocks_overlap_forwards_and_backwards() -> None:
    program, cluster = traced(), Cluster.of(DEVICES["A100-SXM-80GB"], 1, 2)
    plan = gp.plan(program, mesh={"dp_expert": 2})
    execution = replace(pricing_of(program, plan, cluster)[0].execution, travelling=True, compiled=True)
    rows = [row for unit in pricing_of(program, plan, cluster, execution)[0].units for row in unit.kind.work.rows]
    moves = [row for row in rows if isinstance(row, Collective) and row.kind == "all-to-all"]

    assert {(row.phase, bool(row.beside)) for row in moves} == {(Phase.FORWARD, True), (Phase.INPUT, True)}
