"""Which rank of dp_shard updates which parameter: every parameter has one owner, and loads are as even as can be."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphpar as gp
from graphpar.ir.owners import contiguous, longest_first, owners

SIZES = st.lists(st.integers(1, 40), max_size=7)
LOADS = st.lists(st.integers(0, 30), min_size=1, max_size=4)


def _filled(sizes: list[int], loads: list[int], ranks: list[int]) -> list[int]:
    return [load + sum(size for size, at in zip(sizes, ranks) if at == rank) for rank, load in enumerate(loads)]


@given(SIZES, LOADS)
def test_no_runs_have_a_smaller_largest_load(sizes: list[int], loads: list[int]) -> None:
    ranks = contiguous(sizes, loads)

    assert ranks == sorted(ranks) and len(ranks) == len(sizes)
    every = itertools.combinations_with_replacement(range(len(loads)), len(sizes))
    assert max(_filled(sizes, loads, ranks)) == min(max(_filled(sizes, loads, list(other))) for other in every)


@given(SIZES, LOADS)
def test_longest_first_is_within_a_parameter_of_even(sizes: list[int], loads: list[int]) -> None:
    ranks = longest_first(sizes, loads)

    filled = _filled(sizes, loads, ranks)
    even = sum(filled) / len(filled)
    assert max(filled) <= max(even + max(sizes, default=0), *loads)


def test_equal_blocks_are_spread_evenly() -> None:
    for assign in (contiguous, longest_first):
        assert _filled([100] * 8, [0] * 4, assign([100] * 8, [0] * 4)) == [200] * 4


def test_frozen_parameters_have_no_owner() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    for parameter in model[:3].parameters():
        parameter.requires_grad_(False)
    program = gp.export(model, (torch.randn(4, 4),), loss_fn=lambda o: o.square().mean())

    found = owners(program, [list(program.parameters)], 3, "contiguous")

    assert set(found) == {name for name, info in program.parameters.items() if info.requires_grad}
    assert sorted(found.values()) == [0, 0, 1, 1, 2, 2]
    assert owners(program, [list(program.parameters)], 3, "flat") == {}


def test_what_several_stages_hold_has_one_owner() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    program = gp.export(model, (torch.randn(4, 4),), loss_fn=lambda o: o.square().mean())

    found = owners(program, [["0.weight", "1.weight"], ["0.weight", "2.weight"]], 2, "contiguous")

    assert (found["0.weight"], found["1.weight"], found["2.weight"]) == (0, 1, 1)
