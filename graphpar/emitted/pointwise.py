"""A block keeps what its pointwise operators and norms read, and in the backward computes their results again.

    h = swiglu(gate, up)      kept: gate and up, as without
    down = down_proj(h)       kept: how to compute h; the backward of the product does, and frees it after

    recompute_pointwise(block)    computes again what OPERATORS made; edit this list

A result is computed again where the backward of another operator reads it, as a product's does, and all that it was
made of is kept anyway, or made again in the same way. So no more is kept than without. It is computed once for all
that read it, and freed after the last of them. Nothing else runs again.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

OPERATORS = {
    *("layer_norm", "rms_norm"),
    *("gelu", "silu", "mish", "sigmoid", "tanh", "softplus", "leaky_relu", "elu", "hardswish", "square", "pow"),
    *("add", "sub", "mul", "div", "neg"),
    *("swiglu", "geglu", "apply_rotary"),
    *("to", "_to_copy", "contiguous", "clone"),
}
"""What is computed again, by the names of functions."""
Watchers = list[Callable[[Tensor, Tensor, Callable[[Tensor], Tensor]], None]]
Read = Callable[[], Any]


def recompute_pointwise(block: nn.Module) -> None:
    """Make ``block`` compute the results of pointwise operators and norms again."""
    block.forward = made_again(block.forward)


def made_again(
    forward: Callable[..., Any],
    pointwise: bool = True,
    gathers: Watchers | None = None,
    kept: Callable[[Tensor], object] = lambda tensor: None,
    noted: Callable[[], Callable[[], object]] = lambda: lambda: None,
) -> Callable[..., Any]:
    """Return ``forward``, which makes some of what its backward reads again.

    Args:
        pointwise: what :data:`OPERATORS` made.
        gathers: what is gathered; a list of functions that a gather calls with a shard, the result and itself.
        kept: called with each tensor that is kept.
        noted: called for each result that could be made again; what it returns is called if the backward will do so.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        saved = _Saved(kept, noted)
        if gathers is not None:
            gathers.append(saved.gathered)
        try:
            with saved_tensors_hooks(saved.pack, lambda read: read()), _Mode(saved) if pointwise else nullcontext():
                return forward(*args, **kwargs)
        finally:
            if gathers is not None:
                gathers.remove(saved.gathered)
            saved.made.clear()

    return run


class _Mode(TorchFunctionMode):
    """Sees the calls of torch's functions."""

    def __init__(self, saved: "_Saved") -> None:
        super().__init__()
        self.saved = saved

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "").partition(".")[0] in OPERATORS and isinstance(result, Tensor):
            self.saved.computed(func, args, kwargs or {}, result)
        return result


class _Saved:
    """What the backward of one forward reads: tensors that are kept, and those that are made again, by their
    storages."""

    def __init__(self, on_kept: Callable[[Tensor], object], noted: Callable[[], Callable[[], object]]) -> None:
        self.on_kept, self.noted = on_kept, noted
        self.kept: set[int] = set()
        self.made: dict[int, _Result] = {}

    def gathered(self, shard: Tensor, result: Tensor, gather: Callable[[Tensor], Tensor]) -> None:
        """Note what was gathered from ``shard``."""
        if (own := _address(result)) != _address(shard):
            self._note(result, own, gather, (shard,), {})

    def computed(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor
    ) -> None:
        """Note what ``func`` computed, where all that it reads is there in the backward, or is a vector, such as a
        bias."""
        own = _address(result)
        if own in self.kept or not result.is_floating_point():
            return
        for each in (*args, *kwargs.values()):
            if isinstance(each, Tensor) and not self._is_there(each, own):
                return
        self._note(result, own, func, args, kwargs)

    def pack(self, tensor: Tensor) -> Read:
        """Return what gives ``tensor`` in the backward."""
        address = _address(tensor)
        found = self._found(tensor, address)
        return self._keep(tensor, address) if found is None else found.reader_of(tensor)()

    def _is_there(self, operand: Tensor, result: int) -> bool:
        """Return whether ``operand`` is there in the backward anyway, and no part of the storage of ``result``."""
        address = _address(operand)
        there = address in self.kept or operand.dim() < 2 or self._found(operand, address) is not None
        return there and address != result

    def _note(self, result: Tensor, own: int, make: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        operands = [self._reader_of(each) for each in args]
        named = {name: self._reader_of(each) for name, each in kwargs.items()}
        self.made[own] = _Result(self.noted(), result, make, operands, named)

    def _found(self, tensor: Tensor, address: int) -> "_Result | None":
        """Return how ``tensor`` is made again, if it was not written since it was made."""
        found = self.made.get(address)
        return found if found is not None and found.version == tensor._version else None

    def _reader_of(self, value: Any) -> Callable[[], Read]:
        """Return what is called once the value is needed, and then returns what gives it in the backward."""
        if not isinstance(value, Tensor):
            return lambda: lambda: value
        address = _address(value)
        found = self._found(value, address)
        if found is not None:
            return found.reader_of(value)
        tensor = value.detach()
        return lambda: self._keep(tensor, address)

    def _keep(self, tensor: Tensor, address: int) -> Read:
        self.kept.add(address)
        self.on_kept(tensor)
        return _kept(tensor)


class _Result:
    """How to make a storage again; the weak reference to it keeps another from having the same address."""

    def __init__(
        self,
        again: Callable[[], object],
        result: Tensor,
        make: Callable[..., Tensor],
        args: Sequence[Callable[[], Read]],
        kwargs: Mapping[str, Callable[[], Read]],
    ) -> None:
        self.storage, self.version = StorageWeakRef(result.untyped_storage()), result._version
        self.again, self.make, self.args, self.kwargs = again, make, args, kwargs
        self.read_args: list[Read] = []
        self.read_kwargs: dict[str, Read] = {}
        self.readers = self.left = 0
        self.result: Tensor | None = None

    def reader_of(self, view: Tensor) -> Callable[[], Read]:
        """Return what is called once ``view`` of the storage is needed, and then returns what makes it."""
        size, stride, offset = view.size(), view.stride(), view.storage_offset()

        def reader() -> Read:
            if not self.readers:
                self.again()
                self.read_args = [each() for each in self.args]
                self.read_kwargs = {name: each() for name, each in self.kwargs.items()}
            self.readers += 1
            return lambda: self._read().as_strided(size, stride, offset)

        return reader

    def _read(self) -> Tensor:
        if self.result is None:
            named = {name: read() for name, read in self.read_kwargs.items()}
            self.result = self.make(*(read() for read in self.read_args), **named)
            self.left = self.readers
        result = self.result
        self.left -= 1
        if not self.left:
            self.result = None
        return result


def _address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _kept(tensor: Tensor) -> Read:
    """Return what gives ``tensor``, if it was not written since: autograd does not check what hooks keep."""
    version = tensor._version

    def read() -> Tensor:
        if tensor._version != version:
            raise RuntimeError(f"a tensor {list(tensor.shape)} that the backward reads was written after the forward")
        return tensor

    return read
