"""What one GPU can prove, row by row: measured, predicted, ratio and bar. Nothing here has weights; values are drawn.

    python -m benchmarks.gpu                    runs A to D, on the GPU that is here
    python -m benchmarks.gpu --only A1,B        some rows, or runs; "api" is A1 with every name of torch
    python -m benchmarks.gpu --toy              all of it on a CPU, in small sizes: rows that need a GPU's own facts say so
    python -m benchmarks.gpu --emit DIR         only compile the programs into DIR, kilobytes each; --programs DIR takes them from there

    A   does it run: names of torch, training and resuming, against eager torch, host synchronisations, messages
    B   a rank alone: tensor, pipeline, sharded state, context, experts; all predictions against what was measured
    C   tables and techniques: operators, recomputation, torch.compile, offload, checkpoints
    D   exactness: the attention ring, programs on several ranks, two runs of a backward, dropout

Each run is to take less than 10 minutes on a GPU. It proves nothing about NCCL: order, overlap, the price of networks, its memory, its
watchdog, the start on several nodes. These need two GPUs at least.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import graphpar as gp
from benchmarks import gpu_facts, gpu_ranks
from benchmarks.gpu_programs import Programs, Row


@dataclass(frozen=True)
class Check:
    """Rows that are measured together."""

    name: str
    what: str
    rows: Callable[[Programs], Iterator[Row]]


CHECKS = (
    Check("A1", "names of torch", gpu_facts.names_of_torch),
    Check("A2", "training and resuming", gpu_facts.resumed),
    Check("A3", "emitted against eager torch", gpu_facts.against_eager),
    Check("A4", "host synchronisations and launches", gpu_facts.synchronisations),
    Check("A5", "messages", gpu_facts.messages),
    Check("B1", "against tensor parallelism by hand", gpu_ranks.by_hand),
    Check("B2", "ranks of pipelines", gpu_ranks.pipelines),
    Check("B3", "sharded state", gpu_ranks.sharded),
    Check("B4", "context parallelism", gpu_ranks.contexts),
    Check("B5", "experts", gpu_ranks.experts),
    Check("B6", "all predictions of B", gpu_ranks.all_predictions),
    Check("C1", "operators", gpu_facts.operators),
    Check("C2", "recomputation", gpu_ranks.recomputation),
    Check("C3", "torch.compile", gpu_ranks.compiled),
    Check("C4", "offload", gpu_ranks.offloaded),
    Check("C5", "checkpoints", gpu_facts.checkpoints),
    Check("D1", "the attention ring", gpu_facts.ring),
    Check("D2", "programs on several ranks", gpu_facts.verified),
    Check("D3", "two runs of a backward", gpu_facts.repeated),
    Check("D4", "dropout", gpu_facts.dropout),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks that are asked for; returns 1 where a row misses its bar."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--toy", action="store_true", help="small sizes, on the CPU")
    parser.add_argument("--only", metavar="A1,B", default="", help="rows or runs; 'api': A1 with every name")
    parser.add_argument("--programs", type=Path, metavar="DIR", help="take programs from here, and keep new ones here")
    parser.add_argument("--emit", type=Path, metavar="DIR", help="only compile the programs into DIR")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    wanted = [part for part in options.only.upper().replace("API", "A1").split(",") if part]
    needs_gpu = not options.toy and not options.emit and options.only.lower() != "api"
    if needs_gpu and not torch.cuda.is_available():
        parser.error("no GPU is here; --toy runs small sizes on the CPU, and --only api lists names anywhere")
    chosen = [check for check in CHECKS if not wanted or any(check.name.startswith(part) for part in wanted)]
    if not chosen:
        names = ", ".join(check.name for check in CHECKS)
        parser.error(f"--only {options.only!r} is none of api, A, B, C, D, {names}")
    if options.toy:
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="graphpar_gpu_") as scratch:
        programs = Programs(options.emit or options.programs or Path(scratch), options.toy, "api" in options.only)
        if options.emit:
            for name in programs.known:
                print(programs.folder(name), flush=True)
            return 0
        rows = [row for check in chosen for row in _run(check, programs)]
    if options.json:
        print(json.dumps({**_setting(options.toy), "rows": [{**asdict(row), "ok": row.ok} for row in rows]}))
    else:
        _show(rows, options.toy)
    return int(any(row.ok is False for row in rows))


def _run(check: Check, programs: Programs) -> Iterator[Row]:
    """Yield the rows of a check; one that raises is a row that fails, and the others go on."""
    began = time.perf_counter()
    try:
        for row in check.rows(programs):
            yield replace(row, check=check.name)
    except (Exception, SystemExit) as error:
        traceback.print_exc(file=sys.stderr)
        yield Row(f"{check.what} failed", note=f"{type(error).__name__}: {error}", failed=True, check=check.name)
    print(f"{check.name} {check.what}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)


def _setting(toy: bool) -> dict[str, Any]:
    gpu = not toy and torch.cuda.is_available()
    return {
        "graphpar": gp.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if gpu else f"CPU, {platform.machine()}",
        "date": time.strftime("%Y-%m-%d"),
        "toy": toy,
    }


def _show(rows: Sequence[Row], toy: bool) -> None:
    setting = _setting(toy)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    console.print(f"{setting['device']}, torch {setting['torch']}, {setting['date']}\n")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("row", "what", "measured", "predicted", "ratio", "bar", "", "note"):
        table.add_column(heading, justify="right" if heading in ("measured", "predicted", "ratio") else "left")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        verdict = {None: "", True: "ok", False: "MISSED"}[row.ok]
        table.add_row(
            row.check, row.what, row.text(row.measured), row.text(row.predicted), ratio, row.bar, verdict, row.note
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
