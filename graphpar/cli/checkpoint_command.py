"""``graphpar checkpoint``: what is in a checkpoint, and its way to and from safetensors."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphpar.cli.arguments import Commands, add_json
from graphpar.cli.output import Result, progress
from graphpar.errors import GraphparError

if TYPE_CHECKING:
    from rich.console import Console

ACTIONS = ("inspect", "merge", "export", "adapters", "convert")
UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
TAKEN = {
    "to": ("export", "convert"),
    "out": ("merge", "export", "adapters", "convert"),
    "max_shard_size": ("export",),
    "tokenizer": ("export",),
    "merged": ("merge", "export"),
}
"""Which actions take an option."""


def add_parser(commands: Commands) -> None:
    """Add the parser of the command."""
    parser = commands.add_parser("checkpoint", help="inspect a checkpoint, or convert it from and to safetensors")
    parser.add_argument(
        "action",
        metavar="ACTION",
        choices=ACTIONS,
        help="inspect: say what is in it; merge: into one safetensors file; export: as Hugging Face has it; adapters: these alone, as peft "
        "has them; convert: into a checkpoint",
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a checkpoint, or a folder with `latest`; convert: safetensors, too"
    )
    parser.add_argument(
        "--to", metavar="OUT|hf", help="convert: an emitted folder whose model it must fit; export: hf (default)"
    )
    parser.add_argument("-o", "--out", metavar="PATH", help="what to write: a file (merge) or a folder")
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", type=size, help="export: the largest file, such as 500MB (default: 5GB)"
    )
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="export: a tokenizer, a file or a folder, to be written beside the weights"
    )
    parser.add_argument(
        "--merged",
        action="store_true",
        default=None,
        help="merge and export: the model without adapters, with these added to its weights",
    )
    add_json(parser)


def size(text: str) -> int:
    """Read a number of bytes, such as 500MB or 2GiB: the type of an argument."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i?B|)", text)
    if found is None or int(float(found[1]) * UNITS[found[2]]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 500MB or 2GiB.")
    return int(float(found[1]) * UNITS[found[2]])


def run(options: argparse.Namespace) -> Result:
    """Do the action; errors are one sentence."""
    action = options.action
    for name, actions in TAKEN.items():
        if getattr(options, name) is not None and action not in actions:
            raise GraphparError(f"--{name.replace('_', '-')} is for {' and '.join(actions)}; {action} takes none.")
    if action != "inspect" and options.out is None:
        raise GraphparError(f"Say where to write: graphpar checkpoint {action} {options.checkpoint} -o PATH.")
    if action == "export" and options.to not in (None, "hf"):
        raise GraphparError(f"--to is {options.to!r}; export writes hf, Hugging Face's safetensors.")
    with progress(f"{action} {options.checkpoint}"):
        from graphpar.runtime import conversion

        if action == "inspect":
            found = conversion.inspected(options.checkpoint)
            return Result({"checkpoints": found}, lambda console: show(found, console))
        out = Path(options.out)
        if action == "merge":
            data = conversion.merge(options.checkpoint, out, bool(options.merged))
        elif action == "export":
            data = conversion.export(
                options.checkpoint, out, options.max_shard_size or 5 * UNITS["GB"], bool(options.merged),
                None if options.tokenizer is None else Path(options.tokenizer),
            )  # fmt: skip
        elif action == "adapters":
            data = conversion.adapters(options.checkpoint, out)
        else:
            data = conversion.convert(options.checkpoint, out, options.to)
    return Result(data, lambda console: console.out(f" {data['tensors']} tensors in {data['out']}", highlight=False))


def show(found: list[dict[str, Any]], console: Console) -> None:
    """Print a row for each checkpoint."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("checkpoint", "step", "plan", "tensors", "parameters", "weights", "optimizer", "its state"):
        table.add_column(heading, justify="left" if heading in ("checkpoint", "plan", "optimizer") else "right")
    for each in found:
        name = Path(each["path"]).name + (" (latest)" if each["latest"] else "")
        table.add_row(
            name if len(found) > 1 else each["path"],
            str(each["step"]),
            _plan(each),
            str(each["model"]["tensors"] + each["state"]["tensors"]),
            f"{each['model']['elements']:,}",
            _bytes(each["model"]["bytes"]),
            each["optimizer"] or "none",
            _bytes(each["state"]["bytes"]),
        )
    console.print(table)


def _plan(data: dict[str, Any]) -> str:
    if data["mesh"] is None:
        return "none"
    degrees = ", ".join(f"{axis}={degree}" for axis, degree in data["mesh"].items() if degree > 1)
    return (degrees or "one device") + (f", zero {data['zero']}" if data["zero"] else "")


def _bytes(count: int) -> str:
    unit = next((unit for unit in ("TiB", "GiB", "MiB", "KiB") if count >= UNITS[unit]), None)
    return f"{count} B" if unit is None else f"{count / UNITS[unit]:.1f} {unit}"
