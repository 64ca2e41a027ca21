"""Print the function that names the units of a stage whose state is sharded over dp_shard and cp.

ZeRO-2 and 3                                         ZeRO-1

for layer in stage.model.layers.values():            return [
    fully_shard(layer, **options)                        *stage.model.layers.values(),
fully_shard(stage, **options)                            stage,
                                                     ]
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphpar.codegen.attributes import Tree, reference
from graphpar.codegen.classes import docstring
from graphpar.codegen.layout import wrapped
from graphpar.codegen.stage_printer import loop_variable
from graphpar.ir.plan import Plan
from graphpar.ir.program import Program
from graphpar.ir.stage import Stage

NAME = "fully_shard_units"
OPTIMIZER_UNITS = "optimizer_units"


def units_of(program: Program, stage: Stage, blocks: Mapping[str, str]) -> list[str]:
    """Return the block instances that are units of their own.

    A block stays in the stage's own unit where others read its parameters, which are gathered only while it runs.

    Args:
        blocks: the stage's block instances, path -> class.
    """
    read = {str(node.target) for node in stage.graph.nodes if node.op == "get_attr"}

    def own(path: str) -> bool:
        held = [name for name in program.parameters if name.startswith(f"{path}.")]
        tied = {other for name in held for other in program.tie_of(name)}
        return bool(held) and tied <= set(held) and not read & set(held)

    return [path for path in blocks if own(path)]


def stored_in_shards(program: Program, stages: Sequence[Stage]) -> frozenset[str]:
    """Return the parameters of which a rank of dp_shard and cp stores a shard, under every name of a tie.

    Whole on every rank stay those without a dim to divide or without elements, and in a unit of several dtypes those that are not of
    its largest, since a unit is gathered in one message.
    """
    found: set[str] = set()
    for names in parameters_of_units(program, stages).values():
        sizes: dict[Any, int] = {}
        for info in map(program.parameters.__getitem__, names):
            sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
        largest = max(sizes, key=sizes.__getitem__)
        for name in names:
            info = program.parameters[name]
            if info.shape and info.nbytes and info.dtype == largest:
                found.update(program.tie_of(name))
    return frozenset(found)


def parameters_of_units(program: Program, stages: Sequence[Stage]) -> dict[str, list[str]]:
    """Return the names of each unit's parameters, by the path of its module; "" is the rest of all stages."""
    unit_of: dict[str, str] = {}
    for stage in stages:
        blocks = {str(node.target): str(node.meta["block"]) for node in stage.graph.nodes if node.op == "call_module"}
        for path in units_of(program, stage, blocks):
            unit_of |= {name: path for name in program.parameters if name.startswith(f"{path}.")}
    found: dict[str, list[str]] = {}
    for name in program.parameters:
        found.setdefault(unit_of.get(name, ""), []).append(name)
    return found


def order_of(stage: Stage, units: Sequence[str]) -> list[str]:
    """Return the units that the stage's forward calls once, in its order: those of which it is known what comes after them."""
    calls = [str(node.target) for node in stage.graph.nodes if node.op == "call_module"]
    return [path for path in calls if path in units and calls.count(path) == 1]


def gathered_in_turn(program: Program, stage: Stage) -> list[str]:
    """Return the units of a stage that can be gathered ahead, see :func:`order_of`."""
    blocks = {str(node.target): str(node.meta["block"]) for node in stage.graph.nodes if node.op == "call_module"}
    return order_of(stage, units_of(program, stage, blocks))


