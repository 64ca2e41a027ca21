"""Networks under schedules that split backwards: drawn ones (``tests/tools/drawn_residuals.py``) and the zoo's, cut into more stages."""

from __future__ import annotations

import pytest

import graphpar as gp
from graphpar.verification import verify_all
from tests.models.zoo import ZOO
from tests.models.zoo_programs import MODELS, check, planned, program_of, verified
from tests.tools.drawn_residuals import SCHEDULES, draw
from tests.tools.samples import SEED, sample

pytestmark = pytest.mark.usefixtures("unpriced")
DRAWN = range(200) if SEED == "all" else sample(range(200), 5)


@pytest.mark.slow
def test_drawn_networks_are_exact() -> None:
    programs = [draw(seed) for seed in DRAWN]
    outcomes = verify_all([program.compile() for program in programs], 2, timeout_s=1800)
    assert not [
        f"{program}: {outcome.problems} {outcome.max_error}"
        for program, outcome in zip(programs, outcomes)
        if not outcome.ok
    ]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_models_of_the_zoo_are_exact(schedule: str) -> None:
    parts: dict[str, gp.Parts | Exception] = {}
    for name in sample([name for name in MODELS if not ZOO[name].plan], 12):
        program = program_of(name)
        try:
            parts[name] = gp.partition(program, planned(ZOO[name], program, schedule=schedule, split=None))
        except gp.GraphparError:
            continue  # too few layers for two stages a rank
    assert parts
    for outcome in verified(parts, steps=2).values():
        check(outcome)
