"""What may be typed: a parser for each command. Nothing here imports torch.

What is wrong with an option by itself is said at once: numbers are checked here, and unknown names get a near match.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import graphpar
from graphpar.cli.output import USER_ERROR
from graphpar.errors import near_match

SHELLS = ("bash", "zsh", "fish")

_COMPLETION_EXAMPLES = """to use it, add to the shell's own configuration:
  bash   source <(graphpar completion bash)
  zsh    source <(graphpar completion zsh)
  fish   graphpar completion fish | source
"""
_COMPILE_EXAMPLES = """examples:
  graphpar compile model.py --devices 4
  graphpar compile model.py --mesh pp=2 --schedule zbv --batch 64 --microbatch-size 4 -o out
  graphpar compile model.py --mesh tp=2,dp_replicate=2 --shard-plan plan.toml
  graphpar compile model.py --devices 2 --split layers.12 --run --steps 5
  graphpar compile package.module --devices 8 --no-emit --json
"""


class Parser(argparse.ArgumentParser):
    """Options are written out, an empty value is none, and what is wrong is said in one line with what is meant instead."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown))
        for action in self._actions:
            if getattr(found, action.dest, None) == "":
                self.error(f"{_shown(action)} is empty; give it a value, or leave it out.")
        return found, []

    def _unknown(self, arguments: Sequence[str]) -> str:
        name = next((argument.partition("=")[0] for argument in arguments if argument.startswith("-")), None)
        if name is None:
            return f"{self.prog} takes no further argument, but there is {arguments[0]!r}."
        known = [option for action in self._actions for option in action.option_strings]
        return f"{self.prog} has no option {name}.{near_match(name, known)}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            what = (
                f"There is no command {value!r}"
                if isinstance(action, argparse._SubParsersAction)
                else f"{_shown(action)} is {value!r}"
            )
            raise _Refused(f"{what}; it is one of {', '.join(known)}.{near_match(str(value), known)}")

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"error: {message.removeprefix('argument ')}\n({self.prog} --help says what there is.)\n")


class _Refused(argparse.ArgumentError):
    """A message that needs no ``argument --name:`` before it."""

    def __init__(self, message: str) -> None:
        super().__init__(None, message)


def _shown(action: argparse.Action) -> str:
    return action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest)


def _count(text: str, least: int = 1) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number.") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"it is {value}; it must be at least {least}.")
    return value


def _count_or_none(text: str) -> int:
    return _count(text, 0)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds.") from None
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"it is {text}; it must be a number of seconds, from 0.")
    return value


