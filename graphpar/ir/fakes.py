"""Fake tensors made from others, without running an operator on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager


def fake_like(
    value: FakeTensor, dtype: torch.dtype | None = None, storage: torch.UntypedStorage | None = None
) -> Tensor:
    """Return a fake tensor of the shape and strides of ``value``, in memory of its own or in ``storage``; it needs no gradient."""
    with _on_meta(value):
        plain = torch.empty_strided(value.shape, value.stride(), dtype=dtype or value.dtype, device="meta")
        if storage is not None:
            plain.set_(storage, value.storage_offset(), value.shape, value.stride())  # type: ignore[call-overload]
    return FakeTensor(value.fake_mode, plain, value.fake_device)


def fake_on(plain: Tensor, like: FakeTensor) -> Tensor:
    """Return a fake tensor in the memory of ``plain``, which is on the device meta. It costs a twentieth of a new one."""
    return FakeTensor(like.fake_mode, plain.detach(), like.fake_device)


def moved(value: FakeTensor, storage: torch.UntypedStorage) -> None:
    """Have ``value`` in ``storage`` from now on."""
    with _on_meta(value):
        value.set_(storage, value.storage_offset(), value.shape, value.stride())  # type: ignore[call-overload]


@contextlib.contextmanager
def _on_meta(value: FakeTensor) -> Iterator[None]:
    mode = value.fake_mode
    guards = mode.shape_env.suppress_guards() if mode.shape_env is not None else contextlib.nullcontext()
    with torch._C.DisableTorchFunction(), torch.no_grad(), in_kernel_invocation_manager(mode), guards:
        yield
