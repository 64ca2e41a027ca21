"""The report: the compiler's decisions and their cost, as plain data, as text for a terminal, or as a page.

program, plan, stages ──report_data──► a dictionary (kept in report.json) ──render──► the printed report
                      search (kept in search.json) ──┘                  ──html────► report.html
plan ──plan_text──► the same without a program
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from graphpar.cost_models.kept_plans import KEPT_PLANS
from graphpar.ir.plan import Plan
from graphpar.passes.normalize.idioms import idiom_texts
from graphpar.passes.planning.planned import Planned
from graphpar.report.data import compile_json, decisions, predicted_data, report_data, timeline_of, with_alone
from graphpar.report.page import html
from graphpar.report.phrases import (
    assumed_lines,
    communication_text,
    crossed_text,
    device_is_cpu,
    equal_stages,
    gap_text,
    legend_of,
    mesh_text,
    named,
    offload_text,
    overlap_text,
    predicted_lines,
    rank_names,
    recomputation_text,
    redistribution_text,
    sent_text,
    sharding_legend,
    stage_columns,
    stages_text,
    timeline_legend,
    transitions_text,
)
from graphpar.report.state import state_text
from graphpar.report.trace import chrome_trace
from graphpar.runtime.option_kinds import GENERATE, INFER, STEPS, Seq, ends_of, listed_lengths
from graphpar.runtime.plan_record import REPORT, decisions_of
from graphpar.schedules.simulation import draw
from graphpar.text import (
    bytes_text,
    compressed,
    count_text,
    flops_text,
    indices_text,
    joined,
    kept,
    listed,
    place_text,
    plural,
    seconds_text,
    shortened,
    spread_text,
    wrapped,
)

__all__ = [
    "compile_json",
    "html",
    "plan_text",
    "render",
    "report_data",
    "report_files",
    "timeline_of",
    "trace",
    "with_alone",
]

WIDTH = 100
_BAR = 12
"""Length of a bar in the table of stages."""
_NARROW = 20
"""Modules that would have fewer columns than this are below their row of that table instead."""
_NAMES = 26
"""Width of the column of names of modules, unless they are wider."""
_LEAST = 16
"""A name of a value is not shortened below this width."""
_SHOWN = 12
"""How many weights of a spec are listed."""


def report_files(data: Mapping[str, Any], plan: Planned) -> dict[str, str]:
    """Make the report's files, by name: as data with the decisions that it is of, and as a page.

    ``search.json`` and ``kept.json`` are there where the plan was searched, ``alone.json`` where one device was priced.
    """
    kept = {"decisions": decisions_of(plan.to_json()), "report": data}
    files = {REPORT: json.dumps(kept, indent=1) + "\n"}
    found = {} if plan.found is None else {"search": plan.found.to_json()}
    for search in found.values():  # with each priced plan on a line of its own
        rows = ",\n".join(f"   {json.dumps(row)}" for row in search["points"]["rows"])
        without = {**search, "points": {**search["points"], "rows": []}}
        files["search.json"] = json.dumps(without, indent=1).replace('"rows": []', f'"rows": [\n{rows}\n  ]', 1) + "\n"
    if plan.found is not None and plan.found.kept is not None:
        files[KEPT_PLANS] = json.dumps(plan.found.kept.to_json()) + "\n"
    alone = None if plan.alone is None else plan.alone.to_json()
    if alone is not None:
        files["alone.json"] = json.dumps(alone, indent=1) + "\n"
    files["report.html"] = html(with_alone(data, alone) | found)
    return files


def render(data: Mapping[str, Any], console: Console, out: str | None = None, seconds: float | None = None) -> None:
    """Print the report.

    Args:
        data: of :func:`report_data`; with ``search``, also the alternatives.
        out: the emitted folder, for the commands to run next.
        seconds: duration of the search.
    """
    width = min(console.width, WIDTH)
    closing = [*assumed_lines(data), *(("Warning", line) for line in data["warnings"])]
    closing += [("Next", kept(line)) for line in next_commands(out, data["mode"])] if out is not None else []
    sections = [
        wrapped(_header(data), width, " ", " " * 12),
        _fields([_plan_line(data), *predicted_lines(data, seconds)], width),
        stage_table(data, width),
        _fields(_facts(data), width),
        *_sharding_sections(data.get("sharding"), width),
        _communication(data, width),
        _fields(_notes(data), width),
        _timeline(data, width),
        _runners_up(data, width),
        _fields(closing, width),
    ]
    console.out("\n\n".join("\n".join(lines) for lines in sections if lines), highlight=False)


def plan_text(plan: Plan) -> str:
    """Print the plan alone, without sizes and transfers, which only the program knows."""
    modules = compressed([list(stage.modules) for stage in plan.stages])
    data = {
        **decisions(plan),
        "stages": [
            {"index": stage.index, "rank": stage.rank, "modules": names} for stage, names in zip(plan.stages, modules)
        ],
    }
    if isinstance(plan, Planned):
        data |= {} if plan.predicted is None else predicted_data(plan, plan.predicted)
        data |= {} if plan.found is None else {"search": plan.found.to_json()}
        data["warnings"] = [*data.get("misfits", ()), *plan.warnings]
        data = with_alone(data, None if plan.alone is None else plan.alone.to_json())
    sections = [
        wrapped(f"graphpar   {plan.model} · {plan.dtype} · {plan.mode} · {place_text(data)}", WIDTH, " ", " " * 12),
        _fields([_plan_line(data), *predicted_lines(data)], WIDTH),
        stage_table(data, WIDTH),
        _fields([*_placements(plan), *([("Offload", offload_text(data))] if plan.offload else [])], WIDTH),
        _communication(data, WIDTH),
        _runners_up(data, WIDTH),
        _fields([*assumed_lines(data), *(("Warning", line) for line in data.get("warnings", ()))], WIDTH),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def trace(data: Mapping[str, Any]) -> dict[str, Any]:
    """Make a Chrome trace of the simulated step, a row for each pp group; without a prediction times are relative, from flops."""
    return chrome_trace(timeline_of(data), rank_names(data), 1e6 if data.get("predicted") else None)


def next_commands(out: str, mode: str) -> list[str]:
    """List the commands to run next on an emitted folder."""
    folder = shlex.quote(out)
    verify = [f"graphpar verify {folder}"] if mode != INFER else []
    how = "--tokens 1,2,3 --max-new-tokens 8" if mode == GENERATE else "--steps 3"
    return [f"graphpar run {folder} {how}", *verify, f"graphpar report {folder} --html report.html"]


# ---- sections --------------------------------------------------------------------------------------------------


def _timeline(data: Mapping[str, Any], width: int) -> list[str]:
    """Draw the step in time, one line for each pp group, and a legend."""
    timeline = timeline_of(data)
    ranks = data["mesh"]["pp"]
    names = rank_names(data) if data["devices"] == ranks else [f"pp {rank}" for rank in range(ranks)]
    legend = wrapped(timeline_legend(data, timeline), width, " ", " ")
    return [f" {line}" for line in draw(timeline, width - 1, names)] + legend


def _header(data: Mapping[str, Any]) -> str:
    model = data["model"]
    trained = model.get("trained")
    share = f", {count_text(trained)} trained ({trained / model['parameters']:.2%})" if trained is not None else ""
    return (
        f"graphpar   {model['name']} · {count_text(model['parameters'])} parameters{share} · {data['dtype']} · "
        f"{data['mode']} · {place_text(data)}"
    )


def _plan_line(data: Mapping[str, Any]) -> tuple[str, str]:
    count, size = data["microbatches"], data["microbatch_size"]
    microbatches = plural(count, "microbatch", "microbatches")
    schedule = f"{data['schedule']}, " if data["mesh"]["pp"] > 1 else ""  # meaningless without a pipeline
    made_for = f"; made for {data['made_for']}" if "made_for" in data else ""
    if (generation := data.get("generation")) is not None:
        groups = f"{count} groups of " if count > 1 else ""
        rows = plural(generation["sequences"], "sequence")
        replicas = data["global_batch"] // count
        each = f" on each of {replicas} replicas" if replicas > 1 else ""
        return (
            "Plan",
            f"{mesh_text(data['mesh'])}   {groups}{rows}{each}, up to {generation['length']:,} tokens{made_for}",
        )
    plan = f"{mesh_text(data['mesh'])}   {schedule}{microbatches} of {size} (global batch {data['global_batch']}){made_for}"
    return "Plan", plan


def _between_steps(between: Mapping[str, Any]) -> str:
    """``64 sequences at a time, up to 16 tokens each, 1.2 ms a token``"""
    seconds = "" if between["seconds"] is None else f", {seconds_text(between['seconds'])} {STEPS[GENERATE]}"
    return f"{plural(between['sequences'], 'sequence')} at a time, up to {between['length']:,} tokens each{seconds}"


def _lengths(seq: Seq, multiple: int, unpadded: str | None) -> str:
    """``128 to 4,096 positions, priced at 4,096; padded to multiples of 4``"""
    ends = ends_of(seq)
    if listed := listed_lengths(seq):
        shown = f"{', '.join(f'{length:,}' for length in listed[:-1])} or {listed[-1]:,}"
        others = (
            "others are padded to the next"
            if unpadded is None
            else f"others are refused, since padding would change results: {unpadded}"
        )
        return f"{shown} positions, priced at {ends[1]:,}; {others}"
    others = "" if multiple == 1 else f"; padded to multiples of {multiple}"
    if unpadded is not None and multiple > 1:
        others = f"; multiples of {multiple} alone, since padding would change results: {unpadded}"
    return f"{ends[0]:,} to {ends[1]:,} positions, priced at {ends[1]:,}{others}"


def _facts(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = []
    if data["mesh"]["pp"] > 1 and not data.get("predicted"):
        flops = [stage["flops"] for stage in data["stages"]]
        mean = sum(flops) / len(flops)
        largest = max(range(len(flops)), key=flops.__getitem__)
        ratio = f"{flops[largest] / mean if mean else 1:.2f}x the mean (from flops; transfers free)"
        lines.append(("Simulated", f"bubble {data['bubble_fraction']:.1%} · largest stage {largest}, {ratio}"))
    if (lengths := data.get("lengths")) is not None:
        lines.append(("Lengths", _lengths(data["seq"], lengths["multiple"], lengths["unpadded"])))
    if data["mode"] == "train":
        own = "the mean of the replicas' own losses, as in DDP" if data.get("dp_mean") else "that of the global batch"
        lines.append(("Loss", f"{own}; gradients are of this loss"))
    if (between := data.get("between_steps")) is not None:
        lines.append(("Generates", _between_steps(between)))
    if data["mesh"]["pp"] > 1:
        lines.append(("In flight", _in_flight(data)))
        lines.append(("Traffic", _traffic(data)))
    if data.get("sharding"):
        lines += _sharding_facts(data)
    if "state" in data:
        lines.append(("State", state_text(data["state"])))
    if "recomputation" in data:
        lines.append(("Recompute", recomputation_text(data["recomputation"])))
    if data.get("offload"):
        lines.append(("Offload", offload_text(data)))
    if "overlapped" in data:
        lines.append(("Overlap", overlap_text(data)))
    if data.get("zero"):
        lines += [("Gathers", text) for text in _gathers(data)]
    if "experts" in data:
        lines.append(("Experts", _experts(data)))
    if data["model"]["blocks"]:
        lines.append(("Blocks", " · ".join(f"{block['name']} x {block['count']}" for block in data["model"]["blocks"])))
    if "draws" in data["model"]:
        of_examples, of_step = data["model"]["draws"]
        once = f", {of_step} once a step" if of_step else ""
        lines.append(
            (
                "Random",
                f"{plural(of_examples, 'operator')} by the key of each example{once}: the same numbers under any plan",
            )
        )
    if data["model"].get("idioms"):
        lines.append(("Idioms", " · ".join(idiom_texts(data["model"]["idioms"]))))
    return lines


def _gathers(data: Mapping[str, Any]) -> list[str]:
    """Say when parameters are freed, where that was asked for, and gathered for the backward."""
    freed = {
        "default": [],
        "always": ["freed after each forward and each backward"],
        "never": ["not freed between forward and backward"],
    }
    reshard = data.get("reshard", "default")
    parts = freed.get(
        reshard, [f"freed after each forward down to shards over {reshard} ranks, after each backward to all"]
    )
    if data["prefetch"] == "none":
        parts = [*parts, "a block is gathered for its backward when it is needed"]
    elif data["prefetch"] is not None:
        point = "before a block computes" if data["prefetch"] == "pre" else "when a block has computed"
        blocks = "block is" if data["prefetch_distance"] == 1 else f"{data['prefetch_distance']} blocks are"
        beside = f"{bytes_text(data['ahead_bytes'])} in addition to its own"
        parts = [*parts, f"in the backward the next {blocks} gathered {point}, {beside}"]
    return [" · ".join(parts)] if parts else []


def _experts(data: Mapping[str, Any]) -> str:
    experts, travel = data["experts"], ""
    if "moves" in experts:
        cpu = "; a CPU hides nothing" if experts["beside"] and device_is_cpu(data) else ""
        travel = f" · rows travel {plural(experts['moves'], 'time')}, {experts['beside']} of them overlapped with products{cpu}"
    return (
        f"{count_text(experts['parameters'])} parameters, a rank has {bytes_text(experts['rank_bytes'])} · "
        f"{count_text(experts['other_parameters'])} others, a rank has {bytes_text(experts['other_rank_bytes'])}{travel}"
    )


def _in_flight(data: Mapping[str, Any]) -> str:
    peaks = data["in_flight"]
    if len(peaks) > 16:
        return f"at most {max(peaks)} activations of a stage on a rank, {min(peaks)} on the least loaded"
    ranks = "ranks" if data["devices"] == len(peaks) else "pp groups"
    return f"microbatches whose activations are kept on {ranks} 0 to {len(peaks) - 1}: at most {', '.join(map(str, peaks))}"


def _traffic(data: Mapping[str, Any]) -> str:
    sends = [value for stage in data["stages"] for value in stage["sends"]]
    forward = sum(value["bytes"] for value in sends) * data["microbatches"]
    backward = sum(value["bytes"] for value in sends if value["requires_grad"]) * data["microbatches"]
    gradients = f" · gradients back {bytes_text(backward)}" if backward else ""
    return f"activations {bytes_text(forward)}{gradients} a step, over all boundaries"


def _sent(value: Mapping[str, Any]) -> str:
    relayed = ", relayed" if value["relayed"] else ""
    gradient = "" if value["requires_grad"] else ", no gradient"
    return f"{value['name']} {value['shape']} {bytes_text(value['bytes'])}{relayed}{gradient}"


def _notes(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List what stages send, tied parameters, recomputed values, and which stages read the inputs."""
    lines: list[tuple[str, str]] = []
    sent: dict[str, list[int]] = {}
    for stage in data["stages"]:
        if stage["sends"]:
            sent.setdefault(" · ".join(kept(_sent(value)) for value in stage["sends"]), []).append(stage["index"])
    lines += [("Sends", f"{_on('', stages)}, a microbatch:  {text}".strip()) for text, stages in sent.items()]
    for tie in data["ties"]:
        where = _on("on", tie["stages"])
        shared = "; one gradient, summed over them" if len(tie["stages"]) > 1 and data["mode"] == "train" else ""
        lines.append(("Tied", f"{' = '.join(tie['names'])}, {where}{shared}"))
    groups: dict[tuple[str, ...], list[int]] = {}
    for stage in data["stages"]:
        if stage["recomputed"]:
            groups.setdefault(tuple(stage["recomputed"]), []).append(stage["index"])
    for names, stages in groups.items():
        lines.append(("Recomputed", f"{listed(names, 8)} {_on('on', stages)} (cheaper than sending)"))
    for entry in data["inputs"]:
        readers = [stage["index"] for stage in data["stages"] if entry["name"] in stage["inputs"]]
        if len(data["stages"]) > 1:
            lines.append(("Input", f"{entry['name']} {_on('to', readers) if readers else 'unused'}"))
    last = data["stages"][-1]
    if len(data["stages"]) > 1:
        what = "Loss" if data["mode"] == "train" else "Outputs"
        together = data["devices"] // data["mesh"]["pp"]
        ranks = indices_text(range(last["rank"] * together, (last["rank"] + 1) * together))
        lines.append((what, f"on rank{'s' if together > 1 else ''} {ranks}, from stage {last['index']}"))
    return lines