def build_parser() -> Parser:
    parser = Parser(
        prog="graphpar", description="From an ordinary PyTorch model and a number of devices to a parallel program."
    )
    parser.add_argument("--version", action="version", version=f"graphpar {graphpar.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    _compile_parser(commands)
    run = commands.add_parser("run", help="run an emitted program on this machine (torchrun)")
    run.add_argument("out", metavar="OUT", help="the emitted folder")
    run.add_argument("--steps", type=_count, default=10, help="optimizer steps (default: 10)")
    run.add_argument("--timeout", type=_seconds, default=3600, help="seconds until it is ended (default: 3600)")
    run.add_argument("--json", action="store_true", help="print one JSON object")
    verify = commands.add_parser("verify", help="compare an emitted program with the unpartitioned model")
    verify.add_argument("out", metavar="OUT", help="the emitted folder")
    verify.add_argument("--steps", type=_count, default=4, help="optimizer steps, each on data of its own (default: 4)")
    verify.add_argument("--fp64", action="store_true", help="decide in float64 even where rounding leaves no doubt")
    verify.add_argument("--json", action="store_true", help="print one JSON object")
    check = commands.add_parser(
        "check", help="check the types of an emitted program, at its world size, in one process"
    )
    check.add_argument("out", metavar="OUT", help="the emitted folder")
    check.add_argument("--json", action="store_true", help="print one JSON object")
    report = commands.add_parser("report", help="print the report of an emitted program or a plan")
    report.add_argument("out", metavar="OUT|PLAN.json", help="the emitted folder, or a plan.json")
    report.add_argument("--html", metavar="FILE", help="write the report as a page instead")
    report.add_argument("--trace", metavar="FILE", help="write the schedule's timeline as a Chrome trace instead")
    report.add_argument("--json", action="store_true", help="print its data as one JSON object")
    _estimate_parser(commands)
    _calibrate_parser(commands)
    passes = commands.add_parser("passes", help="the pass table: name, what it needs, what it ensures")
    passes.add_argument("--json", action="store_true", help="print one JSON object")
    completion = commands.add_parser(
        "completion",
        help="print the script that completes commands and options in a shell",
        epilog=_COMPLETION_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    completion.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or fish")
    completion.set_defaults(json=False)
    return parser


def _estimate_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser("estimate", help="what a step of a given plan takes: seconds, communication, memory")
    parser.add_argument(
        "model", metavar="MODEL", help="a Python file with `model` and `example_inputs`, or package.module"
    )
    parser.add_argument(
        "--plan", metavar="PLAN.json", required=True, help="the plan, or the emitted folder that holds it"
    )
    parser.add_argument(
        "--cluster", metavar="NAME|FILE", help="where (default: the plan's own, or this machine's kind)"
    )
    parser.add_argument(
        "--formula", action="store_true", help="print flops and bytes as polynomials in the batch and the sequence"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _compile_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "compile",
        help="compile a model file to a parallel program",
        epilog=_COMPILE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a Python file with `model` and `example_inputs`, or package.module"
    )
    where = parser.add_argument_group("devices")
    where.add_argument("--devices", type=_count, metavar="N", help="how many devices (default: 1)")
    where.add_argument(
        "--cluster",
        metavar="NAME|FILE",
        help="which devices: 8xH100-SXM-80GB, 2x8xA100 (nodes first), or a file (TOML, or a profile of calibrate)",
    )
    pins = parser.add_argument_group("pins (what is left out is chosen)")
    pins.add_argument("--mesh", metavar="pp=2,tp=2", help="degrees of mesh axes; alone, they give the device count")
    pins.add_argument("--schedule", metavar="NAME", help="1F1B, GPipe, Interleaved1F1B, ZBVZeroBubble, ...")
    pins.add_argument(
        "--schedule-table", metavar="FILE.csv", help="a schedule of your own, a row a rank: 0F0,0F1,0B0,0B1"
    )
    pins.add_argument("--microbatch-size", type=_count, metavar="M", help="rows of a microbatch")
    pins.add_argument(
        "--split",
        metavar="PATH[,PATH...]",
        help="modules that begin a stage (PATH:end: that end one; 'layers.*': evenly)",
    )
    pins.add_argument("--layers-per-stage", type=_count, metavar="N", help="cut by number of layers")
    pins.add_argument("--edge-layers", metavar="IN,OUT", help="what the parts around the layers count as (default 1,1)")
    pins.add_argument(
        "--shard-plan",
        metavar="FILE",
        help="how weights and activations are sharded: patterns in a .json, .toml or .py file",
    )
    pins.add_argument("--plan", metavar="PLAN.json", help="take every decision from this plan")
    pins.add_argument(
        "--allow-batch-coupling", action="store_true", help="accept operators that mix examples, such as BatchNorm"
    )
    work = parser.add_argument_group("workload")
    work.add_argument("--batch", type=_count, metavar="B", help="global batch (default: that of the example inputs)")
    work.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="dtype in which the model is built")
    work.add_argument("--skip", metavar="PASS,...", help="leave optional passes out: see graphpar passes")
    work.add_argument("--mode", choices=("train", "infer"), help="default: train if there is a loss")
    output = parser.add_argument_group("output")
    output.add_argument("-o", "--out", metavar="DIR", help="where to write the program (default: ./MODELNAME-Ndev)")
    output.add_argument("--force", action="store_true", help="write where files were changed or added, and keep these")
    output.add_argument("--no-emit", action="store_true", help="plan and report, write no program")
    output.add_argument(
        "--weights",
        action=argparse.BooleanOptionalAction,
        help="write the initial weights too (default: where they take at most 1 GiB)",
    )
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument("--html", metavar="FILE", help="write the report as a page too")
    output.add_argument(
        "--top", type=_count_or_none, default=4, metavar="K", help="plans not taken to show, and why (default: 4)"
    )
    output.add_argument("--explain", metavar="PATTERN", help="say where matching modules and values are, and why")
    output.add_argument("--dump-after", metavar="STEP|all", help="print the program after a step, on standard error")
    output.add_argument("--run", action="store_true", help="then run it here, on local processes")
    output.add_argument("--steps", type=_count, metavar="K", help="optimizer steps of --run (default: 10)")


def _calibrate_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser("calibrate", help="measure this machine, and write a profile for --cluster")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what to measure (default: cpu)")
    parser.add_argument("--processes", type=_count, metavar="N", help="ranks (default: one a core, or a GPU)")
    parser.add_argument(
        "--quick", action="store_true", help="few, small shapes: seconds instead of a minute, and rough"
    )
    parser.add_argument(
        "--patience",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="seconds to wait while others use the machine (default: 60)",
    )
    parser.add_argument(
        "--force", action="store_true", help="write the profile even if others disturbed it or the fit is bad"
    )
    parser.add_argument("-o", "--out", metavar="PROFILE.json", help="default: ./calibrated-cpu.json, or -cuda")
    parser.add_argument("--json", action="store_true", help="print the profile as one JSON object")
