"""``graphpar sweep``: what may be asked of it. The work is in ``sweep_work``, which imports torch."""

from __future__ import annotations

import argparse

from graphpar.cli.arguments import Commands, add_cache, add_json, add_model, add_option, count
from graphpar.cli.output import Result
from graphpar.runtime.options import Request, options_of


def run(options: argparse.Namespace) -> Result:
    """Plan the model for each cluster and batch."""
    from graphpar.cli.sweep_work import sweep

    return sweep(options)


def _batches(text: str) -> list[int]:
    return [count(part.strip()) for part in text.split(",")]


def add_parser(commands: Commands) -> None:
    """Add the parser of the command."""
    parser = commands.add_parser("sweep", help="the chosen plans for several clusters and batches, as a table")
    add_model(parser)
    parser.add_argument("--cluster", metavar="NAME,NAME", required=True, help="clusters: 8xH100,2x8xH100")
    parser.add_argument("--batch", type=_batches, metavar="N,N", help="global batches (default: the example's)")
    for name in ("dtype", "mesh", "zero", "recompute"):
        add_option(parser, name, options_of(Request)[name])
    parser.add_argument("--html", metavar="FILE", help="write the table, and rows a second against devices, as a page")
    add_cache(parser)
    add_json(parser)
