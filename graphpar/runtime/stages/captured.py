"""Forward and backward of a step as one list of calls, which is replayed without Python: a CUDA graph.

    step 0    runs
    step 1    runs, and what waits for the device, or computes on the host, is looked for
    step 2    is captured: its batch, losses and gradients have memory that stays theirs
    later     batch ──copied there──► replay ──► losses, gradients, and the sums that began in the backward

Steps of other shapes, or with other parameters to train, are captured by themselves. A step runs as it did before where gradients are
there already: they would be added up in memory that a replay writes.

A CPU has no such graphs. There the calls of torch's operators are kept in a list, and replayed one after the other: that is slower, and
proves that a step follows from its batch and its parameters alone, as a CUDA graph needs.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphpar.runtime.manifest import Manifest
from graphpar.runtime.stages.dropout import KERNEL
from graphpar.runtime.state.gradient_buckets import Started
from graphpar.runtime.state.gradients import Gradients
from graphpar.runtime.state.parameters import Replicated

KEPT, IDLE, KNOWN = 4, 64, 64
"""How many captured steps are kept, after how many steps in which it was not replayed one gives its place to another, and of how many other
steps it is known how often they ran."""
Run = Callable[[Mapping[str, Tensor]], Tensor | None]
"""Forward and backward of a replica's rows; returns the losses of its microbatches."""


def obstacle(program: Manifest) -> str | None:
    """Say why steps of ``program`` can't be captured, as far as its plan tells."""
    if program.mode != "train":
        return "only steps of training are captured"
    if program.fully_sharded:
        return f"ZeRO {program.zero} frees and allocates parameters as it gathers them"
    if program.scales_loss:
        return "the loss scale of fp16 is a number of the host, which changes"
    if program.dropout == KERNEL:
        return "dropout=kernel seeds torch's generator on the host"
    if program.offload:
        return f"offload={','.join(program.offload)} copies to the host"
    return None


def _unseen(device: torch.device, backend: str | None) -> str | None:
    """Say why a list of calls would lack some: kernels that a backend makes for a CPU are no operators."""
    if device.type != "cuda" and backend not in (None, "eager", "aot_eager"):
        return (
            f"on a CPU calls of operators are replayed, and blocks that {backend} compiles call none; add --no-compile"
        )
    return None


