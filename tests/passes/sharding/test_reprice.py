"""The search's price of a program is that of the program which comes out, walked node by node with every instance."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from graphpar.cost_models.sharding import ShardingCosts
from graphpar.ir.program import Program, operator_name
from graphpar.ir.sharding import Sharding
from graphpar.passes.sharding.costs import Workload
from graphpar.passes.sharding.lowering import lower
from graphpar.passes.sharding.problem import build_problem
from graphpar.passes.sharding.search import search
from graphpar.passes.sharding.solution import sharding_of
from tests.passes.sharding.test_search import MODELS, of_example, small
from tests.tools.programs import example
from tests.tools.repricing import Repricing
from tests.tools.samples import drawn

MESHES = ({"tp": 2}, {"tp": 4}, {"cp": 2}, {"cp": 2, "tp": 2})
EXAMPLES = ("bert", "gpt", "gpt2_tiny", "llama", "mixtral", "t5", "transformer", "two_towers", "vit")


@functools.cache
def ready(name: str) -> Program:
    return small(name) if name in MODELS else of_example(example(name))


def found(
    name: str, degrees: dict[str, int], rows: int, costs: ShardingCosts | None = None
) -> tuple[Sharding, Repricing]:
    program = ready(name)
    workload = Workload(rows, 2, program.mode == "train")
    sharding = sharding_of(search(build_problem(program, degrees), workload, costs))
    return sharding, Repricing(lower(program, sharding), degrees, workload, costs)


@pytest.mark.sampled(1 / 2)
@pytest.mark.parametrize(
    ("name", "degrees"), drawn([(name, mesh) for name in (*MODELS, *EXAMPLES) for mesh in MESHES], 14, 18)
)
def test_the_program_costs_what_the_search_said(name: str, degrees: dict[str, int]) -> None:
    for rows in (2, 4096) if name in MODELS else (4096,):  # latency counts, bandwidth counts
        sharding, prices = found(name, degrees, rows)

        total = prices.total()

        for part, seconds in sharding.cost.items():
            assert total[part] == pytest.approx(seconds, rel=1e-6, abs=1e-15), part


@pytest.mark.parametrize(
    "degrees",
    [{"tp": 2}, *(pytest.param(each, marks=pytest.mark.costly) for each in ({"tp": 4}, {"cp": 2, "tp": 2}))],
    ids=str,
)
def test_sums_of_gradients_that_products_hide_cost_what_the_program_does(degrees: dict[str, int]) -> None:
    """Norms stand before all products of this model, so each reads what no other operator does."""
    slow = ShardingCosts(flops_per_s=1e12)  # every sum is shorter than the products beside it
    for costs in (ShardingCosts(), slow):
        sharding, prices = found("llama", degrees, 4096, replace(costs, hides=True))
        waiting, others = found("llama", degrees, 4096, costs)

        assert prices.total()["transitions"] == pytest.approx(sharding.cost["transitions"], rel=1e-6)
        assert sum(sharding.cost.values()) < sum(waiting.cost.values()) * (1 - 1e-4)
        assert sum(prices.total().values()) <= sum(others.total().values())


def test_a_transition_that_is_left_out_is_missed() -> None:
    sharding, prices = found("llama", {"tp": 2}, 4)
    graph = next(iter(prices.program.blocks.values())).graph
    transition = next(node for node in graph.nodes if "transition" in node.meta)
    transition.replace_all_uses_with(transition.all_input_nodes[0])
    graph.erase_node(transition)

    assert prices.total()["transitions"] < sharding.cost["transitions"] * (1 - 1e-3)


def test_a_loss_over_cut_classes_has_its_all_reduces_forward_alone() -> None:
    """The two-rank ring sends all of what it reduces: a number a row, then two; starting each costs a latency more."""
    _, prices = found("gpt", {"tp": 2}, 4096)
    loss = next(node for node in prices.program.graph.nodes if operator_name(node) == "vocab_cross_entropy")

    sent = prices.sent(loss)

    rows = 4096 * 16
    assert sent is not None and (sent.forward_bytes, sent.backward_bytes) == (12 * rows, 0)
    assert sent.seconds == pytest.approx(2 * 3 * 8e-6 + 12 * rows / 200e9)
