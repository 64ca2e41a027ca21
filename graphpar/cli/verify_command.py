"""``graphpar verify``: an emitted program against the unpartitioned model, step by step. ``graphpar check``: its types."""

from __future__ import annotations

import argparse
import math
import textwrap
from typing import Any

from rich.console import Console

from graphpar import verification
from graphpar.cli.output import CHECK_FAILED, DONE, Result, phases, program_folder, progress
from graphpar.text import plural
from graphpar.verification.recorded import function_of
from graphpar.verification.type_check import check_folder

LISTED = 10
"""How many problems are printed; the rest is counted."""

WIDTH = 100
"""Width of prose in characters."""


def verify(options: argparse.Namespace) -> Result:
    """Train the program and the model side by side and compare; the exit code is 1 where they differ."""
    folder = program_folder(options.out)
    reference = function_of(options.reference) if options.reference else None
    with phases() as phase:
        result = verification.verify_parts(
            folder, steps=options.steps, reference=reference, fp64=options.fp64, on_phase=phase
        )
    data: dict[str, Any] = result.to_json()
    return Result(data, lambda console: show(data, console), DONE if result.ok else CHECK_FAILED)


def check(options: argparse.Namespace) -> Result:
    """Check the types of every stage; the exit code is 1 where a problem is found."""
    folder = program_folder(options.out)
    with progress("checking the types of every stage"):
        result = check_folder(folder)
    data: dict[str, Any] = result.to_json()
    return Result(data, lambda console: _show_types(data, console), DONE if result.ok else CHECK_FAILED)


def show(data: dict[str, Any], console: Console) -> None:
    """Print losses side by side, the largest errors with their tensors, how it was decided, and the verdict."""
    what = (
        "SGD with momentum" if data["loss"]["reference"] else f"outputs of {plural(data['steps'], 'batch', 'batches')}"
    )
    lines = [f" {plural(data['devices'], 'process', 'processes')} against the unpartitioned model, {what}"]
    if data["data"]:
        lines += textwrap.wrap(data["data"], WIDTH, initial_indent=" ", subsequent_indent=" ")
    if data["ran"]:
        lines += [*_losses(data), *_errors(data)]
    said = [*data["notes"]]
    if (first := data["first_difference"]) is not None:
        said.append(f"the first difference: {first['text']}")
    for text in said:
        lines += ["", *textwrap.wrap(text, WIDTH, initial_indent=" ", subsequent_indent=" ")]
    problems = data["problems"]
    if problems:
        lines += ["", *(f" {problem}" for problem in problems[:LISTED])]
    if len(problems) > LISTED:
        lines.append(f" and {len(problems) - LISTED} more")
    lines += ["", f" {'PASS' if data['ok'] else 'FAIL'}{', decided in fp64' if data['native'] is not None else ''}"]
    console.out("\n".join(lines), highlight=False)


def _errors(data: dict[str, Any]) -> list[str]:
    """The table of the largest errors by kind."""
    lines = ["", " largest error, relative        tolerance         worst"]
    for name, error in data["max_error"].items():
        tolerance = data["tolerance"].get(name, math.inf)
        verdict = "" if float(error) <= tolerance else "   TOO LARGE"
        worst = data["worst"].get(name, "")
        lines.append(f"   {name:<12} {float(error):<15.2e} {tolerance:<17.1e} {worst}{verdict}".rstrip())
    return lines


def _losses(data: dict[str, Any]) -> list[str]:
    """The table of losses, the clipped step's below; nothing where the program has no loss."""
    losses = data["loss"]
    if not losses["reference"]:
        return []
    lines = ["", " step   loss, reference   parallel          difference"]
    rows = [(str(step), pair) for step, pair in enumerate(zip(losses["reference"], losses["parallel"]))]
    rows += [
        ({"loss": " +", "norm": "norm"}[what], (pair["reference"], pair["parallel"]))
        for what, pair in data["accumulated"].items()
    ]
    for name, (expected, found) in rows:
        lines.append(f" {name:>4}   {expected:<17.8f} {found:<17.8f} {abs(expected - found):.1e}")
    if data["accumulated"]:
        lines.append("   +: a batch whose gradients were added to the last step's; norm: theirs, before clipping")
    return lines


def _show_types(data: dict[str, Any], console: Console) -> None:
    """Print what was checked, what was not and why, the problems, and the verdict."""
    lines = [
        f" {plural(data['stages'], 'stage')} for {plural(data['devices'], 'device')} under spmd_types: "
        f"{plural(data['checked'], 'operator')} checked, {len(data['unchecked'])} kinds unchecked"
    ]
    lines += [f"   unchecked: {name}: {reason}" for name, reason in data["unchecked"].items()]
    lines += ["", *(f" {problem}" for problem in data["problems"])] if data["problems"] else []
    lines += ["", f" {'PASS' if data['ok'] else 'FAIL'}"]
    console.out("\n".join(lines), highlight=False)