class Captured:
    """Runs the steps of a program, of which it captures what it can.

    Args:
        package: the name under which the emitted package is imported.
        backend: of ``torch.compile``, which compiles blocks.

    Attributes:
        reason: why steps are not captured; none, as long as nothing is known to prevent it.
        replays: how many steps were replayed.
    """

    def __init__(
        self,
        program: Manifest,
        parameters: Replicated,
        gradients: Gradients,
        device: torch.device,
        package: str,
        backend: str | None = None,
    ) -> None:
        self._parameters, self._gradients, self._device, self._package = parameters, gradients, device, package
        self._steps: dict[Any, _Step] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.reason = obstacle(program) or _unseen(device, backend)
        self.replays = self._ran = 0
        if parameters.groups.rank == 0:
            self._say()

    def _say(self) -> None:
        """Warn on the first rank of each stage. Ranks need not agree: a step that is replayed sends and sums what a step that runs does."""
        place = self._parameters.groups.place
        if self.reason is not None and not any(place[axis] for axis in place if axis != "pp"):
            warnings.warn(f"steps are not captured: {self.reason}", stacklevel=2)

    def takes(self, accumulate: bool) -> bool:
        """Whether the step that is about to begin may be captured or replayed; asked before gradients are set aside."""
        stages = self._parameters.stages
        return (
            self.reason is None
            and not accumulate
            and all(parameter.grad is None for stage in stages for parameter in stage.parameters())
        )

    def run(self, run: Run, values: Mapping[str, Tensor]) -> Tensor | None:
        """Run, capture or replay a step; returns the losses of its microbatches.

        Args:
            run: forward and backward of ``values``.
            values: the inputs and counts of this replica's rows.
        """
        self._parameters.arrive()
        step = self._step(values)
        step.seen, step.last, self._ran = step.seen + 1, self._ran, self._ran + 1
        if step.seen == 1 or (step.seen > 2 and step.graph is None and not self._has_place()):
            return run(values)
        if step.seen == 2:
            with _watched(self._package) as found:
                losses = run(values)
            if found:
                self.reason = found[0]
                self._steps.clear()
                self._say()
            return losses
        if step.graph is None:
            self._capture(step, run, values)
        else:
            for name, value in step.values.items():
                value.copy_(values[name])
            step.graph.replay()
            for parameter, gradient in step.gradients:
                parameter.grad = gradient
            self._gradients.put_started(step.started)
            self.replays += 1
        return None if step.losses is None else step.losses.clone()

    def _step(self, values: Mapping[str, Tensor]) -> _Step:
        """Return the step of these shapes, memory of parameters and parameters to train."""
        stages = self._parameters.stages
        hooks = [hook for stage in stages for hook in _hooks(stage)]
        state = [tensor for stage in stages for tensor in (*stage.parameters(), *stage.buffers())]
        key = (
            tuple((name, value.shape, value.dtype) for name, value in values.items()),
            tuple((tensor.data_ptr(), tensor.requires_grad) for tensor in state),
            tuple(module.training for stage in stages for module in stage.modules()),
            tuple(map(id, hooks)),
        )
        if key not in self._steps:
            others = [each for each, step in self._steps.items() if step.graph is None]
            for other in others[: max(0, len(others) - KNOWN + 1)]:
                del self._steps[other]
            self._steps[key] = _Step(hooks)
        return self._steps[key]

    def _has_place(self) -> bool:
        """Whether one more step may be captured; the one that was not replayed for the longest time gives way."""
        captured = sorted((step.last, key) for key, step in self._steps.items() if step.graph is not None)
        if len(captured) < KEPT:
            return True
        last, key = captured[0]
        if self._ran - last <= IDLE:
            return False
        del self._steps[key]
        return True

    def _capture(self, step: _Step, run: Run, values: Mapping[str, Tensor]) -> None:
        step.values = {name: value.clone() for name, value in values.items()}
        graph: _Graph = _CudaGraph(self._pool) if self._device.type == "cuda" else _Calls()

        def once() -> None:
            step.losses = run(step.values)
            step.started = self._gradients.started()

        graph.capture(once)
        step.graph = graph
        parameters = [parameter for stage in self._parameters.stages for parameter in stage.parameters()]
        step.gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]


def _hooks(stage: nn.Module) -> Iterator[Any]:
    """Yield the hooks of the modules and parameters of ``stage``, which run when a step is captured, and not when it is replayed."""
    for module in stage.modules():
        for hooks in (
            module._forward_pre_hooks,
            module._forward_hooks,
            module._backward_pre_hooks,
            module._backward_hooks,
        ):
            yield from hooks.values()
    for parameter in stage.parameters():
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            yield from (getattr(parameter, name, None) or {}).values()


@dataclass(eq=False)
class _Step:
    """A step as it was captured, with memory for what goes into it and what comes out."""

    hooks: list[Any]  # which it keeps, so that no other has the id of one
    seen: int = 0
    last: int = 0
    graph: _Graph | None = None
    values: dict[str, Tensor] = field(default_factory=dict)
    losses: Tensor | None = None
    gradients: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)


class _Graph(Protocol):
    def capture(self, run: Callable[[], None]) -> None:
        """Keep what ``run`` does on the device, and do it."""

    def replay(self) -> None:
        """Do it again, in the same memory."""


class _CudaGraph:
    """Kernels and collectives of nccl, which one call starts."""

    def __init__(self, pool: Any) -> None:
        self._graph, self._pool = (
            torch.cuda.CUDAGraph(),
            pool,
        )  # of memory, which the steps that are kept have in common

    def capture(self, run: Callable[[], None]) -> None:
        # threads of nccl ask for events meanwhile, which only a capture of one thread allows
        with torch.cuda.graph(self._graph, self._pool, capture_error_mode="thread_local"):
            run()
        self._graph.replay()  # capturing computes nothing

    def replay(self) -> None:
        self._graph.replay()


