"""What a step will take, as text: the parts of the printed report that come from the cost models.

    predicted, search ──► Predicted, Step, Searched | communication a step | Runners-up, Assumed
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from graphpar.report_text import bytes_text, indices_text, plural, seconds_text, share_text

_LEAST = 1e-3
"""Parts of a step below this share of it are not named."""


def predicted_lines(data: Mapping[str, Any], seconds: float | None = None) -> list[tuple[str, str]]:
    """The step, what it is made of, and what else was looked at (in so many ``seconds``)."""
    predicted = data.get("predicted")
    lines = []
    if predicted is None and data.get("unpriced"):
        lines.append(("Predicted", f"nothing: {data['unpriced']}"))
    if predicted is not None:
        lines.append(("Predicted", _step(data, predicted)))
        lines.append(("Step", parts_text(predicted)))
    if data.get("search"):
        lines.append(("Searched", searched_text(data["search"], seconds)))
    return lines


def _step(data: Mapping[str, Any], predicted: Mapping[str, Any]) -> str:
    where = "" if predicted["cluster"] == data.get("cluster") else f" on {predicted['cluster']}"
    bubble = f" · bubble {share_text(predicted['bubble_fraction'])}" if data["mesh"]["pp"] > 1 else ""
    return (
        f"{seconds_text(predicted['step_time_s'])} {'a step' if data['mode'] == 'train' else 'a batch'}{where} · "
        f"{share_text(predicted['mfu'])} MFU{bubble} · peak {peak_text(predicted)}"
    )


def peak_text(predicted: Mapping[str, Any]) -> str:
    """``71.3 GB of 83.3 GB (stage 0)``."""
    peaks = predicted["peak_memory_bytes"]
    rank = max(range(len(peaks)), key=peaks.__getitem__)
    stages = [stage["index"] for stage in predicted["stages"] if stage["rank"] == rank]
    where = f" (stage{'s' if len(stages) > 1 else ''} {indices_text(stages)})" if len(predicted["stages"]) > 1 else ""
    over = "" if peaks[rank] <= predicted["memory_bytes"] else ": IT DOES NOT FIT"
    return f"{bytes_text(peaks[rank])} of {bytes_text(predicted['memory_bytes'])}{where}{over}"


def parts_text(predicted: Mapping[str, Any]) -> str:
    """What the step is made of, without what is next to nothing."""
    names = {"host": "waits for the host", "pp": "transfers"}
    least = _LEAST * predicted["step_time_s"]
    parts = [
        f"{names.get(part, part)} {seconds_text(seconds)}" for part, seconds in predicted["parts_s"].items() if seconds >= least
    ]
    return " · ".join(parts) + (" (busiest rank)" if len(predicted["memory"]) > 1 else "")


def searched_text(search: Mapping[str, Any], seconds: float | None = None) -> str:
    """How many plans were looked at."""
    took = "" if seconds is None else f" in {seconds:.1f} s"
    infeasible = f", {search['infeasible']:,} not possible" if search["infeasible"] else ""
    return f"{plural(search['considered'], 'plan')}{took}, {search['priced']:,} priced{infeasible}; none faster under this cost model"


def communication_lines(data: Mapping[str, Any]) -> list[str]:
    """A line of its own."""
    predicted = data.get("predicted")
    text = communication_text(predicted) if predicted else ""
    return [f" Communication a step   {text}"] if text else []


def communication_text(predicted: Mapping[str, Any]) -> str:
    """What the busiest rank sends in a step, by axis, and what of it nothing hides."""
    exposed = predicted["exposed_s"]
    return " · ".join(
        f"{axis} {seconds_text(seconds)} ({seconds_text(exposed.get(axis, 0.0))} exposed)"
        for axis, seconds in predicted["communication_s"].items()
    )


def runners_up(data: Mapping[str, Any], width: int) -> list[str]:
    """What each is, how long its step takes, and what it loses: on the same line where there is room."""
    others = (data.get("search") or {}).get("alternatives", ())
    rows = [(*named(other), *_beside(other, data["predicted"]), str(other["why_not"])) for other in others]
    columns = [max((len(row[place]) for row in rows), default=0) for place in range(4)]
    heads = [f"{a:<{columns[0]}}  {b:<{columns[1]}}  {c:>{columns[2]}} {d:>{columns[3]}}" for a, b, c, d, _ in rows]
    room = width - 12 - max(map(len, heads), default=0) - 2
    beside = all(len(row[-1]) <= room for row in rows)
    lines: list[str] = []
    for place, (head, row) in enumerate(zip(heads, rows)):
        lines.append(f"{'' if place else ' Runners-up':<12}{head}{'  ' + row[-1] if beside else ''}")
        if not beside:
            lines += [f"{'':<14}{line}" for line in textwrap.wrap(row[-1], width - 14)]
    return lines


def named(other: Mapping[str, Any]) -> tuple[str, str]:
    """The mesh and the schedule of an alternative."""
    mesh = " · ".join(f"{axis} {degree}" for axis, degree in other["mesh"].items() if degree > 1) or "1 device"
    count = plural(other["microbatches"], "microbatch", "microbatches")
    schedule = f"{other['schedule']}, " if other["mesh"].get("pp", 1) > 1 else ""
    return mesh, f"{schedule}{count} of {other['microbatch_size']}"


def _beside(other: Mapping[str, Any], predicted: Mapping[str, Any]) -> tuple[str, str]:
    """Its seconds, and how much more than the plan's that is."""
    seconds = other["step_time_s"]
    return seconds_text(seconds), f"({seconds / predicted['step_time_s'] - 1:+.1%})"


def assumed_lines(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the prediction takes for granted."""
    assumed = data.get("assumed")
    if assumed is None:
        return []
    run = [data["dtype"]]
    if data["mode"] == "train":
        run += [assumed["optimizer"], f"recomputation {assumed['recompute']}"]
    return [("Assumed", f"{', '.join(run)}, operators {assumed['operators']}; device {assumed['device']} ({assumed['figures']})")]


def stage_columns(predicted: Mapping[str, Any]) -> list[tuple[str, str, str, float]]:
    """Of each stage: forward, backward, and its rank's peak (beside the rank's first stage alone) as text and as a share."""
    seen: set[int] = set()
    columns = []
    for stage in predicted["stages"]:
        peak, rank = predicted["peak_memory_bytes"][stage["rank"]], stage["rank"]
        text, share = ("", 0.0) if rank in seen else (bytes_text(peak), peak / predicted["memory_bytes"])
        seen.add(rank)
        backward = seconds_text(stage["backward_s"]) if stage["backward_s"] else ""
        columns.append((seconds_text(stage["forward_s"]), backward, text, share))
    return columns
