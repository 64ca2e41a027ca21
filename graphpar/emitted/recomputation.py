"""Recomputation: a block keeps what enters it, and in the backward runs its forward again to have the rest.

    recompute(block)                  keeps nothing else: its collectives run again, too
    recompute_selectively(block)      keeps the results of KEPT, and of every second of PRODUCTS; edit these lists

The engine is ``torch.utils.checkpoint``, without reentrance. Nothing here depends on torch's random generators: dropout
draws from keys that enter the block. A forward that runs again writes its buffers (statistics of BatchNorm) into copies.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers the collectives below
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
_aten, _collectives = torch.ops.aten, torch.ops._c10d_functional

KEPT = {
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten.topk,
    _collectives.all_reduce,
    _collectives.reduce_scatter_tensor,
    _collectives.all_gather_into_tensor,
    _collectives.all_to_all_single,
}
"""Operators whose results ``recompute_selectively`` keeps, besides copies from a device to the host."""
PRODUCTS = {_aten.mm, _aten.addmm, _aten._grouped_mm}
"""Products with weights: the first, the third, ... of a block is kept, the others run again."""


def recompute(block: nn.Module) -> None:
    """Make ``block`` keep only what enters it."""
    block.forward = checkpointed(block.forward, buffers_of=block)


def recompute_selectively(block: nn.Module) -> None:
    """Make ``block`` keep what enters it and the results of some operators."""
    block.forward = checkpointed(block.forward, selective=True, buffers_of=block)


def checkpointed(
    forward: Callable[..., Any], selective: bool = False, buffers_of: nn.Module | None = None
) -> Callable[..., Any]:
    """Return ``forward`` under ``torch.utils.checkpoint``, which writes the buffers of ``buffers_of`` the first time only."""

    def contexts() -> Contexts:
        first, again = _selective_contexts() if selective else (nullcontext(), nullcontext())
        return first, again if buffers_of is None else _CopiedBuffers(buffers_of, again)

    return functools.partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _selective_contexts() -> Contexts:
    """Make the contexts of a forward and of its repetition, which keep the results of operators and take them."""
    products = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = getattr(operator, "overloadpacket", operator)
        kept = name in KEPT or _goes_to_host(name, args, kwargs)
        if name in PRODUCTS:
            products[context.is_recompute] += 1
            kept = products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    forward, again = create_selective_checkpoint_contexts(policy)
    return forward, again


def _goes_to_host(name: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name is not _aten._to_copy or kwargs.get("device") is None:
        return False
    return torch.device(kwargs["device"]).type == "cpu" and bool(args[0].device.type != "cpu")


class _CopiedBuffers:
    """A context in which copies are in the place of the buffers of ``block``; ``inner`` is entered inside of it."""

    def __init__(self, block: nn.Module, inner: AbstractContextManager[Any]) -> None:
        self.block, self.inner = block, inner
        self.held: list[tuple[nn.Module, dict[str, Tensor | None]]] = []

    def __enter__(self) -> None:
        self.held = [(module, module._buffers) for module in self.block.modules() if module._buffers]
        for module, buffers in self.held:
            module._buffers = {name: None if tensor is None else tensor.clone() for name, tensor in buffers.items()}
        self.inner.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self.inner.__exit__(*raised)
        for module, buffers in self.held:
            module._buffers = buffers
