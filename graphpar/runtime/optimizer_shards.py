"""Optimizer state that is sharded over dp_shard and cp (ZeRO level 1): each rank has all parameters, and updates its own pieces.

    backward         the gradients of a unit are summed to the ranks whose pieces they are
    optimizer.step   each rank updates its pieces
    zero_grad        the new values of all units start to travel
    next forward     a unit waits for its own values when it is entered, and for nothing else

The parameters of a unit lie in one flat tensor, where the pieces of a rank are next to each other:

    contiguous, longest   a piece is a whole parameter: a reduce to each owner, a broadcast from each owner
    flat                  an equal slice of the flat tensor for each rank: a reduce-scatter, an all-gather
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphpar.runtime.delays import delay
from graphpar.runtime.distributed import all_gather_flat, gather_objects, reduce_scatter_flat
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.events import event
from graphpar.runtime.groups import Groups
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.weights import parameters_by_name

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass(eq=False)
class Unit:
    """Parameters whose gradients are summed together and whose new values travel together.

    Attributes:
        path: of the module whose parameters they are.
        modules: which wait for the values when they are entered.
        copies: the parameters of each name; several where stages of this rank share one.
        flat: the values; the parameters are views of it.
        ends: where each rank's segment of ``flat`` ends; the next begins there.
        even: whether segments have one size, so that they may cut through a parameter.
        pieces: this rank's, by name: whole parameters, or 1-D slices of them.
    """

    path: str
    names: Sequence[str]
    modules: Sequence[nn.Module]
    copies: Sequence[Sequence[nn.Parameter]]
    flat: Tensor
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
                self.pieces[name] = _view(self.flat[slice(*place)]) if self.even else copies[0]
            begin = end

    def segment(self, rank: int) -> tuple[int, int]:
        """Return where the segment of a rank begins and ends."""
        return (self.ends[rank - 1] if rank else 0), self.ends[rank]

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

    def send(self) -> None:
        """Start to send this rank's new values, and to receive the others'."""
        self.wait()
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


class OptimizerShards:
    """The pieces of the parameters that this rank updates, and the travel of their new values. Building it is a collective call.

    Args:
        modules: of each stage, the modules that the emitted program names as units, the stage itself among them.

    Raises:
        RuntimeProgramError: the plan gives a parameter that is trained no owner.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        modules: Sequence[Sequence[nn.Module]],
        program: Manifest,
        groups: Groups,
    ) -> None:
        self._stages, self._group = stages, groups["fsdp"]
        self.units = _units(stages, modules, program, groups)
        self.pieces = {name: piece for unit in self.units for name, piece in unit.pieces.items()}
        """This rank's pieces, by the first name of a tie; 1-D slices of parameters where segments are even."""
        trained = {copy for unit in self.units for copies in unit.copies for copy in copies}
        self._frozen = {
            parameter: name
            for stage in stages
            for name, parameter in stage.named_parameters()
            if parameter not in trained
        }
        self._seen, self._seen_bits = self._state(), self._bits()
        self._sent = False  # whether values were sent after the gradients of the last step were used
        by_module: dict[nn.Module, list[Unit]] = {}
        for unit in self.units:
            for module in unit.modules:
                by_module.setdefault(module, []).append(unit)
        for module, units in by_module.items():
            module.register_forward_pre_hook(_waits(units))

    def ranges(self) -> dict[str, tuple[torch.Size, int]]:
        """Return of each piece the shape of the parameter that it is of, and the element at which it begins."""
        return {
            name: (copies[0].shape, unit.starts[name])
            for unit in self.units
            for name, copies in zip(unit.names, unit.copies)
            if name in unit.pieces
        }

    def send(self) -> None:
        """Start to send the values of this rank's pieces, and to receive those of others; a collective call."""
        for unit in self.units:
            unit.send()
        self._sent = True
        self.loaded()

    def loaded(self) -> None:
        """Note that all ranks have, or are getting, the values of this rank's pieces, as after all of them loaded one file."""
        self._seen, self._seen_bits = self._state(), self._bits()

    def settle(self) -> None:
        """Send the values if some rank may have new ones since they were sent, or since the last step; a collective call."""
        if not self.units:
            return
        changed = (self._bits() != self._seen_bits).any().float()
        changed += self._state() != self._seen
        dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=self._group)
        if changed.item():
            self.send()

    def wait(self) -> None:
        """Wait until all values have arrived."""
        for unit in self.units:
            unit.wait()

    def begin_step(self) -> None:
        """Have new values on their way before the forward.

        Raises:
            RuntimeProgramError: a parameter is trained that was frozen when the program was compiled, or one was changed after its
                value was sent.
        """
        thawed = next((name for parameter, name in self._frozen.items() if parameter.requires_grad), None)
        if thawed is not None:
            raise RuntimeProgramError(
                f"{thawed} was frozen when the program was compiled, so no rank has its optimizer state (zero=1); "
                "compile the model with it trained"
            )
        if not self._sent:
            self.settle()
        elif any(now != seen for (now, _), (seen, _) in zip(self._state(), self._seen)):
            raise RuntimeProgramError(
                "parameters were changed while their values were sent to the other ranks, after pipeline.zero_grad() (zero=1); "
                "call pipeline.synchronize() on all ranks before such a change and after it"
            )

    def end_step(self) -> None:
        """Note the values and gradients that a step left behind."""
        self.wait()  # for those of units that no forward has entered
        self._seen, self._seen_bits, self._sent = self._state(), self._bits(), False

    def whole_gradients(self) -> dict[str, Tensor]:
        """Gather the gradients of all pieces, by each name of the parameters of this rank's stages; a collective call."""
        gradients = {name: piece.grad for name, piece in self.pieces.items() if piece.grad is not None}
        group = self._group
        present = {name for names in gather_objects(list(gradients), group) for name in names}
        found: dict[nn.Parameter, Tensor] = {}
        for unit in self.units:
            flat = torch.zeros_like(unit.flat)
            own = flat[slice(*unit.segment(unit.groups.shard))]
            for name, place in unit.places.items():
                if name in gradients:
                    own[slice(*place)] = gradients[name].reshape(-1)
            for work in unit.gather(flat):
                work.wait()
            shapes = [copies[0].shape for copies in unit.copies]
            for name, copies, gradient in zip(unit.names, unit.copies, pieces_of(flat, shapes)):
                found |= dict.fromkeys(copies, gradient) if name in present else {}
        named = (pair for stage in self._stages for pair in stage.named_parameters(remove_duplicate=False))
        return {name: found[parameter] for name, parameter in named if parameter in found}

    def _state(self) -> list[Any]:
        """What differs once an optimizer has stepped, or gradients were dropped; it may differ for other reasons, too."""
        return [
            (piece._version, None if piece.grad is None else (id(piece.grad), piece.grad._version))
            for piece in self.pieces.values()
        ]

    def _bits(self) -> Tensor:
        """Sum up the bits of this rank's values: what is written through ``.data`` counts as no change of a tensor."""
        own = [unit.flat[slice(*unit.segment(unit.groups.shard))] for unit in self.units]
        sums = [part.view(BITS[part.element_size()]).sum(dtype=torch.int64) for part in own]
        return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)


