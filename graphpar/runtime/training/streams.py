"""Batches of data that has no index: which examples of an iterable make each global batch, and how it goes on after a restart.

iterable ──every rank reads all of it──► global batches 0, 1, 2, ... ──rows of this replica──► this rank's inputs
   └─ its state_dict(), or how many examples were taken ──► checkpoint.json ──► the next batch, under any plan
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.training.collate import Collator

_TENSOR = "__tensor__"
"""The one key of a dict that stands for a tensor in JSON."""


class Stream:
    """This rank's part of each global batch of an iterable, which every rank reads as a whole, so that no plan changes the order.

    When it ends, it begins again, told ``set_epoch(epoch)`` if it has that. An incomplete last batch is dropped.

    Args:
        source: of examples, or a DataLoader of global batches.
        rows: of this replica.
        first: how many batches are passed over at the beginning, unless a state is loaded.
        once: end when it ends.
    """

    def __init__(
        self, source: Any, collate: Collator, batch: int, rows: slice, first: int = 0, once: bool = False
    ) -> None:
        self._source, self._collate, self._size, self._rows, self._once = source, collate, batch, rows, once
        self._batches = isinstance(source, DataLoader)
        self._epoch, self._taken, self._skip = 0, 0, first * batch
        self._items: Iterator[Any] | None = None
        self._checked = False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> dict[str, Tensor]:
        if self._items is None:
            self._items = self._begun()
        while (found := self._read(self._items)) is None:
            if self._once:
                raise StopIteration
            self._epoch, self._taken = self._epoch + 1, self._checked_epoch(self._taken)
            self._items = self._begun()
        if not self._checked:  # before the time of training is spent
            self.state_dict()
            self._checked = True
        return found

    def _begun(self) -> Iterator[Any]:
        """Begin an epoch, or a later one, and pass over what was taken of it."""
        each = self._size if self._batches else 1  # examples of an item
        while True:
            if hasattr(self._source, "set_epoch"):
                self._source.set_epoch(self._epoch)
            items: Iterator[Any] = iter(self._source)
            passed = sum(1 for _ in itertools.islice(items, self._skip // each))
            if passed == self._skip // each:
                self._taken, self._skip = self._taken + self._skip, 0
                return items
            self._checked_epoch(used := passed * each // self._size * self._size)
            self._skip, self._epoch = self._skip - used, self._epoch + 1

    def _checked_epoch(self, taken: int) -> int:
        """Check that an epoch that ended had a batch, else there may be no end of epochs; returns what is taken of the next."""
        if not taken:
            raise RuntimeProgramError(
                f"the dataset ended in epoch {self._epoch} before it had a batch of {self._size} examples; it must have as many, and begin "
                "again each time it is iterated over"
            )
        return 0

    def _read(self, items: Iterator[Any]) -> dict[str, Tensor] | None:
        """Read a batch; None where the epoch has no more."""
        found = list(itertools.islice(items, 1 if self._batches else self._size))
        if len(found) < (1 if self._batches else self._size):
            return None
        self._taken += self._size
        if self._batches:
            return self._collate.of_batch(found[0])
        return self._collate((self._epoch, self._taken), found[self._rows])

    def state_dict(self) -> dict[str, Any]:
        """Return where it is, as JSON has it: with the state of the source, if it has one.

        Raises:
            RuntimeProgramError: that can't be written as JSON.
        """
        state = self._source.state_dict() if hasattr(self._source, "state_dict") else None
        return {"epoch": self._epoch, "taken": self._taken, "source": _plain(state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was; examples of a source without a state are read again and passed over."""
        self._epoch, self._items, self._skip = state["epoch"], None, 0
        if state["source"] is not None:
            self._source.load_state_dict(_restored(state["source"]))
            self._taken = state["taken"]
        else:
            self._skip = state["taken"]


def _plain(value: Any) -> Any:
    """Return a state as JSON has it, tensors as dicts of one key."""
    if isinstance(value, Tensor):
        return {_TENSOR: [str(value.dtype).removeprefix("torch."), value.tolist()]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise RuntimeProgramError(
        f"state_dict() of the dataset has a {type(value).__name__}, which a checkpoint can't hold: it needs numbers, text, tensors, and "
        "lists and dicts of them"
    )


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(each) for each in value]
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            dtype, values = value[_TENSOR]
            return torch.tensor(values, dtype=getattr(torch, dtype))
        return {key: _restored(each) for key, each in value.items()}
    return value
