"""The command line: each command, its arguments, and the function that does its work. Nothing here imports torch.

    graphpar COMMAND ... ──build_parser──► options ──COMMANDS[COMMAND].function, imported when it runs──► Result

``--help`` and wrong options are answered at once: numbers are checked here, and unknown names get the nearest known one.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import graphpar
from graphpar.cli.output import USER_ERROR
from graphpar.errors import GraphparError, near_match
from graphpar.runtime.launching.arguments import checkpoint_folder, input_file, positive, token_ids, train_parser, whole
from graphpar.runtime.option_kinds import COUNT, MODES, SECONDS, TRAIN_GENERATE
from graphpar.runtime.options import Option, Request, flag_of, options_of


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviated options and no empty values; its errors are one line with the nearest name."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as argparse does, but refuse unknown options with a near match, and empty values."""
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
            return f"{self.prog} takes no further argument, but got {arguments[0]!r}."
        known = [option for action in self._actions for option in action.option_strings]
        close = near_match(name, known)
        runs = self.prog.endswith(" run") or (self.prog.endswith(" compile") and not close)
        if runs and name in train_parser("")._option_string_actions:
            close = " It is one of train.py: start OUT/launch.sh, or OUT/train.py under torchrun, with it."
        return f"{self.prog} has no option {name}.{close}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in (*action.choices, ""):  # an empty one is refused below
            known = [str(choice) for choice in action.choices]
            what = f"{_shown(action)} is {value!r}"
            if isinstance(action, argparse._SubParsersAction):
                what = f"There is no command {value!r}"
            raise _Refused(f"{what}; it is one of {', '.join(known)}.{near_match(str(value), known)}")

    def error(self, message: str) -> NoReturn:
        """Print a message for the user and exit with status 2."""
        self.exit(USER_ERROR, f"error: {message.removeprefix('argument ')}\n({self.prog} --help shows the usage.)\n")


class _Refused(argparse.ArgumentError):
    """A message that needs no ``argument --name:`` before it."""

    def __init__(self, message: str) -> None:
        super().__init__(None, message)


def _shown(action: argparse.Action) -> str:
    return action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest)


def typed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return ``parse`` as the type of an argument, whose errors argparse tells."""

    def parsed(text: str) -> Any:
        try:
            return parse(text) if text else text
        except GraphparError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


count, seconds = typed(COUNT.parse), typed(SECONDS.parse)


def _checkpoints(text: str) -> Path:
    return checkpoint_folder(str(input_file(text)))  # as train.py reads it


def _counts(text: str) -> list[int]:
    return [count(part.strip()) for part in text.split(",")]


SIZES = {"": 1} | {
    f"{letter}{i}B": (1024 if i else 1000) ** power for power, letter in enumerate("KMGT", 1) for i in ("", "i")
}
"""Bytes of each unit of a size."""


def _size(text: str) -> int:
    """Read a number of bytes, such as 500MB or 2GiB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i?B|)", text)
    if found is None or int(float(found[1]) * SIZES[found[2]]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 500MB or 2GiB.")
    return int(float(found[1]) * SIZES[found[2]])


# ---- options of a plan -----------------------------------------------------------------------------------------


def _add_option(group: argparse._ActionsContainer, name: str, known: Option) -> None:
    """Add an option of a plan to a parser, where it is None unless it is given."""
    kind, flag = known.kind, flag_of(name, known)
    if kind.flag == "either":
        group.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, help=known.help)
    elif kind.flag:
        group.add_argument(flag, dest=name, action="store_true", default=None, help=known.help)
    else:
        taken: dict[str, Any] = {
            "type": typed(kind.parse),
            "choices": kind.choices or None,
            "metavar": known.metavar or None,
        }
        group.add_argument(flag, dest=name, help=known.help, **taken)


