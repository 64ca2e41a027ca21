"""Measures the seconds of one plan's price for a captured program: the first of a tensor-parallel degree, and every other.

program ──sharding, lowering, units──► Pricing ──estimate──► first, with what its units keep measured on fake tensors
                   once_s                       plan_s: the median over layouts that were not priced before
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import graphpar as gp
from benchmarks.search_times import EXAMPLES
from graphpar.cost_models.estimates import Layout
from graphpar.cost_models.pricing import Pricing
from graphpar.frontend.modelfile import load_model_file
from graphpar.passes.planning.prices import pricing_of


@dataclass(frozen=True)
class Priced:
    """A model and a cluster, and the mesh whose layouts are priced."""

    model: str
    cluster: str
    batch: int
    pp: int
    tp: int


CASES = (
    Priced("llama3_8b", "8x8xH100-SXM-80GB", 1024, 4, 4),
    Priced("llama3_405b", "2048x8xH100-SXM-80GB", 16384, 16, 8),
)


@dataclass(frozen=True)
class PricingTime:
    """``once_s``: from the captured program to the first price; ``plan_s``: of each layout after that, with its
    schedule's table."""

    model: str
    cluster: str
    devices: int
    once_s: float
    plan_s: float
    layouts: int


def measure(cases: Sequence[Priced]) -> list[PricingTime]:
    """Measure all cases, one after the other."""
    return [_measure(case) for case in cases]


def _measure(case: Priced) -> PricingTime:
    file = load_model_file(EXAMPLES / f"{case.model}.py")
    program = gp.export(file.model, file.args, file.kwargs, file.loss_fn, file.targets, file.batch_dims, dtype="bf16")
    cluster = gp.Cluster.parse(case.cluster)
    mesh = {"pp": case.pp, "dp_replicate": cluster.size // case.pp // case.tp, "tp": case.tp}
    began = time.perf_counter()
    plan = gp.plan(program, mesh=mesh, global_batch=case.batch, microbatch_size=1)
    pricing, layout = pricing_of(program, plan, cluster)
    pricing.estimate(layout)
    once = time.perf_counter() - began
    layouts = _layouts(pricing, layout)
    seconds = []
    for each in layouts:
        began = time.perf_counter()
        pricing.estimate(each)
        seconds.append(time.perf_counter() - began)
    return PricingTime(case.model, case.cluster, cluster.size, once, statistics.median(seconds), len(seconds))


def _layouts(pricing: Pricing, first: Layout) -> list[Layout]:
    """One stage a rank and two, several numbers of microbatches."""
    units, pp = len(pricing.units), pricing.mesh.pp
    found = []
    for depth, schedule in ((1, "1F1B"), (2, "Interleaved1F1B"), (2, "ZBVZeroBubble")):
        starts = tuple(round(place * units / (pp * depth)) for place in range(pp * depth))
        found += [Layout(schedule, size, first.microbatches // size, starts) for size in (1, 2, 4)]
    return found
