"""``graphpar verify``: an emitted program against the unpartitioned model, step by step."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from graphpar.cli.output import CHECK_FAILED, DONE, Result, program_folder, progress
from graphpar.errors import GraphparError
from graphpar.report_text import plural

if TYPE_CHECKING:
    from rich.console import Console

LISTED = 10
"""How many problems are printed before the rest is counted."""


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
    lines = [
        f" {plural(data['devices'], 'process', 'processes')} against the unpartitioned model, SGD with momentum",
        "",
    ]
    lines.append(" step   loss, reference   parallel          difference")
    for step, (expected, found) in enumerate(zip(losses["reference"], losses["parallel"])):
        lines.append(f" {step:4}   {expected:<17.8f} {found:<17.8f} {abs(expected - found):.1e}")
    lines += ["", " largest error, relative        tolerance         worst"]
    for name, error in data["max_error"].items():
        tolerance = data["tolerance"].get(name, math.inf)
        verdict = "" if float(error) <= tolerance else "   TOO LARGE"
        worst = data["worst"].get(name, "")
        lines.append(f"   {name:<12} {float(error):<15.2e} {tolerance:<17.1e} {worst}{verdict}".rstrip())
    problems = data.get("problems", [])
    if problems:
        lines += ["", *(f" {problem}" for problem in problems[:LISTED])]
    if len(problems) > LISTED:
        lines.append(f" and {len(problems) - LISTED} more")
    lines += ["", f" {'PASS' if data['ok'] else 'FAIL'}"]
    console.out("\n".join(lines), highlight=False)
