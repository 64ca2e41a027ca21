"""What may be asked about state that is sharded over dp_shard and cp: levels, when parameters are gathered and freed, reduce dtypes."""

from __future__ import annotations

from collections.abc import Mapping

from graphpar.errors import GraphparError, near_match
from graphpar.ir.mesh import Mesh
from graphpar.ir.program import Program
from graphpar.runtime.axes import PREFETCH, STATE_AXES, ZERO1_BY
from graphpar.runtime.layout import R, Type


def check_zero(mesh: Mesh, level: int | None, mode: str = "train") -> None:
    """Check that the state can be sharded over dp_shard and cp as ``level`` says; None is level 3 where there is a dp_shard axis.

    Raises:
        GraphparError: it can't.
    """
    check_level(level)
    shown = mesh.state_text
    if mesh.shards == 1 and level:
        raise GraphparError(
            f"zero={level} shards state over dp_shard and cp, which have one rank; give mesh dp_shard=2 or more, or cp=2."
        )
    if mesh.shards == 1 or (mesh.dp_shard == 1 and not level):
        return
    if level == 0:
        raise GraphparError(
            f"Mesh dp_shard={mesh.dp_shard} with zero=0 shards nothing; use dp_replicate={mesh.dp_shard}, or zero=1, 2 or 3."
        )
    if mode != "train":
        raise GraphparError(
            f"Mesh {shown} with zero={level_of(mesh, level)} shards what training stores; for inference use tp, or dp_replicate."
        )


def check_level(level: int | None) -> None:
    """Check that there is such a ZeRO level.

    Raises:
        GraphparError: there is none.
    """
    if level is not None and level not in range(4):
        raise GraphparError(f"zero is {level!r}; it must be 0, 1, 2 or 3.")


def check_zero1_by(by: str | None, level: int | None) -> None:
    """Check how the work of ZeRO-1 is to be divided; None leaves it open.

    Raises:
        GraphparError: it is unknown, or the level is another.
    """
    if by is None:
        return
    if by not in ZERO1_BY:
        raise GraphparError(
            f"zero1_by is {by!r}; it must be one of {', '.join(ZERO1_BY)}.{near_match(str(by), ZERO1_BY)}"
        )
    if level != 1:
        raise GraphparError(f"zero1_by={by} says how ZeRO-1 divides the state; give zero=1 with it.")


def gathers_again(pp: int, level: int, reshard: str | int | None) -> bool:
    """Return whether units are gathered for their backward apart from their forward."""
    return level == 3 and reshard != "never" and not (pp > 1 and reshard in (None, "default"))


def check_prefetch(again: bool, prefetch: str | None, distance: int | None) -> None:
    """Check what is asked for about gathers ahead of a backward; None leaves it open.

    Args:
        again: see :func:`gathers_again`.

    Raises:
        GraphparError: it is unknown, or contradicts itself, or there are no such gathers.
    """
    if not again and (prefetch is not None or distance is not None):
        given = f"prefetch={prefetch}" if prefetch is not None else f"prefetch_distance={distance}"
        raise GraphparError(
            f"{given} says when parameters are gathered for the backward, and only zero=3 gathers them then (under a pipeline with "
            "reshard=always); give mesh dp_shard=2 or more, or cp=2, and zero=3 with it, or leave it out."
        )
    if distance is not None and distance < 1:
        raise GraphparError(f"prefetch_distance is {distance}; it must be at least 1.")
    if prefetch is not None and prefetch not in PREFETCH:
        raise GraphparError(
            f"prefetch is {prefetch!r}; it must be one of {', '.join(PREFETCH)}.{near_match(str(prefetch), PREFETCH)}"
        )
    if prefetch == "none" and distance is not None:
        raise GraphparError(
            f"prefetch=none gathers nothing ahead, so prefetch_distance={distance} has no use; leave it out."
        )


def prefetching(again: bool, prefetch: str | None, distance: int | None) -> tuple[str | None, int]:
    """Return how a plan gathers ahead of a backward, as pinned, else one unit before the backward of the one before it.

    Raises:
        GraphparError: as :func:`check_prefetch`.
    """
    check_prefetch(again, prefetch, distance)
    if not again:
        return None, 0
    return prefetch or PREFETCH[0], 0 if prefetch == "none" else distance or 1


