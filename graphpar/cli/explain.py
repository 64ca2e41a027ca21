"""``--explain PATTERN``: of matching modules and values, the stage that has them, why, and what is sent; of decisions, the next best.

mesh, schedule, ... or plan ──DecisionExplainer──► what the next best value would cost, in the seconds and bytes of the report
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphpar.cost_models.estimates import Estimate
from graphpar.errors import GraphparError, near_match
from graphpar.ir.batch_sizes import concrete_shape
from graphpar.ir.plan import Plan
from graphpar.ir.program import Program
from graphpar.ir.stage import Stage
from graphpar.passes.planning.explain import DECISIONS, Alternatives, NextBest, costs
from graphpar.report.data import stage_parameters
from graphpar.report.phrases import PART_NAMES, named
from graphpar.text import bytes_text, indices_text, is_at_or_below, joined, seconds_text, spread_text

ALL = "plan"
"""The name that stands for all decisions."""
_LEAST = 1e-3
"""Differences below this share of a step, or of the peak memory, are not listed."""
_MOST = 12
"""How many blocks and cuts are priced for one pattern."""


def explain(
    program: Program,
    plan: Plan,
    stages: Sequence[Stage],
    pattern: str,
    more: Callable[[str], list[str]] | None = None,
    decisions: Sequence[str] = (),
) -> list[str]:
    """Explain everything whose name matches ``pattern``: ``*`` within one level, ``**`` over levels.

    Args:
        more: further lines about a name.
        decisions: lines about the decision that has the name ``pattern``, if there is one.

    Raises:
        GraphparError: nothing matches.
    """
    about = [
        *_modules(program, plan, stages).items(),
        *_parameters(program, plan, stages).items(),
        *_inputs(program, stages).items(),
        *_crossing(plan, stages),
        *_recomputed(program, stages).items(),
    ]
    parts = (re.escape(part).replace(r"\*", "[^.]*") for part in pattern.split("**"))
    matcher = re.compile(".*".join(parts))
    lines = list(decisions)
    matched = [(name, text) for name, text in about if matcher.fullmatch(name)]
    for name, (text, *others) in joined((name, (text, *(more(name) if more else ()))) for name, text in matched):
        lines += [f" {name}: {text}", *(f"     {line}" for line in others)]
    if not lines:
        anywhere = pattern if "*" in pattern else f"**.{pattern}"
        hint = near_match(pattern, [*dict(about), *DECISIONS, ALL]) or near_match(
            anywhere, {f"**.{name.rpartition('.')[2]}" for name, _ in about}
        )
        raise GraphparError(f"--explain {pattern!r} matches no module, parameter, value or decision.{hint}")
    return lines


# ---- modules and values ----------------------------------------------------------------------------------------


def _modules(program: Program, plan: Plan, stages: Sequence[Stage]) -> dict[str, str]:
    about: dict[str, str] = {}
    word = "rank" if plan.mesh.size == plan.mesh.pp else "pp group"
    for path in filter(None, program.module_classes):
        # one contains the other, or they are the same
        found = [
            stage.index
            for stage in stages
            if any(is_at_or_below(path, own) or is_at_or_below(own, path) for own in stage.modules)
        ]
        ranks = ", ".join(str(rank) for rank in dict.fromkeys(plan.stages[index].rank for index in found))
        if len(found) == 1:
            about[path] = f"a module on stage {found[0]} ({word} {ranks}), {_why(plan, found[0])}"
        elif found:
            about[path] = f"a module on stages {indices_text(found)} ({word}s {ranks})"
        else:
            about[path] = "a module without used parameters; its operators are on the stages of their inputs"
    return about


def _why(plan: Plan, stage: int) -> str:
    """Say between which split points a stage is."""

    def described(index: int) -> str:
        point = plan.split_points[index]
        return f"{point.path!r}" if point.where.value == "beginning" else f"the end of {point.path!r}"

    if not plan.split_points:
        return "the only one"
    first = f"begins at {described(stage - 1)}" if stage else "begins with the inputs"
    last = f"ends before {described(stage)}" if stage < len(plan.split_points) else "ends with the result"
    return f"which {first} and {last}"


def _parameters(program: Program, plan: Plan, stages: Sequence[Stage]) -> dict[str, str]:
    held = [set(stage_parameters(program, stage)) for stage in stages]
    about: dict[str, str] = {}
    for name, info in program.parameters.items():
        group = program.tie_of(name)
        found = [index for index, names in enumerate(held) if group[0] in names]
        where = f"on stage {indices_text(found)}" if found else "used by no operator"
        tied = f", tied: {' = '.join(group)}" if len(group) > 1 else ""
        summed = "; its gradient is summed over these stages" if len(found) > 1 and program.mode == "train" else ""
        piece = "" if info.whole in (None, info.shape) else f" of {list(info.whole)}"
        stored = f", of which each rank of {plan.mesh.state_text} stores a shard" if name in plan.fully_sharded else ""
        about[name] = f"a parameter {list(info.shape)}{piece} {where}{tied}{summed}{stored}"
    return about


def _inputs(program: Program, stages: Sequence[Stage]) -> dict[str, str]:
    about: dict[str, str] = {}
    for entry in program.inputs:
        found = [stage.index for stage in stages if entry.name in stage.inputs]
        split = "whole" if entry.batch_dim is None else f"split into microbatches on dim {entry.batch_dim}"
        where = f"goes to stage {indices_text(found)} directly" if found else "is read by no stage"
        about[entry.name] = f"an input, {split}, {where}"
    return about


def _crossing(plan: Plan, stages: Sequence[Stage]) -> list[tuple[str, str]]:
    """What is sent, by the stage that computes it; a name may stand for another value on a later boundary."""
    about: list[tuple[str, str]] = []
    for stage in stages:
        for boundary in stage.sends:
            if any(boundary.node is received.node for received in stage.receives):
                continue
            last = stage.index + 1
            while any(sent.node is boundary.node for sent in stages[last].sends):
                last += 1
            between = indices_text(range(stage.index + 1, last))
            relayed = f", relayed by stage {between}" if between else ""
            shape = list(concrete_shape(boundary.node, plan.microbatch_size))
            back = "its gradient comes back" if boundary.requires_grad and plan.mode == "train" else "without gradient"
            text = f"a value {shape} a microbatch, sent from stage {stage.index} to {last}{relayed}; {back}"
            about.append((boundary.name, text))
    return about


def _recomputed(program: Program, stages: Sequence[Stage]) -> dict[str, str]:
    found: dict[str, list[int]] = {}
    for stage in stages:
        for name in stage.recomputed:
            found.setdefault(name, []).append(stage.index)
    about: dict[str, str] = {}
    for node in program.graph.nodes:
        source = node.meta.get("source")
        if len(found.get(node.name, ())) > 1 and source is not None:
            for target in source.targets:
                text = indices_text(found[node.name])
                about[target] = (
                    f"a value computed again on stages {text}: it depends on no parameter, so it is not sent"
                )
    return about


# ---- decisions -------------------------------------------------------------------------------------------------


class DecisionExplainer:
    """Explains decisions by name, and blocks and cuts by path."""

    def __init__(self, decisions: Alternatives) -> None:
        self.decisions = decisions
        self.found: list[NextBest] = []

    def named(self, pattern: str) -> list[str]:
        """Explain the decision ``pattern``, or all of them where it is ``plan``; empty where it is no decision."""
        names = DECISIONS if pattern == ALL else (pattern,) if pattern in DECISIONS else ()
        lines: list[str] = []
        for name in names:
            entries = self.decisions.next_best(name)
            self.found += entries
            titles = [f"cut {each.decision}" if name == "cuts" else name for each in entries]
            lines += [f" {title}: {self.text(each)}" for title, each in zip(titles, entries)]
            if not entries:
                lines.append(f" {name}: there is one stage")
        return lines

    def lines(self, name: str) -> list[str]:
        """Explain the recomputation of the block ``name``, and the cuts there; empty for anything else."""
        if len(self.found) >= _MOST:
            return []
        points = self.decisions.plan.split_points
        found = [self.decisions.cut(number) for number, point in enumerate(points) if point.path == name]
        block = self.decisions.block(name)
        found += [] if block is None else [block]
        self.found += found
        return [self.text(each) for each in found]

    def text(self, each: NextBest) -> str:
        """Write ``1F1B; next best GPipe (4 microbatches of 2): 45 ms a step instead of 43 ms (+4.7%): bubble +2 ms; peak ...``."""
        decided = "as in the plan" if self.decisions.given else "pinned"
        pinned = f", {decided}" if each.pinned else ", not searched" if each.by_default else ""
        if each.estimate is None:
            return f"{each.value}{pinned}; no next best: {each.note}"
        note = f" ({each.note})" if each.note else ""
        rest = ""
        if each.candidate is not None:
            mesh, rest = named(each.candidate)
            rest = f" ({rest})" if each.decision == "mesh" else f" ({mesh}, {rest})"
        cost = compared(self.decisions.estimate, each.estimate, each.pinned and each.candidate is not None)
        return f"{each.value}{pinned}; next best {each.other}{rest}{note}: {cost}"

    def to_json(self) -> list[dict[str, Any]]:
        """Return what was explained as plain data, in seconds and bytes; ``costs`` are those of the next best above the plan's own."""
        taken = self.decisions.estimate
        return [
            {
                "decision": each.decision,
                "value": each.value,
                "pinned": each.pinned,
                "next_best": None
                if each.estimate is None
                else {
                    "value": each.other,
                    "plan": each.candidate,
                    "step_time_s": each.estimate.step_time_s,
                    "peak_memory_bytes": max(each.estimate.peak_memory_bytes),
                    "fits": each.estimate.missing_bytes <= 0,
                    "costs": costs(taken, each.estimate),
                },
                "note": each.note or None,
            }
            for each in self.found
        ]


