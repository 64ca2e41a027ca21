"""By how much a predicted step may be off, and which of equally fast plans is taken."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import graphpar as gp
from graphpar.cost_models.spread import BETWEEN, ELSEWHERE, INSIDE, SHARES, of_difference, spreads, together
from graphpar.passes.planning.candidates import Brief, surest_first, why_not
from graphpar.text import spread_text
from tests.tools.programs import example


def test_a_spread_is_that_of_its_parts() -> None:
    found = spreads({"compute": 6.0, "bubble": 2.0, "tp": 1.0, "dp_shard": 1.0, "gradients": 0.0}, {"dp_shard"})
    assert found == pytest.approx({"compute": 8 * SHARES["compute"], "tp": INSIDE, "dp_shard": BETWEEN})
    assert together(found) == pytest.approx(math.sqrt(0.8**2 + INSIDE**2 + BETWEEN**2))
    assert of_difference(found, found) == 0
    assert of_difference(found, {"compute": 0.8, "tp": INSIDE}) == pytest.approx(BETWEEN)
    assert spread_text(7.64, 0.906) == "7.64 ± 0.91 s" and spread_text(0.17, 0.0162) == "170 ± 16 ms"


def test_of_plans_that_are_equally_fast_the_one_that_is_known_best_is_taken() -> None:
    found = gp.plan(example("gpt"), "2xH100").found
    assert found is not None and found.best is not None

    def with_step(seconds: float, **parts: float) -> object:
        estimate = replace(found.best.estimate, step_time_s=seconds, parts_s=parts, spreads_s=spreads(parts, {"tp"}))
        return replace(found.best, estimate=estimate)

    fastest, surest = with_step(10.0, compute=7.0, tp=3.0), with_step(10.3, compute=10.0, dp_shard=0.3)
    slower = with_step(12.0, compute=12.0)
    assert surest_first([fastest, surest, slower]) == [surest, fastest, slower]
    assert why_not(Brief.of(surest.estimate), Brief.of(fastest.estimate)) == "known to 1.66 s only, not to 1.00 s"
    assert surest_first([fastest, slower]) == [fastest, slower]  # by more than prices may be off
    assert surest_first([surest, fastest])[0] is surest and surest_first([]) == []


def test_the_report_and_the_plan_say_it() -> None:
    plan = gp.plan(example("gpt"), "2xH100", mesh={"tp": 2})
    assert plan.predicted is not None and 0 < plan.predicted.spread_s < plan.predicted.step_time_s
    said = spread_text(plan.predicted.step_time_s, plan.predicted.spread_s)
    assert said in str(plan) and said in repr(plan.predicted)
    assert plan.predicted.to_json()["spread_s"] == plan.predicted.spread_s


def test_figures_of_another_machine_are_off_by_more() -> None:
    parts = {"compute": 6.0, "tp": 2.0}
    here, there = (spreads(parts, {}, elsewhere) for elsewhere in (False, True))
    assert there == here | {"figures": ELSEWHERE * 8.0}
    plan = gp.plan(example("gpt"), "2xCPU", mesh={"tp": 2})
    assert plan.predicted is not None and plan.predicted.spread_s >= ELSEWHERE * plan.predicted.step_time_s
