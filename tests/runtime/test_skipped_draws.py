"""Random numbers that are skipped: what is drawn after them is what torch draws after it has drawn them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpar.runtime.stages import skipped_draws
from graphpar.runtime.stages.initialise import initial_values
from graphpar.runtime.stages.skipped_draws import skip, words
from tests.ranks import initial_values_script
from tests.ranks.initial_values_script import SOME, Stages
from tests.tools.rank_pool import RankPool

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def jumps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Jump over the fewest, too; returns how many words each jump left out."""
    found: list[int] = []
    jump = skipped_draws._jump

    def noted(generator: torch.Generator, count: int) -> None:
        found.append(count)
        jump(generator, count)

    monkeypatch.setattr(skipped_draws, "_DRAWN", 0)
    skipped_draws._is_known.cache_clear()
    monkeypatch.setattr(skipped_draws, "_jump", noted)
    return found


def generators() -> tuple[torch.Generator, torch.Generator]:
    return torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)


def next_numbers(generator: torch.Generator) -> list[Tensor]:
    return [torch.empty(1).normal_(generator=generator), torch.rand(1500, generator=generator)]


@pytest.mark.parametrize("before", [0, 1, 623, 624, 700])
@pytest.mark.parametrize("count", [1, 623, 624, 625, 20_000, 3_000_000])
def test_a_generator_goes_on_where_it_would_be(before: int, count: int) -> None:
    one, other = generators()
    for generator in (one, other):
        torch.rand(before, generator=generator)
    torch.rand(count, generator=one)
    skip(other, count)
    assert all(map(torch.equal, next_numbers(one), next_numbers(other)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(15,), (16,), (17,), (31,), (7, 9), (40, 16)], ids=str)
