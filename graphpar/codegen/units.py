"""Print the functions that name the units of a stage: those of sharded state, and blocks that run again in the backward.

ZeRO-2 and 3                                 ZeRO-1                                       recomputation

for layer in stage.model.layers.values():    return [                                     for layer in stage.model.layers.values():
    fully_shard(layer, **options)                *stage.model.layers.values(),                recompute(layer)
fully_shard([stage.norm, stage.head], ...)       stage,
fully_shard(stage, **options)                ]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from graphpar.codegen.attributes import Tree, reference
from graphpar.codegen.classes import docstring
from graphpar.codegen.formatting import wrapped
from graphpar.codegen.stage_printer import loop_variable
from graphpar.ir.plan import Plan
from graphpar.ir.program import Program
from graphpar.ir.recomputation import Recomputation
from graphpar.ir.stage import Stage
from graphpar.operators.gradients import blocks_without_backward, is_read_in_backward
from graphpar.operators.parameter_casts import read_otherwise
from graphpar.runtime.option_kinds import RESHARD, share_of
from graphpar.runtime.options import gathers_again
from graphpar.text import is_below

SHARDED_UNITS, OPTIMIZER_UNITS, RECOMPUTED_UNITS = "fully_shard_units", "optimizer_units", "recompute_units"
"""The functions that are printed."""
RECOMPUTING = ("recompute", "recompute_selectively", "recompute_but")
"""The functions of ``recomputation.py``."""
POINTWISE, GATHERING = ("recompute_pointwise",), ("gather_again",)
"""The functions of ``pointwise.py`` and ``gathering.py``."""


# ---- which modules are units -----------------------------------------------------------------------------------


def units_of(program: Program, stage: Stage) -> list[tuple[str, ...]]:
    """Return the units of a stage beside its own, each with the paths of its modules, in the order of the forward.

    Modules stay in the stage's own unit where others read their parameters, which are gathered only while they run.
    """
    read = {str(node.target) for node in stage.graph.nodes if node.op == "get_attr"}

    def own(paths: tuple[str, ...]) -> bool:
        held = _held(program, paths)
        tied = {other for name in held for other in program.tie_of(name)}
        return bool(held) and tied <= held and not read & held

    among = stage.units if stage.units is not None else [(path,) for path in dict.fromkeys(_calls(stage))]
    return [paths for paths in among if own(paths)]


def _held(program: Program, paths: Sequence[str]) -> set[str]:
    return {name for name in program.parameters if any(is_below(name, path) for path in paths)}


def _calls(stage: Stage) -> list[str]:
    """Return the blocks that a stage calls, in its order."""
    return [str(node.target) for node in stage.graph.nodes if node.op == "call_module"]


def stored_in_shards(program: Program, stages: Sequence[Stage]) -> frozenset[str]:
    """Return the parameters of which a rank of dp_shard and cp stores a shard, under every name of a tie.

    Whole on every rank stay those without a dim to divide or without elements, in a unit of several dtypes those that are not of
    its largest, since a unit is gathered in one message, and the few that are read in another dtype than the others.
    """
    found, otherwise = set[str](), read_otherwise(program)
    for names in parameters_of_units(program, stages).values():
        sizes: dict[Any, int] = {}
        for info in map(program.parameters.__getitem__, names):
            sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
        largest = max(sizes, key=sizes.__getitem__)
        for name in names:
            info = program.parameters[name]
            if (
                info.shape
                and info.nbytes
                and info.dtype == largest
                and not otherwise.intersection(program.tie_of(name))
            ):
                found.update(program.tie_of(name))
    return frozenset(found)


def parameters_of_units(program: Program, stages: Sequence[Stage]) -> dict[tuple[str, ...], list[str]]:
    """Return the names of each unit's parameters, by the paths of its modules; none is the rest of all stages."""
    unit_of: dict[str, tuple[str, ...]] = {}
    for stage in stages:
        for paths in units_of(program, stage):
            unit_of |= dict.fromkeys(_held(program, paths), paths)
    found: dict[tuple[str, ...], list[str]] = {}
    for name in program.parameters:
        found.setdefault(unit_of.get(name, ()), []).append(name)
    return found


