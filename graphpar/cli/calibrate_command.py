"""``graphpar calibrate``: measure this machine, fit a device to it, and write both as a profile that ``--cluster`` takes."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from graphpar.cli.output import CHECK_FAILED, Result, check_writable, progress, write_text
from graphpar.cost_models.calibrate import Profile, calibrate
from graphpar.cost_models.fit_device import kind_of, priced, rate, sent
from graphpar.cost_models.measure import Row
from graphpar.errors import GraphparError
from graphpar.hardware import this_machine
from graphpar.runtime.errors import LaunchError
from graphpar.text import bytes_text, plural, seconds_text

MOST_MEASURED, PATIENCE_S = 8, 20.0
"""Processes, and the seconds to wait while others use the machine, of the profile that a first compile measures."""


def run(options: argparse.Namespace) -> Result:
    """Measure the machine and write a profile; the exit code is 1 where the profile is too doubtful to be written."""
    out = options.out or f"calibrated-{options.device}.json"
    if Path(out).suffix.lower() != ".json":
        raise GraphparError(f"-o {out}: a profile is JSON; name it {Path(out).with_suffix('.json')}.")
    check_writable(out)
    with progress("measuring this machine, which takes about a minute"):
        profile = calibrate(options.device, options.processes, quick=options.quick, patience_s=options.patience)
    data, doubts = profile.to_json(), profile.doubts
    if doubts and not options.force:
        return Result(
            {**data, "out": None, "refused": doubts}, lambda console: show(profile, None, console), CHECK_FAILED
        )
    write_text(out, json_text(data), options.written)
    return Result({**data, "out": out}, lambda console: show(profile, out, console))


def keep_profile(path: Path) -> None:
    """Measure this machine's CPU and keep the profile at ``path`` for all commands.

    Where the profile can't be kept nothing is measured; where others use the machine, or it can't be measured, nothing is kept. A line
    says so.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_writable(path)
    except (GraphparError, OSError) as error:
        then = f"Name a folder that can be written in {this_machine.VARIABLE}"
        _without_profile(f"this machine is not measured, as its profile can't be kept ({error})", then)
        return
    with progress("measuring this machine, once, which takes 10 to 15 seconds"):
        try:
            processes = min(MOST_MEASURED, this_machine.cores() // this_machine.threads())
            profile = calibrate("cpu", max(1, processes), quick=True, patience_s=PATIENCE_S, gives_up=True)
            why = "; ".join(profile.doubts)
            if not why:
                write_text(path, json_text(profile.to_json()), [])
                return
        except (GraphparError, LaunchError, OSError) as error:
            why = str(error)
    _without_profile(f"this machine could not be measured ({why})", "The next compile tries again")


def _without_profile(why: str, then: str) -> None:
    """Say why there is no profile, what then, and how to do without."""
    print(
        f"graphpar: {why}; times are predicted with another CPU's figures. {then}; --cluster 2xCPU, or an empty "
        f"{this_machine.VARIABLE}, does without.",
        file=sys.stderr,
    )


def json_text(data: dict[str, Any]) -> str:
    """Write a profile as JSON text with one measurement a line."""
    rows = ",\n  ".join(json.dumps(row) for row in data["measured"])
    head = json.dumps({name: value for name, value in data.items() if name != "measured"}, indent=1)
    return f'{head[:-2]},\n "measured": [\n  {rows}\n ]\n}}\n'


# ---- for people ------------------------------------------------------------------------------------------------


def show(profile: Profile, out: str | None, console: Console) -> None:
    """Print the machine, measured and fitted rates by class of shape, the figures, the errors of the fit, and where the
    profile was written or why it was not."""
    machine = profile.machine
    threads = f", {plural(machine['threads'], 'thread')} a process" if machine["threads"] else ""
    console.print(f"\n {machine['name']}, {plural(machine['cores'], 'core')}{threads}, torch {machine['torch']}\n")
    console.print(_rates(profile))
    console.print(_figures(profile))
    for kind, error in profile.errors.items():
        console.print(
            f" fit of {kind}: {error.rows} times, median error {error.median:.0%}, worst {error.worst:.0%} ({error.worst_row})"
        )
    if profile.doubts:
        console.print("\n This profile is not reliable:\n" + "\n".join(f"   {doubt}" for doubt in profile.doubts))
    if out is None:
        console.print(
            "\n NOT WRITTEN. Measure again while nothing else runs (--patience S waits longer for that), or write it anyway with --force."
        )
        return
    console.print(
        f"\n Written: {out}. Use it with --cluster {out}, or {2 * profile.cluster.size}x{out} for more devices."
    )


def _rates(profile: Profile) -> Table:
    together = max(row.processes for row in profile.rows if row.what == "operator")
    table = Table(box=None, padding=(0, 2, 0, 1))
    for heading in ("what", "times", "alone", f"{together} at once", "fitted"):
        table.add_column(heading, justify="left" if heading == "what" else "right", no_wrap=True)
    for name, rows in _classes(profile.rows).items():
        both = [[row for row in rows if row.processes == count] for count in (1, together)]
        if kind_of(rows[0]) in ("pipeline", "pages"):
            continue
        if kind_of(rows[0]) in ("operator", "sharded unit"):
            cells = [seconds_text(median([row.seconds for row in each])) for each in both] + [""]
        elif kind_of(rows[0]) in ("collective", "transfer"):
            fitted = sent(profile.cluster.device, profile.cluster.intra_node, rows)
            cells = ["", *(_sent_text(rows, seconds) for seconds in ([row.seconds for row in rows], fitted))]
        else:
            unit = "GB/s" if kind_of(rows[0]) == "traffic" else "Gflop/s"
            priced_rows = zip(both[1], priced(profile.cluster.device, both[1]))
            fitted = [rate(replace(row, seconds=seconds)) for row, seconds in priced_rows]
            cells = [
                f"{median(each) / 1e9:,.1f} {unit}" for each in [*(list(map(rate, each)) for each in both), fitted]
            ]
        table.add_row(name, str(len(rows)), *cells)
    return table


def _classes(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group rows by kind and size; each group has one line."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(_class(row), []).append(row)
    return found


def _class(row: Row) -> str:
    kind = kind_of(row)
    if kind == "product":
        m, n, k = row.shape
        size = _size(2 * m * n * k, ((1e6, "under 1 Mflop"), (1e9, "under 1 Gflop"), (1e12, "under 1 Tflop")), "larger")
        return f"products {row.dtype}, {size}"
    if kind == "traffic":
        what = row.what.partition(",")[0]
        return f"{what}, {_size(math.prod(row.shape), ((2**19, 'under 512 Ki elements'),), 'larger')}"
    if kind in ("collective", "transfer"):
        return f"{row.what}, {_size(row.shape[0], ((2**17, 'under 128 KiB'), (2**22, 'under 4 MiB')), 'larger')}"
    return row.what


def _sent_text(rows: Sequence[Row], seconds: Sequence[float]) -> str:
    """Large messages by rate, small ones by time."""
    if rows[0].shape[0] < 2**17:
        return seconds_text(median(seconds))
    return f"{median([row.shape[0] / taken for row, taken in zip(rows, seconds)]) / 1e9:.2f} GB/s"


def _size(value: float, limits: Sequence[tuple[float, str]], largest: str) -> str:
    return next((name for limit, name in limits if value < limit), largest)


def _figures(profile: Profile) -> str:
    device, link = profile.cluster.device, profile.cluster.intra_node
    flops = ", ".join(f"{dtype} {rate / 1e9:,.1f}" for dtype, rate in device.flops.items())
    functions = (
        "" if device.function_efficiency is None else f", {device.function_efficiency:.0%} by norms and activations"
    )
    short = f"half at a reduction of {device.half_reduction:.0f}"
    if device.operand_bytes_per_s is not None:
        short = f"then {device.operand_bytes_per_s / 1e9:,.1f} GB/s for operands and result"
    lines = [
        f"products: {flops} Gflop/s at best, {device.matrix_efficiency:.0%} in general, {short}",
        f"attention: {device.attention_efficiency[0]:.0%} forward, {device.attention_efficiency[1]:.0%} backward",
        f"memory: {device.memory_bytes_per_s / 1e9:,.1f} GB/s at best, {device.memory_efficiency:.0%} in general{functions}; "
        f"{bytes_text(device.memory_bytes)} a process"
        + ("" if device.fresh_bytes_per_s is None else f"; new pages {device.fresh_bytes_per_s / 1e9:,.1f} GB/s"),
        f"operators: {seconds_text(device.launch_s)} each, {seconds_text(device.dispatch_s)} of the host; actions of a pipeline: "
        f"{seconds_text(device.action_s)}",
        f"recomputation: {seconds_text(device.hooks_s)} of the host for an operator that runs again, {seconds_text(device.policy_s)} "
        "each way for one of a block that saves some results",
        f"sharded state: {seconds_text(device.fsdp_hooks_s)} of the host each way for a unit, {seconds_text(device.fsdp_gather_s)} for "
        f"a gather, {seconds_text(device.fsdp_reduce_s)} for a reduction",
    ]
    if any(row.what == "transfer" for row in profile.rows):
        alone = link.latency_s if link.send_latency_s is None else link.send_latency_s
        lines.append(
            f"link: {seconds_text(link.latency_s)} a message of a collective, {seconds_text(alone)} alone; "
            f"{link.bytes_per_s / 1e9:.2f} GB/s at best, {link.efficiency:.0%} in rings"
        )
    return "\n".join(["", *(f" {line}" for line in lines), ""])
