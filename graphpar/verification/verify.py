"""Verify programs: run them and their references, compare, and decide in float64 where an error could be rounding.

    every program ──► reference, ranks, comparison in its own dtypes ──► clear ────────────────────────────► the outcome
                                                                     └─► unclear ──► everything in float64 ──┘

A bug shows in float64 as in float32; rounding does not. The text of the program is the same (:mod:`graphpar.runtime.debugging.fp64`).
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from graphpar.errors import GraphparError
from graphpar.frontend.build import build
from graphpar.frontend.modelfile import find_model_file, load_model_file
from graphpar.frontend.signature import of_tokens
from graphpar.ir.plan import Plan
from graphpar.ir.program import Input, ModelSource
from graphpar.parts import Parts
from graphpar.runtime.debugging.fp64 import WIDER
from graphpar.runtime.launching.worker import run_jobs
from graphpar.runtime.manifest import Manifest, load_manifest
from graphpar.runtime.option_kinds import COMPILED, GENERATE, TRAIN, ends_of, listed_lengths
from graphpar.runtime.stages.lengths import dims_of
from graphpar.runtime.stages.modules import check_files, emitted_package
from graphpar.runtime.state.optimizers import factory
from graphpar.text import plural
from graphpar.verification.comparison import Verification, compare, largest_of, relative_error
from graphpar.verification.recorded import Recorded
from graphpar.verification.reference import SEED, run_reference
from graphpar.verification.reference_results import Reference, Stepping
from graphpar.verification.tolerances import PRECISIONS, precision

STEPS = 4
_ROUNDINGS, _ULPS = 100.0, 16.0
"""The first result may differ by so many times the model's own rounding, or so many units in the last place; above that the
program computes in fewer bits."""
_SPREAD = 4.0
"""How many times the model's own rounding a gradient may be off where float64 doesn't run the kernels that 16 bits do."""


@dataclass(frozen=True)
class _Subject:
    """A program to be verified, its plan, and its reference."""

    folder: Path
    plan: Plan
    reference: Reference


def verify_parts(
    parts: Parts | str | Path,
    steps: int | None = None,
    *,
    reference: Callable[..., Any] | Recorded | None = None,
    fp64: bool = False,
    timeout_s: float = 900.0,
    on_phase: Callable[[str], None] | None = None,
) -> Verification:
    """Verify one program, in memory or emitted to a folder. See :func:`verify_all`.

    Args:
        reference: what the program is compared with, where that is not the model and loss function that it was compiled from: a
            function of the model and a batch (a dict by name) that returns the loss of the batch, or for inference the outputs;
            or a run that was made elsewhere.

    Raises:
        GraphparError: as :func:`verify_all`; or ``steps`` or ``fp64`` is asked for of a recorded run.
    """
    options: dict[str, Any] = {"fp64": fp64, "timeout_s": timeout_s, "on_phase": on_phase}
    if isinstance(reference, Recorded):
        if steps not in (None, len(reference.losses)) or fp64:
            raise GraphparError(
                "A recorded run has its own number of steps and its own dtype; leave out steps and fp64."
            )
        folder = parts.folder if isinstance(parts, Parts) else Path(parts)
        run = reference.reference(load_manifest(folder), Plan.load(folder))
        (result,) = verify_all([parts], len(reference.losses), references=[run], **options)
    else:
        manifest = load_manifest(parts.folder if isinstance(parts, Parts) else Path(parts))
        usual = max(STEPS, len(_tried(manifest)) - 1)
        (result,) = verify_all([parts], usual if steps is None else steps, forward=reference, **options)
    return result


def verify_all(
    programs: Sequence[Parts | str | Path],
    steps: int = STEPS,
    *,
    references: Sequence[Reference | None] | None = None,
    forward: Callable[..., Any] | None = None,
    fp64: bool = False,
    timeout_s: float = 900.0,
    on_phase: Callable[[str], None] | None = None,
) -> list[Verification]:
    """Verify several programs, those of one world size in one launch.

    Args:
        steps: of training, or batches of inference.
        references: those of the programs where they are known, which saves running the models again.
        forward: of the model and a batch, in place of the model and its loss function; see :func:`run_reference`.
        fp64: decide in float64 in any case.
        timeout_s: for each launch.
        on_phase: called with what comes next, as each phase begins.

    Raises:
        GraphparError: fewer than one step is asked for, or a program's model is not known.
    """
    if steps < 1:
        raise GraphparError(f"--steps is {steps}; at least one step is needed.")
    begin = on_phase or (lambda text: None)
    shared: dict[Any, Reference] = {}
    begin(f"running the model: {plural(steps, 'step')}")
    known = references or [None] * len(programs)
    subjects = [
        _subject(program, steps, given, shared, forward) for program, given in zip(programs, known, strict=True)
    ]
    begin(f"running the program: {plural(steps, 'step')} on {_processes(subjects)}")
    outcomes = _compare_all(subjects, steps, timeout_s)
    doubtful = [
        index
        for index, outcome in enumerate(outcomes)
        if subjects[index].reference.again is not None and _in_doubt(outcome, fp64)
    ]
    again: list[_Subject] = []
    if doubtful:
        begin("running the model again in float64, to tell rounding from an error")
    for index in list(doubtful):
        subject = subjects[index]
        try:
            again.append(_Subject(subject.folder, subject.plan, subject.reference.in_double))
        except Exception as error:  # the user's own code may not run in float64
            outcomes[index] = _without_double(outcomes[index], subject.reference, f"the model: {error}")
            doubtful.remove(index)
    if again:
        begin(f"running the program again in float64 on {_processes(again)}")
    for index, subject, exact in zip(doubtful, again, _compare_all(again, steps, timeout_s, double=True)):
        outcomes[index] = _decided(
            outcomes[index], exact, subjects[index].reference, subject.reference, kernels_by_dtype(subject.plan)
        )
    return outcomes


def _processes(subjects: Sequence[_Subject]) -> str:
    return plural(max((subject.plan.mesh.size for subject in subjects), default=0), "process", "processes")


def reference_for(parts: Parts, steps: int = STEPS) -> Reference:
    """Run the reference of ``parts``' model; it can be shared by several plans of the same global batch."""
    assert parts.program.source is not None
    coupled = bool(parts.program.couplings) and parts.plan.microbatches > 1
    manifest = load_manifest(parts.folder)
    return run_reference(
        parts.program.source,
        parts.plan,
        _inputs_of(parts, manifest),
        steps,
        microbatched=coupled,
        counted=manifest.count_inputs,
        layouts=manifest.streams,
        evaluates=_evaluates(manifest),
        offered=manifest.offered_outputs,
        rounded=manifest.rounded_weights,
        evaluated_layouts=manifest.evaluated_streams if manifest.evaluates_apart else None,
        branches=bool(manifest.branches),
        lengths=_lengths(manifest, steps + 1),
        generating=_generating(manifest),
    )


