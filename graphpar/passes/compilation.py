"""``Compilation``: the results of compiling a program so far, so that none is computed twice.

program, plan ──compiled──► Compilation(sharded, stages, estimate) ──report_data──► report ──emit_package──► package
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from time import perf_counter

from graphpar.codegen.package import Package
from graphpar.cost_models.estimates import Estimate
from graphpar.cost_models.kept_results import Recomputations
from graphpar.errors import GraphparError
from graphpar.hardware.cluster import Cluster
from graphpar.ir.program import Program, without_evaluation
from graphpar.ir.recomputation import Recomputation
from graphpar.ir.stage import Stage
from graphpar.passes.evaluation import placed_as_stored, with_evaluated_stages
from graphpar.passes.generation import check_held, generating_of, with_generation
from graphpar.passes.kernel_dropout import with_dropout, writes_out_dropout
from graphpar.passes.lengths import EACH, LISTS, check_tables, joined, sharding_at, tried
from graphpar.passes.normalize.padding import fills_of
from graphpar.passes.parallel_products import Overlapped, overlapped_in
from graphpar.passes.planning.planned import Planned, sharded_as
from graphpar.passes.planning.prices import estimate_plan, in_bf16_s
from graphpar.passes.planning.recomputation import recomputed_blocks, with_writes
from graphpar.passes.rank_passes import Seen
from graphpar.passes.sharding.shard import Sharded, problem_of, sharded
from graphpar.passes.split import positions_of, split
from graphpar.passes.stage_passes import STAGE_PASSES, Stages
from graphpar.passes.step import Step
from graphpar.passes.table import DRAW_DROPOUT, SPLIT
from graphpar.runtime.stages.dropout import KERNEL


@dataclass(frozen=True)
class Compilation:
    """A program, its plan, and what has been computed of both.

    Attributes:
        program: the unsharded program.
        sharded: the program of a rank; ``stages``: the same, split, with collectives apart from products, as reports show it.
        emitted: both as they are printed: after the last step.
        cluster: the hardware of ``estimate``, which is None where the plan can't be priced; ``unpriced`` says why.
        in_bf16_s: estimated seconds of a step in bf16, for an fp32 plan on devices that are faster in bf16.
        by_kernel: the estimate with dropout of attention that kernels draw, where it is exact.
        recomputed: the blocks that run their forward again in the backward, by path.
        generating: the program by which a program for training generates between steps, with the same weights.
        overlapped: the collectives that run beside products, where the plan says so.
        seconds: wall-clock time of each step from ``split`` on.
    """

    program: Program
    plan: Planned
    sharded: Sharded
    stages: list[Stage]
    emitted: Stages
    cluster: Cluster
    estimate: Estimate | None = None
    unpriced: str | None = None
    in_bf16_s: float | None = None
    by_kernel: Estimate | None = None
    package: Package | None = None
    generating: Compilation | None = None
    recomputed: Mapping[str, Recomputation] = field(default_factory=dict)
    overlapped: Overlapped | None = None
    seconds: dict[str, float] = field(default_factory=dict, compare=False)


def compiled(program: Program, plan: Planned, cluster: Cluster | None = None, seen: Seen | None = None) -> Compilation:
    """Shard, split and price ``program`` as ``plan`` says.

    Args:
        cluster: the hardware to price for; by default the plan's, else as many devices of this machine's kind.
        seen: is called with each step and the program after it, with those of stages once for each; nothing is reused then.
    """
    program = with_dropout(program, plan.dropout)
    if seen is not None:
        seen(DRAW_DROPOUT, program)
    ranks = sharded_as(program, plan, seen)
    kinds = recomputed_blocks(program, plan.recompute)
    if not kinds and plan.recompute != "none":
        unused = f"recompute={plan.recompute!r} has nothing to run again: no backward runs through the blocks of {program.name}."
        plan = replace(plan, recompute="none", warnings=(*plan.warnings, unused))
    seconds: dict[str, float] = {}
    started = perf_counter()
    local, stages = trained = ranks.local, split(ranks.local, positions_of(ranks.local, plan.split_points))
    seconds["split"] = perf_counter() - started
    _show(seen, SPLIT, local, stages)
    for step in STAGE_PASSES:
        apart, started = (local, stages), perf_counter()
        with step.named():
            local, stages = step.run(local, stages, plan, kinds)
        seconds[step.name] = perf_counter() - started
        _show(seen, step, local, stages)
    emitted, (local, stages) = (local, stages), apart
    if program.evaluated is not None:
        try:
            if program.lengths is not None:
                raise GraphparError(
                    "in evaluation the model is another program, and that is for one length: leave seq out"
                )
            emitted = with_evaluated_stages(program.evaluated, plan, trained, emitted)
        except GraphparError as error:
            emitted = without_evaluation(emitted[0], str(error)), emitted[1]
    if program.lengths is not None:
        started = perf_counter()
        emitted = _of_lengths(program, plan, emitted)
        seconds["lengths"] = perf_counter() - started
    ranks = replace(ranks, local=local)
    overlapped = overlapped_in(local, stages) if plan.overlap_tp else None
    hardware = cluster or plan.cluster or Cluster.of_this_machine(plan.mesh.size)
    recomputed = Recomputations(local, plan.mesh.degrees(), hardware.device.kind).of(kinds) if kinds else {}
    recomputed = with_writes(local, recomputed)
    done = Compilation(program, plan, ranks, stages, emitted, hardware, recomputed=recomputed, overlapped=overlapped)
    if program.generating is not None:
        done = replace(done, generating=_generating(program, plan, trained, hardware))
    return priced(replace(done, seconds=seconds), hardware)


def _generating(program: Program, plan: Planned, trained: Stages, cluster: Cluster) -> Compilation:
    """Compile what generates on the weights of the stages ``trained``.

    Raises:
        GraphparError: it can't be computed where these are.
    """
    made = compiled(*generating_of(program, plan), cluster)
    check_held(plan, trained, (made.sharded.local, made.stages))
    return made


def _of_lengths(program: Program, plan: Planned, longest: Stages) -> Stages:
    """Return what is emitted for any length of the range that is a multiple of the least number with which that goes.

    Raises:
        GraphparError: other lengths give another program.
    """
    assert program.lengths is not None
    check_tables(program)
    if program.lengths.listed:
        return _of_listed(program, plan, longest)
    least, most = program.lengths.ends
    most_multiple = plan.mesh.tp * (2 * plan.mesh.cp if plan.mesh.cp > 1 else 1)  # attention over cp halves shards
    multiples = [each for each in range(1, most_multiple + 1) if most_multiple % each == 0]
    for multiple in multiples:
        if most % multiple:
            raise GraphparError(
                f"seq: with {plan.mesh.text} lengths are multiples of {multiple}, but the longest is {most}; take "
                f"{most - most % multiple}."
            )
        lengths = tried(least, most, multiple)
        if len(lengths) < 2:
            raise GraphparError(f"seq: {least}..{most} has one multiple of {multiple}; leave seq out for one length.")
        try:
            found, divided = joined([longest, *(_at_length(program, plan, each) for each in lengths[1:])], lengths)
        except GraphparError:
            if multiple == multiples[-1]:
                raise
        else:
            if multiple % divided == 0:
                local, stages = found
                return replace(
                    local, lengths=replace(program.lengths, multiple=multiple, fills=_fills(program, least, most))
                ), stages
    raise GraphparError(
        f"seq: a size of the program is a part of the length, which is a whole number for multiples of {divided} alone; make the model "
        f"independent of it, or {LISTS}."
    )


def _of_listed(program: Program, plan: Planned, longest: Stages) -> Stages:
    """Return what is emitted for the lengths of a list, each of which is compiled.

    Raises:
        GraphparError: one can't be, or its stages take other tensors than those of the longest.
    """
    assert program.lengths is not None
    lengths = program.lengths.listed[::-1]
    found = [longest, *(_at_length(program, plan, length) for length in lengths[1:])]
    try:
        (local, stages), divided = joined(found, lengths, listed=True)
    except GraphparError as error:
        raise GraphparError(str(error).replace(LISTS, EACH)) from error
    return replace(local, lengths=replace(program.lengths, multiple=divided, fills=_listed_fills(program))), stages


def _listed_fills(program: Program) -> str | dict[str, int]:
    """Return what a batch is padded with to the next length of a list, or why it can't be."""
    assert program.lengths is not None and program.at_length is not None
    found: list[dict[str, int]] = []
    for before, length in itertools.pairwise((1, *program.lengths.listed)):
        if before + 1 == length:
            continue
        try:
            same = _of_one_graph(program, before + 1, length)
            fills = (
                _fills(program, before + 1, length) if same else f"the model is another one below {length} positions"
            )
        except GraphparError as error:
            fills = f"below {length} positions: {str(error).rstrip('.')}"
        if isinstance(fills, str):
            return fills
        found.append(fills)
    if any(fills != found[0] for fills in found):
        return "labels are ignored by other values at other lengths"
    return found[0] if found else {}


