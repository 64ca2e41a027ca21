"""Optimizer state that is sharded over dp_shard and cp (ZeRO level 1): each rank has all parameters, and updates its own pieces.

backward         the gradients of a unit are summed to the ranks whose pieces they are
optimizer.step   each rank updates its pieces
zero_grad        the new values of all units start to travel
next forward     a unit waits for its own values when it is entered, and for nothing else
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphpar.runtime.axes import STATE_AXES
from graphpar.runtime.distributed import gather_objects
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.groups import Groups
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.state.parameters import Replicated
from graphpar.runtime.state.units import Unit, build_units, pieces_of

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
        self._seen, self._seen_bits = self._state(), self._bits()

    def settle(self) -> None:
        self._send_changed()
        self._wait()

    def _send_changed(self) -> None:
        """Send the values if some rank may have new ones since they were sent, or since the last step; a collective call."""
        if not self.units:
            return
        changed = (self._bits() != self._seen_bits).any().float()
        changed += self._state() != self._seen
        dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=self._group)
        if changed.item():
            self.send()

    def _wait(self) -> None:
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
        elif any(now != seen for (now, _), (seen, _) in zip(self._state(), self._seen)):
            raise RuntimeProgramError(
                "parameters were changed while their values were sent to the other ranks, after pipeline.zero_grad() (zero=1); "
                "call pipeline.synchronize() on all ranks before such a change and after it"
            )

    def end_step(self) -> None:
        """Note the values and gradients that a step left behind."""
        self._wait()  # for those of units that no forward has entered
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
        named = (pair for stage in self.stages for pair in stage.named_parameters(remove_duplicate=False))
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


def _wait(units: Sequence[Unit], module: nn.Module, inputs: Any) -> None:
    for unit in units:
        unit.wait()