def _lengths(manifest: Manifest, count: int) -> list[int]:
    """Return the lengths of so many batches, where they vary."""
    tried = _tried(manifest)
    return [tried[place % len(tried)] for place in range(count)] if tried else []


def _tried(manifest: Manifest) -> list[int]:
    """Return the lengths that are tried: the longest, the shortest, and one between; of a list each, and one that is padded, where that is
    possible."""
    if manifest.seq is None:
        return []
    least, most = ends_of(manifest.seq)
    if listed := listed_lengths(manifest.seq):
        padded = [length - 1 for length in listed if length > 3 and length - 1 not in listed]
        return [*listed[::-1], *(padded[-1:] if manifest.unpadded is None else [])]
    multiple = 1 if manifest.unpadded is None else manifest.multiple
    between = (least + most) // 2
    between += between % 2 == most % 2 and between + 1 < most  # else all lengths may be even, or all odd
    return [most, -(-least // multiple) * multiple, between // multiple * multiple or most]


def _generating(manifest: Manifest) -> Manifest | None:
    return None if manifest.generates is None else load_manifest(manifest.generates)


def _evaluates(manifest: Manifest) -> bool:
    return manifest.mode == TRAIN and manifest.no_eval is None


# ---- programs and their references -----------------------------------------------------------------------------


def _subject(
    program: Parts | str | Path,
    steps: int,
    known: Reference | None,
    shared: dict[Any, Reference],
    forward: Callable[..., Any] | None,
) -> _Subject:
    """Return the program with its reference: ``known``, one in ``shared`` for the same model and batch, or a new one."""
    if isinstance(program, Parts):
        folder, plan, source = program.folder, program.plan.plan, program.program.source
        coupled = bool(program.program.couplings)
        manifest = load_manifest(folder)
    else:
        folder = Path(program)
        manifest, plan = load_manifest(folder), Plan.load(folder)
        check_files(manifest)
        source = None if known is not None else _source_of(folder, manifest, plan)
        coupled = plan.allow_batch_coupling
    inputs, counted = _inputs_of(program, manifest), manifest.count_inputs
    if known is not None:
        return _Subject(folder, plan, known)
    if source is None:
        raise GraphparError(
            "This program has no record of its model; compile it from a model file, or verify gp.partition's result."
        )
    microbatched = coupled and plan.microbatches > 1
    sizes = (plan.microbatches, plan.microbatch_size) if microbatched else None
    parts = plan.mesh.replicas if plan.dp_mean else 1
    lengths = _lengths(manifest, steps + 1)
    offered = tuple((spec.name, spec.batch_dim, spec.adds) for spec in manifest.offered_outputs)
    key = (id(source), plan.mode, plan.global_batch, sizes, plan.dropout, parts) + (
        _evaluates(manifest),
        offered,
        tuple(lengths),
        manifest.generates,
        *((plan.mesh, str(manifest.rounded_weights)) if manifest.rounded_weights else ()),
    )
    text = own.read_text(encoding="utf-8") if (own := folder / "optimizer.py").is_file() else None
    if (*key, text) not in shared:
        stepping = None if text is None or plan.mode != TRAIN else _own_optimizer(manifest)
        shared[*key, text] = run_reference(
            source,
            plan,
            inputs,
            steps,
            microbatched=microbatched,
            counted=counted,
            layouts=manifest.streams,
            forward=forward,
            stepping=stepping,
            evaluates=_evaluates(manifest),
            offered=manifest.offered_outputs,
            rounded=manifest.rounded_weights,
            evaluated_layouts=manifest.evaluated_streams if manifest.evaluates_apart else None,
            branches=bool(manifest.branches),
            lengths=lengths,
            generating=_generating(manifest),
        )
    return _Subject(folder, plan, shared[*key, text])


def _own_optimizer(manifest: Manifest) -> Stepping:
    """Return what makes the optimizer and the schedule of the model file."""
    package = emitted_package(manifest)
    return Stepping(*(factory(manifest, package, name) for name in ("optimizer", "lr_schedule")))


def _inputs_of(program: Parts | str | Path, manifest: Manifest) -> tuple[Input, ...]:
    """Return the inputs of a batch, of a program for generation whole sequences."""
    if isinstance(program, Parts) and manifest.mode != GENERATE:
        return program.compilation.emitted[0].inputs
    return tuple(
        Input(i.name, i.shape, i.dtype, i.batch_dim, i.role, positions=tuple(dims_of(i))) for i in manifest.inputs
    )


def _source_of(folder: Path, program: Manifest, plan: Plan) -> ModelSource:
    if not program.model_file:
        raise GraphparError(
            f"{folder} was not compiled from a model file; verify it from Python with gp.verify(parts)."
        )
    file = load_model_file(find_model_file(folder, program.model_file))
    source = ModelSource(file.model, file.args, file.kwargs, file.loss_fn, file.targets, plan.precision)
    if plan.mode != GENERATE:
        return source
    return of_tokens(replace(source, mode=GENERATE), build(file.model)[0], None)[0]


# ---- running ---------------------------------------------------------------------------------------------------


def _compare_all(
    subjects: Sequence[_Subject], steps: int, timeout_s: float, *, double: bool = False
) -> list[Verification]:
    """Run all subjects, those of one world size in one launch, and compare each with its reference."""
    with tempfile.TemporaryDirectory(prefix="graphpar-verify-") as scratch:
        jobs = [Path(scratch) / f"job_{index}" for index in range(len(subjects))]
        programs = [_prepare(subject, job, steps, double) for subject, job in zip(subjects, jobs)]
        outcomes: dict[int, Verification] = {}
        folders = [scratch, *{str(subject.reference.folder) for subject in subjects}]
        for size in sorted({subject.plan.mesh.size for subject in subjects}):
            numbers = [n for n, subject in enumerate(subjects) if subject.plan.mesh.size == size]
            for n, result in zip(numbers, run_jobs([jobs[n] for n in numbers], size, timeout_s, folders=folders)):
                manifest = load_manifest(programs[n]) if result.error is None else None
                outcomes[n] = compare(subjects[n].reference, result, subjects[n].plan, steps, manifest)
        return [outcomes[n] for n in range(len(subjects))]


def _prepare(subject: _Subject, job: Path, steps: int, double: bool) -> Path:
    """Write the job's files, and return the folder of the program that it runs."""
    job.mkdir()
    folder, reference = subject.folder.resolve(), subject.reference
    if double:
        folder = _widened(folder, job / "program")
    record = {
        "program": str(folder),
        "steps": steps,
        "optimizer": {"lr": reference.learning_rate, "momentum": reference.momentum},
        "seed": SEED,
        "weights": str(reference.weights),
        "batches": [str(reference.batch_file(step)) for step in range(len(reference.batches))],
        "max_norm": None if reference.accumulated is None else reference.accumulated.max_norm,
        "double": double,
        "loss_scale": reference.loss_scale,
        "evaluates": reference.evaluated is not None,
        "generates": bool(reference.generated),
        "gradients": [str(file) for file in reference.gradient_files] if reference.stepped else [],
    }
    (job / "job.json").write_text(json.dumps(record), encoding="utf-8")
    return folder


def _widened(folder: Path, copy: Path) -> Path:
    """Copy a program, with float64 in its ``plan.json`` wherever tensors of fewer bits are given or sent; the text stays."""
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("weights", "checkpoint*", COMPILED))
    names = {_dtype_name(narrow): _dtype_name(wide) for narrow, wide in WIDER.items()}

    def widened(value: Any) -> Any:
        if isinstance(value, list):
            return [widened(item) for item in value]
        if isinstance(value, Mapping):
            return {key: names.get(item, item) if key == "dtype" else widened(item) for key, item in value.items()}
        return value

    for file in copy.rglob("plan.json"):
        record = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps(record | {"interface": widened(record["interface"])}), encoding="utf-8")
    return copy


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- deciding --------------------------------------------------------------------------------------------------


