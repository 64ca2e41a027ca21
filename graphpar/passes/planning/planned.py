"""``Planned``: a plan as it was made for a program, with what was found beside it.

planned, validate_plan ──► Planned ──► estimates, reports; code generation and plan.json take the plan in it alone
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from graphpar.cost_models.estimates import Alone, Estimate
from graphpar.ir.plan import Plan
from graphpar.ir.program import Program
from graphpar.passes.planning.candidates import SearchResult
from graphpar.passes.rank_passes import Seen
from graphpar.passes.sharding.shard import Sharded, problem_of, sharded
from graphpar.text import spread_text


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Planned(Plan):
    """A plan, which alone is stored and compared, and what was found beside it.

    Attributes:
        sharded: the program of one rank.
        warnings: what the user should know of the plan.
        predicted: time and memory of a step on the plan's cluster; None where the plan was not priced.
        found: the other plans that a search saw; None where nothing was searched.
        alone: the same step on one device; None where it was not priced.
    """

    sharded: Sharded
    warnings: tuple[str, ...] = ()
    predicted: Estimate | None = None
    found: SearchResult | None = None
    alone: Alone | None = None

    @property
    def plan(self) -> Plan:
        """The plan alone: what ``plan.json`` holds."""
        return Plan(**{each.name: getattr(self, each.name) for each in fields(Plan)})

    def __eq__(self, other: object) -> bool:
        return self.plan == (other.plan if isinstance(other, Planned) else other)

    __hash__ = Plan.__hash__

    def __repr__(self) -> str:
        if self.predicted is None:
            return repr(self.plan)
        step = f"{spread_text(self.predicted.step_time_s, self.predicted.spread_s)} a step on {self.predicted.cluster}"
        return f"{repr(self.plan).removesuffix(')')}, {step})"


def sharded_as(program: Program, plan: Plan, seen: Seen | None = None) -> Sharded:
    """Return ``program`` as ``plan`` shards it: what was found beside the plan where that is of this program, unless ``seen`` is to see
    each step."""
    if seen is None and isinstance(plan, Planned) and plan.sharded.serves(program, plan.sharding, plan.microbatch_size):
        return plan.sharded
    rows = plan.microbatch_size
    return sharded(program, plan.sharding, rows, problem_of(program, plan.sharding, rows, seen), seen)