def _on(word: str, stages: Sequence[int]) -> str:
    return f"{word} stage{'s' if len(stages) > 1 else ''} {indices_text(stages)}".strip()


def _fields(lines: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Print labels on the left and texts wrapped to their right; a label that repeats is printed once."""
    margin, previous = 12, ""
    printed: list[str] = []
    for label, text in lines:
        shown = "" if label == previous else f" {label}"
        printed += wrapped(text, width, f"{shown:<{margin}}", " " * margin)
        previous = label
    return printed


def _communication(data: Mapping[str, Any], width: int) -> list[str]:
    """Write the communication of a step as a separate section."""
    predicted = data.get("predicted")
    if not predicted or not predicted["communication_s"]:
        return []
    lines = wrapped(communication_text(predicted), width, " Communication a step   ", " " * 12)
    spread = crossed_text(predicted)
    return [*lines, *(wrapped(spread, width, " Spread over  ", " " * 12) if spread else ())]


def _runners_up(data: Mapping[str, Any], width: int) -> list[str]:
    """Write each runner-up, its step time, and where it loses time: on the same line where that fits."""
    others = (data.get("search") or {}).get("alternatives", ())
    rows = []
    for other in others:
        seconds, step = other["step_time_s"], data["predicted"]["step_time_s"]
        took = spread_text(seconds, other.get("spread_s", 0.0))
        rows.append((*named(other), took, f"({seconds / step - 1:+.1%})", str(other["why_not"])))
    columns = [max((len(row[place]) for row in rows), default=0) for place in range(4)]
    lines: list[str] = []
    for place, (mesh, schedule, took, more, why) in enumerate(rows):
        start = f"{'' if place else ' Runners-up':<12}"
        head = f"{mesh:<{columns[0]}}  {schedule:<{columns[1]}}  {took:>{columns[2]}} {more:>{columns[3]}}"
        below = [why]
        if len(head) > width - 12:
            head, below = f"{mesh:<{columns[0]}}  {took:>{columns[2]}} {more:>{columns[3]}}", [schedule, why]
        fits = len(below) == 1 and all(12 + sum(columns) + 5 + 2 + len(row[-1]) <= width for row in rows)
        lines.append(f"{start}{head}{'  ' + why if fits else ''}")
        lines += [] if fits else [line for text in below for line in wrapped(text, width, " " * 14, " " * 14)]
    return lines


# ---- the table of stages ---------------------------------------------------------------------------------------


def stage_table(data: Mapping[str, Any], width: int) -> list[str]:
    """Make the table of stages, with whole names even in narrow terminals.

    Stage  ranks  modules             params     fwd     bwd  memory
        0    0-1  embed, layers.0-3   62.2 M  229 ms  428 ms  █▏            1.09 GiB

    Equal stages of ranks that have several are on one row.
    With a prediction it has each stage's times and its rank's memory, else its share of the flops.
    """
    stages, predicted, rows = data["stages"], data.get("predicted"), equal_stages(data)
    texts = [("Stage", "rank" if data["devices"] == data["mesh"]["pp"] else "ranks", "modules")]
    texts += [stages_text(data, places) for places in rows]
    left, modules = [row[:2] for row in texts], [row[2] for row in texts]
    if predicted is None:
        right = _flops_columns(stages) if "flops" in stages[0] else [()] * (len(stages) + 1)
    else:
        right = _time_columns(predicted)
    right = [right[0], *(right[places[0] + 1] for places in rows)]
    room = _room(left, right, width)
    words = max(len(word) for text in modules for word in text.split(" "))
    if right[0] and room < max(words, _NARROW):  # bars go first
        right = [
            (*cells[:-1], cells[-1] if not place else cells[-1][_BAR:].strip()) for place, cells in enumerate(right)
        ]
        room = _room(left, right, width)
    return _laid_out(left, modules, right, room if room >= max(words, _NARROW) else 0, width)


def _room(left: Sequence[Sequence[str]], right: Sequence[Sequence[str]], width: int) -> int:
    """Return the number of columns that are left for modules."""
    return width - 1 - sum(size + 2 for size in (*_sizes(left), *_sizes(right)))


def _sizes(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows)]


def _laid_out(
    left: Sequence[Sequence[str]], modules: Sequence[str], right: Sequence[Sequence[str]], room: int, width: int
) -> list[str]:
    """Lay out the rows, with modules in ``room`` columns, or below each row where ``room`` is 0."""
    before, after = _sizes(left), _sizes(right)
    column = min(room, max(map(len, modules)))
    lines = []
    for first, text, last in zip(left, modules, right):
        own = wrapped(text, column) if column else [""]
        start = "".join(f" {cell:>{size}} " for cell, size in zip(first, before))
        aligned = [f"{cell:>{size}}" for cell, size in zip(last[:-1], after)] + list(last[-1:])
        end = "".join(f"  {cell}" for cell in aligned)
        middle = f" {own[0]:<{column}}" if column else ""
        lines.append(f"{start}{middle}{end}".rstrip())
        lines += [" " * (len(start) + 1) + line for line in own[1:]]
        if not column and text:
            lines += wrapped(text, width, " " * 8, " " * 8)
    return lines


def _flops_columns(stages: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    flops = [stage["flops"] for stage in stages]
    total, most = sum(flops) or 1.0, max(flops) or 1.0
    rows = [
        (count_text(stage["parameters"]), flops_text(own), f"{_bar(own / most)} {own / total:4.0%}")
        for stage, own in zip(stages, flops)
    ]
    return [("params", "forward", "share"), *rows]


def _time_columns(predicted: Mapping[str, Any]) -> list[tuple[str, ...]]:
    columns = stage_columns(predicted)
    backward = any(column[1] for column in columns)
    rows = []
    for own, (forward, back, peak, share) in zip(predicted["stages"], columns):
        memory = f"{_bar(share)} {peak:>8}" if peak else ""
        rows.append((count_text(own["parameters"]), forward, *([back] if backward else []), memory))
    return [("params", "fwd", *(["bwd"] if backward else []), "memory"), *rows]


def _bar(share: float) -> str:
    eighths = round(max(0.0, min(1.0, share)) * _BAR * 8)
    whole, part = divmod(eighths, 8)
    return ("█" * whole + (" ▏▎▍▌▋▊▉"[part] if part else "")).ljust(_BAR)


# ---- sharding --------------------------------------------------------------------------------------------------


def _sharding_facts(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Say what all redistributions of a microbatch send and take, how close to the best the placement is, and its notes."""
    sharding = data["sharding"]
    lines = [("Sharding", transitions_text(data)), ("Placement", gap_text(sharding["gap"]))]
    for operator, rules in sharding["discovered"].items():
        found = f"its rule was found by running it: {'; '.join(rules)}" if rules else ""
        lines.append(("Operator", f"{operator}: {found or 'no rule, so it runs on unsharded tensors'}"))
    return [*lines, *(("Loss", note) for note in sharding["notes"])]


def _sharding_sections(sharding: Mapping[str, Any] | None, width: int) -> list[list[str]]:
    """Print a section for each distinct block and one for the operators outside of blocks, with the same columns.

    LlamaDecoderLayer x 8   in S(1)@tp   out S(1)@tp
      input_layernorm       R@tp
        input_layernorm     S(1) -> R  all-gather 2.00 KiB  reduce-scatter 2.00 KiB  0.03 ms
    """
    if sharding is None:
        return []
    scopes = [scope for scope in sharding["scopes"] if scope["rows"]]
    several = len(sharding["axes"]) > 1
    rows = [_cells(entry, several) for scope in scopes for row in scope["rows"] for entry in row["transitions"]]
    columns = [max((len(row[place]) for row in rows), default=0) for place in range(5)]
    sections = [_section(scope, several, columns, width) for scope in scopes]
    legend = (wrapped(f"{name:<4} {what}", width, "   ", " " * 8) for name, what in sharding_legend(sharding))
    return [*sections, [" Types, on an axis", *(line for lines in legend for line in lines)]]


def _section(scope: Mapping[str, Any], several: bool, columns: Sequence[int], width: int) -> list[str]:
    title = f" {scope['name']} x {scope['count']}" if scope["name"] else " Outside of blocks"
    ends = "   ".join(f"{end} {scope[end]}" for end in ("in", "out") if scope[end])
    lines = _beside(title, ends, width)
    for row in scope["rows"]:
        lines += _beside(f"   {row['label']}", row["spec"], width)
        for entry in row["transitions"]:
            lines += _transition(_cells(entry, several), columns, width)
    return lines


def _beside(left: str, right: str, width: int) -> list[str]:
    """Write a name, and its specs in the column of types, or below the name where that is too long."""
    start = 3 + _NAMES + 1
    if len(left) < start and start + len(right) <= width:
        return [f"{left:<{start}}{right}".rstrip()]
    lines = wrapped(left, width, then="   ")
    if right and len(lines[-1]) + 2 + len(right) <= width:
        return [*lines[:-1], f"{lines[-1]}  {right}"]
    return [*lines, *(wrapped(right, width, " " * 6, " " * 6) if right else [])]


def _cells(entry: Mapping[str, Any], several: bool) -> tuple[str, str, str, str, str]:
    seconds = "" if entry["seconds"] is None else seconds_text(entry["seconds"])
    return (
        entry["name"],
        redistribution_text(entry, several),
        sent_text(entry, "forward"),
        sent_text(entry, "backward"),
        seconds,
    )


def _transition(cells: Sequence[str], columns: Sequence[int], width: int) -> list[str]:
    """Write one redistribution on a line where it fits (a long name is shortened), else with its collectives below it."""
    name, types, *sent, price = cells
    fixed = f"{types:<{columns[1]}}  {sent[0]:<{columns[2]}}  {sent[1]:<{columns[3]}}  {price:>{columns[4]}}"
    room = width - 6 - len(fixed)
    if room >= min(columns[0], _LEAST):
        room = min(room, max(columns[0], _NAMES - 2))
        return [f"     {shortened(name, room):<{room}} {fixed}".rstrip()]
    room = width - 7 - columns[1] - columns[4]
    first = f"     {shortened(name, room):<{room}} {types:<{columns[1]}} {price:>{columns[4]}}".rstrip()
    return [first, *wrapped("; ".join(filter(None, map(kept, sent))), width, " " * 8, " " * 8)]


def _placements(plan: Plan) -> list[tuple[str, str]]:
    """List the specs of parameters, from the plan alone; those of equal layers are joined."""
    state = [("State", f"ZeRO-{plan.zero} over {plan.mesh.state_text}")] if plan.zero else []
    if not plan.sharding.all_degrees:
        return state
    specs: dict[str, list[str]] = {}
    for name, text in joined(
        (name, ", ".join(f"{kind}@{axis}" for axis, kind in spec.items()))
        for name, spec in plan.sharding.parameters.items()
    ):
        specs.setdefault(text, []).append(name)
    lines = [*state, ("Placement", gap_text(plan.sharding.gap))]
    lines += [("Weights", f"{text}:  {listed(names, _SHOWN)}") for text, names in sorted(specs.items())]
    return [*lines, *(("Types", f"{name}  {what}") for name, what in legend_of(specs))]
