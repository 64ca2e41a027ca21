"""Rows that travel to the ranks of their experts and back, on 4 ranks, against one process that has all experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from tests.ranks import exchange_script as fixture
from tests.ranks.exchange_script import EXPERTS, LOADS, WIDTH, inputs
from tests.tools.rank_pool import RankPool

RANKS = 4


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> list[dict[str, Tensor]]:
    return _ran(tmp_path_factory.mktemp("ranks"), pool, "eager", *LOADS)


def _ran(folder: Path, pool: RankPool, *arguments: str) -> list[dict[str, Tensor]]:
    pool.torchrun(Path(fixture.__file__), [str(folder), *arguments], nproc=RANKS, timeout_s=120)
    return [load_file(folder / f"rank_{rank}.safetensors") for rank in range(RANKS)]


@pytest.mark.parametrize("name", LOADS)
def test_rows_get_what_their_experts_make_of_them_and_gradients_are_whole(
    results: list[dict[str, Tensor]], name: str
) -> None:
    _check(results, name)


def test_padding_changes_nothing_and_stays_zero_even_where_what_is_behind_rows_is_nan(
    tmp_path: Path, pool: RankPool
) -> None:
    results = _ran(tmp_path, pool, "room", *LOADS)
    for name in LOADS:
        _check(results, name)


@pytest.mark.costly
@pytest.mark.sampled(1 / 5)
@pytest.mark.parametrize("name", LOADS)
def test_the_exchange_with_room_compiles_whole(name: str, tmp_path: Path, pool: RankPool) -> None:
    _check(_ran(tmp_path, pool, "compiled room", name, "uneven"), name)


@pytest.mark.costly
@pytest.mark.sampled(1 / 5)
@pytest.mark.parametrize("name", LOADS)
def test_the_exchange_compiles_whole(name: str, tmp_path: Path, pool: RankPool) -> None:
    _check(_ran(tmp_path, pool, "compiled", name, "uneven"), name)  # sizes change


def _check(results: list[dict[str, Tensor]], name: str) -> None:
    rows, _, up, down, upstream = inputs(name)
    loads = torch.tensor(LOADS[name])
    order = torch.cat([torch.arange(EXPERTS).repeat_interleave(load) for load in loads]).argsort(stable=True)
    x, offs = torch.cat(rows).requires_grad_(), loads.sum(0).cumsum(0, dtype=torch.int32)
    h = F.silu(F.grouped_mm(x[order], up.requires_grad_(), offs=offs))
    y = torch.empty_like(x).index_copy(0, order, F.grouped_mm(h, down.requires_grad_(), offs=offs))
    y.backward(torch.cat(upstream))

    def whole(key: str) -> Tensor:
        return torch.cat([rank[f"{name}/{key}"] for rank in results])

    for key, expected in (("y", y.detach()), ("x", x.grad), ("up", up.grad), ("down", down.grad)):
        torch.testing.assert_close(whole(key), expected)
    idle = [expert for expert in range(EXPERTS) if not loads[:, expert].any()]
    assert not whole("up")[idle].any() and not whole("down")[idle].any()


@pytest.mark.parametrize("name", LOADS)
def test_each_rank_sends_the_rows_that_move_twice_each_way_and_nothing_else(
    results: list[dict[str, Tensor]], name: str
) -> None:
    per_rank = EXPERTS // RANKS
    moved = torch.tensor(LOADS[name]).unflatten(1, (RANKS, per_rank)).sum(2)  # [from, to]
    for rank in range(RANKS):
        gone = int(moved[rank].sum() - moved[rank, rank])  # forward, and as gradients of what came back
        came = int(moved[:, rank].sum() - moved[rank, rank])  # sent back, and as gradients
        counts = (RANKS - 1) * per_rank * 8
        assert int(results[rank][f"{name}/sent"]) == 2 * (gone + came) * WIDTH * 2 + counts
