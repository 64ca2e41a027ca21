"""The commands by name, and the parser of the whole command line. Nothing here imports torch.

A command is a module with ``add_parser(commands)`` and ``run(options) -> Result``. The parser answers ``--help`` and wrong
options at once: a module imports what its work needs inside of ``run``.
"""

from __future__ import annotations

from types import ModuleType

import graphpar
from graphpar.cli import (
    calibrate_command,
    check_command,
    checkpoint_command,
    compile_command,
    completion_command,
    diff_command,
    estimate_command,
    passes_command,
    report_command,
    run_command,
    sweep_command,
    verify_command,
)
from graphpar.cli.arguments import Parser

COMMANDS: dict[str, ModuleType] = {
    "compile": compile_command,
    "run": run_command,
    "verify": verify_command,
    "check": check_command,
    "checkpoint": checkpoint_command,
    "report": report_command,
    "diff": diff_command,
    "estimate": estimate_command,
    "sweep": sweep_command,
    "calibrate": calibrate_command,
    "passes": passes_command,
    "completion": completion_command,
}
"""In the order in which ``graphpar --help`` lists them."""


def build_parser() -> Parser:
    """Build the parser of ``graphpar`` with one below it for each command; the options have it as ``parser``."""
    parser = Parser(
        prog="graphpar", description="From an ordinary PyTorch model and a number of devices to a parallel program."
    )
    parser.add_argument("--version", action="version", version=f"graphpar {graphpar.__version__}")
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS.values():
        command.add_parser(commands)
    return parser
