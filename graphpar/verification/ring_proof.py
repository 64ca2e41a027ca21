"""The functions of an emitted ``ring_products.py`` against the collectives and products that they stand for, on numbers.

    each rank is a thread; what ranks send is exchanged between threads ──► results and gradients of all ranks ──► those of whole tensors

For ``check``, which takes the types of these functions from their docstrings.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

AXIS = "ring"
_MOST = 4
"""Ranks of a proof: the functions treat all alike, so that no longer ring shows more."""
_PATIENCE_S = 10.0

Made = list[Tensor]
"""The results of a rank, and the gradients of its operands."""


def ring_problems(module: ModuleType, degree: int) -> list[str]:
    """Return what is wrong with the functions of ``module``; nothing where they do what they should."""
    count = min(degree, _MOST)
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> list[Tensor]:
        """A tensor for each rank."""
        made = torch.randn(count, *shape, generator=draw, dtype=torch.float64)
        return [each.requires_grad_() for each in made.unbind()]

    rows, columns = (2, 2, 3), (4, 3)
    xs, weights, others, biases = drawn(*rows), drawn(*columns), drawn(*columns), drawn(4)
    ups = [drawn(2, 2 * count, 4) for _ in range(2)]
    hidden, up = drawn(2, 2 * count, 3), drawn(2, 2, 4)

    def gathered(rank: int) -> Made:
        leaves = [xs[rank], weights[rank], others[rank], biases[rank]]
        made = module.gathered_products(leaves[0], leaves[1:3], AXIS, dim=1, biases=[leaves[3], None])
        return [*made, *torch.autograd.grad(made, leaves, [each[rank] for each in ups])]

    def gathered_by_whole() -> list[Made]:
        whole = torch.cat(xs, 1)
        made = [[F.linear(whole, w, b), F.linear(whole, other)] for w, other, b in zip(weights, others, biases)]
        return _all_gradients(made, [xs, weights, others, biases], list(zip(*ups)))

    def scattered(rank: int) -> Made:
        made = module.scattered_product(hidden[rank], weights[rank], AXIS, dim=1)
        return [made, *torch.autograd.grad(made, [hidden[rank], weights[rank]], up[rank])]

    def scattered_by_whole() -> list[Made]:
        pieces = sum(map(F.linear, hidden, weights), torch.zeros(())).chunk(count, 1)
        return _all_gradients([[piece] for piece in pieces], [hidden, weights], [[each] for each in up])

    proofs = {"gathered_products": (gathered, gathered_by_whole), "scattered_product": (scattered, scattered_by_whole)}
    return [
        f"ring_products.py: on {count} ranks {name} {problem}"
        for name, (function, by_whole) in proofs.items()
        if (problem := _difference(_on_ranks(module, function, count), by_whole()))
    ]


def _all_gradients(made: Sequence[Sequence[Tensor]], leaves: Sequence[list[Tensor]], ups: Sequence[Any]) -> list[Made]:
    """Return each rank's results and the gradients of its leaves, by all results together."""
    flat = [result for results in made for result in results]
    found = [
        torch.autograd.grad(flat, each, [up for of_rank in ups for up in of_rank], retain_graph=True) for each in leaves
    ]
    return [[*results, *gradients] for results, gradients in zip(made, zip(*found))]


def _difference(found: list[Made] | str, expected: list[Made]) -> str:
    if isinstance(found, str):
        return found
    results = len(expected[0]) - sum(tensor.grad_fn is None for tensor in expected[0])
    for ours, theirs in zip(found, expected):
        for place, (one, other) in enumerate(zip(ours, theirs)):
            if one.shape != other.shape or not torch.allclose(one, other):
                return f"gives {'other results' if place < results else 'other gradients'} than the collective and the products"
    return ""


def _on_ranks(module: ModuleType, function: Callable[[int], Made], count: int) -> list[Made] | str:
    """Run ``function`` for every rank, each in a thread; return what was made, or what went wrong."""
    own, barrier = threading.local(), threading.Barrier(count)
    posted: list[tuple[Tensor, list[int]]] = [(torch.empty(0), [])] * count
    made: list[Made] = [[] for _ in range(count)]
    wrong: list[str] = []

    def all_to_all(x: Tensor, of: list[int], to: list[int], group: str) -> Tensor:
        posted[own.rank] = x.detach(), to
        barrier.wait(_PATIENCE_S)
        came = [sent.split(sizes)[own.rank] for sent, sizes in posted]
        barrier.wait(_PATIENCE_S)
        assert [piece.numel() for piece in came] == of, "a rank waits for other pieces than are sent"
        return torch.cat(came)

    def run(rank: int) -> None:
        own.rank = rank
        try:
            made[rank] = function(rank)
        except threading.BrokenBarrierError:
            wrong.append("leaves a rank waiting for another")
        except Exception as error:
            wrong.insert(0, f"fails: {type(error).__name__}: {error}")
            barrier.abort()

    with mock.patch.multiple(
        module,
        rank=lambda axis: own.rank,
        size=lambda axis: count,
        _done=lambda x: x,
        _operators=SimpleNamespace(all_to_all_single=all_to_all),
        _axes={AXIS: ("", count, 0)},
    ):
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return wrong[0] if wrong else made
