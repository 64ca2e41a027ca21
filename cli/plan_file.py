"""Reading plans: a ``plan.json``, a folder that holds one, or what ``compile --json`` printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphpar.cli.output import program_folder
from graphpar.errors import GraphparError, near_match
from graphpar.plans import Plan
from graphpar.sharding import Decision, Sharding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphpar.passes.candidates import Operator, Problem, Value
    from graphpar.program import Program
    from graphpar.runtime.layout import Type


def read_record(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """The file that ``path`` names, and the JSON object in it."""
    file = Path(path)
    if file.is_dir() or not (file.suffix or file.exists()):
        file = program_folder(file) / "plan.json"
    if not file.is_file():
        others = [entry.name for entry in file.parent.glob("*.json")] if file.parent.is_dir() else []
        raise GraphparError(f"There is no plan {file}.{near_match(file.name, others)}")
    try:
        record = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise GraphparError(f"{file} is no JSON: {error}.") from None
    if not isinstance(record, dict):
        raise GraphparError(f"{file} holds no plan: it is a JSON {type(record).__name__}, not an object.")
    return file, record


def read_plan(file: Path, record: dict[str, Any]) -> Plan:
    """The plan in a record; whatever is wrong with it is a message that names the file."""
    inner = record.get("plan", record)
    try:
        return Plan.from_json(inner)
    except GraphparError as error:
        raise GraphparError(f"{file}: {error}") from None
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise GraphparError(f"{file} is no valid plan: {error}.") from None


def check_sharding(program: Program, plan: Plan) -> None:
    """Whether the sharding in a plan fits its mesh and is legal for ``program``, operator by operator.

    Raises:
        GraphparError: it is not; the message names the decision.
    """
    sharding = plan.sharding
    if dict(sharding.degrees) != plan.mesh.compute:
        raise GraphparError(
            f"The plan contradicts itself: its sharding is for {dict(sharding.degrees) or 'one device'}, but its mesh has "
            f"{plan.mesh.compute or 'no axis to cut tensors on'}."
        )
    if not sharding.degrees:
        return
    from graphpar.passes.candidates import build_problem  # imports torch; a report is read without it
    from graphpar.passes.pins import prepared

    problem = build_problem(prepared(program, sharding.variants, sharding.points), sharding.degrees)
    for operator in problem.operators:
        _check_decision(operator, sharding)
        if operator.kind == "parameter":
            _check_parameter(problem, operator, sharding)
    for value in problem.values:
        _check_transitions(problem, value, sharding)


def _named(operator: Operator) -> str:
    return f"{operator.scope}: {operator.node.name}" if operator.scope else operator.node.name


def _decision(operator: Operator, sharding: Sharding) -> Decision:
    decision = sharding.decisions.get(operator.scope, {}).get(operator.node.name)
    if decision is None:
        raise GraphparError(f"The plan's sharding has no decision for {_named(operator)}; compile the model again.")
    return decision


def _check_decision(operator: Operator, sharding: Sharding) -> None:
    decision = _decision(operator, sharding)
    legal = [Decision(choice.operands, choice.results, choice.rewrites) for choice in operator.choices]
    if decision not in legal:
        shown = "; ".join(dict.fromkeys(option.to_json() for option in legal[:4]))
        raise GraphparError(
            f"The plan's sharding says {decision.to_json()!r} for {_named(operator)}, which no rule allows. Allowed are "
            f"{shown}{', ...' if len(legal) > 4 else ''}."
        )


def _check_parameter(problem: Problem, operator: Operator, sharding: Sharding) -> None:
    decided = dict(zip(problem.axes, _decision(operator, sharding).results[0]))
    block = problem.program.blocks.get(operator.scope)
    for prefix in [f"{path}." for path in block.instances] if block else [""]:
        name = f"{prefix}{operator.node.target}"
        stored = sharding.parameters.get(name)
        if stored != decided:
            raise GraphparError(
                f"The plan contradicts itself: {name} is stored as {_text(stored or {})}, but {_named(operator)} is decided as "
                f"{_text(decided)}."
            )


def _check_transitions(problem: Problem, value: Value, sharding: Sharding) -> None:
    """A value can become what its users take; a parameter lies as it is used."""
    from graphpar.transitions import path

    made = _decision(value.maker, sharding).results[value.index]
    for edge in value.edges:
        decision = _decision(edge.user, sharding)
        wanted = decision.results[0] if edge.user.kind == "boundary" else decision.operands[edge.position]
        for axis, source, target in zip(problem.axes, made, wanted):
            if path(source, target, differentiable=value.differentiable) is None:
                raise GraphparError(
                    f"The plan's sharding takes {_named(value.maker)}, which is {source}@{axis}, as {target} in {_named(edge.user)}; "
                    "no transition leads there."
                )


def _text(spec: Mapping[str, Type]) -> str:
    return ", ".join(f"{kind}@{axis}" for axis, kind in spec.items()) or "nothing"
