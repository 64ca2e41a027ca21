"""``graphpar passes``: the pass table."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from graphpar.cli.output import Result
from graphpar.passes.table import PASSES

if TYPE_CHECKING:
    from rich.console import Console


def run(options: argparse.Namespace) -> Result:
    rows = [{"name": row.name, "needs": row.needs, "ensures": row.ensures, "optional": row.optional} for row in PASSES]

    def show(console: Console) -> None:
        from rich.table import Table

        table = Table(box=None, padding=(0, 1))
        for heading in ("pass", "needs", "ensures"):
            table.add_column(heading)
        for row in PASSES:
            table.add_row(row.name, row.needs, row.ensures)
        console.print(table)

    return Result({"passes": rows}, show)
