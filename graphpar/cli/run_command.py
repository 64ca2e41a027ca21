"""``graphpar run``: an emitted program on local processes, with weights and a batch from its model file.

out/ ──prepare──► weights, batch ──torchrun train.py──► a line as each step ends, beside what was predicted ──► a summary
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from graphpar.cli.output import CHECK_FAILED, DONE, Result, program_folder, progress, steps_shown
from graphpar.cli.parser import GENERATION
from graphpar.cli.plan_file import read_program, reading_report
from graphpar.codegen.package import import_stage
from graphpar.codegen.saving import record
from graphpar.errors import GraphparError
from graphpar.frontend.modelfile import example_batch, find_model_file, initial_weights, load_model_file
from graphpar.hardware.cluster import Cluster
from graphpar.parts import untied
from graphpar.runtime.checkpoints.checkpoint import check_fits
from graphpar.runtime.checkpoints.weights import check_file, save_tensors
from graphpar.runtime.debugging.rank_alone import Measured, Timed, measure
from graphpar.runtime.errors import LaunchError
from graphpar.runtime.generation.prompts import requested, text_file
from graphpar.runtime.launching.launch import torchrun
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.option_kinds import GENERATE, SCRIPTS, STEPS
from graphpar.runtime.plan_record import kept_report
from graphpar.runtime.rendezvous import on_gpus
from graphpar.runtime.stages.compiled import backend_of
from graphpar.runtime.stages.modules import check_files
from graphpar.text import bytes_text, plural, seconds_text, spread_text

TOKENIZER = "tokenizer.json"
ALONE_STEPS = 5
NOT_HERE = ", which this machine does not have: the times below are not comparable"
"""Steps of a rank alone, after two that are not timed."""


def run(options: argparse.Namespace) -> Result:
    """Run the program's script on local processes, or one of its ranks alone."""
    folder = program_folder(options.out)
    given = {name: getattr(options, name.replace("-", "_")) for name in GENERATION}
    generation = {name: value for name, value in given.items() if value is not None}
    if options.alone is not None:
        if generation:
            raise GraphparError(f"--{next(iter(generation))} would have no effect with --alone; leave one of them out.")
        if options.cuda_graphs:
            raise GraphparError("--cuda-graphs would have no effect with --alone; leave one of them out.")
        measured = measure(folder, options.alone, options.steps or ALONE_STEPS, compile=options.compile)
        found = {"out": str(folder), **asdict(measured)}
        here, status = _is_here(read_program(folder)[1], 1), DONE if measured.finite else CHECK_FAILED
        return Result(found, lambda console: show_alone(measured, here, console), status)
    data = launch(
        folder,
        options.steps,
        options.timeout,
        compile=options.compile,
        cuda_graphs=options.cuda_graphs,
        generation=generation,
    )
    return Result(data, lambda console: show(data, console))


