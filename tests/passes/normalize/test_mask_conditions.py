"""What is said of a mask is what it shows, however it is put together."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import graphpar as gp
from graphpar.ir.program import Program
from graphpar.passes.normalize.causal_masks import Masks
from graphpar.passes.normalize.graph_matching import is_call
from graphpar.passes.normalize.mask_conditions import conditions_of
from graphpar.passes.step import Step

LENGTH, HIDDEN, SMALLEST = 6, float("-inf"), torch.finfo(torch.float32).min
LATER = torch.full((LENGTH, LENGTH), HIDDEN).triu(1)

Mask = Callable[[Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask, self.scale = mask, nn.Parameter(torch.ones(()))

    def forward(self, documents: Tensor, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x * self.scale, x, x, self.mask(documents)).square().sum()


def truths(draw: random.Random, depth: int) -> Mask:
    """A mask of booleans."""
    if not depth:
        places = torch.arange(LENGTH)
        leaves: list[Mask] = [
            lambda d: d[:, None, :, None] == d[:, None, None],
            lambda d: d[:, None, :, None] != d[:, None, None],
            lambda d: torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(),
            lambda d: places > places[:, None],
            lambda d: (d > 0)[:, None, None],
        ]
        return draw.choice(leaves)
    a, b, c, x = *(truths(draw, depth - 1) for _ in range(3)), numbers(draw, depth - 1)
    ways: list[Mask] = [
        lambda d: ~a(d),
        lambda d: a(d) & b(d),
        lambda d: a(d).logical_or(b(d)).logical_not(),
        lambda d: ~(a(d) | ~b(d)),
        lambda d: torch.where(a(d), b(d), c(d)),
        lambda d: a(d) ^ b(d),
        lambda d: x(d) == 0,
        lambda d: x(d).bool(),
        lambda d: a(d).masked_fill(b(d), False),
    ]
    return draw.choice(ways)


def numbers(draw: random.Random, depth: int) -> Mask:
    """A mask that is added, or what one is made of."""
    if not depth:
        return draw.choice([lambda d: LATER, lambda d: torch.zeros(LENGTH, LENGTH), lambda d: torch.ones(6, 6).tril()])
    a, x, y = truths(draw, depth - 1), numbers(draw, depth - 1), numbers(draw, depth - 1)
    ways: list[Mask] = [
        lambda d: torch.where(a(d), 0.0, HIDDEN),
        lambda d: torch.where(a(d), x(d), SMALLEST),
        lambda d: x(d) + y(d),
        lambda d: a(d).float(),
        lambda d: 1 - x(d),
        lambda d: x(d) * y(d),
        lambda d: (1.0 - a(d).float()) * -1e9,
        lambda d: x(d).masked_fill(a(d), torch.tensor(HIDDEN)),
    ]
    return draw.choice(ways)


class Values(fx.Interpreter):
    """Runs the nodes before attention, and keeps what each gives."""

    def __init__(self, program: Program, documents: Tensor) -> None:
        super().__init__(nn.Module(), graph=program.graph)
        self.program, self.values = program, dict[fx.Node, Tensor]()
        self.documents = documents

    def run_node(self, n: fx.Node) -> Tensor:
        if n.op == "placeholder":
            value = self.documents
        elif n.op == "get_attr":
            value = self.program.constants.get(str(n.target), torch.ones(()))
        elif n.op == "output" or n.target is torch.ops.aten.scaled_dot_product_attention.default:
            return torch.ones(())
        else:
            value = super().run_node(n)
        self.values[n] = value
        return value


def _kept(steps: dict[str, Program], step: Step, program: Program) -> None:
    steps[step.name] = program


@pytest.mark.parametrize("seed", range(4))
def test_conditions_are_what_a_mask_shows(seed: int) -> None:
    draw, taken_apart = random.Random(seed), 0
    for _ in range(12):
        make = draw.choice([truths, numbers])(draw, draw.choice([1, 2, 3]))
        documents = torch.randint(3, (4, LENGTH), generator=torch.Generator().manual_seed(seed))
        steps: dict[str, Program] = {}
        gp.export(
            Model(make), (documents, torch.randn(4, 1, LENGTH, 2)), skip=("idioms",),
            after_pass=functools.partial(_kept, steps),
        )  # fmt: skip
        program = steps["simplify"]
        node = next(n for n in program.graph.nodes if is_call(n, "scaled_dot_product_attention"))
        mask = node.args[3]
        found = conditions_of(mask, LENGTH, Masks(program))
        if [each.node for each in found] == [mask]:
            continue
        taken_apart += 1
        values = Values(program, documents)
        values.run(documents, torch.ones(()))
        whole = values.values[mask]
        shown = torch.ones_like(whole, dtype=torch.bool)
        for each in found:
            value = each.of(values.values[each.node])
            value = value.view(-1, *shown.shape[1:-2], *value.shape[-2:]) if value.ndim == 3 else value
            shown = shown & value
        expected = whole if whole.dtype == torch.bool else whole == 0
        assert torch.equal(shown, expected)
        assert whole.dtype == torch.bool or bool((whole[~shown] <= -1e9).all())
    assert taken_apart > 2
