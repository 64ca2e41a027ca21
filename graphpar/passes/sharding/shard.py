"""``shard``: from a program and its placements to the program of one rank, by the steps of :mod:`graphpar.passes.rank_passes`.

Program + Sharding ──PREPARING──► build_problem ──lower──► check_types ──FINISHING──► Sharded: the program of a rank, and the problem
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from graphpar.errors import GraphparError
from graphpar.ir.program import Chunked, Program
from graphpar.ir.sharding import Sharding
from graphpar.passes.loss_chunks import chunk_of, with_chunks
from graphpar.passes.measured_units import RankUnits
from graphpar.passes.rank_passes import FINISHING, SHARD, RankPass, Seen, prepared
from graphpar.passes.sharding.check_types import check_types
from graphpar.passes.sharding.problem import Problem, build_problem


@dataclass(frozen=True, eq=False)
class Sharded:
    """A program with its sharding, and the program that every rank of the compute axes runs.

    Attributes:
        program: as it was traced.
        rows: of the microbatches that ``local`` is for; any number will do where the batch is symbolic.
        problem: the problem that the sharding solves; None where there are no axes.
        local: the program of a rank.
        units: those of ``local``.
        seconds: wall-clock time of the steps ``annotate``, ``shard`` and ``check_types``.
    """

    program: Program
    rows: int
    sharding: Sharding
    problem: Problem | None
    local: Program
    units: RankUnits = field(repr=False)
    seconds: dict[str, float] = field(default_factory=dict, repr=False)

    def serves(self, program: Program, sharding: Sharding, rows: int) -> bool:
        """Return whether this is what :func:`sharded` would return for these."""
        return self.program is program and self.sharding == sharding and (program.symbolic or self.rows == rows)


def in_chunks(found: Sharded, tokens: int | None) -> Sharded:
    """Return ``found`` with its heads and losses in chunks of so many tokens, 0 for none; None: where these take less memory.

    Raises:
        GraphparError: it has no such head.
    """
    tokens = chunk_of(found.local, found.rows) if tokens is None else tokens
    if not tokens:
        return found
    sharding, local = replace(found.sharding, loss_chunk=tokens), with_chunks(found.local, tokens)
    if not any(isinstance(node.target, Chunked) for node in local.graph.nodes):
        axes = ", ".join(f"{axis}={degree}" for axis, degree in sharding.all_degrees.items())
        where = f" as the plan divides it ({axes}), which may gather its logits" if axes else ""
        raise GraphparError(
            f"loss_chunk: {found.program.name} has no head from which on each token is computed alone, up to a sum over tokens{where}; "
            "leave it out, or give 0."
        )
    return replace(found, sharding=sharding, local=local, units=RankUnits(local, sharding.all_degrees, found.units))


def problem_of(program: Program, sharding: Sharding, rows: int, seen: Seen | None = None) -> Problem | None:
    """Return the problem that ``sharding`` solves, for microbatches of ``rows``; None where it has no axes."""
    if not sharding.degrees:
        return None
    stored = {
        name: {axis: frozenset({kind}) for axis, kind in spec.items()} for name, spec in sharding.parameters.items()
    }
    return build_problem(prepared(program, sharding, rows, seen), sharding.degrees, stored)


def shard(program: Program, sharding: Sharding) -> Program:
    """Return the program that every rank runs on its shards; checked against the rules."""
    return sharded(program, sharding, program.batch, problem_of(program, sharding, program.batch)).local


def sharded(
    program: Program, sharding: Sharding, rows: int, problem: Problem | None, seen: Seen | None = None
) -> Sharded:
    """Shard for microbatches of ``rows``; ``problem`` is that of :func:`problem_of` for the same arguments."""
    seconds: dict[str, float] = {}

    def run(step: RankPass, program: Program) -> Program:
        started = time.perf_counter()
        with step.named():
            made = step.run(program, sharding, rows)
        seconds[step.name] = time.perf_counter() - started
        if seen is not None:
            seen(step, made)
        return made

    if problem is None:
        local = program.at_batch(rows)
        if seen is not None:
            seen(SHARD, local)
    else:
        local = run(SHARD, problem.program)
        started = time.perf_counter()
        wrong = check_types(problem, local)
        assert not wrong, "\n".join(wrong)
        seconds["check_types"] = time.perf_counter() - started
    for step in FINISHING:
        local = run(step, local)
    return Sharded(program, rows, sharding, problem, local, RankUnits(local, sharding.all_degrees), seconds)
