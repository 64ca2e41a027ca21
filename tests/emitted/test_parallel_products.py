"""Products with their collectives in one process: what they compute on several ranks, and what a rank sends."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor

from graphpar.emitted import parallel_products
from graphpar.operators.transitions import collective_cost
from graphpar.verification.products_proof import product_problems


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_they_are_the_collectives_and_the_products(degree: int) -> None:
    assert product_problems(parallel_products, {"tp": degree}) == []


def sent_by(function: Callable[[], Tensor], degree: int) -> list[int]:
    """The bytes that a rank sends to others in a forward and in its backward."""
    found = [0, 0]
    own = degree - 1

    def all_to_all(x: Tensor, of: list[int], to: list[int], group: str) -> Tensor:
        found[-1] += x.element_size() * (sum(to) - to[own])
        return torch.zeros(sum(of))

    with mock.patch.multiple(
        parallel_products,
        rank=lambda axis: own,
        size=lambda axis: degree,
        _done=lambda x: x,
        _operators=SimpleNamespace(all_to_all_single=all_to_all),
        _axes={"tp": ("", degree, own)},
    ):
        result = function()
        forward, found[-1] = found[-1], 0
        result.sum().backward()
    return [forward, found[-1]]


@pytest.mark.parametrize("degree", [2, 4])
def test_a_rank_sends_the_bytes_of_the_collectives(degree: int) -> None:
    weights = [torch.randn(6, 5, requires_grad=True), torch.randn(7, 5, requires_grad=True)]
    piece, whole = torch.randn(2, 3, 5, requires_grad=True), torch.randn(2, 3 * degree, 5, requires_grad=True)

    gathered = sent_by(lambda: torch.cat(parallel_products.ring_gathered_products(piece, weights, "tp", 1), 2), degree)
    scattered = sent_by(lambda: parallel_products.ring_scattered_product(whole, weights[0], "tp", 1), degree)

    made = 4 * 2 * 3 * degree * 6
    for sent, nbytes in ((gathered, whole.nbytes), (scattered, made)):
        assert sent == [collective_cost(kind, nbytes, degree).bytes_sent for kind in ("all-gather", "reduce-scatter")]
