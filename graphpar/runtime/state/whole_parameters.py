"""Whole parameters for optimizers that look at them whole, where ranks store pieces: each is stepped by one rank, its owner.

    before a step    the pieces' values and gradients are sent to the owners: one exchange
    the step         the user's optimizer updates the parameters that this rank owns, and keeps their state
    after it         the new values are sent to all ranks that store pieces of them: one exchange

An optimizer that looks at all parameters together has one owner for all of them. What every rank of the exchange stores whole is no part of
it, and stepped by each of them alike.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from graphpar.runtime.axes import STATE_AXES
from graphpar.runtime.checkpoints.saved_state import State
from graphpar.runtime.checkpoints.tensor_chunks import Box, part_of
from graphpar.runtime.distributed import gather_objects
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.layout import Shard
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.state.optimizer_scope import Scope

_Place = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class _Held:
    """What a rank stores of a parameter: where its boxes lie, and whether it is the parameter itself, once."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[_Place, ...]
    whole: bool

    @property
    def elements(self) -> int:
        return sum(math.prod(sizes) for _, sizes in self.boxes)


def dividing_axes(program: Manifest, scope: Scope) -> tuple[str, ...]:
    """Return the axes whose ranks an optimizer of this scope must step together; of all parameters also pp."""
    specs = [program.stored(name) for name in program.types]
    axes = {axis for spec in specs for axis, kind in spec.items() if isinstance(kind, Shard)}
    if program.zero == 1 and (scope is Scope.ALL or not program.owners):
        axes |= {axis for axis in STATE_AXES if program.mesh.get(axis, 1) > 1}
    if scope is Scope.ALL and program.pp > 1:
        axes.add("pp")
    return tuple(sorted(axes)) if scope is not Scope.ELEMENT else ()


