"""The steps from the stages of a rank's program to what is printed, each a function of stages and their plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from graphpar.ir.plan import Plan
from graphpar.ir.program import Program
from graphpar.ir.stage import Stage
from graphpar.passes.fsdp_units import with_own_units
from graphpar.passes.parallel_products import with_joined, with_products
from graphpar.passes.split import copy_written
from graphpar.passes.step import Step
from graphpar.runtime.stages.compiled import splits_backwards

Stages = tuple[Program, list[Stage]]
"""The program of a rank, and its stages."""


@dataclass(frozen=True)
class StagePass(Step):
    """A step from stages to stages, for a plan and the kinds of its blocks that recompute, by path."""

    run: Callable[[Program, list[Stage], Plan, Mapping[str, str]], Stages] = field(kw_only=True)


def _copy_written(program: Program, stages: list[Stage], plan: Plan, kinds: Mapping[str, str]) -> Stages:
    for stage in stages:
        copy_written(stage.graph, kinds)
    return program, stages


def _units(program: Program, stages: list[Stage], plan: Plan, kinds: Mapping[str, str]) -> Stages:
    return with_own_units(program, stages, plan.units) if plan.fully_sharded else (program, stages)


def _products(program: Program, stages: list[Stage], plan: Plan, kinds: Mapping[str, str]) -> Stages:
    # A schedule that splits backwards in two runs the gradients of inputs and those of weights apart, and not beside collectives.
    whole = not splits_backwards(plan.schedule, (cell for row in plan.actions or () for cell in row))
    return with_products(*with_joined(program, stages, whole=whole, rings=plan.overlap_tp))


STAGE_PASSES = (
    StagePass(
        "copy_written", "graphpar.passes.split", ("split",),
        "blocks that run again read copies of the buffers that their stage writes",
        "graphpar verify",
        run=_copy_written,
    ),
    StagePass(
        "own_units", "graphpar.passes.fsdp_units", ("copy_written",),
        "modules that are gathered separately are blocks, where state is sharded",
        "graphpar check and graphpar verify",
        run=_units,
    ),
    StagePass(
        "join_products", "graphpar.passes.parallel_products", ("own_units",),
        "collectives of tp and their products are one function",
        "graphpar check and graphpar verify",
        run=_products,
    ),
)  # fmt: skip
"""After the program of a rank is split."""
