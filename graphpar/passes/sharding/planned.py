"""The program of one rank as a plan has it."""

from __future__ import annotations

from graphpar.ir.plan import Plan
from graphpar.ir.program import Program
from graphpar.passes.sharding.shard import Sharded, problem_of, sharded


def sharded_as(program: Program, plan: Plan) -> Sharded:
    """Return ``program`` as ``plan`` shards it; the result cached on the plan is reused where it is of this program."""
    if plan.sharded is not None and plan.sharded.serves(program, plan.sharding, plan.microbatch_size):
        return plan.sharded
    rows = plan.microbatch_size
    return sharded(program, plan.sharding, rows, problem_of(program, plan.sharding, rows))
