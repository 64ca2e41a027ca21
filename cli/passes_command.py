"""``graphpar passes``: the steps of a compilation."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from graphpar.cli.arguments import Commands, add_json
from graphpar.cli.output import Result

if TYPE_CHECKING:
    from rich.console import Console


def add_parser(commands: Commands) -> None:
    """Add the parser of the command."""
    parser = commands.add_parser("passes", help="the pass table: name, what it needs, what it ensures")
    add_json(parser)


def run(options: argparse.Namespace) -> Result:
    """List every step from the model file to the report."""
    from graphpar.passes.table import STEPS, Pass

    rows = [
        {
            "name": row.name,
            "needs": ", ".join(row.requires),
            "ensures": row.provides,
            "requires": list(row.requires),
            "conflicts": list(row.conflicts),
            "checked_by": row.checked_by,
            "file": row.file,
            "pass": isinstance(row, Pass),
            "optional": row.optional,
        }
        for row in STEPS
    ]

    def show(console: Console) -> None:
        from rich.table import Table

        table = Table(box=None, padding=(0, 1))
        for heading in ("step", "requires", "provides", "checked by"):
            table.add_column(heading)
        for row in STEPS:
            name = f"{row.name} (optional)" if row.optional else row.name
            table.add_row(name, ", ".join(row.requires), row.provides, row.checked_by)
        console.print(table)

    return Result({"passes": rows}, show)
