"""Whether the blocks that an emitted program runs again in the backward are those that its plan says, as it says.

stage_0.py: recompute_units(stage) ──watched──► {path: function} ──compared──► plan.json: {"layers.*": "full"}

Numbers do not depend on it, but what a rank keeps does: a program that differs from its plan does not need the memory that is predicted.
A budget's share is not in the program, only which results are kept, so another share of the plan is not found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import nn

from graphpar.codegen.units import GATHERING, POINTWISE, RECOMPUTED_UNITS, RECOMPUTING
from graphpar.passes.planning.recomputation import same_as
from graphpar.runtime.manifest import Manifest, StageInterface
from graphpar.runtime.stages.modules import build_stage, stage_module
from graphpar.text import is_below, listed, matching

_CALLED = {
    "none": ("",),
    "pointwise": ("recompute_pointwise", ""),  # where it would keep as much
    "gathers": ("gather_again", ""),  # where nothing is gathered
    "gathers+pointwise": ("gather_again", "recompute_pointwise", ""),
    "selective": ("recompute_selectively",),
    "full": ("recompute",),
    "budget": ("recompute_but", "recompute"),  # with nothing kept it is all of it
}
"""By which functions blocks of a kind are recomputed."""


def check_recomputed(program: Manifest, package: str) -> list[str]:
    """Return how the stages of ``program`` recompute otherwise than its plan says."""
    blocks: dict[str, str] = {}
    classes: dict[str, str] = {}
    files: dict[str, str] = {}
    problems: list[str] = []
    for stage in program.stages:
        try:
            found, own = _called(program, package, stage)
        except Exception as error:  # the stage's own check says what is wrong with its file
            problems.append(f"stage {stage.index}, {stage.file}: {RECOMPUTED_UNITS} can't run: {error}")
            continue
        blocks |= found
        classes |= own
        files |= dict.fromkeys(found, f"stage {stage.index}, {stage.file}")
    counts = Counter(classes.values())  # a block repeats; others are units of sharded state, which nothing recomputes
    blocks = {path: called for path, called in blocks.items() if called or counts[classes[path]] > 1}
    planned, unknown = _planned(program.recompute, list(blocks))
    problems += [f"plan.json: recompute names {name!r}, but the program has no such block" for name in unknown]
    wrong: dict[tuple[str, str, str], list[str]] = {}
    for path, called in blocks.items():
        kind = same_as(planned.get(path, "none"))
        if called not in _CALLED[kind.partition(":")[0]]:
            wrong.setdefault((files[path], called, kind), []).append(path)
    return problems + [
        f"{file}: {called or 'nothing'} is called for {listed(paths, 4)}, but plan.json's recompute says {kind}"
        for (file, called, kind), paths in wrong.items()
    ]


def _planned(recompute: str | Mapping[str, str], blocks: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the kind of each block, and the patterns that match none."""
    if isinstance(recompute, str):
        return dict.fromkeys(blocks, recompute), []
    found: dict[str, str] = {}
    unknown = []
    for pattern, kind in recompute.items():
        matched = matching(pattern, blocks)
        found |= dict.fromkeys(matched, kind)
        unknown += [] if matched else [pattern]
    return found, unknown


def _called(program: Manifest, package: str, stage: StageInterface) -> tuple[dict[str, str], dict[str, str]]:
    """Return by which function each block of a stage is recomputed, an empty name: by none; and its class."""
    module = build_stage(package, stage, torch.device("meta"), program.mode == "train")
    paths = {each: path for path, each in module.named_modules() if type(each).__module__ == f"{package}.blocks"}
    outer = [path for path in paths.values() if not any(is_below(path, other) for other in paths.values())]
    found = dict.fromkeys(outer, "")
    file = stage_module(package, stage)
    if stage.recomputes and hasattr(file, RECOMPUTED_UNITS):
        with _watched(file) as calls:
            getattr(file, RECOMPUTED_UNITS)(module)
        found |= {paths[block]: name for block, name in calls if block in paths}
    return found, {path: type(each).__name__ for each, path in paths.items()}


@contextmanager
def _watched(file: ModuleType) -> Iterator[list[tuple[nn.Module, str]]]:
    """Note which functions of recomputation ``file`` calls for which modules, instead of calling them."""
    calls: list[tuple[nn.Module, str]] = []
    before = {name: getattr(file, name) for name in (*RECOMPUTING, *POINTWISE, *GATHERING) if hasattr(file, name)}
    for name in before:
        setattr(file, name, lambda block, *rest, name=name, **named: calls.append((block, name)))
    try:
        yield calls
    finally:
        for name, function in before.items():
            setattr(file, name, function)
