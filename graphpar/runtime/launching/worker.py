"""Run emitted programs for verification: several jobs in one launch, since starting takes longer than running.

parent: run_jobs([job_0, job_1], world_size=2, timeout_s=300)
ranks:  python -m graphpar.runtime.launching.worker TIMEOUT job_0 job_1      (under torchrun)

job/job.json              in:  {"program", "steps", "optimizer": {"lr", "momentum"}, "seed", "weights", "batches": [file, ...]}
                               "max_norm": if it is there, the last optimizer step uses the gradients of one batch more,
                               added up and clipped; "double": compute in float64; "gradients": files of whole gradients, one a step, with
                               which the model file's own optimizer then steps
job/rank_0/*.safetensors  out: begun/{name} (buffers), grad/{step}/{name}, param/{name}, buffer/{name}, as the rank holds them (its shards);
                               stepped/{name}, the parameters after the steps of the own optimizer;
                               grad/accumulated/{name}; of an inference program output/{step}/{name}.
                               A file a step, written when the step is done, so that no rank holds the tensors of two
job/rank_0.json           out: {"losses", "accumulated_loss", "evaluated_loss", "norm", "missing_gradients", "whole_backward_stages",
                               "error", "fatal"}
                               with dropout that kernels draw, "drawn": the seed of each attention and what its query was
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from graphpar.runtime.checkpoints.weights import WeightFile, write_tensors
from graphpar.runtime.debugging.fp64 import in_double
from graphpar.runtime.distributed import Ranks, agreed, lost_peer, start
from graphpar.runtime.errors import AgreedError, LaunchError, RuntimeProgramError, root_cause
from graphpar.runtime.launching.launch import torchrun
from graphpar.runtime.option_kinds import GENERATE, TRAIN
from graphpar.runtime.pipeline import Pipeline
from graphpar.runtime.stages.dropout import KERNEL, Drawn, watch_seeds
from graphpar.runtime.state.fully_sharded import padded

GROUP_TIMEOUT_S = 120.0
"""How long a rank waits for another before it gives up."""
GENERATED = 8
"""How many tokens follow each prompt where generation is checked."""


@dataclass(frozen=True)
class JobResult:
    """The outcome of a job: ``error`` is ``None`` when every rank finished it."""

    folder: Path
    world_size: int
    error: str | None
    losses: tuple[float, ...]
    missing_gradients: tuple[tuple[str, ...], ...]
    """For each rank, the parameters that got no gradient in some step."""
    whole_backward_stages: tuple[int, ...] = ()
    """Stages whose backward a zero-bubble schedule could not split."""
    rank_losses: tuple[tuple[float, ...], ...] = ()
    """The losses as each rank of the last stage saw them; ``losses`` are the first one's."""
    accumulated_losses: tuple[float, ...] = ()
    """The loss of the batch whose gradients were added to the last step's, as each rank of the last stage saw it."""
    loss_dtypes: tuple[str, ...] = ()
    """The dtype of the loss on each rank of the last stage."""
    drawn: tuple[tuple[Drawn, ...], ...] = ()
    """The dropouts of attention that each rank would have drawn by a kernel; they are off while a job runs."""
    evaluated_losses: tuple[float, ...] = ()
    """The loss of the last step's batch in evaluation after it, as each rank of the last stage saw it."""
    norms: tuple[float, ...] = ()
    """The norm of those gradients before they were clipped, as each rank saw it."""

    def tensors(self, rank: int) -> Mapping[str, Tensor]:
        """Open what rank ``rank`` wrote, each tensor read when it is asked for."""
        return WeightFile(self.folder / f"rank_{rank}")


