"""What a program for training runs in evaluation, where the model is another program then: other operators on the same modules.

    Program.evaluated ──placements──► a rank's program ──split──► stages, each on the modules that it has in training

Parameters are stored as training stores them, stages hold what they hold in training, and the rest is searched: so nothing of it
is in the plan. What travels between stages is a matter of the mode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from graphpar.codegen.units import units_of
from graphpar.cost_models.sharding import costs_for
from graphpar.errors import GraphparError
from graphpar.ir.plan import Plan
from graphpar.ir.program import Program
from graphpar.ir.sharding import Sharding
from graphpar.ir.stage import Stage
from graphpar.operators.naming import free_name
from graphpar.passes.fsdp_units import with_units_of
from graphpar.passes.normalize.buffer_uses import written_buffers_of
from graphpar.passes.normalize.coupled import coupled_text, placed_axes
from graphpar.passes.normalize.functional import copied
from graphpar.passes.normalize.simplify import remove_dead_code
from graphpar.passes.sharding.costs import Workload
from graphpar.passes.sharding.search import SearchConstraints, search
from graphpar.passes.sharding.shard import Sharded, problem_of, sharded
from graphpar.passes.sharding.solution import sharding_of
from graphpar.passes.split import split_as
from graphpar.passes.stage_passes import STAGE_PASSES, Stages
from graphpar.runtime.axes import AXIS
from graphpar.runtime.layout import I, R, Shard
from graphpar.runtime.option_kinds import TRAIN
from graphpar.runtime.stages.dropout import KERNEL
from graphpar.text import is_below


def with_evaluated_stages(evaluated: Program, plan: Plan, trained: Stages, emitted: Stages) -> Stages:
    """Return the stages ``emitted`` for training with what they are in evaluation, and the loss denominators of both.

    Args:
        evaluated: the unsharded program of evaluation.
        trained: the stages for training when they were split.

    Raises:
        GraphparError: stages with the modules of those for training can't compute it.
    """
    if plan.microbatches > 1 and (reason := evaluated.unsplittable or coupled_text(evaluated.couplings)):
        raise GraphparError(
            f"in evaluation mode the batch can't be split into {plan.microbatches} microbatches: {reason}"
        )
    if plan.dropout == KERNEL and evaluated.random_calls:
        raise GraphparError("in evaluation mode the model draws random numbers, which dropout=kernel does not have")
    program, evaluated = _with_counts(emitted[0], evaluated)
    known = {entry.name for entry in program.inputs}
    program = replace(
        program, inputs=(*program.inputs, *(entry for entry in evaluated.inputs if entry.name not in known))
    )
    local = placed_as_stored(evaluated, plan).local
    stages = split_as(local, [_held(trained[0], stage) for stage in trained[1]])
    for step in STAGE_PASSES:
        if step.name == "own_units":
            local, stages = with_units_of(local, stages, trained[1], emitted[1])
        else:
            local, stages = step.run(local, stages, plan, {})
    _check_buffers(trained[0], trained[1], stages)
    if plan.fully_sharded:
        _check_units(program, plan, emitted[1], stages)
    program = replace(program, evaluated=local)
    return program, [replace(stage, evaluated=other) for stage, other in zip(emitted[1], stages)]


def placed_as_stored(program: Program, plan: Plan) -> Sharded:
    """Return what a rank computes of a program of the same parameters, as ``plan`` stores them: in evaluation, at another length, or to
    generate."""
    axes, stored = placed_axes(program, plan.mesh), plan.sharding.parameters
    given = Sharding(
        axes,
        parameters=stored,
        variants=plan.sharding.variants,
        exchange=plan.sharding.exchange,
        loss_chunk=plan.sharding.loss_chunk,
        expert_room=plan.sharding.expert_room,
    )
    problem = problem_of(program, given, plan.microbatch_size)
    if problem is None:
        return sharded(program, given, plan.microbatch_size, None)
    either = frozenset({R, I})  # of buffers, and of weights without gradients
    whole = {axis: frozenset({R} if AXIS[axis].replicas else {I}) for axis in axes}
    trained = program.parameters if program.mode == TRAIN else ()
    types = {
        name: {
            **(whole if name in trained else dict.fromkeys(axes, either)),
            **{
                axis: frozenset({kind}) if name in trained or isinstance(kind, Shard) else either
                for axis, kind in stored.get(name, {}).items()
                if axis in axes
            },
        }
        for name in (*program.parameters, *program.buffers, *program.constants)
    }
    workload = Workload(plan.microbatch_size, plan.microbatches)
    placed = sharding_of(
        search(problem, workload, costs_for(program, plan.mesh, plan.cluster), SearchConstraints(types))
    )
    given = replace(given, decisions=placed.decisions, parameters=stored if trained else placed.parameters)
    return sharded(program, given, plan.microbatch_size, problem)


def _held(program: Program, stage: Stage) -> frozenset[str]:
    """Return what a stage alone has: its parameters, the buffers that it writes, and blocks."""
    written = {uses.name for uses in written_buffers_of(program).uses}
    own = [str(node.target) for node in stage.graph.nodes if node.op in ("get_attr", "call_module")]
    calls = [str(node.target) for node in stage.graph.nodes if node.op == "call_module"]
    alone = {*program.parameters, *written}
    inside = {name for name in alone if any(is_below(name, path) for path in calls)}
    held = inside | {name for name in own if name in alone}
    return frozenset({*calls}.union(*map(program.tie_of, held)))


def _check_buffers(program: Program, trained: Sequence[Stage], evaluated: Sequence[Stage]) -> None:
    """Check that no stage reads a buffer that another one writes in training, and has the values of.

    Raises:
        GraphparError: one does.
    """
    written = {name for uses in written_buffers_of(program).uses for name in program.tie_of(uses.name)}
    for index, (before, stage) in enumerate(zip(trained, evaluated)):
        if elsewhere := sorted(written & _held(program, stage) - _held(program, before)):
            raise GraphparError(
                f"in evaluation mode stage {index} reads {elsewhere[0]}, which another stage writes in training; split the model "
                "elsewhere, or use fewer stages"
            )


def _check_units(program: Program, plan: Plan, trained: Sequence[Stage], evaluated: Sequence[Stage]) -> None:
    """Check that no stage reads from outside what a unit of sharded state gathers for its own forward alone.

    Raises:
        GraphparError: one does.
    """
    for before, stage in zip(trained, evaluated):
        units = [path for paths in units_of(program, before) for path in paths]
        for node in stage.graph.nodes:
            name = str(node.target)
            if node.op == "get_attr" and name in plan.fully_sharded and any(is_below(name, path) for path in units):
                raise GraphparError(
                    f"in evaluation mode {name} is read outside of its module, which gathers it for its own forward; use a lower ZeRO level"
                )


# ---- loss denominators -----------------------------------------------------------------------------------------


def _with_counts(program: Program, evaluated: Program) -> tuple[Program, Program]:
    """Return both with the same loss denominators: those of ``program``, and those that only evaluation has."""
    if evaluated.counts is None:
        return program, evaluated
    counts, names = fx.Graph(), list(program.count_names)
    results = _copied_into(counts, program.counts) if program.counts is not None else []
    known = {_key(result): name for result, name in reversed([*zip(results, names)])}
    taken = {entry.name for entry in program.inputs} | set(names)
    renamed: dict[str, str] = {}
    for result, name in zip(_copied_into(counts, evaluated.counts), evaluated.count_names):
        if (key := _key(result)) not in known:
            known[key] = free_name(name, taken)
            taken.add(known[key])
            names.append(known[key])
            results.append(result)
        renamed[name] = known[key]
    counts.output(tuple(results))
    remove_dead_code(counts)
    graph = copied(evaluated.graph)
    for node in graph.nodes:
        if node.op == "placeholder":
            node.target = renamed.get(str(node.target), node.target)
    if len(names) == len(program.count_names) and program.counts is not None:
        counts = program.counts
    program = replace(program, counts=counts, count_names=tuple(names))
    return program, replace(evaluated, graph=graph, counts=counts, count_names=tuple(names))


def _copied_into(counts: fx.Graph, source: fx.Graph) -> list[fx.Node]:
    """Copy the operators of ``source`` behind those of ``counts``, which has each input once, and return the results."""
    inputs = {str(node.target): node for node in counts.nodes if node.op == "placeholder"}
    env: dict[fx.Node, fx.Node] = {}
    with counts.inserting_after(list(inputs.values())[-1]) if inputs else contextlib.nullcontext():
        for node in source.nodes:
            if node.op == "placeholder" and str(node.target) not in inputs:
                env[node] = counts.node_copy(node)
    for node in source.nodes:
        if node.op == "placeholder":
            env[node] = env.get(node) or inputs[str(node.target)]
        elif node.op != "output":
            env[node] = counts.node_copy(node, env.__getitem__)
    results: Any = source.output_node().args[0]
    return [env[result] for result in results]


def _key(node: fx.Node) -> str:
    """Spell what a denominator is computed by."""
    if node.op in ("placeholder", "get_attr"):
        return str(node.target)
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda each: _Spelled(_key(each)))
    return f"{node.target}{args}{kwargs}"


class _Spelled(str):
    """A node in the text of another."""