def _of_one_graph(program: Program, least: int, most: int) -> bool:
    """Whether the model is the same at all lengths that are tried of a range.

    Raises:
        GraphparError: it can't be traced at one.
    """
    assert program.at_length is not None
    lengths = tried(least, most, 1)
    found = [program.at_length(length, False) for length in lengths]
    try:
        joined([(each, split(each, [])) for each in found], lengths)
    except GraphparError:
        return False
    return True


def _fills(program: Program, least: int, most: int) -> str | dict[str, int]:
    """Return what a batch is padded with, or why it can't be: by the program of a length that is prime, and so no other size."""
    assert program.at_length is not None
    primes = (n for n in range(most, max(least, 5) - 1, -1) if all(n % k for k in range(2, math.isqrt(n) + 1)))
    others = {size for info in (*program.parameters.values(), *program.buffers.values()) for size in info.shape}
    prime = next((n for n in primes if not any(size % n == 0 for size in others)), None)
    if prime is None:
        return f"each length of {least} to {most} is another size, too"
    return fills_of(program.at_length(prime, False), prime, program.at_length(least if least < prime else most, False))


def _at_length(program: Program, plan: Planned, length: int) -> Stages:
    """Return what is emitted by ``plan`` for sequences of this length alone."""
    assert program.lengths is not None and program.at_length is not None
    rows, ratio = plan.microbatch_size, Fraction(length, program.lengths.most)
    try:
        at = program.at_length(length)
    except GraphparError as error:
        helps = "" if program.lengths.listed else f" If the model takes some lengths alone, {LISTS}."
        raise GraphparError(f"seq: at {length} positions: {str(error).rstrip('.')}.{helps}") from error
    at = with_dropout(at, plan.dropout)
    problem = problem_of(at, plan.sharding, rows)
    try:
        sharding = plan.sharding if problem is None else sharding_at(problem, plan.sharding, ratio)
        made = sharded(at, sharding, rows, problem).local
    except GraphparError:
        if not program.lengths.listed:
            raise
        made = placed_as_stored(at, plan).local  # another program
    kinds = recomputed_blocks(at, plan.recompute)
    found = made, split(made, positions_of(made, plan.split_points))
    for step in STAGE_PASSES:
        found = step.run(*found, plan, kinds)
    return found


