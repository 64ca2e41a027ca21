"""A row's model as the program of one rank, with Megatron-LM's placement pinned.

    Shape + Degrees ──export a few blocks, plan with pins, shard──► units: embedding, block, ..., norm + head     once for each

A model has two blocks of each kind at most: all others are the same, so the same unit is taken for them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

import graphpar as gp
from benchmarks.published_kernels import LOSSES
from benchmarks.published_models import GPT, Shape
from graphpar.cost_models.execution import Execution
from graphpar.cost_models.pipeline_units import Bytes, Unit, UnitClass
from graphpar.cost_models.work import Phase, Product, Size, Traffic, Work
from graphpar.cost_models.work import Row as WorkRow
from graphpar.hardware.cluster import Cluster
from graphpar.hardware.devices import Link, device_named
from graphpar.ir.program import Program
from graphpar.passes.planning.choose import solve
from graphpar.passes.sharding.shard import Sharded
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.records import DTYPES

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
        **dict.fromkeys((f"blocks.*.{path}" for path in _columns(shape)), "colwise"),
        "blocks.*.attention.out": "rowwise",
        "blocks.*.mlp.down": "rowwise",
        "tokens.weight": "S(0)@tp",
        **dict.fromkeys(("blocks.*.norm1", "blocks.*.norm2", "norm"), between),
    }
    if not shape.tied:
        found["head.weight"] = "S(0)@tp"
    if shape.loss == "gathered":
        found["head"] = found["shares"] = {"outputs": ["I@tp"]}
    return found


def _columns(shape: Shape) -> list[str]:
    if shape.merged:
        return ["attention.qkv", "mlp.up"]
    return ["attention.q", "attention.k", "attention.v", *(["mlp.gate"] if shape.gated else []), "mlp.up"]


@functools.cache
def exported(shape: Shape, dtype: str, dense: bool, others: bool, loss: str) -> Program:
    """The program with two blocks of each kind that is asked for."""
    ids = torch.zeros(ROWS, shape.seq, dtype=torch.long)
    counts = 2 * dense, 2 * others
    return gp.export(  # main copies of parameters, where a row has them, are the optimizer's
        lambda: GPT(shape, *counts).to(DTYPES[dtype]),
        (ids,),
        loss_fn=LOSSES[loss],
        targets=(ids.clone(),),
        mode="train",
        skip=["idioms"],  # a source's attention is fused where its description says so
    )


def lowered(shape: Shape, degrees: Degrees, dtype: str, dense: bool, others: bool) -> Program:
    """The program of a rank."""
    return sharded(shape, degrees, dtype, dense, others).local


@functools.cache
def sharded(shape: Shape, degrees: Degrees, dtype: str, dense: bool, others: bool) -> Sharded:
    """The program of a rank, with what is measured of it.

    Placements that nothing pins are solved for slow links, so that no collectives are added to divide what Megatron-LM's ranks do each.
    Heads are whole: none of these frameworks computes them in chunks of tokens.
    """
    # sharded over the vocabulary, the loss is graphpar's own, which is Megatron-LM's
    loss = "plain" if degrees.tp > 1 and shape.loss != "gathered" else shape.loss
    program = exported(shape if loss == "gathered" else replace(shape, loss=loss), dtype, dense, others, loss)
    slow = replace(Cluster.of(device_named("A100"), 1, degrees.tp), intra_node=Link(1e-6, 1e9))
    return solve(program, Mesh(tp=degrees.tp), ROWS, 1, pins(degrees, shape) or None, slow, loss_chunk=0)


@dataclass(frozen=True)
class Build:
    """What the units of a program depend on besides its shape: which kinds of blocks there are, and how a rank runs them.

    ``kind``: of recomputation that blocks do themselves, see :mod:`graphpar.ir.recomputation`.
    """

    degrees: Degrees
    dtype: str
    dense: bool
    others: bool
    fused: bool
    gradient_bytes: int | None
    joined: bool = False
    kind: str = "none"


@functools.cache
def parts(shape: Shape, build: Build) -> Parts:
    """The units of :func:`lowered`: of two blocks of a kind the second, which is like all that follow."""
    count = 2 * (build.dense + build.others)
    blocks = () if build.kind == "none" else tuple((f"blocks.{number}", build.kind) for number in range(count))
    execution = Execution(fused=build.fused, gradient_bytes=build.gradient_bytes, blocks=blocks, joined=build.joined)
    program = sharded(shape, build.degrees, build.dtype, build.dense, build.others)
    first, *found, last = program.units.of(execution, device="cuda")
    assert len(found) == count
    return Parts(first, found[1] if build.dense else None, found[-1] if build.others else None, last)


def with_scores_again(shape: Shape, build: Build) -> Parts:
    """Units that keep no attention scores, and compute them again in their backward: the memory of a fused attention,
    with the work of scores."""
    return _each(_scores_again, parts(replace(shape, attention="flash"), build), parts(shape, build))


def with_shards_kept(kept: Parts, made: Parts) -> Parts:
    """The units of ``made`` with what those of ``kept`` keep, which gather again what ``made`` keeps: Megatron-LM's gather runs
    beside the product of the input's gradient (core/tensor_parallel/layers.py), so it adds no time."""
    return _each(_with_memory, kept, made)