def gathered_in_turn(program: Program, stage: Stage) -> list[str]:
    """Return the first module of each unit of a stage that can be gathered ahead, in order: those whose modules its forward calls once, so
    that it is known what comes after them."""
    calls = _calls(stage)
    return [
        min(paths, key=calls.index)
        for paths in units_of(program, stage)
        if all(calls.count(path) == 1 for path in paths)
    ]


def kept_after_forward(program: Program, stage: Stage, plan: Plan) -> tuple[str, ...]:
    """Return the unit that is kept from its forward to its backward, which follows at once: the last one, if it is no block."""
    units = units_of(program, stage)
    kept = plan.zero == 3 and plan.reshard == RESHARD[0] and plan.mesh.pp == 1
    return units[-1] if kept and units and not _repeats(program, units[-1]) else ()


def unread_in_backward(program: Program, stage: Stage) -> list[tuple[str, ...]]:
    """Return the units, besides blocks, whose backward does not read their parameters: an embedding."""
    found = []
    for paths in units_of(program, stage):
        calls = [node for node in stage.graph.nodes if node.op == "call_module" and node.target in paths]
        held = [
            node
            for call in calls
            for node in program.block_of(call).graph.nodes
            if node.op == "get_attr" and f"{call.target}.{node.target}" in program.parameters
        ]
        if not _repeats(program, paths) and not any(map(is_read_in_backward, held)):
            found.append(paths)
    return found


def units_without_backward(program: Program, stage: Stage) -> set[str]:
    """Return the paths of what a stage calls and no gradient flows through."""
    sent = {boundary.name for boundary in stage.receives if boundary.requires_grad}
    given = [node for node in stage.graph.nodes if node.op == "placeholder" and node.target in sent]
    return blocks_without_backward(program.with_graph(stage.graph), given)


def _repeats(program: Program, paths: Sequence[str]) -> bool:
    return any(
        len(block.instances) > 1 and path in block.instances for block in program.blocks.values() for path in paths
    )


# ---- sharded state ---------------------------------------------------------------------------------------------


def units_function(tree: Tree, program: Program, stage: Stage, plan: Plan) -> str:
    """Print the function; ``tree`` is the stage's."""
    units, order = units_of(program, stage), gathered_in_turn(program, stage)
    last, unread = kept_after_forward(program, stage, plan), unread_in_backward(program, stage)
    gathered = gathers_again(plan.mesh.pp, plan.zero, plan.reshard)
    kept = plan.reshard == "never" or (plan.reshard == "default" and plan.mesh.pp > 1)
    when = "its forward and again for its backward"
    if kept or plan.zero == 2:
        when = "its forward, and kept until its backward is done"
    if (kept and plan.mesh.pp > 1) or plan.zero == 2:
        when = "the first microbatch, and kept until the last one's backward is done"
    if isinstance(plan.reshard, int):
        when += f", and shared by {plan.reshard} ranks in between"
    if last:
        when += ", which for the last one follows at once"
    what = "Each block is a unit, the rest of the stage another" if units else "The stage is one unit"
    if any(len(paths) > 1 or not _repeats(program, paths) for paths in units):
        what = "Each module here is a unit, or several, the rest of the stage another"
    summary = f"ZeRO-{plan.zero} over {plan.mesh.state_text} (FSDP2). {what}; a unit is gathered for {when}."
    if plan.prefetch == "none":
        summary += " No unit is gathered before it is needed."
    elif plan.prefetch is not None:
        point = "before a unit computes" if plan.prefetch == "pre" else "when a unit has computed"
        many = "is" if plan.prefetch_distance == 1 else f"{plan.prefetch_distance} are"
        summary += f" In the backward the next {many} gathered {point}."
    returned = "list[nn.Module]" if plan.prefetch == "post" else "None"
    lines = [f"def {SHARDED_UNITS}(stage: nn.Module, **options: Any) -> {returned}:", *docstring(summary)]
    for alone, group in itertools.groupby(units, lambda paths: len(paths) == 1 and paths != last):
        if alone:
            lines += _for_each(tree, [path for paths in group for path in paths], "fully_shard({}, **options)".format)
            continue
        for paths in group:
            modules = ", ".join(_of_stage(reference(tree, path)) for path in paths)
            options = '{**options, "reshard_after_forward": False}' if paths == last else "options"
            lines += wrapped(f"fully_shard({modules if len(paths) == 1 else f'[{modules}]'}, **{options})", "    ")
    lines += ["    fully_shard(stage, **options)"]
    if gathered and unread:
        lines += ["    # Their backward does not read them."]
        lines += [f"    {_of_stage(reference(tree, paths[0]))}.set_unshard_in_backward(False)" for paths in unread]
    if plan.prefetch is not None:
        once = units_without_backward(program, stage)
        again = [path for path in order if any(path in paths and not once.issuperset(paths) for paths in units)]
        others = [paths[0] for paths in units if not set(order).intersection(paths)]
        lines += _gathered_ahead(tree, order, again, others, plan)
    return "\n".join(lines) + "\n"


