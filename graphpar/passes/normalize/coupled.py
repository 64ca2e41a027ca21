"""Operators that mix examples (BatchNorm): on which axes they are placed, and what to tell the user about splitting the batch.

program.couplings ──grouped by reason, layers of one name together──► one line, however many there are
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from graphpar.ir.program import Coupling, Program
from graphpar.runtime.axes import AXIS
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.option_kinds import TRAIN
from graphpar.text import listed, plural

_SHOWN = 4
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def coupled_text(couplings: Sequence[Coupling]) -> str:
    """Return ``batch_norm mixes examples (blocks.*.bn1, blocks.*.bn2: 12 modules, model.py:19)``."""
    groups: dict[str, list[Coupling]] = {}
    for coupling in couplings:
        groups.setdefault(coupling.reason, []).append(coupling)
    return "; ".join(_group(reason, group) for reason, group in groups.items())


def _group(reason: str, group: Sequence[Coupling]) -> str:
    if len(group) == 1:
        return str(group[0])
    modules = list(dict.fromkeys(coupling.module for coupling in group if coupling.module))
    lines = list(dict.fromkeys(coupling.line for coupling in group if coupling.line))
    patterns = list(dict.fromkeys(_NUMBER.sub("*", module) for module in modules))
    shown = patterns if len(patterns) < len(modules) else modules
    counted = f": {plural(len(modules), 'module')}" if len(shown) < len(modules) or len(shown) > _SHOWN else ""
    named = f"{listed(shown, _SHOWN)}{counted}" if modules else ""
    place = ", ".join(filter(None, (named, listed(lines, _SHOWN))))
    return f"{reason} ({place})" if place else reason


def is_coupled(program: Program) -> bool:
    """Whether replicas compute something together, as examples depend on each other."""
    return bool(program.couplings) or program.unsplittable is not None


def placed_axes(program: Program, mesh: Mesh) -> dict[str, int]:
    """Return the axes of several ranks on which each operator has a placement, with their degrees.

    Replicas run on different rows, so nothing is placed on their axes, unless examples depend on each other.
    """
    coupled = is_coupled(program)
    return {
        axis: degree
        for axis, degree in mesh.degrees().items()
        if degree > 1 and (AXIS[axis].compute or (AXIS[axis].replicas and coupled))
    }


def program_mesh(program: Program, mesh: Mesh) -> Mesh:
    """Return the mesh of the axes that the program of a rank depends on: those of placed operators, and of replicas that hold different
    experts."""
    exchanging = {axis: degree for axis, degree in mesh.degrees().items() if AXIS[axis].exchanges}
    return Mesh(**{**exchanging, **placed_axes(program, mesh)})


def batch_warning(program: Program, mesh: Mesh, microbatches: int, allowed: bool) -> str | None:
    """Return a warning where coupled examples keep the batch whole, or where it is split nevertheless; else None."""
    if microbatches > 1:
        if not program.couplings:
            return None
        return f"{coupled_text(program.couplings)}: each of {microbatches} microbatches is computed separately, which changes the result."
    if mesh.pp == 1 or allowed or not (program.couplings or program.unsplittable):
        return None
    reason = program.unsplittable or f"examples depend on each other: {coupled_text(program.couplings)}"
    return f"The batch is not split, so it is one microbatch: {reason}. {splitting_advice(program)}"


def splitting_advice(program: Program) -> str:
    """Say what can be done where the batch of ``program`` can't be split."""
    replicas = (
        "Use one microbatch (GPipe), which dp_replicate and dp_shard divide exactly: replicas exchange what is mixed"
    )
    if program.of_one_size:
        return "Take sizes that follow the batch from the inputs (x.shape[0]), and it can be split."
    if program.unsplittable is not None:
        returned = "a sum or a mean over examples" if program.mode == TRAIN else "a row of each example"
        return f"{replicas}." if program.couplings else f"Return {returned}, and it can be split."
    return (
        f"{replicas}; operators that treat examples independently (GroupNorm, BatchNorm in eval mode) let it be split exactly, and "
        "--allow-batch-coupling splits it and takes statistics of each microbatch."
    )
