"""Run the ranks of an axis as threads of one process, with what they send exchanged between them: for proofs on numbers.

    functions of graphpar.emitted, or of a program ──► torch's collectives, replaced ──► all ranks' values

What comes is there when it is waited for, and not a number before; what is sent must not be written meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

T = TypeVar("T")
_PATIENCE_S = 60.0
_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum}


class _Axes:
    """Any axis: ``axes[name]`` is the group's name, its size and the thread's rank."""

    def __init__(self, count: int, own: threading.local) -> None:
        self.count, self.own = count, own

    def __getitem__(self, axis: str) -> tuple[str, int, int]:
        return "", self.count, self.own.rank


def on_ranks(
    rank: Callable[[int], T], count: int, modules: Sequence[ModuleType], patience_s: float = _PATIENCE_S
) -> list[T]:
    """Return what ``rank`` returns on each of ``count`` ranks, whose collectives are those of ``modules``.

    Raises:
        Exception: what a rank raises; :class:`threading.BrokenBarrierError` where one waits for another in vain.
    """
    own, barrier = threading.local(), threading.Barrier(count, timeout=patience_s)
    posted: list[Any] = [None] * count
    found: list[Any] = [None] * count

    def exchanged(item: Any) -> list[Any]:
        """What each rank gives, for all of them."""
        posted[own.rank] = item
        barrier.wait()
        came = list(posted)
        barrier.wait()
        return came

    def begun(sent: Tensor, came: Tensor) -> Tensor:
        result = torch.full_like(came, torch.nan) if came.is_floating_point() else torch.zeros_like(came)
        own.waiting[result.untyped_storage().data_ptr()] = result, came, sent, sent.detach().clone()
        return result

    def waited(x: Tensor) -> Tensor:
        if begun := own.waiting.pop(x.untyped_storage().data_ptr(), None):
            result, came, sent, before = begun
            assert torch.equal(sent, before), "what is sent is not there yet, or is written meanwhile"
            with torch.no_grad():
                result.copy_(came)
        return x

    def all_to_all(x: Tensor, of: Sequence[int], to: Sequence[int], group: str) -> Tensor:
        came = [sent.split(list(sizes))[own.rank] for sent, sizes in exchanged((x.detach().clone(), to))]
        assert [piece.size(0) for piece in came] == list(of), "a rank waits for other pieces than are sent"
        return begun(x, torch.cat(came))

    def all_gather(x: Tensor, ranks: int, group: str) -> Tensor:
        return begun(x, torch.cat(exchanged(x.detach().clone())))

    def reduced(x: Tensor, operation: str) -> Tensor:
        assert operation in _REDUCTIONS, f"ranks take the {operation} and not the sum"
        total: Tensor = functools.reduce(_REDUCTIONS[operation], exchanged(x.detach().clone()))
        return total

    def all_reduce(x: Tensor, operation: str, group: str) -> Tensor:
        return begun(x, reduced(x, operation))

    def reduce_scatter(x: Tensor, operation: str, ranks: int, group: str) -> Tensor:
        return begun(x, reduced(x, operation).chunk(ranks)[own.rank])

    def run(index: int) -> None:
        own.rank, own.waiting = index, {}
        try:
            found[index] = rank(index)
        except Exception as error:
            found[index] = error
            barrier.abort()

    operators = SimpleNamespace(
        all_to_all_single=all_to_all,
        all_gather_into_tensor=all_gather,
        all_reduce=all_reduce,
        reduce_scatter_tensor=reduce_scatter,
        wait_tensor=waited,
    )
    replaced: dict[str, Any] = {"_operators": operators, "_axes": _Axes(count, own)}
    with contextlib.ExitStack() as stack:
        for module in modules:
            names = {name: value for name, value in replaced.items() if hasattr(module, name)}
            if names:
                stack.enter_context(mock.patch.multiple(module, **names))
        threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    errors = [outcome for outcome in found if isinstance(outcome, Exception)]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return found
