"""Models of public packages, compiled for several devices and verified: which are exact, and why others are refused.

    python -m benchmarks.packages [--only PATTERN] [--mesh pp=2] [--json] [--write]

The models are those of :mod:`benchmarks.package_models`: toy sizes, random weights, from packages that are installed here (none is a
dependency). Each runs over every mesh of ``MESHES``; programs are verified in launches of several: steps of SGD with momentum against the
model on one device, in fp32, and in fp64 where an error could be rounding. ``--write`` puts the table into ``docs/architectures.md``.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import graphpar as gp
from benchmarks.package_models import MODELS
from graphpar.verification import verify_all

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
HEADING = "## Public packages"
LAUNCH = 6
"""Programs that one launch verifies."""
MESHES: Mapping[str, Mapping[str, Any]] = {
    "pp=2": {"mesh": {"pp": 2}, "microbatch_size": 2},
    "tp=2": {"mesh": {"tp": 2}},
    "dp_shard=2": {"mesh": {"dp_shard": 2}, "zero": 3},
}


@dataclass(frozen=True)
class Row:
    """A model over a mesh: ``outcome`` is exact, refused, wrong, failed or "not installed"; ``reason`` says why it is not exact."""

    model: str
    mesh: str
    outcome: str
    error: float | None = None
    reason: str = ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(prog="benchmarks.packages", description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="*", help="names of models, e.g. 'timm*'")
    parser.add_argument("--mesh", choices=tuple(MESHES), help="one mesh (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write", action="store_true", help=f"write the table to {PAGE.parent.name}/{PAGE.name}")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    rows = []
    for row in measured(
        [name for name in MODELS if fnmatch.fnmatch(name, options.only)],
        [options.mesh] if options.mesh else list(MESHES),
    ):
        rows.append(row)
        print(f"{row.model}, {row.mesh}: {row.outcome} {row.reason}", file=sys.stderr, flush=True)
    order = list(MODELS)
    rows.sort(key=lambda row: (order.index(row.model), row.mesh))
    if options.write:
        PAGE.write_text(PAGE.read_text(encoding="utf-8").split(HEADING)[0] + _section(rows), encoding="utf-8")
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        Console(highlight=False, width=None if sys.stdout.isatty() else 140).print(_table(rows))


def measured(names: Sequence[str], meshes: Sequence[str]) -> Iterator[Row]:
    """Yield a row for each of ``names`` over each mesh, as they are done."""
    waiting: list[tuple[str, str, gp.Parts]] = []
    for name in names:
        for mesh in meshes:
            made = compiled(name, mesh)
            if isinstance(made, Row):
                yield made
            else:
                waiting.append((name, mesh, made))
        if len(waiting) >= LAUNCH:
            yield from _verified(waiting)
            waiting = []
    if waiting:
        yield from _verified(waiting)


def compiled(name: str, mesh: str) -> gp.Parts | Row:
    """Compile a model for a mesh; the row of one for which that is not possible."""
    torch.manual_seed(0)
    try:
        case = MODELS[name]()
    except ImportError as error:
        return Row(name, mesh, "not installed", reason=str(error))
    try:
        program = gp.export(
            case.model.train(), case.args, dict(case.kwargs), loss_fn=case.loss_fn, targets=case.targets
        )
        plan = gp.plan(program, **MESHES[mesh], allow_batch_coupling=bool(program.couplings))
        return gp.partition(program, plan)
    except gp.GraphparError as error:
        return Row(name, mesh, "refused", reason=str(error).split("\n")[0])
    except Exception as error:  # a fault of graphpar's own is a row of the table, too
        return Row(name, mesh, "failed", reason=f"{type(error).__name__}: {str(error).splitlines()[:1]}")


def _verified(waiting: Sequence[tuple[str, str, gp.Parts]]) -> Iterator[Row]:
    try:
        outcomes = verify_all([parts for *_, parts in waiting], steps=3, timeout_s=600)
    except Exception as error:
        if len(waiting) == 1:
            ((name, mesh, _),) = waiting
            yield Row(name, mesh, "failed", reason=f"{type(error).__name__}: {str(error).splitlines()[:1]}")
        else:
            for each in waiting:
                yield from _verified([each])
        return
    for (name, mesh, _), found in zip(waiting, outcomes):
        native = found.native or found
        shown = native if native.ok and found.ok else found
        largest = max(shown.max_error.values(), default=0.0)
        first = "" if found.first_difference is None else str(found.first_difference)
        outcome = "exact" if found.ok else "wrong" if found.ran else "failed"
        yield Row(name, mesh, outcome, largest, "" if found.ok else "; ".join([*found.problems, first]))


def _summary(rows: Sequence[Row]) -> str:
    counts = Counter(row.outcome for row in rows)
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), title=_summary(rows))
    for heading in ("model", "mesh", "outcome", "error", "reason"):
        table.add_column(heading)
    for row in rows:
        table.add_row(row.model, row.mesh, row.outcome, "" if row.error is None else f"{row.error:.0e}", row.reason)
    return table


def _section(rows: Sequence[Row]) -> str:
    """A line for each model, and each reason once."""
    lines = [
        HEADING,
        "",
        "`python -m benchmarks.packages --write` did the same with models of public packages at toy sizes",
        "(`benchmarks/package_models.py`), each with pipeline stages, with tensor parallelism, and with ZeRO-3.",
        "",
        f"**Of {len(rows)} programs of {len({row.model for row in rows})} models: {_summary(rows)}.**",
        "",
        f"| model | {' | '.join(MESHES)} | reason |",
        f"|---|{'---|' * len(MESHES)}---|",
    ]
    for model in dict.fromkeys(row.model for row in rows):
        own = {row.mesh: row for row in rows if row.model == model}
        cells = [_cell(own.get(mesh)) for mesh in MESHES]
        reasons = "; ".join(dict.fromkeys(row.reason for row in own.values() if row.reason)).replace("|", "/")
        lines.append(f"| {model} | {' | '.join(cells)} | {reasons} |")
    return "\n".join(lines) + "\n"


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row.error:.0e}" if row.outcome == "exact" else row.outcome


if __name__ == "__main__":
    main()
