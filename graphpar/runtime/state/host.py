"""Copies between a device and the memory of its host, beside what computes.

    out    device ──a stream of its own──► host (pinned)     after what the device has computed so far
    back   host ──another stream──► device                   before what reads it, which waits for the copy alone

A device which is a CPU has no other memory: nothing is copied. ``pretended`` makes copies all the same, so that what is done to values
on their way can be tested without a GPU.
"""

from __future__ import annotations

import functools
import mmap
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from graphpar.runtime.errors import RuntimeProgramError

STAGED = 2**24
"""Bytes of each of two buffers through which values come to a device."""
SMALL = 2**16
"""Bytes up to which what a block keeps stays on the device: a copy would cost more than the memory is worth."""


@dataclass
class _Pretence:
    on: bool = False


_pretence = _Pretence()


@contextmanager
def pretended() -> Iterator[None]:
    """Treat a CPU, inside, as a device with a host of its own, to which also small tensors are copied: for tests."""
    before, _pretence.on = _pretence.on, True
    try:
        yield
    finally:
        _pretence.on = before


class _Memory(mmap.mmap):
    """Memory of the host, of whole pages; tensors in it keep it. One that was locked is unlocked before it is given back."""

    locked = 0

    def __del__(self) -> None:
        if self.locked and not sys.is_finalizing():
            torch.cuda.synchronize()  # copies from it may be on their way
            torch.cuda.cudart().cudaHostUnregister(self.locked)


def host_memory(nbytes: int, device: torch.device) -> Tensor:
    """Return so many bytes of the host's memory, which ``device`` copies from and to beside what it computes: page-locked for a GPU.

    torch's own allocator of such memory rounds up to a power of two: to up to twice the bytes of a plan.
    """
    memory = _Memory(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    found = torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]
    if device.type == "cuda" and nbytes:
        error = int(torch.cuda.cudart().cudaHostRegister(found.data_ptr(), nbytes, 0))
        if error:
            raise RuntimeProgramError(
                f"{nbytes / 2**30:.2f} GiB of the host's memory can't be page-locked (CUDA error {error}): it has too little, or "
                "`ulimit -l` is too low"
            )
        memory.locked = found.data_ptr()
    return found


