"""Seconds and peak memory of ``graphpar compile``, each model in a process of its own.

    python -m benchmarks.planning [--json] [--model gpt2 --model llama3_8b]

No weight is allocated: the models are built under fake tensors. "process" is the whole command, imports included; peak
memory is that process's largest resident set, as the operating system counts it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

EXAMPLES = Path(__file__).parents[1] / "examples"


@dataclass(frozen=True)
class Case:
    """A model file, the devices to compile it for, and the global batch."""

    model: str
    devices: int
    batch: int


CASES = (Case("gpt2", 8, 32), Case("llama3_8b", 32, 128), Case("llama3_405b", 126, 504))


@dataclass(frozen=True)
class Measurement:
    """What one command took. ``emit_s`` is the splitting alone where nothing is written."""

    model: str
    devices: int
    parameters: int
    emitted: bool
    capture_s: float
    plan_s: float
    emit_s: float
    process_s: float
    peak_memory_bytes: int


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.planning", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", action="append", choices=[case.model for case in CASES], help="default: all")
    options = parser.parse_args(arguments)
    chosen = [case for case in CASES if options.model is None or case.model in options.model]
    measured = [_measure(case, emit) for case in chosen for emit in (False, True)]
    if options.json:
        print(json.dumps({"measurements": [asdict(measurement) for measurement in measured]}))
    else:
        Console(highlight=False, width=None if sys.stdout.isatty() else 100).print(_table(measured))


def _measure(case: Case, emit: bool) -> Measurement:
    with tempfile.TemporaryDirectory(prefix="graphpar_benchmark_") as scratch:
        command = [sys.executable, "-m", "graphpar.cli.main", "compile", str(EXAMPLES / f"{case.model}.py"), "--json"]
        command += ["--devices", str(case.devices), "--batch", str(case.batch)]
        command += ["-o", str(Path(scratch) / "out")] if emit else ["--no-emit"]
        began = time.perf_counter()
        data, peak = _run(command, Path(scratch))
        seconds = time.perf_counter() - began
    took = data["seconds"]
    return Measurement(
        model=case.model,
        devices=case.devices,
        parameters=data["model"]["parameters"],
        emitted=emit,
        capture_s=took["capture"],
        plan_s=took["plan"],
        emit_s=took["emit"],
        process_s=seconds,
        peak_memory_bytes=peak,
    )


def _run(command: Sequence[str], scratch: Path) -> tuple[dict[str, Any], int]:
    """The command's JSON, and the largest resident set of that very process."""
    with (scratch / "stdout").open("wb") as out, (scratch / "stderr").open("wb") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{(scratch / 'stderr').read_text()}")
    data: dict[str, Any] = json.loads((scratch / "stdout").read_text())
    unit = 1 if sys.platform == "darwin" else 1024
    return data, usage.ru_maxrss * unit


def _table(measured: Sequence[Measurement]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("model", "parameters", "devices", "output", "capture", "plan", "emit", "process", "peak memory"):
        table.add_column(heading, justify="left" if heading in ("model", "output") else "right", no_wrap=True)
    for row in measured:
        table.add_row(
            row.model,
            f"{row.parameters / 1e9:.2f} B",
            str(row.devices),
            "program" if row.emitted else "plan",
            *(f"{seconds:.1f} s" for seconds in (row.capture_s, row.plan_s, row.emit_s, row.process_s)),
            f"{row.peak_memory_bytes / 1e9:.2f} GB",
        )
    return table


if __name__ == "__main__":
    main()
