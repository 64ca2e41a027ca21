"""The prediction of a step, as text: the parts of the printed report that come from the cost models.

predicted, search ──► Predicted, Step, Searched | communication a step | Runners-up, Assumed
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from graphpar.report.recomputation import kinds_text
from graphpar.runtime.modes import GENERATE, STEPS
from graphpar.schedules.simulation import CLOSINGS, Timeline
from graphpar.schedules.table import KINDS, LETTERS
from graphpar.text import bytes_text, indices_text, kept, plural, seconds_text, share_text, wrapped

_LEAST = 1e-3
"""Parts of a step below this share of it are not shown."""
_SMALL_GAP = 5e-4
"""Smaller gaps are shown as none."""
_ENDS = ("gradients", "optimizer")
"""Parts of a step that end when the last rank is done with them."""
PART_NAMES = {"host": "waits for the host", "pp": "transfers"}
"""Names of the parts of a step that are not their own."""


def predicted_lines(data: Mapping[str, Any], seconds: float | None = None) -> list[tuple[str, str]]:
    """Write the time of a step, its parts, and what was searched, which took ``seconds``."""
    predicted = data.get("predicted")
    lines = []
    if predicted is None and data.get("unpriced"):
        lines.append(("Predicted", f"nothing: {data['unpriced']}"))
    if predicted is not None:
        lines.append(("Predicted", _step(data, predicted)))
        lines.append(("Step", parts_text(predicted)))
    if "alone" in data:
        lines.append(("One device", alone_text(data)))
    if data.get("search"):
        lines.append(("Searched", searched_text(data["search"], seconds)))
    return lines


def _step(data: Mapping[str, Any], predicted: Mapping[str, Any]) -> str:
    where = "" if predicted["cluster"] == data.get("cluster") else f" on {predicted['cluster']}"
    rate = ""
    if (generation := data.get("generation")) is not None:
        made = generation["sequences"] * data["global_batch"] / predicted["step_time_s"]
        rate = f", {made:,.4g} tokens a second with a full cache"
    bubble = f" · bubble {share_text(predicted['bubble_fraction'])}" if data["mesh"]["pp"] > 1 else ""
    return (
        f"{seconds_text(predicted['step_time_s'])} {STEPS[data['mode']]}{rate}{where} · "
        f"{share_text(predicted['mfu'])} MFU{bubble} · peak {peak_text(predicted)}"
    )


def alone_text(data: Mapping[str, Any]) -> str:
    """Write ``1.44 s a step: 2 devices are 1.75 times as fast (88% of 2)``, or that the model does not fit on one."""
    alone, devices = data["alone"], data["devices"]
    name, size = alone["cluster"], alone["microbatch_size"]
    if not alone["fits"]:
        return f"does not fit: it needs {bytes_text(alone['peak_memory_bytes'])} of {bytes_text(alone['memory_bytes'])} ({name})"
    times = alone["step_time_s"] / data["predicted"]["step_time_s"]
    sizes = "" if data["mode"] == GENERATE else f" in microbatches of {size}"
    text = f"{seconds_text(alone['step_time_s'])}{sizes} ({name}); {plural(devices, 'device')}"
    if f"{times:.3g}" == "1" or f"{1 / times:.3g}" == "1":
        return f"{text} take as long"
    if times < 1:
        return f"{text} take {1 / times:.3g} times as long"
    return f"{text} are {times:.3g} times as fast, {share_text(times / devices)} of {devices}"


def peak_text(predicted: Mapping[str, Any]) -> str:
    """Write ``71.3 GiB of 77.6 GiB (stage 0, 69.2 GiB allocated)``; what is said first is what the allocator reserves."""
    peaks = predicted["peak_memory_bytes"]
    rank = max(range(len(peaks)), key=peaks.__getitem__)
    stages = [stage["index"] for stage in predicted["stages"] if stage["rank"] == rank]
    where = [f"stage{'s' if len(stages) > 1 else ''} {indices_text(stages)}"] if len(predicted["stages"]) > 1 else []
    where.append(f"{bytes_text(allocated_bytes(predicted)[rank])} allocated")
    over = "" if peaks[rank] <= predicted["memory_bytes"] else ": IT DOES NOT FIT"
    return f"{bytes_text(peaks[rank])} of {bytes_text(predicted['memory_bytes'])} ({', '.join(where)}){over}"


def allocated_bytes(predicted: Mapping[str, Any]) -> list[int]:
    """Return the bytes of each pp rank's peak that tensors take; the allocator's overhead is the rest."""
    return [peak - memory["slack"] for peak, memory in zip(predicted["peak_memory_bytes"], predicted["memory"])]


def parts_text(predicted: Mapping[str, Any]) -> str:
    """List the parts of the step that are not negligible."""
    least = _LEAST * predicted["step_time_s"]
    shown = {part: seconds for part, seconds in predicted["parts_s"].items() if seconds >= least}
    text = " · ".join(f"{PART_NAMES.get(part, part)} {seconds_text(seconds)}" for part, seconds in shown.items())
    return f"{text} ({whose_parts(shown)})" if len(predicted["memory"]) > 1 else text


def whose_parts(parts: Collection[str]) -> str:
    """Say which rank the parts of a step are of: ``busiest rank; optimizer: until the last rank is done``."""
    ends = [part for part in _ENDS if part in parts]
    return f"busiest rank; {' and '.join(ends)}: until the last rank is done" if ends else "busiest rank"


def searched_text(search: Mapping[str, Any], seconds: float | None = None) -> str:
    """Say how many plans were considered and priced, how much faster another may be at most, and what was not tried."""
    gap = search["optimality_gap"] or 0.0
    faster = f"none more than {gap:.1%} faster" if gap >= _SMALL_GAP else "none faster"
    left_out = f"; left out: {'; '.join(search['left_out'])}" if search.get("left_out") else ""
    took = "" if seconds is None else f" in {seconds:.1f} s"
    infeasible = f", {search['infeasible']:,} not possible" if search["infeasible"] else ""
    counts = f"{plural(search['considered'], 'plan')}{took}, {search['priced']:,} priced{infeasible}"
    return f"{counts}; {faster} under this cost model{left_out}"


def communication_lines(data: Mapping[str, Any], width: int) -> list[str]:
    """Write the communication of a step as a separate section."""
    predicted = data.get("predicted")
    text = communication_text(predicted) if predicted else ""
    return wrapped(text, width, " Communication a step   ", " " * 12) if text else []


def communication_text(predicted: Mapping[str, Any]) -> str:
    """Write by axis how long the busiest rank communicates in a step, and how much of it computation does not hide."""
    exposed = predicted["exposed_s"]
    return " · ".join(
        f"{axis} {seconds_text(seconds)} ({seconds_text(exposed.get(axis, 0.0))} exposed)"
        for axis, seconds in predicted["communication_s"].items()
    )


def runners_up(data: Mapping[str, Any], width: int) -> list[str]:
    """Write each runner-up, its step time, and where it loses time: on the same line where that fits."""
    others = (data.get("search") or {}).get("alternatives", ())
    rows = [(*named(other), *_compared(other, data["predicted"]), str(other["why_not"])) for other in others]
    columns = [max((len(row[place]) for row in rows), default=0) for place in range(4)]
    lines: list[str] = []
    for place, (mesh, schedule, seconds, more, why) in enumerate(rows):
        start = f"{'' if place else ' Runners-up':<12}"
        head = f"{mesh:<{columns[0]}}  {schedule:<{columns[1]}}  {seconds:>{columns[2]}} {more:>{columns[3]}}"
        below = [why]
        if len(head) > width - 12:
            head, below = f"{mesh:<{columns[0]}}  {seconds:>{columns[2]}} {more:>{columns[3]}}", [schedule, why]
        fits = len(below) == 1 and all(12 + sum(columns) + 5 + 2 + len(row[-1]) <= width for row in rows)
        lines.append(f"{start}{head}{'  ' + why if fits else ''}")
        lines += [] if fits else [line for text in below for line in wrapped(text, width, " " * 14, " " * 14)]
    return lines


def rank_names(data: Mapping[str, Any]) -> list[str]:
    """Name the rows of a chart: pp groups, which are the ranks that run the same stages, with these ranks."""
    stages = data["mesh"]["pp"]
    together = data["devices"] // stages
    if together == 1:
        return [f"rank {rank}" for rank in range(stages)]
    return [f"pp {rank}: ranks {indices_text(range(rank * together, (rank + 1) * together))}" for rank in range(stages)]


def timeline_legend(data: Mapping[str, Any], timeline: Timeline) -> str:
    """Explain the letters of a drawn timeline, its length, and the share of collectives inside of actions."""
    kinds = [
        kind for kind in KINDS if any(span.action.kind == kind for row in timeline.spans for span in row if span.drawn)
    ]
    closing = [kind for kind in CLOSINGS if any(segment.kind == kind for row in timeline.closing for segment in row)]
    letters = [f"{LETTERS.get(KINDS[kind][0], kind)} {KINDS[kind][1]}" for kind in kinds] + [
        " ".join(CLOSINGS[kind]) for kind in closing
    ]
    text = " · ".join(map(kept, letters))
    predicted = data.get("predicted")
    if not predicted:
        return f"{text}; times from flops, transfers free"
    axes = dict.fromkeys(axis for row in timeline.spans for span in row for axis, _ in span.collectives)
    inside = {axis: seconds_text(predicted["parts_s"].get(axis, 0.0)) for axis in axes}
    taken = "".join(f"; {axis} collectives, inside of actions, take {seconds}" for axis, seconds in inside.items())
    return f"{text}; {seconds_text(timeline.length)} in all{taken}"


def named(other: Mapping[str, Any]) -> tuple[str, str]:
    """Write the mesh of an alternative, and its schedule, how it shards state and what it recomputes."""
    count = plural(other["microbatches"], "microbatch", "microbatches")
    texts = [
        other["schedule"] if other["mesh"].get("pp", 1) > 1 else "",
        f"{count} of {other['microbatch_size']}",
        state_text(other.get("zero", 0), other.get("reshard", "default")),
        f"recompute {kinds_text(recompute)}" if (recompute := other.get("recompute", "none")) != "none" else "",
    ]
    return mesh_text(other["mesh"]), ", ".join(filter(None, texts))


def state_text(zero: int, reshard: str | int) -> str:
    """Write ``ZeRO-3``, and when gathered parameters are freed where that is not the default; nothing where no state is sharded."""
    return "" if not zero else f"ZeRO-{zero}" if reshard == "default" else f"ZeRO-{zero} with reshard {reshard}"


def mesh_text(degrees: Mapping[str, int]) -> str:
    """Write ``pp 2 · tp 4``."""
    return " · ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "1 device"


def _compared(other: Mapping[str, Any], predicted: Mapping[str, Any]) -> tuple[str, str]:
    """Write the seconds of an alternative, and the difference to the plan's in percent."""
    seconds = other["step_time_s"]
    return seconds_text(seconds), f"({seconds / predicted['step_time_s'] - 1:+.1%})"


