"""Finish gradients: partial gradients of parameters are all-reduced once a step.

A gradient is partial over an axis on which its parameter is stored as R (data parallelism; the norm weights of
sequence parallelism), and over the copies of a parameter that several stages hold (tied weights). One mechanism:

    before a step        take(): set aside what earlier steps accumulated
    in the last backward all-reduces over replicas start, a flat bucket at a time, as soon as its gradients are complete
    after a step         finish(): start those of the other buckets, wait for all, add what was set aside

Then every rank that stores the parameter has the single-device gradient (its shard of it), with the same bits on all
ranks of a group.

Only groups that no forward or backward uses may start early, which are those over axes of replicas where no operator is
placed on them. All-reduces of buckets start in one order on all ranks, and that of an incomplete bucket (a zero-bubble
schedule adds weights' gradients outside autograd, or a parameter was not used) starts when the step ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphpar.runtime.axes import REPLICAS
from graphpar.runtime.fully_sharded import like, local
from graphpar.runtime.groups import Groups
from graphpar.runtime.layout import R, Shard
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.weights import names_by_tie

BUCKET_BYTES = 25 * 2**20
"""The largest bucket of one all-reduce; a larger parameter has one alone."""


@dataclass(eq=False)
class _Partial:
    """A parameter whose gradient must be summed: over ranks, over several copies on this rank, or both."""

    copies: list[nn.Parameter]
    before: list[Tensor | None] = field(default_factory=list)

    def take_part(self) -> Tensor | None:
        """Remove the gradients of this rank's copies and return their sum; ``None`` when no copy has one."""
        total: Tensor | None = None
        for copy in self.copies:
            if copy.grad is not None:
                total = local(copy.grad) if total is None else total + local(copy.grad)
                copy.grad = None
        return total

    def give(self, total: Tensor | None) -> None:
        """Set every copy's gradient to ``total`` (if there is one), added to what was set aside."""
        for i, (copy, before) in enumerate(zip(self.copies, self.before)):
            if total is None:
                copy.grad = before
            elif before is None:
                copy.grad = like(copy, total if i == 0 else total.clone())
            else:
                local(before).add_(total)
                copy.grad = before
        self.before = []


@dataclass(eq=False)
class _Sum:
    """The parameters whose gradients are summed over the same ranks; ``group`` is ``None`` when that is this rank
    alone."""

    group: dist.ProcessGroup | None
    early: bool = False  # whether it may be summed while the backward still runs
    partials: list[_Partial] = field(default_factory=list)


@dataclass(eq=False)
class _Bucket:
    """Gradients that are summed by one all-reduce."""

    group: dist.ProcessGroup
    partials: list[_Partial]
    early: bool
    incomplete: set[nn.Parameter] = field(default_factory=set)  # whose gradients of this step are yet to come
    present: list[bool] = field(default_factory=list)
    flat: Tensor | None = None
    work: dist.Work | None = None

    def send(self) -> None:
        """Start the all-reduce. Always of a copy: two gradients may share memory."""
        parts = [partial.take_part() for partial in self.partials]
        self.present = [part is not None for part in parts]
        self.flat = torch.cat([_or_zero(part, partial).reshape(-1) for part, partial in zip(parts, self.partials)])
        self.work = dist.all_reduce(self.flat, group=self.group, async_op=True)

    def received(self) -> list[Tensor]:
        """Return the sums, in the shapes of the parameters."""
        assert self.flat is not None
        if self.work is not None:
            self.work.wait()
        shapes = [local(partial.copies[0]).shape for partial in self.partials]
        return [piece.view(shape) for piece, shape in zip(self.flat.split([shape.numel() for shape in shapes]), shapes)]