def _in_doubt(outcome: Verification, always: bool) -> bool:
    """Return whether rounding may have caused or hidden an error. A missing or infinite value is not rounding."""
    if outcome.problems or not outcome.finite or outcome.decided_in == "fp64":
        return False
    clear = {row.name: row.clear for row in PRECISIONS.values()}[outcome.decided_in]
    return always or not outcome.ok or any(error > clear for error in outcome.max_error.values())


def kernels_by_dtype(plan: Plan) -> bool:
    """Whether a program computes in 16 bits by kernels that float64 doesn't take: ring attention on a GPU."""
    return plan.mesh.cp > 1 and plan.dtype != "fp32" and torch.cuda.is_available()


def _decided(
    native: Verification, exact: Verification, reference: Reference, double: Reference, by_dtype: bool
) -> Verification:
    """Return the verdict of the run in float64, where that was possible.

    Args:
        by_dtype: whether the program takes other kernels there, so that its gradients are judged in its own dtype, too.
    """
    failed = [problem for problem in exact.problems if not exact.parallel_losses and not exact.worst]
    if failed:
        return _without_double(native, reference, f"the program: {failed[0]}")
    exact.native = native
    exact.data = native.data
    exact.notes.append(
        f"both sides were run again in fp64, which decides; in {native.decided_in} the largest error was {_largest(native)}"
    )
    if native.first_difference is not None:
        exact.notes.append(f"in {native.decided_in} the first difference was {native.first_difference}")
    if exact.ok and (coarse := _too_coarse(native, reference, double)):
        exact.problems.append(coarse)
    if exact.ok and by_dtype:
        exact.problems += _beyond_rounding(native, reference, double)
    return exact


