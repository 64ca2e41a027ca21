"""Storages of a run on fake tensors: which of them autograd keeps, what a block does to them, and how many there are at once.

saved-tensor hooks ──► Kept       the storages that backwards want, each once
a block's first run ─► Template   the same for its other instances, without running them
every operator ──────► Live       bytes from when a storage is made until it is freed
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def storage_of(tensor: Tensor) -> int:
    """The identity of a tensor's storage, for as long as that lives."""
    return int(tensor.untyped_storage()._cdata)


class Kept:
    """The storages that autograd keeps, each once; they live as long as this does, so that no other gets their identity."""

    def __init__(self, own: set[int]) -> None:
        self.own = own  # of parameters, buffers and constants, which are not counted
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.inside = 0  # bytes of storages that only replayed blocks know

    def noting(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.add, lambda tensor: tensor)

    def add(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.own:
            self.storages[storage._cdata] = storage
        return tensor

    def include(self, other: Kept) -> None:
        self.storages |= other.storages
        self.inside += other.inside


@dataclass(frozen=True)
class _Result:
    """A block's output: a view of its argument ``source``, or of the new storage ``-1 - source``; ``same``: that argument itself."""

    source: int
    same: bool
    view: bool
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Template:
    """What a block does to memory, for arguments of one kind."""

    inside: int  # bytes kept that nobody else sees
    taken: tuple[int, ...]  # arguments that are kept
    made: tuple[tuple[int, bool], ...]  # each new storage of the outputs: bytes, whether it is kept
    results: tuple[_Result, ...]
    alone: bool

    @staticmethod
    def of(args: Sequence[Any], result: Any, kept: Kept) -> Template | None:
        """None for what can't be made again, of which a block hardly ever returns any.

        That is an output that is no tensor, has another dtype than what it views, or lies in a storage in no usual way.
        """
        outputs = result if isinstance(result, tuple | list) else (result,)
        if not all(isinstance(output, Tensor) for output in outputs):
            return None
        known: dict[int, int] = {}
        for index, argument in enumerate(args):
            if isinstance(argument, Tensor):
                known.setdefault(storage_of(argument), index)
        made: list[tuple[int, bool]] = []
        results: list[_Result] = []
        for output in outputs:
            storage = output.untyped_storage()
            if storage._cdata not in known:
                known[storage._cdata] = -1 - len(made)
                made.append((storage.nbytes(), storage._cdata in kept.storages))
            source = known[storage._cdata]
            same = source >= 0 and output is args[source]
            view = output._is_view()
            if not same and not (
                _is_view_of(args[source], output) if source >= 0 else _is_first(output, source, results)
            ):
                return None
            results.append(
                _Result(
                    source, same, view, tuple(output.shape), output.stride(), int(output.storage_offset()),
                    output.dtype, output.requires_grad,
                )
            )  # fmt: skip
        inside = sum(storage.nbytes() for key, storage in kept.storages.items() if key not in known)
        taken = tuple(index for key, index in known.items() if index >= 0 and key in kept.storages)
        return Template(inside + kept.inside, taken, tuple(made), tuple(results), isinstance(result, Tensor))

    def replay(self, args: Sequence[Any], kept: Kept) -> Any:
        kept.inside += self.inside
        for index in self.taken:
            kept.add(args[index])
        bases: dict[int, Tensor] = {}
        outputs = [args[r.source] if r.same else self._output(r, args, bases) for r in self.results]
        for index, (_, is_kept) in enumerate(self.made):
            if is_kept:
                kept.add(bases[-1 - index])
        return outputs[0] if self.alone else tuple(outputs)

    def _output(self, result: _Result, args: Sequence[Any], bases: dict[int, Tensor]) -> Tensor:
        with torch.no_grad():
            if result.source < 0 and not result.view:
                value = torch.empty_strided(result.shape, result.stride, dtype=result.dtype)
                bases[result.source] = value
            else:
                if result.source < 0 and result.source not in bases:
                    elements = self.made[-1 - result.source][0] // result.dtype.itemsize
                    bases[result.source] = torch.empty(elements, dtype=result.dtype)
                base = args[result.source] if result.source >= 0 else bases[result.source]
                value = base.detach().as_strided(result.shape, result.stride, result.offset)
        return value.requires_grad_(result.requires_grad)


def _is_view_of(argument: Tensor, output: Tensor) -> bool:
    return output._is_view() and output.dtype == argument.dtype


def _is_first(output: Tensor, source: int, results: Sequence[_Result]) -> bool:
    """Whether ``output`` can be made with its new storage: a view of elements of its dtype, or a tensor that fills it."""
    others = [result for result in results if result.source == source]
    nbytes, itemsize = output.untyped_storage().nbytes(), output.dtype.itemsize
    if output._is_view():
        return nbytes % itemsize == 0 and all(result.dtype == output.dtype for result in others)
    last = sum((size - 1) * stride for size, stride in zip(output.shape, output.stride()))
    filled = (last + 1) * itemsize if output.numel() else 0
    return not others and output.storage_offset() == 0 and nbytes == filled


def signature(args: Sequence[Any]) -> tuple[Any, ...]:
    """All of a block's arguments that its memory depends on."""
    first: dict[int, int] = {}
    parts: list[Any] = []
    for index, argument in enumerate(args):
        if isinstance(argument, Tensor):
            alias = first.setdefault(storage_of(argument), index)
            layout = tuple(argument.shape), argument.stride(), int(argument.storage_offset())
            parts.append((alias, layout, argument.dtype, argument.requires_grad))
        else:
            parts.append(argument)
    return tuple(parts)


class Live(TorchDispatchMode):
    """Counts the bytes of the storages that operators make, from then until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.highest = 0
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
        key, nbytes = int(storage._cdata), storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.now += nbytes
            self.highest = max(self.highest, self.now)
            weakref.finalize(storage, self._freed, key, nbytes)

    def _freed(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.now -= nbytes

    def turn(self) -> tuple[int, int]:
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