class WholeParameters:
    """The parameters that this rank owns, and how they are exchanged with the pieces. Building it is a collective call.

    Args:
        pieces: what this rank stores of each parameter, by first name: equal copies.
        axes: those that :func:`dividing_axes` names.
        state: tells where pieces lie.
    """

    def __init__(
        self,
        pieces: Mapping[str, Sequence[nn.Parameter]],
        axes: Sequence[str],
        scope: Scope,
        state: State,
        device: torch.device,
    ) -> None:
        self.axes, groups = tuple(axes), state.groups
        self._state, self._pieces, self._device = state, pieces, device
        stages = tuple(range(groups.degrees["pp"])) if "pp" in axes else None
        group = groups.over([axis for axis in axes if axis != "pp"], stages)
        assert group is not None, "axes without ranks divide nothing"
        self._group, self._rank = group, dist.get_rank(group)
        trained = {name: copies for name, copies in pieces.items() if any(each.requires_grad for each in copies)}
        frozen = {name: copies for name, copies in pieces.items() if name not in trained}
        self._frozen = {
            n: copies[0] for n, copies in frozen.items() if scope is Scope.ALL or not self._held(copies).whole
        }
        self._everyone = gather_objects({name: self._held(copies) for name, copies in trained.items()}, group)
        """What each rank of the exchange stores."""
        held: dict[str, dict[int, _Held]] = {}
        for rank, each in enumerate(self._everyone):
            for name, one in each.items():
                held.setdefault(name, {})[rank] = one
        held = {
            name: ranks
            for name, ranks in held.items()
            if scope is Scope.ALL or not all(each.whole for each in ranks.values())
        }
        self._owner = _owners({name: _any(ranks).shape for name, ranks in held.items()}, len(self._everyone), scope)
        self._senders = {name: _first_of_equals(ranks) for name, ranks in held.items()}
        self._dtype = {name: _any(ranks).dtype for name, ranks in held.items()}
        shards = (copy for copies in pieces.values() for copy in copies if isinstance(copy, DTensor))
        home = next(
            (shard.device for shard in shards), device
        )  # they are exchanged on the device, and stepped where shards live
        self.parameters = {
            name: nn.Parameter(torch.zeros(_any(held[name]).shape, dtype=self._dtype[name], device=home))
            for name, owner in self._owner.items()
            if owner == self._rank
        }
        """What this rank owns, by first name."""
        self.stepped: dict[str, Sequence[nn.Parameter]] = {n: copies for n, copies in pieces.items() if n not in held}
        """What an optimizer of this rank updates, by first name: all copies."""
        self.stepped |= {name: [parameter] for name, parameter in self.parameters.items()}
        self.gather()
        for parameter in self.parameters.values():
            parameter.grad = None

    def _held(self, copies: Sequence[nn.Parameter]) -> _Held:
        entry = self._state.of_parameter(copies[0], "", copies[0])
        boxes = tuple((box.offsets, tuple(box.values.shape)) for box in entry.boxes)
        whole = len(copies) == 1 and copies[0].shape == entry.shape == entry.tensors[0].shape
        return _Held(entry.shape, copies[0].dtype, boxes, whole)

    def wrap(self, optimizer: Optimizer, check: Callable[[str], None]) -> None:
        """Have each step of ``optimizer`` begin and end with an exchange, and its ``zero_grad`` reach the pieces.

        Args:
            check: raises where gradients are not reduced.
        """
        inner, owns = optimizer.step, any(group["params"] for group in optimizer.param_groups)

        def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            check("the optimizer's step")
            self.gather()
            found = inner(*args, **kwargs) if owns else None
            self.scatter()
            return found

        def zero_grad(_: Optimizer, set_to_none: bool = True) -> None:
            for parameter in (copy for copies in self._pieces.values() for copy in copies):
                parameter.grad = None

        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]

    @torch.no_grad()
    def gather(self) -> None:
        """Give the owners the values and gradients of the pieces; a collective call.

        Raises:
            RuntimeProgramError: a parameter is trained that was not when the optimizer was made.
        """
        thawed = next((name for name, piece in self._frozen.items() if piece.requires_grad), None)
        if thawed is not None:
            raise RuntimeProgramError(
                f"{thawed} was frozen when the optimizer was made, and it needs full parameters; make the optimizer again"
            )
        ranks = range(len(self._everyone))
        for dtype in dict.fromkeys(self._dtype.values()):
            parts: list[list[Tensor]] = []
            for owner in ranks:
                sent = self._sent(self._rank, owner, dtype)
                pieces = [self._pieces[name][0] for name in sent]
                given = [piece.grad is not None for piece in pieces]
                parts.append([torch.tensor(given, dtype=dtype, device=self._device)])
                for piece in pieces:
                    for values in (piece, torch.zeros_like(piece) if piece.grad is None else piece.grad):
                        parts[-1] += [box.values.reshape(-1) for box in self._boxes(piece, values)]
            lists = [self._sent(sender, self._rank, dtype) for sender in ranks]
            sizes = [sum(1 + 2 * self._everyone[r][name].elements for name in names) for r, names in enumerate(lists)]
            for sender, (names, received) in enumerate(zip(lists, self._exchanged(parts, sizes, dtype))):
                given = received[: len(names)].bool().tolist()
                begin = len(names)
                for name, is_given in zip(names, given):
                    held, whole = self._everyone[sender][name], self.parameters[name]
                    if is_given and whole.grad is None:
                        whole.grad = torch.zeros_like(whole)
                    for target in (whole, whole.grad if is_given else None):
                        if target is not None:
                            _fill(target, held.boxes, received[begin : begin + held.elements])
                        begin += held.elements

    @torch.no_grad()
    def scatter(self) -> None:
        """Give the pieces the owners' values, and drop the owners' gradients; a collective call."""
        for dtype in dict.fromkeys(self._dtype.values()):
            parts = [
                [part_of(self.parameters[name], *place).reshape(-1) for name in names for place in held[name].boxes]
                for held, names in zip(self._everyone, self._received(self._rank, dtype))
            ]
            own = self._everyone[self._rank]
            lists = [self._received(owner, dtype)[self._rank] for owner in range(len(self._everyone))]
            sizes = [sum(own[name].elements for name in names) for names in lists]
            for names, received in zip(lists, self._exchanged(parts, sizes, dtype)):
                values = received.split([own[name].elements for name in names])
                for name, whole in zip(names, values):
                    for piece in self._pieces[name]:
                        boxes = [box.values for box in self._boxes(piece, piece)]
                        for box, part in zip(boxes, whole.split([box.numel() for box in boxes])):
                            box.copy_(part.view(box.shape))
        for parameter in self.parameters.values():
            parameter.grad = None

    def _sent(self, sender: int, owner: int, dtype: torch.dtype) -> list[str]:
        """The parameters of which a rank sends values and gradients to their owner."""
        mine = (name for name, rank in self._owner.items() if rank == owner and self._dtype[name] == dtype)
        return [name for name in mine if sender in self._senders[name]]

    def _received(self, owner: int, dtype: torch.dtype) -> list[list[str]]:
        """The parameters of which an owner sends new values to each rank."""
        mine = [name for name, rank in self._owner.items() if rank == owner and self._dtype[name] == dtype]
        return [[name for name in mine if name in held] for held in self._everyone]

    def _exchanged(
        self, parts: Sequence[Sequence[Tensor]], sizes: Sequence[int], dtype: torch.dtype
    ) -> Sequence[Tensor]:
        """Send ``parts`` to the ranks of the group; return what each has sent, in elements ``sizes``."""
        empty = torch.empty(0, dtype=dtype, device=self._device)
        flat = torch.cat([empty, *(part.to(self._device) for each in parts for part in each)])
        received = empty.new_empty(sum(sizes))
        width = flat.element_size()
        dist.all_to_all_single(  # as bytes: gloo does not know every dtype
            received.view(torch.uint8),
            flat.view(torch.uint8),
            [width * size for size in sizes],
            [width * sum(part.numel() for part in each) for each in parts],
            group=self._group,
        )
        found: Sequence[Tensor] = received.split(list(sizes))
        return found

    def _boxes(self, piece: nn.Parameter, values: Tensor) -> list[Box]:
        return self._state.of_parameter(piece, "", values).boxes


def _any(ranks: Mapping[int, _Held]) -> _Held:
    """What one of the ranks stores, where it is alike on all of them."""
    return next(iter(ranks.values()))


def _first_of_equals(ranks: Mapping[int, _Held]) -> list[int]:
    """Choose the first of the ranks that store the same boxes."""
    first: dict[tuple[_Place, ...], int] = {}
    for rank, held in ranks.items():
        first.setdefault(held.boxes, rank)
    return list(first.values())


def _owners(shapes: Mapping[str, Sequence[int]], ranks: int, scope: Scope) -> dict[str, int]:
    """Give each parameter an owner: one for all of them, or such that each rank owns about as many elements."""
    if scope is Scope.ALL:
        return dict.fromkeys(shapes, 0)
    loads, found = [0] * ranks, {}
    for name in sorted(shapes, key=lambda name: -math.prod(shapes[name])):
        found[name] = min(range(ranks), key=loads.__getitem__)
        loads[found[name]] += math.prod(shapes[name])
    return {name: found[name] for name in shapes}


def _fill(whole: Tensor, boxes: Sequence[_Place], values: Tensor) -> None:
    """Copy the elements of boxes, one after the other, to their places."""
    for place, part in zip(boxes, values.split([math.prod(sizes) for _, sizes in boxes])):
        part_of(whole, *place).copy_(part.view(place[1]))
