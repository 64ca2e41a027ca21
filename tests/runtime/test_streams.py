"""Iterables of examples: each replica has its rows of the same batches, and a restart goes on with the next example."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.training.streams import Stream


class Plain(IterableDataset[int]):
    """Examples 0 to 10 of epoch 0, 100 to 110 of epoch 1, and so on."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self.epoch, 100 * self.epoch + 11))


class Stateful(Plain):
    """Knows its position itself; reads nothing twice."""

    at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 11:
            self.at += 1
            yield 100 * self.epoch + self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "generator": torch.tensor([1, 2], dtype=torch.uint8), "more": [None, {"x": 1.5}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["generator"], torch.tensor([1, 2], dtype=torch.uint8)) and state["more"][1]["x"] == 1.5
        self.at = state["at"]


class Collator:
    def __call__(self, place: object, examples: list[int]) -> list[int]:
        return examples

    def of_batch(self, batch: Tensor) -> list[int]:
        return batch.tolist()


def stream(source: Any, batch: int = 4, rows: slice = slice(0, 4), **options: Any) -> Any:
    return Stream(source, Collator(), batch, rows, **options)  # type: ignore[arg-type]


EXPECTED = [[0, 1, 2, 3], [4, 5, 6, 7], [100, 101, 102, 103], [104, 105, 106, 107], [200, 201, 202, 203]]


@pytest.mark.parametrize("kind", [Plain, Stateful])
def test_replicas_have_their_rows_of_all_epochs(kind: type[Plain]) -> None:
    assert list(itertools.islice(stream(kind()), 5)) == EXPECTED
    parts = [list(itertools.islice(stream(kind(), rows=slice(at, at + 2)), 5)) for at in (0, 2)]
    assert [a + b for a, b in zip(*parts)] == EXPECTED
    for first in range(5):
        assert list(itertools.islice(stream(kind(), first=first), 5 - first)) == EXPECTED[first:]
    assert list(stream(kind(), once=True)) == EXPECTED[:2]


@pytest.mark.parametrize("kind", [Plain, Stateful])
def test_a_restart_goes_on_with_the_next_example_also_with_another_batch(kind: type[Plain]) -> None:
    for place in range(5):
        before = stream(kind())
        assert list(itertools.islice(before, place)) == EXPECTED[:place]
        state = json.loads(json.dumps(before.state_dict()))
        after = stream(kind(), first=99)
        after.load_state_dict(state)
        assert list(itertools.islice(after, 5 - place)) == EXPECTED[place:]
    other = stream(kind(), batch=3, rows=slice(0, 3))
    assert list(itertools.islice(other, 1)) == [[0, 1, 2]]
    after = stream(kind())
    after.load_state_dict(json.loads(json.dumps(other.state_dict())))
    assert list(itertools.islice(after, 3)) == [[3, 4, 5, 6], [7, 8, 9, 10], [100, 101, 102, 103]]


def test_a_loader_of_batches() -> None:
    def loader() -> DataLoader[int]:
        return DataLoader(Plain(), batch_size=4, drop_last=True)

    expected = [*EXPECTED[:2], *EXPECTED[:2]]
    whole = stream(loader(), rows=slice(0, 2))
    assert list(itertools.islice(whole, 4)) == expected
    assert list(itertools.islice(stream(loader(), first=3), 1)) == expected[3:]


def test_what_can_not_go_on_is_refused() -> None:
    with pytest.raises(RuntimeProgramError, match="ended in epoch 0 before it had a batch of 12 examples"):
        next(stream(Plain(), batch=12))
    with pytest.raises(RuntimeProgramError, match="ended in epoch 1 before"):
        list(stream(iter(range(8))))
    source = Stateful()
    source.state_dict = lambda: {"of": torch.Generator()}  # type: ignore[method-assign]
    with pytest.raises(RuntimeProgramError, match="has a Generator, which a checkpoint can't hold"):
        next(stream(source))