def copied_out(tensors: Sequence[Tensor], memory: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
    """Copy tensors to the host, into one block of memory; returns the copies and the block, which is ``memory`` if that has its size."""
    places, end = [], 0
    for each in tensors:
        places.append(end)
        end += -(-each.nbytes // 64) * 64
    device = next((each.device for each in tensors if each.device.type == "cuda"), torch.device("cpu"))
    if memory is None or memory.nbytes != end:
        memory = host_memory(end, device)
    copies = []
    for begin, each in zip(places, tensors):
        copy = memory[begin : begin + each.nbytes].view(each.dtype).view(each.shape)
        copies.append(copy.copy_(each, non_blocking=True))
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return copies, memory


class _Staging:
    """Two page-locked buffers through which values go to a device: one is filled while the other is copied from."""

    def __init__(self, device: torch.device) -> None:
        self._memory = [host_memory(STAGED, device) for _ in range(2)]
        self._left: list[torch.cuda.Event | None] = [None, None]
        self._next = 0

    def copy(self, target: Tensor, values: Tensor) -> None:
        rows = STAGED // max(target[:1].nbytes, 1)
        for begin in range(0, len(target), rows):
            piece, now = target[begin : begin + rows], self._next
            if (left := self._left[now]) is not None:
                left.synchronize()
            staged = self._memory[now][: piece.nbytes].view(piece.dtype).view(piece.shape)
            piece.copy_(staged.copy_(values[begin : begin + rows]), non_blocking=True)
            self._left[now] = torch.cuda.current_stream(target.device).record_event() if target.is_cuda else None
            self._next = 1 - now


_staging = functools.cache(_Staging)


def copy_in(target: Tensor, values: Tensor) -> None:
    """Copy values from the host's memory, such as a mapped file, to ``target``; on a GPU through page-locked memory."""
    staged = target.is_cuda or _pretence.on
    if staged and target.ndim and values.device.type == "cpu" and 0 < target[:1].nbytes <= STAGED:
        _staging(target.device).copy(target, values)
    else:
        target.copy_(values)


class Host:
    """The memory of the host of ``device``.

    Attributes:
        sent, fetched: bytes that were copied out and back.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sent = self.fetched = 0
        self.small = 0 if _pretence.on else SMALL
        self._cuda = device.type == "cuda"
        self._out = torch.cuda.Stream(device) if self._cuda else None
        self._back = torch.cuda.Stream(device) if self._cuda else None
        self._unused: dict[
            int, list[tuple[Tensor, Copied | None]]
        ] = {}  # by bytes: the next step keeps tensors of the same sizes

    def out(self, values: Tensor, into: Tensor | None = None) -> tuple[Tensor, Copied]:
        """Start to copy ``values`` out; returns the copy and the end of the copying, until which ``values`` must be kept as they are.

        Args:
            into: memory of the host to copy into; new memory by default.
        """
        if into is None:
            into = self._room(values)
        self.sent += values.nbytes
        return into, self._copy(self._out, values, into)

    def back(self, values: Tensor, after: Copied | None = None) -> tuple[Tensor, Copied]:
        """Start to copy ``values``, of the host, to the device; returns the copy, and the end of the copying, for which the device must
        wait before it uses or frees it.

        Args:
            after: the copying by which the values came.
        """
        made = torch.empty(values.shape, dtype=values.dtype, device=self.device)
        if after is not None and self._back is not None:
            after.before(self._back)
        self.fetched += values.nbytes
        return made, self._copy(self._back, values, made)

    def free(self, copy: Tensor, after: Copied | None) -> None:
        """Take back the memory of a copy that was made by :meth:`out` into new memory, to be used again ``after`` copying from it ended."""
        self._unused.setdefault(copy.nbytes, []).append((copy.view(-1).view(torch.uint8), after))

    def _room(self, values: Tensor) -> Tensor:
        """Return memory for ``values``: of a copy of the same size that was freed, or new memory."""
        if unused := self._unused.get(values.nbytes):
            memory, after = unused.pop()
            if after is not None and self._out is not None:
                after.before(self._out)
        else:
            memory = host_memory(values.nbytes, self.device)
        return memory.view(values.dtype).view(values.shape)

    def _copy(self, stream: torch.cuda.Stream | None, source: Tensor, target: Tensor) -> Copied:
        if stream is None:
            target.copy_(source)
            return Copied(None)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        # No record_stream: the allocator could reuse such memory only once the host sees that the copying has ended, and it runs ahead.
        return Copied(stream.record_event())

    def synchronize(self) -> None:
        """Wait, on the host, until all that was sent is there."""
        if self._out is not None:
            self._out.synchronize()


class Copied:
    """The end of the copying of a tensor."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def wait(self) -> None:
        """Let what the device computes from now on wait for it."""
        if self._event is not None:
            self._event.wait()

    def finish(self) -> None:
        """Wait for it on the host."""
        if self._event is not None:
            self._event.synchronize()

    def before(self, stream: torch.cuda.Stream) -> None:
        """Let ``stream`` wait for it."""
        if self._event is not None:
            stream.wait_event(self._event)


def host_of(device: torch.device, moved: Sequence[str]) -> Host | None:
    """Return the host of ``device`` if something is ``moved`` there; a CPU has none, which rank 0 says."""
    if not moved:
        return None
    if device.type != "cpu" or _pretence.on:
        return Host(device)
    if dist.get_rank() == 0:
        print(f"offload: {device} is the host, so {' and '.join(moved)} are not moved", flush=True)
    return None