def _beyond_rounding(native: Verification, reference: Reference, double: Reference) -> Iterator[str]:
    """Say which gradients are further from the model's than rounding explains: the model's own, of that gradient or of the middle one."""
    own: dict[str, float] = {}
    for rounded, exact in zip(reference.gradients, double.gradients):
        largest = largest_of(exact)
        for name, value in exact.items():
            own[name] = max(own.get(name, 0.0), relative_error(value, rounded[name], largest))
    middle = statistics.median(own.values()) if own else 0.0
    for name, error in native.gradient_errors.items():
        if error > _SPREAD * max(own.get(name, 0.0), middle):
            yield (
                f"in fp64 the program is the model, but in {native.decided_in}, where its attention has another kernel, the gradient of "
                f"{name} differs by {error:.1e}, where the model's own rounding is {max(own.get(name, 0.0), middle):.1e}"
            )
            return


def _largest(outcome: Verification) -> str:
    """Return the largest error, with its tensor's name."""
    kind = max(outcome.max_error, key=lambda kind: outcome.max_error[kind])
    name = outcome.worst.get(kind)
    return f"{outcome.max_error[kind]:.1e} ({kind}{f' of {name}' if name else ''})"


def _too_coarse(native: Verification, reference: Reference, double: Reference) -> str | None:
    """Return a problem where a program agrees in float64 but computes in fewer bits than the model, by its first result.

    A forward depends on rounding smoothly, unlike a backward through ReLU, so the model's own error against float64 is the measure.
    """
    if reference.losses:
        what, off = "loss", abs(native.parallel_losses[0] - reference.losses[0]) / max(abs(reference.losses[0]), 1e-12)
        own = abs(double.losses[0] - reference.losses[0]) / max(abs(double.losses[0]), 1e-12)
    else:
        what, off = "output", native.max_error["output"]
        own = max(
            (relative_error(exact, value) for outputs, exacts in zip(reference.outputs, double.outputs)
             for value, exact in zip(outputs.values(), exacts.values())),
            default=0.0,
        )  # fmt: skip
    places = min(_ULPS * torch.finfo(reference.dtype).eps, precision(reference.dtype).allowed[what])
    if off <= max(places, _ROUNDINGS * own):
        return None
    return (
        f"in fp64 the program is the model, but in {native.decided_in} its first {what} differs by {off:.1e}, where the model's own "
        f"rounding is {own:.1e}: it computes something in fewer bits than the model"
    )


def _without_double(native: Verification, reference: Reference, why: str) -> Verification:
    """Return the verdict where float64 can't be run: by the least precise dtype that the model computes in."""
    allowed = precision(reference.dtype).allowed
    native.tolerance = {kind: max(tolerance, allowed[kind]) for kind, tolerance in native.tolerance.items()}
    native.notes.append(f"an error could be rounding, and fp64 can't decide, since it can't be run ({why})")
    return native
