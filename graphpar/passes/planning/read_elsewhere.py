"""Parameters are stored in types in which all programs that have them can read them: generation, evaluation, and those of other lengths.

    problem of training ──types of parameters──► problem of another program ──types that no reader takes are dropped──► pins

A table of positions that is sliced, ``positions[:length]``, is the example: each type will do where the slice is the whole table, but a
window of positions is the whole on each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from graphpar.annotations.values import WHOLE, Choice, Spec
from graphpar.errors import GraphparError
from graphpar.ir.program import Program
from graphpar.ir.sharding import Sharding
from graphpar.passes.lengths import tried
from graphpar.passes.rank_passes import prepared
from graphpar.passes.sharding.problem import Operator, Problem, build_problem
from graphpar.passes.sharding.search import SearchConstraints, possible
from graphpar.runtime.axes import AXIS, Divides
from graphpar.runtime.option_kinds import GENERATE


def with_read_elsewhere(program: Program, problem: Problem, rows: int, pins: Mapping[str, Spec]) -> Mapping[str, Spec]:
    """Return ``pins`` of parameters, and for others the types in which all programs can read them, where that leaves some out.

    Args:
        problem: that of ``program`` in microbatches of ``rows``.

    Raises:
        GraphparError: there is no way to generate on these axes.
    """
    found = {name: dict(spec) for name, spec in pins.items()}
    stored = _types(problem, {each: range(len(each.choices)) for each in problem.operators})
    for other, size, axes in _others(program, rows, problem.degrees):
        offered = {name: {axis: spec[axis] for axis in axes} for name, spec in stored.items()}
        try:
            read = build_problem(prepared(other, Sharding(axes), size), axes, offered)
            types = _types(read, possible(read, SearchConstraints(offered)))
        except GraphparError as error:
            if other.mode == GENERATE:
                raise GraphparError(
                    f"{program.name} can't generate on {', '.join(f'{axis}={degree}' for axis, degree in axes.items())}: {error}"
                ) from error
            continue  # evaluation may be refused alone, and so may lengths
        for name in types.keys() & stored.keys():
            for axis, kinds in types[name].items():
                if axis not in pins.get(name, {}) and not stored[name][axis] <= kinds:
                    own = found.setdefault(name, {})
                    own[axis] = own.get(axis, stored[name][axis]) & kinds
    return found


def _others(program: Program, rows: int, degrees: Mapping[str, int]) -> Iterator[tuple[Program, int, dict[str, int]]]:
    """Yield the other programs with the parameters of ``program``, the rows of their microbatches, and their axes."""
    if program.generating is not None:
        kept = (Divides.WEIGHTS, Divides.EXPERTS)
        axes = {axis: degree for axis, degree in degrees.items() if AXIS[axis].divides in kept}
        if axes:
            yield program.generating(program.batch), 1, axes
    if program.evaluated is not None:
        yield program.evaluated, rows, dict(degrees)
    if program.lengths is not None and program.at_length is not None:
        listed, (least, most) = program.lengths.listed, program.lengths.ends
        lengths: Sequence[int] = listed[:-1] if listed else tried(least, most, 1)[1:]
        for length in lengths:
            try:
                yield program.at_length(length), rows, dict(degrees)
            except GraphparError:
                continue


def _types(problem: Problem, choices: Mapping[Operator, Sequence[int]]) -> dict[str, dict[str, Choice]]:
    """Return the types of each parameter by axis, where it is under one name what it is under all and in all instances of a block."""
    found: dict[str, dict[str, Choice]] = {}
    for operator in problem.operators:
        if operator.kind != "parameter":
            continue
        kinds = [operator.choices[i].results[0] for i in choices[operator]]
        spec = {axis: frozenset(types[place] for types in kinds) for place, axis in enumerate(problem.axes)}
        spec = {axis: types | WHOLE if types & WHOLE else types for axis, types in spec.items()}
        for prefix in problem.program.prefixes(operator.scope):
            for name in problem.program.tie_of(f"{prefix}{operator.node.target}"):
                known = found.setdefault(name, dict(spec))
                known.update({axis: known[axis] & types for axis, types in spec.items()})
    return found
