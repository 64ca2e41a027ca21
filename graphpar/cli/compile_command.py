"""``graphpar compile``: what may be asked of it. The work is in ``compile_work``, which imports torch."""

from __future__ import annotations

import argparse

from graphpar.cli.arguments import Commands, add_cache, add_json, add_model, add_option, count
from graphpar.cli.output import Result
from graphpar.runtime.modes import MODES
from graphpar.runtime.options import Request, options_of

_EXAMPLES = """examples:
  graphpar compile model.py --devices 4
  graphpar compile model.py --mesh pp=2 --schedule zbv --batch 64 --microbatch-size 4 -o out
  graphpar compile model.py --mesh tp=2,dp_replicate=2 --shard-plan plan.toml
  graphpar compile model.py --devices 2 --split layers.12 --run --steps 5
  graphpar compile package.module --devices 8 --no-emit --json
"""


def run(options: argparse.Namespace) -> Result:
    """Compile the model file, write the program unless ``--no-emit`` is given, and run it with ``--run``."""
    from graphpar.cli.compile_work import compile_model

    return compile_model(options)


def add_parser(commands: Commands) -> None:
    """Add the parser of the command: the model file, and options in groups."""
    parser = commands.add_parser(
        "compile",
        help="compile a model file to a parallel program",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser)
    groups = {
        "devices": parser.add_argument_group("devices"),
        "pins": parser.add_argument_group("pins (what is left out is chosen)"),
        "workload": parser.add_argument_group("workload"),
        "output": parser.add_argument_group("output"),
    }
    for name, known in options_of(Request).items():
        if known.group:
            add_option(groups[known.group], name, known)
    groups["pins"].add_argument("--plan", metavar="PLAN.json", help="take every decision from this plan")
    _add_workload(groups["workload"])
    _add_output(groups["output"])


def _add_workload(group: argparse._ArgumentGroup) -> None:
    """Add what is said of the trace."""
    group.add_argument(
        "--pure", action="store_true", default=None, help="store and step parameters in the compute dtype, too"
    )
    group.add_argument("--skip", metavar="PASS,...", help="leave optional passes out: see graphpar passes")
    group.add_argument(
        "--mode", choices=MODES, help="default: train if there is a loss; generate: tokens with a key-value cache"
    )
    group.add_argument(
        "--eval", action="store_true", help="trace in evaluation mode, too, so that pipeline.eval works on any model"
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    """Add what is said of the program that is written."""
    group.add_argument("-o", "--out", metavar="DIR", help="where to write the program (default: ./MODELNAME-Ndev)")
    group.add_argument("--force", action="store_true", help="write where files were changed or added, and keep these")
    group.add_argument("--no-emit", action="store_true", help="plan and report, write no program")
    group.add_argument(
        "--weights",
        action=argparse.BooleanOptionalAction,
        help="write the initial weights too (default: where they take at most 1 GiB)",
    )
    group.add_argument(
        "--check-values",
        action="store_true",
        help="run the model's first step here and store its loss and gradient norm, with which train.py --check compares",
    )
    add_cache(group)
    add_json(group)
    group.add_argument("-v", "--verbose", action="store_true", help="say how long each step of the compilation took")
    group.add_argument("--html", metavar="FILE", help="write the report as a page too")
    group.add_argument(
        "--explain",
        metavar="PATTERN",
        help="say where matching modules and values are, and why; of mesh, schedule, ... or plan, what else would cost",
    )
    group.add_argument("--dump-after", metavar="STEP|all", help="print the program after a step, on standard error")
    group.add_argument("--run", action="store_true", help="then run it here, on local processes")
    group.add_argument("--steps", type=count, metavar="K", help="optimizer steps of --run (default: 10)")
