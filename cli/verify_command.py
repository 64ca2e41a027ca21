"""``graphpar verify``: an emitted program against the unpartitioned model, step by step."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from graphpar.cli.output import CHECK_FAILED, DONE, Result, program_folder, progress
from graphpar.errors import GraphparError

if TYPE_CHECKING:
    from rich.console import Console


def run(options: argparse.Namespace) -> Result:
    if options.steps < 1:
        raise GraphparError(f"--steps is {options.steps}; it must be at least 1.")
    from graphpar.verification import verify_parts

    folder = program_folder(options.out)
    with progress(f"running {options.steps} steps, partitioned and not"):
        result = verify_parts(folder, steps=options.steps)
    data: dict[str, Any] = result.to_json()
    return Result(data, lambda console: show(data, console), DONE if result.ok else CHECK_FAILED)


def show(data: dict[str, Any], console: Console) -> None:
    """Losses side by side, the largest errors with their names, and the verdict."""
    losses = data["loss"]
    lines = [f" {data['devices']} processes against one, {data['steps']} steps of SGD with momentum", ""]
    if losses["reference"]:
        lines.append(" step   loss, reference     parallel        difference")
    for step, (ours, theirs) in enumerate(zip(losses["reference"], losses["parallel"])):
        lines.append(f" {step:4}   {ours:<18.8f}  {theirs:<14.8f}  {abs(ours - theirs):.1e}")
    lines += ["", " largest error (relative)        tolerance   where"]
    for name, error in data["max_error"].items():
        tolerance = data["tolerance"].get(name)
        allowed = "" if tolerance is None else f"{tolerance:.1e}"
        worst = data["worst"].get(name) or ""
        shown = "" if error is None else f"{error:.2e}"
        lines.append(f"   {name:<12} {shown:<15}  {allowed:<10}  {worst}".rstrip())
    lines += ["", f" {'PASS' if data['ok'] else 'FAIL'}"]
    for key in ("error", "missing_gradients"):
        if data.get(key):
            lines.append(f"   {key.replace('_', ' ')}: {data[key]}")
    console.out("\n".join(lines), highlight=False)
