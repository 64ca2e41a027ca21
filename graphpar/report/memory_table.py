"""What a rank holds at each moment of a step, part by part: the table of ``graphpar estimate --memory``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from graphpar.cost_models.estimates import Estimate
from graphpar.cost_models.memory import Memory
from graphpar.passes.planning.candidates import misfit
from graphpar.text import bytes_text, indices_text

MOMENTS: dict[str, Callable[[Memory, int], Memory]] = {
    "between steps": lambda peak, _: peak.between_steps(),
    "after the backward": lambda peak, gradients: peak.after_backward(gradients),
    "at the peak": lambda peak, _: peak,
}
"""The moments of a step, with what there is then, by what there is at the peak and the gradients when the optimizer's step begins."""


def memory_text(estimate: Estimate) -> list[str]:
    """Write what the fullest rank holds at each moment of a step, part by part, and all of what each rank holds."""
    fullest, stages = estimate.fullest
    ranks = [[moment(*both) for moment in MOMENTS.values()] for both in zip(estimate.memory, estimate.reduced_bytes)]
    columns = ranks[fullest]
    parts = [part.name for part in fields(Memory) if any(getattr(each, part.name) for each in columns)]
    where = (
        ""
        if len(estimate.memory) == 1
        else f" with stage{'s' if len(stages) > 1 else ''} {indices_text(stages)}, the fullest"
    )
    rows = [[f"A rank{where}", *MOMENTS]]
    rows += [[f"  {part.replace('_', ' ')}", *(_bytes(getattr(each, part)) for each in columns)] for part in parts]
    rows.append(["  together", *(bytes_text(each.total) for each in columns)])
    rows.append([f"  free of {bytes_text(estimate.memory_bytes)}", *(_free(estimate, each) for each in columns)])
    if len(estimate.memory) > 1:
        rows += [["", "", "", ""], ["Each rank of pp", *MOMENTS]]
        rows += [[f"  {rank}", *(bytes_text(each.total) for each in moments)] for rank, moments in enumerate(ranks)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        " "
        + "  ".join(
            text.ljust(width) if not column else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths))
        )
        for row in rows
    ]
    misfits = ["", f" This plan {misfit(estimate)}."] if estimate.missing_bytes > 0 else []
    return [f" {estimate.cluster}", *(line.rstrip() for line in lines), *misfits]


def _bytes(nbytes: int) -> str:
    return bytes_text(nbytes) if nbytes else ""


def _free(estimate: Estimate, memory: Memory) -> str:
    free = estimate.memory_bytes - memory.total
    return bytes_text(free) if free >= 0 else f"{bytes_text(-free)} too much"
