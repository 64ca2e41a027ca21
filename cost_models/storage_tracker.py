"""``Live``: how many bytes of storages there are at once in a run on fake tensors, from when each is made until it is freed."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def storage_of(tensor: Tensor) -> int:
    """The identity of a tensor's storage, for as long as that lives."""
    return int(tensor.untyped_storage()._cdata)


class Live(TorchDispatchMode):
    """Counts the bytes of the storages that operators make, from then until they are freed.

    ``at``: what is counted for so many bytes, a number or an array of them; by default the bytes.
    """

    def __init__(self, at: Callable[[int], Any] = int) -> None:
        super().__init__()
        self.at = at
        self.now = self.highest = at(0)
        self.known: set[int] = set()
        self.counting = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage_of(item) for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)}
        result = func(*args, **(kwargs or {}))
        for item in tree_leaves(result) if self.counting else ():
            if isinstance(item, Tensor) and storage_of(item) not in given:
                self._made(item.untyped_storage())
        return result

    def _made(self, storage: torch.UntypedStorage) -> None:
        key = int(storage._cdata)
        if key not in self.known:
            nbytes = self.at(storage.nbytes())
            self.known.add(key)
            self.now = self.now + nbytes
            self.highest = np.maximum(self.highest, self.now)
            weakref.finalize(storage, self._freed, key, nbytes)

    def _freed(self, key: int, nbytes: Any) -> None:
        self.known.discard(key)
        self.now = self.now - nbytes

    def turn(self) -> tuple[Any, Any]:
        """The highest since the last turn, and what is there now."""
        highest, self.highest = self.highest, self.now
        return highest, self.now


@contextlib.contextmanager
def unseen(live: Live) -> Iterator[None]:
    live.counting = False
    try:
        yield
    finally:
        live.counting = True
