"""What is asked of a plan for generation: a step is one position of each group of sequences, a group for each stage of each replica.

pp 4                     groups 0 1 2 3, each at another stage           microbatches 4, of one position
dp_replicate 2, pp 2     groups 0 1 and 2 3, those of another replica    microbatches 2
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from graphpar.errors import GraphparError
from graphpar.passes.planning.constraints import PlanConstraints
from graphpar.runtime.axes import AXIS, Divides

_DIVIDE = (Divides.LAYERS, Divides.EXPERTS, Divides.WEIGHTS)
"""What may be divided over ranks while tokens are generated, besides the sequences."""
_SEQUENCES = "dp_replicate"
"""The axis whose ranks have other sequences."""
_AXES = tuple(name for name, record in AXIS.items() if record.divides in _DIVIDE or name == _SEQUENCES)


def groups_of(mesh: Mapping[str, int], devices: int) -> int:
    """Return how many groups of sequences are in flight, in plans of ``devices`` that share the degrees of ``mesh``.

    Where pp or dp_replicate are left to the search, all of its plans have as many, those that divide weights instead too: so prices
    of a step are of the same work.
    """
    apart = math.prod(degree for axis, degree in mesh.items() if axis not in ("pp", _SEQUENCES))
    return max(1, devices // apart)


def pins_of_generation(pins: PlanConstraints) -> PlanConstraints:
    """Return the pins with what generation leaves no choice of.

    Raises:
        GraphparError: something is asked for that a program for generation doesn't have.
    """
    given = {axis: degree for axis, degree in pins.mesh.items() if degree > 1}
    for axis, degree in given.items():
        if axis not in _AXES:
            raise GraphparError(
                f"mesh {axis}={degree} is for training: generation divides layers (pp), weights (tp), experts (ep) and sequences "
                f"({_SEQUENCES})."
            )
    if pins.global_batch is not None or pins.microbatch_size is not None:
        raise GraphparError(
            "A program for generation takes as many sequences at once as its example has rows, on each replica; leave global_batch and "
            "microbatch_size out."
        )
    if pins.zero or pins.table is not None or pins.dp_mean:
        raise GraphparError("zero, dp_mean and a table of actions are for training; leave them out for generation.")
    unused = {axis: 1 for axis in AXIS if axis not in _AXES}
    groups = groups_of(pins.mesh, pins.size)
    return replace(pins, mesh={**unused, **pins.mesh}, microbatch_size=1, global_batch=groups, recompute="none")