def with_gathers_again(made: Parts, plain: Parts, gathered: Parts) -> Parts:
    """The units of ``made``, which keep what they gather, as ``plain`` does, gathering it again as ``gathered`` does (of torchtitan's
    lists of operators that are not run again none has all-gathers)."""
    saved = _each(_gathers_saved, plain, gathered)
    return _each(_gathering_again, made, saved)


def with_forwards_again(made: Parts, plain: Parts, ends: bool) -> Parts:
    """The units of ``made``, whose blocks run again but for what saves nothing, with the whole forward of ``plain``'s; ``ends``: the first
    and the last unit run again too."""
    again = _each(_forward_again, made, plain)
    return again if ends else replace(again, first=made.first, last=made.last)


def _forward_again(made: Unit, plain: Unit) -> Unit:
    rows = {row: times for row, times in plain.kind.work.rows.items() if row.phase is Phase.FORWARD}
    kind = made.kind
    again = replace(kind.again, work=Work(rows))
    return replace(made, kind=UnitClass(kind.work, kind.sends, lambda: kind.memory, again))


def _gathers_saved(plain: Unit, gathered: Unit) -> Unit:
    whole, shard = plain.kind.memory.inside, gathered.kind.memory.inside
    saved = Bytes(whole.fixed - shard.fixed, whole.per_row - shard.per_row)
    memory = replace(gathered.kind.memory, inside=saved)
    return replace(gathered, kind=UnitClass(Work(), gathered.kind.sends, lambda: memory, gathered.kind.again))


def _gathering_again(made: Unit, saved: Unit) -> Unit:
    kept, less = made.kind.memory.inside, saved.kind.memory.inside
    memory = replace(made.kind.memory, inside=Bytes(kept.fixed - less.fixed, kept.per_row - less.per_row))
    again = made.kind.again + saved.kind.again
    return replace(made, kind=UnitClass(made.kind.work, made.kind.sends, lambda: memory, again))


def with_peak_of_loss(made: Parts, nbytes: float) -> Parts:
    """Units of which the last needs at least ``nbytes`` a row, with what it keeps, in its backward."""
    kind = made.last.kind
    more = Bytes(-kind.memory.inside.fixed, nbytes - kind.memory.inside.per_row)
    if more.per_row <= kind.memory.backward.per_row:
        return made
    memory = replace(kind.memory, backward=more)
    return replace(made, last=replace(made.last, kind=UnitClass(kind.work, kind.sends, lambda: memory, kind.again)))


def with_kernels_of_loss(made: Parts, more: Mapping[Phase, int], elements: float) -> Parts:
    """Units of which the last moves ``more`` bytes of memory an element of a rank's logits, ``elements`` a row."""
    kind = made.last.kind
    rows: dict[WorkRow, int] = {Traffic(phase, Size(nbytes * elements, 1)): 1 for phase, nbytes in more.items()}
    return replace(
        made,
        last=replace(made.last, kind=UnitClass(kind.work + Work(rows), kind.sends, lambda: kind.memory, kind.again)),
    )


