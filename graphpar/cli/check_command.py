"""``graphpar check``: the types of an emitted program, proven in one process at the real world size."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from graphpar.cli.arguments import Commands, add_json, add_program
from graphpar.cli.output import CHECK_FAILED, DONE, Result, program_folder, progress
from graphpar.text import plural

if TYPE_CHECKING:
    from rich.console import Console


def add_parser(commands: Commands) -> None:
    """Add the parser of the command."""
    parser = commands.add_parser(
        "check", help="check the types of an emitted program, at its world size, in one process"
    )
    add_program(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> Result:
    """Check the types of every stage; the exit code is 1 where a problem is found."""
    folder = program_folder(options.out)
    with progress("checking the types of every stage"):
        from graphpar.verification.type_check import check_folder

        result = check_folder(folder)
    data: dict[str, Any] = result.to_json()
    return Result(data, lambda console: show(data, console), DONE if result.ok else CHECK_FAILED)


def show(data: dict[str, Any], console: Console) -> None:
    """Print what was checked, what was not and why, the problems, and the verdict."""
    lines = [
        f" {plural(data['stages'], 'stage')} for {plural(data['devices'], 'device')} under spmd_types: "
        f"{plural(data['checked'], 'operator')} checked, {len(data['unchecked'])} kinds unchecked"
    ]
    lines += [f"   unchecked: {name}: {reason}" for name, reason in data["unchecked"].items()]
    lines += ["", *(f" {problem}" for problem in data["problems"])] if data["problems"] else []
    lines += ["", f" {'PASS' if data['ok'] else 'FAIL'}"]
    console.out("\n".join(lines), highlight=False)
