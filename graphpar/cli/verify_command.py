"""``graphpar verify``: an emitted program against the unpartitioned model, step by step."""

from __future__ import annotations

import argparse
import math
import textwrap
from typing import TYPE_CHECKING, Any

from graphpar.cli.arguments import Commands, add_json, add_program, count
from graphpar.cli.output import CHECK_FAILED, DONE, Result, phases, program_folder
from graphpar.text import plural

if TYPE_CHECKING:
    from rich.console import Console

LISTED = 10
"""How many problems are printed; the rest is counted."""

WIDTH = 100
"""Width of prose in characters."""


def add_parser(commands: Commands) -> None:
    """Add the parser of the command."""
    parser = commands.add_parser("verify", help="compare an emitted program with the unpartitioned model")
    add_program(parser)
    parser.add_argument("--steps", type=count, default=4, help="optimizer steps, each on another batch (default: 4)")
    parser.add_argument(
        "--reference",
        metavar="FILE:FUNCTION",
        help="compare with this function of the model and a batch (a dict of tensors), which returns the loss, instead of with the "
        "model and loss function that the program was compiled from",
    )
    parser.add_argument("--fp64", action="store_true", help="decide in float64 even where rounding leaves no doubt")
    add_json(parser)


def run(options: argparse.Namespace) -> Result:
    """Train the program and the model side by side and compare; the exit code is 1 where they differ."""
    from graphpar.verification import verify_parts
    from graphpar.verification.recorded import function_of

    folder = program_folder(options.out)
    reference = function_of(options.reference) if options.reference else None
    with phases() as phase:
        result = verify_parts(folder, steps=options.steps, reference=reference, fp64=options.fp64, on_phase=phase)
    data: dict[str, Any] = result.to_json()
    return Result(data, lambda console: show(data, console), DONE if result.ok else CHECK_FAILED)


def show(data: dict[str, Any], console: Console) -> None:
    """Print losses side by side, the largest errors with their tensors, how it was decided, and the verdict."""
    lines = [f" {plural(data['devices'], 'process', 'processes')} against the unpartitioned model, {_what_ran(data)}"]
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


def _what_ran(data: dict[str, Any]) -> str:
    trained = bool(data["loss"]["reference"])
    return "SGD with momentum" if trained else f"outputs of {plural(data['steps'], 'batch', 'batches')}"


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