def given_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a plan that were given, by name, as :func:`graphpar.plan` takes them.

    Raises:
        GraphparError: one can't be read.
    """
    found = {}
    for name, known in options_of(Request).items():
        text = getattr(options, name, None)
        if text is not None:
            found[name] = text if known.kind.read is None else known.kind.read(text)
    return found


# ---- arguments of each command ---------------------------------------------------------------------------------


def _model(parser: Parser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a Python file with `model` and `example_inputs`, or package.module"
    )


def _no_cache(group: argparse._ActionsContainer) -> None:
    what = "trace the model again even if a capture is cached (in GRAPHPAR_CACHE)"
    group.add_argument("--no-cache", action="store_true", help=what)


def _json(group: argparse._ActionsContainer, what: str = "print one JSON object") -> None:
    group.add_argument("--json", action="store_true", help=what)


# fmt: off
def _compile(parser: Parser) -> None:
    parser.set_defaults(again=None)
    _model(parser)
    titles = {"devices": "devices", "pins": "pins (missing ones are chosen)", "workload": "workload", "output": "output"}
    groups = {name: parser.add_argument_group(title) for name, title in titles.items()}
    for name, known in options_of(Request).items():
        if known.group:
            _add_option(groups[known.group], name, known)
    groups["pins"].add_argument("--plan", metavar="PLAN.json", help="take every decision from this plan")
    add = groups["workload"].add_argument
    add("--pure", action="store_true", default=None, help="also store and update parameters in the compute dtype")
    add("--skip", metavar="PASS,...", help="skip optional passes: see graphpar passes")
    add("--mode", choices=(*MODES, TRAIN_GENERATE),
        help="default: train if there is a loss; generate: tokens with a key-value cache; both: tokens between steps")
    add("--eval", action="store_true", help="also trace in evaluation mode, so that pipeline.eval works on any model")
    add = groups["output"].add_argument
    add("-o", "--out", metavar="DIR", help="where to write the program (default: ./MODELNAME-Ndev)")
    add("--force", action="store_true", help="write even if files were changed or added, and keep those")
    add("--no-emit", action="store_true", help="plan and report without writing a program")
    add("--weights", action=argparse.BooleanOptionalAction,
        help="write the initial weights too (default: if they take at most 1 GiB)")
    add("--check-values", action="store_true",
        help="run the model's first step here and store its loss and gradient norm for train.py --check")
    _no_cache(groups["output"])
    _json(groups["output"])
    add("-v", "--verbose", action="store_true", help="print the time of each step of the compilation")
    add("--html", metavar="FILE", help="also write the report as a page")
    add("--explain", metavar="PATTERN",
        help="print where matching modules and values are, and why; for mesh, schedule, ... or plan, the cost of alternatives")
    add("--dump-after", metavar="STEP|all", help="print the program after a step, on standard error")
    add("--run", action="store_true", help="then run it on local processes")
    add("--steps", type=count, metavar="K", help="optimizer steps of --run (default: 10)")
    add("--cuda-graphs", action="store_true", help="--run replays forwards and backwards as one CUDA graph where they can be")


_DRAWN = {
    "temperature": (positive, "temperature of the sampling distribution"),
    "top-k": (whole, "draw from this number of likeliest tokens; 0: from all"),
    "top-p": (positive, "draw from the likeliest tokens with this total probability"),
    "repetition-penalty": (positive, "above 1: makes tokens that are already in the text less likely"),
    "seed": (whole, "seed of the random draws (default: 0)"),
}
GENERATION = ("prompt", "tokens", "tokenizer", "max-new-tokens", "sample", *_DRAWN, "weights", "checkpoint")
"""Options of ``run`` for programs that generate."""


def _run(parser: Parser) -> None:
    parser.add_argument("out", metavar="OUT", help="the emitted folder")
    parser.add_argument("--steps", type=count, help="optimizer steps (default: 10)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction,
                        help="compile the blocks with torch.compile, or not (default: as planned, on such devices)")
    parser.add_argument("--cuda-graphs", action="store_true",
                        help="replay forwards and backwards as one CUDA graph where they can be, else say why not")
    parser.add_argument("--alone", type=whole, metavar="RANK",
                        help="run this rank only, without the others: its seconds and memory next to the prediction")
    texts = parser.add_argument_group("programs for generation (--mode generate)")
    texts.add_argument("--prompt", action="append", metavar="TEXT", help="a text to continue; may be repeated")
    texts.add_argument("--tokens", action="append", type=token_ids, metavar="IDS", help="the same as token ids: 15,3,8")
    texts.add_argument("--tokenizer", type=input_file, metavar="FILE",
                       help="tokenizer.json for --prompt (default: the one next to the model file)")
    texts.add_argument("--max-new-tokens", type=count, metavar="N", help="tokens to add to each prompt")
    texts.add_argument("--sample", action=argparse.BooleanOptionalAction, help="draw tokens, or take the likeliest")
    for name, (kind, text) in _DRAWN.items():
        texts.add_argument(f"--{name}", type=kind, metavar="X", help=text)
    weights = texts.add_mutually_exclusive_group()
    weights.add_argument("--weights", type=input_file, metavar="FILE",
                         help="safetensors file or folder (default: weights/ in OUT)")
    weights.add_argument("--checkpoint", type=input_file, metavar="FOLDER",
                         help="use the weights of a training checkpoint, of any plan")
    parser.add_argument("--timeout", type=seconds, default=3600, help="seconds until it is stopped (default: 3600)")
    _json(parser)


def _verify(parser: Parser) -> None:
    parser.add_argument("out", metavar="OUT", help="the emitted folder")
    parser.add_argument("--steps", type=count, default=4, help="optimizer steps, each on a new batch (default: 4)")
    parser.add_argument("--reference", metavar="FILE:FUNCTION",
                        help="reference: a function of the model and a batch (a dict of tensors) that returns the loss (default: the "
                        "compiled model and loss function)")
    parser.add_argument("--fp64", action="store_true", help="always decide in float64")
    _json(parser)


def _check(parser: Parser) -> None:
    parser.add_argument("out", metavar="OUT", help="the emitted folder")
    _json(parser)


CHECKPOINT_ACTIONS = ("inspect", "merge", "export", "adapters", "convert")


def _checkpoint(parser: Parser) -> None:
    parser.add_argument("action", metavar="ACTION", choices=CHECKPOINT_ACTIONS,
                        help="inspect: print its contents; merge: into one safetensors file; export: in Hugging Face's format; adapters: "
                        "only these, in peft's format; convert: into a checkpoint")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint, or a folder with `latest`; convert: safetensors, too")
    parser.add_argument("--to", metavar="OUT|hf", help="convert: an emitted folder whose model it must fit; export: hf (default)")
    parser.add_argument("-o", "--out", metavar="PATH", help="what to write: a file (merge) or a folder")
    parser.add_argument("--max-shard-size", metavar="SIZE", type=_size, help="export: the largest file, such as 500MB (default: 5GB)")
    parser.add_argument("--tokenizer", metavar="PATH", help="export: a tokenizer, a file or a folder, to write next to the weights")
    parser.add_argument("--merged", action="store_true", default=None,
                        help="merge and export: add the adapters to the model's weights")
    _json(parser)


def _report(parser: Parser) -> None:
    parser.add_argument("out", metavar="OUT|PLAN.json", help="the emitted folder, or a plan.json")
    parser.add_argument("--html", metavar="FILE", help="write the report as a page instead")
    parser.add_argument("--trace", metavar="FILE", help="write the schedule's timeline as a Chrome trace instead")
    parser.add_argument("--groups", action="store_true", help="print the process groups instead: axes, sizes, ranks")
    parser.add_argument("--group", metavar="NAME", help="print the ranks of every group of a name instead: tp, expert_data")
    _json(parser, "print its data as one JSON object")


def _diff(parser: Parser) -> None:
    parser.add_argument("plan_a", metavar="OUT|PLAN_A.json", help="the emitted folder, or a plan.json")
    parser.add_argument("plan_b", metavar="OUT|PLAN_B.json", help="the other one, for the same model")
    _json(parser, "print the comparison as one JSON object")


def _estimate(parser: Parser) -> None:
    _model(parser)
    parser.add_argument("--plan", metavar="PLAN.json", help="the plan, or the emitted folder with it (default: by the options below)")
    parser.add_argument("--cluster", metavar="NAME|FILE", help="where (default: the plan's own, or this machine's kind)")
    _add_option(parser, "memory_headroom", options_of(Request)["memory_headroom"])
    parser.add_argument("--memory", action="store_true", help="print what a rank holds, part by part, at each moment of a step")
    parser.add_argument("--formula", action="store_true", help="print flops and bytes as polynomials in the batch and the sequence")
    pins = parser.add_argument_group("a plan without a file: the complete mesh, and what else is not to be usual")
    for name, known in options_of(Request).items():
        if known.group in ("pins", "workload"):
            _add_option(pins, name, known)
    _no_cache(parser)
    _json(parser)


def _times(text: str) -> float:
    """Read ``0.5x`` or ``0.5``."""
    try:
        return float(text.strip().removesuffix("x"))
    except ValueError:
        raise GraphparError(f"{text!r} is no number of times; write 0.5x for half") from None


def _what_if(parser: Parser) -> None:
    parser.add_argument("plan", metavar="OUT|PLAN.json", help="the emitted folder, or the plan.json in it")
    parser.add_argument("--network", type=typed(_times), metavar="Kx", help="bandwidth between nodes, or in the only node: 0.5x is half")
    parser.add_argument("--cluster", metavar="NAME|FILE", help="other hardware, of the same kind of device")
    parser.add_argument("--devices", type=count, metavar="N", help="how many devices; replicas are added or left out")
    for name, help in (
        ("global_batch", "examples of a step"), ("microbatch_size", "examples of a microbatch; their number follows"),
        ("memory_headroom", "share of a device's memory that plans leave free (default: that of the search, or of --cluster FILE)"),
        ("mesh", "degrees that plans must have, as tp=8: of the kept ones, and not others"),
    ):
        known = options_of(Request)[name]
        _add_option(parser, name, replace(known, help=help or known.help))
    _json(parser, "print the answer as one JSON object")


def _resume(parser: Parser) -> None:
    parser.add_argument("out", metavar="OUT", help="the emitted folder whose training is to go on")
    parser.add_argument("--devices", type=count, metavar="N", help="how many devices there are now")
    parser.add_argument("--cluster", metavar="NAME|FILE", help="which, where they are not of the kind and the nodes of before")
    parser.add_argument("-o", "--new", metavar="DIR", help="where to write the program (default: OUT-Ndev, next to OUT)")
    parser.add_argument("--checkpoint", type=_checkpoints, metavar="DIR", help="then train here from the latest of these checkpoints")
    parser.add_argument("--steps", type=count, help="steps in all (default: those that training was started with)")
    parser.add_argument("--no-run", action="store_true", help="write the program only, even with --checkpoint")
    parser.add_argument("--force", action="store_true", help="leave out edits of files that depend on the plan, and of the model file")
    _json(parser, "print both plans and what differs as one JSON object")


def _sweep(parser: Parser) -> None:
    _model(parser)
    parser.add_argument("--cluster", metavar="NAME,NAME", required=True, help="clusters: 8xH100,2x8xH100")
    parser.add_argument("--batch", type=_counts, metavar="N,N", help="global batches (default: the example's)")
    for name in ("dtype", "mesh", "zero", "recompute"):
        _add_option(parser, name, options_of(Request)[name])
    parser.add_argument("--html", metavar="FILE", help="write the table, and rows a second against devices, as a page")
    _no_cache(parser)
    _json(parser)


def _calibrate(parser: Parser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what to measure (default: cpu)")
    parser.add_argument("--processes", type=count, metavar="N", help="ranks (default: one a core, or a GPU)")
    parser.add_argument("--quick", action="store_true", help="few shapes: seconds instead of a minute, less accurate")
    parser.add_argument("--patience", type=seconds, default=60.0, metavar="S",
                        help="seconds to wait while others use the machine (default: 60)")
    parser.add_argument("--force", action="store_true", help="write the profile even if others disturbed it or the fit is bad")
    parser.add_argument("-o", "--out", metavar="PROFILE.json", help="default: ./calibrated-cpu.json, or -cuda")
    _json(parser, "print the profile as one JSON object")


SHELLS = ("bash", "zsh", "fish")


def _completion(parser: Parser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or fish")
    parser.set_defaults(json=False)


# fmt: on
# ---- commands --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """A command: its help, its arguments, and ``function``, by module, which takes the options and returns a ``Result``."""

    function: str
    help: str
    arguments: Callable[[Parser], None]
    epilog: str | None = None


_COMPILE_EXAMPLES = """examples:
  graphpar compile model.py --devices 4
  graphpar compile model.py --mesh pp=2 --schedule zbv --batch 64 --microbatch-size 4 -o out
  graphpar compile model.py --mesh tp=2,dp_replicate=2 --shard-plan plan.toml
  graphpar compile model.py --devices 2 --split layers.12 --run --steps 5
  graphpar compile package.module --devices 8 --no-emit --json
