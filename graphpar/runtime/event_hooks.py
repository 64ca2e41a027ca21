"""Where events and delays come from: hooks of a stage's units, and the methods of FSDP2's parameter groups.

Attached only where the environment asks for events or delays; a stage without them runs as torch made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from graphpar.runtime.delays import delay, read_delays
from graphpar.runtime.events import at, event, read_events
from graphpar.runtime.fully_sharded import groups_of


def watch(
    stages: Sequence[tuple[str, nn.Module]],
    pipelined: Sequence[PipelineStage],
    rank: int,
    device: torch.device,
    ranks: int,
) -> None:
    """Make these stages, given with their names, write events and delay, if the environment of this rank asks for either.

    Args:
        pipelined: the same stages, as torch's schedules run them.
        ranks: how many the program has.

    Raises:
        RuntimeProgramError: what the environment asks for is not understood.
    """
    delayed, shown = read_delays(rank, device, ranks), read_events(rank)
    if not (delayed or shown):
        return
    for stage, root in stages:
        for path, module in root.named_modules():
            if isinstance(module, FSDPModule):
                for group in groups_of(module):
                    _watch_group(group, path or stage)
            if shown and type(module).forward is not nn.Module.forward and not _is_layer(module):
                _watch_calls(module, path or stage, gathered=isinstance(module, FSDPModule))
    for each in pipelined if shown else ():
        _watch_microbatches(each)


def _is_layer(module: nn.Module) -> bool:
    """Whether a module is one of torch's, such as ``nn.Linear``: blocks and stages call them, and their calls are no events."""
    own = (base for base in type(module).__mro__ if base.__module__.startswith("torch.nn.modules."))
    return any(base is not nn.Module for base in own)


def _watch_calls(module: nn.Module, unit: str, gathered: bool) -> None:
    """Write when the module's forward and backward begin and end. Hooks of FSDP2, which come first, gather and free."""

    def begins(_: nn.Module, args: Any, kwargs: Any) -> None:
        event("forward", unit)
        inputs = [value for value in _tensors((args, kwargs)) if value.requires_grad]
        if inputs and not gathered:  # FSDP2 says it itself
            torch.autograd.graph.register_multi_grad_hook(inputs, lambda _: event("backward_done", unit))

    def returns(module: nn.Module, args: Any, output: Any) -> None:
        outputs = [value for value in _tensors(output) if value.requires_grad]
        if outputs:
            torch.autograd.graph.register_multi_grad_hook(outputs, lambda _: event("backward", unit), mode="any")

    module.register_forward_pre_hook(begins, with_kwargs=True)
    module.register_forward_hook(lambda *_: event("forward_done", unit), prepend=True)
    module.register_forward_hook(returns)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _watch_group(group: Any, unit: str) -> None:
    """Write and delay what FSDP2 does with the parameters of one unit."""
    unshard, wait, to_sharded = group.unshard, group.wait_for_unshard, group._to_sharded
    post_backward, finalize = group.post_backward, group.finalize_backward
    reduces = [False]

    def gathers(*args: Any, **kwargs: Any) -> None:
        starts = group._all_gather_result is None and not group.is_unsharded
        if starts:
            delay("before_gather")
            event("gather", unit)
        unshard(*args, **kwargs)

    def waits() -> None:
        if group._all_gather_result is not None:
            event("gather_wait", unit)
        wait()

    def frees() -> None:
        if group.is_sharded:
            return
        delay("before_free")
        to_sharded()
        event("free", unit)

    def backward_done(*args: Any) -> None:
        event("backward_done", unit)
        post_backward(*args)

    def finalizes() -> None:
        if reduces[0]:
            event("reduce_done", unit)
        reduces[0] = False
        finalize()

    def starts_to_reduce() -> None:
        reduces[0] = True
        delay("before_reduce")
        event("reduce", unit)

    group.unshard, group.wait_for_unshard, group._to_sharded = gathers, waits, frees
    group.post_backward, group.finalize_backward = backward_done, finalizes
    group._reduce_scatter_comm = _Reduction(group._reduce_scatter_comm, starts_to_reduce)


class _Reduction:
    """A reduce-scatter that says when it starts."""

    def __init__(self, wrapped: Any, starts: Callable[[], None]) -> None:
        self.wrapped, self.starts = wrapped, starts

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        """As the wrapped one does."""
        buffer: Tensor = self.wrapped.allocate(*args, **kwargs)
        return buffer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.starts()
        return self.wrapped(*args, **kwargs)


def _watch_microbatches(stage: PipelineStage) -> None:
    """Say which microbatch the events of a stage belong to, where torch's schedule runs it."""
    for name, chunk in (("forward_one_chunk", "fwd_chunk_id"), ("backward_one_chunk", "bwd_chunk_id"),
                        ("backward_weight_one_chunk", "bwd_chunk_id")):  # fmt: skip
        setattr(stage, name, _of_microbatch(getattr(stage, name), chunk))


def _of_microbatch(call: Callable[..., Any], chunk: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        at(microbatch=kwargs.get(chunk, args[0] if args else None))
        return call(*args, **kwargs)

    return run