def _dtypes_text(data: Mapping[str, Any]) -> str:
    """Write ``bf16, parameters in fp32, gradients summed in bf16``, without what follows from the dtype before."""
    parts = [data["dtype"]]
    if data["param_dtype"] != data["dtype"]:
        parts.append(f"parameters in {data['param_dtype']}")
    if data["reduce_dtype"] not in (None, data["param_dtype"]):
        parts.append(f"gradients summed in {data['reduce_dtype']}")
    return ", ".join(parts)


def assumed_lines(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List the assumptions of the prediction."""
    assumed = data.get("assumed")
    if assumed is None:
        return []
    run = [_dtypes_text(data)]
    if data["mode"] == "train":
        run += [assumed["optimizer"], f"recomputation {kinds_text(assumed['recompute'])}"]
    device = f"{assumed['device']} ({assumed['figures']})"
    if assumed.get("dropout") == "kernel":
        run.append("attention dropout drawn by kernels, other masks than one device's")
    how = "; ".join([", ".join([*run, f"operators {assumed['operators']}"]), *assumed.get("collectives", ())])
    return [("Assumed", f"{how}; device {device}")]


def stage_columns(predicted: Mapping[str, Any]) -> list[tuple[str, str, str, float]]:
    """Return for each stage forward, backward, and its rank's peak memory (for the rank's first stage only) as text and as a
    share."""
    seen: set[int] = set()
    columns = []
    for stage in predicted["stages"]:
        peak, rank = predicted["peak_memory_bytes"][stage["rank"]], stage["rank"]
        text, share = ("", 0.0) if rank in seen else (bytes_text(peak), peak / predicted["memory_bytes"])
        seen.add(rank)
        backward = seconds_text(stage["backward_s"]) if stage["backward_s"] else ""
        columns.append((seconds_text(stage["forward_s"]), backward, text, share))
    return columns
