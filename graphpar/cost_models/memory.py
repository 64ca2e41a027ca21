"""``Memory``: the bytes of one rank at its peak, by purpose; computed by :mod:`graphpar.cost_models.unit_bytes`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphpar.ir.program import OptimizerState, Program
from graphpar.runtime.state.optimizers import made_by

MAIN_DTYPE = torch.float32
"""The dtype of an optimizer's copies of low-precision parameters."""
ALLOCATOR_SLACK = 0.05
"""The allocator's overhead as a share of the memory that is allocated and freed in a step (assumed): it rounds tensors up to 512
bytes and segments to 2 MiB, and fragments."""


class _Numbers(TorchDispatchMode):
    """Answers with 1 what asks a tensor without values for a number."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


def with_optimizer(program: Program, make: Callable[..., Any] | None) -> Program:
    """Return a program that was just captured with what the optimizer that ``make`` makes keeps between steps.

    It is stepped once, over parameters without values. Where that fails, a warning says that AdamW's state is assumed.
    """
    first = {program.tie_of(name)[0] for name in program.parameters}
    pairs = [
        (
            name,
            nn.Parameter(
                torch.empty(info.shape, dtype=program.stored.get(name, info.dtype), device="meta"), info.requires_grad
            ),
        )
        for name, info in program.parameters.items()
        if name in first
    ]
    trained = [parameter for _, parameter in pairs if parameter.requires_grad]
    if not trained or program.mode != "train":
        return program
    if make is None:
        return program.warn(_unused(program.configures)) if program.configures else program
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    try:
        with torch.random.fork_rng(devices=[]), _Numbers():
            made = made_by(make, pairs)
            made.step()
    except Exception as error:
        return program.warn(
            f"The model file's optimizer can't be stepped on parameters without values ({type(error).__name__}: {error}), so bytes and "
            "seconds are those of AdamW."
        )
    kept = [each for each in _pytree.tree_leaves(dict(made.state)) if isinstance(each, Tensor) and each.ndim]
    ratio = sum(each.nbytes for each in kept) / sum(parameter.nbytes for parameter in trained)
    return replace(program, optimizer=OptimizerState(type(made).__name__, round(ratio, 3)))


def _unused(call: str) -> str:
    return (
        "The model has configure_optimizers, but the model file has no optimizer, so training takes AdamW with torch's defaults. "
        f"To use it, write in the model file: def optimizer(named): return {call}"
    )


@dataclass(frozen=True)
class HostMemory:
    """Bytes of one rank in the memory of its host, at the peak.

    Attributes:
        optimizer: the state of the optimizer.
        activations: what blocks keep of the microbatches in flight.
        parameters, gradients: shards of them.
    """

    optimizer: int = 0
    activations: int = 0
    parameters: int = 0
    gradients: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.optimizer + self.activations + self.parameters + self.gradients


class Most(NamedTuple):
    """The bytes of activations that a rank keeps, of whole parameters and gradients of sharded state, and of what the running action needs
    on top, where their sum is the most; None: the last is that of any action."""

    activations: int
    whole: int = 0
    transient: int | None = None


class Moment(NamedTuple):
    """The moment of an only stage at which the most is there: the bytes of its microbatch, of gradients, of parameters that are gathered,
    and what is needed on top."""

    kept: int
    gradients: int
    gathered: int
    on_top: int

    @property
    def nbytes(self) -> float:
        """All of them, with the allocator's overhead."""
        return self.gradients + (1 + ALLOCATOR_SLACK) * (self.kept + self.gathered + self.on_top)


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        optimizer: the state of the optimizer on the device; where it lives in the host's memory, the pieces that are updated at one time.
        copies: of parameters, in the dtype in which they are read, made once a step.
        buffers: buffers and constants.
        gradients: those that are there, of an only microbatch those of what has run backward.
        buckets: what is gathered of sharded parameters, and gradients that are yet to be reduced to shards.
        inputs: the replica's rows of the inputs that its stages take.
        cache: keys and values of generation, of all groups of sequences that are in flight.
        boundaries: of a message to each stage in both directions, which arrives ahead of time, and the last one on its way.
        activations: of the microbatches in flight, at the peak, with what stages received of them.
        transient: what the running forward or backward needs on top; for the loss its logits and their gradient. Or what sums of gradients
            or the optimizer's step need on top, where that is more: one bucket of gradients exists twice.
        slack: overhead of the allocator: what it reserves beyond what is allocated.
        communicators: of NCCL, which no allocator of torch counts.
    """

    parameters: int = 0
    copies: int = 0
    buffers: int = 0
    gradients: int = 0
    main_copies: int = 0
    optimizer: int = 0
    buckets: int = 0
    inputs: int = 0
    cache: int = 0
    boundaries: int = 0
    activations: int = 0
    transient: int = 0
    slack: int = 0
    communicators: int = 0

    def between_steps(self) -> Memory:
        """Return what stays from step to step, once gradients are dropped."""
        return self._only("parameters", "buffers", "main_copies", "optimizer", "communicators")

    def while_generating(self, other: Memory, copied: float) -> Memory:
        """Return what there is while another program, which takes ``other`` by itself, generates on these parameters between steps.

        Args:
            copied: the share of the bytes of its parameters that are gathered, or cast, for that time.
        """
        kept = self.between_steps()
        return replace(
            other,
            parameters=kept.parameters,
            copies=int(other.parameters * copied),
            buffers=kept.buffers + other.buffers,
            main_copies=kept.main_copies,
            optimizer=kept.optimizer,
            communicators=kept.communicators + other.communicators,
        )

    def after_backward(self, gradients: int) -> Memory:
        """Return what there is when the optimizer's step begins, with so many bytes of gradients."""
        return replace(self.between_steps(), gradients=gradients, inputs=self.inputs)

    def _only(self, *parts: str) -> Memory:
        return Memory(**{part: getattr(self, part) for part in parts})

    @property
    def total(self) -> int:
        """All bytes of the rank: what the allocator reserves, and the communicators."""
        return sum(getattr(self, part.name) for part in fields(self))

    @property
    def allocated(self) -> int:
        """The bytes of the rank's tensors."""
        return self.total - self.slack - self.communicators
