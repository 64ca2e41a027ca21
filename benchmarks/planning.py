"""Seconds and peak memory of ``graphpar compile``, each model in a process of its own; then seconds of one price, and
of the search for placements.

    python -m benchmarks.planning [--json] [--only 'compile gpt2'] [--only 'search*'] [--repetitions 7]

No weight is allocated: the models are built under fake tensors. "process" is the whole command, imports included; peak
memory is that process's largest resident set, as the operating system counts it. Nothing is pinned: meshes, schedules,
microbatches and stages are searched. Bytecode is there before, as ``pip install`` leaves it. For prices see
:mod:`benchmarks.pricing_times`, for placements :mod:`benchmarks.search_times`.
"""

from __future__ import annotations

import argparse
import compileall
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import graphpar
from benchmarks import pricing_times, search_times
from benchmarks.pricing_times import PricingTime
from benchmarks.search_times import Ratio, SearchTime

EXAMPLES = Path(__file__).parents[1] / "examples"


@dataclass(frozen=True)
class Case:
    """A model file, the devices to compile it for, the global batch, the dtype, and whether a program is written too."""

    model: str
    cluster: str
    batch: int
    dtype: str = "bf16"
    emitted: bool = False


CASES = (
    Case("gpt2", "8xCPU", 32, "fp32", emitted=True),
    Case("llama3_8b", "8x8xH100-SXM-80GB", 256, emitted=True),
    Case("llama3_70b", "64x8xH100-SXM-80GB", 1024),
    Case("llama3_405b", "2048x8xH100-SXM-80GB", 2048),
)


@dataclass(frozen=True)
class Measurement:
    """Time and memory of one command. ``emit_s`` is the splitting alone where nothing is written."""

    model: str
    cluster: str
    devices: int
    parameters: int
    emitted: bool
    considered: int
    priced: int
    capture_s: float
    plan_s: float
    emit_s: float
    process_s: float
    peak_memory_bytes: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(prog="benchmarks.planning", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    names = [f"compile {case.model}" for case in CASES] + [f"price {case.model}" for case in pricing_times.CASES]
    names += [*(f"search {model.label}" for model in search_times.MODELS)]
    parser.add_argument("--only", action="append", metavar="PATTERN", help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--repetitions", type=int, default=7, help="of each search (default: 7)")
    options = parser.parse_args(arguments)
    wanted = {name for name in names if any(fnmatch(name, pattern) for pattern in options.only or ["*"])}
    if not wanted:
        parser.error(f"--only {' '.join(options.only)} fits none of: {'; '.join(names)}")
    chosen = [case for case in CASES if f"compile {case.model}" in wanted]
    compileall.compile_dir(Path(graphpar.__file__).parent, quiet=1)
    measured = [_measure(case, emit) for case in chosen for emit in (False, True)[: 1 + case.emitted]]
    prices = pricing_times.measure([case for case in pricing_times.CASES if f"price {case.model}" in wanted])
    models = [model for model in search_times.MODELS if f"search {model.label}" in wanted]
    times, ratios = search_times.measure(models, options.repetitions)
    if options.json:
        found = {
            "measurements": [asdict(row) for row in measured],
            "prices": [asdict(row) for row in prices],
            "searches": [asdict(row) for row in times],
            "ratios": [asdict(row) for row in ratios],
        }
        print(json.dumps(found))
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    tables = [_table(measured)] if measured else []
    tables += [_price_table(prices)] if prices else []
    tables += [_search_table(times), _ratio_table(ratios)] if times else []
    for i, table in enumerate(tables):
        console.print(*[""] * (i > 0), table, sep="\n")


def _measure(case: Case, emit: bool) -> Measurement:
    with tempfile.TemporaryDirectory(prefix="graphpar_benchmark_") as scratch:
        command = [sys.executable, "-m", "graphpar.cli.main", "compile", str(EXAMPLES / f"{case.model}.py"), "--json"]
        command += ["--cluster", case.cluster, "--batch", str(case.batch), "--dtype", case.dtype]
        command += ["-o", str(Path(scratch) / "out"), "--no-weights"] if emit else ["--no-emit"]
        began = time.perf_counter()
        data, peak = _run(command, Path(scratch))
        seconds = time.perf_counter() - began
    took = data["seconds"]
    return Measurement(
        model=case.model,
        cluster=case.cluster,
        devices=math.prod(data["plan"]["mesh"].values()),
        parameters=data["model"]["parameters"],
        emitted=emit,
        considered=data["search"]["considered"],
        priced=data["search"]["priced"],
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
    for heading in (
        "model",
        "parameters",
        "devices",
        "output",
        "plans",
        "priced",
        "capture",
        "plan",
        "emit",
        "process",
        "peak memory",
    ):
        table.add_column(heading, justify="left" if heading in ("model", "output") else "right", no_wrap=True)
    for row in measured:
        table.add_row(
            row.model,
            f"{row.parameters / 1e9:.2f} B",
            str(row.devices),
            "program" if row.emitted else "plan",
            f"{row.considered:,}",
            f"{row.priced:,}",
            *(f"{seconds:.1f} s" for seconds in (row.capture_s, row.plan_s, row.emit_s, row.process_s)),
            f"{row.peak_memory_bytes / 2**30:.2f} GiB",
        )
    return table


def _price_table(times: Sequence[PricingTime]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("price of a plan", "devices", "once a tp degree", "each plan"):
        table.add_column(heading, justify="left" if not table.columns else "right", no_wrap=True)
    for row in times:
        table.add_row(row.model, f"{row.devices:,}", f"{row.once_s:.2f} s", f"{row.plan_s * 1e3:.1f} ms")
    return table


def _search_table(times: Sequence[SearchTime]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("sharding search", "mesh", "capture", "build", "solve", "read", "plan", "lower"):
        table.add_column(heading, justify="left" if len(table.columns) < 2 else "right", no_wrap=True)
    for row in times:
        seconds = (row.build_s, row.solve_s, row.read_s, row.plan_s, row.lower_s)
        mesh = " x ".join(f"{axis} {degree}" for axis, degree in row.mesh.items())
        table.add_row(row.model, mesh, f"{row.capture_s:.1f} s", *(f"{s:.3f} s" for s in seconds))
    return table


def _ratio_table(ratios: Sequence[Ratio]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("ratio", "plan", "lower"):
        table.add_column(heading, justify="left" if heading == "ratio" else "right", no_wrap=True)
    for row in ratios:
        table.add_row(row.what, f"{row.plan:.2f}", f"{row.lower:.2f}")
    return table


if __name__ == "__main__":
    main()
