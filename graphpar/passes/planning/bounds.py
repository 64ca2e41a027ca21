"""``StepBounds``: lower bounds of the step times of candidates, each higher than the one before and dearer to compute.

The first is a candidate's work spread evenly over its ranks, with the wait of each rank for its first microbatch. The second adds what
must be recomputed where the memory of all ranks together is short, by shares of the choices that a unit has. The third has the stages
that would be taken, the fourth the memory of each rank, and the fifth the order in which ranks act, without recomputation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from graphpar.cost_models.estimates import Layout
from graphpar.cost_models.memory import ALLOCATOR_SLACK
from graphpar.cost_models.pricing import Pricing
from graphpar.passes.planning.candidates import Candidate
from graphpar.passes.planning.prices import CandidatePrices
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.schedule_records import get_schedule


class StepBounds:
    """Bounds of candidates at ``prices``."""

    def __init__(self, prices: CandidatePrices) -> None:
        self.prices = prices
        self._bounds: dict[tuple[object, ...], float] = {}
        self._smaller: dict[tuple[object, ...], float] = {}

    def of(self, candidate: Candidate, pricing: Pricing) -> float:
        """Return a lower bound of the step time, memory aside."""
        split = get_schedule(candidate.schedule).splits_backward
        key = id(pricing), candidate.microbatch_size, candidate.microbatches, split, candidate.stages_per_rank == 1
        if key not in self._bounds:
            self._bounds[key] = self._computed_bound(candidate, pricing)
        return self._bounds[key]

    def of_smaller(self, candidate: Candidate, tp: int) -> float:
        """Return a bound of the step time from what ranks of a smaller ``tp`` take, whose placements are known: more ranks divide their
        work at best, and what they send is no less."""
        mesh, rows = candidate.mesh, candidate.microbatch_size
        key = candidate.compute, candidate.overlap_tp, tp, rows, candidate.split_points
        if key not in self._smaller:
            compute = Mesh(dp_expert=mesh.dp_expert, cp=mesh.cp, ep=mesh.ep, tp=tp)
            smaller = replace(candidate, mesh=compute, zero=0, reshard="default")
            pricing = self.prices.pricing(smaller) or self.prices.pricing(replace(smaller, overlap_tp=False))
            whole = None if pricing is None else pricing.stage_seconds(0, len(pricing.units), rows)
            self._smaller[key] = 0.0 if whole is None else whole.forward + whole.backward
        return candidate.microbatches * self._smaller[key] * (tp / (mesh.tp * mesh.pp))

    def _computed_bound(self, candidate: Candidate, pricing: Pricing) -> float:
        count, pp = candidate.microbatches, candidate.mesh.pp
        whole = pricing.stage_seconds(0, len(pricing.units), candidate.microbatch_size)
        waiting = sum(whole.exposed.values())
        work = (whole.forward + whole.backward - waiting) * pricing.crowd + waiting
        if pp == 1:
            return count * work + pricing.least_end_s
        split = get_schedule(candidate.schedule).splits_backward
        through = whole.forward + whole.backward - (whole.weight if split else 0.0)  # one microbatch, from end to end
        bound = max(through, (count * work + self._filling(candidate, pricing)) / pp)
        if candidate.stages_per_rank == 1 and not split:
            # Stage s takes w(s): the step is at least count * w(s) + w(0) + ... + w(s - 1) for each s.
            bound = max(bound, (whole.forward + whole.backward) / (1 - (1 - 1 / count) ** pp))
        return bound + pricing.least_end_s

    def _filling(self, candidate: Candidate, pricing: Pricing) -> float:
        """Return a lower bound of the seconds in which ranks, all together, wait for their first microbatch, and idle after their last.

        Before rank r begins, r stages have run forward, of at least a unit each; after it, they run backward, unless these are split.
        """
        ways = 1 if get_schedule(candidate.schedule).splits_backward else 3
        waits = pricing.stage_prices(candidate.microbatch_size).waits(ways)
        return float(waits[min(candidate.mesh.pp, len(waits)) - 1])

    def in_all_memory(self, candidate: Candidate) -> float:
        """Return a lower bound of the step time under the memory of all ranks together, wherever stages begin.

        A rank has a place for (room - state) / m bytes of a microbatch where it keeps m of them at one time, so all ranks together have
        one for a sum of these; what a microbatch keeps beyond it is saved at the lowest price, by shares of choices.
        """
        prices, count, pp = self.prices, candidate.microbatches, candidate.mesh.pp
        pricing, together = prices.known(candidate), prices.kept_together(candidate, prices.known(candidate))
        if min(together) <= 0:
            return candidate.bound
        state = pricing.bytes.least_state(candidate.stages_per_rank == 1, count)
        room = self.prices.cluster.room_bytes * sum(1 / number for number in together)
        if state / max(together) >= room:
            return math.inf  # whatever is saved, so nothing is measured
        kept = pricing.bytes.least_kept(candidate.microbatch_size, count)
        missing = kept - (room - state / max(together)) / (1 + ALLOCATOR_SLACK)
        if missing <= 0:
            return candidate.bound
        work = prices.savings(candidate).least_in_all_s(missing)
        filling = self._filling(candidate, pricing) if pp > 1 else 0.0
        bound = (count * work + filling) / pp
        if candidate.stages_per_rank == 1 and not get_schedule(candidate.schedule).splits_backward:
            bound = max(bound, work / (1 - (1 - 1 / count) ** pp))  # as above
        return max(candidate.bound, bound + pricing.least_end_s)

    def of_stages(self, candidate: Candidate, least: Sequence[float] = ()) -> float:
        """Return a lower bound of the step time of given stages, memory aside: each rank's work, and the time that it surely idles.

        Args:
            least: of each rank, other lower bounds of the seconds of a microbatch.
        """
        pricing, count = self.prices.known(candidate), candidate.microbatches
        if self.prices.chosen_in_memory(candidate) or (candidate.mesh.pp == 1 and not least):
            return candidate.bound
        layout = Layout(candidate.schedule, candidate.microbatch_size, count, self.prices.starts(candidate))
        split = get_schedule(candidate.schedule).splits_backward
        stages = pricing.stages_of(layout)
        on = [pricing.on(rank) for rank in pricing.ranks_of(candidate.schedule, len(stages))]
        costs = [each.stage_seconds(*stage, candidate.microbatch_size) for each, stage in zip(on, stages)]
        before = itertools.accumulate((cost.forward + (0.0 if split else cost.backward) for cost in costs), initial=0.0)
        own = [
            sum(costs[place].forward + costs[place].backward for place in places) for places in pricing.places(layout)
        ]
        busy = list(map(max, own, least or own))
        through = sum(cost.forward + cost.backward - (cost.weight if split else 0.0) for cost in costs)
        through += sum(seconds - known for seconds, known in zip(busy, own))
        ends = [idle + count * seconds for idle, seconds in zip(before, busy)]
        return max(through, *ends) + pricing.least_end_s

    def in_memory(self, candidate: Candidate) -> float:
        """Return a lower bound of the step time of a candidate under the memory of its ranks; infinity where it can't fit."""
        pricing, count = self.prices.known(candidate), candidate.microbatches
        if self.prices.chosen_in_memory(candidate):
            alive, rooms = self.prices.alive_on(candidate, pricing), self.prices.rooms(pricing)
            within = self.prices.balancer(candidate).within(alive, rooms)
            return count * within[0] + pricing.least_end_s
        if candidate.mesh.pp == 1:  # at which moment an only stage has the most is not the same for all choices
            return candidate.bound
        layout = Layout(candidate.schedule, candidate.microbatch_size, count, self.prices.starts(candidate))
        # Stages that recompute keep nothing for halves of backwards, so that is not saved by units.
        missing = self.prices.missing(pricing, layout, halves=False)
        if max(missing) <= 0:
            return candidate.bound
        own = self.prices.alive_by_rank(candidate, pricing, layout)
        on_top = self.prices.on_top(candidate, pricing, layout)
        savings = self.prices.savings(candidate)
        seconds = [savings.least_s(*each) for each in zip(own, missing, on_top)]
        return self.of_stages(candidate, seconds)

    def in_order(self, candidate: Candidate) -> float:
        """Return a lower bound of the step time of given stages that act in the order of their schedule and recompute nothing.

        What more a rank computes delays what comes after it, but where halves of backwards run apart: a stage that recomputes has none.
        """
        pricing, schedule = self.prices.known(candidate), get_schedule(candidate.schedule)
        layout = Layout(
            candidate.schedule, candidate.microbatch_size, candidate.microbatches, self.prices.starts(candidate)
        )
        free = candidate.mesh.pp == 1 or self.prices.chosen_in_memory(candidate) or pricing.crowd > 1
        if free or schedule.splits_backward or not pricing.is_simulated_whole(layout):
            return candidate.bound
        return pricing.pipeline_s(layout) + pricing.least_end_s

    def least_bytes(self, candidate: Candidate) -> float:
        """Return a lower bound of the average rank's bytes, wherever the model is split, with the most recomputation."""
        pricing = self.prices.known(candidate, len(self.prices.recomputed(candidate)) - 1)
        alive = min(self.prices.alive_on(candidate, pricing)) / candidate.stages_per_rank
        return pricing.bytes.average(
            candidate.microbatch_size, alive, candidate.stages_per_rank == 1, candidate.microbatches
        )
