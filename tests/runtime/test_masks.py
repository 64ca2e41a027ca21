"""Dropout masks: the bits that they have had from the first, the memory that they take, and the kernel that draws them on a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphpar.emitted import random_streams
from graphpar.runtime import sample_keys
from graphpar.runtime.stages.dropout import draw_in_one_kernel

SHARDED: list[random_streams.ShardedDim] = [(1, 1, 2), (2, 0, 2, (4, 2))]
KEYS, LAST = [6941816081952330462, 1441866766024221811], -3188569133404839069
MASKS = [(0, False, 11459681), (0, True, 3642532), (2, False, 14204067), (2, True, 1240498)]
"""The batch's dim, whether the mask is of a shard, and its bits as a number."""


def test_masks_and_keys_have_the_bits_that_they_always_had() -> None:
    """A checkpoint of a run with dropout goes on with the same masks under another release."""
    keys = sample_keys(7, 3, 2)
    assert keys.tolist() == KEYS
    assert sample_keys(-1, 2**40, 1).tolist() == [LAST]
    for batch_dim, sharded, number in MASKS:
        shape = [2, 4, 3] if batch_dim == 0 else [4, 3, 2]
        mask = random_streams.keep_mask(shape, 0.5, keys, batch_dim, SHARDED if sharded else ())
        assert sum(bit << place for place, bit in enumerate(mask.flatten().tolist())) == number
    assert keys.tolist() == KEYS


class Made(TorchDispatchMode):
    """Adds up the bytes of what operators return in new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if (
            isinstance(found, torch.Tensor)
            and not func._schema.name.endswith("_")
            and func._schema.returns[0].alias_info is None
        ):
            self.bytes += found.numel() * found.itemsize
        return found


def test_a_mask_is_hashed_in_place() -> None:
    """Written out, too: each shift is new, and the counters once; it was 264 bytes an element."""
    shape, keys = [4, 64, 256], torch.arange(4)
    with Made() as made:
        random_streams.keep_mask(shape, 0.1, keys, 0)
    assert made.bytes / (4 * 64 * 256) < 8 * 5 + 1 + 1


def test_the_kernel_is_put_in_its_place_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, streams = SimpleNamespace(drawn=object()), ModuleType("emitted_for_masks.random_streams")
    streams.drawn = random_streams.drawn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, streams.__name__, streams)
    monkeypatch.setitem(sys.modules, "graphpar.runtime.stages.mask_kernel", kernel)
    monkeypatch.setattr("graphpar.runtime.stages.mask_kernel", kernel, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    draw_in_one_kernel("emitted_for_masks", torch.device("cpu"))
    assert streams.drawn is random_streams.drawn
    draw_in_one_kernel("emitted_without_dropout", torch.device("cuda"))
    draw_in_one_kernel("emitted_for_masks", torch.device("cuda"))
    assert streams.drawn is kernel.drawn


INTERPRETED = """
import torch
from graphpar.emitted import random_streams
from graphpar.runtime.stages import mask_kernel
for shape, batch_dim, sharded in (([2, 4, 6], 0, [(1, 1, 2), (2, 0, 2, (4, 2))]), ([3, 5], 1, []), ([7], 0, []), ([2, 3, 1030], 0, [])):
    keys = torch.arange(shape[batch_dim]) * 3**30
    drawn = [random_streams.keep_mask(shape, 0.3, keys, batch_dim, sharded)]
    random_streams.drawn, plain = mask_kernel.drawn, random_streams.drawn
    drawn.append(random_streams.keep_mask(shape, 0.3, keys, batch_dim, sharded))
    random_streams.drawn = plain
    assert torch.equal(*drawn), shape
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_has_the_same_bits() -> None:
    subprocess.run([sys.executable, "-c", INTERPRETED], env={**os.environ, "TRITON_INTERPRET": "1"}, check=True)
