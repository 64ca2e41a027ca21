"""Generation between the steps of a program for training: another program's forward, on the parameters that are trained.

    out/generate ──► stages without memory for parameters ──each call──► those of the stages that train, gathered and cast once ──► tokens

Nothing is copied or sent: a parameter is one tensor that two modules have. What shards of state gather for a call, and copies in the dtype
in which parameters are read, are dropped when it ends, with the keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphpar.runtime.distributed import agreed
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.generation.generator import Generator
from graphpar.runtime.groups import Groups
from graphpar.runtime.manifest import load_manifest
from graphpar.runtime.stages.branches import Branches
from graphpar.runtime.stages.own_stages import OwnStages
from graphpar.runtime.state.parameters import Replicated
from graphpar.runtime.state.replicas import check_program

Slots = dict[str, Any]
"""The parameters, or the buffers, of one module by name."""


class BetweenSteps:
    """What generates on the stages of a program for training. Building it is a collective call.

    Args:
        folder: of the program for generation.
        stages: those of this rank that train.
        parameters: how these are stored.

    Attributes:
        program: what generates.
        own: its stages on this rank.
        generator: computes with what :meth:`weights` lends.
    """

    def __init__(self, folder: Path, stages: Sequence[nn.Module], parameters: Replicated, device: torch.device) -> None:
        with agreed():
            self.program = load_manifest(folder)
        with agreed():
            check_program(self.program)
        self.groups = Groups(self.program.mesh, device)
        self._parameters = parameters
        with agreed():
            lenders = dict(_slots(stages, every=True))
            for names in self.program.ties:
                held = next((lenders[name] for name in names if name in lenders), None)
                lenders |= {} if held is None else {name: held for name in names if name not in lenders}
            self.own = own = OwnStages(self.program, self.groups, device, None, None, lent=True)
            self._lent: list[tuple[Slots, str, Slots, str]] = []
            for name, (slots, place) in _slots(own.modules, every=False):
                if name not in lenders:
                    raise RuntimeProgramError(
                        f"{folder} computes with {name}, which this rank does not train; compile the model again"
                    )
                lender, other = lenders[name]
                if slots[place].shape != lender[other].shape:
                    raise RuntimeProgramError(
                        f"{folder} computes with {name} as {list(slots[place].shape)}, but it is trained as {list(lender[other].shape)}; "
                        "compile the model again"
                    )
                self._lent.append((slots, place, lender, other))
            self.generator = Generator(self.program, own.adapters, own.package, self.groups, device)
            self._branches = Branches(self.program, own.modules, device)

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Lend the parameters, as they are now, to the generator; a collective call where they are gathered."""
        self._parameters.gather(always=True)
        try:
            for slots, name, lender, other in self._lent:
                slots[name] = lender[other]
            yield
        finally:
            self._parameters.free()
        self._branches.check()

    def close(self) -> None:
        """Destroy its process groups; a collective call."""
        self.groups.close()


def _slots(stages: Sequence[nn.Module], every: bool) -> Iterator[tuple[str, tuple[Slots, str]]]:
    """Yield each parameter and persistent buffer, or ``every`` buffer, by its name, with where it is."""
    for stage in stages:
        for path, module in stage.named_modules():
            for slots, names in (
                (module._parameters, set(module._parameters)),
                (module._buffers, set(module._buffers) - (set() if every else module._non_persistent_buffers_set)),
            ):
                for name in names:
                    if slots[name] is not None:
                        yield f"{path}.{name}" if path else name, (slots, name)
