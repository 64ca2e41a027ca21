"""What a report says of blocks that run their forward again in the backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from graphpar.text import bytes_text, numbered_runs, plural

if TYPE_CHECKING:
    from graphpar.passes.compilation import Compilation


def recomputation_data(compilation: Compilation) -> list[dict[str, Any]]:
    """Return for each class of blocks and each kind how many there are, and what one of them sends again for a microbatch."""
    from graphpar.cost_models.repeated_work import repeated_in
    from graphpar.cost_models.work import Collective
    from graphpar.cost_models.workload import Works

    local, plan = compilation.sharded.local, compilation.plan
    works = Works(local, plan.mesh.degrees())
    rows = []
    for block in local.blocks.values():
        found = [how for path in dict.fromkeys(block.instances) if (how := compilation.recomputed.get(path))]
        for kind in dict.fromkeys(how.kind for how in found):
            how = next(how for how in found if how.kind == kind)
            again = repeated_in(works, block, how).rows.items()
            sent = [(row, times) for row, times in again if isinstance(row, Collective)]
            rows.append(
                {
                    "block": block.name,
                    "kind": kind,
                    "count": sum(how.kind == kind for how in found),
                    "keeps": {name: list(numbers) for name, numbers in how.calls.items()},
                    "collectives": sum(times for _, times in sent),
                    "bytes": int(sum(times * row.nbytes.at(plan.microbatch_size) for row, times in sent)),
                }
            )
    return rows


def kinds_text(recompute: str | Mapping[str, str]) -> str:
    """Write what a plan recomputes: ``full``, or ``budget:0.4 of layers.0-9``."""
    if isinstance(recompute, str):
        return recompute
    by_kind: dict[str, list[str]] = {}
    for path, kind in recompute.items():
        by_kind.setdefault(kind, []).append(path)
    return "; ".join(f"{kind} of {', '.join(numbered_runs(paths))}" for kind, paths in by_kind.items()) or "none"


def recomputation_text(rows: list[Mapping[str, Any]]) -> str:
    """Write which blocks are recomputed how, and what is sent again."""
    return " · ".join(
        f"{row['count']} x {row['block']} {row['kind']}, "
        + (
            f"each of which sends {plural(row['collectives'], 'collective')} of {bytes_text(row['bytes'])} again for each microbatch"
            if row["collectives"]
            else "no collective is sent again"
        )
        for row in rows
    )