def check_reach(distance: int, units: int) -> None:
    """Check that there are as many units to gather ahead as ``distance`` says.

    Args:
        units: how many the largest stage has besides itself.

    Raises:
        GraphparError: there are fewer.
    """
    if distance > max(1, units):
        raise GraphparError(
            f"prefetch_distance={distance} gathers {distance} units ahead, but no stage has more than {units} besides the rest of it; give "
            f"at most {max(1, units)}."
        )


def check_reduced(mesh: Mesh, level: int, dtype: str | None, mode: str = "train") -> None:
    """Check that there are sums of gradients over replicas, or ranks that share state, where a dtype for them is given.

    Raises:
        GraphparError: there are none.
    """
    summed = mesh.replicas > 1 or (level > 0 and mesh.shards > 1)
    if dtype is not None and not (summed and mode == "train"):
        shown = ", ".join(f"{axis}={degree}" for axis, degree in mesh.degrees().items() if degree > 1)
        what = f"mesh {shown or 'of one device'}" if mode == "train" else "program for inference"
        raise GraphparError(
            f"reduce_dtype={dtype} is for sums of gradients over dp_replicate and dp_shard (and cp with a ZeRO level), which a {what} "
            "does not have; leave it out."
        )


def zero_level(program: Program, mesh: Mesh, level: int | None) -> int:
    """Return the ZeRO level of a plan: as pinned, else 3 where there is a dp_shard axis.

    Raises:
        GraphparError: as :func:`check_zero`.
    """
    check_zero(mesh, level, program.mode)
    return level_of(mesh, level)


def level_of(mesh: Mesh, level: int | None) -> int:
    """Return the ZeRO level on ``mesh``: as pinned, else 3 where dp_shard has several ranks."""
    return (3 if mesh.dp_shard > 1 else 0) if level is None else level


def check_whole(mesh: Mesh, level: int, parameters: Mapping[str, Mapping[str, Type]]) -> None:
    """Check that parameters are computed with whole on all ranks that share state, and are summed over these.

    Raises:
        GraphparError: a pin says otherwise.
    """
    for axis in mesh.state_axes if level else ():
        name = next((name for name, spec in parameters.items() if spec.get(axis, R) != R), None)
        if name is not None:
            raise GraphparError(
                f"{name} is pinned to {parameters[name][axis]}@{axis}, but zero={level} stores shards over {mesh.state_text} of parameters "
                f"that are R@{axis}; leave out the pin, or the ZeRO level."
            )


RESHARD = ("default", "always", "never")


def check_reshard(mesh: Mesh, zero: int, reshard: str | int) -> None:
    """Check that gathered parameters can be freed as ``reshard`` says.

    ``default`` is after each forward and backward, and under a pipeline once a step; ``always`` and ``never`` (in between) say so; a
    number frees them after a forward down to shards over so many neighbouring ranks.

    Raises:
        GraphparError: they can't.
    """
    if reshard == "default":
        return
    if isinstance(reshard, bool) or (not isinstance(reshard, int) and reshard not in RESHARD):
        raise GraphparError(f"reshard is {reshard!r}; it must be one of {', '.join(RESHARD)}, or a number of ranks.")
    if mesh.shards == 1 or zero < 2:
        raise GraphparError(
            f"reshard={reshard} says when gathered parameters are freed, but with {mesh.state_text} and zero={zero} they are whole on "
            "every rank; give mesh dp_shard=2 or more, or cp=2, and zero=3."
        )
    if zero < 3 and reshard != "never":
        raise GraphparError(
            f"reshard={reshard} frees gathered parameters after a forward, but zero={zero} keeps them for the step; use zero=3."
        )
    others = {axis: degree for axis, degree in mesh.degrees().items() if degree > 1 and axis not in STATE_AXES}
    if (
        isinstance(reshard, int) and others
    ):  # each unit would make its groups on the ranks of one shard group alone, and hang
        raise GraphparError(
            f"reshard={reshard} with {', '.join(f'{axis}={degree}' for axis, degree in others.items())} beside {mesh.state_text} comes "
            "in a later version; use reshard=always."
        )
    if isinstance(reshard, int) and (not 1 < reshard < mesh.shards or mesh.shards % reshard):
        between = [str(number) for number in range(2, mesh.shards) if mesh.shards % number == 0]
        raise GraphparError(
            f"reshard={reshard} must be a divisor of {mesh.state_text} between 1 and {mesh.shards}"
            f"{': ' + ', '.join(between) if between else ', of which there is none'}."
        )
