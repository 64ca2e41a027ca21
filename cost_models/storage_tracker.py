"""``Live``: the bytes of storages that exist at once in a run on fake tensors."""

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
    """Return the identity of a tensor's storage, valid as long as that exists."""
    return int(tensor.untyped_storage()._cdata)


class Live(TorchDispatchMode):
    """Counts the bytes of the storages that operators make, until they are freed.

    ``at``: what to count for a storage of so many bytes, a number or an array; by default the bytes.
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

    def mark(self) -> tuple[Any, Any]:
        """Return the highest count since the last mark, and the count now."""
        highest, self.highest = self.highest, self.now
        return highest, self.now


@contextlib.contextmanager
def unseen(live: Live) -> Iterator[None]:
    """Ignore storages that are made inside."""
    live.counting = False
    try:
        yield
    finally:
        live.counting = True