def _gathered_ahead(
    tree: Tree, order: Sequence[str], again: Sequence[str], others: Sequence[str], plan: Plan
) -> list[str]:
    """The statements that set FSDP2's lists.

    An empty list for the backward means FSDP2's own order, so a unit that is to gather no other names itself, which is gathered.

    Args:
        again: those of ``order`` that have a backward.
        others: units of several uses.
    """
    lines = wrapped(f"units = [{', '.join(['stage', *_elements(tree, order)])}]", "    ")
    lines = ["    # In the order of the forward.", *lines]
    reverse = "units[:0:-1]"
    if len(again) < len(order):
        lines += [
            "    # Those that have a backward.",
            *wrapped(f"trained = [{', '.join(_elements(tree, again))}]", "    "),
        ]
        reverse = "trained[::-1]"
    after, itself = f"i + 1 : i + {1 + plan.prefetch_distance}", "set_modules_to_backward_prefetch([{unit}])"
    if plan.prefetch == "pre":
        lines += [
            "    for i, unit in enumerate(units):",
            f"        unit.set_modules_to_forward_prefetch(units[{after}])",
            f"    backward = [stage, *{reverse}]",
            "    for i, unit in enumerate(backward):",
            f"        unit.set_modules_to_backward_prefetch(backward[{after}] or [unit])",
        ]
    else:
        lines += ["    for unit in units:", f"        unit.{itself.format(unit='unit')}"]
    lines += [
        f"    {text}.{itself.format(unit=text)}" for text in (_of_stage(reference(tree, path)) for path in others)
    ]
    return [*lines, f"    return [stage, *{reverse}]"] if plan.prefetch == "post" else lines


def _elements(tree: Tree, order: Sequence[str]) -> Iterator[str]:
    """Yield the units in this order as elements of a list, all children of a container as one."""
    for _, group in itertools.groupby(order, lambda path: path.rpartition(".")[0]):
        for text, loop in _modules_of(tree, list(group)):
            yield f"*{text}" if loop else text


def optimizer_units_function(tree: Tree, units: Sequence[str], over: str) -> str:
    """Print the function that returns the units of ZeRO-1 ``over`` axes; ``tree`` is the stage's."""
    what = "Each block is a unit, the rest of the stage another" if units else "The stage is one unit"
    how = "its gradients are summed together, and it waits for its new values when it is entered"
    summary = f"ZeRO-1 over {over}. {what}: {how}."
    lines = [f"def {OPTIMIZER_UNITS}(stage: nn.Module) -> list[nn.Module]:", *docstring(summary), "    return ["]
    lines += [f"        *{text}," if loop else f"        {text}," for text, loop in _modules_of(tree, units)]
    return "\n".join([*lines, "        stage,", "    ]"]) + "\n"


# ---- recomputation ---------------------------------------------------------------------------------------------

_KEPT = {
    "selective": "what enters it and what recompute_selectively names (recomputation.py)",
    "full": "only what enters it",
}
_BY_HOOKS = {
    "pointwise": "computes the results of pointwise operators and norms again where its backward reads them",
    "gathers": "keeps the shards of what it gathers, and gathers again in the backward",
    "gathers+pointwise": "keeps the shards of what it gathers, and in the backward gathers again, and computes the results of pointwise "
    "operators and norms again",
}
_BUDGET = "what enters it and the listed results, in all at most {:.0%} of what it would keep otherwise"


