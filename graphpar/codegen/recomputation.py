"""Print the function that names the blocks of a stage which run their forward again in the backward.

for layer in stage.model.layers.values():
    recompute(layer)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from graphpar.codegen.attributes import Tree
from graphpar.codegen.classes import docstring
from graphpar.codegen.fully_sharded import modules_of
from graphpar.ir.plan import Plan
from graphpar.ir.program import Program
from graphpar.ir.stage import Stage
from graphpar.passes.planning.recomputation import recomputed_blocks

NAME = "recompute_units"
FUNCTIONS_OF = {"selective": "recompute_selectively", "full": "recompute"}
"""The functions of ``recomputation.py`` by kind."""

_KEPT = {
    "selective": "A block keeps what enters it and the results of KEPT and of every second of PRODUCTS (recomputation.py)",
    "full": "A block keeps only what enters it",
}


def recomputed_in(program: Program, plan: Plan, stages: Sequence[Stage]) -> dict[str, str]:
    """Return the kinds of the blocks of ``stages`` that are recomputed, by path."""
    nodes = [node for stage in stages for node in stage.graph.nodes]
    calls = dict.fromkeys(str(node.target) for node in nodes if node.op == "call_module")
    kinds = recomputed_blocks(program, plan.recompute)
    return {path: kinds[path] for path in calls if path in kinds}


def recomputation_function(tree: Tree, kinds: Mapping[str, str]) -> str:
    """Print the function; ``tree`` is the stage's."""
    used = dict.fromkeys(kinds.values())
    kept = "; ".join(f"{FUNCTIONS_OF[kind]}: {_KEPT[kind][0].lower()}{_KEPT[kind][1:]}" for kind in used)
    kept = kept if len(used) > 1 else _KEPT[next(iter(used))]
    lines = [
        f"def {NAME}(stage: nn.Module) -> None:",
        *docstring(f"Recomputation. {kept}, and runs its forward again in the backward."),
    ]
    for kind, paths in _runs(kinds):
        for text, variable in modules_of(tree, paths):
            call = FUNCTIONS_OF[kind]
            if variable:
                lines += [f"    for {variable} in {text}:", f"        {call}({variable})"]
            else:
                lines.append(f"    {call}({text})")
    return "\n".join(lines) + "\n"


def _runs(kinds: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Yield blocks of one kind that follow each other."""
    for kind, run in itertools.groupby(kinds, key=kinds.__getitem__):
        yield kind, list(run)
