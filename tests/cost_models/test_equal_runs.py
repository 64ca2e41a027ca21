"""Stages that are alike have one price: the same as without looking for such."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpar.cost_models.equal_runs import EqualRuns, Run
from graphpar.cost_models.estimates import Layout
from graphpar.cost_models.execution import Execution
from graphpar.cost_models.pricing import Pricing
from graphpar.hardware.cluster import Cluster
from graphpar.hardware.devices import DEVICES
from graphpar.passes.measured_units import RankUnits
from graphpar.runtime.mesh import Mesh
from tests.tools.programs import example


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=9), st.data())
def test_runs_are_alike_where_their_units_and_the_one_before_are(marks: list[str], data: st.DataObject) -> None:
    runs, count = EqualRuns(marks), len(marks)
    every = [(first, after) for first in range(count) for after in range(first + 1, count + 1)]

    def seen(run: Run) -> tuple[object, ...]:
        first, after = run
        return marks[first - 1] if first else None, marks[first:after], after == count

    for run in data.draw(st.permutations(every)):
        like = runs.first(run)
        assert seen(like) == seen(run)
        assert all(runs.first(other) == like for other in every if seen(other) == seen(run))


@pytest.mark.costly
@pytest.mark.sampled(1 / 4)
@pytest.mark.parametrize("name", ["gpt", "llama", "t5", "resnet_batchnorm"])
@pytest.mark.parametrize(("zero", "pp"), [(0, 2), (1, 4), (3, 1), (3, 2)])
def test_steps_cost_what_they_cost_without(name: str, zero: int, pp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    units = RankUnits(example(name), {}).of()
    mesh, cluster = Mesh(pp=pp, dp_shard=2), Cluster.of(DEVICES["A100-SXM-80GB"], 1, 2 * pp)
    layouts = [Layout("GPipe", 2, 4, (0, *starts)) for starts in _starts(len(units), pp)]
    found = []
    for alike in (True, False):
        if not alike:
            monkeypatch.setattr(EqualRuns, "first", lambda self, run: run)
        pricing = Pricing(units, mesh, cluster, Execution(zero=zero), dtype="fp32")
        found.append([pricing.estimate(layout) for layout in layouts])
    assert found[0] == found[1]


def _starts(units: int, stages: int) -> list[tuple[int, ...]]:
    """A few places where stages begin, each moved by one from the one before."""
    even = [place * units // stages for place in range(1, stages)]
    moved = [tuple(start + shift for start in even) for shift in (-1, 0, 1)]
    return [starts for starts in moved if min(starts, default=1) > 0 and max(starts, default=1) < units]
