"""Products whose factors say their sizes: counted in flops, priced as products, and not repeated along a cut sequence."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import graphpar as gp
from graphpar.cost_models.flops import node_flops
from graphpar.cost_models.work import Phase, Product
from graphpar.cost_models.workload import Works
from graphpar.operators.table import record_of

PRODUCTS = {
    "einsum, batched": lambda x, w: torch.einsum("bsk,kn->bsn", x, w),
    "einsum of two activations": lambda x, w: torch.einsum("bsk,btk->bst", x, x @ w),
    "einsum over rows of heads": lambda x, w: torch.einsum("bshd,hde->bshe", x.unflatten(-1, (2, 4)), w.view(2, 4, 8)),
    "einsum of three": lambda x, w: torch.einsum("bsk,kn,nm->bsm", x, w, w),
    "einsum with dots": lambda x, w: torch.einsum("...k,kn->...n", x, w),
    "linear": lambda x, w: F.linear(x, w),
    "matmul": lambda x, w: x @ w,
    "matmul of heads": lambda x, w: (
        (x @ w).unflatten(-1, (2, 4)).transpose(1, 2) @ x.unflatten(-1, (2, 4)).permute(0, 2, 3, 1)
    ),
    "addmm": lambda x, w: torch.addmm(w[0], x.flatten(0, 1), w),
    "conv1d": lambda x, w: F.conv1d(x.mT, w.view(8, 8, 1)),
    "conv1d by groups": lambda x, w: F.conv1d(x.mT, w.view(16, 4, 1), groups=2),
    "conv_transpose1d": lambda x, w: F.conv_transpose1d(x.mT, w.view(8, 4, 2), stride=2),
    "conv_transpose1d by groups": lambda x, w: F.conv_transpose1d(x.mT, w.view(8, 4, 2), groups=2),
    "baddbmm": lambda x, w: torch.baddbmm(x, x, w.expand(x.size(0), -1, -1)),
    "tensordot": lambda x, w: torch.tensordot(x, w, dims=([2], [0])),
}


class Applied(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(8, 8)), [function]

    def forward(self, x: Tensor) -> Tensor:
        return self.function[0](x, self.weight)  # type: ignore[operator, no-any-return]


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("name", PRODUCTS)
def test_flops_are_those_that_torch_counts(name: str) -> None:
    model, x = Applied(PRODUCTS[name]), torch.randn(4, 6, 8)
    program = gp.export(model, (x,), loss_fn=lambda y: y.sum())
    with FlopCounterMode(display=False) as counter:
        model(x)

    products = sum(flops for node, flops in node_flops(program, 4).items() if _is_product(node))

    assert products == counter.get_total_flops()


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("name", PRODUCTS)
def test_work_has_as_many_flops_as_that(name: str) -> None:
    program = gp.export(Applied(PRODUCTS[name]), (torch.randn(4, 6, 8),), loss_fn=lambda y: y.sum())
    total = sum(flops for node, flops in node_flops(program, 4).items() if _is_product(node))

    rows = Works(program, {}).of(program.graph).rows
    products = [(row, n) for row, n in rows.items() if isinstance(row, Product) and row.phase is Phase.FORWARD]

    assert sum(2 * n * row[1].at(4) * row.m.at(4) * row.n.at(4) * row.k.at(4) for row, n in products) == total


def _is_product(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and record_of(node).multiplies


def test_a_product_is_divided_along_the_sequence() -> None:
    """As a product of ``matmul`` is: what is repeated on every rank of cp would be said to be."""
    program = gp.export(
        Applied(PRODUCTS["einsum, batched"]), (torch.randn(4, 6, 8),), loss_fn=lambda y: y.square().mean()
    )

    plan = gp.plan(program, mesh={"cp": 2})

    assert not plan.sharding.undivided and gp.verify(gp.partition(program, plan), steps=1).ok
