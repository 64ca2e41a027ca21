"""``graphpar what-if``: the plans that a search kept, where another batch, network, device or number of devices holds."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from graphpar.cli.output import Result, print_wrapped
from graphpar.cli.parser import given_options
from graphpar.cli.plan_file import read_plan, read_record
from graphpar.cost_models.kept_plans import KEPT_PLANS, Answer, Change, KeptPlans, Repriced, what_if
from graphpar.errors import GraphparError
from graphpar.hardware.cluster import Cluster
from graphpar.ir.plan import Plan
from graphpar.report.data import host_misfits
from graphpar.report.phrases import mesh_text
from graphpar.runtime.mesh import Mesh
from graphpar.text import bytes_text, plural, seconds_text, share_text, spread_text


def run(options: argparse.Namespace) -> Result:
    """Price the plans beside ``options.plan`` under what else is given."""
    path, record = read_record(options.plan)
    plan = read_plan(path, record)
    kept, given = _kept(path, plan), given_options(options)
    if "cluster" in given:
        given["cluster"] = Cluster.parse(given["cluster"])
    if "mesh" in given:
        given["mesh"] = Mesh.parse(given["mesh"])
    change = Change(network=options.network, **given)
    if change == Change():
        raise GraphparError(
            "Give what is to be different: --network 0.5x, --batch, --devices, --cluster, --microbatch-size, --memory-headroom or --mesh."
        )
    answer = what_if(kept, change, plan)
    data = {"change": _said(change), **answer.to_json()}
    return Result(data, lambda console: _show(console, answer, change))


def _kept(path: Path, plan: Plan) -> KeptPlans:
    """Read the plans that the search of ``plan`` kept."""
    file = path.parent / KEPT_PLANS
    if path.name != "plan.json" or not file.is_file():
        raise GraphparError(
            f"There is no {KEPT_PLANS} next to {path}: a search for training or inference writes it into its program. Make "
            "one with `graphpar compile MODEL --devices N -o OUT`, without a plan, and give OUT."
        )
    record = read_record(file)[1]
    try:
        kept = KeptPlans.from_json(record)
    except GraphparError as error:
        raise GraphparError(f"{file}: {error}") from None
    chosen = kept.plans[0]
    own = plan.mesh, plan.schedule, plan.microbatch_size, plan.microbatches
    if own != (chosen.mesh, chosen.layout.schedule, chosen.layout.microbatch_size, chosen.layout.microbatches):
        raise GraphparError(f"{path} is not the plan that was chosen when {file} was written; compile the model again.")
    return kept


def _said(change: Change) -> dict[str, Any]:
    """What is different, as plain data."""
    return {
        name: value if name != "cluster" else str(value)
        for name, value in vars(change).items()
        if value is not None and value != {}
    }


_NAMES = {"network": "network {}x", "global_batch": "batch {}", "devices": "{} devices", "microbatch_size": "microbatches of {}",
          "memory_headroom": "{} of the memory free", "cluster": "{}", "mesh": "mesh {}"}  # fmt: skip
_SAME = 1e-3
"""Step times that differ by less than this share are called equal."""
_ROWS: tuple[tuple[str, Callable[[Repriced], str]], ...] = (
    ("mesh", lambda plan: mesh_text(plan.mesh.degrees()) or "1 device"),
    ("schedule", lambda plan: plan.layout.schedule if plan.mesh.pp > 1 else ""),
    ("microbatches", lambda plan: f"{plan.layout.microbatches} of {plan.layout.microbatch_size}"),
    ("ZeRO", lambda plan: str(plan.zero) if plan.zero else ""),
    ("recomputation", lambda plan: plan.recompute if isinstance(plan.recompute, str) else "by block"),
    ("a step", lambda plan: spread_text(plan.estimate.step_time_s, plan.estimate.spread_s)),
    ("exposed communication", lambda plan: seconds_text(plan.estimate.exposed_communication_s)),
    ("bubble", lambda plan: share_text(plan.estimate.bubble_fraction) if plan.mesh.pp > 1 else ""),
    ("MFU", lambda plan: share_text(plan.estimate.mfu)),
    ("peak memory", lambda plan: bytes_text(max(plan.estimate.peak_memory_bytes))),
    ("of", lambda plan: bytes_text(plan.estimate.memory_bytes)),
)


def _show(console: Console, answer: Answer, change: Change) -> None:
    said = " · ".join(_NAMES[name].format(value) for name, value in _said(change).items())
    count = plural(len(answer.plans), "price")
    print_wrapped(
        console,
        [
            f" What if    {said}",
            f"            {count} of plans that the search kept, in {seconds_text(answer.seconds)}",
            "",
        ],
    )
    now = {"the same plan": answer.same, "the best of those kept": answer.best}
    if answer.best is answer.same:
        now = {"the same plan, still the best": answer.best}
    shown = {heading: plan for heading, plan in {"before": answer.before, **now}.items() if plan is not None}
    table = Table(box=None, padding=(0, 2, 0, 1))
    for heading in ("", *shown):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, text in _ROWS:
        cells = [text(plan) for plan in shown.values()]
        if any(cells):
            table.add_row(name, *cells)
    console.print(table)
    lines = [""]
    if answer.same is None:
        lines.append(f" The same plan can't be that: {str(answer.why_not).removesuffix('.')}.")
    for heading, plan in now.items():
        if plan is not None:
            lines.append(f" {' '.join([_against(plan, answer, heading), *host_misfits(plan.estimate)])}")
    if answer.best is None:
        lines.append(" None of the kept plans fits.")
    lines.append(
        " Placements and stages are those that the search found; `graphpar compile` for these conditions searches all plans."
    )
    print_wrapped(console, lines)


def _against(plan: Repriced, answer: Answer, heading: str) -> str:
    """Say whether a plan fits, and how its step compares with that before; by rows where the batch is another one."""
    what = f"{heading[0].upper()}{heading[1:]}{',' if ',' in heading else ''}"
    if not plan.fits:
        return f"{what} does not fit: {bytes_text(plan.estimate.missing_bytes)} too much."
    ratio = plan.estimate.step_time_s / answer.before.estimate.step_time_s
    before = answer.before.layout.microbatch_size * answer.before.layout.microbatches * answer.before.mesh.replicas
    times = (
        f"takes {ratio:.3g} times as long a step as before"
        if abs(ratio - 1) > _SAME
        else "takes as long a step as before"
    )
    rows = answer.global_batch / before / ratio
    return (
        f"{what} {times}."
        if answer.global_batch == before
        else f"{what} {times}, with {rows:.3g} times the rows a second."
    )