@pytest.mark.parametrize("operator", [aten.normal_.default, aten.uniform_.default], ids=str)
def test_what_an_operator_draws_is_known_or_not(operator: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Also beside the second number of a pair, which is kept for the next normal number."""
    count = words(operator, shape, dtype)
    if count is None:  # as few as are drawn one by one, and what this version of torch does otherwise
        assert math.prod(shape) < 16 or (
            dtype.itemsize == 2 and math.prod(shape) % 16 and operator is aten.normal_.default
        )
        return
    one, other = generators()
    for generator in (one, other):
        torch.empty(1).normal_(generator=generator)
    operator(torch.empty(shape, dtype=dtype), generator=one)
    skip(other, count)
    assert all(map(torch.equal, next_numbers(one), next_numbers(other)))


def test_a_rank_draws_its_own_weights_alone_and_they_are_those_of_the_model(jumps: list[int]) -> None:
    torch.manual_seed(3)
    expected = Stages().state_dict()
    for names in (
        {"layers.5.weight", "after"},
        {"words.weight"},
        {"apart", "layers.1.bias"},
        {"last"},
        {"few", "order"},
        *({name} for name in expected),
    ):
        found = dict(initial_values(Stages, 3, names))
        assert found.keys() == names
        assert not [name for name, value in found.items() if not torch.equal(value, expected[name])]
    assert max(jumps) > 20 * 24 * 4  # several layers at once


def test_values_that_are_abandoned_change_no_draws_of_others() -> None:
    """An error keeps a half-used iterator alive until the garbage collector ends it, at any moment."""
    torch.manual_seed(3)
    expected = Stages().state_dict()
    abandoned = initial_values(Stages, 3)
    next(abandoned)
    torch.manual_seed(5)
    wanted = torch.rand(4)
    torch.manual_seed(5)
    drawn = [torch.rand(2)]
    name, value = next(abandoned)
    assert torch.equal(value, expected[name])
    abandoned.close()  # type: ignore[attr-defined]
    assert torch.equal(torch.cat([*drawn, torch.rand(2)]), wanted)


def test_what_torch_draws_otherwise_than_assumed_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skipped_draws, "_count", lambda *_: 17)
    skipped_draws._is_known.cache_clear()
    assert words(aten.uniform_.default, (64,), torch.float32) is None
    skipped_draws._is_known.cache_clear()


def _columns() -> Tensor:
    weight = torch.empty(20, 24)
    nn.init.normal_(weight[:, 8:16])
    return weight[:, 8:16]


def _of_another_dtype() -> Tensor:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return torch.randn(33) + torch.full((33,), 0.1) + torch.linspace(0, 1, 33)
    finally:
        torch.set_default_dtype(before)


def _of_the_seed() -> Tensor:
    return torch.randn(40, generator=torch.Generator().manual_seed(torch.initial_seed() + 1))


def _twice_from_one_generator() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.cat([torch.randn(40, generator=generator), torch.rand(3, generator=generator)])


ODD: dict[str, Callable[[], Tensor]] = {
    "as many as values say": lambda: torch.poisson(torch.arange(30.0)),
    "of drawn values": lambda: torch.poisson(torch.rand(30) * 20),
    "gamma": lambda: torch.distributions.Gamma(torch.rand(9) + 0.1, 1.0).sample(),
    "dirichlet": lambda: torch.distributions.Dirichlet(torch.full((5,), 0.2)).sample(),
    "binomial": lambda: torch.binomial(torch.full((9,), 40.0), torch.rand(9)),
    "multinomial": lambda: torch.multinomial(torch.arange(30.0), 10).float(),
    "rrelu": lambda: nn.functional.rrelu(torch.arange(-30.0, 30.0), training=True),
    "rrelu in place": lambda: nn.functional.rrelu(torch.arange(-30.0, 30.0), training=True, inplace=True),
    "dropout in place": lambda: nn.functional.dropout(torch.arange(30.0), 0.3, inplace=True),
    "into what it takes": lambda: (lambda p: torch.bernoulli(p, out=p))(torch.full((30,), 0.4)),
    "transposed": lambda: torch.empty(20, 17).t().normal_(),
    "like a transposed one": lambda: torch.randn_like(torch.empty(20, 17).t()),
    "every third": lambda: torch.zeros(20, 60)[:, ::3].normal_(),
    "columns": _columns,
    "channels last": lambda: torch.empty(4, 3, 5, 5).to(memory_format=torch.channels_last).normal_(),
    "another default dtype": _of_another_dtype,
    "the default generator by name": lambda: torch.randn(40, generator=torch.default_generator),
    "a seed beside the seed": _of_the_seed,
    "a generator of its own": _twice_from_one_generator,
}


@pytest.mark.parametrize("name", ODD)
def test_odd_draws_leave_those_after_them_as_they_are(name: str) -> None:
    def build() -> nn.Module:
        model = nn.Module()
        model.before, model.own, model.after = nn.Linear(9, 9), nn.Parameter(ODD[name]()), nn.Linear(9, 20)
        return model

    torch.manual_seed(3)
    expected = build().state_dict()
    for names in (list(expected), ["own"], ["after.weight", "after.bias"]):
        found = dict(initial_values(build, 3, names))
        assert [key for key in names if not torch.equal(found[key], expected[key])] == []


def test_ranks_that_want_the_same_weights_draw_each_a_share(tmp_path: Path, pool: RankPool) -> None:
    pool.torchrun(Path(initial_values_script.__file__), [str(tmp_path)], nproc=3, timeout_s=120)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    for case, names in (("all", Stages().state_dict()), ("some", SOME)):
        assert all(rank[case]["names"] == sorted(names) and rank[case]["differ"] == [] for rank in ranks)
    drawn = [rank["all"]["draws"] for rank in ranks]
    whole = ranks[0]["all"]["whole"]
    assert max(drawn) < 0.6 * whole, (drawn, whole)
    assert [rank["error"] for rank in ranks] == ["rank 1: ValueError: there is no such file"] * 3
