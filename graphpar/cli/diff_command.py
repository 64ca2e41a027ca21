"""``graphpar diff``: two plans for one model side by side, from what lies in their folders."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from graphpar.cli.arguments import Commands, add_json
from graphpar.cli.output import Result, print_wrapped

if TYPE_CHECKING:
    from rich.console import Console

    from graphpar.report.difference import Side


def add_parser(commands: Commands) -> None:
    """Add the parser of the command."""
    parser = commands.add_parser("diff", help="compare two plans: decisions, predicted times, memory")
    parser.add_argument("plan_a", metavar="OUT|PLAN_A.json", help="the emitted folder, or a plan.json")
    parser.add_argument("plan_b", metavar="OUT|PLAN_B.json", help="the other one, for the same model")
    add_json(parser, "print the comparison as one JSON object")


def run(options: argparse.Namespace) -> Result:
    """Compare the two plans."""
    from pathlib import Path

    from graphpar.cli.plan_file import reading_report
    from graphpar.report.difference import difference, difference_lines

    a, b = _side(options.plan_a), _side(options.plan_b)
    with reading_report(Path(f"{a.name} or {b.name}")):
        data = difference(a, b)

    def show(console: Console) -> None:
        print_wrapped(console, difference_lines(data))

    return Result(data, show)


def _side(path: str) -> Side:
    from graphpar.cli.plan_file import read_plan, read_record, reading_report
    from graphpar.report.difference import Side
    from graphpar.runtime.plan_record import kept_report

    file, record = read_record(path)
    plan = read_plan(file, record)
    with reading_report(file):
        return Side(path, plan, kept_report(file, record))
