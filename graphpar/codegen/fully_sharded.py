"""Print the function that names the units of a stage whose state is sharded over dp_shard.

ZeRO-2 and 3                                         ZeRO-1

for layer in stage.model.layers.values():            return [
    fully_shard(layer, **options)                        *stage.model.layers.values(),
fully_shard(stage, **options)                            stage,
                                                     ]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from graphpar.codegen.attributes import Tree, reference
from graphpar.codegen.classes import docstring
from graphpar.codegen.stage_printer import loop_variable
from graphpar.ir.program import Program, value_of
from graphpar.ir.stage import Stage
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.runtime.plan_record import DTYPES

NAME = "fully_shard_units"
OPTIMIZER_UNITS = "optimizer_units"


def gather_dtype(program: Program) -> str | None:
    """Return the dtype in which every parameter is read, in which they may be gathered; None where they differ."""
    found: set[torch.dtype] = set()
    for scope in ("", *program.blocks):
        graph = program.blocks[scope].graph if scope else program.graph
        prefix = program.prefixes(scope)[0]
        for node in graph.nodes:
            if node.op == "get_attr" and f"{prefix}{node.target}" in program.parameters:
                casts = [record_of(user).kind is Kind.COPY for user in node.users]
                found |= {value_of(user if cast else node).dtype for user, cast in zip(node.users, casts)}
    names = {dtype: name for name, dtype in DTYPES.items()}
    return names.get(found.pop()) if len(found) == 1 else None


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


def units_function(tree: Tree, units: Sequence[str], level: int, degree: int) -> str:
    """Print the function; ``tree`` is the stage's."""
    when = (
        "its forward and again for its backward" if level == 3 else "its forward, and kept until its backward is done"
    )
    what = "Each block is a unit, the rest of the stage another" if units else "The stage is one unit"
    summary = f"ZeRO-{level} over dp_shard={degree} (FSDP2). {what}; a unit is gathered for {when}."
    lines = [f"def {NAME}(stage: nn.Module, **options: Any) -> None:", *docstring(summary)]
    for text, variable in _modules(tree, units):
        if variable:
            lines += [f"    for {variable} in {text}.values():", f"        fully_shard({variable}, **options)"]
        else:
            lines.append(f"    fully_shard({text}, **options)")
    return "\n".join([*lines, "    fully_shard(stage, **options)"]) + "\n"


def optimizer_units_function(tree: Tree, units: Sequence[str], degree: int) -> str:
    """Print the function that returns the units of ZeRO-1; ``tree`` is the stage's."""
    what = "Each block is a unit, the rest of the stage another" if units else "The stage is one unit"
    how = "its gradients are summed together, and it waits for its new values when it is entered"
    summary = f"ZeRO-1 over dp_shard={degree}. {what}: {how}."
    lines = [f"def {OPTIMIZER_UNITS}(stage: nn.Module) -> list[nn.Module]:", *docstring(summary), "    return ["]
    for text, loop in _modules(tree, units):
        lines.append(f"        *{text}.values()," if loop else f"        {text},")
    return "\n".join([*lines, "        stage,", "    ]"]) + "\n"


def _modules(tree: Tree, units: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield how the function refers to its units: one, or all children of a container, then with the variable of a loop over them."""
    for parent, names in _by_parent(units).items():
        container = _at(tree, parent)
        if len(names) > 1 and container.keyed() and list(container.children) == names:
            yield (_of_stage(reference(tree, parent)) if parent else "stage"), loop_variable(parent)
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