def run_jobs(
    jobs: Sequence[str | Path],
    world_size: int,
    timeout_s: float,
    group_timeout_s: float = GROUP_TIMEOUT_S,
    folders: Sequence[str | Path] = (),
) -> list[JobResult]:
    """Run jobs one after the other on ``world_size`` local ranks, in as few launches as possible.

    A job that fails on all ranks together lets the next one run; one that fails otherwise ends its launch,
    and the jobs after it get another. ``timeout_s`` bounds all launches together. ``folders``: see
    :func:`graphpar.runtime.launching.launch.torchrun`.
    """
    places = [Path(job).resolve() for job in jobs]
    for folder in places:
        for stale in folder.glob("rank_*"):
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
    results: list[JobResult] = []
    deadline = time.monotonic() + timeout_s
    while len(results) < len(places):
        pending = places[len(results) :]
        failure: LaunchError | None = None
        try:
            arguments = [str(group_timeout_s), *map(str, pending)]
            remaining = max(deadline - time.monotonic(), 0.0)
            torchrun(
                "graphpar.runtime.launching.worker",
                arguments,
                nproc=world_size,
                timeout_s=remaining,
                module=True,
                folders=folders,
            )
        except LaunchError as error:
            failure = error
        for folder in pending:
            files = [folder / f"rank_{rank}.json" for rank in range(world_size)]  # none of a rank that ended before
            reports = [json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {} for file in files]
            results.append(_result(folder, world_size, reports, failure))
            if not all(reports) or any(report["fatal"] for report in reports):
                break
        if failure is not None and time.monotonic() >= deadline:
            results += [JobResult(f, world_size, f"not run: {failure}", (), ()) for f in places[len(results) :]]
    return results


def _result(folder: Path, world_size: int, reports: list[dict[str, Any]], failure: LaunchError | None) -> JobResult:
    error = next((report["error"] for report in reports if report.get("error")), None)
    if error is None and not all(reports):
        error = str(failure) if failure is not None else "a rank wrote no report"
    losses = tuple(tuple(report["losses"]) for report in reports if report.get("losses"))
    missing = tuple(tuple(report.get("missing_gradients", ())) for report in reports)
    whole = tuple(sorted({index for report in reports for index in report.get("whole_backward_stages", ())}))
    accumulated, evaluated, norms, dtypes = (
        tuple(report[name] for report in reports if report.get(name) is not None)
        for name in ("accumulated_loss", "evaluated_loss", "norm", "loss_dtype")
    )
    drawn = tuple(tuple(Drawn(*each) for each in report.get("drawn", ())) for report in reports)
    first = losses[0] if losses else ()
    return JobResult(
        folder, world_size, error, first, missing, whole, losses, accumulated, dtypes, drawn, evaluated, norms
    )


def main(arguments: Sequence[str]) -> None:
    """Run one rank of a launch."""
    with start(float(arguments[0])) as ranks:
        for folder in arguments[1:]:
            _run(Path(folder), ranks)


@dataclass
class _Results:
    """What this rank found: figures in ``report``, tensors in files of ``folder``."""

    folder: Path
    report: dict[str, Any] = field(
        default_factory=lambda: {"losses": None, "missing_gradients": [], "error": None, "fatal": False}
    )

    def keep(self, file: str, tensors: Mapping[str, Tensor]) -> None:
        """Write ``tensors``; names that share memory get a copy each."""
        self.folder.mkdir(exist_ok=True)
        write_tensors(self.folder / f"{file}.safetensors", tensors)

    def close(self) -> None:
        """Write the report."""
        self.folder.with_suffix(".json").write_text(json.dumps(self.report), encoding="utf-8")


def _run(folder: Path, ranks: Ranks) -> None:
    results = _Results(folder / f"rank_{ranks.rank}")
    try:
        job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
        with in_double() if job.get("double") else nullcontext():
            _work(job, ranks, results)
    except AgreedError as error:
        results.report["error"] = str(error)
    except Exception as error:
        cause = root_cause(error)
        results.report["error"] = f"rank {ranks.rank}: {type(cause).__name__}: {cause}"
        results.report["fatal"] = True
        if not lost_peer(error):
            results.close()
        raise
    results.close()


