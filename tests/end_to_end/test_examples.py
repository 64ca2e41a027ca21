"""Every example, cut into stages and over devices, against its model: loss, gradients, parameters, buffers; samples of the ways."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest

import graphpar as gp
from graphpar.runtime.mesh import Mesh
from graphpar.verification import Reference, Verification, reference_for, verify_all
from tests.tools.programs import NO_SEQUENCE, SMALL, example, norms_pinned
from tests.tools.samples import sample

pytestmark = pytest.mark.usefixtures("unpriced")
STEPS = 2  # and a third batch, whose gradients are added to the second's


@dataclass(frozen=True)
class Case:
    """``norms``: how the normalisations' inputs are pinned; empty leaves it to the search."""

    example: str
    mesh: str
    schedule: str = "1F1B"
    norms: str = ""

    def __str__(self) -> str:
        name = f"{self.example}-{self.mesh.replace('=', '').replace(',', '-')}"
        return f"{name}{f'-{self.schedule}' if 'pp' in self.mesh else ''}{f'-norms {self.norms}' if self.norms else ''}"


FAST = [
    *(Case(name, "pp=2") for name in SMALL[::3]),
    Case("gpt", "pp=1"),
    Case("gpt", "pp=2", "Interleaved1F1B"),
    Case("gpt_dropout", "pp=2", "ZBVZeroBubble"),
    Case("t5", "pp=2", "Interleaved1F1B"),
    *(Case(name, "tp=2") for name in SMALL[1::3]),
    Case("gpt2_tiny", "tp=2", norms="S(1)"),
    Case("llama", "cp=2,tp=2"),
    Case("mixtral", "ep=2"),
    Case("mixtral", "ep=2,tp=2"),
    Case("gpt2_tiny", "pp=2,dp_replicate=2,tp=2"),
    Case("llama", "pp=2,dp_replicate=2,tp=2"),
]
_TWO = ("GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
_COUPLED = ("resnet_batchnorm",)  # its examples are not independent: replicas are refused
_NORMED = ("gpt", "gpt2_tiny", "gpt_dropout", "llama", "mixtral", "t5")  # whose sequence every degree divides
SLOW = [
    *(Case("mixtral", mesh) for mesh in ("ep=4", "dp_replicate=2,ep=2", "cp=2,ep=2", "pp=2,ep=2")),
]
SLOW += [
    case
    for name in SMALL
    for case in [
        Case(name, "pp=1"),
        *(Case(name, "pp=2", schedule) for schedule in ("1F1B", *_TWO)),
        Case(name, "tp=2"),
        *(Case(name, "pp=4", schedule) for schedule in ("GPipe", "1F1B")),
        Case(name, "tp=4"),
        *(Case(name, "cp=2") for _ in range(name not in NO_SEQUENCE)),
        Case(name, "pp=2,tp=2"),
        Case(name, "pp=2,tp=2", "InterleavedZeroBubble"),
        *(Case(name, mesh) for mesh in ("dp_replicate=2", "dp_replicate=2,tp=2") if name not in _COUPLED),
        *(Case(name, mesh, norms=norms) for mesh in ("tp=2", "tp=4") for norms in ("S(1)", "I") if name in _NORMED),
    ]
    if case not in FAST
]
SAMPLE = sample(SLOW, 80)


@functools.cache
def _reference(name: str, microbatches: int | None) -> Reference:
    """``microbatches`` matters only where examples are coupled."""
    program = example(name)
    plan = gp.plan(program, 1, microbatch_size=8 // (microbatches or 1), allow_batch_coupling=True)
    return reference_for(gp.partition(program, plan), STEPS)


def _outcome(case: Case) -> Verification:
    program = example(case.example)
    plan = gp.plan(
        program,
        mesh=Mesh.parse(case.mesh),
        schedule=case.schedule,
        shard_plan=norms_pinned(program, case.norms),
        allow_batch_coupling=True,
    )
    reference = _reference(case.example, plan.microbatches if program.couplings else None)
    (outcome,) = verify_all([gp.partition(program, plan)], STEPS, references=[reference], timeout_s=120)
    return outcome


def _check(outcome: Verification) -> None:
    assert outcome.ok, (outcome.problems, outcome.max_error, outcome.worst)
    assert len(outcome.parallel_losses) == STEPS


@pytest.mark.sampled(1 / 10)
@pytest.mark.parametrize("case", FAST, ids=str)
def test_example_is_exact(case: Case) -> None:
    _check(_outcome(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_example_is_exact_on_every_mesh_and_schedule(case: Case) -> None:
    _check(_outcome(case))
