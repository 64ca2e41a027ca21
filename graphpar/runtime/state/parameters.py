"""How a rank stores the parameters of its stages, and which part of them it updates: one interface, by ZeRO level.

    level 0      Replicated                                       whole; a rank updates all that it stores
    level 1      Zero1 (:mod:`graphpar.runtime.state.zero1`)      whole, as they are read; a rank updates pieces, whose new values travel
    level 2, 3   FullySharded                                     shards, which FSDP2 gathers

``Whole`` is what a rank computes with: its shard over tp and experts. Where an optimizer keeps its state is another matter
(:mod:`graphpar.runtime.state.own_optimizers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from graphpar.runtime.groups import Groups
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.state.fully_sharded import begin_microbatch, drop_gradients, free, gather, local
from graphpar.runtime.state.host import copy_in
from graphpar.runtime.state.units import Unit, parameters_by_name


class Replicated:
    """Parameters that are whole, all of which this rank updates.

    Attributes:
        held: what the stages of this rank compute with, by the first name of a tie: all copies.
        updated: what this rank updates, by the same names: the same, or ``pieces`` of it.
        units: whose gradients are summed to the ranks of their pieces, and whose new values travel.
        divides: the axes over which the pieces are divided, besides those of the parameters' types.
        sums_first: whether gradients are summed over the ranks that share state before they are summed over others.
    """

    units: Sequence[Unit] = ()
    pieces: Mapping[str, nn.Parameter] = {}
    divides: tuple[str, ...] = ()
    sums_first = False

    def __init__(self, stages: Sequence[nn.Module], program: Manifest, groups: Groups) -> None:
        self.stages, self.program, self.groups = stages, program, groups
        self.held: Mapping[str, Sequence[nn.Parameter]] = parameters_by_name(stages, program.ties)
        self.updated = self.held

    def names(self) -> dict[Tensor, str]:
        """Return the first names of what this rank updates."""
        return {copy: name for name, copies in self.updated.items() for copy in copies}

    def slice_of(self, name: str) -> tuple[torch.Size, int] | None:
        """Return the shape of what the piece of this name is a part of, and where it begins there; ``None`` where it is no piece."""
        return None

    def is_apart(self, parameter: Tensor) -> bool:
        """Whether a parameter of a stage is a copy, in another dtype, of main values of which ranks update pieces."""
        return False

    def settle(self) -> None:
        """Wait until parameters have the values that other ranks' optimizers gave them; a collective call where these travel."""

    def written(self) -> None:
        """Note that all ranks have given their parameters other values, as after all of them loaded one file."""

    def loaded(self) -> None:
        """Note that ranks have given new values to what they update; a collective call."""
        self.written()

    @torch.no_grad()
    def put(self, target: Tensor, values: Tensor) -> None:
        """Give a parameter or buffer of a stage this rank's part of other values, also where its main values are apart."""
        copy_in(local(target), values)

    def values(self) -> dict[str, Tensor]:
        """Return main values, by each name of the parameters that stages store apart from them; a collective call there."""
        return {}

    def begin_step(self) -> None:
        """Have new values on their way before a forward.

        Raises:
            RuntimeProgramError: parameters were changed where they may not be.
        """

    def arrive(self) -> None:
        """Wait for new values that are on their way."""

    def begin_microbatch(self, stage: nn.Module, *, accumulate: bool, last: bool) -> None:
        """Say what happens to gradients and gathered parameters at the end of the next backward."""

    def end_step(self) -> None:
        """Note the values and gradients that a step left behind."""

    def gather(self, always: bool = False) -> None:
        """Gather parameters for a forward that no table of a schedule gathers them for, or ``always``; a collective call there."""

    def free(self) -> None:
        """Free what is gathered."""

    def drop_gradients(self) -> None:
        """Drop the gradients that were added up and not reduced."""

    def send(self) -> None:
        """Start to send new values, once gradients are used; a collective call where they travel."""

    def whole_gradients(self) -> dict[str, Tensor]:
        """Return the gradients of this rank's stages by each name, also where other ranks hold them; a collective call there."""
        named = (pair for stage in self.stages for pair in stage.named_parameters(remove_duplicate=False))
        return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


class FullySharded(Replicated):
    """Parameters of which each rank stores a shard, with its gradient and the optimizer's state of it: FSDP2's."""

    sums_first = True

    def begin_microbatch(self, stage: nn.Module, *, accumulate: bool, last: bool) -> None:
        begin_microbatch(stage, reduces=not accumulate, frees=self.program.zero == 3 or last)

    def gather(self, always: bool = False) -> None:
        for stage in self.stages if always or self.program.gathers_by_table else ():
            gather(stage)

    def free(self) -> None:
        """Free what FSDP2 still holds gathered, such as a unit without a backward: it would not see the optimizer's step."""
        for stage in self.stages:
            free(stage)
        if "params" in self.program.offload and self.groups.device.type == "cuda":
            # Shards may still be on their way to the device, and whoever writes them on the host does not wait for it.
            torch.cuda.current_stream(self.groups.device).synchronize()

    def drop_gradients(self) -> None:
        for stage in self.stages:
            drop_gradients(stage)
