"""Predictions against published measurements, a source at a time.

    python -m benchmarks.published DATA.jsonl [--json] [--source NAME ...] [--limit N] [--details]

Each row of the file is priced with its own plan on its own cluster. Sources with a star are held out: no figure of a
device was fitted to them. "all" has every row that has a price; "counted" leaves out toys, slips and repetitions
(:data:`benchmarks.published_rows.APART`), and the memory of rows that do not print what they recompute, which have a table of their own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.published_prices import Prediction, bubble, execution_of, price_row
from benchmarks.published_rows import Row, Unpriced, read, rows_of
from benchmarks.published_scores import Outcome, Scores, relative, score
from benchmarks.published_sources import held_out
from graphpar.cost_models.execution import Execution

NEW = ("H100", "H200", "H800", "B200", "B300", "GB200", "GB300")
"""Beginnings of the names of devices of Hopper's generation and later."""


@dataclass(frozen=True)
class Priced:
    """A row with its prediction, None where only its bubble was predicted, and both beside the measurement."""

    row: Row
    outcome: Outcome
    prediction: Prediction | None


@dataclass(frozen=True)
class Missing:
    """A row without a price, and why."""

    id: str
    source: str
    why: str


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(prog="benchmarks.published", description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path, metavar="DATA.jsonl")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--source", action="append", metavar="NAME", help="only these sources; default: all")
    parser.add_argument("--limit", type=int, help="at most this many rows of each source, evenly spaced")
    parser.add_argument("--details", action="store_true", help="every row")
    options = parser.parse_args(arguments)
    rows = list(chosen(rows_of(options.data), options.source, options.limit))
    results = [priced(row) for row in _watched(rows)]
    found = [result for result in results if isinstance(result, Priced)]
    missing = [result for result in results if isinstance(result, Missing)]
    if options.json:
        print(json.dumps(as_json(found, missing, options.details), indent=1))
    else:
        print_report(found, missing, options.details)


