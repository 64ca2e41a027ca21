"""``graphpar checkpoint``: what is in a checkpoint, and its way to and from safetensors."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from graphpar.cli.output import Result, progress
from graphpar.cli.parser import SIZES
from graphpar.errors import GraphparError
from graphpar.runtime.checkpoints import conversion
from graphpar.text import bytes_text

TAKEN = {
    "to": ("export", "convert"),
    "out": ("merge", "export", "adapters", "convert"),
    "max_shard_size": ("export",),
    "tokenizer": ("export",),
    "merged": ("merge", "export"),
}
"""Which actions take an option."""


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
        if action == "inspect":
            found = conversion.inspected(options.checkpoint)
            return Result({"checkpoints": found}, lambda console: show(found, console))
        out = Path(options.out)
        if action == "merge":
            data = conversion.merge(options.checkpoint, out, bool(options.merged))
        elif action == "export":
            data = conversion.export(
                options.checkpoint, out, options.max_shard_size or 5 * SIZES["GB"], bool(options.merged),
                None if options.tokenizer is None else Path(options.tokenizer),
            )  # fmt: skip
        elif action == "adapters":
            data = conversion.adapters(options.checkpoint, out)
        else:
            data = conversion.convert(options.checkpoint, out, options.to)
    return Result(data, lambda console: console.out(f" {data['tensors']} tensors in {data['out']}", highlight=False))


def show(found: list[dict[str, Any]], console: Console) -> None:
    """Print a row for each checkpoint."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("checkpoint", "step", "plan", "tensors", "parameters", "weights", "optimizer", "its state"):
        table.add_column(heading, justify="left" if heading in ("checkpoint", "plan", "optimizer") else "right")
    for each in found:
        marks = [mark for mark in ("latest", "best") if each[mark]]
        name = Path(each["path"]).name + (f" ({', '.join(marks)})" if marks else "")
        table.add_row(
            name if len(found) > 1 else each["path"],
            str(each["step"]),
            _plan(each),
            str(each["model"]["tensors"] + each["state"]["tensors"]),
            f"{each['model']['elements']:,}",
            bytes_text(each["model"]["bytes"]),
            each["optimizer"] or "none",
            bytes_text(each["state"]["bytes"]),
        )
    console.print(table)


def _plan(data: dict[str, Any]) -> str:
    if data["mesh"] is None:
        return "none"
    degrees = ", ".join(f"{axis}={degree}" for axis, degree in data["mesh"].items() if degree > 1)
    return (degrees or "one device") + (f", zero {data['zero']}" if data["zero"] else "")
