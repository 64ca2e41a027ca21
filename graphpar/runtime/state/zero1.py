"""Optimizer state that is sharded over dp_shard and cp (ZeRO level 1): each rank has all parameters, and updates its own pieces.

backward         the gradients of a unit are summed to the ranks whose pieces they are
optimizer.step   each rank updates its pieces
zero_grad        the new values of all units start to travel, in the dtype in which they are read
next forward     a unit waits for its own values when it is entered, and for nothing else
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphpar.runtime.axes import STATE_AXES
from graphpar.runtime.distributed import gather_objects
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.groups import Groups
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.state.host import copy_in
from graphpar.runtime.state.parameters import Replicated
from graphpar.runtime.state.units import Unit, build_units

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class Zero1(Replicated):
    """Parameters of which this rank updates pieces, whose new values travel. Building it is a collective call.

    Args:
        modules: of each stage, the modules that the emitted program names as units, the stage itself among them.

    Raises:
        RuntimeProgramError: the plan gives a parameter that is trained no owner.
    """

    divides = STATE_AXES
    sums_first = True

    def __init__(
        self,
        stages: Sequence[nn.Module],
        modules: Sequence[Sequence[nn.Module]],
        program: Manifest,
        groups: Groups,
    ) -> None:
        super().__init__(stages, program, groups)
        self._group = groups["fsdp"]
        self.units = build_units(stages, modules, self.held, program, groups)
        self.pieces = {name: piece for unit in self.units for name, piece in unit.pieces.items()}
        """This rank's pieces, by the first name of a tie; 1-D slices of parameters where segments are even."""
        self.updated = {name: [piece] for name, piece in self.pieces.items()}
        self._slices = {
            name: (copies[0].shape, unit.starts[name])
            for unit in self.units
            for name, copies in zip(unit.names, unit.copies)
            if name in unit.pieces
        }
        self._main = {
            copy: (unit.pieces.get(name), unit.starts.get(name, 0))
            for unit in self.units
            if unit.apart
            for name, copies in zip(unit.names, unit.copies)
            for copy in copies
        }
        """What this rank has of the main values of parameters that are stored apart from them, and where that begins there."""
        trained = {copy for unit in self.units for copies in unit.copies for copy in copies}
        self._frozen = {
            parameter: name
            for stage in stages
            for name, parameter in stage.named_parameters()
            if parameter not in trained
        }
        self.written()
        self._sent = False  # whether values were sent after the gradients of the last step were used
        by_module: dict[nn.Module, list[Unit]] = {}
        for unit in self.units:
            for module in unit.modules:
                by_module.setdefault(module, []).append(unit)
        for module, units in by_module.items():
            module.register_forward_pre_hook(functools.partial(_wait, units))

    def slice_of(self, name: str) -> tuple[torch.Size, int]:
        return self._slices[name]

    def send(self) -> None:
        """Start to send the values of this rank's pieces, and to receive those of others; a collective call."""
        for unit in self.units:
            unit.send()
        self._sent = True
        self.written()

    def written(self) -> None:
        """Note that all ranks have, or are getting, the values of this rank's pieces."""
        self._seen, self._seen_bits, self._seen_versions = self._state(), self._bits(), self._versions()

    def is_apart(self, parameter: Tensor) -> bool:
        return parameter in self._main

    @torch.no_grad()
    def put(self, target: Tensor, values: Tensor) -> None:
        super().put(target, values)
        piece, start = self._main.get(target, (None, 0))  # type: ignore[call-overload]
        if piece is not None:
            copy_in(piece.view(-1), values.reshape(-1)[start : start + piece.numel()])

    def loaded(self) -> None:
        if self._main:
            self.send()
            self.arrive()
            self._sent = False
        self.written()

    def values(self) -> dict[str, Tensor]:
        found = {name: value for unit in self.units if unit.apart for name, value in unit.whole(unit.main).items()}
        return self._by_every_name(found)

    def _by_every_name(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return values of whole parameters by each name that the stages have for them."""
        found = {copy: values[name] for name, copies in self.held.items() if name in values for copy in copies}
        named = (pair for stage in self.stages for pair in stage.named_parameters(remove_duplicate=False))
        return {name: found[parameter] for name, parameter in named if parameter in found}

    def settle(self) -> None:
        self._send_changed()
        self.arrive()

    def _send_changed(self) -> None:
        """Send the values if some rank may have new ones since they were sent, or since the last step; a collective call.

        Raises:
            RuntimeProgramError: on all ranks, if one has changed what is computed with in the place of main values.
        """
        if not self.units:
            return
        changed = (self._bits() != self._seen_bits).any(1).float()
        changed[0] += self._state() != self._seen
        changed[1] += self._versions() != self._seen_versions
        dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=self._group)
        main, copies = changed.tolist()
        if copies:
            self._overwritten()
        if main:
            self.send()

    def _overwritten(self) -> NoReturn:
        raise RuntimeProgramError(
            "the parameters of a stage were changed, which are copies in 16 bits of main values (zero=1), so the next step would undo it; "
            "change those of pipeline.named_parameters(), or load a file"
        )

    def arrive(self) -> None:
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
                "compile the model with it trainable"
            )
        if not self._sent:
            self._send_changed()
        elif self._versions() != self._seen_versions:
            self._overwritten()
        elif any(now != seen for (now, _), (seen, _) in zip(self._state(), self._seen)):
            raise RuntimeProgramError(
                "parameters were changed while their values were sent to the other ranks, after pipeline.zero_grad() (zero=1); "
                "call pipeline.synchronize() on all ranks before such a change and after it"
            )

    def end_step(self) -> None:
        """Note the values and gradients that a step left behind."""
        self.arrive()  # for those of units that no forward has entered
        self.written()
        self._sent = False

    def whole_gradients(self) -> dict[str, Tensor]:
        """Gather the gradients of all pieces, by each name of the parameters of this rank's stages; a collective call."""
        gradients = {name: piece.grad for name, piece in self.pieces.items() if piece.grad is not None}
        group = self._group
        present = {name for names in gather_objects(list(gradients), group) for name in names}
        found: dict[str, Tensor] = {}
        for unit in self.units:
            own = torch.zeros_like(unit.main)
            for name, place in unit.places.items():
                if name in gradients:
                    own[slice(*place)] = gradients[name].reshape(-1)
            found |= {name: gradient for name, gradient in unit.whole(own).items() if name in present}
        return self._by_every_name(found)

    def _state(self) -> list[Any]:
        """What differs once an optimizer has stepped, or gradients were dropped; it may differ for other reasons, too."""
        return [
            (piece._version, None if piece.grad is None else (id(piece.grad), piece.grad._version))
            for piece in self.pieces.values()
        ]

    def _versions(self) -> list[int]:
        """What differs once parameters are changed that are stored apart from their main values."""
        return [copy._version for copy in self._main]

    def _bits(self) -> Tensor:
        """Sum up the bits of this rank's values: what is written through ``.data`` counts as no change of a tensor. [2, units]

        First those that it updates, then those that are computed with where these are apart.
        """
        parts = [[unit.main for unit in self.units], [unit.own for unit in self.units if unit.apart]]
        sums = [[part.view(BITS[part.element_size()]).sum(dtype=torch.int64) for part in each] for each in parts]
        zero = torch.zeros((), dtype=torch.int64, device=self.units[0].flat.device if self.units else None)
        rows = [[*each, *[zero] * (len(self.units) - len(each))] for each in sums]
        return torch.stack([torch.stack(row) for row in rows]) if self.units else zero


def _wait(units: Sequence[Unit], module: nn.Module, inputs: Any) -> None:
    for unit in units:
        unit.wait()
