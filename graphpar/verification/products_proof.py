"""The functions of a program's ``parallel_products.py`` and ``ring_products.py`` against collectives and products, on numbers.

    each rank is a thread; what ranks send is exchanged between threads ──► results and gradients of all ranks ──► those of whole tensors

For ``check``, which takes the types of these functions from their docstrings.
"""

from __future__ import annotations

import functools
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


def product_problems(module: ModuleType, degree: int) -> list[str]:
    """Return what is wrong with the functions of ``module``; nothing where they do what they should."""
    count, rings = min(degree, _MOST), module.__name__.endswith("ring_products")
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> list[Tensor]:
        """A tensor for each rank."""
        made = torch.randn(count, *shape, generator=draw, dtype=torch.float64)
        return [each.requires_grad_() for each in made.unbind()]

    rows, columns = (2, 2, 3), (4, 3)
    xs, weights, others, biases = drawn(*rows), drawn(*columns), drawn(*columns), drawn(4)
    ups = [drawn(2, 2 * count, 4) for _ in range(2)]
    hidden, up = drawn(2, 2 * count, 3), drawn(2, 2, 4)
    alike = [drawn(2, 2 * count, 3)[0]] * count

    def named(name: str) -> Any:
        return getattr(module, f"ring_{name}" if rings else name)

    def gathered(rank: int) -> Made:
        leaves = [xs[rank], weights[rank], others[rank], biases[rank]]
        made = named("gathered_products")(leaves[0], leaves[1:3], AXIS, dim=1, biases=[leaves[3], None])
        return [*made, *torch.autograd.grad(made, leaves, [each[rank] for each in ups])]

    def gathered_by_whole() -> list[Made]:
        whole = torch.cat(xs, 1)
        made = [[F.linear(whole, w, b), F.linear(whole, other)] for w, other, b in zip(weights, others, biases)]
        return _all_gradients(made, [xs, weights, others, biases], list(zip(*ups)))

    def scattered(rank: int) -> Made:
        made = named("scattered_product")(hidden[rank], weights[rank], AXIS, dim=1)
        return [made, *torch.autograd.grad(made, [hidden[rank], weights[rank]], up[rank])]

    def scattered_by_whole() -> list[Made]:
        pieces = sum(map(F.linear, hidden, weights), torch.zeros(())).chunk(count, 1)
        return _all_gradients([[piece] for piece in pieces], [hidden, weights], [[each] for each in up])

    def gathered_in_order(rank: int) -> Made:
        leaves = [xs[rank], weights[rank], others[rank], biases[rank]]
        made = module.gathered_products(leaves[0], leaves[1:3], AXIS, dim=1, biases=[leaves[3], None], in_order=True)
        return [*made, *torch.autograd.grad(made, leaves, [each[rank] for each in ups])]

    def shared(rank: int) -> Made:
        leaves = [alike[rank], weights[rank], others[rank], biases[rank]]
        made = module.shared_products(leaves[0], leaves[1:3], AXIS, biases=[leaves[3], None])
        return [*made, *torch.autograd.grad(made, leaves, [each[rank] for each in ups])]

    def shared_by_whole() -> list[Made]:
        made = [[F.linear(alike[0], w, b), F.linear(alike[0], other)] for w, other, b in zip(weights, others, biases)]
        return _all_gradients(made, [alike[:1] * count, weights, others, biases], list(zip(*ups)))

    proofs = {
        "gathered_products": (gathered, gathered_by_whole),
        "gathered_products in order": (gathered_in_order, gathered_by_whole),
        "scattered_product": (scattered, scattered_by_whole),
        "shared_products": (shared, shared_by_whole),
    }
    return [
        f"{module.__name__.rpartition('.')[2]}.py: on {count} ranks {name} {problem}"
        for name, (function, by_whole) in proofs.items()
        if hasattr(module, f"ring_{name}" if rings else name.split()[0])
        and (problem := _difference(_on_ranks(module, function, count), by_whole()))
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
    posted: list[Any] = [None] * count
    made: list[Made] = [[] for _ in range(count)]
    wrong: list[str] = []

    def exchanged(item: Any) -> list[Any]:
        """What each rank gives, for all of them."""
        posted[own.rank] = item
        barrier.wait(_PATIENCE_S)
        came = list(posted)
        barrier.wait(_PATIENCE_S)
        return came

    def begun(sent: Tensor, came: Tensor) -> Tensor:
        """What comes is there when it is waited for, and not a number before."""
        result = torch.full_like(came, torch.nan)
        own.waiting[result.untyped_storage().data_ptr()] = result, came, sent, sent.detach().clone()
        return result

    def done(x: Tensor) -> Tensor:
        if begun := own.waiting.pop(x.untyped_storage().data_ptr(), None):
            result, came, sent, before = begun
            assert torch.equal(sent, before), "what is sent is not there yet, or is written meanwhile"
            with torch.no_grad():
                result.copy_(came)
        return x

    def all_to_all(x: Tensor, of: list[int], to: list[int], group: str) -> Tensor:
        came = [sent.split(sizes)[own.rank] for sent, sizes in exchanged((x.detach().clone(), to))]
        assert [piece.numel() for piece in came] == of, "a rank waits for other pieces than are sent"
        return begun(x, torch.cat(came))

    def all_gather(x: Tensor, ranks: int, group: str) -> Tensor:
        return begun(x, torch.cat(exchanged(x.detach().clone())))

    def summed(x: Tensor, operation: str) -> Tensor:
        assert operation == "sum", f"ranks take the {operation} and not the sum"
        total: Tensor = functools.reduce(torch.add, exchanged(x.detach().clone()))
        return total

    def all_reduce(x: Tensor, operation: str, group: str) -> Tensor:
        return begun(x, summed(x, operation))

    def reduce_scatter(x: Tensor, operation: str, ranks: int, group: str) -> Tensor:
        return begun(x, summed(x, operation).chunk(ranks)[own.rank])

    def run(rank: int) -> None:
        own.rank, own.waiting = rank, {}
        try:
            made[rank] = function(rank)
        except threading.BrokenBarrierError:
            wrong.append("leaves a rank waiting for another")
        except Exception as error:
            wrong.insert(0, f"fails: {type(error).__name__}: {error}")
            barrier.abort()

    operators = SimpleNamespace(
        all_to_all_single=all_to_all,
        all_gather_into_tensor=all_gather,
        all_reduce=all_reduce,
        reduce_scatter_tensor=reduce_scatter,
    )
    replaced: dict[str, Any] = {"_done": done, "_operators": operators, "_axes": {AXIS: ("", count, 0)}}
    if hasattr(module, "rank"):
        replaced |= {"rank": lambda axis: own.rank, "size": lambda axis: count}
    with mock.patch.multiple(module, create=True, **replaced):
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return wrong[0] if wrong else made
