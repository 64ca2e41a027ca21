"""A block keeps the shards of what it gathers, and in the backward gathers again.

    gather_again(block)     of what ``all_gather`` makes only the argument is kept, where the backward reads the result

The backward gathers once for all that reads the result, as q, k and v do, and frees it after the last of them. Nothing
else runs again. All ranks run the same backward in the same order, so their collectives meet.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from graphpar.emitted.collectives import watchers


def gather_again(block: nn.Module) -> None:
    """Make ``block`` keep shards instead of what it gathers."""
    block.forward = gathered_again(block.forward)


def gathered_again(
    forward: Callable[..., Any], kept: Callable[[Tensor], object] = lambda tensor: None
) -> Callable[..., Any]:
    """Return ``forward``, keeping shards instead of what it gathers; ``kept`` is called with each tensor that is
    kept."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        made: dict[int, _Gathered] = {}

        def watch(shard: Tensor, result: Tensor, gather: Callable[[Tensor], Tensor]) -> None:
            storage = StorageWeakRef(result.untyped_storage())
            if storage.cdata != shard.untyped_storage()._cdata:
                made[storage.cdata] = _Gathered(shard, storage, gather)

        def pack(tensor: Tensor) -> Callable[[], Tensor]:
            found = made.get(tensor.untyped_storage()._cdata)
            kept(tensor if found is None else found.shard)
            return _kept(tensor) if found is None else found.reader(tensor)

        watchers.append(watch)
        try:
            with saved_tensors_hooks(pack, lambda read: read()):
                return forward(*args, **kwargs)
        finally:
            watchers.remove(watch)
            made.clear()

    return run


class _Gathered:
    """What was gathered from ``shard`` into ``storage``; the weak reference keeps another from having the same
    address."""

    def __init__(self, shard: Tensor, storage: StorageWeakRef, gather: Callable[[Tensor], Tensor]) -> None:
        self.shard, self.storage, self.gather = shard.detach(), storage, gather
        self.read_shard = _kept(self.shard)
        self.readers = self.left = 0
        self.result: Tensor | None = None

    def reader(self, view: Tensor) -> Callable[[], Tensor]:
        """Return what makes ``view`` of the result again."""
        self.readers += 1
        size, stride, offset = view.size(), view.stride(), view.storage_offset()
        return lambda: self._read().as_strided(size, stride, offset)

    def _read(self) -> Tensor:
        if self.result is None:
            self.result, self.left = self.gather(self.read_shard()), self.readers
        result = self.result
        self.left -= 1
        if not self.left:
            self.result = None
        return result


def _kept(tensor: Tensor) -> Callable[[], Tensor]:
    """Return what gives ``tensor``, if it was not written since: autograd does not check what hooks keep."""
    version = tensor._version

    def read() -> Tensor:
        if tensor._version != version:
            raise RuntimeError(f"a tensor {list(tensor.shape)} that the backward reads was written after the forward")
        return tensor

    return read
