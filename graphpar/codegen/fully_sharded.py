"""Print the function that shards a stage's state with FSDP2: which modules are its units.

for layer in stage.model.layers.values():
    fully_shard(layer, **options)
fully_shard(stage, **options)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphpar.codegen.attributes import Tree, reference
from graphpar.codegen.classes import docstring
from graphpar.codegen.stage_printer import loop_variable
from graphpar.ir.program import Program
from graphpar.ir.stage import Stage

NAME = "fully_shard_units"


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
    for parent, names in _by_parent(units).items():
        container = _at(tree, parent)
        text = _of_stage(reference(tree, parent)) if parent else "stage"
        if len(names) > 1 and container.keyed() and list(container.children) == names:
            variable = loop_variable(parent)
            lines += [f"    for {variable} in {text}.values():", f"        fully_shard({variable}, **options)"]
        else:
            paths = [f"{parent}.{name}" if parent else name for name in names]
            lines += [f"    fully_shard({_of_stage(reference(tree, path))}, **options)" for path in paths]
    return "\n".join([*lines, "    fully_shard(stage, **options)"]) + "\n"


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