def units_function(
    tree: Tree, units: Sequence[str], plan: Plan, order: Sequence[str] = (), once: Collection[str] = ()
) -> str:
    """Print the function; ``tree`` is the stage's.

    Args:
        order: of the units that are gathered ahead.
        once: units without a backward.
    """
    kept = plan.reshard == "never" or (plan.reshard == "default" and plan.mesh.pp > 1)
    when = "its forward and again for its backward"
    if kept or plan.zero == 2:
        when = "its forward, and kept until its backward is done"
    if (kept and plan.mesh.pp > 1) or plan.zero == 2:
        when = "the first microbatch, and kept until the last one's backward is done"
    if isinstance(plan.reshard, int):
        when += f", and shared by {plan.reshard} ranks in between"
    what = "Each block is a unit, the rest of the stage another" if units else "The stage is one unit"
    summary = f"ZeRO-{plan.zero} over {plan.mesh.state_text} (FSDP2). {what}; a unit is gathered for {when}."
    ahead = None if plan.prefetch is None else Prefetch(plan.prefetch, plan.prefetch_distance)
    returned = "list[nn.Module]" if plan.prefetch == "post" else "None"
    if ahead is not None:
        summary += f" {ahead.described()}"
    lines = [f"def {NAME}(stage: nn.Module, **options: Any) -> {returned}:", *docstring(summary)]
    for text, variable in modules_of(tree, units):
        if variable:
            lines += [f"    for {variable} in {text}:", f"        fully_shard({variable}, **options)"]
        else:
            lines.append(f"    fully_shard({text}, **options)")
    lines.append("    fully_shard(stage, **options)")
    if ahead is not None:
        again = [path for path in order if path not in once]
        lines += _gathered_ahead(tree, order, again, [path for path in units if path not in order], ahead)
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Prefetch:
    """When units are gathered for their backward (of :data:`PREFETCH`), and how many ahead."""

    when: str
    distance: int

    def described(self) -> str:
        """Say it in a sentence."""
        if self.when == "none":
            return "No unit is gathered before it is needed."
        point = "before a unit computes" if self.when == "pre" else "when a unit has computed"
        return f"In the backward the next {'is' if self.distance == 1 else f'{self.distance} are'} gathered {point}."


def _gathered_ahead(
    tree: Tree, order: Sequence[str], again: Sequence[str], others: Sequence[str], ahead: Prefetch
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
    after, itself = f"i + 1 : i + {1 + ahead.distance}", "set_modules_to_backward_prefetch([{unit}])"
    if ahead.when == "pre":
        lines += [
            "    for i, unit in enumerate(units):",
            f"        unit.set_modules_to_forward_prefetch(units[{after}])",
            f"    backward = [stage, *{reverse}]",
            "    for i, unit in enumerate(backward):",
            f"        unit.set_modules_to_backward_prefetch(backward[{after}] or [unit])",
        ]
    else:
        lines += ["    for unit in units:", f"        unit.{itself.format(unit='unit')}"]
    for text in (_of_stage(reference(tree, path)) for path in others):
        lines.append(f"    {text}.{itself.format(unit=text)}")
    return [*lines, f"    return [stage, *{reverse}]"] if ahead.when == "post" else lines


def _elements(tree: Tree, order: Sequence[str]) -> Iterator[str]:
    """Yield the units in this order as elements of a list, all children of a container as one."""
    for _, group in itertools.groupby(order, lambda path: path.rpartition(".")[0]):
        for text, loop in modules_of(tree, list(group)):
            yield f"*{text}" if loop else text


def optimizer_units_function(tree: Tree, units: Sequence[str], over: str) -> str:
    """Print the function that returns the units of ZeRO-1 ``over`` axes; ``tree`` is the stage's."""
    what = "Each block is a unit, the rest of the stage another" if units else "The stage is one unit"
    how = "its gradients are summed together, and it waits for its new values when it is entered"
    summary = f"ZeRO-1 over {over}. {what}: {how}."
    lines = [f"def {OPTIMIZER_UNITS}(stage: nn.Module) -> list[nn.Module]:", *docstring(summary), "    return ["]
    for text, loop in modules_of(tree, units):
        lines.append(f"        *{text}," if loop else f"        {text},")
    return "\n".join([*lines, "        stage,", "    ]"]) + "\n"


_TAKEN = ("stage", "options", "units", "unit", "trained", "backward", "i", "nn", "torch")
"""Names in the functions that loop over modules."""


def modules_of(tree: Tree, units: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield how a function refers to modules of a stage: one, or children of a container that follow each other, then with the
    variable of a loop over them.
    """
    for parent, names in _by_parent(units).items():
        container = _at(tree, parent)
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


def _by_parent(units: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in units:
        parent, _, name = path.rpartition(".")
        found.setdefault(parent, []).append(name)
    return found


def _at(tree: Tree, path: str) -> Tree:
    for part in path.split(".") if path else ():
        tree = tree.children[part]
    return tree


def _of_stage(text: str) -> str:
    """A reference from outside of the class."""
    return text.replace("self", "stage", 1) if not text.startswith("getattr(") else text.replace("(self", "(stage")
