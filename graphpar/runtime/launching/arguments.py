"""The command lines of emitted scripts: their options, and the types of values."""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path
from typing import NoReturn

from graphpar.runtime.checkpoints.folders import MEMORY, RECORD
from graphpar.runtime.errors import AgreedError, near_match
from graphpar.runtime.training.rates import DECAYS

_NEEDS: dict[str, tuple[str, ...]] = {
    "eval_batches": ("eval_every",), "checkpoint_every": ("checkpoint",), "keep": ("checkpoint",), "checkpoint_async": ("checkpoint",),
    "snapshot_every": ("checkpoint",), "snapshots": ("snapshot_every",),
    "keep_best": ("checkpoint", "eval_every"), "patience": ("eval_every",), "max_skips": ("skip_spikes",), "final_lr": ("schedule",),
    "profile_folder": ("profile",),
}  # fmt: skip
"""Options that say how another one does its work."""
_EXCLUDES = {
    "batch": ("data", "workers"),
    "check": (
        "accumulate",
        "batch",
        "check_replicas",
        "checkpoint",
        "data",
        "eval_every",
        "gc_every",
        "json",
        "keep_best",
        "log_file",
        "memory_snapshot",
        "mlflow",
        "patience",
        "profile",
        "save",
        "schedule",
        "skip_spikes",
        "snapshot_every",
        "tensorboard",
        "wandb",
        "warmup",
    ),
}
"""Options that have no effect beside another one."""


class _Parser(argparse.ArgumentParser):
    """A parser of what all ranks are given: its errors are one line of each node's first rank, and of torchrun's last lines."""

    def error(self, message: str) -> NoReturn:
        """Print a message for the user and exit with status 2."""
        from graphpar.runtime.distributed import GRACE_S, USER_ERROR, report

        if int(os.environ.get("LOCAL_RANK", "0")):
            time.sleep(GRACE_S)  # to be ended by torchrun, which would end the first rank before it says why
        report(AgreedError(f"{message.removeprefix('argument ')} ({self.prog} --help lists the options)"))
        raise SystemExit(USER_ERROR)


def train_arguments(description: str) -> argparse.Namespace:
    """Read the command line of a script that trains; end with a sentence where a value is wrong or an option would be ignored."""
    return parsed(train_parser(description))


