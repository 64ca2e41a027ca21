"""``--explain PATTERN``: for matching modules and values, the stage that has them, why, and what is sent."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from graphpar.cli.explain_decisions import ALL
from graphpar.errors import GraphparError, near_match
from graphpar.ir.plan import Plan
from graphpar.ir.program import Program, concrete_shape
from graphpar.ir.stage import Stage
from graphpar.passes.planning.next_best import DECISIONS
from graphpar.report.data import stage_parameters
from graphpar.text import indices_text


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
    wanted = re.compile(".*".join(parts))
    lines = list(decisions)
    for name, text in about:
        if wanted.fullmatch(name):
            lines += [f" {name}: {text}", *(f"     {line}" for line in (more(name) if more else ()))]
    if not lines:
        anywhere = pattern if "*" in pattern else f"**.{pattern}"
        hint = near_match(pattern, [*dict(about), *DECISIONS, ALL]) or near_match(
            anywhere, {f"**.{name.rpartition('.')[2]}" for name, _ in about}
        )
        raise GraphparError(f"--explain {pattern!r} matches no module, parameter, value or decision.{hint}")
    return lines


def _modules(program: Program, plan: Plan, stages: Sequence[Stage]) -> dict[str, str]:
    about: dict[str, str] = {}
    word = "rank" if plan.mesh.size == plan.mesh.pp else "pp group"
    for path in filter(None, program.module_classes):
        found = [stage.index for stage in stages if any(_related(path, module) for module in stage.modules)]
        ranks = ", ".join(str(rank) for rank in dict.fromkeys(plan.stages[index].rank for index in found))
        if len(found) == 1:
            about[path] = f"a module on stage {found[0]} ({word} {ranks}), {_why(plan, found[0])}"
        elif found:
            about[path] = f"a module on stages {indices_text(found)} ({word}s {ranks})"
        else:
            about[path] = "a module without used parameters; its operators are on the stages of their inputs"
    return about


def _related(one: str, other: str) -> bool:
    """Tell whether one module contains the other, or they are the same."""
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


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
                    f"a value computed again on stages {text}: it depends on no parameter, so it need not be sent"
                )
    return about