def _work(job: dict[str, Any], ranks: Ranks, results: _Results) -> None:
    torch.manual_seed(job["seed"])
    with Pipeline(job["program"], ranks.device, seed=job["seed"], compile=False) as pipeline:
        if job.get("loss_scale") is not None:
            pipeline.loss_scale = job["loss_scale"]
        pipeline.load_weights(job["weights"])
        results.keep("begun", {f"begun/{name}": value for name, value in _buffers(pipeline)})
        drawn = watch_seeds(pipeline.package) if pipeline.program.dropout == KERNEL else None
        if pipeline.program.mode != TRAIN:
            for step in range(job["steps"]):
                outputs = pipeline.infer(load_file(job["batches"][step]), step=step) or {}
                results.keep(f"output_{step}", {f"output/{step}/{name}": value for name, value in outputs.items()})
            if pipeline.program.mode == GENERATE:
                (tokens,) = load_file(job["batches"][job["steps"] - 1]).values()
                _check_generated(pipeline, tokens)
        else:
            if job.get(
                "generates"
            ):  # before, too: so that what it keeps of weights is old afterwards, and what it writes is seen
                pipeline.logits(_sequences(pipeline, load_file(job["batches"][0])))
            _train(pipeline, job, results)
            buffers = {f"buffer/{name}": value for name, value in _buffers(pipeline)}
            results.keep("state", _parameters(pipeline, "param") | buffers)
            if job.get("evaluates"):
                _evaluate(pipeline, load_file(job["batches"][job["steps"] - 1]), results)
            if job.get("generates"):
                _generate(pipeline, load_file(job["batches"][job["steps"] - 1]), results)
            if job.get("gradients"):
                _step_own(pipeline, job["gradients"])
                results.keep("stepped", _parameters(pipeline, "stepped"))
        if drawn is not None:
            results.report["drawn"] = [dataclasses.astuple(each) for each in drawn]
        if pipeline.program.mode != TRAIN:
            return
    results.report["whole_backward_stages"] = pipeline.whole_backward_stages


def _evaluate(pipeline: Pipeline, batch: Mapping[str, Tensor], results: _Results) -> None:
    """Keep the loss of a batch in evaluation, and all that the program offers of the model's outputs."""
    offered = bool(pipeline.program.offered_outputs)
    if (found := pipeline.eval(batch, outputs=offered)) is not None:
        results.report["evaluated_loss"] = float(found.pop("loss"))
        results.keep("evaluated", {f"output/evaluation/{name}": value for name, value in found.items()})


def _generate(pipeline: Pipeline, batch: Mapping[str, Tensor], results: _Results) -> None:
    """Keep the logits of the first tokens of a batch, computed as between steps, and check what continues them."""
    assert pipeline.between is not None
    (logits,), tokens = pipeline.between.program.outputs, _sequences(pipeline, batch)
    if (found := pipeline.logits(tokens)) is not None:
        results.keep("generated", {f"output/generation/{logits.name}": found})
    _check_generated(pipeline, tokens)


