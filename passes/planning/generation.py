"""What is asked of a plan for generation: a step is one position of each group of sequences, a group for each stage of the pipeline.

pp 4     groups 0 1 2 3, each at another stage     microbatches 4, of one position
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from graphpar.errors import GraphparError
from graphpar.passes.planning.constraints import PlanConstraints
from graphpar.runtime.axes import AXIS, Divides

_DIVIDE = (Divides.LAYERS, Divides.EXPERTS, Divides.WEIGHTS)
"""What may be divided over ranks while tokens are generated."""


def pins_of_generation(
    pins: PlanConstraints, mesh: Mapping[str, int], groups: int
) -> tuple[PlanConstraints, dict[str, int]]:
    """Return the pins and the mesh with what generation leaves no choice of.

    Args:
        groups: of sequences that are in flight.

    Raises:
        GraphparError: something is asked for that a program for generation doesn't have.
    """
    given = {axis: degree for axis, degree in mesh.items() if degree > 1}
    for axis, degree in given.items():
        if AXIS[axis].divides not in _DIVIDE:
            raise GraphparError(
                f"mesh {axis}={degree} is for training: generation divides layers (pp), weights (tp) and experts (ep). Run the program "
                "once more for more sequences at a time."
            )
    if pins.global_batch is not None or pins.microbatch_size is not None:
        raise GraphparError(
            "A program for generation takes as many sequences at once as its example has rows; leave global_batch and microbatch_size out."
        )
    if pins.zero or pins.table is not None or pins.dp_mean:
        raise GraphparError("zero, dp_mean and a table of actions are for training; leave them out for generation.")
    unused = {axis: 1 for axis, record in AXIS.items() if record.divides not in _DIVIDE}
    return replace(pins, microbatch_size=1, global_batch=groups, recompute="none"), {**unused, **mesh}
