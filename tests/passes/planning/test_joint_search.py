"""Planners that search together find what the best of them finds alone."""

from __future__ import annotations

from typing import Any

import pytest

from graphpar.hardware.cluster import Cluster
from graphpar.passes.planning.candidates import Priced, SearchResult
from graphpar.passes.planning.constraints import PlanConstraints
from graphpar.passes.planning.joint_search import search_together
from graphpar.passes.planning.planner import Planner
from graphpar.passes.planning.planning import planner_for
from graphpar.runtime.option_kinds import AUTO
from tests.passes.planning.test_planner import program_of, small

PINS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({}, {"recompute": "none"}),
    ({"tp": 2}, {}),
    ({"pp": 2}, {}),
    ({"tp": 4}, {"microbatch_size": 1}),
]


def planner(mesh: dict[str, int], pins: dict[str, Any], memory: float) -> Planner:
    cluster = Cluster.of(small(memory), 1, 4)
    constraints = PlanConstraints(cluster=cluster, **{"recompute": AUTO} | pins)
    return planner_for(program_of("uneven"), cluster, mesh, constraints)


def told(found: SearchResult) -> tuple[Any, ...]:
    shown = [(each.candidate, each.choices, each.estimate) for each in (*found.alternatives, *found.misfits)]
    best = None if found.best is None else (found.best.candidate, found.best.choices, found.best.estimate)
    counts = found.considered, found.priced, found.infeasible, found.tried, found.points
    return best, shown, counts, found.lower_bound_s, found.refused, found.left_out


def together(memory: float, order: list[int], barred: int | None = None) -> tuple[int, SearchResult]:
    """The number in ``PINS`` of the planner that wins, and its result."""
    rivals = [planner(*PINS[number], memory) for number in order]

    def wins(number: int, priced: Priced) -> bool:
        return order[number] != barred

    number, found = search_together([(each, each.begun()) for each in rivals], wins)
    return order[number], found


@pytest.mark.parametrize("share", [1.02, 1.4])
def test_the_winner_finds_what_it_finds_alone(share: float) -> None:
    best = planner({}, {"recompute": "none"}, 1e12).search().best
    assert best is not None
    memory = share * max(best.estimate.peak_memory_bytes)
    alone = [planner(*pins, memory).search() for pins in PINS]
    seconds = [float("inf") if each.best is None else each.best.estimate.step_time_s for each in alone]
    assert min(seconds) < float("inf")
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        number, found = together(memory, order)
        assert number == min(order, key=lambda each: (seconds[each], order.index(each)))
        assert told(found) == told(alone[number])
    barred = seconds.index(min(seconds))
    others = [each for each in range(len(PINS)) if each != barred]
    number, found = together(memory, [barred, *others], barred)
    assert number == min(others, key=lambda each: seconds[each]) and told(found) == told(alone[number])


def test_where_nothing_fits_the_first_says_so() -> None:
    number, found = together(1000.0, [0, 1])
    assert number == 0 and found.best is None and told(found) == told(planner(*PINS[0], 1000.0).search())


def test_a_space_in_another_has_its_own_candidates() -> None:
    cluster = Cluster.of(small(1e12), 1, 4)
    pins = PlanConstraints(cluster=cluster, recompute=AUTO)
    whole = planner_for(program_of("uneven"), cluster, {}, pins)
    inside, own = (
        planner_for(program_of("uneven"), cluster, {}, PlanConstraints(cluster=cluster, overlap_tp=True)).space
        for _ in range(2)
    )
    inside.lies_in(whole.space)
    assert inside.all == own.all and inside.refused == own.refused
    assert 0 < len(inside.all) < len(whole.space.all)