def _units(
    stages: Sequence[nn.Module], modules: Sequence[Sequence[nn.Module]], program: Manifest, groups: Groups
) -> list[Unit]:
    """Make units in the order in which a forward enters them: a module's parameters that no unit before holds, of one dtype.

    A parameter of several stages is a unit of its own, so that all of them cut it alike.
    """
    held = parameters_by_name(stages, program.ties)
    everyone = groups.gather("pp", {name: len(copies) for name, copies in held.items()})
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
                        key = module, name if counts[name] > 1 else None, parameter.dtype
                        grouped.setdefault(key, []).append(name)
                    homes.setdefault(name, []).append(module)
    return [_unit(paths[key[0]], names, homes, held, program, groups) for key, names in grouped.items()]


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
    first = held[names[0]][0]
    flat = torch.zeros(ends[-1], dtype=first.dtype, device=first.device)
    modules = list(dict.fromkeys(module for name in names for module in homes[name]))
    return Unit(path, ordered, modules, [held[name] for name in ordered], flat, ends, even, groups)


def _waits(units: Sequence[Unit]) -> Callable[[nn.Module, Any], None]:
    def enter(module: nn.Module, inputs: Any) -> None:
        for unit in units:
            unit.wait()

    return enter


def pieces_of(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Cut ``flat`` into tensors of these shapes; what is behind them is padding."""
    sizes = [shape.numel() for shape in shapes]
    return [piece.view(shape) for piece, shape in zip(flat[: sum(sizes)].split(sizes), shapes)]
