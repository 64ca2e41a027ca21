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
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphpar.cli import generation_options
from graphpar.cli.arguments import Commands, add_json, add_program, count, seconds
from graphpar.cli.generation_options import checked
from graphpar.cli.output import Result, program_folder, progress, steps_shown
from graphpar.errors import GraphparError
from graphpar.runtime.modes import GENERATE, SCRIPTS, STEPS
from graphpar.text import bytes_text, plural, seconds_text

if TYPE_CHECKING:
    from rich.console import Console

    from graphpar.runtime.manifest import Manifest


def add_parser(commands: Commands) -> None:
    """Add the parser of the command."""
    parser = commands.add_parser("run", help="run an emitted program on this machine (torchrun)")
    add_program(parser)
    parser.add_argument("--steps", type=count, help="optimizer steps (default: 10)")
    parser.add_argument("--compile", action="store_true", help="compile the blocks with torch.compile")
    generation_options.add_options(parser)
    parser.add_argument("--timeout", type=seconds, default=3600, help="seconds until it is ended (default: 3600)")
    add_json(parser)


def run(options: argparse.Namespace) -> Result:
    """Run the program's script on local processes."""
    data = launch(
        program_folder(options.out),
        options.steps,
        options.timeout,
        compile=options.compile,
        asked=generation_options.given(options),
    )
    return Result(data, lambda console: show(data, console))


def launch(
    folder: Path,
    steps: int | None = None,
    timeout_s: float = 3600,
    *,
    compile: bool = False,
    asked: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Make sure that there are weights and a batch, run ``train.py`` under torchrun, and read what it did.

    Each line that a rank prints goes to standard output at once.

    Args:
        steps: 10 by default.
        compile: ``torch.compile`` compiles the blocks; refused before anything starts where it can't.
        asked: options of a program for generation, by name.
    """
    import torch

    from graphpar.cli.plan_file import read_program, reading_report
    from graphpar.runtime.compiled import check_compiles
    from graphpar.runtime.distributed import on_gpus
    from graphpar.runtime.errors import LaunchError
    from graphpar.runtime.launch import torchrun
    from graphpar.runtime.stages import check_files

    program, plan = read_program(folder)
    generates = program.mode == GENERATE
    if asked and not generates:
        raise GraphparError(
            f"--{next(iter(asked))} is for programs compiled with --mode generate; this one is for {program.mode}."
        )
    if generates and (steps is not None or compile):
        raise GraphparError(
            f"{'--steps' if steps is not None else '--compile'} is not for generation; see --prompt and --tokens."
        )
    steps = steps or 10
    script = folder / SCRIPTS[program.mode]
    if not script.is_file():
        raise GraphparError(f"{folder} has no {script.name}; compile the model again.")
    check_files(program)
    asked = checked(dict(asked or {}), folder, program) if generates else {}
    if compile:
        check_compiles(program, "inductor", torch.device("cuda" if on_gpus(program.world_size) else "cpu"))
    devices = program.world_size
    with reading_report(folder / "plan.json"):
        predicted = prediction(folder, plan, devices)
    if not {"weights", "checkpoint"} & set(asked):
        prepare(folder, program)

    print(
        f"\n {folder} on {plural(devices, 'local process', 'local processes')}{_predicted_text(predicted, plan)}\n",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="graphpar_run_") as scratch, steps_shown(steps) as echo:
        history = Path(scratch) / "history.json"
        arguments = ["--steps", str(steps), "--json", str(history), *(["--compile"] if compile else [])]
        if generates:
            arguments = ["--json", str(history), *generation_options.script_arguments(asked)]
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
    from graphpar.hardware.cluster import Cluster

    predicted = _predicted(folder, plan)
    if predicted is None:
        return None
    here = Cluster.of_this_machine(devices).device
    meant = Cluster.from_json(plan["cluster"]).device if plan.get("cluster") else here
    return {
        "step_time_s": predicted["step_time_s"],
        "cluster": predicted["cluster"],
        "figures": predicted["figures"],
        "here": meant.name == here.name or meant.kind == here.kind == "cpu",
    }


def _predicted_text(predicted: Mapping[str, Any] | None, plan: Mapping[str, Any]) -> str:
    if predicted is None:
        return ""
    what = f"{seconds_text(predicted['step_time_s'])} {STEPS[plan['mode']]}"
    other = "" if predicted["here"] else ", which this machine does not have: the times below do not compare"
    return f"; predicted {what} for {predicted['cluster']} ({predicted['figures']}){other}"


def _predicted(folder: Path, plan: Mapping[str, Any]) -> Any:
    """What is predicted of a plan; None where it was not priced, or was edited since."""
    from graphpar.runtime.plan_record import kept_report

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

    from graphpar.codegen.saving import record
    from graphpar.frontend.modelfile import example_batch, find_model_file, initial_weights, load_model_file
    from graphpar.parts import untied
    from graphpar.runtime.tensor_file import save_tensors

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


def show(data: dict[str, Any], console: Console) -> None:
    """Print shapes of outputs, and the median step time beside the prediction; the steps themselves have been printed."""
    if "texts" in data:
        return
    lines = [f" {name} {shape}" for name, shape in data.get("outputs", {}).items()]
    lines.append(f" {plural(data['steps'], 'step')} in {data['seconds']:.1f} s, with the start of the processes")
    taken = [seconds for seconds in data.get("step_seconds", ()) if seconds is not None]
    if len(taken) > 1:
        middle = statistics.median(taken[1:])
        lines[-1] += f"; a step took {seconds_text(middle)} (median, without the first)"
        predicted = data["predicted"]
        if predicted is not None and predicted["here"]:
            lines[-1] += f", {middle / predicted['step_time_s']:.2f} times what was predicted"
    console.out("\n" + "\n".join(lines), highlight=False)