"""
_TO_COMPLETE = """to use it, add to the shell's own configuration:
  bash   source <(graphpar completion bash)
  zsh    source <(graphpar completion zsh)
  fish   graphpar completion fish | source
"""

COMMANDS = {
    "compile": Command(
        "compile_command.run", "compile a model file to a parallel program", _compile, _COMPILE_EXAMPLES
    ),
    "run": Command("run_command.run", "run an emitted program on this machine (torchrun)", _run),
    "verify": Command("verify_command.verify", "compare an emitted program with the unpartitioned model", _verify),
    "check": Command(
        "verify_command.check", "check the types of an emitted program, at its world size, in one process", _check
    ),
    "checkpoint": Command(
        "checkpoint_command.run", "inspect a checkpoint, or convert it from and to safetensors", _checkpoint
    ),
    "report": Command("report_command.report", "print the report of an emitted program or a plan", _report),
    "diff": Command("report_command.diff", "compare two plans: decisions, predicted times, memory", _diff),
    "estimate": Command("estimate_command.run", "price an existing plan: seconds, communication, memory", _estimate),
    "what-if": Command(
        "what_if_command.run", "the plan again at another batch, network, device or number of devices", _what_if
    ),
    "resume": Command(
        "resume_command.run", "go on with training on fewer or more devices, from its checkpoint", _resume
    ),
    "sweep": Command("sweep_command.run", "the chosen plans for several clusters and batches, as a table", _sweep),
    "calibrate": Command(
        "calibrate_command.run", "measure this machine, and write a profile for --cluster", _calibrate
    ),
    "passes": Command("passes_command.run", "the pass table: name, what it needs, what it ensures", _json),
    "completion": Command(
        "completion_command.run",
        "print the script that completes commands and options in a shell",
        _completion,
        _TO_COMPLETE,
    ),
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
    for name, command in COMMANDS.items():
        how = argparse.RawDescriptionHelpFormatter if command.epilog else argparse.HelpFormatter
        command.arguments(commands.add_parser(name, help=command.help, epilog=command.epilog, formatter_class=how))
    return parser
