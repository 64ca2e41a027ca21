"""Two plans for one model side by side: the decisions that differ, predicted times, and memory.

Every number is a row with ``a``, ``b``, their ``difference`` (b - a) and ``ratio`` (b / a); ``a`` or ``b`` is None where that plan has
no such part.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphpar.errors import GraphparError
from graphpar.ir.plan import Plan
from graphpar.report.data import decisions
from graphpar.report.phrases import PART_NAMES, fullest, mesh_text, whose_parts
from graphpar.text import bytes_text, compressed, count_text, plural, seconds_text, shortened, spread_text

_SAME = 1e-3
"""Step times that differ by less than this share are called equal."""
_NAME, _VALUE = 34, 14
"""Columns of a row's name, and of each of its values."""


@dataclass(frozen=True)
class Side:
    """A plan to compare: the path that the user gave, and the report beside the plan; None where there is none of it."""

    name: str
    plan: Plan
    report: Mapping[str, Any] | None

    @property
    def predicted(self) -> Mapping[str, Any] | None:
        """The prediction in the report, if there is one."""
        return (self.report or {}).get("predicted")


def difference(a: Side, b: Side) -> dict[str, Any]:
    """Compare two plans as plain JSON data, in seconds and bytes.

    Raises:
        GraphparError: they are for different models.
    """
    _check_model(a, b)
    data: dict[str, Any] = {
        "model": a.plan.model,
        "a": _plan_facts(a),
        "b": _plan_facts(b),
        "decisions": _decisions(a.plan, b.plan),
        "placements": _placements(a.plan, b.plan),
    }
    unpriced = [side.name for side in (a, b) if side.predicted is None]
    if a.predicted is None or b.predicted is None:
        said = " and ".join(dict.fromkeys(unpriced))
        return {
            "summary": f"No times and bytes to compare: {said} has no prediction, or was edited since.",
            **data,
            "times": None,
        }
    both = a.predicted, b.predicted
    return {
        "summary": _summary(a, b, *both),
        **data,
        "times": [_row("step", *(each["step_time_s"] for each in both)), *_compared_rows(*map(_named_parts, both))],
        "communication": list(_compared_rows(*map(_axes, both))),
        "stages": list(_stages(a, b)),
        "memory": list(_parts_of_memory(*both)),
        "ranks": list(_ranks(*both)),
    }


def _check_model(a: Side, b: Side) -> None:
    if a.plan.model != b.plan.model:
        raise GraphparError(
            f"{a.name} is a plan for {a.plan.model}, {b.name} for {b.plan.model}; plans are compared for one model."
        )
    first, second = (None if side.report is None else side.report["model"]["parameters"] for side in (a, b))
    if first is not None and second is not None and first != second:
        raise GraphparError(
            f"{a.name} is a plan for a {a.plan.model} of {count_text(first)} parameters ({first}), {b.name} for one of "
            f"{count_text(second)} ({second}); plans are compared for one model."
        )
    paths = [{path for stage in side.plan.stages for path in stage.modules} for side in (a, b)]
    if (first is None or second is None) and (alone := sorted(paths[0] ^ paths[1])):
        raise GraphparError(
            f"{a.name} and {b.name} are plans for different models: only one of them has the module {alone[0]}."
        )


def _plan_facts(side: Side) -> dict[str, Any]:
    plan = side.plan
    priced = None if side.predicted is None else side.predicted["cluster"]
    cluster = priced or (None if plan.cluster is None else str(plan.cluster))
    return {"plan": side.name, "cluster": cluster, "devices": plan.mesh.size, "global_batch": plan.global_batch}


# ---- decisions -------------------------------------------------------------------------------------------------


def _decisions(a: Plan, b: Plan) -> list[dict[str, Any]]:
    """Return the decisions that differ, with the value of each plan."""
    first, second = _decided(a), _decided(b)
    rows = [{"name": name, "a": first[name], "b": second[name]} for name in first if first[name] != second[name]]
    if first["split"] == second["split"]:  # else it says what each stage has
        modules = [compressed([stage.modules for stage in plan.stages]) for plan in (a, b)]
        rows += [
            {"name": f"modules of stage {index}", "a": one, "b": two}
            for index, (one, two) in enumerate(zip(*modules))
            if one != two
        ]
    return rows


def _decided(plan: Plan) -> dict[str, Any]:
    data = decisions(plan)
    data["split"] = [entry["path"] + (" (end)" if entry["where"] == "end" else "") for entry in data["split"]]
    return data | {"table": plan.actions, "stages": len(plan.stages)}


