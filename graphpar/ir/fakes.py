"""Fake tensors made from others, without running an operator on them."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager


def fake_like(
    value: FakeTensor, dtype: torch.dtype | None = None, storage: torch.UntypedStorage | None = None
) -> Tensor:
    """Return a fake tensor of the shape and strides of ``value``, in memory of its own or in ``storage``; it needs no gradient."""
    mode = value.fake_mode
    guards = mode.shape_env.suppress_guards() if mode.shape_env is not None else contextlib.nullcontext()
    with torch._C.DisableTorchFunction(), torch.no_grad(), in_kernel_invocation_manager(mode), guards:
        sizes, strides = value.shape, value.stride()
        plain = torch.empty_strided(sizes, strides, dtype=dtype or value.dtype, device="meta")
        if storage is not None:
            plain.set_(storage, value.storage_offset(), sizes, strides)  # type: ignore[call-overload]
    return FakeTensor(mode, plain, value.fake_device)
