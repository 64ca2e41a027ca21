"""Compare every loss, gradient, parameter, buffer and output of the ranks with the reference's, and copies with each other.

Errors are relative to the largest magnitude of the reference tensor, or to 1e-3 of the model's largest gradient
(parameter) where that is larger, of a running mean to 1e-3 of the spread: some are zero except for rounding. The tolerance
follows from each tensor's own dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphpar.ir.plan import Plan
from graphpar.runtime.launching.worker import JobResult
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.option_kinds import TRAIN
from graphpar.runtime.stages.dropout import KERNEL
from graphpar.text import plural
from graphpar.verification.gathered import GatheredTensors, same
from graphpar.verification.reference_results import Accumulated, Reference
from graphpar.verification.seeds import seed_problems
from graphpar.verification.tolerances import Precision, least_precise, precision

_FLOOR = 1e-3
_PIECE = 1 << 22  # elements that are compared at a time, since float64 takes memory
ACCUMULATED = "accumulated"
"""In place of a step's number: the step on the accumulated and clipped gradients of two batches."""
EVALUATION = "evaluation"
"""In place of a step's number: in evaluation, after the last step."""
GENERATION = "generation"
"""In place of a step's number: in generation, after the last step."""
BEGUN = "begun"
"""In place of a step's number: before the first step."""


