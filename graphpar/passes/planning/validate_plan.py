"""``validate_plan``: check a saved or edited plan against a program.

plan.json ──choose, with every decision pinned──► the same plan, or an error that says where they differ
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from graphpar.errors import GraphparError, near_match
from graphpar.ir.plan import Plan
from graphpar.ir.program import Program
from graphpar.ir.sharding import Decision, Sharding
from graphpar.operators.transitions import path
from graphpar.passes.kernel_dropout import with_dropout
from graphpar.passes.normalize.coupled import placed_axes
from graphpar.passes.planning.choose import CUSTOM, choose
from graphpar.passes.planning.constraints import PlanConstraints, check_pipelined, exported_precision
from graphpar.passes.planning.planned import Planned
from graphpar.passes.sharding.exchange import exchanged_parameters
from graphpar.passes.sharding.keys import by_node, keys_of
from graphpar.passes.sharding.problem import Operator, Problem, Value
from graphpar.passes.sharding.shard import Sharded, problem_of, sharded
from graphpar.passes.split import split
from graphpar.runtime.axes import AXIS
from graphpar.runtime.layout import Type
from graphpar.runtime.options import Decisions, check_decisions, options_of
from graphpar.runtime.schedule_records import get_schedule
from graphpar.runtime.stages.compiled import obstacle
from graphpar.text import compressed, listed

_NAMED = 6


def validate_plan(program: Program, given: Plan) -> Planned:
    """Return the plan ``given``, with what a rank runs and what was found before, once it is proven to be legal and consistent.

    Its sharding is checked against the rules, not searched again: the pins it was made with are not in the plan.

    Raises:
        GraphparError: the plan is not legal for ``program``, or contradicts itself.
    """
    check_alone(given)
    program = with_dropout(program, given.dropout)
    check_model(program, given)
    custom = None
    if given.actions is not None and given.schedule == CUSTOM:
        custom = "\n".join(",".join(row) for row in given.actions)
    decisions = {name: getattr(given, name) for name in options_of(Decisions)}
    pins = PlanConstraints(
        **decisions
        | {
            "schedule": None if custom else given.schedule,
            "dropout": None,  # the program's
            "prefetch_distance": given.prefetch_distance or None,
            "split_points": given.split_points,
            "table": custom,
            "cluster": given.cluster,
            "shard_plan": {name: f"S({dim})@dp_shard" for name, dim in given.fully_sharded.items() if dim},
        }
    )
    axes = placed_axes(program, given.mesh)
    if dict(given.sharding.degrees) != axes:
        raise GraphparError(
            f"The plan contradicts itself, or the model has changed: its sharding is for {dict(given.sharding.degrees)}, but its "
            f"operators are placed on {axes or 'no axis'}."
        )
    plan = choose(program, given.mesh, replace(pins, sharded=_checked(program, given)))
    if plan != given:
        ours, theirs = plan.to_json(), given.to_json()
        place, found, follows = _first_difference(theirs, ours)
        raise GraphparError(
            f"The plan contradicts itself, or the model has changed: {place} is {found}, but its other decisions give {follows}."
        )
    if isinstance(given, Planned):
        return replace(plan, predicted=given.predicted, found=given.found, alone=given.alone)
    return plan


def _first_difference(found: Any, follows: Any, place: str = "") -> tuple[str, Any, Any]:
    """Return where two values of JSON first differ, ``parameters.wte.weight.dp_shard``, and what is there in each."""
    if isinstance(found, Mapping) and isinstance(follows, Mapping):
        pairs = [(f"{place}.{key}", found.get(key), follows.get(key)) for key in dict.fromkeys((*follows, *found))]
    elif isinstance(found, list) and isinstance(follows, list):
        pairs = [(f"{place}[{i}]", *pair) for i, pair in enumerate(itertools.zip_longest(found, follows))]
    else:
        return place.removeprefix("."), found, follows
    where, one, other = next(each for each in pairs if each[1] != each[2])
    return _first_difference(one, other, where)


def check_compiled(plan: Plan) -> None:
    """Check that ``torch.compile`` can compile the blocks of ``plan``'s program.

    Raises:
        GraphparError: its schedule, its dropout, or what it offloads does not go with compiled blocks.
    """
    reason = obstacle(plan.schedule, (cell for row in plan.actions or () for cell in row), plan.dropout, plan.offload)
    if reason is not None:
        raise GraphparError(f"compile: {reason}.")


def check_alone(plan: Plan) -> None:
    """Check a plan as far as that needs no program.

    Raises:
        GraphparError: it asks for something unsupported, or contradicts itself.
    """
    if plan.compile:
        check_compiled(plan)
    check_decisions(plan, plan.mesh, plan.mode)
    if plan.cluster is not None and plan.cluster.size != plan.mesh.size:
        raise GraphparError(
            f"The plan contradicts itself: its mesh has {plan.mesh.size} devices, but its cluster {plan.cluster} has "
            f"{plan.cluster.size}."
        )
    placed = {axis: degree for axis, degree in plan.sharding.degrees.items() if not AXIS[axis].replicas}
    if placed != plan.mesh.compute:
        raise GraphparError(
            f"The plan contradicts itself: its sharding is for {dict(plan.sharding.degrees) or 'one device'}, but its mesh has "
            f"{plan.mesh.compute or 'no axis to shard tensors on'}."
        )
    if plan.actions is None:
        check_pipelined(plan.schedule, plan.mesh)
        if plan.mesh.pp > 1 and (get_schedule(plan.schedule).lead is not None or plan.zero >= 2):
            what = plan.schedule if plan.zero < 2 else f"{plan.schedule} with sharded state"
            raise GraphparError(f"The plan's actions is None, but {what} runs as a table of them. Plan again.")


def check_model(program: Program, plan: Plan) -> None:
    """Check that the plan is for this program, by the names of its modules.

    Raises:
        GraphparError: it is for another one; the message says which modules only one of them has.
    """
    precision = exported_precision(program)
    if plan.precision != precision:
        raise GraphparError(
            f"The plan is for {plan.precision.text}, but the program was exported in {precision.text}; export it as the plan says."
        )
    if plan.seq != (exported := None if program.lengths is None else program.lengths.seq):
        raise GraphparError(
            f"The plan is for seq={plan.seq}, but the program was exported for {exported}; export it as the plan says."
        )
    if plan.mode != program.mode:
        raise GraphparError(f"The plan is for mode {plan.mode!r}, but the program was traced for {program.mode!r}.")
    planned = {name for stage in plan.stages for name in stage.modules}
    there = {name for stage in split(program, []) for name in stage.modules}
    if plan.model == program.name and planned == there:
        _check_parameters(program, plan)
        return
    differences = [
        f"{what} {_names(names, planned & there)}"
        for what, names in (("only the plan has", planned - there), ("only the program has", there - planned))
        if names
    ]
    names = f"is for {plan.model!r}, but the program is {program.name!r}"
    if plan.model == program.name:
        names = f"is for another {plan.model!r}"
    blocks = (
        ", ".join(f"{block.name} x {len(block.instances)}" for block in program.blocks.values()) or "no repeated blocks"
    )
    raise GraphparError(
        f"The plan {names}: {'; '.join(differences) or 'their modules have the same names'}. The program has "
        f"{len(program.parameters)} parameters and {blocks}."
    )


def _check_parameters(program: Program, plan: Plan) -> None:
    known = {
        **program.parameters,
        **program.buffers,
        **program.constants,
        **dict.fromkeys(name for tie in program.ties for name in tie),
    }
    unknown = [name for name in plan.sharding.parameters if name not in known]
    if unknown:
        raise GraphparError(
            f"The plan contradicts itself, or the model has changed: parameters has {listed(unknown, _NAMED)}, which the model "
            f"does not have.{near_match(unknown[0], known)}"
        )


def _names(names: Collection[str], others: Collection[str]) -> str:
    """Return ``names`` abbreviated with patterns that match none of ``others``."""
    return listed(compressed([sorted(names, key=_natural), sorted(others)])[0], _NAMED)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts ``layers.9`` before ``layers.10``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _checked(program: Program, plan: Plan) -> Sharded:
    """Check each decision of the plan's sharding, and return the program of a rank that follows.

    Raises:
        GraphparError: a decision is not legal; the message names it.
    """
    sharding, rows = plan.sharding, plan.microbatch_size
    if isinstance(plan, Planned) and plan.sharded.serves(program, sharding, rows):
        return plan.sharded
    problem = problem_of(program, sharding, rows)
    if problem is not None:
        _Checker(problem, sharding).check()
    return sharded(program, sharding, rows, problem)


class _Checker:
    """Checks the decisions of a plan against the sharding problem that they solve."""

    def __init__(self, problem: Problem, sharding: Sharding) -> None:
        self.problem, self.sharding = problem, sharding
        self.decisions = by_node(problem.program, sharding)
        self.experts = exchanged_parameters(problem.program) if sharding.exchange else {}
        scopes = dict.fromkeys(operator.scope for operator in problem.operators)
        self.keys = {node: key for scope in scopes for node, key in keys_of(problem.program, scope).items()}

    def check(self) -> None:
        """Check every operator, stored parameter and transition."""
        for operator in self.problem.operators:
            self._operator(operator)
            if operator.kind == "parameter":
                self._parameter(operator)
        for value in self.problem.values:
            self._transitions(value)

    def _named(self, operator: Operator) -> str:
        key = self.keys[operator.node]
        return f"{operator.scope}: {key}" if operator.scope else key

    def _decision(self, operator: Operator) -> Decision:
        decision = self.decisions.get(operator.node)
        if decision is None:
            raise GraphparError(
                f"The plan's sharding has no decision for {self._named(operator)}; compile the model again."
            )
        return decision

    def _operator(self, operator: Operator) -> None:
        decision = self._decision(operator)
        legal = [Decision(choice.operands, choice.results, choice.rewrites) for choice in operator.choices]
        if decision not in legal:
            shown = "; ".join(dict.fromkeys(option.to_json() for option in legal[:4]))
            raise GraphparError(
                f"The plan's sharding says {decision.to_json()!r} for {self._named(operator)}, which no rule allows. Allowed are "
                f"{shown}{', ...' if len(legal) > 4 else ''}."
            )

    def _parameter(self, operator: Operator) -> None:
        decided = dict(zip(self.problem.axes, self._decision(operator).results[0]))
        for prefix in self.problem.program.prefixes(operator.scope):
            name = f"{prefix}{operator.node.target}"
            stored, follows = self.sharding.parameters.get(name), {**self.experts.get(name, {}), **decided}
            if stored != follows:
                raise GraphparError(
                    f"The plan contradicts itself: {name} is stored as {_text(stored or {})}, but {self._named(operator)} is decided "
                    f"as {_text(follows)}."
                )

    def _transitions(self, value: Value) -> None:
        """Check that a value can be redistributed to what each of its users takes."""
        made = self._decision(value.maker).results[value.index]
        for edge in value.edges:
            decision = self._decision(edge.user)
            required = decision.results[0] if edge.user.kind == "boundary" else decision.operands[edge.position]
            for axis, source, target in zip(self.problem.axes, made, required):
                if path(source, target, differentiable=value.differentiable) is None:
                    raise GraphparError(
                        f"The plan's sharding takes {self._named(value.maker)}, which is {source}@{axis}, as {target} in "
                        f"{self._named(edge.user)}; no redistribution leads there."
                    )


def _text(spec: Mapping[str, Type]) -> str:
    return ", ".join(f"{kind}@{axis}" for axis, kind in spec.items()) or "nothing"