def launch(
    folder: Path,
    steps: int | None = None,
    timeout_s: float = 3600,
    *,
    compile: bool | None = None,
    cuda_graphs: bool = False,
    generation: Mapping[str, Any] | None = None,
    checkpoint: Path | None = None,
    arguments: Sequence[str] = (),
) -> dict[str, Any]:
    """Make sure that there are weights and a batch, run ``train.py`` under torchrun, and read what it did.

    Each line that a rank prints goes to standard output at once.

    Args:
        steps: 10 by default.
        compile: whether ``torch.compile`` compiles the blocks, by default as planned; refused before anything starts where it can't.
        cuda_graphs: whether steps of training are replayed as one CUDA graph.
        generation: options of a program for generation, by name.
        checkpoint: where training goes on from, and saves; then on the data of ``train.py``, not on one batch.
        arguments: other options of the script.
    """
    program, plan = read_program(folder)
    generates = program.mode == GENERATE
    if generation and not generates:
        raise GraphparError(
            f"--{next(iter(generation))} is for programs compiled with --mode generate; this one is for {program.mode}."
        )
    if generates and (steps is not None or compile is not None):
        raise GraphparError(
            f"{'--steps' if steps is not None else '--compile'} is not for generation; see --prompt and --tokens."
        )
    if cuda_graphs and program.mode != "train":
        raise GraphparError(f"--cuda-graphs is for programs that train; this one is for {program.mode}.")
    steps = steps or 10
    script = folder / SCRIPTS[program.mode]
    if not script.is_file():
        raise GraphparError(f"{folder} has no {script.name}; compile the model again.")
    check_files(program)
    generation = checked(dict(generation or {}), folder, program) if generates else {}
    devices = program.world_size
    device = torch.device("cuda" if on_gpus(devices) else "cpu")
    if compile is not None:
        backend_of(program, compile, device)  # refuses what it can't
    with reading_report(folder / "plan.json"):
        predicted = prediction(folder, plan, devices)
    if checkpoint is None and not {"weights", "checkpoint"} & set(generation):
        prepare(folder, program)

    print(
        f"\n {folder} on {plural(devices, 'local process', 'local processes')}{_predicted_text(predicted, plan)}\n",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="graphpar_run_") as scratch, steps_shown(steps) as echo:
        history = Path(scratch) / "history.json"
        given = [] if compile is None else ["--compile" if compile else "--no-compile"]
        given += ["--cuda-graphs"] if cuda_graphs else []
        arguments = [*arguments, "--steps", str(steps), "--json", str(history), *given]
        if generates:
            arguments = ["--json", str(history), *script_arguments(generation)]
        elif checkpoint is not None:
            arguments += ["--checkpoint", str(checkpoint)]
        elif (folder / "batch.safetensors").is_file():  # else train.py makes random batches
            arguments += ["--batch", str(folder / "batch.safetensors")]
        try:
            result = torchrun(
                script, arguments, nproc=devices, timeout_s=timeout_s, folders=[scratch],
                on_stdout=echo,
                on_stderr=lambda line: print(line, file=sys.stderr, flush=True),
            )  # fmt: skip
        except LaunchError as error:
            if error.signal == signal.SIGKILL:
                raise LaunchError(
                    f"{error.message}{_memory_text(folder, plan)}", error.rank, error.details, signal=error.signal
                ) from None
            raise
        written = json.loads(history.read_text(encoding="utf-8")) if history.is_file() else []
    data = {
        "out": str(folder),
        "devices": devices,
        **({} if generates else {"steps": steps}),
        "seconds": round(result.seconds, 3),
        "predicted": predicted,
    }
    if generates:
        return {**data, **dict(written)}  # its seconds are those of generation
    if isinstance(written, dict):  # inference: the outputs' shapes
        return {**data, "outputs": written}
    names = {"loss": "loss", "gradient_norm": "gradient_norm", "seconds": "step_seconds"}
    return {**data, **{key: [record.get(name) for record in written] for name, key in names.items()}}


# ---- the prediction --------------------------------------------------------------------------------------------


def prediction(folder: Path, plan: Mapping[str, Any], devices: int) -> dict[str, Any] | None:
    """Read the predicted seconds of a step beside ``plan.json``, for which devices, and whether this machine has such
    (``here``)."""
    predicted = _predicted(folder, plan)
    if predicted is None:
        return None
    return {
        "step_time_s": predicted["step_time_s"],
        "spread_s": predicted.get("spread_s", 0.0),
        "cluster": predicted["cluster"],
        "figures": predicted["figures"],
        "here": _is_here(plan, devices),
    }


def _is_here(plan: Mapping[str, Any], devices: int) -> bool:
    """Whether this machine has such devices as the plan is for."""
    here = Cluster.of_this_machine(devices).device
    meant = Cluster.from_json(plan["cluster"]).device if plan.get("cluster") else here
    return meant.name == here.name or meant.kind == here.kind == "cpu"


