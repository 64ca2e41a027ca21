"""Sentences about a plan and its prediction, which the printed report and the page share.

predicted, search, sharding, recomputation, offload of a report ──► text
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from graphpar.runtime.option_kinds import GENERATE, STEPS
from graphpar.runtime.plan_record import VERSION
from graphpar.schedules.action_table import KINDS, LETTERS
from graphpar.schedules.simulation import CLOSINGS, Timeline
from graphpar.text import (
    bytes_text,
    indices_text,
    kept,
    listed,
    numbered_runs,
    plural,
    rate_text,
    seconds_text,
    share_text,
    spread_text,
)

_LEAST = 1e-3
"""Parts of a step below this share of it are not shown."""
_SMALL_GAP = 5e-4
"""Smaller gaps are shown as none."""
_PATHS = 8
"""How many paths of recomputed blocks, or runs of them, a line lists."""
_ENDS = ("gradients", "optimizer")
"""Parts of a step that end when the last rank is done with them."""
PART_NAMES = {"host": "waits for the host", "pp": "transfers"}
"""Names of the parts of a step that are not their own."""


# ---- the step --------------------------------------------------------------------------------------------------


def predicted_lines(data: Mapping[str, Any], seconds: float | None = None) -> list[tuple[str, str]]:
    """Write the time of a step, its parts, and what was searched, which took ``seconds``."""
    predicted = data.get("predicted")
    lines = []
    if predicted is None and data.get("unpriced"):
        lines.append(("Predicted", f"nothing: {data['unpriced']}"))
    if predicted is not None:
        lines += [("Predicted", _step(data, predicted)), ("Step", parts_text(predicted))]
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
        rate = f", {rate_text(made)} tokens a second with a full cache"
    bubble = f" · bubble {share_text(predicted['bubble_fraction'])}" if data["mesh"]["pp"] > 1 else ""
    return (
        f"{spread_text(predicted['step_time_s'], predicted.get('spread_s', 0.0))} {STEPS[data['mode']]}{rate}{where} · "
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
    """Write ``71.3 GiB of 77.6 GiB (stage 0, 66.2 GiB allocated, 68.3 GiB reserved, the rest NCCL's; 6.3 GiB free)``;
    without NCCL what is said first is what the allocator reserves."""
    peaks, rank = predicted["peak_memory_bytes"], fullest(predicted)
    stages = [stage["index"] for stage in predicted["stages"] if stage["rank"] == rank]
    where = [f"stage{'s' if len(stages) > 1 else ''} {indices_text(stages)}"] if len(predicted["stages"]) > 1 else []
    where += [f"on {predicted['devices'][rank]}"] if "devices" in predicted else []
    where.append(f"{bytes_text(allocated_bytes(predicted)[rank])} allocated")
    if nccl := predicted["memory"][rank].get("communicators"):
        where.append(f"{bytes_text(peaks[rank] - nccl)} reserved, the rest NCCL's")
    free = predicted["memory_bytes"] - peaks[rank]
    if predicted.get("headroom_bytes") and free >= 0:
        where[-1] += f"; {bytes_text(free)} free"
    over = "" if free >= 0 else ": IT DOES NOT FIT"
    return f"{bytes_text(peaks[rank])} of {bytes_text(predicted['memory_bytes'])} ({', '.join(where)}){over}"


def fullest(predicted: Mapping[str, Any]) -> int:
    """Return the pp rank that has the least left at its peak."""
    peaks = predicted["peak_memory_bytes"]
    rooms = predicted.get("rooms") or [0] * len(peaks)
    return max(range(len(peaks)), key=lambda each: peaks[each] - rooms[each])


def device_bytes(predicted: Mapping[str, Any]) -> list[float]:
    """Return the memory of the device of each pp rank."""
    room = predicted["memory_bytes"] - predicted.get("headroom_bytes", 0)
    rooms = predicted.get("rooms") or [room] * len(predicted["peak_memory_bytes"])
    return [predicted["memory_bytes"] * own / room for own in rooms]


def allocated_bytes(predicted: Mapping[str, Any]) -> list[int]:
    """Return the bytes of each pp rank's peak that tensors take; the allocator's overhead is the rest."""
    beyond = [memory["slack"] + memory.get("communicators", 0) for memory in predicted["memory"]]
    return [peak - more for peak, more in zip(predicted["peak_memory_bytes"], beyond)]


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
    bounded = search["considered"] - search["priced"] - search["infeasible"]
    ruled_out = f", {bounded:,} ruled out by a bound" if bounded > 0 else ""
    counts = f"{plural(search['considered'], 'plan')}{took}, {search['priced']:,} priced{ruled_out}{infeasible}"
    return f"{counts}; {faster} under this cost model{left_out}"


def communication_text(predicted: Mapping[str, Any]) -> str:
    """Write by axis how long the busiest rank communicates in a step, and how much of it computation does not hide."""
    exposed = predicted["exposed_s"]
    return " · ".join(
        f"{axis} {seconds_text(seconds)} ({seconds_text(exposed.get(axis, 0.0))} exposed)"
        for axis, seconds in predicted["communication_s"].items()
    )


def devices_text(predicted: Mapping[str, Any]) -> str:
    """Write the devices of pp ranks, where these are of several kinds: ``pp 0: H100-SXM-80GB · pp 1-2: A100-SXM-80GB``."""
    devices = predicted.get("devices", ())
    runs = [list(run) for _, run in itertools.groupby(range(len(devices)), key=devices.__getitem__)]
    return " · ".join(f"pp {indices_text(run)}: {devices[run[0]]}" for run in runs)


def crossed_text(predicted: Mapping[str, Any]) -> str:
    """Write by axis over what its ranks are spread, of axes that leave a node: ``dp_shard 16 nodes in 4 pods``."""
    return " · ".join(
        f"{axis} {' in '.join(f'{count} {name}' for name, count in parts.items())}"
        for axis, parts in predicted.get("crossed", {}).items()
    )


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
    taken = "".join(f"; {axis} collectives, inside actions, take {seconds}" for axis, seconds in inside.items())
    return f"{text}; {seconds_text(timeline.length)} in all{taken}"


def named(other: Mapping[str, Any]) -> tuple[str, str]:
    """Write the mesh of an alternative, and its schedule, how it shards state and what it recomputes."""
    count = plural(other["microbatches"], "microbatch", "microbatches")
    texts = [
        other["schedule"] if other["mesh"].get("pp", 1) > 1 else "",
        f"{count} of {other['microbatch_size']}",
        zero_text(other.get("zero", 0), other.get("reshard", "default")),
        f"recompute {kinds_text(recompute)}" if (recompute := other.get("recompute", "none")) != "none" else "",
    ]
    return mesh_text(other["mesh"]), ", ".join(filter(None, texts))


def zero_text(zero: int, reshard: str | int) -> str:
    """Write ``ZeRO-3``, and when gathered parameters are freed where that is not the default; nothing where no state is sharded."""
    return "" if not zero else f"ZeRO-{zero}" if reshard == "default" else f"ZeRO-{zero} with reshard {reshard}"


def mesh_text(degrees: Mapping[str, int]) -> str:
    """Write ``pp 2 · tp 4``."""
    return " · ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "1 device"


def assumed_lines(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List the assumptions of the prediction, and the versions that the plan depends on."""
    assumed = data.get("assumed")
    versions = [("Versions", f"torch {data['torch']} · plan.json {VERSION}")] if "torch" in data else []
    if assumed is None:
        return versions
    run = [data["dtype"]]
    if data.get("fp8"):
        run.append(f"linear layers of {', '.join(data['fp8'])} in 8 bits, {data.get('fp8_recipe') or 'rowwise'}")
    if data["param_dtype"] != data["dtype"]:
        run.append(f"parameters in {data['param_dtype']}")
    if data["reduce_dtype"] not in (None, data["param_dtype"]):
        run.append(f"gradients summed in {data['reduce_dtype']}")
    if data["mode"] == "train":
        run += [assumed["optimizer"], f"recomputation {kinds_text(assumed['recompute'])}"]
    if assumed["loss_chunk"]:
        run.append(f"head and loss in chunks of {assumed['loss_chunk']:,} tokens")
    if assumed.get("expert_room") is not None:
        run.append(
            f"room for {assumed['expert_room']:g} times the mean rows of experts, and as many are sent over dp_expert"
        )
    device = f"{devices_text(data['predicted']) or assumed['device']} ({assumed['figures']})"
    if assumed.get("dropout") == "kernel":
        run.append("attention dropout drawn by kernels, with other masks than on one device")
    how = "; ".join([", ".join([*run, f"operators {assumed['operators']}"]), *assumed.get("collectives", ())])
    return [("Assumed", f"{how}; device {device}"), *versions]


def stage_columns(predicted: Mapping[str, Any]) -> list[tuple[str, str, str, float]]:
    """Return for each stage forward, backward, and its rank's peak memory (for the rank's first stage only) as text and as a
    share."""
    seen: set[int] = set()
    columns, devices = [], device_bytes(predicted)
    for stage in predicted["stages"]:
        peak, rank = predicted["peak_memory_bytes"][stage["rank"]], stage["rank"]
        text, share = ("", 0.0) if rank in seen else (bytes_text(peak), peak / devices[rank])
        seen.add(rank)
        backward = seconds_text(stage["backward_s"]) if stage["backward_s"] else ""
        columns.append((seconds_text(stage["forward_s"]), backward, text, share))
    return columns


def equal_stages(data: Mapping[str, Any]) -> list[list[int]]:
    """Return the stages that a table has on one row: consecutive ones that are equal, but for the first of each rank, which says what the
    rank holds, if their modules are one run."""
    stages, predicted = data["stages"], data.get("predicted")
    seen: set[int] = set()
    found: list[list[int]] = []
    before: Any = None
    modules: list[str] = []
    for place, stage in enumerate(stages):
        same = [value for name, value in stage.items() if name not in ("index", "rank", "modules")]
        times = (predicted["stages"][place][name] for name in ("forward_s", "backward_s")) if predicted else ()
        key = None if stage["rank"] not in seen else (*same, *map(seconds_text, times))
        together = numbered_runs([*modules, *stage["modules"]])
        if key is not None and key == before and len(together) == len(stage["modules"]):
            found[-1].append(place)
            modules = together
        else:
            found.append([place])
            modules = list(stage["modules"])
        before = key
        seen.add(stage["rank"])
    return found


def stages_text(data: Mapping[str, Any], places: Sequence[int]) -> tuple[str, str, str]:
    """Write the numbers of stages of a row of a table, the ranks that have them, and their modules."""
    stages = [data["stages"][place] for place in places]
    together = data["devices"] // data["mesh"]["pp"]  # ranks that hold shards or replicas of a stage
    ranks = sorted({stage["rank"] * together + number for stage in stages for number in range(together)})
    modules = numbered_runs([name for stage in stages for name in stage["modules"]])
    return indices_text([stage["index"] for stage in stages]), indices_text(ranks), ", ".join(modules)


# ---- recomputation, overlap, offload ---------------------------------------------------------------------------


def kinds_text(recompute: str | Mapping[str, str]) -> str:
    """Write what a plan recomputes: ``full``, or ``budget:0.4 of layers.0-9``."""
    if isinstance(recompute, str):
        return recompute
    by_kind: dict[str, list[str]] = {}
    for path, kind in recompute.items():
        by_kind.setdefault(kind, []).append(path.replace("{", "").replace("}", ""))  # as of layers.{0-9}
    return "; ".join(f"{kind} of {', '.join(numbered_runs(paths))}" for kind, paths in by_kind.items()) or "none"


def recomputation_text(rows: list[Mapping[str, Any]]) -> str:
    """Write which blocks are recomputed how, and what is sent again."""
    return " · ".join(
        f"{row['count']} x {row['block']} {row['kind']} ({listed(numbered_runs(row['paths']), _PATHS)}), "
        + (
            f"each of which sends {plural(row['collectives'], 'collective')} of {bytes_text(row['bytes'])} again for each microbatch"
            if row["collectives"]
            else "no collective is repeated"
        )
        + (f", {listed([*dict.fromkeys(row['again'])], 4)} computed again" if row["again"] else "")
        + (", not compiled" if row["uncompiled"] else "")
        for row in rows
    )


def device_is_cpu(data: Mapping[str, Any]) -> bool:
    """Whether the prediction assumes CPUs."""
    return str(data.get("assumed", {}).get("device", "")).startswith("CPU")


def overlap_text(data: Mapping[str, Any]) -> str:
    """Say how many collectives run beside products, and whether that hides anything."""
    found = data["overlapped"]
    kinds = ("gathers", "gather"), ("reduce_scatters", "reduce-scatter")
    pairs = " and ".join(plural(found[key], name) for key, name in kinds if found[key])
    beside = (
        f"{pairs} of tp overlapped with {plural(found['products'], 'product')}, in {data['mesh']['tp']} pieces each"
    )
    others = ", ".join(name if count == 1 else f"{name} ({count})" for name, count in found.get("others", {}).items())
    beside += f"; not overlapped: collectives of {others}" if others else ""
    return beside + ("; a CPU hides nothing: its cores both send and multiply" if device_is_cpu(data) else "")


def offload_text(data: Mapping[str, Any]) -> str:
    """Say what lives there, and with a prediction how much on the rank that has most."""
    what, predicted = " and ".join(data["offload"]), data.get("predicted")
    if predicted and predicted["device"].startswith("CPU"):
        return f"{what}: nothing: the device is a CPU, whose memory is the host's"
    if not predicted or not predicted.get("host_memory"):
        return f"{what} live in the host's memory, unless the device is a CPU"
    most = max(predicted["host_memory"], key=lambda each: sum(each.values()))
    parts = ", ".join(f"{name} {bytes_text(nbytes)}" for name, nbytes in most.items() if nbytes)
    room = predicted.get("host_memory_bytes")
    of = f" of {bytes_text(room)}" if room is not None else ""
    verb = "lives" if data["offload"] == ["optimizer"] else "live"
    return f"{what} {verb} in the host's memory: at most {bytes_text(sum(most.values()))} a rank{of} ({parts})"


# ---- sharding --------------------------------------------------------------------------------------------------


TYPES = {
    "R": ("R", "replicated: the full tensor on every rank, used differently on each"),
    "I": ("I", "invariant: the full tensor on every rank, used identically on all"),
    "S": ("S(d)", "sharded: dim d is divided over the ranks"),
    "P": ("P", "partial: each rank has a summand of it"),
    "E": ("E", "each rank has the rows of its own experts"),
}
"""The meaning of each type, in the order of the legend."""
_LETTER = re.compile(r"([RISPE])(?:\([^)]*\))?@")


def legend_of(texts: Iterable[str]) -> list[tuple[str, str]]:
    """Explain the types that occur in ``texts``, such as ``S(0)@tp, R@cp``."""
    letters = {letter for text in texts for letter in _LETTER.findall(text)}
    return [row for letter, row in TYPES.items() if letter in letters]


def sharding_legend(sharding: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Explain the types that occur in a report."""
    texts: list[str] = []
    for scope in sharding["scopes"]:
        texts += [scope["in"], scope["out"], *(row["spec"] for row in scope["rows"])]
        texts += [f"{entry[end]}@" for row in scope["rows"] for entry in row["transitions"] for end in ("from", "to")]
    return legend_of(texts)


def transitions_text(data: Mapping[str, Any]) -> str:
    """Write ``35 redistributions a microbatch, forward and backward 43.4 ms; a rank sends tp 1.11 MiB``, and their share of the
    step."""
    sharding, predicted = data["sharding"], data.get("predicted")
    sent = " · ".join(f"{axis} {bytes_text(amount)}" for axis, amount in sharding["bytes"].items() if amount)
    passes = ", forward and backward" if data["mode"] == "train" else ","
    seconds = "" if sharding["transitions_s"] is None else f"{passes} {seconds_text(sharding['transitions_s'])}"
    stages = " in all stages" if len(data["stages"]) > 1 else ""
    sends = f"{'they send' if stages else 'a rank sends'} {sent or 'nothing'}"
    text = f"{plural(sharding['transitions'], 'redistribution')} a microbatch{stages}{seconds}; {sends}"
    if predicted is None or (not stages and data["microbatches"] == 1):
        return text
    step = " · ".join(f"{axis} {seconds_text(predicted['parts_s'].get(axis, 0.0))}" for axis in sharding["axes"])
    whose = "the busiest rank's of " if stages else ""
    return f"{text}; {whose}{plural(data['microbatches'], 'microbatch', 'microbatches')}: {step}"


def gap_text(gap: float) -> str:
    """Say how far from the best the placement of tensors may be."""
    best = "optimal" if gap < 5e-5 else f"within {gap:.2%} of the optimum"
    return f"{best} under the sharding cost model (coarser than the step model)"


def redistribution_text(entry: Mapping[str, Any], several: bool) -> str:
    """Write a redistribution as ``S(1) -> R``, with its axis where there are several."""
    axis = f" @{entry['axis']}" if several else ""
    return f"{entry['from']} -> {entry['to']}{axis}"


def sent_text(entry: Mapping[str, Any], way: str) -> str:
    """Write ``all-gather 2.00 KiB``, or the local operation where nothing is sent."""
    amount = entry[f"{way}_bytes"]
    return f"{entry[way]} {bytes_text(amount)}" if amount else entry[way]
