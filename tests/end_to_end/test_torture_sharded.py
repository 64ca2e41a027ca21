"""Slow: samples of the zoo of odd models with its tensors sharded over tp and over cp, against the unpartitioned models."""

from __future__ import annotations

import functools

import pytest

import graphpar as gp
from graphpar.verification import Verification
from tests.models.zoo_programs import WHOLE, check, program_of, verified
from tests.tools.samples import sample

pytestmark = pytest.mark.usefixtures("unpriced")
SAMPLE = sample(WHOLE, 48)


@functools.cache
def sharded_over(axis: str) -> dict[str, Verification | Exception]:
    """The sampled models over two ranks of an axis, its batch whole."""
    made: dict[str, gp.Parts | Exception] = {}
    for name in SAMPLE:
        program = program_of(name)
        try:
            made[name] = gp.partition(program, gp.plan(program, mesh={axis: 2}, allow_batch_coupling=True))
        except Exception as error:
            made[name] = error
    return verified(made, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tp", "cp"])
@pytest.mark.parametrize("name", SAMPLE)
def test_model_is_exact_when_tensors_are_sharded(name: str, axis: str) -> None:
    outcome = sharded_over(axis)[name]
    if axis == "cp" and isinstance(outcome, gp.GraphparError) and "divides sequences" in str(outcome):
        pytest.skip(str(outcome))
    check(outcome)
