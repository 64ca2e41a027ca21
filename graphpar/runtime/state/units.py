"""Units of ZeRO level 1: parameters in one flat tensor, of which each rank updates its segment.

contiguous, longest   a segment has whole parameters: a reduce to each owner, a broadcast from each owner
flat                  segments are equal and cut through parameters: a reduce-scatter, an all-gather

Where parameters are read in fewer bits than they are updated in, the flat tensor has them whole as they are read, and each rank has its
segment in the other dtype apart: main values. These it updates, and new values are cast before they travel.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from graphpar.runtime.checkpoints.weights import names_by_tie
from graphpar.runtime.debugging.events import delay, event
from graphpar.runtime.distributed import all_gather_flat, reduce_scatter_flat
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.groups import Groups
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.stages.modules import of_all_stages


@dataclass(eq=False)
class Unit:
    """Parameters whose gradients are summed together and whose new values travel together.

    Attributes:
        path: of the module whose parameters they are.
        modules: which wait for the values when they are entered.
        copies: the parameters of each name; several where stages of this rank share one.
        flat: the values that stages compute with; the parameters are views of it.
        main: the values that this rank updates: its segment, of ``flat`` itself or ``apart``.
        apart: whether they are in a dtype of their own, which is that of gradients, too.
        ends: where each rank's segment of ``flat`` ends; the next begins there.
        even: whether segments have one size, so that they may cut through a parameter.
        pieces: this rank's, by name: whole parameters, or 1-D slices of them.
    """

    path: str
    names: Sequence[str]
    modules: Sequence[nn.Module]
    copies: Sequence[Sequence[nn.Parameter]]
    flat: Tensor
    main: Tensor
    apart: bool
    ends: Sequence[int]
    even: bool
    groups: Groups
    pieces: dict[str, nn.Parameter] = field(default_factory=dict)
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)  # where each piece begins in its parameter
    works: list[dist.Work] = field(default_factory=list)

    def __post_init__(self) -> None:
        own, begin = range(*self.segment(self.groups.shard)), 0
        for name, copies in zip(self.names, self.copies):
            end = begin + copies[0].numel()
            for copy in copies:
                copy.data = self.flat[begin:end].view(copy.shape)
            if own and begin < own.stop and own.start < end:
                place = max(begin, own.start), min(end, own.stop)
                self.starts[name] = place[0] - begin
                self.places[name] = place[0] - own.start, place[1] - own.start
                part = self.main[slice(*self.places[name])]
                if self.even or self.apart:
                    self.pieces[name] = _view(part if self.even else part.view(copies[0].shape))
                else:
                    self.pieces[name] = copies[0]
            begin = end

    def segment(self, rank: int) -> tuple[int, int]:
        """Return where the segment of a rank begins and ends."""
        return (self.ends[rank - 1] if rank else 0), self.ends[rank]

    @property
    def own(self) -> Tensor:
        """This rank's segment of what stages compute with."""
        return self.flat[slice(*self.segment(self.groups.shard))]

    def _owners(self) -> Iterator[tuple[int, slice]]:
        """Yield the ranks that have a segment, and where it is."""
        for place in range(len(self.ends)):
            begin, end = self.segment(place)
            if begin < end:
                yield self.groups.rank_of_shard(place), slice(begin, end)

    def reduce(self, flat: Tensor) -> tuple[list[dist.Work], Tensor]:
        """Start to sum ``flat`` over the ranks, each segment to its rank.

        Returns:
            Handles, and this rank's segment, which has its values once they are done.
        """
        own, group = slice(*self.segment(self.groups.shard)), self.groups["fsdp"]
        if self.even:
            result = flat.new_empty(own.stop - own.start)
            return [reduce_scatter_flat(result, flat, group)], result
        works = [dist.reduce(flat[part], dst=rank, group=group, async_op=True) for rank, part in self._owners()]
        return [work for work in works if work is not None], flat[own]

    def gather(self, flat: Tensor) -> list[dist.Work]:
        """Start to send this rank's segment of ``flat`` to the others, and to receive theirs into it."""
        group = self.groups["fsdp"]
        if self.even:
            return [all_gather_flat(flat, flat[slice(*self.segment(self.groups.shard))].clone(), group)]
        works = [dist.broadcast(flat[part], src=rank, group=group, async_op=True) for rank, part in self._owners()]
        return [work for work in works if work is not None]

    def whole(self, own: Tensor) -> dict[str, Tensor]:
        """Gather what each rank has of its segment; returns it by name, in the shapes of the parameters. A collective call."""
        flat = own.new_zeros(self.flat.numel())
        flat[slice(*self.segment(self.groups.shard))] = own
        for work in self.gather(flat):
            work.wait()
        return dict(zip(self.names, pieces_of(flat, [copies[0].shape for copies in self.copies])))

    def cast(self) -> None:
        """Give this rank's segment of what is computed with its main values."""
        if self.apart:
            self.own.copy_(self.main)
            for copy in itertools.chain(*self.copies):
                increment_version(copy)

    def send(self) -> None:
        """Start to send this rank's new values, and to receive the others'."""
        self.wait()
        self.cast()
        delay("before_broadcast")
        event("broadcast", self.path)
        self.works = self.gather(self.flat)

    def wait(self) -> None:
        """Wait until the values have arrived."""
        if self.works:
            event("broadcast_wait", self.path)
        while self.works:
            self.works.pop(0).wait()


