"""``graphpar sweep``: one model planned for several clusters and batches. The model is traced once."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from markupsafe import Markup
from rich.console import Console

from graphpar.cli.output import Result, check_writable, phases, print_wrapped, write_text
from graphpar.cli.parser import given_options
from graphpar.cli.trace import asked_precision, export_file
from graphpar.errors import GraphparError, NothingFits
from graphpar.frontend.capture_cache import CaptureCache, captures_folder
from graphpar.hardware.cluster import Cluster
from graphpar.ir.program import Program
from graphpar.passes.planning.constraints import PlanConstraints
from graphpar.passes.planning.plan_request import plan_request, planned
from graphpar.passes.planning.planned import Planned
from graphpar.report.charts import throughput_svg
from graphpar.report.page import sheet, table
from graphpar.report.phrases import mesh_text
from graphpar.text import bytes_text, rate_text, share_text, spread_text

_HEAD = [
    "cluster",
    "devices",
    "batch",
    "mesh",
    "schedule",
    "zero",
    "recompute",
    "microbatches",
    "step",
    "rows/s",
    "MFU",
    "peak",
]


@dataclass(frozen=True)
class _Outcome:
    """The plan of a cluster and a batch as plain data, in seconds and bytes.

    ``why_not``: by how much it does not fit, or why there is no plan at all (``refused``).
    """

    cluster: str
    devices: int
    global_batch: int | None
    fits: bool
    why_not: str | None = None
    mesh: Mapping[str, int] | None = None
    schedule: str | None = None
    zero: int | None = None
    recompute: Any = None
    microbatches: int | None = None
    microbatch_size: int | None = None
    step_time_s: float | None = None
    spread_s: float | None = None
    rows_per_s: float | None = None
    mfu: float | None = None
    peak_memory_bytes: int | None = None
    memory_bytes: int | None = None
    refused: bool = False


def run(options: argparse.Namespace) -> Result:
    """Plan the model for each cluster and batch; a pair without a plan says why in its row."""
    if options.html is not None:
        check_writable(options.html)
    pairs = [
        (name, _constraints(options, name, rows))
        for name in map(str.strip, options.cluster.split(","))
        for rows in options.batch or [None]
    ]
    precision = asked_precision(options, *(name for name, _ in pairs))
    with phases() as phase:
        phase("tracing the model")
        cache = CaptureCache(options.model, None if options.no_cache else captures_folder(), precision)
        program = export_file(cache.file, None, precision, cache=cache)
        rows = []
        for name, constraints in pairs:
            phase(f"planning for {name}, batch {constraints.global_batch or 'of the example'}")
            rows.append(_row(program, constraints, name))
    if all(row.refused for row in rows):
        raise GraphparError(str(rows[0].why_not))
    data = {"model": program.name, "rows": [asdict(row) for row in rows]}
    if options.html is not None:
        write_text(options.html, _page(program.name, rows), options.written)

    def show(console: Console) -> None:
        for line, whole in _lines(program.name, rows):
            if whole:  # a row of the table
                console.out(line, highlight=False)
            else:
                print_wrapped(console, [line])
        if options.html is not None:
            console.out(f" Wrote      {options.html}", highlight=False)

    return Result(data, show)


def _constraints(options: argparse.Namespace, cluster: str, rows: int | None) -> PlanConstraints:
    given = {name: value for name, value in given_options(options).items() if name not in ("cluster", "batch")}
    return plan_request(Cluster.parse(cluster), **given | {"global_batch": rows, "top": 0})


def _row(program: Program, constraints: PlanConstraints, given: str) -> _Outcome:
    in_file = given.endswith((".json", ".toml"))  # whose path tells more than the device's name
    cluster = given if in_file else str(constraints.cluster)
    rows = constraints.global_batch
    try:
        return _of_plan(cluster, planned(program, constraints))
    except NothingFits as error:
        return _Outcome(cluster, constraints.size, rows, False, str(error))
    except GraphparError as error:
        return _Outcome(cluster, constraints.size, rows, False, str(error), refused=True)


def _of_plan(cluster: str, plan: Planned) -> _Outcome:
    predicted = plan.predicted
    assert predicted is not None  # there is a cluster
    missing = predicted.missing_bytes
    return _Outcome(
        cluster,
        plan.mesh.size,
        plan.global_batch,
        missing <= 0,
        f"does not fit: {bytes_text(missing)} too much" if missing > 0 else None,
        plan.mesh.degrees(),
        plan.schedule,
        plan.zero,
        plan.recompute if isinstance(plan.recompute, str) else dict(plan.recompute),
        plan.microbatches,
        plan.microbatch_size,
        predicted.step_time_s,
        predicted.spread_s,
        plan.global_batch / predicted.step_time_s,
        predicted.mfu,
        max(predicted.peak_memory_bytes),
        predicted.memory_bytes,
    )


def _cells(row: _Outcome) -> list[str]:
    """Write a row of the table; without a plan, of what was asked for alone."""
    request = [row.cluster, str(row.devices), "" if row.global_batch is None else str(row.global_batch)]
    if row.mesh is None or row.step_time_s is None or row.rows_per_s is None or row.mfu is None:
        return request
    recompute = row.recompute if isinstance(row.recompute, str) else "by block"
    return [
        *request,
        mesh_text(row.mesh),
        str(row.schedule) if row.mesh["pp"] > 1 else "",
        str(row.zero),
        recompute,
        f"{row.microbatches} x {row.microbatch_size}",
        spread_text(row.step_time_s, row.spread_s or 0.0),
        rate_text(row.rows_per_s),
        share_text(row.mfu),
        bytes_text(row.peak_memory_bytes or 0),
    ]


def _lines(name: str, rows: list[_Outcome]) -> list[tuple[str, bool]]:
    """Write the table's lines, each with whether it must not be wrapped."""
    cells = [_cells(row) for row in rows]
    padded = [_HEAD, *(line + [""] * (len(_HEAD) - len(line)) for line in cells)]
    widths = [max(map(len, column)) for column in zip(*padded)]

    def joined(line: list[str]) -> str:
        return " " + "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths)).rstrip()

    lines = [(f" graphpar   {name}", False), ("", False), (joined(_HEAD), True)]
    for line, row in zip(cells, rows):
        why = "" if row.why_not is None else f"  {row.why_not}"
        lines.append((joined(line) + why, row.mesh is not None))
    return lines


def _page(name: str, rows: list[_Outcome]) -> str:
    points = [
        (f"batch {row.global_batch}", row.devices, row.rows_per_s, row.cluster)
        for row in rows
        if row.fits and row.rows_per_s is not None
    ]
    chart = throughput_svg(points) if points else Markup('<p class="soft">No plan fits.</p>')
    cells = [[*_cells(row), *[""] * len(_HEAD)][: len(_HEAD)] + [row.why_not or ""] for row in rows]
    return sheet(name, [("Rows a second against devices", chart), ("Plans", table([*_HEAD, ""], cells))])