def compared(taken: Estimate, other: Estimate, pinned: bool = False) -> str:
    """Write the step time and peak memory of ``other`` beside those of ``taken``, with the parts that differ.

    ``pinned``: ``other`` is the fastest without a pin of ``taken``, so the difference is what the pin costs.
    """
    data = costs(taken, other)
    least_s, least_bytes = _LEAST * taken.step_time_s, _LEAST * max(taken.peak_memory_bytes)
    parts = [
        f"{PART_NAMES.get(name, name)} {_signed(more, seconds_text)}"
        for name, more in _largest(data["parts_s"])
        if abs(more) >= least_s
    ]
    nbytes = [
        f"{name.replace('_', ' ')} {_signed(int(more), bytes_text)}"
        for name, more in _largest(data["memory"])
        if abs(more) >= least_bytes
    ]
    peaks = [max(each.peak_memory_bytes) for each in (other, taken)]
    steps = [spread_text(each.step_time_s, each.spread_s) for each in (other, taken)]
    text = f"{steps[0]} a step instead of {steps[1]} ({data['relative']:+.1%}"
    text += f": {', '.join(parts)})" if parts else ")"
    text += f", peak {bytes_text(peaks[0])} instead of {bytes_text(peaks[1])}"
    text += f" ({', '.join(nbytes)})" if nbytes else ""
    if other.missing_bytes > 0:
        return f"{text}; it does not fit in {bytes_text(other.memory_bytes)}"
    if taken.missing_bytes > 0:
        return f"{text}; it fits, which this plan does not"
    if pinned:
        cost = taken.step_time_s - other.step_time_s
        return f"{text}; the pin costs {seconds_text(cost) + ' a step' if cost > 0 else 'nothing'}"
    return text


def _largest(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(parts.items(), key=lambda entry: -abs(entry[1]))


def _signed(value: float, text: Callable[[float], str]) -> str:
    return f"{'+' if value > 0 else '-'}{text(abs(value))}"
