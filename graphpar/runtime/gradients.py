"""Finishing gradients: whatever makes a parameter's gradient incomplete on a rank is summed once a step.

A gradient is partial over an axis on which its parameter is stored as R (data parallelism; the norm weights of
sequence parallelism), and over the copies of a parameter that several stages hold (tied weights). One mechanism:

    before a step   take(): put away what earlier steps accumulated
    after a step    finish(): sum the new parts over the ranks that have one, in flat buckets, add what was put away

Then every holder has the single-device gradient (its shard of it), the same bits on all ranks of a sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphpar.runtime.groups import Groups
from graphpar.runtime.layout import R, Shard
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.weights import names_by_tie

BUCKET_BYTES = 25 * 2**20
"""How much is summed in one collective; a larger parameter goes alone."""


@dataclass(eq=False)
class _Partial:
    """A parameter whose gradient lies in parts: on other ranks, or in several copies on this one."""

    copies: list[nn.Parameter]
    before: list[Tensor | None] = field(default_factory=list)

    def take_part(self) -> Tensor | None:
        """This rank's part, which the copies give up; ``None`` when no copy has a gradient."""
        total: Tensor | None = None
        for copy in self.copies:
            if copy.grad is not None:
                total = copy.grad if total is None else total + copy.grad
                copy.grad = None
        return total

    def give(self, total: Tensor | None) -> None:
        """Set every copy's gradient to ``total`` (if there is one), added to what was put away."""
        for i, (copy, before) in enumerate(zip(self.copies, self.before)):
            if total is None or before is None:
                copy.grad = before if total is None else total if i == 0 else total.clone()
            else:
                copy.grad = before.add_(total)
        self.before = []


@dataclass(eq=False)
class _Sum:
    """The parameters whose parts lie on the same ranks; ``group`` is ``None`` when that is this rank alone."""

    group: dist.ProcessGroup | None
    partials: list[_Partial] = field(default_factory=list)


class Gradients:
    """The gradients of this rank's parameters. Building it is a collective call: it creates process groups.

    ``requires_grad`` may be changed between steps, but alike on all ranks.
    """

    def __init__(self, stages: Sequence[nn.Module], program: Manifest, groups: Groups, device: torch.device) -> None:
        self.device = device
        held = parameters_by_name(stages, program.ties)
        everyone = groups.gather("pp", {name: len(copies) for name, copies in held.items()})
        self.counted: list[nn.Parameter] = []
        """The parameters whose elements this rank counts, where each of the whole model's is counted once."""
        sums: dict[Any, _Sum] = {}
        for name in sorted({name for counts in everyone for name in counts}):
            holders = tuple(at for at, counts in enumerate(everyone) if name in counts)
            spec = program.spec(name)
            axes = tuple(axis for axis, kind in spec.items() if kind == R)
            key = axes, holders if len(holders) > 1 else None
            elsewhere = key != ((), None)
            total = sums.setdefault(key, _Sum(groups.over(*key) if elsewhere else None))
            copies = held.get(name, [])
            if copies and (elsewhere or len(copies) > 1):
                total.partials.append(_Partial(copies))
            replicated = [axis for axis, kind in spec.items() if not isinstance(kind, Shard)]
            if groups.place["pp"] == holders[0] and all(groups.place[axis] == 0 for axis in replicated):
                self.counted.append(copies[0])
        self._sums = list(sums.values())
        self._taken: list[tuple[_Sum, list[_Partial]]] = []

    def take(self) -> None:
        """Put away the gradients that there are, so that a step's own parts can be told from them."""
        self._taken = []
        for total in self._sums:
            trained = [partial for partial in total.partials if any(copy.requires_grad for copy in partial.copies)]
            for partial in trained:
                partial.before = [copy.grad for copy in partial.copies]
                for copy in partial.copies:
                    copy.grad = None
            if trained:
                self._taken.append((total, trained))

    def finish(self) -> None:
        """Sum the parts of this step, and add what was put away; a collective call.

        A parameter that got a gradient on some ranks only counts as zero on the others.
        """
        finished: list[tuple[_Partial, Tensor]] = []
        flags: list[Tensor] = []
        for total, partials in self._taken:
            parts = [partial.take_part() for partial in partials]
            present = torch.tensor([part is not None for part in parts], dtype=torch.int32, device=self.device)
            whole = [_or_zero(part, partial) for part, partial in zip(parts, partials)]
            if total.group is not None:
                dist.all_reduce(present, op=dist.ReduceOp.MAX, group=total.group)
                for bucket in buckets(whole):
                    _sum_bucket(whole, bucket, total.group)
            flags.append(present)
            finished += zip(partials, whole)
        # Read once, after everything has been sent off: reading waits for the device.
        anywhere = torch.cat(flags).tolist() if flags else []
        for (partial, gradient), is_present in zip(finished, anywhere):
            partial.give(gradient if is_present else None)
        self._taken = []


def _or_zero(part: Tensor | None, partial: _Partial) -> Tensor:
    return torch.zeros_like(partial.copies[0], requires_grad=False) if part is None else part


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


def _sum_bucket(tensors: list[Tensor], indices: Sequence[int], group: dist.ProcessGroup) -> None:
    """Replace these tensors by their sums over the group. Always through a copy: two gradients may share memory."""
    flat = torch.cat([tensors[i].reshape(-1) for i in indices])
    dist.all_reduce(flat, group=group)
    for i, piece in zip(indices, flat.split([tensors[i].numel() for i in indices])):
        tensors[i] = piece.view(tensors[i].shape)


def parameters_by_name(stages: Sequence[nn.Module], ties: Sequence[Sequence[str]]) -> Mapping[str, list[nn.Parameter]]:
    """The distinct parameter objects of these stages, by the first name of their tie (or their own)."""
    tied = names_by_tie(ties)
    held: dict[str, list[nn.Parameter]] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            copies = held.setdefault(tied.get(name, (name,))[0], [])
            if not any(parameter is copy for copy in copies):
                copies.append(parameter)
    return held
