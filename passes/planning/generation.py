"""What is asked of a plan for generation: a step is one position of each group of sequences, a group for each stage of the pipeline.

pp 4     groups 0 1 2 3, each at another stage     microbatches 4, of one position
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from graphpar.errors import GraphparError
from graphpar.ir.program import Program
from graphpar.runtime.axes import AXIS, Divides
from graphpar.runtime.modes import GENERATE

if TYPE_CHECKING:
    from graphpar.passes.planning.asked import Asked

_DIVIDE = (Divides.LAYERS, Divides.EXPERTS, Divides.WEIGHTS)
"""What may be divided over ranks while tokens are generated."""


def for_generation(program: Program, asked: Asked) -> Asked:
    """Return what is asked with what generation leaves no choice of; for other programs as it is.

    Raises:
        GraphparError: something is asked for that a program for generation doesn't have.
    """
    if program.mode != GENERATE:
        return asked
    given = {axis: degree for axis, degree in asked.mesh.items() if degree > 1}
    for axis, degree in given.items():
        if AXIS[axis].divides not in _DIVIDE:
            raise GraphparError(
                f"mesh {axis}={degree} is for training: generation divides layers (pp), weights (tp) and experts (ep). Run the program "
                "once more for more sequences at a time."
            )
    pins = asked.pins
    if pins.global_batch is not None or pins.microbatch_size is not None:
        raise GraphparError(
            "A program for generation takes as many sequences at once as its example has rows; leave global_batch and microbatch_size out."
        )
    if pins.zero or pins.table is not None or pins.dp_mean:
        raise GraphparError("zero, dp_mean and a table of actions are for training; leave them out for generation.")
    unused = {axis: 1 for axis, record in AXIS.items() if record.divides not in _DIVIDE}
    groups = asked.mesh.get("pp") or (1 if asked.complete else asked.size)
    pins = replace(pins, microbatch_size=1, global_batch=groups, recompute="none")
    return replace(asked, mesh={**unused, **asked.mesh}, pins=pins)
