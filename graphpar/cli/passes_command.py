"""``graphpar passes``: the steps of a compilation."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from graphpar.cli.output import Result
from graphpar.passes.table import STEPS, Pass


def step_rows(seconds: Mapping[str, float] | None = None) -> list[dict[str, Any]]:
    """List the steps as plain data, with ``seconds`` by name if they are given."""
    rows: list[dict[str, Any]] = [
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
    if seconds is None:
        return rows
    listed = {row["name"] for row in rows}
    rows += [{"name": name} for name in seconds if name not in listed]  # the user's passes
    return [row | {"seconds": round(seconds.get(row["name"], 0.0), 4)} for row in rows]


def run(options: argparse.Namespace) -> Result:
    """List every step from the model file to the report."""
    rows = step_rows()

    def show(console: Console) -> None:
        table = Table(box=None, padding=(0, 1))
        for heading in ("step", "requires", "provides", "checked by"):
            table.add_column(heading)
        for row in rows:
            name = f"{row['name']} (optional)" if row["optional"] else row["name"]
            table.add_row(name, row["needs"], row["ensures"], row["checked_by"])
        console.print(table)

    return Result({"passes": rows}, show)