def _sequences(pipeline: Pipeline, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the first tokens of a batch, as many sequences as are generated at a time."""
    assert pipeline.between is not None
    (given,) = pipeline.between.program.inputs
    return batch[given.name][: given.shape[0]]


def _check_generated(pipeline: Pipeline, tokens: Tensor) -> None:
    """Continue prompts of several lengths, and check that each new token is the likeliest by the logits of the whole sequence.

    Raises:
        AgreedError: one is not, by more than rounding.
    """
    tokens = tokens.clone()
    half = tokens.size(1) // 2
    prompts = [row[: max(1, half - number % 3)].tolist() for number, row in enumerate(tokens)]
    found = pipeline.generate(prompts, min(GENERATED, half), do_sample=False, repetition_penalty=1.0)
    for row, prompt, new in zip(tokens, prompts, found):
        row[len(prompt) : len(prompt) + len(new)] = torch.tensor(new)
    logits = pipeline.logits(tokens)
    with agreed():
        if logits is not None:
            for number, (prompt, new) in enumerate(zip(prompts, found)):
                _check_likeliest(logits[number, len(prompt) - 1 :][: len(new)], new, f"sequence {number}", len(prompt))


def _check_likeliest(logits: Tensor, tokens: Sequence[int], sequence: str, first: int) -> None:
    """Check that tokens are the likeliest by their logits [n, vocabulary], but for rounding.

    Raises:
        RuntimeProgramError: one is not.
    """
    chosen = torch.tensor(tokens, device=logits.device).unsqueeze(-1)
    below = logits.amax(-1) - logits.gather(-1, chosen).squeeze(-1)
    place = int(below.argmax())
    if not float(below[place]) <= torch.finfo(logits.dtype).eps ** 0.5 * float(logits.abs().max()):
        raise RuntimeProgramError(
            f"after {first + place} tokens of {sequence} the program chose token {tokens[place]}, whose logit is "
            f"{float(below[place]):.3g} below that of the likeliest"
        )


def _train(pipeline: Pipeline, job: dict[str, Any], results: _Results) -> None:
    report = results.report
    parameters = list(pipeline.parameters())
    optimizer = torch.optim.SGD(parameters, **job["optimizer"]) if parameters else None
    losses: list[float] = []
    missing: set[str] = set()
    for step in range(job["steps"]):
        loss = pipeline.step(load_file(job["batches"][step]), step=step)
        if loss is not None:
            losses.append(float(loss))
            report["loss_dtype"] = str(loss.dtype).removeprefix("torch.")
        missing |= _keep_gradients(pipeline, step, results)
        if step == job["steps"] - 1 and job.get("max_norm") is not None:
            loss = pipeline.step(load_file(job["batches"][step + 1]), step=step + 1)
            report["accumulated_loss"] = None if loss is None else float(loss)
            report["norm"] = float(pipeline.clip_grad_norm_(job["max_norm"]))
            missing |= _keep_gradients(pipeline, "accumulated", results)
        if optimizer is not None:
            optimizer.step()
        pipeline.zero_grad()
    report["losses"] = losses if pipeline.has_last_stage else None
    report["missing_gradients"] = sorted(missing)


def _keep_gradients(pipeline: Pipeline, step: int | str, results: _Results) -> set[str]:
    """Write the gradients of this rank's stages, under every name, and return the names of those missing."""
    gradients = pipeline.whole_gradients()
    results.keep(f"gradients_{step}", {f"grad/{step}/{name}": padded(gradient) for name, gradient in gradients.items()})
    return {
        name
        for stage in pipeline.stages
        for name, parameter in stage.named_parameters(remove_duplicate=False)
        if parameter.requires_grad and name not in gradients
    }


def _step_own(pipeline: Pipeline, gradients: Sequence[str]) -> None:
    """Step the model file's optimizer and schedule with the gradients of these files."""
    optimizer = pipeline.optimizer()
    schedule = pipeline.lr_schedule(optimizer)
    for file in gradients:
        pipeline.set_gradients(WeightFile(file))
        optimizer.step()
        schedule.step()
        pipeline.zero_grad()


def _parameters(pipeline: Pipeline, kind: str) -> dict[str, Tensor]:
    """The stages' parameters, their main values where they are apart, under every name."""
    values, stages = pipeline.state_dict(), pipeline.stages
    names = [name for stage in stages for name, _ in stage.named_parameters(remove_duplicate=False)]
    return {f"{kind}/{name}": padded(values[name]) for name in names}


def _buffers(pipeline: Pipeline) -> Iterator[tuple[str, Tensor]]:
    """Yield the stages' buffers and constants, under every name."""
    for stage in pipeline.stages:
        yield from stage.named_buffers(remove_duplicate=False)


if __name__ == "__main__":
    main(sys.argv[1:])