def _placements(a: Plan, b: Plan) -> list[dict[str, Any]]:
    """Return the parameters that the plans divide differently, one row for all that differ in numbers in their paths only."""
    first, second = _divided(a), _divided(b)
    rows = Counter(
        (re.sub(r"(?<![^.])\d+(?![^.])", "*", name), first.get(name, "whole"), second.get(name, "whole"))
        for name in sorted({*first, *second})
        if first.get(name) != second.get(name)
    )
    return [{"parameters": name, "count": count, "a": one, "b": two} for (name, one, two), count in rows.items()]


def _divided(plan: Plan) -> dict[str, str]:
    """Write how each parameter that is not whole on each rank is divided."""
    specs = {
        name: ", ".join(f"{kind}@{axis}" for axis, kind in spec.items() if kind not in ("R", "I"))
        for name, spec in plan.parameters().items()
    }
    return {name: text for name, text in specs.items() if text}


# ---- numbers ---------------------------------------------------------------------------------------------------


def _row(name: str, a: Any, b: Any) -> dict[str, Any]:
    """Compare two numbers, or one with None."""
    both = a is not None and b is not None
    return {"name": name, "a": a, "b": b, "difference": b - a if both else None, "ratio": b / a if both and a else None}


def _named_parts(predicted: Mapping[str, Any]) -> dict[str, float]:
    """Return the parts of a step, which add up to it, and are those that :func:`whose_parts` says."""
    return {PART_NAMES.get(name, name): seconds for name, seconds in predicted["parts_s"].items()}


