"""``graphpar estimate``: what may be asked of it. The work is in ``estimate_work``, which imports torch."""

from __future__ import annotations

import argparse

from graphpar.cli.arguments import Commands, add_cache, add_json, add_model
from graphpar.cli.output import Result


def run(options: argparse.Namespace) -> Result:
    """Price a given plan for the model, on the plan's own cluster or another."""
    from graphpar.cli.estimate_work import estimate_plan

    return estimate_plan(options)


def add_parser(commands: Commands) -> None:
    """Add the parser of the command."""
    parser = commands.add_parser("estimate", help="what a step of a given plan takes: seconds, communication, memory")
    add_model(parser)
    parser.add_argument(
        "--plan", metavar="PLAN.json", required=True, help="the plan, or the emitted folder that holds it"
    )
    parser.add_argument(
        "--cluster", metavar="NAME|FILE", help="where (default: the plan's own, or this machine's kind)"
    )
    parser.add_argument(
        "--formula", action="store_true", help="print flops and bytes as polynomials in the batch and the sequence"
    )
    add_cache(parser)
    add_json(parser)
