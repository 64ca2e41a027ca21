"""``graphpar report``: the report of an emitted program, from what lies in its folder."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphpar.cli.arguments import Commands, add_json
from graphpar.cli.output import Result, print_wrapped, write_text
from graphpar.errors import GraphparError

if TYPE_CHECKING:
    from rich.console import Console

    from graphpar.ir.plan import Plan


def add_parser(commands: Commands) -> None:
    """Add the parser of the command."""
    parser = commands.add_parser("report", help="print the report of an emitted program or a plan")
    parser.add_argument("out", metavar="OUT|PLAN.json", help="the emitted folder, or a plan.json")
    parser.add_argument("--html", metavar="FILE", help="write the report as a page instead")
    parser.add_argument("--trace", metavar="FILE", help="write the schedule's timeline as a Chrome trace instead")
    parser.add_argument("--groups", action="store_true", help="print the process groups instead: axes, sizes, ranks")
    parser.add_argument(
        "--group", metavar="NAME", help="print the ranks of every group of a name instead: tp, expert_data"
    )
    add_json(parser, "print its data as one JSON object")


def run(options: argparse.Namespace) -> Result:
    """Print the report, or write it as a page (``--html``) or as a timeline (``--trace``)."""
    from graphpar.cli.plan_file import read_plan, read_record, reading_report
    from graphpar.runtime.plan_record import kept_report

    path, record = read_record(options.out)
    if options.groups or options.group is not None:
        return _groups(read_plan(path, record), options)
    plan = read_plan(path, record)
    with reading_report(path):
        data = kept_report(path, record)
        if data is None:
            return _plan_only(path, plan, options.html or options.trace)
        return _shown(options, path, data)


def _groups(plan: Plan, options: argparse.Namespace) -> Result:
    """The table of process groups, or all groups of one name."""
    from graphpar.report.groups import groups_data, groups_lines, ranks_of
    from graphpar.text import indices_text

    if options.html or options.trace or (options.groups and options.group is not None):
        raise GraphparError("Give one of --html, --trace, --groups and --group: each is shown instead of the report.")
    if options.group is not None:
        ranks = ranks_of(plan, options.group)
        return Result(
            {options.group: ranks}, lambda console: _lines(console, [f" {indices_text(each)}" for each in ranks])
        )
    rows = groups_data(plan)
    return Result({"groups": rows}, lambda console: _lines(console, groups_lines(rows)))


def _lines(console: Console, lines: Sequence[str]) -> None:
    console.out("\n".join(lines), highlight=False)


def _shown(options: argparse.Namespace, path: Path, data: dict[str, Any]) -> Result:
    """Print the report of ``path``, with what lies beside it, or write it."""
    from graphpar.cli.plan_file import read_record, reading_report
    from graphpar.report.report import html, render, trace, with_alone

    search = path.parent / "search.json"
    if path.name == "plan.json" and search.is_file():
        data = data | {"search": read_record(search)[1]}
    alone = path.parent / "alone.json"
    if path.name == "plan.json" and alone.is_file():
        data = with_alone(data, read_record(alone)[1])
    if options.html and options.trace:
        raise GraphparError("Give --html or --trace, not both: each is written instead of the report.")
    if options.html:
        write_text(options.html, html(data), options.written)
        return Result(data, lambda console: console.out(f"Wrote {options.html}", highlight=False))
    if options.trace:
        write_text(options.trace, json.dumps(trace(data), allow_nan=False), options.written)
        return Result(data, lambda console: console.out(f"Wrote {options.trace}", highlight=False))
    out = str(path.parent) if path.name == "plan.json" else None

    def show(console: Console) -> None:
        with reading_report(path):
            render(data, console, out)

    return Result(data, show)


def _plan_only(path: Path, plan: Plan, file: str | None) -> Result:
    """A plan beside which there is no report of its decisions."""
    from graphpar.report.report import plan_text
    from graphpar.runtime.plan_record import REPORT

    why = f"There are no times and bytes of this plan beside {path}"
    if path.name == "plan.json" and (path.parent / REPORT).is_file():
        why = f"{path} was edited since {REPORT} was made beside it, so its times and bytes are of another plan"
    advice = f"`graphpar estimate MODEL --plan {path}` finds them, and `graphpar compile MODEL --plan {path}` writes the program and them."
    if file is not None:
        raise GraphparError(f"{why}, and {file} needs them; {advice}")

    def show(console: Console) -> None:
        console.out(plan_text(plan), highlight=False)
        print_wrapped(console, ["", f"{why}; {advice}"])

    return Result(plan.to_json(), show)
