"""The terminal: parse, call the command's module, print.

    graphpar compile | run | verify | check | report | calibrate | passes

Exit codes: 0 done, 1 a check failed, 2 the user must change something (message, no traceback), 3 our bug (traceback).
Nothing here imports torch, so that ``graphpar --help`` answers at once; each command is a module of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import math
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import graphpar
from graphpar.cli.output import OUR_BUG, USER_ERROR, Result, stdout_console, stdout_to_stderr
from graphpar.errors import GraphparError

_COMPILE_EXAMPLES = """examples:
  graphpar compile model.py --devices 4
  graphpar compile model.py --mesh pp=2 --schedule zbv --batch 64 --microbatch-size 4 -o out
  graphpar compile model.py --mesh tp=2,dp_replicate=2 --shard-plan plan.toml
  graphpar compile model.py --devices 2 --split layers.12 --run --steps 5
  graphpar compile package.module --devices 8 --no-emit --json
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="graphpar", description="From an ordinary PyTorch model and a number of devices to a parallel program."
    )
    parser.add_argument("--version", action="version", version=f"graphpar {graphpar.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    _compile_parser(commands)
    run = commands.add_parser("run", help="run an emitted program on this machine (torchrun)")
    run.add_argument("out", metavar="OUT", help="the emitted folder")
    run.add_argument("--steps", type=int, default=10, help="optimizer steps (default: 10)")
    run.add_argument("--timeout", type=float, default=3600, help="seconds until it is ended (default: 3600)")
    run.add_argument("--json", action="store_true", help="print one JSON object")
    verify = commands.add_parser("verify", help="compare an emitted program with the unpartitioned model")
    verify.add_argument("out", metavar="OUT", help="the emitted folder")
    verify.add_argument("--steps", type=int, default=3, help="optimizer steps (default: 3)")
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
    return parser


def _estimate_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("estimate", help="what a step of a given plan takes: seconds, communication, memory")
    parser.add_argument("model", metavar="MODEL", help="a Python file with `model` and `example_inputs`, or package.module")
    parser.add_argument("--plan", metavar="PLAN.json", required=True, help="the plan, or the emitted folder that holds it")
    parser.add_argument("--cluster", metavar="NAME|FILE", help="where (default: the plan's own, or this machine's kind)")
    parser.add_argument("--formula", action="store_true", help="print flops and bytes as polynomials in the batch and the sequence")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _compile_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
    where.add_argument("--devices", type=int, metavar="N", help="how many devices (default: 1)")
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
    pins.add_argument("--microbatch-size", type=int, metavar="M", help="rows of a microbatch")
    pins.add_argument(
        "--split",
        metavar="PATH[,PATH...]",
        help="modules that begin a stage (PATH:end: that end one; 'layers.*': evenly)",
    )
    pins.add_argument("--layers-per-stage", type=int, metavar="N", help="cut by number of layers")
    pins.add_argument("--edge-layers", metavar="IN,OUT", help="what the parts around the layers count as (default 1,1)")
    pins.add_argument(
        "--shard-plan", metavar="FILE", help="how weights and activations lie: patterns in a .json, .toml or .py file"
    )
    pins.add_argument("--plan", metavar="PLAN.json", help="take every decision from this plan")
    pins.add_argument(
        "--allow-batch-coupling", action="store_true", help="accept operators that mix examples, such as BatchNorm"
    )
    work = parser.add_argument_group("workload")
    work.add_argument("--batch", type=int, metavar="B", help="global batch (default: that of the example inputs)")
    work.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="dtype in which the model is built")
    work.add_argument("--mode", choices=("train", "infer"), help="default: train if there is a loss")
    output = parser.add_argument_group("output")
    output.add_argument("-o", "--out", metavar="DIR", help="where to write the program (default: ./MODELNAME-Ndev)")
    output.add_argument("--no-emit", action="store_true", help="plan and report, write no program")
    output.add_argument("--weights", action="store_true", help="write the initial weights too")
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument("--html", metavar="FILE", help="write the report as a page too")
    output.add_argument("--top", type=int, default=4, metavar="K", help="plans that were not taken to show, and why (default: 4)")
    output.add_argument("--explain", metavar="PATTERN", help="say where matching modules and values are, and why")
    output.add_argument("--dump-after", metavar="PASS|all", help="print the program after a pass, on standard error")
    output.add_argument("--run", action="store_true", help="then run it here, on local processes")
    output.add_argument("--steps", type=int, metavar="K", help="optimizer steps of --run (default: 10)")


def _calibrate_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("calibrate", help="measure this machine, and write a profile for --cluster")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what to measure (default: cpu)")
    parser.add_argument("--processes", type=int, metavar="N", help="ranks (default: one a core, or a GPU)")
    parser.add_argument("--quick", action="store_true", help="few, small shapes: seconds instead of a minute, and rough")
    parser.add_argument(
        "--patience", type=float, default=60.0, metavar="S", help="seconds to wait while others use the machine (default: 60)"
    )
    parser.add_argument("-o", "--out", metavar="PROFILE.json", help="default: ./calibrated-cpu.json, or -cuda")
    parser.add_argument("--json", action="store_true", help="print the profile as one JSON object")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    try:
        options = build_parser().parse_args(arguments)
    except SystemExit as stop:  # argparse has printed the help (0) or what is wrong (2)
        return int(stop.code or 0)
    try:
        with stdout_to_stderr() if options.json else contextlib.nullcontext(), _rare_collections():
            command = importlib.import_module(f"graphpar.cli.{options.command}_command")
            result: Result = command.run(options)
        if options.json:
            print(json.dumps(_finite(result.data), allow_nan=False))
        else:
            result.show(stdout_console())
        return result.code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader has gone, e.g. `| head`
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return _failed(error)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Graphs are many objects that live as long as a command does; to look through them for garbage again and again takes long."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _finite(data: Any) -> Any:
    """``data`` with infinities and NaN, which JSON has no numbers for, as words."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data


def _failed(error: Exception) -> int:
    """Print what went wrong; whose fault it is decides how."""
    if _is_for_user(error):
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    traceback.print_exception(error)
    if details := getattr(error, "details", ""):  # of a rank that failed
        print(details, file=sys.stderr)
    print("error: this is a bug in graphpar, or something that it should have refused with a message.", file=sys.stderr)
    return OUR_BUG


def _is_for_user(error: Exception) -> bool:
    """Our own errors for users, also those of the runtime, which is imported with torch or not at all."""
    if isinstance(error, GraphparError | PermissionError | NotADirectoryError | FileExistsError):
        return True
    runtime = sys.modules.get("graphpar.runtime.errors")
    if runtime is None:
        return False
    return isinstance(error, runtime.RuntimeProgramError) or (isinstance(error, runtime.LaunchError) and error.user)


if __name__ == "__main__":
    sys.exit(main())
