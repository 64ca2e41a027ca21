"""A process group for one rank alone: collectives that move nothing, and fill what they give as if every other rank were like this one.

    join(rank=37, world_size=4096)          in place of torchrun's ranks; then Pipeline, step and optimizer as ever

    all-reduce, reduce         the rank's own part of the sum
    all-gather                 its own shard, in every place
    reduce-scatter             its own part of its own piece
    all-to-all                 what it sent, over and over where it gets more
    receive                    drawn once for each buffer: floats of deviation ``SPREAD``, ones of other dtypes
    broadcast                  what it has, without infinities and NaNs

So all values are finite where this rank's are, objects that ranks gather are equal, checks that ranks agree pass, and masks and token ids
stay in their ranges. Rows are spread evenly over experts (:func:`spread_rows`). Shapes, memory and kernels are those of the rank among
its peers; only messages, their buffers and their time are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, _create_work_from_future  # type: ignore[attr-defined]
from torch.futures import Future
from torch.utils.weak import WeakIdKeyDictionary

BACKEND = "alone"
SPREAD = 0.02
"""The deviation of received floats: as that of initial weights, so that neither activations nor gradients overflow."""


def join(rank: int, world_size: int) -> None:
    """Make the default group one of ``world_size`` ranks, of which this process is ``rank`` and the others do not exist."""
    dist.init_process_group(known_to_torch(), store=HashStore(), rank=rank, world_size=world_size)


def known_to_torch() -> str:
    """Return the name of the backend, which torch knows from now on."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _made, devices=["cpu", "cuda"])
    return BACKEND


def is_alone() -> bool:
    """Whether the default group is that of a rank alone."""
    return dist.is_initialized() and dist.get_backend() == BACKEND


def spread_rows(expert_rows: ModuleType) -> None:
    """Let the functions of an emitted ``expert_rows.py`` that divide rows by expert give each expert as many as any other.

    A router without trained weights would choose few of them, and other ranks' choices are not known.
    """
    for name in ("rank_ends", "own_offsets", "exchange_of"):
        if hasattr(expert_rows, name):
            setattr(expert_rows, name, _with_even_rows(getattr(expert_rows, name)))


def _with_even_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(offs: Tensor, axis: str, *given: Any, **options: Any) -> Any:
        experts = torch.arange(1, len(offs) + 1, device=offs.device)
        return function(
            (offs[-1] * experts).div(len(offs), rounding_mode="floor").to(offs.dtype), axis, *given, **options
        )

    return call


def _made(store: object, rank: int, size: int, timeout: timedelta) -> LoneGroup:
    return LoneGroup(rank, size)


def _done() -> dist.Work:
    future: Future[None] = Future()
    future.set_result(None)
    work: dist.Work = _create_work_from_future(future)
    return work


_ProcessGroup: Any = dist.ProcessGroup
"""torch's class, whose methods have other names and signatures in each version."""


class LoneGroup(_ProcessGroup):  # type: ignore[misc]
    """A group of which only this rank exists. Its methods are those that torch calls, under the names of several versions."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._place, self._count, self._name, self._said = rank, size, "", ""
        self._drawn = WeakIdKeyDictionary()

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return BACKEND

    @property
    def group_name(self) -> str:
        """What torch calls the group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """How torch describes it."""
        return self._said

    def _set_group_desc(self, text: str) -> None:
        self._said = text

    def _get_backend(self, device: torch.device) -> LoneGroup:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def allreduce(self, tensors: Sequence[Tensor], options: object = None) -> dist.Work:
        """Leave this rank's part of the sum."""
        return _done()

    allreduce_coalesced = reduce = allreduce

    def barrier(self, options: object = None) -> dist.Work:
        """Wait for nobody."""
        return _done()

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int) -> dist.Work:
        """Send nothing."""
        return _done()

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int) -> dist.Work:
        """Draw what has not been drawn."""
        for tensor in tensors:
            if tensor not in self._drawn:
                self._drawn[tensor] = None
                with torch.no_grad():
                    tensor.normal_(0, SPREAD) if tensor.is_floating_point() else tensor.fill_(1)
        return _done()

    def broadcast(self, tensors: Sequence[Tensor], options: Any = None) -> dist.Work:
        """Leave what the tensors hold, if it is finite."""
        for tensor in tensors if options.rootRank != self._place else ():
            with torch.no_grad():
                torch.nan_to_num_(tensor, 0.0, 0.0, 0.0) if tensor.is_floating_point() else tensor.fill_(1)
        return _done()

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], options: object = None
    ) -> dist.Work:
        """Copy each input to all of its outputs."""
        with torch.no_grad():
            for places, own in zip(outputs, inputs):
                for place in places:
                    place.copy_(own)
        return _done()

    def all_gather_single(self, output: Tensor, own: Tensor, options: object = None) -> dist.Work:
        """Copy the input to all of its places; it may lie in its own already."""
        places, own = output.view(self._count, -1), own.reshape(-1)
        with torch.no_grad():
            for others in (places[: self._place], places[self._place + 1 :]):
                others.copy_(own)
            if places[self._place].data_ptr() != own.data_ptr():
                places[self._place].copy_(own)
        return _done()

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: object = None
    ) -> dist.Work:
        """Copy each input to all of its places."""
        for output, own in zip(outputs, inputs):
            self.all_gather_single(output, own)
        return _done()

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], options: object = None
    ) -> dist.Work:
        """Copy this rank's pieces."""
        with torch.no_grad():
            for output, pieces in zip(outputs, inputs):
                output.copy_(pieces[self._place])
        return _done()

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, options: object = None) -> dist.Work:
        """Copy this rank's piece."""
        with torch.no_grad():
            output.view(-1).copy_(whole.reshape(self._count, -1)[self._place])
        return _done()

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], wholes: Sequence[Tensor], options: object = None
    ) -> dist.Work:
        """Copy this rank's pieces."""
        for output, whole in zip(outputs, wholes):
            self.reduce_scatter_single(output, whole)
        return _done()

    def alltoall_base(
        self,
        output: Tensor,
        sent: Tensor,
        output_sizes: Sequence[int],
        sent_sizes: Sequence[int],
        options: object = None,
    ) -> dist.Work:
        """Copy what was sent, over and over."""
        with torch.no_grad():
            received, given = output.reshape(-1), sent.reshape(-1)
            if not given.numel():
                received.zero_()
            for part in received.split(given.numel()) if given.numel() else ():
                part.copy_(given[: part.numel()])
        return _done()

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