def train_parser(description: str) -> argparse.ArgumentParser:
    """Return the parser of a script that trains."""
    parser = _Parser(description=description, allow_abbrev=False)
    parser.add_argument("--steps", type=count, default=10)
    parser.add_argument("--lr", type=number, help="learning rate (default: the optimizer's own; AdamW's is 1e-3)")
    parser.add_argument(
        "--warmup", type=whole, default=0, metavar="STEPS", help="steps in which the rate rises to --lr"
    )
    parser.add_argument(
        "--schedule", choices=tuple(DECAYS), help="how the rate falls until --steps (default: constant)"
    )
    parser.add_argument("--final-lr", type=number, default=0.0, metavar="PART", help="of the rate, after --steps")
    parser.add_argument("--clip", type=limit, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--accumulate", type=count, default=1, metavar="N", help="batches a step, computed like one")
    parser.add_argument("--eval-every", type=count, metavar="STEPS", help="evaluate on held-out batches")
    parser.add_argument("--eval-batches", type=count, default=1, metavar="M")
    parser.add_argument(
        "--patience", type=count, metavar="N", help="end after N evaluations that are no better than the best"
    )
    parser.add_argument(
        "--skip-spikes",
        type=limit,
        metavar="D",
        help="skip updates where loss or gradient norm is not finite or D deviations above the mean (inf: not finite)",
    )
    parser.add_argument("--max-skips", type=whole, default=10, metavar="K", help="end with an error after K in a row")
    parser.add_argument(
        "--checkpoint", type=checkpoint_folder, help="folder of checkpoints: resume from its latest, and save there"
    )
    parser.add_argument("--checkpoint-every", type=count, default=1000, metavar="STEPS")
    parser.add_argument("--keep", type=count, default=2, help="how many checkpoints to keep")
    parser.add_argument("--keep-best", action="store_true", help="keep that of the lowest held-out loss too, as best")
    parser.add_argument("--checkpoint-async", action="store_true", help="copy to host memory, and write while training")
    parser.add_argument(
        "--snapshot-every",
        type=count,
        metavar="N",
        help="keep the state of each Nth step in memory, here and on the next node",
    )
    parser.add_argument(
        "--snapshots", type=Path, default=MEMORY, help="folder in each node's memory for it (default: /dev/shm)"
    )
    parser.add_argument("--log-file", type=output_file, help="file to which each step appends a line of JSON")
    parser.add_argument("--log-every", type=count, default=1, metavar="N", help="read the loss at every Nth step only")
    parser.add_argument("--tensorboard", type=Path, help="folder for TensorBoard")
    parser.add_argument("--wandb", metavar="PROJECT", help="project of Weights & Biases")
    parser.add_argument("--mlflow", metavar="EXPERIMENT", help="experiment of MLflow")
    parser.add_argument("--profile", type=steps, metavar="FIRST-LAST", help="steps to trace with torch.profiler")
    parser.add_argument("--profile-folder", type=Path, default=Path("profile"), help="where each rank writes its trace")
    parser.add_argument("--memory-snapshot", type=Path, metavar="FOLDER", help="where ranks record a GPU's allocations")
    parser.add_argument("--gc-every", type=count, metavar="N", help="collect Python's garbage after each Nth step only")
    parser.add_argument(
        "--cuda-graphs", action="store_true", help="replay forwards and backwards as one CUDA graph, where they can be"
    )
    parser.add_argument("--check", action="store_true", help="compare the first step with the model's own, and exit")
    parser.add_argument(
        "--check-replicas", type=count, metavar="N", help="every N steps, compare what ranks should have equal"
    )
    _add_common(parser, "trained weights", "loss, gradient norm and seconds of every step")
    return parser


def infer_arguments(description: str) -> argparse.Namespace:
    """Read the command line of a script that infers; end with a sentence where a value is wrong or an option would be ignored."""
    parser = _Parser(description=description, allow_abbrev=False)
    parser.add_argument("--steps", type=count, default=10)
    _add_common(parser, "outputs", "outputs' shapes")
    return parsed(parser)


def _add_common(parser: argparse.ArgumentParser, saved: str, recorded: str) -> None:
    parser.add_argument("--seed", type=whole, default=0)
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compile the blocks with torch.compile (default: as planned)",
    )
    parser.add_argument("--weights", type=input_file, help="safetensors file or folder (default: weights/)")
    parser.add_argument("--batch", type=input_file, help="safetensors file with one batch, used for every step")
    parser.add_argument("--data", type=Path, help="text, file of tokens, or folder of these")
    parser.add_argument("--workers", type=whole, default=0, help="processes of each rank that load examples")
    parser.add_argument("--save", type=replaced_file, help=f"where to write the {saved}")
    parser.add_argument("--json", type=output_file, help=f"where to write {recorded}")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: GPUs if the plan or a node has any")
    parser.add_argument("--timeout", type=positive, default=600, help="seconds that a rank waits for another")