@dataclass(frozen=True)
class Difference:
    """A value whose error is above its dtype's tolerance; ``step`` is None for values after the last step."""

    step: int | str | None
    kind: str
    name: str
    error: float

    def __str__(self) -> str:
        when = "after the last step" if self.step is None else f"step {self.step}"
        when = {
            ACCUMULATED: "the accumulated and clipped step",
            EVALUATION: "in evaluation",
            GENERATION: "in generation",
            BEGUN: "before the first step",
        }.get(str(self.step), when)
        when = "after steps of the model file's own" if self.kind == "optimizer" else when
        return f"{self.kind}{f' of {self.name}' if self.name else ''}, {when} ({self.error:.1e})"

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data."""
        return {
            "step": self.step,
            "kind": self.kind,
            "name": self.name,
            "error": _finite(self.error),
            "text": str(self),
        }


@dataclass
class Verification:
    """The comparison's result; ``ok`` says whether all of it is within ``tolerance``.

    For each kind, ``worst`` is the tensor whose error is the largest relative to its tolerance; ``max_error`` and
    ``tolerance`` are that tensor's.
    """

    devices: int
    steps: int
    reference_losses: list[float]
    parallel_losses: list[float]
    max_error: dict[str, float]
    worst: dict[str, str]
    tolerance: dict[str, float]
    problems: list[str] = field(default_factory=list)
    ran: bool = True  # whether the parallel program ended without an error, so that there are figures
    accumulated: dict[str, tuple[float, float]] = field(default_factory=dict)  # of the clipped step: loss, norm
    decided_in: str = "fp32"
    first_difference: Difference | None = None
    data: str = ""
    notes: list[str] = field(default_factory=list)
    native: Verification | None = None  # in the program's own dtypes, where fp64 decided
    gradient_errors: dict[str, float] = field(default_factory=dict)  # the largest of any step, by parameter

    @property
    def ok(self) -> bool:
        """Whether every error is within its tolerance and there is no other problem."""
        within = all(self.max_error[kind] <= self.tolerance[kind] for kind in self.max_error)
        return within and not self.problems

    def __repr__(self) -> str:
        errors = ", ".join(f"{kind} {error:.1e}" for kind, error in self.max_error.items())
        found = f"largest errors: {errors}" if self.ran else "the program did not run to its end"
        verdict = "PASS" if self.ok else "FAIL"
        problems = "".join(f"\n  {problem}" for problem in self.problems)
        return f"Verification({verdict} in {self.decided_in}, {self.devices} devices, {self.steps} steps, {found}){problems}"

    @property
    def finite(self) -> bool:
        """Whether every error is finite."""
        return all(map(math.isfinite, self.max_error.values()))

    def to_json(self) -> dict[str, Any]:
        """Convert to the object that ``graphpar verify --json`` prints."""
        return {
            "ok": self.ok,
            "devices": self.devices,
            "steps": self.steps,
            "ran": self.ran,
            "loss": {"reference": self.reference_losses, "parallel": self.parallel_losses},
            "accumulated": {
                what: {"reference": expected, "parallel": found} for what, (expected, found) in self.accumulated.items()
            },
            "max_error": self._errors(),
            "worst": {kind: name for kind, name in self.worst.items() if name},
            "tolerance": self.tolerance,
            "decided_in": self.decided_in,
            "native": None if self.native is None else self.native._as_native(),
            "first_difference": None if self.first_difference is None else self.first_difference.to_json(),
            "data": self.data,
            "notes": self.notes,
            "problems": self.problems,
        }

    def _errors(self) -> dict[str, float | str]:
        return {kind: _finite(error) for kind, error in self.max_error.items()}

    def _as_native(self) -> dict[str, Any]:
        return {"dtype": self.decided_in, "max_error": self._errors(), "worst": self.worst}


def _finite(error: float) -> float | str:
    return error if math.isfinite(error) else str(error)


def compare(
    reference: Reference, result: JobResult, plan: Plan, steps: int, program: Manifest | None = None
) -> Verification:
    """Compare what the ranks of ``result`` wrote with ``reference``.

    Args:
        program: says how tensors are sharded; without it none is.
    """
    comparison = _Comparison(reference, plan, steps, result)
    outcome = comparison.outcome
    if result.error is not None:
        outcome.problems.append(result.error)
        outcome.ran = False
        outcome.max_error[next(iter(outcome.max_error))] = math.inf
        return outcome
    ranks = [result.tensors(rank) for rank in range(plan.mesh.size)]
    comparison.written = GatheredTensors(ranks, plan.mesh.degrees(), program, outcome.problems)
    comparison.begun()
    if plan.mode != TRAIN:
        comparison.outputs()
    else:
        comparison.training(result)
    if plan.dropout == KERNEL:
        outcome.problems += seed_problems(result.drawn, plan.mesh.degrees())
        outcome.notes.append(
            "attention dropout is drawn by torch's kernel, with masks of its own, so it was off on both sides while they were "
            f"compared; the seeds of its {plural(sum(map(len, result.drawn)), 'draw')} were checked: different for different tensors, "
            "equal on ranks that hold the same tensor. The kernel's own masks are not compared"
        )
    outcome.first_difference = comparison.first()
    return outcome


class _Comparison:
    """Fills ``outcome``; ``differences`` are values with errors above their tolerance."""

    written: GatheredTensors

    def __init__(self, reference: Reference, plan: Plan, steps: int, result: JobResult) -> None:
        self.reference = reference
        usual = precision(reference.dtype)
        kinds = ["loss", "gradient", "parameter", "buffer"] if plan.mode == TRAIN else ["output", "buffer"]
        if plan.mode == TRAIN and reference.accumulated is not None:
            kinds.insert(2, "norm")
        kinds += ["optimizer"] if reference.stepped else []
        kinds += ["output"] if reference.evaluated_outputs or reference.generated else []
        self.outcome = Verification(
            devices=plan.mesh.size,
            steps=steps,
            reference_losses=reference.losses,
            parallel_losses=list(result.losses),
            max_error=dict.fromkeys(kinds, 0.0),
            worst={},
            tolerance={kind: usual.allowed[kind] for kind in kinds},
            decided_in=usual.name,
            data=reference.data,
        )
        self.differences: list[Difference] = []

    def begun(self) -> None:
        """Compare buffers and constants that the program has with those of the model as it was built."""
        for name, expected in self.reference.begun.items():
            if self.written.holders(f"begun/{name}"):
                self.whole(BEGUN, "buffer", f"begun/{name}", name, expected, 0.0)

    def outputs(self) -> None:
        for step, outputs in enumerate(self.reference.outputs):
            for name, expected in outputs.items():
                self.output(step, name, expected)

    def output(self, step: int | str, name: str, expected: Tensor) -> None:
        key = f"output/{step}/{name}"
        found = [self.written.ranks[rank][key] for rank in self.written.holders(key)]
        self.tensor(step, "output", name, expected, found, 0.0)

    def training(self, result: JobResult) -> None:
        for losses in result.rank_losses or (result.losses,):
            self.losses(losses)
        for dtype in sorted(set(result.loss_dtypes)) if self.reference.policy_dtype is not None else ():
            if precision(getattr(torch, dtype)).clear < precision(torch.float32).clear:
                self.outcome.problems.append(f"the loss is in {dtype}, not in float32")
        for step, gradients in enumerate(self.reference.gradients):
            self.gradients(step, gradients)
        if self.reference.accumulated is not None:
            self.accumulated(self.reference.accumulated, result)
        if self.reference.evaluated is not None:
            for loss in result.evaluated_losses:
                self.number(EVALUATION, "loss", self.reference.evaluated, loss)
            if not result.evaluated_losses:
                self.outcome.problems.append("no batch was evaluated")
            for name, expected in self.reference.evaluated_outputs.items():
                self.output(EVALUATION, name, expected)
        for name, expected in self.reference.generated.items():
            self.output(GENERATION, name, expected)
        self.parameters("parameter", "param", self.reference.parameters)
        self.parameters("optimizer", "stepped", self.reference.stepped)
        shared = {name: group for group in self.reference.ties for name in group}
        for name, expected in self.reference.buffers.items():
            held = self.written.holders(f"buffer/{name}")
            elsewhere = any(self.written.holders(f"buffer/{other}") for other in shared.get(name, ()))
            if held or (name in self.reference.persistent and not elsewhere):
                self.whole(None, "buffer", f"buffer/{name}", name, expected, self.spread(name))

    def spread(self, name: str) -> float:
        """Return the spread of what a running mean is the mean of, 0 of other buffers: a mean that is 0 is so but for rounding."""
        variance = self.reference.buffers.get(f"{name.removesuffix('running_mean')}running_var")
        return float(variance.max()) ** 0.5 if name.endswith("running_mean") and variance is not None else 0.0

    def parameters(self, kind: str, key: str, expected: Mapping[str, Tensor]) -> None:
        """Compare parameters after the last step; all copies of one, under every name and on every rank, must be equal bit for
        bit."""
        largest = largest_of(expected)
        ties = [group for group in self.reference.ties if group[0] in expected]
        tied = {name for group in ties for name in group}
        for group in [*ties, *((name,) for name in expected if name not in tied)]:
            copies = [
                copy
                for name in group
                for copy in self.whole(None, kind, f"{key}/{name}", name, expected[name], largest)
            ]
            for rank, value in copies[1:]:
                first, other = copies[0]
                if value.shape == other.shape and not same(other, value):
                    drift = float((other.double() - value.double()).abs().max())
                    what = f"tied parameter {' = '.join(group)}" if len(group) > 1 else f"parameter {group[0]}"
                    what = f"after steps of the model file's optimizer, {what}" if kind == "optimizer" else what
                    self.outcome.problems.append(
                        f"{what}: its copies on ranks {first} and {rank} differ by {drift:.3g}"
                    )
                    break

    def losses(self, losses: Sequence[float]) -> None:
        if len(losses) != len(self.reference.losses):
            self.outcome.problems.append(f"{len(losses)} losses instead of {len(self.reference.losses)}")
        for step, (expected, found) in enumerate(zip(self.reference.losses, losses)):
            self.number(step, "loss", expected, found)

    def accumulated(self, expected: Accumulated, result: JobResult) -> None:
        """Compare the optimizer step on the accumulated and clipped gradients of two batches."""
        losses, norms = result.accumulated_losses, result.norms
        if not losses or not norms:
            self.outcome.problems.append("no accumulated and clipped step was made")
            return
        self.outcome.accumulated = {"loss": (expected.loss, losses[0]), "norm": (expected.norm, norms[0])}
        for loss in losses:
            self.number(ACCUMULATED, "loss", expected.loss, loss)
        for norm in norms:
            self.number(ACCUMULATED, "norm", expected.norm, norm)
        self.gradients(ACCUMULATED, expected.gradients)

    def gradients(self, step: int | str, gradients: Mapping[str, Tensor]) -> None:
        largest = largest_of(gradients)
        for name, expected in gradients.items():
            key = f"grad/{step}/{name}"
            self.whole(step, "gradient", key, name, expected, largest)
            without = set(self.written.holders(f"param/{name}")) - set(self.written.holders(key))
            if without and self.written.holders(key):
                self.outcome.problems.append(f"gradient {name}: has no gradient on rank {min(without)}")

    def whole(
        self, step: int | str | None, kind: str, key: str, name: str, expected: Tensor, largest: float
    ) -> list[tuple[int, Tensor]]:
        copies = self.written.copies(kind, key, name, expected.shape)
        if copies or not self.written.holders(key):  # else the problem is noted already
            self.tensor(step, kind, name, expected, [copy for _, copy in copies], largest)
        return copies

    def tensor(
        self, step: int | str | None, kind: str, name: str, expected: Tensor, found: Sequence[Tensor], largest: float
    ) -> None:
        """Compare all copies of a tensor with the reference; the worst counts."""
        if not found:
            what = "has no gradient" if kind == "gradient" else "is missing"
            self.outcome.problems.append(f"{kind} {name}: {what} in the parallel program")
        for value in found:
            if value.shape != expected.shape:
                shape = tuple(value.shape)
                self.outcome.problems.append(f"{kind} {name}: shape {shape} instead of {tuple(expected.shape)}")
                continue
            error = relative_error(expected, value, largest)
            self.error(step, kind, name, error, self.row(expected.dtype))

    def number(self, step: int | str, kind: str, expected: float, found: float) -> None:
        error = abs(expected - found) / max(abs(expected), 1e-12)
        if expected == found or (math.isnan(expected) and math.isnan(found)):
            error = 0.0
        row = self.row(self.reference.loss_dtype if kind == "loss" else self.reference.dtype)
        self.error(step, kind, "", math.inf if math.isnan(error) else error, row)

    def row(self, dtype: torch.dtype) -> Precision:
        """Return the tolerances of a tensor: of its dtype, or of the one that the whole model computes in by its policy."""
        policy = self.reference.policy_dtype
        return precision(dtype if policy is None or not dtype.is_floating_point else least_precise([dtype, policy]))

    def error(self, step: int | str | None, kind: str, name: str, error: float, row: Precision) -> None:
        outcome, allowed = self.outcome, row.allowed[kind]
        if kind == "gradient":
            outcome.gradient_errors[name] = max(error, outcome.gradient_errors.get(name, 0.0))
        if error > allowed:
            self.differences.append(Difference(step, kind, name, error))
        if kind not in outcome.worst or _share(error, allowed) > _share(
            outcome.max_error[kind], outcome.tolerance[kind]
        ):
            outcome.worst[kind] = name
            outcome.max_error[kind], outcome.tolerance[kind] = error, allowed

    def first(self) -> Difference | None:
        """Return the first difference: of the first step that differs, the loss, else the gradient that the backward computes
        first."""

        def moment(difference: Difference) -> tuple[int, int, int]:
            step = difference.step
            number = step if isinstance(step, int) else len(self.reference.losses) + (step is None)
            number = -1 if step == BEGUN else number
            kind = ("loss", "output", "gradient", "norm", "buffer", "parameter", "optimizer").index(difference.kind)
            return number, kind, -self.reference.order.get(difference.name, -1)

        return min(self.differences, key=moment, default=None)


def _share(error: float, allowed: float) -> float:
    """Return an error relative to its tolerance."""
    return error / allowed if allowed else math.inf if error else 0.0


def largest_of(tensors: Mapping[str, Tensor]) -> float:
    """Return the largest magnitude in any of them."""
    return max((float(value.abs().max()) for value in tensors.values() if value.numel()), default=0.0)


def relative_error(expected: Tensor, found: Tensor, largest: float = 0.0) -> float:
    """Return the largest difference over the largest magnitude of ``expected``, or over 1e-3 of ``largest`` where that
    is larger."""
    if not expected.numel():
        return 0.0
    if expected.is_complex():
        return max(
            relative_error(expected.real, found.real, largest), relative_error(expected.imag, found.imag, largest)
        )
    scale, worst = _FLOOR * largest, 0.0
    for piece, other in zip(expected.reshape(-1).split(_PIECE), found.reshape(-1).split(_PIECE)):
        first, second = piece.double(), other.double()
        difference = (first - second).abs()
        difference[(first == second) | (first.isnan() & second.isnan())] = 0.0
        scale = max(scale, float(first.abs().nan_to_num(0.0, 0.0, 0.0).max()))
        worst = max(worst, float(difference.nan_to_num(math.inf, math.inf).max()))
    return worst / scale if scale > 0.0 else worst
