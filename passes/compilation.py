"""``Compilation``: what has been derived of a program on its way to a package, each thing once.

    program, plan ──compiled──► Compilation(sharded, stages, estimate) ──report_data──► report ──emit_package──► package

A step takes it and gives it with one thing more; nothing that is in it is derived again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from time import perf_counter

from graphpar.codegen.package import Package
from graphpar.cost_models.estimates import Estimate
from graphpar.errors import GraphparError
from graphpar.hardware.cluster import Cluster
from graphpar.ir.plan import Plan
from graphpar.ir.program import Program
from graphpar.ir.stage import Stage
from graphpar.passes.planning.planning import estimate_plan, in_bf16_s
from graphpar.passes.sharding.shard import Sharded, sharded_as
from graphpar.passes.split import positions_of, split


@dataclass(frozen=True)
class Compilation:
    """A program, its plan, and what follows from both so far.

    Attributes:
        program: whole, for any microbatch; ``sharded``: the program of a rank; ``stages``: that, split.
        cluster: what ``estimate`` is for, which is None where that can't be priced: ``unpriced`` says why.
        in_bf16_s: about what a step would take in bf16, where that is of interest.
        seconds: of the steps from ``split`` on.
    """

    program: Program
    plan: Plan
    sharded: Sharded
    stages: list[Stage]
    cluster: Cluster
    estimate: Estimate | None = None
    unpriced: str | None = None
    in_bf16_s: float | None = None
    package: Package | None = None
    seconds: dict[str, float] = field(default_factory=dict, compare=False)


def compiled(program: Program, plan: Plan, cluster: Cluster | None = None) -> Compilation:
    """``program`` sharded, split and priced as ``plan`` says.

    Args:
        cluster: what it is priced for; by default the plan's own, or as many devices of this machine's kind.
    """
    sharded = sharded_as(program, plan)
    started = perf_counter()
    stages = split(sharded.local, positions_of(sharded.local, plan.split_points))
    seconds = {"split": perf_counter() - started}
    hardware = cluster or plan.cluster or Cluster.of_this_machine(plan.mesh.size)
    return priced(Compilation(program, plan, sharded, stages, hardware, seconds=seconds), hardware)


def priced(compilation: Compilation, cluster: Cluster) -> Compilation:
    """The same with what a step takes on ``cluster``: what the plan predicts, where it was made for that."""
    program, plan = compilation.program, replace(compilation.plan, sharded=compilation.sharded)
    try:
        estimate = plan.predicted if cluster == plan.cluster else None
        estimate = estimate or estimate_plan(program, plan, cluster)
        faster = in_bf16_s(program, plan, cluster)
    except GraphparError as error:
        return replace(compilation, cluster=cluster, estimate=None, unpriced=str(error), in_bf16_s=None)
    return replace(compilation, cluster=cluster, estimate=estimate, unpriced=None, in_bf16_s=faster)