def recomputed_in(stages: Sequence[Stage], recomputed: Mapping[str, Recomputation]) -> dict[str, Recomputation]:
    """Return those of ``recomputed`` that ``stages`` run, in their order."""
    calls = dict.fromkeys(path for stage in stages for path in _calls(stage))
    return {path: recomputed[path] for path in calls if path in recomputed}


def recomputing_file(how: Recomputation) -> str:
    """Return the module of :mod:`graphpar.emitted` that recomputes a block."""
    return "gathering" if how.gathers else "pointwise" if how.pointwise else "recomputation"


def recomputation_function(tree: Tree, recomputed: Mapping[str, Recomputation]) -> str:
    """Print the function; ``tree`` is the stage's, ``recomputed`` its blocks by path."""
    used = dict.fromkeys(how.kind for how in recomputed.values())
    kept = [
        f"a block keeps {_KEPT.get(kind) or _BUDGET.format(share_of(kind))}" for kind in used if kind not in _BY_HOOKS
    ]
    parts = [f"{'; or '.join(kept)}, and runs its forward again in the backward"] if kept else []
    parts += [f"a block {done}" for kind, done in _BY_HOOKS.items() if kind in used]
    what = f"{'; or '.join(parts)}."
    lines = [f"def {RECOMPUTED_UNITS}(stage: nn.Module) -> None:", *docstring(f"Recomputation: {what}")]
    for how, paths in _runs(recomputed):
        lines += _for_each(tree, paths, partial(_call, how))
    return "\n".join(lines) + "\n"


def _call(how: Recomputation, module: str) -> str:
    names = ", ".join(f'"{name}"' for name in how.writes)
    written = f", writes=({names}{',' * (len(how.writes) == 1)})" if names else ""
    if how.gathers:
        return f"gather_again({module}{', pointwise=True' if how.pointwise else ''})"
    if how.pointwise:
        return f"recompute_pointwise({module})"
    if how.kind == "selective":
        return f"recompute_selectively({module}{written})"
    if not how.calls:
        return f"recompute({module}{written})"
    kept = ", ".join(f'"{name}": {numbers}' for name, numbers in how.calls.items())
    return f"recompute_but({module}, {{{kept}}}{written})"


def _runs(recomputed: Mapping[str, Recomputation]) -> Iterator[tuple[Recomputation, list[str]]]:
    """Yield blocks that are recomputed alike and follow each other."""

    def alike(path: str) -> Any:
        how = recomputed[path]
        return how.kind, repr(how.calls), how.writes

    for _, run in itertools.groupby(recomputed, key=alike):
        paths = list(run)
        yield recomputed[paths[0]], paths


# ---- modules ---------------------------------------------------------------------------------------------------

_TAKEN = ("stage", "options", "units", "unit", "trained", "backward", "i", "nn", "torch")
"""Names in the functions that loop over modules."""


def _modules_of(tree: Tree, units: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield how a function refers to modules of a stage: one, or children of a container that follow each other, then with the
    variable of a loop over them.
    """
    by_parent: dict[str, list[str]] = {}
    for path in units:
        parent, _, name = path.rpartition(".")
        by_parent.setdefault(parent, []).append(name)
    for parent, names in by_parent.items():
        container = tree.at(parent)
        assert container is not None
        children = list(container.children)
        first = children.index(names[0])
        alike = names == children or (len(names) > 2 and children[first : first + len(names)] == names)
        if len(names) > 1 and container.keyed() and alike:
            text = f"{_of_stage(reference(tree, parent)) if parent else 'stage'}.values()"
            if names != children:
                after = first + len(names)
                text = f"list({text})[{first or ''}:{after if after < len(children) else ''}]"
            name = loop_variable(parent)
            yield text, "block" if name in _TAKEN else name
        else:
            for name in names:
                yield _of_stage(reference(tree, f"{parent}.{name}" if parent else name)), None


def _of_stage(text: str) -> str:
    """A reference from outside of the class."""
    return text.replace("self", "stage", 1) if not text.startswith("getattr(") else text.replace("(self", "(stage")


def _for_each(tree: Tree, units: Sequence[str], call: Callable[[str], str]) -> Iterator[str]:
    """Yield the lines that call a function for each module."""
    for text, variable in _modules_of(tree, units):
        if variable:
            yield f"    for {variable} in {text}:"
        yield from wrapped(call(variable or text), "        " if variable else "    ")
