"""Attention dropout by torch's own kernel: its rate, its mean, its gradients, and which calls draw alike."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from graphpar.emitted import random_streams, recomputation
from graphpar.runtime.stages.dropout import Drawn, sample_keys
from graphpar.verification.seeds import seed_problems

P, ROWS, HEADS, LENGTH, WIDTH = 0.2, 2, 3, 16, 8
KEYS = sample_keys(0, 0, 8)


def operands(seed: int = 0, requires_grad: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (ROWS, HEADS, LENGTH, WIDTH)
    return [torch.randn(shape, generator=generator).requires_grad_(requires_grad) for _ in range(3)]


def attention(query: Tensor, key: Tensor, value: Tensor, keys: Tensor = KEYS[:ROWS], **options: Any) -> Tensor:
    return random_streams.dropout_attention(query, key, value, keys, None, P, kernel=True, **options)


def plain(query: Tensor, key: Tensor) -> Tensor:
    return (query @ key.transpose(-2, -1) / math.sqrt(WIDTH)).softmax(-1)


def mask(query: Tensor, key: Tensor, **options: Any) -> Tensor:
    """Which weights are kept: with the identity as the value, attention returns its weights."""
    identity = torch.eye(LENGTH).expand(ROWS, HEADS, -1, -1)
    with torch.no_grad():
        return attention(query, key, identity, **options) != 0


def test_it_keeps_its_share_and_scales_it() -> None:
    query, key, _ = operands()
    kept = torch.stack([mask(query, key, keys=random_streams.stream(KEYS[:ROWS], n)) for n in range(50)])
    spread = math.sqrt(P * (1 - P) / kept.numel())
    assert abs(kept.double().mean() - (1 - P)) < 5 * spread
    assert (kept.double().mean(0) - (1 - P)).abs().max() < 6 * math.sqrt(P * (1 - P) / 50)  # at each place
    weights = attention(query, key, torch.eye(LENGTH).expand(ROWS, HEADS, -1, -1))
    expected = plain(query, key) * mask(query, key) / (1 - P)
    assert torch.allclose(weights, expected, atol=1e-6)


def test_the_mean_of_many_draws_is_attention_without() -> None:
    query, key, value = operands()
    draws = torch.stack([attention(query, key, value, random_streams.stream(KEYS[:ROWS], n)) for n in range(400)])
    expected = plain(query, key) @ value
    error = (draws.mean(0) - expected).abs() / (draws.std(0) / math.sqrt(len(draws)))
    assert error.max() < 6
    assert torch.allclose(attention(query, key, value, training=False), expected, atol=1e-6)


PLACES: dict[str, dict[str, Any]] = {
    "": {},
    "other rows": {"keys": KEYS[2:4]},
    "another operator": {"keys": random_streams.stream(KEYS[:ROWS], 1)},
    "another step": {"keys": sample_keys(0, 1, ROWS)},
    "another seed": {"keys": sample_keys(1, 0, ROWS)},
    "the first heads of two": {"sharded": [(1, 0, 2)]},
    "the last heads of two": {"sharded": [(1, 1, 2)]},
    "a part of the rows": {"sharded": [(0, 1, 2)]},
    "a part of the queries": {"sharded": [(2, 1, 2)]},
    "heads and queries": {"sharded": [(1, 1, 2), (2, 1, 2)]},
}


def test_other_tensors_have_other_masks_and_the_same_the_same() -> None:
    query, key, _ = operands()
    masks = {name: mask(query, key, **options) for name, options in PLACES.items()}
    for (one, first), (other, second) in itertools.combinations(masks.items(), 2):
        share = float((first == second).double().mean())
        chance = P**2 + (1 - P) ** 2
        assert abs(share - chance) < 6 * math.sqrt(chance * (1 - chance) / first.numel()), (one, other)
    for name, options in PLACES.items():
        assert torch.equal(masks[name], mask(query, key, **options)), name


def test_the_generator_stays_as_it_was() -> None:
    query, key, value = operands()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    attention(query, key, value)
    assert torch.equal(torch.rand(4), expected)


RECOMPUTED: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Tensor]]] = {
    "none": lambda forward: forward,
    "full": lambda forward: recomputation.checkpointed(forward),
    "selective": lambda forward: recomputation.checkpointed(forward, recomputation.selected),
    "all but what products keep": lambda forward: recomputation.checkpointed(
        forward, recomputation.listed_in({"product": (0,), "aten.bmm": (0, 1), "aten._softmax": (0,)})
    ),
}


@pytest.mark.parametrize("kind", RECOMPUTED)
def test_gradients_are_those_of_a_loop_with_the_same_mask(kind: str) -> None:
    given = operands(requires_grad=True)
    torch.manual_seed(5)
    found = RECOMPUTED[kind](attention)(*given)
    torch.rand(3)  # what others draw in between
    gradients = torch.autograd.grad(found.square().sum(), given)
    query, key, value = again = operands(requires_grad=True)
    expected = (plain(query, key) * mask(query, key) / (1 - P)) @ value
    wanted = torch.autograd.grad(expected.square().sum(), again)
    assert torch.allclose(found, expected, atol=1e-5)
    for one, other in zip(gradients, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-4, rtol=1e-4)


# ---- what verify makes of seeds ---------------------------------------------------------------------------------

MESH = {"pp": 1, "dp_replicate": 2, "tp": 2}
A, B, C, D = (
    Drawn.of(number, torch.randn(4, 5, generator=torch.Generator().manual_seed(number))) for number in range(4)
)


def with_seed(drawn: Drawn, seed: int) -> list[Drawn]:
    return [Drawn(seed, drawn.elements, drawn.norm, drawn.product)]


def test_seeds_as_they_must_be_are_no_problem() -> None:
    assert not seed_problems([[A], [B], [C], [D]], MESH)  # heads and rows divided
    assert not seed_problems([[A], [A], [C], [C]], MESH)  # heads on every rank
    assert not seed_problems([[A, A], [B, B], [C, C], [D, D]], MESH)  # recomputed


def test_one_seed_for_different_tensors_is_a_problem() -> None:
    for wrong in (
        [[A], with_seed(B, 0), [C], [D]],
        [[A], [B], with_seed(C, 0), with_seed(D, 1)],
        [[A, *with_seed(B, 0)]] * 4,
    ):
        (problem,) = seed_problems(wrong, MESH)
        assert "same seed" in problem


def test_other_seeds_for_one_tensor_are_a_problem() -> None:
    (problem,) = seed_problems([[A], with_seed(A, 7), [C], [C]], MESH)
    assert "different seeds on ranks 0 and 1" in problem
    (problem,) = seed_problems([[A], [], [C], [C]], MESH)
    assert "rank 1 0 times" in problem
    (problem,) = seed_problems([[], [], [], []], MESH)
    assert "no rank drew" in problem
