"""Numbers drawn by key have torch's distributions, are independent, and those of a shard are those of the whole tensor."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from graphpar.emitted import random_streams
from graphpar.emitted.random_streams import exponential, integers, normal, stream, uniform
from graphpar.runtime.stages.compiled import hide_draws
from graphpar.runtime.stages.dropout import sample_keys, step_key

ROWS, COUNT = 40, 2500
BITS = [-3769715151062287458, 8736327421019614616, -3494144769694969340, 2688174654906359599]
STEP = [-2819121811293407272]
FLOATS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor], float, float]] = {
    "uniform": (uniform, torch.rand_like, 0.5, 1 / 12),
    "normal": (normal, torch.randn_like, 0.0, 1.0),
    "exponential": (exponential, lambda x: torch.empty_like(x).exponential_(), 1.0, 1.0),
}


def _distance(one: Tensor, other: Tensor) -> float:
    """The statistic of Kolmogorov and Smirnov: the largest difference between two empirical distributions."""
    values = torch.cat([one, other]).sort().values
    parts = [torch.searchsorted(each.sort().values, values, right=True) / len(each) for each in (one, other)]
    return float((parts[0] - parts[1]).abs().max())


@pytest.mark.parametrize("name", FLOATS)
def test_distributions_are_those_of_torch(name: str) -> None:
    draw, of_torch, mean, variance = FLOATS[name]
    numbers = draw(stream(sample_keys(0, 0, ROWS), 3), [COUNT]).flatten()
    torch.manual_seed(0)

    assert abs(float(numbers.mean()) - mean) < 4 * (variance / numbers.numel()) ** 0.5
    assert float(numbers.var()) == pytest.approx(variance, rel=0.03)
    assert (
        _distance(numbers, of_torch(numbers)) < 1.95 * (2 / numbers.numel()) ** 0.5
    )  # 0.1 % of equal ones are farther apart


def test_integers_are_equally_likely() -> None:
    found = integers(sample_keys(0, 0, ROWS), [COUNT], -3, 4).flatten()

    assert found.dtype == torch.int64
    expected = found.numel() / 7
    counts = torch.bincount(found + 3, minlength=7).double()
    assert counts.numel() == 7
    assert float(((counts - expected) ** 2 / expected).sum()) < 22.5  # chi squared of 6 degrees of freedom, 0.1 %
    wide = integers(sample_keys(0, 0, ROWS), [COUNT], 0, 1 << 60)
    assert len(wide.unique()) == wide.numel()


@pytest.mark.parametrize("name", FLOATS)
def test_rows_streams_steps_and_seeds_are_independent(name: str) -> None:
    draw = FLOATS[name][0]
    keys = [sample_keys(seed, step, 3) for seed, step in ((0, 0), (0, 1), (1, 0))]
    rows = torch.cat([draw(stream(each, number), [4 * COUNT]) for each in keys for number in (0, 1)])
    rows = torch.cat([rows, draw(stream(step_key(0, 0), 0), [4 * COUNT], None)[None]])

    others = torch.corrcoef(rows) - torch.eye(len(rows))
    assert float(others.abs().max()) < 5 / (4 * COUNT) ** 0.5
    shifted = torch.corrcoef(torch.stack([rows[:, 1:].flatten(), rows[:, :-1].flatten()]))
    assert abs(float(shifted[0, 1])) < 5 / rows.numel() ** 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_numbers_fit_their_dtype(dtype: torch.dtype) -> None:
    keys = sample_keys(0, 0, 100)
    numbers = uniform(keys, [1000], dtype=dtype)

    assert numbers.dtype == dtype
    assert float(numbers.min()) >= 0 and float(numbers.max()) < 1
    assert float(exponential(keys, [1000], dtype=dtype).min()) > 0
    assert normal(keys, [1000], dtype=dtype).isfinite().all()
    close = normal(keys, [1000], dtype=torch.float64).to(dtype)
    assert torch.equal(close, normal(keys, [1000], dtype=dtype))


@pytest.mark.parametrize("batch_dim", [0, 1, 2, None])
@pytest.mark.parametrize(
    "draw", [uniform, normal, exponential, lambda *args, **options: integers(*args[:2], 0, 99, *args[2:], **options)]
)
def test_a_shard_has_its_part_of_the_whole(draw: Callable[..., Tensor], batch_dim: int | None) -> None:
    keys = sample_keys(7, 3, 4 if batch_dim is not None else 1)
    size = [6, 4] if batch_dim is not None else [6, 4, 2]
    whole = draw(keys, size, batch_dim)
    dim, other = [place for place in range(3) if place != batch_dim][:2]

    parts: list[Any] = []
    for rank in range(2):
        places: list[random_streams.ShardedDim] = [(dim, rank, 2)]
        parts.append(draw(keys, [3, *size[1:]], batch_dim, sharded=places))
    assert torch.equal(torch.cat(parts, dim), whole)
    periods: list[random_streams.ShardedDim] = [(other, 1, 2, (2, 2))]
    shard = draw(keys, [size[0], 2, *size[2:]], batch_dim, sharded=periods)
    assert torch.equal(shard, whole.index_select(other, torch.tensor([1, 3])))


def test_compiled_code_draws_the_same() -> None:
    """Whole numbers that wrap around are in an operator that compilers don't see into."""
    source = inspect.getsource(random_streams)
    streams: Any = ModuleType("compiled_streams")
    sys.modules["compiled_streams"] = streams
    exec(compile(source, random_streams.__file__, "exec"), streams.__dict__)

    def drawn(keys: Tensor) -> Tensor:
        of_step = streams.exponential(keys[:1], [6, 8], None)
        return (
            streams.normal(streams.stream(keys, 3), [6, 8], sharded=[(1, 1, 2)]) * streams.uniform(keys, [6, 8])
            + of_step
        )

    keys = sample_keys(0, 0, 4)
    expected = drawn(keys)
    hide_draws(streams)
    assert torch.equal(torch.compile(drawn, fullgraph=True, backend="aot_eager")(keys), expected)


def test_numbers_have_the_bits_that_they_always_had() -> None:
    """A checkpoint of a run goes on with the same numbers under another release."""
    assert random_streams.random_bits([2, 2], sample_keys(7, 3, 2), 0).flatten().tolist() == BITS
    assert step_key(7, 3).tolist() == STEP


@pytest.mark.parametrize("dim", [1, 2])
def test_masks_of_shards_of_two_axes_are_those_of_the_whole(dim: int) -> None:
    keys, shape = torch.tensor([7]), [1, 6, 12]
    whole = random_streams.keep_mask(shape, 0.5, keys, 0)
    shape[dim] //= 6
    places = itertools.product(range(2), range(3))
    found = [
        random_streams.keep_mask(shape, 0.5, keys, 0, [(dim, outer, 2), (dim, inner, 3)]) for outer, inner in places
    ]
    assert torch.equal(torch.cat(found, dim), whole)
