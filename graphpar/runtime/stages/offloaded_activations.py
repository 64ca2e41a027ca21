"""What blocks keep between forward and backward, in the memory of the host.

    forward    block 0 ─► block 1 ─► block 2 ...    what block 0 kept leaves while block 1 computes; block 2 waits until it has left
    backward   ... block 2 ─► block 1 ─► block 0    what block 1 kept comes while block 2 computes

So the device has what two blocks kept at one time, and the last block's, whose backward often follows, is not brought back. What is
moved is memory and not tensors: views of one product leave once, and come back as views with the same strides, so that kernels
compute the same. Parameters, buffers, copies of parameters and small tensors stay. A block that recomputes moves what it keeps, its
inputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.stages.cast_once import CastOnce
from graphpar.runtime.state.host import Copied, Host

Reader = Callable[[], Tensor]
"""Gives a tensor that autograd keeps."""
_WRITTEN = "a tensor that the backward reads was written after the forward"


class OffloadedActivations:
    """Moves what the blocks of this rank's stages keep.

    Attributes:
        host: counts what was moved.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self._leaving: _Kept | None = None
        self._running: weakref.ref[_Kept] | None = None

    def add(self, stage: nn.Module, blocks: Sequence[nn.Module], casts: CastOnce) -> None:
        """Move what ``blocks`` of ``stage`` keep, after they were made to recompute and before FSDP2 shards them."""
        forward = _Forward(casts)
        stage.register_forward_pre_hook(lambda *_: forward.clear())
        stage.register_forward_hook(lambda *_: forward.clear(), always_call=True)
        for block in blocks:
            block.forward = self._moving(block, block.forward, forward)

    def _moving(self, block: nn.Module, inner: Callable[..., Any], forward: _Forward) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return inner(*args, **kwargs)
            kept = _Kept(self, forward, {_storage(each) for each in (*block.parameters(), *block.buffers())})
            with saved_tensors_hooks(kept.pack, lambda read: read()):
                result = inner(*args, **kwargs)
            kept.send()
            forward.last = weakref.ref(kept)
            self.release()
            self._leaving = kept
            return result

        return run

    def release(self) -> None:
        """Let the device wait until what the last block kept has left, and free it there."""
        if self._leaving is not None:
            self._leaving.free()
            self._leaving = None

    def begin(self, kept: _Kept) -> None:
        """Have what a block kept on the device, and what the block before it kept on its way, when its backward begins."""
        if self._running is not None and self._running() is kept:
            return
        self._running = weakref.ref(kept)
        if self._leaving is not kept:
            self.release()
        kept.fetch()
        before = kept.before() if kept.before is not None else None
        if before is not None:
            before.fetch()
        self._leaving = None


class _Forward:
    """A forward of a stage: the block that ran last, and the memory that was moved, by its address."""

    def __init__(self, casts: CastOnce) -> None:
        self.casts = casts
        self.last: weakref.ref[_Kept] | None = None
        self.moved: dict[int, tuple[StorageWeakRef, weakref.ref[_Moved]]] = {}

    def clear(self) -> None:
        self.last = None
        self.moved.clear()


class _Kept:
    """What one call of a block kept. Readers, which autograd has, hold it and the memory that they read; nothing else does for long."""

    def __init__(self, activations: OffloadedActivations, forward: _Forward, staying: set[int]) -> None:
        self.activations, self.forward, self.staying = activations, forward, staying
        self.before = forward.last
        self.new: list[_Moved] = []
        self.moved: list[weakref.ref[_Moved]] = []

    def pack(self, tensor: Tensor) -> Reader:
        """Return what gives ``tensor`` again, which autograd keeps."""
        if not self._moves(tensor):
            return _staying(tensor)
        address = _storage(tensor)
        found = self.forward.moved.get(address)
        moved = None if found is None or found[0].expired() else found[1]()
        if moved is None or not moved.has(tensor):
            moved = _Moved(tensor, self.activations.host)
            self.forward.moved[address] = StorageWeakRef(tensor.untyped_storage()), weakref.ref(moved)
            self.new.append(moved)
        self.moved.append(weakref.ref(moved))
        size, stride, offset, dtype = tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype

        def read() -> Tensor:
            self.activations.begin(self)
            memory = moved.read()
            return memory.new_empty(0, dtype=dtype).set_(memory.untyped_storage(), offset, size, stride)  # type: ignore[call-overload]

        return read

    def _moves(self, tensor: Tensor) -> bool:
        host = self.activations.host
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
            return False
        if tensor.device.type != host.device.type or tensor.is_conj() or tensor.is_neg():
            return False
        nbytes, address = tensor.untyped_storage().nbytes(), _storage(tensor)
        return nbytes > host.small and address not in self.staying and address not in self.forward.casts.storages

    def send(self) -> None:
        """Start to send what the block kept and no block before it in this forward."""
        for moved in self.new:
            moved.send()
        self.new.clear()
        self.staying = set()

    def free(self) -> None:
        for each in self.moved:
            if (moved := each()) is not None:
                moved.free()

    def fetch(self) -> None:
        for each in self.moved:
            if (moved := each()) is not None:
                moved.fetch()


class _Moved:
    """The memory of tensors that a block kept: on the device until it was sent and freed, and again when it is fetched."""

    def __init__(self, tensor: Tensor, host: Host) -> None:
        self._host = host
        self._tensor: Tensor | None = tensor.detach()  # else a graph that has no backward would hold itself
        self._version, self._written = tensor._version, False
        self._home: Tensor | None = None
        self._sent: Copied | None = None
        self._back: Tensor | None = None
        self._coming: Copied | None = None
        self._here = False

    def has(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, with the same memory, has the values that are kept."""
        return tensor._version == self._version

    def send(self) -> None:
        assert self._tensor is not None
        self._home, self._sent = self._host.out(_bytes(self._tensor))

    def free(self) -> None:
        """Free it on the device, which waits until it has left."""
        if self._tensor is not None and self._sent is not None:
            self._sent.wait()
            self._written = not self.has(self._tensor)
            self._tensor = None

    def fetch(self) -> None:
        """Start to bring it back, unless it is there."""
        if self._tensor is None and self._back is None:
            assert self._home is not None
            self._back, self._coming = self._host.back(self._home, self._sent)

    def read(self) -> Tensor:
        """Return it on the device.

        Raises:
            RuntimeProgramError: it was written, which autograd would say where it keeps a tensor itself.
        """
        if self._written or (self._tensor is not None and not self.has(self._tensor)):
            raise RuntimeProgramError(_WRITTEN)
        if self._tensor is not None:
            return _bytes(self._tensor)
        self.fetch()
        self._arrived()
        assert self._back is not None
        return self._back

    def _arrived(self) -> None:
        if self._coming is not None and not self._here:
            self._coming.wait()
            self._here = True

    def __del__(self) -> None:
        self._arrived()  # memory that is still being written may not be used for something else
        if self._home is not None:
            self._host.free(self._home, self._coming or self._sent)


def _bytes(tensor: Tensor) -> Tensor:
    """Return all of the memory that ``tensor`` is in, as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))  # type: ignore[call-overload]


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _staying(tensor: Tensor) -> Reader:
    """Return what gives ``tensor``, if it was not written since: autograd does not check what hooks keep."""
    version = tensor._version

    def read() -> Tensor:
        if tensor._version != version:
            raise RuntimeProgramError(_WRITTEN)
        return tensor

    return read