def chosen(
    rows: Iterator[Mapping[str, Any]], sources: Sequence[str] | None, limit: int | None
) -> Iterator[Mapping[str, Any]]:
    """Select rows: those of ``sources`` (default: all), at most ``limit`` of each, evenly spaced."""
    wanted = [row for row in rows if not sources or row["source"] in sources]
    if not limit:
        yield from wanted
        return
    for source in dict.fromkeys(row["source"] for row in wanted):
        own = [row for row in wanted if row["source"] == source]
        yield from own[:: max(1, -(-len(own) // limit))]


def _watched(rows: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows, with progress on stderr every ten seconds."""
    last = time.monotonic()
    for number, row in enumerate(rows):
        if time.monotonic() - last > 10:
            last = time.monotonic()
            print(f"{number} of {len(rows)} rows", file=sys.stderr)
        yield row


def priced(raw: Mapping[str, Any]) -> Priced | Missing:
    """Price a row, or say why it can't be priced."""
    try:
        row = read(raw)
        known = row.measured
        times = None if known.bubble is None else (bubble(row), known.bubble)
        prediction = price_row(row) if known.step_time_s or known.memory_bytes or known.oom else None
    except Unpriced as error:
        return Missing(raw["id"], raw["source"], str(error))
    if prediction is None and times is None:
        return Missing(
            raw["id"], raw["source"], f"it has neither time, memory nor bubble of a step: {', '.join(raw['measured'])}"
        )
    return Priced(row, outcome(row, prediction, times), prediction)


def outcome(row: Row, prediction: Prediction | None, times: tuple[float, float] | None) -> Outcome:
    """Pair a row's predictions with its measurements. ``times``: predicted and measured bubble."""
    known = row.measured
    return Outcome(
        id=row.id,
        source=row.source,
        counted=row.counted,
        group=row.group,
        step_time_s=(prediction.step_time_s, known.step_time_s) if prediction and known.step_time_s else None,
        memory_bytes=(prediction.memory_bytes, known.memory_bytes) if prediction and known.memory_bytes else None,
        bubble=times,
        says=row.habits.prints is not None,
        fits=prediction.fits if prediction else None,
        ran=None if prediction is None else not known.oom,
    )


# ---- what is printed -------------------------------------------------------------------------------------------


def selections(found: Sequence[Priced]) -> dict[str, list[Priced]]:
    """The rows of each line of a table: a source, or several."""
    lines = {
        source: [result for result in found if result.row.source == source]
        for source in dict.fromkeys(r.row.source for r in found)
    }
    lines["A100, several nodes"] = [
        r for r in found if r.row.cluster.device.name.startswith("A100") and r.row.cluster.nodes > 1
    ]
    new = [r for r in found if r.row.cluster.device.name.startswith(NEW)]
    lines["H100 and later"] = new
    lines["without cp and ep"] = [r for r in new if r.row.degrees["cp"] == r.row.degrees["ep"] == 1]
    for axis in ("cp", "ep"):
        lines[f"with {axis}"] = [r for r in new if r.row.degrees[axis] > 1]
    lines["held out"] = [result for result in found if held_out(result.row.source)]
    lines["not held out"] = [result for result in found if not held_out(result.row.source)]
    lines["everything"] = list(found)
    return {name: results for name, results in lines.items() if results}


def tables(found: Sequence[Priced]) -> dict[str, dict[str, Scores]]:
    """Score every selection of rows, once with all rows and once with those that the headline counts."""
    lines = selections(found)
    return {
        "all": {name: score([result.outcome for result in results]) for name, results in lines.items()},
        "undescribed": {
            name: score([result.outcome for result in results])
            for name, results in selections([result for result in found if not result.row.described]).items()
        },
        "recomputation not printed": {
            name: score([result.outcome for result in results if result.outcome.counted])
            for name, results in selections([result for result in found if not result.row.recompute_printed]).items()
        },
        "counted": {
            name: score([_headline(result) for result in results if result.outcome.counted])
            for name, results in lines.items()
        },
    }


def _headline(result: Priced) -> Outcome:
    """The outcome without what hangs on recomputation that nothing says: whether it fits, and its bytes."""
    if result.row.recompute_printed:
        return result.outcome
    return replace(result.outcome, fits=None, memory_bytes=None)


def as_json(found: Sequence[Priced], missing: Sequence[Missing], details: bool) -> dict[str, Any]:
    """Convert scores and reasons to the object that ``--json`` prints."""
    shown: dict[str, Any] = {
        kind: {name: asdict(scores) | {"held_out": held_out(name)} for name, scores in lines.items()}
        for kind, lines in tables(found).items()
    }
    shown["unpriced"] = [asdict(row) for row in missing]
    if details:
        shown["rows"] = [
            asdict(result.outcome) | {"assumed": result.row.assumed, "execution": asdict(execution_of(result.row))}
            for result in found
        ]
    return shown


def ran_as(found: Sequence[Priced]) -> dict[str, dict[str, Any]]:
    """Return by source how its programs ran, in as far as that is not how a program of graphpar's runs by default: those fields of
    :class:`graphpar.cost_models.execution.Execution` that all its rows have in common."""
    plain, said = asdict(Execution()), {}
    for source in dict.fromkeys(result.row.source for result in found):
        runs = [asdict(execution_of(result.row)) for result in found if result.row.source == source]
        same = {name: runs[0][name] for name in plain if all(run[name] == runs[0][name] for run in runs)}
        said[source] = {name: value for name, value in same.items() if value != plain[name]}
    return said


def print_report(found: Sequence[Priced], missing: Sequence[Missing], details: bool) -> None:
    """Print the tables, why rows have no price, what was assumed, and with ``details`` every row."""
    console = Console(width=150)
    for kind, lines in tables(found).items():
        if lines:
            console.print(table(kind, lines))
    console.print(remainder_table(found))
    reasons = Counter((row.source, row.why) for row in missing)
    if reasons:
        console.print(f"{sum(reasons.values())} rows have no price:")
    for (source, why), count in reasons.items():
        console.print(f"  {count:4} {source}: {why}", markup=False, highlight=False)
    assumed = Counter((result.row.source, fact) for result in found for fact in result.row.assumed)
    if assumed:
        console.print("Assumed:")
    for (source, fact), count in assumed.items():
        console.print(f"  {count:4} {source}: {fact}", markup=False, highlight=False)
    console.print("Ran unlike a program of graphpar's:")
    for source, fields in ran_as(found).items():
        told = ", ".join(f"{name} {value}" for name, value in fields.items())
        console.print(f"  {source}: {told}", markup=False, highlight=False)
    if details:
        for result in found:
            console.print(line_of(result), markup=False, highlight=False)


PARTS = {
    "bubble": ("bubble", "pp"),
    "gradients, optimizer": ("gradients", "optimizer", "dp_shard", "dp_replicate"),
    "exchanges in operators": ("tp", "cp", "ep"),
    "host": ("host",),
}
"""What a step has beside the device's computation, by the names of :attr:`graphpar.cost_models.estimates.Estimate.parts_s`."""
MUCH = 0.1
"""The share of a predicted step from which on a part counts as what the row is about."""


def part_of(prediction: Prediction) -> str:
    """Name the largest part of a predicted step beside computation, or computation where no part has :data:`MUCH` of it."""
    seconds = prediction.estimates[0].parts_s
    shares = {name: sum(seconds.get(each, 0.0) for each in of) for name, of in PARTS.items()}
    most = max(shares, key=lambda name: shares[name])
    return most if shares[most] >= MUCH * prediction.estimates[0].step_time_s else "computation alone"


def remainder_table(found: Sequence[Priced]) -> Table:
    """Make the table of what the remaining error is made of: counted rows by the largest part of their step beside computation."""
    by_part: dict[tuple[str, str], list[tuple[float, bool]]] = {}
    for result in found:
        if result.outcome.counted and result.outcome.step_time_s and result.prediction:
            kind = "A100 and before" if not result.row.cluster.device.name.startswith(NEW) else "H100 and later"
            estimate, (told, measured) = result.prediction.estimates[0], result.outcome.step_time_s
            within = abs(told - measured) <= estimate.spread_s * told / estimate.step_time_s
            by_part.setdefault((kind, part_of(result.prediction)), []).append((told / measured - 1, within))
    every = [row for rows in by_part.values() for row in rows]
    if every:
        by_part["all", ""] = every
    whole = sum(abs(error) for error, _ in every) or 1.0
    made = Table(
        "devices", "most beside computation", title="what the error of step times is made of", title_justify="left"
    )
    for column in ("rows", "error", "bias", "share of all error", "within the spread"):
        made.add_column(column, justify="right")
    for (kind, part), rows in sorted(by_part.items()):
        errors = [error for error, _ in rows]
        size = sum(map(abs, errors))
        made.add_row(
            kind,
            part,
            str(len(errors)),
            _percent(size / len(errors)),
            _percent(sum(errors) / len(errors)),
            _percent(size / whole),
            _percent(sum(within for _, within in rows) / len(rows)),
        )
    return made


_COLUMNS = (
    "rows", "error", "bias", "groups", "tau", "regret", "outcomes", "OOM right", "false fits", "memories", "error", "said", "bubbles",
    "points",
)  # fmt: skip


def table(kind: str, lines: Mapping[str, Scores]) -> Table:
    """Make one table of scores, a line for each selection."""
    made = Table("source", title=f"{kind} rows", title_justify="left")
    for column in _COLUMNS:
        made.add_column(column, justify="right")
    for name, scores in lines.items():
        label = f"{name} *" if held_out(name) and name.isidentifier() else name
        made.add_row(label, *cells(scores))
    return made


def cells(scores: Scores) -> list[str]:
    """Format the numbers of one line of a table."""
    percent = [
        _percent(value)
        for value in (
            scores.mape, scores.bias, scores.regret, scores.oom_accuracy, scores.false_fit, scores.memory, scores.said,
        )
    ]  # fmt: skip
    error, bias, regret, accuracy, false_fit, memory, said = percent
    tau = "" if scores.tau is None else f"{scores.tau:.2f}"
    points = "" if scores.bubble is None else f"{scores.bubble:.2f}"
    counts = [str(n or "") for n in (scores.rows, scores.groups, scores.outcomes, scores.memories, scores.bubbles)]
    rows, groups, outcomes, memories, bubbles = counts
    return [
        rows,
        error,
        bias,
        groups,
        tau,
        regret,
        outcomes,
        accuracy,
        false_fit,
        memories,
        memory,
        said,
        bubbles,
        points,
    ]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}%"


def line_of(result: Priced) -> str:
    """Write a row on one line: its plan, predictions and measurements."""
    row, seen = result.row, result.outcome
    degrees = " ".join(f"{axis}{degree}" for axis, degree in row.degrees.items() if degree > 1)
    plan = f"{degrees} dp{row.replicas} {row.schedule}/{row.stages_per_rank} mb{row.microbatch_size}x{row.microbatches} zero{row.zero}"
    words = [
        f"{row.id:24} {row.model} s{row.shape.seq} {row.cluster} {plan} {row.recompute}{' sp' if row.sequence_parallel else ''}"
    ]
    if seen.step_time_s:
        words.append(
            f"{seen.step_time_s[0]:.4g} s for {seen.step_time_s[1]:.4g} ({100 * relative(seen.step_time_s):+.1f}%)"
        )
    if seen.memory_bytes:
        told, found = (value / 2**30 for value in seen.memory_bytes)
        words.append(f"{told:.1f} GiB for {found:.1f} ({100 * relative(seen.memory_bytes):+.1f}%)")
    if seen.memory_bytes and result.prediction:
        words.append(
            f"allocated {result.prediction.allocated_bytes / 2**30:.1f}, reserved {result.prediction.reserved_bytes / 2**30:.1f}"
        )
    if seen.fits is not None and not (seen.fits and seen.ran):
        words.append(f"{'fits' if seen.fits else 'does not fit'}, {'ran' if seen.ran else 'did not run'}")
    if seen.bubble:
        words.append(f"bubble {100 * seen.bubble[0]:.2f} for {100 * seen.bubble[1]:.2f}")
    return "  ".join(words)


if __name__ == "__main__":
    main()