class Gradients:
    """The gradients of this rank's parameters. Building it is a collective call: it creates process groups.

    ``requires_grad`` may be changed between steps, but alike on all ranks.
    """

    def __init__(self, stages: Sequence[nn.Module], program: Manifest, groups: Groups, device: torch.device) -> None:
        self.device = device
        self.microbatches = program.microbatches
        held = parameters_by_name(stages, program.ties)
        everyone = groups.gather("pp", {name: len(copies) for name, copies in held.items()})
        self.counted: list[nn.Parameter] = []
        """The parameters whose elements this rank counts, where each of the whole model's is counted once."""
        sums: dict[Any, _Sum] = {}
        for name in _order(everyone):
            holders = tuple(at for at, counts in enumerate(everyone) if name in counts)
            spec = program.stored(name)
            axes = tuple(axis for axis, kind in spec.items() if kind == R)
            key = axes, holders if len(holders) > 1 else None
            elsewhere = key != ((), None)
            if key not in sums:
                early = set(axes[:1]) <= set(REPLICAS) - set(program.placed) and key[1] is None and bool(axes)
                early &= name not in program.fully_sharded  # FSDP2 adds those up when the backward is done
                sums[key] = _Sum(groups.over(*key) if elsewhere else None, early)
            copies = held.get(name, [])
            if copies and (elsewhere or len(copies) > 1):
                sums[key].partials.append(_Partial(copies))
            replicated = [axis for axis, kind in spec.items() if not isinstance(kind, Shard)]
            if groups.place["pp"] == holders[0] and all(groups.place[axis] == 0 for axis in replicated):
                self.counted.append(copies[0])
        self._sums = sorted(sums.values(), key=lambda total: not total.early)
        self._alone: list[_Partial] = []
        self._buckets: list[_Bucket] = []
        self._sent = 0
        self._to_come: dict[nn.Parameter, tuple[int, _Bucket]] = {}
        arrived = weakref.WeakMethod(self._arrived)  # a parameter must not keep process groups alive
        for total in self._sums:
            for parameter in (copy for partial in total.partials if total.early for copy in partial.copies):
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(lambda p: call(p) if (call := arrived()) else None)

    def take(self) -> None:
        """Set aside the gradients accumulated so far, so that only those of this step are summed."""
        self._alone, self._buckets, self._sent, self._to_come = [], [], 0, {}
        for total in self._sums:
            trained = [partial for partial in total.partials if any(copy.requires_grad for copy in partial.copies)]
            for partial in trained:
                partial.before = [copy.grad for copy in partial.copies]
                for copy in partial.copies:
                    copy.grad = None
            if total.group is None:
                self._alone += trained
                continue
            for indices in buckets([local(partial.copies[0]) for partial in trained]):
                bucket = _Bucket(total.group, [trained[i] for i in indices], total.early)
                self._buckets.append(bucket)
                if total.early:
                    bucket.incomplete = {copy for partial in bucket.partials for copy in partial.copies}
                    self._to_come |= dict.fromkeys(bucket.incomplete, (self.microbatches, bucket))

    def _arrived(self, parameter: nn.Parameter) -> None:
        """A microbatch's gradient of this parameter has been added up."""
        if parameter not in self._to_come:
            return  # a backward outside of a step
        count, bucket = self._to_come[parameter]
        assert count, "a gradient came after those of all microbatches"
        self._to_come[parameter] = count - 1, bucket
        if count == 1:
            bucket.incomplete.discard(parameter)
            while self._sent < len(self._buckets) and self._may_go(self._buckets[self._sent]):
                self._send_next()

    @staticmethod
    def _may_go(bucket: _Bucket) -> bool:
        return bucket.early and not bucket.incomplete

    def _send_next(self) -> None:
        self._buckets[self._sent].send()
        self._sent += 1

    def finish(self) -> None:
        """Sum the gradients of this step, and add what was set aside; a collective call.

        A parameter that got a gradient on some ranks only counts as zero on the others.
        """
        self._to_come = {}
        while self._sent < len(self._buckets):
            self._send_next()
        for partial in self._alone:
            partial.give(partial.take_part())
        flags: dict[dist.ProcessGroup, list[bool]] = {}
        for bucket in self._buckets:
            flags.setdefault(bucket.group, []).extend(bucket.present)
        anywhere: dict[dist.ProcessGroup, Tensor] = {}
        for group, present in flags.items():
            anywhere[group] = torch.tensor(present, dtype=torch.int32, device=self.device)
            dist.all_reduce(anywhere[group], op=dist.ReduceOp.MAX, group=group)
        # Read once, after everything has been started: reading waits for the device.
        wanted = dict(zip(anywhere, [iter(tensor.tolist()) for tensor in anywhere.values()]))
        for bucket in self._buckets:
            for partial, gradient in zip(bucket.partials, bucket.received()):
                partial.give(gradient if next(wanted[bucket.group]) else None)
        self._buckets = []


def _order(everyone: Sequence[Mapping[str, int]]) -> list[str]:
    """All names, alike on all ranks: those of other stages first, and within a stage the last used first, as a backward
    goes."""
    names = [name for counts in everyone for name in counts]
    return list(dict.fromkeys(reversed(names)))


def _or_zero(part: Tensor | None, partial: _Partial) -> Tensor:
    return torch.zeros_like(local(partial.copies[0]), requires_grad=False) if part is None else part


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


def parameters_by_name(stages: Sequence[nn.Module], ties: Sequence[Sequence[str]]) -> Mapping[str, list[nn.Parameter]]:
    """Collect the distinct parameter objects of these stages, by the first name of their tie (or their own)."""
    tied = names_by_tie(ties)
    held: dict[str, list[nn.Parameter]] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            copies = held.setdefault(tied.get(name, (name,))[0], [])
            if not any(parameter is copy for copy in copies):
                copies.append(parameter)
    return held