def _predicted_text(predicted: Mapping[str, Any] | None, plan: Mapping[str, Any]) -> str:
    if predicted is None:
        return ""
    what = f"{spread_text(predicted['step_time_s'], predicted['spread_s'])} {STEPS[plan['mode']]}"
    other = "" if predicted["here"] else NOT_HERE
    return f"; predicted {what} for {predicted['cluster']} ({predicted['figures']}){other}"


def _predicted(folder: Path, plan: Mapping[str, Any]) -> Any:
    """What is predicted of a plan; None where it was not priced, or was edited since."""
    return (kept_report(folder / "plan.json", plan) or {}).get("predicted")


def _memory_text(folder: Path, plan: Mapping[str, Any]) -> str:
    """Compare the memory that the plan needs with that of this machine."""
    predicted = _predicted(folder, plan)
    if predicted is None:
        return ""
    peaks = predicted["peak_memory_bytes"]
    ranks = math.prod(plan["mesh"].values())
    together = sum(peaks) * ranks // len(peaks)
    here = bytes_text(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    needed = f"its {plural(ranks, 'process', 'processes')} need {bytes_text(together)} together"
    return f" According to the plan, {needed}; this machine has {here}."


# ---- weights and a batch ---------------------------------------------------------------------------------------


def prepare(folder: Path, program: Manifest) -> None:
    """Write ``weights/`` and ``batch.safetensors`` from the model file, where they are missing."""
    named = program.model_file
    weights, batch = folder / "weights", folder / "batch.safetensors"
    wants_batch = program.mode != GENERATE and not batch.is_file()
    if weights.is_dir() and (not wants_batch or not named):
        return

    if not named:
        raise GraphparError(f"{folder} has no weights, and its plan.json names no model file to make them from.")
    try:
        file = load_model_file(find_model_file(folder, named))
    except GraphparError:
        if weights.is_dir():  # they are all that is needed: train.py makes random batches
            return
        raise
    if wants_batch:
        save_tensors(example_batch(file, program.inputs), batch)
        record(folder, ["batch.safetensors"])
    if not weights.is_dir():
        with tempfile.TemporaryDirectory(prefix=".weights.", dir=folder) as scratch, progress("building the weights"):
            state = untied(initial_weights(file))
            inner = Path(scratch) / "weights"
            inner.mkdir()
            save_tensors(state, inner / "model.safetensors")
            os.rename(inner, weights)
            record(folder, ["weights/model.safetensors"])


# ---- generation ------------------------------------------------------------------------------------------------


def checked(generation: dict[str, Any], folder: Path, program: Manifest) -> dict[str, Any]:
    """Return what is asked for, with the tokenizer that is used.

    Raises:
        GraphparError, RuntimeProgramError: it does not fit the program, so that the ranks would refuse it.
    """
    if not generation.get("prompt") and not generation.get("tokens"):
        raise GraphparError("There is nothing to continue: give --prompt TEXT or --tokens IDS.")
    prompts: list[list[int]] = []
    if generation.get("prompt"):
        if "tokenizer" not in generation:
            generation = {**generation, "tokenizer": _tokenizer(folder, program)}
        texts = text_file(generation["tokenizer"])
        prompts = [texts.encode(prompt) for prompt in generation["prompt"]]
    choice = {
        name.replace("-", "_"): generation.get(name) for name in ("temperature", "top-k", "top-p", "repetition-penalty")
    }
    choice["do_sample"] = generation.get("sample")
    prompts += generation.get("tokens", ())
    requested(program, prompts, generation.get("max-new-tokens"), None, generation.get("seed", 0), choice)
    if "weights" in generation or "checkpoint" in generation:  # are they of the model? Names and shapes, no values
        stages = [import_stage(folder, stage.index) for stage in program.stages]
        if "weights" in generation:
            check_file(generation["weights"], stages, program)
        else:
            check_fits(generation["checkpoint"], stages, program)
    return generation


def script_arguments(generation: dict[str, Any]) -> list[str]:
    """Return the options as ``generate.py`` takes them."""
    found: list[str] = []
    for name, value in generation.items():
        if name == "sample":
            found.append("--sample" if value else "--no-sample")
        elif name == "tokens":
            found += [f"--tokens={','.join(map(str, ids))}" for ids in value]
        else:
            found += [f"--{name}={each}" for each in (value if isinstance(value, list) else [value])]
    return found


def _tokenizer(folder: Path, program: Manifest) -> Path:
    """Return the tokenizer beside the program or the model file."""
    places = [folder]
    if program.model_file:
        places = [folder, Path(find_model_file(folder, program.model_file)).parent]
    found = next((place / TOKENIZER for place in places if (place / TOKENIZER).is_file()), None)
    if found is None:
        raise GraphparError(
            f"--prompt needs a tokenizer: there is no {TOKENIZER} in {' or '.join(map(str, places))}. Name one with --tokenizer, or "
            "give token ids with --tokens."
        )
    return found


# ---- for people ------------------------------------------------------------------------------------------------


def show(data: dict[str, Any], console: Console) -> None:
    """Print shapes of outputs, and the median step time beside the prediction; the steps themselves have been printed."""
    if "texts" in data:
        return
    lines = [f" {name} {shape}" for name, shape in data.get("outputs", {}).items()]
    seconds = data.get("step_seconds")  # of the steps after those of a checkpoint; inference has none
    made = data["steps"] if seconds is None else len(seconds)
    lines.append(f" {plural(made, 'step')} in {data['seconds']:.1f} s, including the start of the processes")
    taken = [each for each in seconds or () if each is not None]
    if len(taken) > 1:
        middle = statistics.median(taken[1:])
        lines[-1] += f"; a step took {seconds_text(middle)} (median, without the first)"
        predicted = data["predicted"]
        if predicted is not None and predicted["here"]:
            lines[-1] += f", {middle / predicted['step_time_s']:.2f} times the prediction"
    console.out("\n" + "\n".join(lines), highlight=False)


def show_alone(measured: Measured, here: bool, console: Console) -> None:
    """Print what a rank alone took, next to what was predicted of it without communication, for devices that are ``here`` or not."""
    place = ", ".join(f"{axis}={at}" for axis, at in measured.place.items())
    where = f", at {place}," if place else ""
    predicted = measured.predicted or {}
    beside = f"; predicted for {predicted['cluster']}{'' if here else NOT_HERE}" if predicted else ""
    console.out(
        f"\n Rank {measured.rank} of {measured.world_size}{where} alone on {measured.device}{beside}\n", highlight=False
    )
    whole = Timed("a step", measured.steps, measured.step_s, predicted.get("step_s"))
    console.print(_timed_table([whole, *measured.parts, *measured.actions, *measured.blocks]))
    lines = [_bytes_line("allocated", measured.allocated_bytes, predicted.get("allocated_bytes"))]
    if measured.reserved_bytes is not None:
        lines.append(_bytes_line("reserved", measured.reserved_bytes, predicted.get("reserved_bytes")))
    if predicted:
        missing = seconds_text(predicted["missing_communication_s"])
        lines.append(
            f"Not here: communication that computation does not hide, predicted {missing} a step, and waiting for other ranks"
        )
    if not measured.finite:
        lines.append("The loss or the gradient's norm is not finite")
    console.out("\n" + "\n".join(f" {line}" for line in lines), highlight=False)


def _timed_table(rows: Sequence[Timed]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 1))
    for heading in ("median of", "runs", "measured", "predicted", "ratio"):
        table.add_column(heading, justify="left" if heading == "median of" else "right", no_wrap=True)
    for row in rows:
        known = row.predicted_s
        beside = ("", "") if not known else (seconds_text(known), f"{row.median_s / known:.2f}")
        table.add_row(row.name, str(row.runs), seconds_text(row.median_s), *beside)
    return table


def _bytes_line(what: str, measured: int, predicted: int | None) -> str:
    beside = f", predicted {bytes_text(predicted)}: {measured / predicted:.3f} of it" if predicted else ""
    return f"Peak memory {what}: {bytes_text(measured)}{beside}"
