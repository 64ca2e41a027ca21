"""Copies between a device and the memory of its host, beside what computes.

    out    device ──a stream of its own──► host (pinned)     after what the device has computed so far
    back   host ──another stream──► device                   before what reads it, which waits for the copy alone

A device which is a CPU has no other memory: nothing is copied. ``pretended`` makes copies all the same, so that what is done to values
on their way can be tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

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


def has_host(device: torch.device) -> bool:
    """Whether ``device`` has a host with memory of its own."""
    return device.type != "cpu" or _pretence.on


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

    def out(self, values: Tensor, into: Tensor | None = None) -> tuple[Tensor, Copied]:
        """Start to copy ``values`` out; returns the copy and the end of the copying, until which ``values`` must be kept as they are.

        Args:
            into: memory of the host to copy into; new memory by default.
        """
        if into is None:
            into = torch.empty(values.shape, dtype=values.dtype, pin_memory=self._cuda)
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
