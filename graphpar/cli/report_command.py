"""``graphpar report``: the report of an emitted program, from what lies in its folder. ``graphpar diff``: two of them side by side."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from graphpar.cli.output import Result, print_wrapped, write_text
from graphpar.cli.plan_file import read_plan, read_record, reading_report
from graphpar.errors import GraphparError
from graphpar.ir.plan import Plan
from graphpar.report.difference import Side, difference, difference_lines
from graphpar.report.groups import groups_data, groups_lines, ranks_of
from graphpar.report.report import html, plan_text, render, trace, with_alone
from graphpar.runtime.plan_record import REPORT, kept_report
from graphpar.text import indices_text


def report(options: argparse.Namespace) -> Result:
    """Print the report, or write it as a page (``--html``) or as a timeline (``--trace``)."""
    path, record = read_record(options.out)
    plan = read_plan(path, record)
    if options.groups or options.group is not None:
        return _groups(plan, options)
    with reading_report(path):
        data = kept_report(path, record)
        if data is None:
            return _plan_only(path, plan, options.html or options.trace)
        return _print_or_write(options, path, data)


def _groups(plan: Plan, options: argparse.Namespace) -> Result:
    """The table of process groups, or all groups of one name."""
    if options.html or options.trace or (options.groups and options.group is not None):
        raise GraphparError("Give one of --html, --trace, --groups and --group: each is shown instead of the report.")
    if options.group is not None:
        ranks = ranks_of(plan, options.group)
        data: dict[str, Any] = {options.group: ranks}
        lines = [f" {indices_text(each)}" for each in ranks]
    else:
        data = {"groups": groups_data(plan)}
        lines = groups_lines(data["groups"])
    return Result(data, lambda console: console.out("\n".join(lines), highlight=False))


def _print_or_write(options: argparse.Namespace, path: Path, data: dict[str, Any]) -> Result:
    """Print the report of ``path``, with what lies beside it, or write it."""
    beside = {name: path.parent / f"{name}.json" for name in ("search", "alone") if path.name == "plan.json"}
    found = {name: read_record(file)[1] for name, file in beside.items() if file.is_file()}
    data = with_alone(data, found.pop("alone", None)) | found
    if options.html and options.trace:
        raise GraphparError("Give --html or --trace, not both: each is written instead of the report.")
    if file := options.html or options.trace:
        write_text(file, html(data) if options.html else json.dumps(trace(data), allow_nan=False), options.written)
        return Result(data, lambda console: console.out(f"Wrote {file}", highlight=False))
    out = str(path.parent) if path.name == "plan.json" else None

    def show(console: Console) -> None:
        with reading_report(path):
            render(data, console, out)

    return Result(data, show)


def _plan_only(path: Path, plan: Plan, file: str | None) -> Result:
    """A plan beside which there is no report of its decisions."""
    why = f"There are no times and bytes of this plan next to {path}"
    if path.name == "plan.json" and (path.parent / REPORT).is_file():
        why = f"{path} was edited since {REPORT} was written, so its times and bytes are of another plan"
    advice = f"`graphpar estimate MODEL --plan {path}` finds them, and `graphpar compile MODEL --plan {path}` writes the program and them."
    if file is not None:
        raise GraphparError(f"{why}, and {file} needs them; {advice}")

    def show(console: Console) -> None:
        console.out(plan_text(plan), highlight=False)
        print_wrapped(console, ["", f"{why}; {advice}"])

    return Result(plan.to_json(), show)


def diff(options: argparse.Namespace) -> Result:
    """Compare two plans."""
    a, b = _side(options.plan_a), _side(options.plan_b)
    with reading_report(Path(f"{a.name} or {b.name}")):
        data = difference(a, b)
    return Result(data, lambda console: print_wrapped(console, difference_lines(data)))


def _side(path: str) -> Side:
    file, record = read_record(path)
    plan = read_plan(file, record)
    with reading_report(file):
        return Side(path, plan, kept_report(file, record))
