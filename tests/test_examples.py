"""Every example, cut into stages, against its unpartitioned model: loss, gradients, parameters after three steps, buffers."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest

import graphpar as gp
from graphpar.verification import Reference, Verification, reference_for, verify_all
from tests.programs import SMALL, example


@dataclass(frozen=True)
class Case:
    example: str
    pp: int
    schedule: str

    def __str__(self) -> str:
        return f"{self.example}-pp{self.pp}-{self.schedule}"


FAST = [
    *(Case(name, 2, "1F1B") for name in SMALL),
    Case("gpt", 1, "1F1B"),
    Case("gpt", 2, "Interleaved1F1B"),
    Case("gpt_dropout", 2, "ZBVZeroBubble"),
    Case("unet", 2, "Interleaved1F1B"),
    Case("t5", 2, "Interleaved1F1B"),
]
_TWO = ("GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SLOW = [
    case
    for name in SMALL
    for case in [
        Case(name, 1, "1F1B"),
        *(Case(name, 2, schedule) for schedule in _TWO),
        *(Case(name, 4, schedule) for schedule in ("GPipe", "1F1B")),
    ]
    if case not in FAST
]


@functools.cache
def _reference(name: str, microbatches: int | None) -> Reference:
    """``microbatches`` matters only where examples are coupled."""
    program = example(name)
    plan = gp.plan(program, 1, microbatch_size=8 // (microbatches or 1), allow_batch_coupling=True)
    return reference_for(gp.partition(program, plan))


def _verified(cases: list[Case]) -> dict[Case, Verification | Exception]:
    """All cases of one world size and example share launches and references."""
    outcomes: dict[Case, Verification | Exception] = {}
    by_reference: dict[tuple[str, int | None], list[tuple[Case, gp.Parts]]] = {}
    for case in cases:
        program = example(case.example)
        try:
            plan = gp.plan(program, case.pp, schedule=case.schedule, allow_batch_coupling=True)
            parts = gp.partition(program, plan)
        except Exception as error:
            outcomes[case] = error
            continue
        key = (case.example, plan.microbatches if program.couplings else None)
        by_reference.setdefault(key, []).append((case, parts))
    jobs = [(case, parts, key) for key, group in by_reference.items() for case, parts in group]
    references = [_reference(*key) for _, _, key in jobs]
    results = verify_all([parts for _, parts, _ in jobs], references=references, timeout_s=60 + 30 * len(jobs))
    outcomes.update({case: result for (case, _, _), result in zip(jobs, results)})
    return outcomes


@pytest.fixture(scope="module")
def fast_results() -> dict[Case, Verification | Exception]:
    return _verified(FAST)


@pytest.fixture(scope="module")
def slow_results() -> dict[Case, Verification | Exception]:
    return _verified(SLOW)


def _check(outcome: Verification | Exception) -> None:
    if isinstance(outcome, Exception):
        raise outcome
    assert outcome.ok, (outcome.problems, outcome.max_error, outcome.worst)
    assert len(outcome.parallel_losses) == 3


@pytest.mark.parametrize("case", FAST, ids=str)
def test_example_is_exact(case: Case, fast_results: dict[Case, Verification | Exception]) -> None:
    _check(fast_results[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_example_is_exact_under_every_schedule(case: Case, slow_results: dict[Case, Verification | Exception]) -> None:
    _check(slow_results[case])
