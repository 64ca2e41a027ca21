"""The flat buckets in which gradients are summed, and which of them exist on any rank.

gradients of some parameters ──send()──► one tensor, an all-reduce under way ──receive()──► their sums
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphpar.runtime.debugging.events import delay, event
from graphpar.runtime.distributed import read_later
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.state.fully_sharded import like, local
from graphpar.runtime.state.units import Unit, pieces_of

BUCKET_BYTES = 25 * 2**20
"""The largest bucket of one all-reduce; a larger parameter has one alone."""


@dataclass(frozen=True)
class Started:
    """A sum that began in the backward, and of which of its gradients this rank had one."""

    flat: Tensor
    present: list[bool]


@dataclass(eq=False)
class Partial:
    """A parameter whose gradient must be summed, over ranks or several copies on this rank, or made equal."""

    copies: Sequence[nn.Parameter]
    name: str = ""
    alike: tuple[str, ...] = ()  # axes whose ranks compute the same gradient, but for its last bits
    before: list[Tensor | None] = field(default_factory=list)
    total: Tensor | None = None

    def take_part(self) -> Tensor | None:
        """Remove the gradients of this rank's copies and return their sum; ``None`` when no copy has one."""
        total: Tensor | None = None
        for copy in self.copies:
            if copy.grad is not None and copy.requires_grad:
                total = local(copy.grad) if total is None else total + local(copy.grad)
                copy.grad = None
        return total

    def give(self) -> None:
        """Set every copy's gradient to ``total`` (if there is one), added to what was set aside."""
        total = self.total
        for i, (copy, before) in enumerate(zip(self.copies, self.before)):
            if total is None:
                copy.grad = before
            elif before is None:
                copy.grad = like(copy, total if i == 0 else total.clone())
            else:
                local(before).add_(total)
                copy.grad = before
        self.before, self.total = [], None


@dataclass(eq=False)
class Sum:
    """The parameters whose gradients are summed over the same ranks; ``group`` is ``None`` when that is this rank
    alone."""

    group: dist.ProcessGroup | None
    reduced: bool = False  # whether these ranks are replicas
    beyond: bool = False  # whether they are more than that
    early: bool = False  # whether it may be summed while the backward still runs
    partials: list[Partial] = field(default_factory=list)


@dataclass(eq=False)
class Bucket:
    """Gradients that are summed by one all-reduce."""

    group: dist.ProcessGroup
    device: torch.device  # of the ranks, on which sums are made wherever gradients live
    partials: list[Partial]
    early: bool
    dtype: torch.dtype | None  # of the sum; None: that of the parameters
    incomplete: set[nn.Parameter] = field(default_factory=set)  # whose gradients of this step are yet to come
    present: list[bool] = field(default_factory=list)
    flat: Tensor | None = None
    work: dist.Work | None = None

    def send(self) -> None:
        """Start the all-reduce."""
        self.flat = self._taken()
        self.work = dist.all_reduce(self.flat, group=self.group, async_op=True)

    @property
    def alone(self) -> bool:
        """Whether it settles when the next one has started, so that the device holds two at most."""
        return any(partial.copies[0].device.type != self.device.type for partial in self.partials)

    def settle(self) -> None:
        """Wait for the sums, and let those of gradients that live on the host go there."""
        if self.work is not None:
            self.work.wait()
            self.work = None
            assert self.flat is not None
            if self.alone:
                self.flat = self.flat.cpu()

    def _taken(self) -> Tensor:
        """Remove this rank's gradients and return them in one tensor. Always a copy: two gradients may share memory."""
        parts = [partial.take_part() for partial in self.partials]
        self.present = [part is not None for part in parts]
        delay("before_reduce")
        event("reduce")
        given = [_or_zero(part, partial) for part, partial in zip(parts, self.partials)]
        flat = torch.cat([part.to(self.device).reshape(-1) for part in given])
        return flat if self.dtype is None else flat.to(self.dtype)

    def receive(self, has_gradient: Iterator[bool]) -> None:
        """Wait for the sums, and give those that some rank has (``has_gradient``) to the parameters."""
        assert self.flat is not None
        self.settle()
        event("reduce_done")
        shapes = [local(partial.copies[0]).shape for partial in self.partials]
        for partial, gradient in zip(self.partials, pieces_of(self.flat, shapes)):
            partial.total = gradient.to(local(partial.copies[0])) if next(has_gradient) else None


