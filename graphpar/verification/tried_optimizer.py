"""The optimizer of a program, tried while it is compiled: what no plan can step is refused, and what this plan makes dear is said."""

from __future__ import annotations

import torch

from graphpar.errors import GraphparError
from graphpar.parts import Parts
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.manifest import load_manifest
from graphpar.runtime.stages.modules import emitted_package
from graphpar.runtime.state.optimizer_scope import NeedsClosure, Scope, look, unsaved
from graphpar.runtime.state.optimizers import Described, build_optimizer, factory
from graphpar.runtime.state.whole_parameters import dividing_axes
from graphpar.text import bytes_text


def tried_optimizer(parts: Parts) -> list[str]:
    """Step the optimizer of ``optimizer.py`` on small tensors; returns warnings.

    Raises:
        GraphparError: its step needs a closure, or draws random numbers on several ranks, or gives parameters whose state is sharded other
            memory, or it needs all parameters on one device, which has no room for them, or it is made from values that not every rank has.
    """
    program, plan, manifest = parts.compilation.program, parts.plan, load_manifest(parts.folder)
    again = {name for names in program.ties for name in names[1:]}
    model = {
        name: Described(torch.Size(info.whole or info.shape), info.dtype, info.requires_grad)
        for name, info in program.parameters.items()
        if name not in again
    }
    try:
        make = factory(manifest, emitted_package(manifest), "optimizer")
        if make is None:
            return []
        found = look(make, model, flat=plan.zero == 1 and not manifest.owners)
        lacking = unsaved(make, model)
    except NeedsClosure as error:
        raise GraphparError(f"{error}.") from None
    except RuntimeProgramError as error:  # it may need what only the ranks have, such as a GPU
        return [f"The optimizer could not be tried here, so the ranks try it first: {error}"]
    if plan.mesh.size > 1:
        try:
            found.check_ranks(plan.zero)
        except RuntimeProgramError as error:
            raise GraphparError(f"{error}.") from None
    dividing = dividing_axes(manifest, found.scope)
    if dividing or manifest.pp > 1:
        try:
            build_optimizer(make, {}, model)
        except RuntimeProgramError as error:
            raise GraphparError(
                f"{error}; on several ranks it gets parameters without values, so it can't read them: group by names or "
                "shapes, or use --mesh of dp_replicate alone."
            ) from None
    warnings = [] if lacking is None else [f"Checkpoints are refused: {lacking}."]
    if found.scope is not Scope.ALL or not dividing:
        return warnings
    needed = 2 * sum(each.shape.numel() * each.dtype.itemsize for each in model.values() if each.requires_grad)
    what = (
        f"the step of the model file's optimizer, {found.kind}, depends on all parameters together, so one rank holds all of them, their "
        f"gradients ({bytes_text(needed)} in all) and their state"
    )
    device = min((each.device for each in parts.compilation.cluster.kinds), key=lambda each: each.memory_bytes)
    if needed > device.memory_bytes:
        raise GraphparError(
            f"{what}, more than the {bytes_text(device.memory_bytes)} of a device; use one whose step reads an element or a "
            "parameter at a time, such as AdamW, LARS or Muon."
        )
    return [
        *warnings,
        f"{what[0].upper()}{what[1:]}, which the price leaves out. With --mesh of dp_replicate alone every rank has them anyway.",
    ]
