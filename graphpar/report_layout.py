"""How tensors lie, as text: the part of the printed report that is about cut operators.

LlamaDecoderLayer x 8                            in S(1)@tp   out S(1)@tp
  input_layernorm      R@tp
    input_layernorm    S(1) -> R   all-gather 2.05 kB      reduce-scatter 2.05 kB   0.03 ms
  q, k, v              S(0)@tp
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from graphpar.report_text import bytes_text, listed, numbered_runs, plural, seconds_text

if TYPE_CHECKING:
    from graphpar.plans import Plan

_MODULE, _SPEC, _SENT = 26, 14, 23
_SHOWN = 12


def sharding_lines(sharding: Mapping[str, Any], mode: str) -> list[tuple[str, str]]:
    """What all transitions of a microbatch send and cost, how good the choice is, and what is worth knowing about it."""
    sent = " · ".join(f"{axis} {bytes_text(amount)}" for axis, amount in sharding["bytes"].items() if amount)
    passes = "forward and backward " if mode == "train" else ""
    count = plural(sharding["transitions"], "transition")
    lines = [
        (
            "Sharding",
            f"{count} a microbatch, {passes}{seconds_text(sharding['transitions_s'])} · a rank sends {sent or 'nothing'}",
        )
    ]
    lines.append(("Priced", cost_text(sharding["cost"], sharding["gap"])))
    for operator, rules in sharding["discovered"].items():
        found = (
            f"its rule was found by running it: {'; '.join(rules)}" if rules else "no rule, so it runs on whole tensors"
        )
        lines.append(("Operator", f"{operator}: {found}"))
    return [*lines, *(("Loss", note) for note in sharding["notes"])]


def cost_text(cost: Mapping[str, float], gap: float) -> str:
    """``compute 1.27 ms · transitions 0.55 ms``, and how far from the best that may be."""
    parts = " · ".join(f"{name} {seconds_text(seconds)}" for name, seconds in cost.items() if seconds)
    best = "the best there is" if gap < 5e-5 else f"within {gap:.2%} of the best there is"
    return f"{parts or 'nothing'} a microbatch; {best} under this model of costs"


def sharding_sections(sharding: Mapping[str, Any] | None, width: int) -> list[list[str]]:
    """A section a distinct block, and one of the root's own operators."""
    if sharding is None:
        return []
    several = len(sharding["axes"]) > 1
    return [_section(scope, several, width) for scope in sharding["scopes"] if scope["rows"]]


def _section(scope: Mapping[str, Any], several: bool, width: int) -> list[str]:
    title = f" {scope['name']} x {scope['count']}" if scope["name"] else " Outside of blocks"
    ends = "   ".join(f"{end} {scope[end]}" for end in ("in", "out") if scope[end])
    lines = [f"{title:<{_MODULE + _SPEC + 3}}{ends}".rstrip()]
    for row in scope["rows"]:
        lines.append(f"   {row['label']:<{_MODULE}} {row['spec']}".rstrip())
        lines += [transition_text(entry, several) for entry in row["transitions"]]
    return [line if len(line) <= width else line[: width - 1] + "…" for line in lines]


def transition_text(entry: Mapping[str, Any], several: bool) -> str:
    """One transition; the axis is said where there are several."""
    turned = turn_text(entry, several)
    room = _MODULE + _SPEC - 3 - max(len(turned), _SPEC - 1)
    name = entry["name"] if len(entry["name"]) <= room else f"{entry['name'][: room - 1]}…"
    sent = [_sent(entry, way) for way in ("forward", "backward")]
    start = f"     {name:<{room}} {turned:<{_SPEC - 1}}"
    return f"{start} {sent[0]:<{_SENT}} {sent[1]:<{_SENT}} {seconds_text(entry['seconds']):>7}"


def turn_text(entry: Mapping[str, Any], several: bool) -> str:
    axis = f" @{entry['axis']}" if several else ""
    return f"{entry['from']} -> {entry['to']}{axis}"


def _sent(entry: Mapping[str, Any], way: str) -> str:
    amount = entry[f"{way}_bytes"]
    return f"{entry[way]} {bytes_text(amount)}" if amount else entry[way]


def layout_text(plan: Plan) -> list[tuple[str, str]]:
    """How parameters lie, from the plan alone: names that differ in a layer's number are one."""
    if not plan.sharding.degrees:
        return []
    specs: dict[str, dict[str, list[str]]] = {}
    for name, spec in plan.sharding.parameters.items():
        text = ", ".join(f"{kind}@{axis}" for axis, kind in spec.items())
        specs.setdefault(text, {}).setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(name)
    lines = [("Priced", cost_text(plan.sharding.cost, plan.sharding.gap))]
    for text, groups in sorted(specs.items()):
        shown = [names[0] if len(names) == 1 else pattern for pattern, names in groups.items()]
        lines.append(("Weights", f"{text}:  {listed(numbered_runs(shown), _SHOWN)}"))
    return lines