def generate_arguments(description: str) -> argparse.Namespace:
    """Read the command line of a script that generates; end with a sentence where a value is wrong."""
    parser = _Parser(description=description, allow_abbrev=False)
    parser.add_argument("--prompt", action="append", default=[], help="a text to continue; may be repeated")
    parser.add_argument("--tokens", action="append", type=token_ids, default=[], help="the same as ids: 15,3,8")
    parser.add_argument("--tokenizer", type=input_file, help="tokenizer.json, or its folder, for --prompt")
    parser.add_argument("--max-new-tokens", type=count, help="for each prompt (default: what the cache has room for)")
    parser.add_argument("--sample", action=argparse.BooleanOptionalAction, help="draw tokens, or take the likeliest")
    parser.add_argument("--temperature", type=positive)
    parser.add_argument("--top-k", type=whole)
    parser.add_argument("--top-p", type=positive)
    parser.add_argument("--repetition-penalty", type=positive)
    parser.add_argument("--seed", type=whole, default=0)
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--weights", type=input_file, help="safetensors file or folder (default: weights/)")
    weights.add_argument("--checkpoint", type=input_file, help="a training checkpoint, of any plan, for the weights")
    parser.add_argument("--json", type=output_file, help="where to write the tokens and texts")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: GPUs if the plan or a node has any")
    parser.add_argument("--timeout", type=number, default=600, help="seconds that a rank waits for another")
    return parsed(parser)


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line; end with a sentence where an option would be ignored."""
    args, unknown = parser.parse_known_args()
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        parser.error(f"there is no option {unknown[0]}.{near_match(unknown[0].partition('=')[0], flags)}")
    given = {name for name, value in vars(args).items() if value != parser.get_default(name)}
    for name, needed in _NEEDS.items():
        missing = [_flag(each) for each in needed if each not in given]
        if name in given and missing:
            parser.error(f"{_flag(name)} needs {' and '.join(missing)}")
    for name, others in _EXCLUDES.items():
        ignored = [_flag(other) for other in others if other in given and name in given]
        if ignored:
            parser.error(f"{', '.join(ignored)} would have no effect with {_flag(name)}; leave one of them out")
    return args


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def input_file(text: str) -> Path:
    """Read the path of a file or folder that is there: the type of an argument."""
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"there is no {text}")
    return path


def count(text: str) -> int:
    """Read a whole number of at least 1: the type of an argument."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it is {text}; it must be a whole number of at least 1")
    return int(text)


def whole(text: str) -> int:
    """Read a whole number of at least 0, below 2**32: the type of an argument."""
    if not text.isascii() or not text.isdigit() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"it is {text}; it must be a whole number of at least 0, below 2**32")
    return int(text)


def steps(text: str) -> tuple[int, int]:
    """Read the first and the last of some steps, counted from 0: the type of an argument."""
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"it is {text!r}; it must be the first and the last step, such as 10-12")
    return int(first), int(last)


def token_ids(text: str) -> list[int]:
    """Read token ids with commas between them: the type of an argument."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(
            f"it is {text!r}; it must be token ids with commas between them, such as 15,3,8"
        )
    return list(map(int, parts))


def number(text: str) -> float:
    """Read a finite number of at least 0: the type of an argument."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"it is {text}; it must be a finite number of at least 0")
    return value


def positive(text: str) -> float:
    """Read a finite number above 0: the type of an argument."""
    value = number(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"it is {text}; it must be above 0")
    return value


def limit(text: str) -> float:
    """Read a number above 0, or inf, which limits nothing: the type of an argument."""
    return math.inf if text == "inf" else positive(text)


def output_file(text: str) -> Path:
    """Read the path of a file that can be written, before the time of training is spent: the type of an argument."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} can't be written: no permission")
    return path


def replaced_file(text: str) -> Path:
    """Read the path of a file that is written beside and renamed, so that no device may be there: the type of an argument."""
    path = output_file(text)
    if path.exists() and not path.is_file():
        raise argparse.ArgumentTypeError(f"{text} exists, and is not a regular file")
    return path


def checkpoint_folder(text: str) -> Path:
    """Read the path of a folder of checkpoints, which is there or can be made: the type of an argument."""
    path = Path(text)
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"{there} exists, and is not a folder")
    if (path / RECORD).exists():
        raise argparse.ArgumentTypeError(f"{text} is itself a checkpoint; give the folder that it is in")
    if not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(f"{there} can't be written: no permission")
    return path
