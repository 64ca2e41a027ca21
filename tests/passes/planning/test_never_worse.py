"""A search with more freedom, more memory or faster links finds no slower plan."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from graphpar.hardware.cluster import Cluster
from graphpar.passes.planning.candidates import SearchResult
from graphpar.passes.planning.constraints import PlanConstraints
from graphpar.passes.planning.search import Planner
from graphpar.runtime.option_kinds import AUTO
from tests.passes.planning.test_planner import program_of, small
from tests.tools.samples import sample

MODELS = ("uneven", "gpt")
CLUSTERS = ((1, 2), (1, 4), (2, 2))
LINKED = (("uneven", (2, 2)), ("gpt", (1, 4)), ("uneven", (1, 2)))


def found(name: str, cluster: Cluster, mesh: dict[str, int] | None = None, **pins: Any) -> SearchResult:
    constraints = PlanConstraints(cluster=cluster, mesh=mesh or {}, **{"recompute": AUTO} | pins)
    return Planner(program_of(name), constraints).search()


def seconds(result: SearchResult) -> float:
    return float("inf") if result.best is None else result.best.estimate.step_time_s


def least_s(result: SearchResult) -> float:
    """No plan of the search takes fewer seconds."""
    return float("inf") if result.best is None else min(seconds(result), result.lower_bound_s)


def peak(name: str, cluster: Cluster) -> int:
    best = found(name, cluster, recompute="none").best
    assert best is not None
    return max(best.estimate.peak_memory_bytes)


CASES = list(itertools.product(MODELS, CLUSTERS))


@pytest.mark.parametrize(("name", "nodes"), sample(random.Random(5).sample(CASES, 3), 1))
@pytest.mark.costly
def test_more_memory(name: str, nodes: tuple[int, int]) -> None:
    most = peak(name, Cluster.of(small(), *nodes))
    results = [found(name, Cluster.of(small(share * most), *nodes)) for share in (0.35, 0.6, 0.9, 1.2)]
    for less, more in itertools.pairwise(results):
        # What is recomputed is chosen to within a gap that the search tells.
        assert seconds(more) * (1 - 1e-9) <= seconds(less) or least_s(more) <= seconds(less)
        assert least_s(more) <= seconds(less) * (1 + 1e-9)
        assert less.best is None or more.best is not None


@pytest.mark.parametrize(
    ("name", "nodes", "which"),
    sample(
        [(*case, which) for case in LINKED for which in ("intra_node", "inter_node")],
        3,
    ),
)
@pytest.mark.costly
def test_faster_links(name: str, nodes: tuple[int, int], which: str) -> None:
    """With the same placements of tensors, those of the slowest links. They are chosen at prices of single operators, which differ a little
    from those of steps, so faster links of their own may have placements that take a little longer."""
    cluster, planner, times = Cluster.of(small(), *nodes), None, []
    for faster_by in (1e-4, 1e-2, 1, 100):
        links = replace(cluster, **{which: getattr(cluster, which).times(faster_by)})  # type: ignore[arg-type]
        planner = Planner(program_of(name), PlanConstraints(cluster=links, recompute=AUTO), like=planner)
        times.append(seconds(planner.search()))

    for slower, quicker in itertools.pairwise(times):
        assert quicker <= slower * (1 + 1e-9)


PINS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"tp": 2}, {}),
    ({"pp": 2}, {}),
    ({"dp_replicate": 2}, {}),
    ({"dp_shard": 2}, {"zero": 3}),
    ({"dp_shard": 2}, {"zero": 1}),
    ({}, {"microbatch_size": 1}),
    ({"pp": 2}, {"schedule": "GPipe"}),
    ({}, {"recompute": "full"}),
    ({"pp": 2}, {"recompute": "none"}),
]


@pytest.mark.parametrize(("name", "nodes"), sample(random.Random(7).sample(CASES, 3), 1))
@pytest.mark.costly
def test_fewer_pins(name: str, nodes: tuple[int, int]) -> None:
    cluster = Cluster.of(small(), *nodes)
    tight = replace(cluster, device=small(0.6 * peak(name, cluster)))
    for each in (cluster, tight):
        free = found(name, each)
        for mesh, pins in PINS:
            if name == "uneven" and pins.get("recompute", "none") != "none":
                continue  # nothing repeats
            pinned = found(name, each, mesh, **pins)
            assert seconds(free) * (1 - 1e-9) <= seconds(pinned) or least_s(free) <= seconds(pinned), (mesh, pins)
            assert free.best is not None or pinned.best is None
