"""Specs of tensors, as text: the part of the printed report that is about sharded operators.

LlamaDecoderLayer x 8   in S(1)@tp   out S(1)@tp
  input_layernorm       R@tp
    input_layernorm     S(1) -> R  all-gather 2.00 KiB  reduce-scatter 2.00 KiB  0.03 ms
  q, k, v               S(0)@tp
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from graphpar.text import bytes_text, kept, listed, numbered_runs, plural, seconds_text, shortened, wrapped

if TYPE_CHECKING:
    from graphpar.ir.plan import Plan

_MODULE = 26
"""Width of the column of names, unless they are wider."""
_LEAST = 16
"""A name is not shortened below this width."""
_SHOWN = 12


TYPES = {
    "R": ("R", "replicated: whole on every rank, and used differently on each"),
    "I": ("I", "invariant: whole on every rank, and used identically on all"),
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


def legend_lines(legend: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Write the legend, one line for each type."""
    return [line for name, what in legend for line in wrapped(f"{name:<4} {what}", width, "   ", " " * 8)]


def sharding_lines(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Say what all redistributions of a microbatch send and take, how close to the best the placement is, and its notes."""
    sharding = data["sharding"]
    lines = [("Sharding", transitions_text(data)), ("Placement", gap_text(sharding["gap"]))]
    for operator, rules in sharding["discovered"].items():
        found = f"its rule was found by running it: {'; '.join(rules)}" if rules else ""
        lines.append(("Operator", f"{operator}: {found or 'no rule, so it runs on whole tensors'}"))
    return [*lines, *(("Loss", note) for note in sharding["notes"])]


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
    best = "the best there is" if gap < 5e-5 else f"within {gap:.2%} of the best there is"
    return f"{best} by the prices of the search for placements, which are simpler than those of the step"


def sharding_sections(sharding: Mapping[str, Any] | None, width: int) -> list[list[str]]:
    """Print a section for each distinct block and one for the operators outside of blocks, with the same columns."""
    if sharding is None:
        return []
    scopes = [scope for scope in sharding["scopes"] if scope["rows"]]
    several = len(sharding["axes"]) > 1
    rows = [_cells(entry, several) for scope in scopes for row in scope["rows"] for entry in row["transitions"]]
    columns = [max((len(row[place]) for row in rows), default=0) for place in range(5)]
    sections = [_section(scope, several, columns, width) for scope in scopes]
    return [*sections, [" Types, on an axis", *legend_lines(sharding_legend(sharding), width)]]


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
    start = 3 + _MODULE + 1
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
        room = min(room, max(columns[0], _MODULE - 2))
        return [f"     {shortened(name, room):<{room}} {fixed}".rstrip()]
    room = width - 7 - columns[1] - columns[4]
    first = f"     {shortened(name, room):<{room}} {types:<{columns[1]}} {price:>{columns[4]}}".rstrip()
    return [first, *wrapped("; ".join(filter(None, map(kept, sent))), width, " " * 8, " " * 8)]


def redistribution_text(entry: Mapping[str, Any], several: bool) -> str:
    """Write a redistribution as ``S(1) -> R``, with its axis where there are several."""
    axis = f" @{entry['axis']}" if several else ""
    return f"{entry['from']} -> {entry['to']}{axis}"


def sent_text(entry: Mapping[str, Any], way: str) -> str:
    """Write ``all-gather 2.00 KiB``, or the local operation where nothing is sent."""
    amount = entry[f"{way}_bytes"]
    return f"{entry[way]} {bytes_text(amount)}" if amount else entry[way]


def layout_text(plan: Plan) -> list[tuple[str, str]]:
    """List the specs of parameters, from the plan alone; names that differ only in a layer's number are merged."""
    state = [("State", f"ZeRO-{plan.zero} over {plan.mesh.state_text}")] if plan.zero else []
    if not plan.sharding.all_degrees:
        return state
    specs: dict[str, dict[str, list[str]]] = {}
    for name, spec in plan.sharding.parameters.items():
        text = ", ".join(f"{kind}@{axis}" for axis, kind in spec.items())
        specs.setdefault(text, {}).setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(name)
    lines = [*state, ("Placement", gap_text(plan.sharding.gap))]
    for text, groups in sorted(specs.items()):
        shown = [names[0] if len(names) == 1 else pattern for pattern, names in groups.items()]
        lines.append(("Weights", f"{text}:  {listed(numbered_runs(shown), _SHOWN)}"))
    return [*lines, *(("Types", f"{name}  {what}") for name, what in legend_of(specs))]
