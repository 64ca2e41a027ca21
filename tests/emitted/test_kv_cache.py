"""Attention with a cache gives each position of a window what attention of the whole sequence gives it."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn import functional as F

from graphpar.emitted import kv_cache

LENGTH = 23


def _widths(seed: int) -> list[int]:
    """Widths of windows, LENGTH positions together: wide and narrow, in any order."""
    chosen, widths = random.Random(seed), []
    while left := LENGTH - sum(widths):
        widths.append(min(left, chosen.choice([1, 1, 1, 2, 3, 5, 9, 23])))
    return widths


@pytest.mark.parametrize("sliding_window", [None, 1, 2, 5, 8, LENGTH - 1, LENGTH, 40])
def test_windows_of_any_width_see_what_the_whole_sequence_shows_them(sliding_window: int | None) -> None:
    torch.manual_seed(1)
    query = torch.randn(2, 4, LENGTH, 8)
    key, value = torch.randn(2, 2, 2, LENGTH, 8)
    behind = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    shown = (behind >= 0) & (behind < (sliding_window or LENGTH))
    wanted = F.scaled_dot_product_attention(query, key, value, shown, enable_gqa=True)
    options = {"enable_gqa": True, "sliding_window": sliding_window}
    whole = kv_cache.cached_attention(query, key, value, LENGTH, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(whole, wanted)
    for seed in range(12):
        cache, position, made = kv_cache.KeyValueCache(), 0, []
        for width in _widths(seed):
            cache.begin(position, False)
            kv_cache.bind(cache)
            try:
                parts = (each.narrow(2, position, width) for each in (query, key, value))
                made.append(kv_cache.cached_attention(*parts, LENGTH, **options))  # type: ignore[arg-type]
            finally:
                kv_cache.bind(None)
            position += width
        torch.testing.assert_close(torch.cat(made, 2), wanted)
        room = min(LENGTH, sliding_window or LENGTH)
        assert cache.nbytes == 2 * (2 * 2 * room * 8) * 4


def test_a_cache_takes_no_more_positions_than_it_has_room_for() -> None:
    cache = kv_cache.KeyValueCache()
    cache.begin(6, False)
    with pytest.raises(ValueError, match="room for 8 positions"):
        cache.append(torch.ones(1, 3, 2), torch.ones(1, 3, 2), 8, 4)
