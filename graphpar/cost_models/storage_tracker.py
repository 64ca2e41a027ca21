"""``Live``: the bytes of storages that exist at once in a run on fake tensors."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

_DEVICE = torch.ops.prim.device.default


def storage_of(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, valid as long as that exists."""
    return int(tensor.untyped_storage()._cdata)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among what an operator takes or makes, also those in its lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


class Live(TorchDispatchMode):
    """Counts the bytes of the storages that operators make, until they are freed.

    ``at``: what to count for a storage of so many bytes, a number or an array; by default the bytes. ``highest_beyond``: the highest count
    with what :meth:`add_beyond` was told of.
    """

    def __init__(self, at: Callable[[int], Any] = int) -> None:
        super().__init__()
        self.at = at
        self.now = self.highest = self.beyond = self.highest_beyond = at(0)
        self.known: set[int] = set()
        self.counting = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.counted(func, args, kwargs or {})

    def counted(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operator, and count the storages of its results that are not those of its arguments."""
        given = {storage_of(tensor) for tensor in _tensors((*args, *kwargs.values()))}
        result = run(*args, **kwargs)
        for tensor in _tensors((result,)) if self.counting else ():
            if storage_of(tensor) not in given:
                self._made(tensor.untyped_storage())
        return result

    def _made(self, storage: torch.UntypedStorage) -> None:
        key = int(storage._cdata)
        if key not in self.known:
            nbytes = self.at(storage.nbytes())
            self.known.add(key)
            self.now = self.now + nbytes
            self.highest = np.maximum(self.highest, self.now)
            self.highest_beyond = np.maximum(self.highest_beyond, self.now + self.beyond)
            weakref.finalize(storage, self._freed, key, nbytes)

    def _freed(self, key: int, nbytes: Any) -> None:
        self.known.discard(key)
        self.now = self.now - nbytes

    def add_beyond(self, nbytes: int) -> None:
        """Count so many bytes from now on that no operator has made."""
        self.beyond = self.beyond + self.at(nbytes)

    def mark(self) -> tuple[Any, Any]:
        """Return the highest count since the last mark, and the count now."""
        highest, self.highest = self.highest, self.now
        self.highest_beyond = self.now + self.beyond
        return highest, self.now


class CountedFakes(FakeTensorMode):
    """A mode of fake tensors that lets a :class:`Live` count what operators make, in half of the time of one mode inside of the other."""

    def __init__(self) -> None:
        super().__init__()
        self._live: Live | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and what keeps torch.compile out takes a tenth of an operator's time

    @contextlib.contextmanager
    def counted_by(self, live: Live) -> Iterator[None]:
        """Have ``live`` count within the block."""
        self._live = live
        try:
            yield
        finally:
            self._live = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # of three operators two ask for that, which makes nothing
            return self.dispatch(func, types, args, kwargs or {})
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # as on real tensors; fake ones would get a storage more

        def run(*args: Any, **kwargs: Any) -> Any:
            return self.dispatch(func, types, args, kwargs)

        live, self._live = self._live, None  # what an operator runs inside is not seen
        if live is None:
            return run(*args, **(kwargs or {}))
        try:
            return live.counted(run, args, kwargs or {})
        finally:
            self._live = live


@contextlib.contextmanager
def unseen(live: Live) -> Iterator[None]:
    """Ignore storages that are made inside."""
    live.counting = False
    try:
        yield
    finally:
        live.counting = True
