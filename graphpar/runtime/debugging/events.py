"""Events of a step, for timelines and tests, and delays at named points of it, so that a race between ranks, or between streams, shows.

    GRAPHPAR_EVENTS=events.jsonl      rank 1 writes events.jsonl.rank1
    {"time": 1.25, "rank": 1, "event": "gather", "unit": "layers.2", "step": 0, "microbatch": 1}
    GRAPHPAR_DELAY="after_loss:250,before_reduce:50@rank1"      milliseconds; on all ranks, or on one

An event is one JSON line; ``time`` is in seconds, as this machine's clock has it. A unit is a module path; ``stage_0`` is what is
around the blocks of a stage. Times are those of the host, which runs ahead of an accelerator. Pipelines read the variables when they are
built; all of a process write into one file, which the first of them empties.

A program that waits for what it uses computes the same numbers with any delays. Events and delays come from hooks of a stage's units and
from the methods of FSDP2's parameter groups, attached only where the environment asks for them.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from graphpar.runtime.errors import RuntimeProgramError, near_match
from graphpar.runtime.state.fully_sharded import groups_of

EVENTS_VARIABLE = "GRAPHPAR_EVENTS"
EVENTS = {
    "forward": "a unit's forward begins to compute",
    "forward_done": "... has computed",
    "backward": "a unit's backward begins to compute",
    "backward_done": "... has computed",
    "gather": "the all-gather of a unit's parameters starts",
    "gather_wait": "the unit waits for it",
    "free": "gathered parameters are freed",
    "reduce": "a reduction of gradients over ranks starts",
    "reduce_done": "... is waited for",
    "broadcast": "a broadcast of updated parameters starts",
    "broadcast_wait": "a unit waits for it",
}
"""The events, and what they say."""

listeners: list[Callable[[str, str | None], None]] = []
"""Called with the name and the unit of each event, of pipelines that are built while there are any."""

_file: TextIO | None = None
_now: dict[str, Any] = {}


def read_events(rank: int) -> bool:
    """Open the file that the environment names, and return whether there is one.

    Raises:
        RuntimeProgramError: it cannot be written.
    """
    global _file
    name = os.environ.get(EVENTS_VARIABLE)
    path = f"{name}.rank{rank}" if name else None
    if _file is not None and _file.name != path:
        _file.close()
        _file = None
    if path is not None and _file is None:
        try:
            _file = open(path, "w", buffering=1)  # noqa: SIM115  it stays open
        except OSError as error:
            raise RuntimeProgramError(
                f"{EVENTS_VARIABLE} is {name}, and {path} cannot be written: {error.strerror}"
            ) from None
    _now.clear()
    _now.update(rank=rank)
    return _file is not None


def event(name: str, unit: str | None = None) -> None:
    """Write an event of this step and microbatch, and tell listeners."""
    for listener in listeners:
        listener(name, unit)
    if _file is not None:
        assert name in EVENTS
        line = {"time": time.time(), "rank": _now["rank"], "event": name, "unit": unit}
        _file.write(json.dumps({**line, "step": _now.get("step"), "microbatch": _now.get("microbatch")}) + "\n")


def at(**place: int | None) -> None:
    """Say to which step, and which microbatch of it, the events belong that follow."""
    if _file is not None:
        _now.update(place)


DELAY_VARIABLE = "GRAPHPAR_DELAY"
POINTS = {
    "after_loss": "a forward of the last stage has computed its loss",
    "before_reduce": "gradients are about to be reduced over ranks",
    "before_free": "gathered parameters are about to be freed",
    "before_gather": "parameters are about to be gathered",
    "before_broadcast": "updated parameters are about to be sent to the other ranks",
}
"""The points, and where they are."""

_seconds: dict[str, float] = {}
_device = torch.device("cpu")


def read_delays(rank: int, device: torch.device, ranks: int) -> bool:
    """Read the delays of this one of ``ranks``, which computes on ``device``, from the environment, and return whether there are any.

    Raises:
        RuntimeProgramError: the variable is not as this module says.
    """
    global _device
    _device = device
    _seconds.clear()
    for entry in filter(None, os.environ.get(DELAY_VARIABLE, "").split(",")):
        found = re.fullmatch(r"\s*(\w+):(\d+(?:\.\d+)?)(?:@rank(\d+))?\s*", entry)
        if found is None or found[1] not in POINTS:
            hint = near_match(found[1], POINTS) if found else ""
            raise RuntimeProgramError(
                f"{DELAY_VARIABLE} has {entry.strip()!r}; it must be POINT:MILLISECONDS or POINT:MILLISECONDS@rankN, and the points "
                f"are {', '.join(POINTS)}.{hint}"
            )
        if found[3] is not None and int(found[3]) >= ranks:
            raise RuntimeProgramError(f"{DELAY_VARIABLE} has {entry.strip()!r}, but the ranks are 0 to {ranks - 1}")
        if found[3] is None or int(found[3]) == rank:
            _seconds[found[1]] = _seconds.get(found[1], 0.0) + float(found[2]) / 1000
    return bool(_seconds)


def delay(point: str) -> None:
    """Wait as long as was asked for at ``point``. On CUDA the current stream waits, about so long, and the host goes on: what
    does not wait for this stream runs earlier than it should.
    """
    seconds = _seconds.get(point)
    if seconds is None:
        return
    if _device.type == "cuda":
        rate = getattr(torch.cuda.get_device_properties(_device), "clock_rate", 1_500_000)  # in kHz
        torch.cuda._sleep(int(seconds * rate * 1000))
    else:
        time.sleep(seconds)


def watch(
    stages: Sequence[tuple[str, nn.Module]],
    pipelined: Sequence[PipelineStage],
    rank: int,
    device: torch.device,
    ranks: int,
) -> None:
    """Make these stages, given with their names, tell events and delay, if the environment of this rank or a listener asks for it.

    Args:
        pipelined: the same stages, as torch's schedules run them.
        ranks: how many the program has.

    Raises:
        RuntimeProgramError: what the environment asks for is not understood.
    """
    delayed, shown = read_delays(rank, device, ranks), read_events(rank) or bool(listeners)
    if not (delayed or shown):
        return
    for stage, root in stages:
        for path, module in root.named_modules():
            if isinstance(module, FSDPModule):
                for group in groups_of(module):
                    _watch_group(group, path or stage)
            if shown and type(module).forward is not nn.Module.forward and not _is_layer(module):
                _watch_calls(module, path or stage, gathered=isinstance(module, FSDPModule))
    watch_actions(pipelined)


def watch_actions(pipelined: Sequence[PipelineStage]) -> None:
    """Say which microbatch events belong to, where torch's schedule runs these stages and events are shown."""
    for each in pipelined if _file is not None or listeners else ():
        for call in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
            chunk = "fwd_chunk_id" if call.startswith("forward") else "bwd_chunk_id"
            setattr(each, call, _of_microbatch(getattr(each, call), chunk))


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
            # A schedule that splits backwards asks for the gradients of leaves, of which torch can't wait for all.
            if any(value.is_leaf for value in inputs):
                torch.autograd.graph.register_multi_grad_hook(
                    inputs, lambda _: event("backward_done", unit), mode="any"
                )
            else:
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


def _of_microbatch(call: Callable[..., Any], chunk: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        at(microbatch=kwargs.get(chunk, args[0] if args else None))
        return call(*args, **kwargs)

    return run
