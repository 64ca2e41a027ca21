"""A row's model as the program of one rank, with Megatron-LM's placement pinned.

    Shape + Degrees ──export a few blocks, plan with pins, shard──► units: embedding, block, ..., norm + head     once for each

A model has two blocks of each kind at most: all others are the same, so the same unit is taken for them.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch

import graphpar as gp
from benchmarks.published_kernels import LOSSES
from benchmarks.published_models import GPT, Shape
from graphpar.cost_models.execution import Execution
from graphpar.cost_models.pipeline_units import Unit, UnitClass
from graphpar.cost_models.workload import Phase, Work
from graphpar.hardware.cluster import Cluster
from graphpar.hardware.devices import Link, device_named
from graphpar.ir.mesh import Mesh
from graphpar.ir.program import Program
from graphpar.passes.planning.choose import solve
from graphpar.passes.planning.measured_units import units_of
from graphpar.runtime.plan_record import DTYPES

ROWS = 2
"""Of the example batch; prices are symbolic in it."""


@dataclass(frozen=True)
class Degrees:
    """Degrees inside a replica, and whether the sequence is sharded between the products of tp."""

    tp: int
    sequence: bool


@dataclass(frozen=True)
class Parts:
    """The units of a model: ``first``, blocks without experts and others (None where there are none), ``last``."""

    first: Unit
    dense: Unit | None
    other: Unit | None
    last: Unit

    def chain(self, dense: int, others: int) -> list[Unit]:
        """Chain the units of a model with these numbers of blocks."""
        return [self.first, *([self.dense] * dense), *([self.other] * others), self.last]  # type: ignore[list-item]


def pins(degrees: Degrees, shape: Shape) -> dict[str, Any]:
    """Pin column- and row-parallel products, tables over their rows, and norms on shards of the sequence or on all of it."""
    if degrees.tp == 1:
        return {}
    between = {
        "inputs": ["S(1)@tp" if degrees.sequence else "I@tp"],
        "outputs": ["S(1)@tp" if degrees.sequence else "I@tp"],
    }
    found: dict[str, Any] = {
        "blocks.*.attention.qkv": "colwise",
        "blocks.*.attention.out": "rowwise",
        "blocks.*.mlp.up": "colwise",
        "blocks.*.mlp.down": "rowwise",
        "tokens.weight": "S(0)@tp",
        **dict.fromkeys(("blocks.*.norm1", "blocks.*.norm2", "norm"), between),
    }
    if not shape.tied:
        found["head.weight"] = "S(0)@tp"
    if shape.loss == "gathered":
        found["head"] = found["shares"] = {"outputs": ["I@tp"]}
    return found


@functools.cache
def lowered(shape: Shape, degrees: Degrees, dtype: str, dense: bool, others: bool) -> Program:
    """The program of a rank with two blocks of each kind that is asked for. Placements that nothing pins are solved for slow links, so
    that no collectives are added to divide what Megatron-LM's ranks do each."""
    ids = torch.zeros(ROWS, shape.seq, dtype=torch.long)
    counts = 2 * dense, 2 * others
    # sharded over the vocabulary, the loss is graphpar's own, which is Megatron-LM's
    loss_fn = LOSSES["plain" if degrees.tp > 1 and shape.loss != "gathered" else shape.loss]
    program = gp.export(  # main copies of parameters, where a row has them, are the optimizer's
        lambda: GPT(shape, *counts).to(DTYPES[dtype]), (ids,), loss_fn=loss_fn, targets=(ids.clone(),), mode="train"
    )
    slow = replace(Cluster.of(device_named("A100"), 1, degrees.tp), intra_node=Link(1e-3, 1e9))
    return solve(program, Mesh(tp=degrees.tp), ROWS, 1, pins(degrees, shape) or None, slow).local


def with_scores_again(
    shape: Shape, degrees: Degrees, dtype: str, dense: bool, others: bool, fused: bool, gradient_bytes: int | None
) -> Parts:
    """Units that keep no attention scores, and compute them again in their backward: the memory of a fused attention,
    with the work of scores."""
    kept = parts(replace(shape, attention="flash"), degrees, dtype, dense, others, fused, gradient_bytes)
    made = parts(shape, degrees, dtype, dense, others, fused, gradient_bytes)
    return Parts(*(one and two and _with_work(one, two) for one, two in zip(_units(kept), _units(made))))  # type: ignore[arg-type]


def _units(found: Parts) -> tuple[Unit | None, ...]:
    return found.first, found.dense, found.other, found.last


def _with_work(kept: Unit, made: Unit) -> Unit:
    of_scores = Counter(made.kind.work.rows) - Counter(kept.kind.work.rows)
    again = {row._replace(phase=Phase.INPUT): times for row, times in of_scores.items() if row.phase is Phase.FORWARD}
    return replace(kept, kind=UnitClass(made.kind.work + Work(again), kept.kind.sends, lambda: kept.kind.memory))


@functools.cache
def parts(
    shape: Shape, degrees: Degrees, dtype: str, dense: bool, others: bool, fused: bool, gradient_bytes: int | None
) -> Parts:
    """The units of :func:`lowered`: of two blocks of a kind the second, which is like all that follow."""
    execution = Execution(fused=fused, gradient_bytes=gradient_bytes)
    units = units_of(lowered(shape, degrees, dtype, dense, others), {"tp": degrees.tp}, execution, device="cuda")
    first, *blocks, last = units
    assert len(blocks) == 2 * (dense + others)
    return Parts(first, blocks[1] if dense else None, blocks[-1] if others else None, last)
