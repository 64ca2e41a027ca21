"""Recomputation: a block keeps what enters it, and in the backward runs its forward again to have the rest.

    recompute(block)                           keeps nothing else: its collectives run again, too
    recompute_selectively(block)               keeps the results of KEPT, and of every second product; edit this list
    recompute_but(block, {"product": (0, 3)})  keeps the results of these calls of operators, counted in the forward

The engine is ``torch.utils.checkpoint``, without reentrance. Nothing here depends on torch's random generators: dropout
draws from keys that enter the block. Buffers that are written (statistics of BatchNorm) are copied before a block runs;
the forward that runs again reads and writes the copies.
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers the collectives below
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
Keeps = Callable[[str, int], bool]
"""Whether the result of an operator is kept, by its name and the number of its call."""
_aten, _collectives = torch.ops.aten, torch.ops._c10d_functional

NAMES = {
    _aten.mm: "product",
    _aten.addmm: "product",
    _aten._grouped_mm: "product",
    _aten._scaled_mm: "product",
    _aten._scaled_dot_product_flash_attention: "attention",
    _aten._scaled_dot_product_efficient_attention: "attention",
    _aten._scaled_dot_product_cudnn_attention: "attention",
    _aten._scaled_dot_product_flash_attention_for_cpu: "attention",
    _collectives.all_reduce: "all_reduce",
    _collectives.reduce_scatter_tensor: "reduce_scatter",
    _collectives.all_gather_into_tensor: "all_gather",
    _collectives.all_to_all_single: "all_to_all",
}
"""Operators that are counted under one name; the others have torch's, and copies from a device to the host
``to_host``."""
KEPT = {
    "attention",
    "torch_attn._varlen_attn",
    "aten.topk",
    "to_host",
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
}
"""What ``recompute_selectively`` keeps, besides the first, the third, ... product with a weight."""


def recompute(block: nn.Module, writes: Sequence[str] = ()) -> None:
    """Make ``block`` keep only what enters it, and ``writes``, buffers that are written, as they were in the
    forward."""
    block.forward = checkpointed(block.forward, None, block, writes)


def recompute_selectively(block: nn.Module, writes: Sequence[str] = ()) -> None:
    """Make ``block`` keep what enters it and the results of some operators."""
    block.forward = checkpointed(block.forward, selected, block, writes)


def recompute_but(block: nn.Module, kept: Mapping[str, Sequence[int]], writes: Sequence[str] = ()) -> None:
    """Make ``block`` keep what enters it and the results of ``kept``: numbers of calls, by the operator's name."""
    block.forward = checkpointed(block.forward, listed_in(kept), block, writes)


def selected(name: str, number: int) -> bool:
    return name in KEPT or (name == "product" and number % 2 == 0)


def listed_in(kept: Mapping[str, Sequence[int]]) -> Keeps:
    return functools.partial(_is_listed, kept)


def _is_listed(kept: Mapping[str, Sequence[int]], name: str, number: int) -> bool:
    return number in kept.get(name, ())


def checkpointed(
    forward: Callable[..., Any], keeps: Keeps | None = None, block: nn.Module | None = None, writes: Sequence[str] = ()
) -> Callable[..., Any]:
    """Return ``forward`` under ``torch.utils.checkpoint``; again it reads and writes copies of the buffers ``writes``
    of ``block``."""
    contexts = functools.partial(_contexts, keeps, block, writes)
    return functools.partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _contexts(keeps: Keeps | None, block: nn.Module | None, writes: Sequence[str]) -> Contexts:
    first, again = (nullcontext(), nullcontext()) if keeps is None else _selective_contexts(keeps)
    if block is None or not writes:
        return first, again
    buffers = {name: block.get_buffer(name).clone() for name in writes}
    return first, _Buffers(block, buffers, again)


def _selective_contexts(keeps: Keeps) -> Contexts:
    """Make the contexts of a forward and of its repetition, which keep the results of operators and take them."""
    calls = {False: Counter[str](), True: Counter[str]()}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name, made = name_of(operator, args, kwargs), calls[context.is_recompute]
        made[name] += 1
        return CheckpointPolicy.MUST_SAVE if keeps(name, made[name] - 1) else CheckpointPolicy.PREFER_RECOMPUTE

    forward, again = create_selective_checkpoint_contexts(policy)
    return forward, again


def name_of(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the name under which an operator is counted."""
    packet = getattr(operator, "overloadpacket", operator)
    target = kwargs.get("device") if packet is _aten._to_copy else None
    if target is not None and torch.device(target).type == "cpu" and args[0].device.type != "cpu":
        return "to_host"
    return NAMES.get(packet) or str(packet)


class _Buffers:
    """A context in which copies of ``values`` are in the place of the buffers of ``block``; ``inner`` is entered inside
    of it."""

    def __init__(self, block: nn.Module, values: Mapping[str, Tensor], inner: AbstractContextManager[Any]) -> None:
        self.block, self.values, self.inner = block, values, inner
        self.held: dict[str, Tensor] = {}

    def __enter__(self) -> None:
        self.held = {name: self.block.get_buffer(name) for name in self.values}
        self._put({name: value.clone() for name, value in self.values.items()})
        self.inner.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self.inner.__exit__(*raised)
        self._put(self.held)

    def _put(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            owner, _, last = name.rpartition(".")
            self.block.get_submodule(owner)._buffers[last] = value
