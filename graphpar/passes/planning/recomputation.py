"""Which blocks run their forward again in the backward: one kind for all, or patterns over the paths of blocks.

"full"                                     every block that has a backward
"budget:0.6"                               every block, to at most this share of the bytes that it would keep
{"layers.*": "full", "layers.0": "none"}   of patterns that match one block the last counts; others are not recomputed

Blocks without a backward, those of a network that is frozen as a whole, keep nothing, so they run once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from graphpar.errors import GraphparError, near_match
from graphpar.ir.program import Program
from graphpar.ir.recomputation import GATHERS, POINTWISE, Recomputation
from graphpar.operators.gradients import blocks_without_backward
from graphpar.passes.normalize.functional import written_buffers
from graphpar.passes.planning.constraints import PlanConstraints
from graphpar.runtime.option_kinds import AUTO, WHOLE, Recompute, checked_recompute, share_of
from graphpar.text import is_at_or_below, is_below, listed, matching

_BUDGETS = ("budget:0.8", "budget:0.6", "budget:0.4", "budget:0.2")
_LEAST_FIRST = ("none", POINTWISE, GATHERS, f"{GATHERS}+{POINTWISE}", *_BUDGETS, "full")


def least_first(program: Program, overlap_tp: bool = False, offload: Collection[str] | None = None) -> tuple[str, ...]:
    """Return the kinds that :data:`AUTO` tries, in order.

    Args:
        overlap_tp: no budgets, which number operators that it runs in pieces.
        offload: with activations, those whose results autograd alone keeps.
    """
    kinds = _LEAST_FIRST if program.mode == "train" and program.blocks else _LEAST_FIRST[:1]
    return tuple(
        kind
        for kind in kinds
        if (not overlap_tp or share_of(kind) is None) and ("activations" not in (offload or ()) or kind in WHOLE)
    )


def kinds_of(program: Program, pins: PlanConstraints) -> tuple[Recompute, ...]:
    """Return what blocks may recompute, the least first: what is pinned, or all that every block can do."""
    if pins.recompute != AUTO:
        return (pins.recompute or "none",)
    kinds = least_first(program, bool(pins.overlap_tp), pins.offload)
    try:
        recomputed_blocks(program, kinds[-1])
    except GraphparError:
        return ("none",)
    return kinds


def of_the_model(program: Program) -> tuple[Recompute, list[str]]:
    """Return what the user's model itself runs under ``torch.utils.checkpoint``, as far as these are blocks; and warnings of the rest."""
    paths = _paths(program)
    regions = program.regions if program.mode == "train" else ()
    inside = {region: [path for path in paths if region and is_at_or_below(path, region)] for region in regions}
    found = {path for within in inside.values() for path in within}
    lost = [region or "a function" for region, within in inside.items() if not within]
    warnings = [
        f"The model runs {listed(lost, 4)} under torch.utils.checkpoint, but only blocks, modules that repeat, can be recomputed: "
        "the activations there are saved."
    ]
    recompute: Recompute = (
        "none" if not found else "full" if len(found) == len(paths) else dict.fromkeys(sorted(found), "full")
    )
    return recompute, warnings if lost else []


def _paths(program: Program) -> list[str]:
    return list(dict.fromkeys(path for block in program.blocks.values() for path in block.instances))


def recomputed_blocks(program: Program, recompute: Recompute) -> dict[str, str]:
    """Return the kind of each block that is recomputed, by its path.

    Raises:
        GraphparError: a pattern matches no block, or none that has a backward, there is no block, or no backward, or a block can't run
            again.
    """
    checked_recompute("recompute", recompute)
    if recompute == "none":
        return {}
    if program.mode != "train":
        raise GraphparError(
            f"recompute is {recompute!r}, but {program.name} is compiled for inference, which has no backward."
        )
    paths = _paths(program)
    if not paths:
        raise GraphparError(
            f"recompute is {recompute!r}, but {program.name} has no block, a module that repeats, to run again; leave it out."
        )
    once = blocks_without_backward(program)
    found: dict[str, str] = {}
    if isinstance(recompute, str):
        found = dict.fromkeys(paths, same_as(recompute))
    for pattern, kind in recompute.items() if not isinstance(recompute, str) else ():
        matched = matching(pattern, paths)
        if not matched:
            raise GraphparError(_matches_nothing(pattern, paths, program.module_classes))
        found |= dict.fromkeys(matched, same_as(kind))
        if same_as(kind) != "none" and once.issuperset(matched):
            raise GraphparError(
                f"recompute's pattern {pattern!r} matches only blocks of a frozen network ({listed(matched, 4)}), which has no backward to "
                "run them again in; leave it out."
            )
    chosen = {path: found[path] for path in paths if path not in once and found.get(path, "none") != "none"}
    _check_buffers(program, chosen)
    return chosen


def _check_buffers(program: Program, paths: Collection[str]) -> None:
    """Check that blocks write no buffers of other modules: these they would write twice."""
    for block in program.blocks.values():
        if any(node.op == "placeholder" for node in written_buffers(block.graph)):
            for path in (path for path in block.instances if path in paths):
                raise GraphparError(
                    f"The block {path} can't run again in the backward: it writes a buffer that another module has, too. Leave it out of "
                    f"recompute, such as {path}=none."
                )


def with_writes(program: Program, recomputed: Mapping[str, Recomputation]) -> dict[str, Recomputation]:
    """Add the buffers of each block that an operator writes, there or anywhere in ``program``."""
    written = {str(node.target) for node in written_buffers(program.graph)}
    for block in program.blocks.values():
        names = {str(node.target) for node in written_buffers(block.graph)}
        written |= {f"{path}.{name}" for path in block.instances for name in names}
    written |= {other for name in written for other in program.tie_of(name)}
    found = {}
    for block in program.blocks.values():
        names = {str(node.target) for node in block.graph.nodes if node.op == "get_attr"}
        for path in block.instances:
            if path in recomputed:
                writes = sorted(name for name in names if f"{path}.{name}" in written)
                found[path] = replace(recomputed[path], writes=tuple(writes))
    return found


def same_as(kind: str) -> str:
    """Return ``none`` or ``full`` for a budget that is the same."""
    share = share_of(kind)
    return kind if share not in (0.0, 1.0) else "none" if share else "full"


def _matches_nothing(pattern: str, paths: list[str], modules: Iterable[str]) -> str:
    inside = next((path for path in matching(pattern, modules) if any(is_below(path, block) for block in paths)), None)
    if inside is not None:
        block = next(path for path in paths if is_below(inside, path))
        return (
            f"recompute's pattern {pattern!r} matches {inside}, which is inside the block {block}: a block is recomputed as one. To "
            f"save a part of it, give {block} selective or a budget (budget:0.6), which choose by operator."
        )
    deeper = matching(f"**.{pattern}", paths)
    levels = pattern.count(".") + 1
    prefixes = list(dict.fromkeys(".".join(path.split(".")[:-levels]) for path in deeper))
    hint = f" Did you mean '{prefixes[0]}.{pattern}'?" if len(prefixes) == 1 else near_match(pattern, paths)
    return f"recompute's pattern {pattern!r} matches no block; blocks are {listed(paths, 4)}.{hint}"
