"""``graphpar run``: an emitted program on local processes, with weights and a batch from its model file."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphpar.cli.output import Result, program_folder, progress
from graphpar.errors import GraphparError

if TYPE_CHECKING:
    from rich.console import Console


def run(options: argparse.Namespace) -> Result:
    if options.steps < 1:
        raise GraphparError(f"--steps is {options.steps}; it must be at least 1.")
    data = launch(program_folder(options.out), options.steps, options.timeout)
    return Result(data, lambda console: show(data, console))


def launch(folder: Path, steps: int, timeout_s: float = 3600) -> dict[str, Any]:
    """Make sure that there are weights and a batch, run ``train.py`` under torchrun, and read what it did."""
    from graphpar.runtime.launch import torchrun

    script = folder / "train.py"
    if not script.is_file():
        raise GraphparError(f"{folder} has no train.py; compile the model again.")
    plan = json.loads((folder / "plan.json").read_text())
    prepare(folder, plan)
    devices = math.prod(plan["mesh"].values())
    with tempfile.TemporaryDirectory(prefix="graphpar_run_") as scratch:
        history = Path(scratch) / "history.json"
        arguments = ["--steps", str(steps), "--json", str(history)]
        if (folder / "batch.safetensors").is_file():  # else train.py makes random batches
            arguments += ["--batch", str(folder / "batch.safetensors")]
        with progress(f"running {steps} steps on {devices} processes"):
            result = torchrun(script, arguments, nproc=devices, timeout_s=timeout_s)
        sys.stderr.write(result.stderr)
        written = json.loads(history.read_text()) if history.is_file() else []
    data = {"out": str(folder), "devices": devices, "steps": steps, "seconds": round(result.seconds, 3)}
    if isinstance(written, dict):  # inference: the outputs' shapes
        return {**data, "outputs": written}
    names = ("loss", "gradient_norm")
    return {**data, **{name: [record.get(name) for record in written] for name in names}}


def prepare(folder: Path, plan: dict[str, Any]) -> None:
    """Write ``weights/`` and ``batch.safetensors`` from the model file, where they are missing."""
    weights, batch = folder / "weights", folder / "batch.safetensors"
    named = plan.get("model_file")
    if weights.is_dir() and (batch.is_file() or not named):
        return
    from safetensors.torch import save_file

    from graphpar.api import DTYPES, untied
    from graphpar.modelfile import example_batch, find_model_file, initial_weights, load_model_file

    if not named:
        raise GraphparError(f"{folder} has no weights, and its plan.json names no model file to make them from.")
    try:
        file = load_model_file(find_model_file(folder, named))
    except GraphparError:
        if weights.is_dir():  # they are all that is needed: train.py makes random batches
            return
        raise
    if not batch.is_file():
        save_file(example_batch(file, plan["interface"]["inputs"]), str(batch))
    if not weights.is_dir():
        with tempfile.TemporaryDirectory(prefix=".weights.", dir=folder) as scratch, progress("building the weights"):
            state = untied(initial_weights(file, DTYPES[plan.get("dtype", "fp32")]))
            inner = Path(scratch) / "weights"
            inner.mkdir()
            save_file(state, str(inner / "model.safetensors"))
            os.rename(inner, weights)


def show(data: dict[str, Any], console: Console) -> None:
    """The loss of every step, or the shapes of the outputs."""
    console.out(f"\n {data['out']} on {data['devices']} local processes, {data['seconds']:.1f} s\n", highlight=False)
    for name, shape in data.get("outputs", {}).items():
        console.out(f" {name} {shape}", highlight=False)
    for step, (loss, norm) in enumerate(zip(data.get("loss", ()), data.get("gradient_norm", ()))):
        shown = "" if norm is None else f"   gradient norm {norm:.4f}"
        console.out(f" step {step:4}   loss {loss:.6f}{shown}", highlight=False)
