"""A SIGTERM is noted once, and reaches all ranks by a sum that a step makes anyway."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from graphpar.runtime import distributed
from graphpar.runtime.distributed import STOP_GRACE_S, Ranks, StopSignal

OTHERS = 3


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """What is summed over the ranks, of which the others hold the same."""
    found: list[Tensor] = []

    def all_reduce(value: Tensor, **_: object) -> None:
        found.append(value.clone())
        value *= OTHERS + 1

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    before = signal.getsignal(signal.SIGTERM)
    yield found
    signal.signal(signal.SIGTERM, before)


def _stop(device: str = "cpu") -> StopSignal:
    return StopSignal(Ranks(0, OTHERS + 1, 0, torch.device(device), "gloo"))


def test_it_travels_with_the_norm(sums: list[Tensor]) -> None:
    stop, square = _stop(), torch.tensor(2.0, dtype=torch.float64)
    assert stop.summed(square) == 8.0 and not stop.received()
    signal.raise_signal(signal.SIGTERM)
    assert stop.summed(square) == 8.0 and stop.received()
    assert [value.tolist() for value in sums] == [[2.0, 0.0], [2.0, 1.0]]


def test_a_step_without_a_norm_has_a_sum_of_its_own(sums: list[Tensor]) -> None:
    stop = _stop()
    signal.raise_signal(signal.SIGTERM)
    assert stop.received() and len(sums) == 1


def test_on_a_gpu_no_rank_waits_for_the_step_under_way(sums: list[Tensor]) -> None:
    """What a step has counted is read after the next one, by all ranks."""
    stop, found = _stop("cuda"), []
    for step in range(4):
        if step == 1:
            signal.raise_signal(signal.SIGTERM)
        stop.summed(torch.ones(()))
        found.append(stop.received())
    assert found == [False, False, True, True]


def test_repeats_are_ignored_while_a_rank_saves(sums: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    now, ended = [0.0], []
    monkeypatch.setattr(distributed.time, "monotonic", lambda: now[0])
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stop = _stop()
    for now[0] in (1.0, 1.02, 1.5, STOP_GRACE_S):
        signal.raise_signal(signal.SIGTERM)
    now[0] = STOP_GRACE_S + 2.0
    monkeypatch.setattr(signal, "raise_signal", lambda number: ended.append((number, signal.getsignal(number))))
    stop._note(signal.SIGTERM, None)
    assert ended == [(signal.SIGTERM, signal.SIG_DFL)]
    signal.signal(signal.SIGTERM, before)