class _Calls(TorchDispatchMode):
    """Calls of operators, whose results are written where they were the first time."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled functions may run inside."""
        return True

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        if operator.namespace != "profiler":
            self._calls.append((operator, args, kwargs or {}, result))
        return result

    def capture(self, run: Callable[[], None]) -> None:
        with self:
            run()

    @torch.no_grad()
    def replay(self) -> None:
        coming, sent = (
            dict[int, list[Any]](),
            list[Any](),
        )  # what stages receive, by its memory, and what they have sent
        for operator, args, kwargs, first in self._calls:
            packet, memory = operator.overloadpacket, {_memory(each) for each in _tensors((args, kwargs))}
            if packet not in (torch.ops.c10d.send, torch.ops.c10d.recv_):
                for work in [work for each in memory & coming.keys() for work in coming.pop(each)]:
                    work.wait()  # a second time would wait for another message
            again = operator(*args, **kwargs)
            if packet is torch.ops.c10d.send:
                sent.append(_work_of(again))
                continue
            if packet is torch.ops.c10d.recv_:
                coming.setdefault(memory.pop(), []).append(_work_of(again))
                continue
            for then, now in zip(tree_leaves(first), tree_leaves(again), strict=True):
                if isinstance(now, torch.ScriptObject):  # of a collective that has begun
                    _work_of(now).wait()
                elif isinstance(now, Tensor) and _memory(now) != _memory(then):
                    if operator.namespace == "_c10d_functional":
                        now = torch.ops._c10d_functional.wait_tensor(now)
                    then.detach().copy_(now)
        for work in [*sent, *(work for works in coming.values() for work in works)]:
            work.wait()


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _work_of(boxed: Any) -> Any:
    return torch._C._distributed_c10d.Work.unbox(boxed)


class _Watch(TorchDispatchMode):
    """Looks for operators whose results, or whose sizes, the host waits for."""

    def __init__(self, package: str, found: list[str]) -> None:
        super().__init__()
        self._package, self._found = package, found

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled functions may run inside."""
        return True

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        reason = _reason(operator, args, kwargs, result)
        if reason is not None:
            self.found(reason)
        return result

    def found(self, what: str) -> None:
        self._found.append(f"{what}{_line(sys._getframe(2), self._package)}")


def _reason(operator: Any, args: Any, kwargs: Any, result: Any) -> str | None:
    """Say why a call of an operator can't be captured."""
    given, made = _tensors((args, kwargs)), _tensors(result)
    name = operator.overloadpacket
    if len({each.device.type for each in (*given, *made)}) > 1:
        return f"{name} takes or makes a tensor on the host"
    varies = torch.Tag.dynamic_output_shape in operator.tags
    if varies and name is torch.ops.aten.index:  # by a mask: as many elements as are true
        varies = any(each.dtype in (torch.bool, torch.uint8) for each in given[1:])
    if varies or torch.Tag.data_dependent_output in operator.tags:
        return f"{name} waits for the device"
    return None


def _line(frame: FrameType | None, package: str) -> str:
    """Say where in the emitted program ``frame`` was called."""
    while frame is not None and not frame.f_globals.get("__name__", "").startswith(f"{package}."):
        frame = frame.f_back
    if frame is None:
        return ""
    return f", in line {frame.f_lineno} of {frame.f_globals['__name__'].removeprefix(f'{package}.')}.py"


@contextmanager
def _watched(package: str) -> Iterator[list[str]]:
    """Collect what a step inside does that can't be captured."""
    found: list[str] = []
    mode, plain = _Watch(package, found), Tensor.tolist

    def tolist(tensor: Tensor) -> Any:  # reads the memory of a CPU without an operator
        mode.found("Tensor.tolist waits for the device")
        return plain(tensor)

    Tensor.tolist = tolist  # type: ignore[assignment, method-assign]
    try:
        with mode:
            yield found
    finally:
        Tensor.tolist = plain  # type: ignore[method-assign]
