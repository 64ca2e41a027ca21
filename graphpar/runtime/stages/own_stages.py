"""The stages of a rank, built as its plan stores their parameters.

stage_0.py ──► a module without memory ──ZeRO 2, 3: its units as FSDP2 shards them──► memory, still without values
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphpar.runtime.checkpoints.weights import check_local_shapes, load_constants
from graphpar.runtime.groups import Groups
from graphpar.runtime.manifest import Manifest, StageInterface
from graphpar.runtime.stages.batches import Feed
from graphpar.runtime.stages.cast_once import CastOnce
from graphpar.runtime.stages.compiled import blocks, compile_blocks, compile_repetitions, leave_functions
from graphpar.runtime.stages.dropout import draw_in_one_kernel
from graphpar.runtime.stages.modules import (
    StageAdapter,
    bind_collectives,
    emitted_package,
    empty_stage,
    materialise,
    share_parameters,
    stage_function,
)
from graphpar.runtime.stages.offloaded_activations import OffloadedActivations
from graphpar.runtime.stages.schedules import keyword_names
from graphpar.runtime.state.fully_sharded import fully_shard_stage, hold_new_memory
from graphpar.runtime.state.host import Host
from graphpar.runtime.state.parameters import FullySharded, Replicated
from graphpar.runtime.state.zero1 import Zero1

CONSTANTS = "constants.safetensors"


class OwnStages:
    """The stages of this rank, first to last, with memory for what it stores of their parameters, still without values.

    Args:
        backend: of ``torch.compile``, which compiles their blocks; None: they run as they are.
        host: where what the plan says is moved; None: nowhere, since the device is the host, or the plan says nothing.
        lent: parameters and persistent buffers get no memory, since another program's are used.

    Attributes:
        home: the device on which shards of parameters and their gradients live: the host's memory, or that of this rank's device.
        package: the name under which the emitted package is imported.
        modules, casts, adapters: of each stage: its module, how its parameters are cast, and what torch's pipeline runs of it.

    Raises:
        RuntimeProgramError: a file does not fit the plan.
    """

    def __init__(
        self,
        program: Manifest,
        groups: Groups,
        device: torch.device,
        backend: str | None,
        host: Host | None,
        lent: bool = False,
    ) -> None:
        self._lent = lent
        self.program, self.groups, self._device, self._backend = program, groups, device, backend
        self.package = emitted_package(program)
        bind_collectives(program, self.package, groups)
        self.interfaces = program.stages_of(groups.place["pp"])
        moves = host is not None and "activations" in program.offload
        self._activations = OffloadedActivations(host) if host is not None and moves else None
        self._shards_on_host = host is not None and "params" in program.offload
        self.home = torch.device("cpu") if self._shards_on_host else device
        stored = [self._stored(interface) for interface in self.interfaces]
        self.modules, self.casts = [module for module, _ in stored], [casts for _, casts in stored]
        if not program.fully_sharded:  # FSDP2 shards each stage by itself
            share_parameters(self.modules, program.ties)
            for casts in self.casts[1:]:
                casts.share(self.casts[0])
        draw_in_one_kernel(self.package, device)
        for module in self.modules:
            load_constants(module, program.folder / CONSTANTS, program, groups.place)
        share = 1 / program.replicas if program.dp_mean else None
        self.adapters = [
            StageAdapter(module, interface, share, program.steady)
            for module, interface in zip(self.modules, self.interfaces)
        ]

    def _stored(self, interface: StageInterface) -> tuple[nn.Module, CastOnce]:
        program, package = self.program, self.package
        stage = empty_stage(package, interface, program.mode == "train")
        check_local_shapes(stage, program)
        leave_functions(stage, package)
        if self._backend is not None:  # inside of what FSDP2 gathers, and of what is recomputed
            compile_blocks(stage, package, self._backend, interface.partly)
        # a compiled block casts again in its backward, and keeps no copies
        casts = CastOnce(stage, list(blocks(stage, package)), program.casts if self._backend is None else {})
        if interface.recomputes:  # inside of what FSDP2 gathers, as its hooks run once
            self._function(interface, "recompute_units")(stage)
            if self._backend is not None:
                compile_repetitions(stage, self._backend, interface.partly)
        if self._activations is not None:
            self._activations.add(stage, list(blocks(stage, package)), casts)
        if program.fully_sharded:
            units = self._function(interface, "fully_shard_units")
            fully_shard_stage(stage, units, self.groups, self._device, program, self._shards_on_host)
        materialise(stage, self._device, program.working, self.home, self._lent)
        hold_new_memory(stage)
        return stage, casts

    def _function(self, interface: StageInterface, name: str) -> Callable[..., Any]:
        return stage_function(self.package, interface, name)

    @property
    def last(self) -> bool:
        """Whether the last stage of the program is among them."""
        return self.interfaces[-1].index == len(self.program.stages) - 1

    def named(self) -> list[tuple[str, nn.Module]]:
        """Return the stages with names for events and errors."""
        return [(f"stage_{interface.index}", module) for interface, module in zip(self.interfaces, self.modules)]

    def parameters(self) -> Replicated:
        """Say how this rank stores their parameters, by the ZeRO level of the plan; a collective call."""
        if self.program.zero == 1:
            units = [
                self._function(each, "optimizer_units")(stage) for each, stage in zip(self.interfaces, self.modules)
            ]
            return Zero1(self.modules, units, self.program, self.groups)
        return (FullySharded if self.program.zero >= 2 else Replicated)(self.modules, self.program, self.groups)

    def feed(self, seed: int) -> Feed:
        """Return what gives them the inputs that they take of a batch."""
        names = keyword_names(self.program, [interface.index for interface in self.interfaces])
        counts = any(each.counts for stage in self.interfaces for each in (stage, stage.in_evaluation))
        return Feed(self.program, self.groups, self._device, seed, names, self._count if counts else None)

    def _count(self, **inputs: Tensor) -> Sequence[Tensor]:
        """What the loss divides by, of one microbatch's inputs and the buffers as they are now."""
        held = {
            name: buffer for module in self.modules for name, buffer in module.named_buffers(remove_duplicate=False)
        }
        count = self._function(self.program.stages[-1], "global_counts")
        found: Sequence[Tensor] = count(*(held[name] for name in self.program.counts.buffers), **inputs)
        return found
