"""The steps from a planned program to that of one rank, each a function of a program and its placements.

Program ──PREPARING──► the program that placements are searched for ──shard──► ──FINISHING──► the program of a rank
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from graphpar.ir.program import Program
from graphpar.ir.sharding import Sharding
from graphpar.passes.loss_chunks import with_chunks
from graphpar.passes.sharding.check_exchange import check_exchange
from graphpar.passes.sharding.exchange import exchange_experts
from graphpar.passes.sharding.expert_room import with_room
from graphpar.passes.sharding.flat_rows import with_rows
from graphpar.passes.sharding.linear_bias import separate_biases, with_biases
from graphpar.passes.sharding.lowering import lower
from graphpar.passes.sharding.overlapped_exchange import with_overlap
from graphpar.passes.sharding.pins import with_points, with_results, with_variants
from graphpar.passes.sharding.rounded_gathers import with_rounded_gathers
from graphpar.passes.sharding.rounded_gradients import with_rounded_gradients
from graphpar.passes.sharding.widened import of_a_replica, widened, with_all_rows
from graphpar.passes.step import Step
from graphpar.runtime.layout import Shard

Seen = Callable[[Step, Program], None]
"""Is called with each step, and the program after it."""


@dataclass(frozen=True)
class RankPass(Step):
    """A step from Program to Program, for placements and the rows of a microbatch."""

    run: Callable[[Program, Sharding, int], Program] = field(kw_only=True)


PREPARING = (
    RankPass(
        "size_batch", "graphpar.passes.sharding.widened", ("plan",),
        "the program is of a microbatch's rows, or of all replicas' where examples depend on each other",
        "the trace at these rows is the same program",
        run=lambda program, sharding, rows: with_all_rows(of_a_replica(program, rows, sharding.degrees), sharding.degrees),
    ),
    RankPass(
        "block_variants", "graphpar.passes.sharding.pins", ("size_batch",),
        "instances of a block with other pins or ties are a block of their own",
        "check_types",
        run=lambda program, sharding, rows: with_variants(program, sharding.variants),
    ),
    RankPass(
        "pin_points", "graphpar.passes.sharding.pins", ("block_variants",),
        "there is an identity where an input or output of a module is pinned",
        "check_types",
        run=lambda program, sharding, rows: with_points(program, sharding.points),
    ),
    RankPass(
        "block_results", "graphpar.passes.sharding.pins", ("pin_points",),
        "there is an identity before each result of a block, where it can be redistributed",
        "check_types",
        run=lambda program, sharding, rows: with_results(program),
    ),
    RankPass(
        "separate_biases", "graphpar.passes.sharding.linear_bias", ("block_results",),
        "a product with a bias is a product and a sum",
        "check_types",
        run=lambda program, sharding, rows: separate_biases(program),
    ),
    RankPass(
        "widen_rows", "graphpar.passes.sharding.widened", ("separate_biases",),
        "sizes are those of the rows of all replicas, where examples depend on each other",
        "check_types",
        run=lambda program, sharding, rows: widened(program, sharding.degrees),
    ),
)  # fmt: skip
"""Before placements are searched, where there are axes to place tensors on."""

SHARD = RankPass(
    "shard", "graphpar.passes.sharding.lowering", ("widen_rows",),
    "the program of one rank, with its collectives",
    "check_types",
    run=lambda program, sharding, rows: lower(program, sharding),
)  # fmt: skip


def _exchanged(program: Program, sharding: Sharding) -> Program:
    for axis, degree in sharding.exchange.items():
        experts = [name for name, spec in sharding.parameters.items() if isinstance(spec.get(axis), Shard)]
        program = exchange_experts(program, degree, experts)
        wrong = check_exchange(program, experts)
        assert not wrong, "\n".join(wrong)
    return program


FINISHING = (
    RankPass(
        "join_biases", "graphpar.passes.sharding.linear_bias", ("check_types",),
        "product and bias are one operator again where nothing came between",
        "graphpar check and graphpar verify",
        run=lambda program, sharding, rows: with_biases(program),
    ),
    RankPass(
        "keep_rows", "graphpar.passes.sharding.flat_rows", ("join_biases",),
        "products of a flattened sequence are products of the sequence",
        "graphpar check and graphpar verify",
        run=lambda program, sharding, rows: with_rows(program, sharding),
    ),
    RankPass(
        "round_gathers", "graphpar.passes.sharding.rounded_gathers", ("keep_rows",),
        "rows that only products in 8 bits read are rounded before they are gathered",
        "graphpar check and graphpar verify",
        run=lambda program, sharding, rows: with_rounded_gathers(program),
    ),
    RankPass(
        "round_gradients", "graphpar.passes.sharding.rounded_gradients", ("keep_rows",),
        "gradients of weights are rounded where blocks of tokens are of one sequence on each rank",
        "graphpar check and graphpar verify",
        run=lambda program, sharding, rows: with_rounded_gradients(program),
    ),
    RankPass(
        "exchange_experts", "graphpar.passes.sharding.exchange", ("keep_rows",),
        "replicas that hold different experts send rows to each other",
        "check_exchange",
        run=lambda program, sharding, rows: _exchanged(program, sharding),
    ),
    RankPass(
        "expert_room", "graphpar.passes.sharding.expert_room", ("exchange_experts",),
        "rows of experts have room that does not depend on their number, if it is pinned",
        "graphpar check and graphpar verify",
        run=lambda program, sharding, rows: with_room(program, sharding.expert_room),
    ),
    RankPass(
        "overlap_exchange", "graphpar.passes.sharding.overlapped_exchange", ("expert_room",),
        "products that need no rows of experts are computed while these travel",
        "graphpar check and graphpar verify",
        run=lambda program, sharding, rows: with_overlap(program),
    ),
    RankPass(
        "chunk_loss", "graphpar.passes.loss_chunks", ("overlap_exchange",),
        "a large head and the loss after it are computed for a chunk of tokens at a time",
        "graphpar check and graphpar verify",
        run=lambda program, sharding, rows: with_chunks(program, sharding.loss_chunk),
    ),
)  # fmt: skip
"""After the rank's program is made."""


def prepared(program: Program, sharding: Sharding, rows: int, seen: Seen | None = None) -> Program:
    """Return the program whose placements are searched, and which is lowered, for microbatches of ``rows``."""
    for step in PREPARING:
        with step.named():
            program = step.run(program, sharding, rows)
        if seen is not None:
            seen(step, program)
    return program