@dataclass(eq=False, kw_only=True)
class UnitBucket(Bucket):
    """The gradients of a unit of ZeRO level 1: each rank gets the sums that belong to its pieces."""

    unit: Unit
    works: list[dist.Work] = field(default_factory=list)
    alone = True

    def send(self) -> None:
        """Start to sum them to the ranks of the pieces."""
        flat = self._taken()
        padding = self.unit.flat.numel() - flat.numel()
        self.works, self.flat = self.unit.reduce(torch.cat([flat, flat.new_zeros(padding)]) if padding else flat)

    def settle(self) -> None:
        """Wait for the sums, and free the rest of the unit's gradients."""
        assert self.flat is not None
        while self.works:
            self.works.pop().wait()
        if self.flat.numel() * self.flat.element_size() < self.flat.untyped_storage().nbytes():
            self.flat = self.flat.clone()

    def receive(self, has_gradient: Iterator[bool]) -> None:
        """Wait for the sums, and set the gradients of this rank's pieces that some rank has (``has_gradient``)."""
        self.settle()
        assert self.flat is not None
        event("reduce_done")
        for name, has_one in zip(self.unit.names, list(itertools.islice(has_gradient, len(self.unit.names)))):
            piece = self.unit.pieces.get(name)
            if has_one and piece is not None and piece.requires_grad:  # a piece may be frozen by itself
                piece.grad = self.flat[slice(*self.unit.places[name])].view(piece.shape).to(piece.dtype)


class Presence:
    """Which parameters of the buckets of a group have a gradient on some rank, so that all of them get the sum.

    It follows from the program and from ``requires_grad``. So ranks ask each other in every step, but wait for the answer only where what
    they ask is new. Else it comes to the host while the next step runs, and must then be what it was.
    """

    def __init__(self) -> None:
        self._question: tuple[object, ...] = ()
        self._flags = torch.empty(0)
        self._found: list[bool] | None = None
        self._coming: Callable[[], list[int]] | None = None
        self._names: list[str] = []

    def ask(self, group: dist.ProcessGroup, buckets: Sequence[Bucket], device: torch.device) -> None:
        """Start to ask the ranks of ``group``; a collective call."""
        self.check()
        partials = [partial for bucket in buckets for partial in bucket.partials]
        present = [flag for bucket in buckets for flag in bucket.present]
        copies = [copy for partial in partials for copy in partial.copies]
        question = (*present, *map(id, copies), *(copy.requires_grad for copy in copies))
        if question != self._question:
            self._question, self._found, self._names = question, None, [partial.name for partial in partials]
            self._flags = torch.tensor(present, dtype=torch.int32, device=device)
        flags = self._flags.clone()
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        self._coming = read_later(flags)

    def answer(self) -> list[bool]:
        """Return which have one; it waits for the device where that is not known."""
        if self._found is None:
            self._found = self._arrived()
        return self._found

    def check(self) -> None:
        """Look at the answer that was not waited for, if there is one.

        Raises:
            RuntimeProgramError: it is not the one before.
        """
        if self._coming is None or self._found is None:
            return
        found = self._arrived()
        if found != self._found:
            name = next(name for name, *two in zip(self._names, found, self._found) if two[0] != two[1])
            raise RuntimeProgramError(
                f"in the last step others began or ceased to have a gradient of {name}, and this one did not; train the same on all ranks"
            )

    def _arrived(self) -> list[bool]:
        assert self._coming is not None
        read, self._coming = self._coming, None
        return [bool(flag) for flag in read()]


def send(buckets: Sequence[Bucket], at: int) -> None:
    """Start the next sum, and let the one before it end where the device is to hold no more than two."""
    buckets[at].send()
    if at and buckets[at - 1].alone:
        buckets[at - 1].settle()


def _or_zero(part: Tensor | None, partial: Partial) -> Tensor:
    if part is not None:
        return part
    copy = partial.copies[0]
    return torch.zeros_like(local(copy), dtype=copy.grad_dtype or copy.dtype, requires_grad=False)


def buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Indices of tensors that are summed together: of one dtype, in order, at most ``BUCKET_BYTES`` or one alone."""
    closed: list[list[int]] = []
    filling: dict[torch.dtype, list[int]] = {}
    sizes: dict[torch.dtype, int] = {}
    for i, tensor in enumerate(tensors):
        size = tensor.numel() * tensor.element_size()
        if tensor.dtype in filling and sizes[tensor.dtype] + size > BUCKET_BYTES:
            closed.append(filling.pop(tensor.dtype))
        filling.setdefault(tensor.dtype, []).append(i)
        sizes[tensor.dtype] = size + (sizes[tensor.dtype] if len(filling[tensor.dtype]) > 1 else 0)
    return closed + list(filling.values())