def _show(seen: Seen | None, step: Step, local: Program, stages: Sequence[Stage]) -> None:
    if seen is not None:
        for stage in stages:
            seen(step, local.with_graph(stage.graph))


def priced(compilation: Compilation, cluster: Cluster) -> Compilation:
    """Add the estimate of a step on ``cluster``: the plan's own prediction where it was made for that cluster."""
    program, plan = compilation.program, replace(compilation.plan, sharded=compilation.sharded)
    try:
        estimate = plan.predicted if cluster == plan.cluster else None
        estimate = estimate or estimate_plan(program, plan, cluster)
        faster = in_bf16_s(program, plan, cluster)
        slower = writes_out_dropout(program) and cluster.device.kind != "cpu"  # a CPU has no kernel with dropout
        drawn = replace(plan, dropout=KERNEL, compile=False)
        by_kernel = estimate_plan(program, drawn, cluster) if slower else None
    except GraphparError as error:
        return replace(compilation, cluster=cluster, estimate=None, unpriced=str(error), in_bf16_s=None, by_kernel=None)
    if compilation.generating is not None and (generating := compilation.generating.estimate) is not None:
        estimate = with_generation(plan, estimate, generating)
    done = replace(compilation, cluster=cluster, estimate=estimate, unpriced=None)
    return replace(done, in_bf16_s=faster, by_kernel=by_kernel)
