"""The stages of a rank, with memory for what it stores of their parameters and of the optimizer's state.

stage_0.py ──► a module without memory ──ZeRO 2, 3: its units as FSDP2 shards them──► memory, still without values
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from graphpar.runtime.cast_once import CastOnce
from graphpar.runtime.compiled import blocks, compile_blocks
from graphpar.runtime.fully_sharded import fully_shard_stage, hold_new_memory
from graphpar.runtime.groups import Groups
from graphpar.runtime.manifest import Manifest, StageInterface
from graphpar.runtime.offloaded_activations import OffloadedActivations
from graphpar.runtime.optimizer_shards import OptimizerShards
from graphpar.runtime.stages import empty_stage, materialise, stage_function
from graphpar.runtime.weights import check_local_shapes


def stored_stage(
    package: str,
    interface: StageInterface,
    program: Manifest,
    groups: Groups,
    device: torch.device,
    backend: str | None = None,
    activations: OffloadedActivations | None = None,
) -> tuple[nn.Module, CastOnce]:
    """Build a stage whose parameters have memory for what this rank stores of them, still without values; and how these are cast.

    Args:
        backend: of ``torch.compile``, which compiles its blocks; None: they run as they are.
        activations: moves what its blocks keep to the host; None: they keep it.

    Raises:
        RuntimeProgramError: its file does not fit the plan.
    """
    stage = empty_stage(package, interface, program.mode == "train")
    check_local_shapes(stage, program)
    if backend is not None:  # inside of what FSDP2 gathers, and of what is recomputed
        compile_blocks(stage, package, backend)
    dtypes = (
        program.casts if backend is None else {}
    )  # a compiled block casts again in its backward, and keeps no copies
    casts = CastOnce(stage, list(blocks(stage, package)), dtypes)
    if interface.recomputes:  # inside of what FSDP2 gathers, as its hooks run once
        stage_function(package, interface, "recompute_units")(stage)
    if activations is not None:
        activations.add(stage, list(blocks(stage, package)), casts)
    units = stage_function(package, interface, "fully_shard_units") if program.zero >= 2 else None
    if units is not None and program.fully_sharded:
        fully_shard_stage(stage, units, groups, device, program)
    materialise(stage, device)
    hold_new_memory(stage)
    return stage, casts


def optimizer_shards(
    package: str, interfaces: Sequence[StageInterface], stages: Sequence[nn.Module], program: Manifest, groups: Groups
) -> OptimizerShards:
    """Divide the optimizer's state of this rank's stages (ZeRO level 1)."""
    functions = [stage_function(package, interface, "optimizer_units") for interface in interfaces]
    modules = [function(stage) for function, stage in zip(functions, stages)]
    return OptimizerShards(stages, modules, program, groups)