def with_sums_apart(made: Parts) -> Parts:
    """Units whose products write gradients of weights that another kernel adds to their sums: in the price one kernel does both."""

    def summing(unit: Unit, _: Unit) -> Unit:
        kind = unit.kind
        moved = sum(2 * part.itemsize * part.elements for part in unit.held if part.trained)
        work = kind.work + Work({Traffic(Phase.WEIGHT, Size(float(moved), 0)): 1})
        return replace(unit, kind=UnitClass(work, kind.sends, lambda: kind.memory, kind.again))

    return _each(summing, made, made)


def with_heads(made: Parts, count: int) -> Parts:
    """Units of which the last computes ``count`` times, each of other hidden values."""
    kind = made.last.kind
    work = Work({row: count * times for row, times in kind.work.rows.items()})
    return replace(made, last=replace(made.last, kind=UnitClass(work, kind.sends, lambda: kind.memory, kind.again)))


def with_pieces_sent(made: Parts, pieces: int) -> Parts:
    """Units whose results are sent in ``pieces``, one from each rank of tp, and gathered where they arrive (the time of that gather
    inside a node is left out)."""

    def sending(unit: Unit, _: Unit) -> Unit:
        kind = unit.kind
        sends = tuple((1 / pieces * size, gradient) for size, gradient in kind.sends)
        return replace(unit, kind=UnitClass(kind.work, sends, lambda: kind.memory, kind.again))

    return _each(sending, made, made)


def _each(change: Callable[[Unit, Unit], Unit], one: Parts, two: Parts) -> Parts:
    units = [first and second and change(first, second) for first, second in zip(_units(one), _units(two))]
    return Parts(*units)  # type: ignore[arg-type]


def _units(found: Parts) -> tuple[Unit | None, ...]:
    return found.first, found.dense, found.other, found.last


def _scores_again(kept: Unit, made: Unit) -> Unit:
    of_scores = Counter(made.kind.work.rows) - Counter(kept.kind.work.rows)
    again = {row._replace(phase=Phase.INPUT): times for row, times in of_scores.items() if row.phase is Phase.FORWARD}
    return replace(kept, kind=UnitClass(made.kind.work + Work(again), kept.kind.sends, lambda: kept.kind.memory))


def _with_memory(kept: Unit, made: Unit) -> Unit:
    return replace(made, kind=UnitClass(made.kind.work, made.kind.sends, lambda: kept.kind.memory, made.kind.again))


def with_casts(made: Parts, nbytes: int, hidden: int, pieces: int) -> Parts:
    """Units whose blocks cast operands of products, at ``nbytes`` of memory an element: both forward and for the gradient of the input,
    for that of the weight the input alone. What is ``hidden`` wide is cast on ``pieces`` ranks before it is gathered."""
    dense, other = (unit and _casting(unit, nbytes, hidden, pieces) for unit in (made.dense, made.other))
    return Parts(made.first, dense, other, made.last)


def _casting(unit: Unit, nbytes: int, hidden: int, pieces: int) -> Unit:
    kind = unit.kind
    own, again = (_casts(work, nbytes, hidden, pieces) for work in (kind.work, kind.again.work))
    repeated = replace(kind.again, work=kind.again.work + again)
    return replace(unit, kind=UnitClass(kind.work + own, kind.sends, lambda: kind.memory, repeated))


def _casts(work: Work, nbytes: int, hidden: int, pieces: int) -> Work:
    casts = Counter[WorkRow]()
    for row, times in work.rows.items():
        if isinstance(row, Product):
            width = row.n if row.phase is Phase.WEIGHT else row.k
            share = 1 / pieces if width.number == hidden and width.power == 0 else 1.0
            whole = row.k * row.n if row.phase is Phase.WEIGHT else row.m * row.k
            operands = [share * whole] if row.phase is Phase.WEIGHT else [share * whole, row.k * row.n]
            for size in operands:
                casts[Traffic(row.phase, nbytes * row.matrices * size)] += times
    return Work(dict(casts))
