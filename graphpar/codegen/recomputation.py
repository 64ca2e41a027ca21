"""Print the function that names the blocks of a stage which run their forward again in the backward.

for layer in stage.model.layers.values():
    recompute(layer)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from graphpar.codegen.attributes import Tree
from graphpar.codegen.classes import docstring
from graphpar.codegen.fully_sharded import modules_of
from graphpar.codegen.layout import wrapped
from graphpar.ir.recomputation import GATHERS, Recomputation
from graphpar.ir.stage import Stage

NAME = "recompute_units"
FUNCTIONS = ("recompute", "recompute_selectively", "recompute_but")
"""The functions of ``recomputation.py``."""
GATHERING = ("gather_again",)
"""The functions of ``gathering.py``."""

_KEPT = {
    "selective": "keeps what enters it and what recompute_selectively names (recomputation.py)",
    "full": "keeps only what enters it",
}


def recomputed_in(stages: Sequence[Stage], recomputed: Mapping[str, Recomputation]) -> dict[str, Recomputation]:
    """Return those of ``recomputed`` that ``stages`` run, in their order."""
    nodes = [node for stage in stages for node in stage.graph.nodes]
    calls = dict.fromkeys(str(node.target) for node in nodes if node.op == "call_module")
    return {path: recomputed[path] for path in calls if path in recomputed}


def recomputation_function(tree: Tree, recomputed: Mapping[str, Recomputation]) -> str:
    """Print the function; ``tree`` is the stage's, ``recomputed`` its blocks by path."""
    used = dict.fromkeys(how.kind for how in recomputed.values())
    kept = [f"a block {_KEPT.get(kind) or _budget(kind)}" for kind in used if kind != GATHERS]
    parts = [f"{'; or '.join(kept)}, and runs its forward again in the backward"] if kept else []
    parts += ["a block keeps the shards of what it gathers, and gathers again in the backward"] * (GATHERS in used)
    what = f"{'; or '.join(parts)}."
    lines = [f"def {NAME}(stage: nn.Module) -> None:", *docstring(f"Recomputation: {what}")]
    for how, paths in _runs(recomputed):
        for text, variable in modules_of(tree, paths):
            indent = "    "
            if variable:
                lines.append(f"    for {variable} in {text}:")
                indent += "    "
            lines += wrapped(_call(how, variable or text), indent)
    return "\n".join(lines) + "\n"


def _budget(kind: str) -> str:
    share = float(kind.removeprefix("budget:"))
    return f"keeps what enters it and the listed results, in all at most {share:.0%} of what it would keep otherwise"


def _call(how: Recomputation, module: str) -> str:
    writes = ", writes=({}{})".format(", ".join(f'"{name}"' for name in how.writes), "," * (len(how.writes) == 1))
    written = writes if how.writes else ""
    if how.kind == GATHERS:
        return f"gather_again({module})"
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
