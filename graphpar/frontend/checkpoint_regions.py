"""The user's own ``torch.utils.checkpoint`` regions: run as they are, and noted with the modules they run.

They change no value, but the backward runs a region again, and what it writes to buffers is written again:

    BatchNorm in a region    two steps of its running average by one batch, as one step    momentum m -> 1 - (1 - m)^2
    any other write          refused
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, fx, nn

from graphpar.errors import GraphparError
from graphpar.frontend.trace_guards import FunctionMode, written_by
from graphpar.ir.program import memory_of, operator_name
from graphpar.ir.source import stack_line
from graphpar.runtime.torch_versions import CHECKPOINTS


class Regions:
    """The regions of one trace.

    Attributes:
        paths: of each, that of the module which it runs; "" of a function.
        norms: the running means of BatchNorm that regions write.
    """

    def __init__(self, model: nn.Module, training: bool) -> None:
        self.model, self.training = model, training
        self.paths: list[str] = []
        self.norms: set[str] = set()
        self.open: list[bool] = []  # whether each that is open is reentrant, outermost first

    @property
    def runs(self) -> int:
        """How often all that is open is run: regions that aren't reentrant are run again together."""
        again = (kind or not place or self.open[place - 1] for place, kind in enumerate(self.open))
        return 1 + sum(again)

    @contextlib.contextmanager
    def entered(self, function: Any, reentrant: bool) -> Iterator[None]:
        """Note a region, and run inside with its writes as often as they are made."""
        self.paths.append(region_of(self.model, function))
        before = dict(self.model.named_buffers())
        self.open.append(reentrant)
        try:
            again = self.training and len(self.open) == 1 and torch.is_grad_enabled()
            with _WrittenAgain(self) if again else contextlib.nullcontext():
                yield
        finally:
            self.open.pop()
        for name, buffer in self.model.named_buffers() if self.training and torch.is_grad_enabled() else ():
            if buffer is not before[name]:
                raise _refused(name)

    def check(self, graph: fx.Graph) -> None:
        """Refuse BatchNorm that a region writes and that is called elsewhere, too: the backward goes through calls in another order.

        Raises:
            GraphparError: there is one.
        """
        first: dict[int, str] = {}
        names = {n: first.setdefault(id(b), n) for n, b in self.model.named_buffers(remove_duplicate=False)}
        norms = (node.args[3] for node in graph.nodes if operator_name(node) == "batch_norm")
        calls = [names[str(mean.target)] for mean in norms if isinstance(mean, fx.Node) and str(mean.target) in names]
        for name in calls:
            if name in self.norms and calls.count(name) > 1:
                raise _refused(name)


def _refused(name: str) -> GraphparError:
    place = stack_line()
    return GraphparError(
        f"The buffer {name!r} is written in a region of torch.utils.checkpoint{f' ({place})' if place else ''}, which the backward runs "
        "again, and so does the write. Write it outside of the region; or leave checkpoint out, and compile with --recompute."
    )


class _WrittenAgain(FunctionMode):
    """Makes what a region writes to buffers what it has written after the backward, too."""

    def __init__(self, regions: Regions) -> None:
        super().__init__()
        self.regions = regions
        self.buffers = {memory_of(buffer): name for name, buffer in regions.model.named_buffers()}
        self.modules = {
            id(module.running_mean): module
            for module in regions.model.modules()
            if isinstance(module, nn.modules.batchnorm._NormBase)
        }

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call ``function``.

        Raises:
            GraphparError: it writes a buffer, and is not BatchNorm.
        """
        if function is F.batch_norm:
            given = inspect.signature(F.batch_norm).bind(*args, **options)
            given.apply_defaults()
            return self._batch_norm(**given.arguments)
        written = written_by(function, args, options)
        if function is F.instance_norm:
            written = [value for value in args[1:2] if isinstance(value, Tensor)]
        for tensor in written:
            name = self.buffers.get(memory_of(tensor))
            counts = any(module.num_batches_tracked is tensor for module in self.modules.values())
            if name is not None and not counts:
                raise _refused(name)
        return function(*args, **options)

    def _batch_norm(
        self, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, **options: Any
    ) -> Tensor:
        weights = (input, options["weight"], options["bias"])
        if running_mean is None:
            return F.batch_norm(input, running_mean, running_var, **options)
        if options["training"] and not torch.is_grad_enabled():
            raise _refused(self.buffers[memory_of(running_mean)])
        if any(value is not None and value.requires_grad for value in weights):
            runs = self.regions.runs
            options["momentum"] = 1 - (1 - options["momentum"]) ** runs
            module = self.modules.get(id(running_mean))
            self.regions.norms.add(self.buffers[memory_of(running_mean)])
            if options["training"] and module is not None and module.num_batches_tracked is not None:
                module.num_batches_tracked.add_(runs - 1)
        return F.batch_norm(input, running_mean, running_var, **options)


@contextlib.contextmanager
def plain_regions(regions: Regions) -> Iterator[None]:
    """Run regions without ``torch.utils.checkpoint``."""
    checkpoint: Any = torch.utils.checkpoint
    before = getattr(checkpoint, CHECKPOINTS)

    def without_reentrance(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        with regions.entered(function, False):
            yield

    def reentrant(function: Any, preserve: bool, *args: Any) -> Any:
        grad = torch.set_grad_enabled(any(isinstance(value, Tensor) and value.requires_grad for value in args))
        with grad, regions.entered(function, True):
            return function(*args)

    setattr(checkpoint, CHECKPOINTS, without_reentrance)
    checkpoint.CheckpointFunction.apply = staticmethod(reentrant)
    try:
        yield
    finally:
        setattr(checkpoint, CHECKPOINTS, before)
        del checkpoint.CheckpointFunction.apply


def region_of(model: nn.Module, function: Any) -> str:
    """Return the path of the module that ``function`` runs: itself, what a method belongs to, or the one that it holds; else ""."""
    paths: dict[int, str] = {}
    for path, module in model.named_modules():
        paths.setdefault(id(module), path)
    held: list[Any] = []
    while isinstance(function, functools.partial):
        held += function.args
        function = function.func
    held += [function, getattr(function, "__self__", None)]
    if inspect.isfunction(function):
        held += inspect.getclosurevars(function).nonlocals.values()
    modules = {id(value): paths[id(value)] for value in held if isinstance(value, nn.Module) and id(value) in paths}
    return next(iter(modules.values())) if len(modules) == 1 else ""
