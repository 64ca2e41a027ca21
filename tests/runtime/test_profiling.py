"""A record of a GPU's allocations, also of a loop that fails, and garbage that is collected at chosen steps only."""

from __future__ import annotations

import gc
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from graphpar.runtime.training import profiling


def test_allocations_are_recorded_from_the_beginning_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **given: calls.append(given))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda file: calls.append(file))
    monkeypatch.setattr(profiling.dist, "get_rank", lambda: 3)
    args = Namespace(profile=None, profile_folder=None, memory_snapshot=tmp_path / "memory", gc_every=None)
    instruments = profiling.Instruments(args, torch.device("cuda"))
    assert calls == []
    instruments.open()
    instruments.begin(0)
    instruments.close()  # as where a step fails
    file = tmp_path / "memory" / "rank3.pickle"
    assert calls == [{"max_entries": profiling.RECORDED}, str(file), {"enabled": None}] and file.parent.is_dir()


def test_garbage_is_collected_after_each_nth_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []
    args = Namespace(profile=None, profile_folder=None, memory_snapshot=None, gc_every=3)
    instruments = profiling.Instruments(args, torch.device("cpu"))
    instruments.open()
    for step in range(7):
        monkeypatch.setattr(gc, "collect", lambda step=step: collected.append(step))
        instruments.begin(step)
        assert not gc.isenabled()
        instruments.end(step)
    instruments.close()
    assert collected == [2, 5] and gc.isenabled()