def _view(values: Tensor) -> nn.Parameter:
    """Return a parameter that shares memory with ``values``, but does not count its changes."""
    parameter = nn.Parameter(values.new_empty(0))
    parameter.data = values
    return parameter


def build_units(
    stages: Sequence[nn.Module],
    modules: Sequence[Sequence[nn.Module]],
    held: Mapping[str, Sequence[nn.Parameter]],
    program: Manifest,
    groups: Groups,
) -> list[Unit]:
    """Make units in the order in which a forward enters them: a module's parameters that no unit before holds, of one dtype.

    A parameter of several stages is a unit of its own, so that all of them cut it alike.
    """
    everyone = counts_of_copies(stages, program, groups)
    counts = {name: sum(counts.get(name, 0) for counts in everyone) for name in held}
    name_of = {copy: name for name, copies in held.items() for copy in copies}
    grouped: dict[Any, list[str]] = {}
    homes: dict[str, list[nn.Module]] = {}
    paths: dict[nn.Module, str] = {}
    for number, (stage, inner) in enumerate(zip(stages, modules)):
        paths |= {module: path or f"stage_{number}" for path, module in stage.named_modules()}
        blocks = [module for module in inner if module is not stage]
        inside = {parameter for block in blocks for parameter in block.parameters()}
        rest = [parameter for parameter in stage.parameters() if parameter not in inside]
        for module, parameters in [(stage, rest), *((block, block.parameters()) for block in blocks)]:
            for parameter in parameters:
                name = name_of[parameter]
                if parameter.requires_grad:
                    if name not in homes:
                        apart = name in program.working
                        key = module, name if counts[name] > 1 else None, parameter.dtype, parameter.grad_dtype, apart
                        grouped.setdefault(key, []).append(name)
                    homes.setdefault(name, []).append(module)
    return [_unit(paths[key[0]], names, homes, held, program, groups) for key, names in grouped.items()]


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


def counts_of_copies(stages: Sequence[nn.Module], program: Manifest, groups: Groups) -> list[dict[str, int]]:
    """Return how many copies of each parameter every pp rank holds, by the first name of a tie; a collective call of pp."""

    def describe(stages: Sequence[nn.Module]) -> dict[str, int]:
        return {name: len(copies) for name, copies in parameters_by_name(stages, program.ties).items()}

    return of_all_stages(describe, stages, program, groups)


def _unit(
    path: str,
    names: Sequence[str],
    homes: Mapping[str, Sequence[nn.Module]],
    held: Mapping[str, Sequence[nn.Parameter]],
    program: Manifest,
    groups: Groups,
) -> Unit:
    ranks, even = groups.shards, not program.owners
    sizes = {name: held[name][0].numel() for name in names}
    if even:
        ordered, each = list(names), -(-sum(sizes.values()) // ranks)
        ends = [each * (rank + 1) for rank in range(ranks)]
    else:
        lacking = next((name for name in names if name not in program.owners), None)
        if lacking is not None:
            raise RuntimeProgramError(f"plan.json gives {lacking} no owner; compile the model again")
        ordered = sorted(names, key=lambda name: program.owners[name])
        loads = [sum(sizes[name] for name in names if program.owners[name] == rank) for rank in range(ranks)]
        ends = list(itertools.accumulate(loads))
    first, apart = held[names[0]][0], names[0] in program.working
    flat = torch.zeros(ends[-1], dtype=first.dtype, device=first.device)
    main = flat[slice(ends[groups.shard - 1] if groups.shard else 0, ends[groups.shard])]
    main = main.to(first.grad_dtype, copy=True) if apart else main
    modules = list(dict.fromkeys(module for name in names for module in homes[name]))
    return Unit(path, ordered, modules, [held[name] for name in ordered], flat, main, apart, ends, even, groups)


def pieces_of(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Cut ``flat`` into tensors of these shapes; what is behind them is padding."""
    sizes = [shape.numel() for shape in shapes]
    return [piece.view(shape) for piece, shape in zip(flat[: sum(sizes)].split(sizes), shapes)]
