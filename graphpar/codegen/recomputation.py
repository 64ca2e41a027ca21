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
from graphpar.codegen.layout import wrapped
from graphpar.cost_models.kept_results import recomputations
from graphpar.ir.plan import Plan
from graphpar.ir.program import Program
from graphpar.ir.recomputation import Recomputation
from graphpar.ir.stage import Stage
from graphpar.passes.planning.recomputation import recomputed_blocks

NAME = "recompute_units"
FUNCTIONS = ("recompute", "recompute_selectively", "recompute_but")
"""The functions of ``recomputation.py``."""

_KEPT = {
    "selective": "keeps what enters it and what recompute_selectively names (recomputation.py)",
    "full": "keeps only what enters it",
}


def recomputed_in(program: Program, plan: Plan, stages: Sequence[Stage]) -> dict[str, str]:
    """Return the kinds of the blocks of ``stages`` that are recomputed, by path."""
    nodes = [node for stage in stages for node in stage.graph.nodes]
    calls = dict.fromkeys(str(node.target) for node in nodes if node.op == "call_module")
    kinds = recomputed_blocks(program, plan.recompute)
    return {path: kinds[path] for path in calls if path in kinds}


def recomputation_function(tree: Tree, program: Program, plan: Plan, kinds: Mapping[str, str]) -> str:
    """Print the function; ``tree`` is the stage's."""
    device = plan.cluster.device.kind if plan.cluster is not None else "cpu"
    found = recomputations(program, plan.mesh.degrees(), kinds, device)
    used = list(dict.fromkeys(kinds[path] for path in found))
    kept = [f"a block {_KEPT.get(kind) or _budget(kind)}" for kind in used]
    what = f"{'; or '.join(kept)}, and runs its forward again in the backward."
    lines = [f"def {NAME}(stage: nn.Module) -> None:", *docstring(f"Recomputation: {what}")]
    for how, paths in _runs({path: found[path] for path in kinds}):
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
    if how.kind == "selective":
        return f"recompute_selectively({module})"
    if not how.calls:
        return f"recompute({module})"
    kept = ", ".join(f'"{name}": {numbers}' for name, numbers in how.calls.items())
    return f"recompute_but({module}, {{{kept}}})"


def _runs(found: Mapping[str, Recomputation]) -> Iterator[tuple[Recomputation, list[str]]]:
    """Yield blocks that are recomputed alike and follow each other."""
    for _, run in itertools.groupby(found, key=lambda path: (found[path].kind, repr(found[path].calls))):
        paths = list(run)
        yield found[paths[0]], paths