def _compared_rows(a: Mapping[str, float], b: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """Compare parts by name; a part that only one plan has takes nothing in the other. Parts that are 0 in both are left out."""
    for name in dict.fromkeys((*a, *b)):
        if a.get(name) or b.get(name):
            yield _row(name, a.get(name, 0), b.get(name, 0))


def _axes(predicted: Mapping[str, Any]) -> dict[str, float]:
    """Return the communication by axis: what computation does not hide, and what it hides."""
    found: dict[str, float] = {}
    for axis, seconds in predicted["communication_s"].items():
        exposed = predicted["exposed_s"].get(axis, 0.0)
        found |= {f"{axis} exposed": exposed, f"{axis} hidden": max(0.0, seconds - exposed)}
    return found


def _stages(a: Side, b: Side) -> Iterator[dict[str, Any]]:
    """Compare a microbatch's forward and backward by stage, with the modules of each."""
    sides = [_by_stage(side) for side in (a, b)]
    for index in range(max(map(len, sides))):
        first, second = (side[index] if index < len(side) else {} for side in sides)
        yield {
            "index": index,
            "modules": {"a": first.get("modules"), "b": second.get("modules")},
            "forward_s": _row("forward", first.get("forward_s"), second.get("forward_s")),
            "backward_s": _row("backward", first.get("backward_s"), second.get("backward_s")),
        }


def _by_stage(side: Side) -> list[dict[str, Any]]:
    assert side.predicted is not None
    modules = compressed([list(stage.modules) for stage in side.plan.stages])
    return [
        {"modules": modules[stage["index"]], "forward_s": stage["forward_s"], "backward_s": stage["backward_s"]}
        for stage in side.predicted["stages"]
    ]


def _parts_of_memory(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Compare the fullest rank of each plan by part, its peak first."""
    full = list(map(fullest, (a, b)))
    yield _row("peak", a["peak_memory_bytes"][full[0]], b["peak_memory_bytes"][full[1]])
    first, second = a["memory"][full[0]], b["memory"][full[1]]
    for row in _compared_rows(first, second):
        yield row | {"name": row["name"].replace("_", " ")}
    yield _row("memory of a device", a["memory_bytes"], b["memory_bytes"])


def _ranks(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Compare the peak of a device of each pipeline rank."""
    peaks = [side["peak_memory_bytes"] for side in (a, b)]
    for rank in range(max(map(len, peaks))):
        yield _row(f"pp {rank}", *(peak[rank] if rank < len(peak) else None for peak in peaks))


# ---- words -----------------------------------------------------------------------------------------------------


def _summary(a: Side, b: Side, first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Say in one sentence which plan is faster, for as many rows, and which part of the step makes most of the difference."""
    rows = [side.plan.global_batch for side in (a, b)]
    steps = [first["step_time_s"], second["step_time_s"]]
    same = rows[0] == rows[1]
    counts = [1, 1] if same else rows
    compared = [step / count for step, count in zip(steps, counts)]
    ratio = compared[1] / compared[0]
    for_rows = ["" if same else f" for {plural(count, 'row')}" for count in rows]
    texts = [spread_text(each["step_time_s"], each.get("spread_s", 0.0)) for each in (first, second)]
    times = f"{texts[1]} a step{for_rows[1]}, A {texts[0]}{for_rows[0]}"
    if abs(ratio - 1) < _SAME:
        return f"B takes {times}: equally fast."
    faster, slower = ("A", "B") if ratio > 1 else ("B", "A")
    gain = f"{max(ratio, 1 / ratio):.3g} times as fast{'' if same else ' for each row'}"
    parts = [
        {name: seconds / count for name, seconds in _named_parts(side).items()}
        for side, count in zip((first, second), counts)
    ]
    sign = 1 if ratio > 1 else -1
    more = {name: sign * (parts[1].get(name, 0.0) - parts[0].get(name, 0.0)) for name in {**parts[0], **parts[1]}}
    most = max(more, key=more.__getitem__)
    each = "" if same else " a row"
    where = (
        f"{slower} has {seconds_text(more[most])} more of {most}{each}"
        if most not in _VERBS
        else (f"{slower} {_VERBS[most]} {seconds_text(more[most])} longer{each}")
    )
    total = abs(compared[1] - compared[0])
    share = f"; with all other parts the difference is {seconds_text(total)}{each}"
    return f"B takes {times}: {faster} is {gain}, mostly because {where}{share}."


_VERBS = {"compute": "computes", "waits for the host": "waits for the host", "bubble": "waits in the bubble"}
"""How a sentence says the parts that are not sent or stepped."""


def difference_lines(data: Mapping[str, Any]) -> list[str]:
    """Print a comparison."""
    lines = [f" {data['summary']}", ""]
    for side in ("a", "b"):
        entry = data[side]
        where = entry["cluster"] or plural(entry["devices"], "device")
        lines.append(
            f" {side.upper()}  {entry['plan']} · {data['model']} · {where} · global batch {entry['global_batch']}"
        )
    lines += [
        "",
        " Decisions that differ" if data["decisions"] or data["placements"] else " The decisions are the same.",
    ]
    lines += [f"   {entry['name']}: {_said(entry, 'a')} | {_said(entry, 'b')}" for entry in data["decisions"]]
    for entry in data["placements"]:
        count = f" ({entry['count']} of them)" if entry["count"] > 1 else ""
        lines.append(f"   {entry['parameters']}{count}: {entry['a']} | {entry['b']}")
    if data["times"] is None:
        return lines
    lines += _table("Step", data["times"], seconds_text)
    lines.append(f"   ({whose_parts([row['name'] for row in data['times']])})")
    lines += _table("Communication a step", data["communication"], seconds_text)
    lines += _table("A microbatch", list(_stage_rows(data["stages"])), seconds_text)
    lines += [f"   stage {stage['index']}: {_modules(stage, 'a')} | {_modules(stage, 'b')}" for stage in data["stages"]]
    lines += _table("Memory of the fullest rank", data["memory"], bytes_text)
    return lines + _table("Peak of a device", data["ranks"], bytes_text)


def _said(entry: Mapping[str, Any], side: str) -> str:
    value = entry[side]
    if entry["name"] == "mesh":
        return mesh_text(value)
    if entry["name"] == "table":
        return "the schedule's own" if value is None else "given"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={kind}" for key, kind in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _stage_rows(stages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for stage in stages:
        for way in ("forward_s", "backward_s"):
            if stage[way]["a"] or stage[way]["b"]:
                yield stage[way] | {"name": f"stage {stage['index']} {stage[way]['name']}"}


def _modules(stage: Mapping[str, Any], side: str) -> str:
    names = stage["modules"][side]
    return "no such stage" if names is None else ", ".join(names)


def _table(title: str, rows: Sequence[Mapping[str, Any]], text: Callable[[float], str]) -> list[str]:
    if not rows:
        return []
    head = "".join(f"{name:>{_VALUE}}" for name in ("A", "B", "B - A", "B / A"))
    return ["", f" {title:<{_NAME}}{head}", *(_line(row, text) for row in rows)]


def _line(row: Mapping[str, Any], text: Callable[[float], str]) -> str:
    values = ["-" if row[side] is None else text(row[side]) for side in ("a", "b")]
    more = row["difference"]
    values.append("" if more is None else "0" if not more else f"{'-' if more < 0 else '+'}{text(abs(more))}")
    values.append("" if row["ratio"] is None else f"{row['ratio']:.3g}")
    return f"   {shortened(row['name'], _NAME - 3):<{_NAME - 2}}" + "".join(f"{value:>{_VALUE}}" for value in values)
