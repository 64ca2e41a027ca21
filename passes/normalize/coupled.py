"""What to say of operators that mix examples: why the batch is not cut, or what cutting it does.

program.couplings ──grouped by reason, layers of one name together──► one line, however many there are
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from graphpar.ir.program import Coupling, Program
from graphpar.text import listed, plural

_SHOWN = 4
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def coupled_text(couplings: Sequence[Coupling]) -> str:
    """``batch_norm mixes examples (blocks.*.bn1, blocks.*.bn2: 12 modules, model.py:19)``."""
    groups: dict[str, list[Coupling]] = {}
    for coupling in couplings:
        groups.setdefault(coupling.reason, []).append(coupling)
    return "; ".join(_group(reason, group) for reason, group in groups.items())


def _group(reason: str, group: Sequence[Coupling]) -> str:
    if len(group) == 1:
        return str(group[0])
    modules = list(dict.fromkeys(coupling.module for coupling in group if coupling.module))
    lines = list(dict.fromkeys(coupling.line for coupling in group if coupling.line))
    patterns = list(dict.fromkeys(_NUMBER.sub("*", module) for module in modules))
    shown = patterns if len(patterns) < len(modules) else modules
    counted = f": {plural(len(modules), 'module')}" if len(shown) < len(modules) or len(shown) > _SHOWN else ""
    named = f"{listed(shown, _SHOWN)}{counted}" if modules else ""
    place = ", ".join(filter(None, (named, listed(lines, _SHOWN))))
    return f"{reason} ({place})" if place else reason


def batch_warning(program: Program, devices: int, microbatches: int, replicas: int, allowed: bool) -> str | None:
    """That the batch is whole because of what is in the program, or that it is cut nevertheless; None where neither is of account."""
    pieces = microbatches * replicas
    if pieces > 1:
        if not program.couplings:
            return None
        what = plural(microbatches, "microbatch", "microbatches") + (f" of {replicas} replicas" if replicas > 1 else "")
        return f"{coupled_text(program.couplings)}: cutting the batch changes the result, and each of {what} is on its own."
    if devices == 1 or allowed or not (program.couplings or program.unsplittable):
        return None
    if program.unsplittable is not None:
        return f"The batch is not cut: {program.unsplittable}. So it is one microbatch of one replica."
    return (
        f"The batch is not cut, as examples depend on each other: {coupled_text(program.couplings)}. --allow-batch-coupling cuts it and "
        "takes statistics of each piece; operators that keep examples apart (GroupNorm, BatchNorm in eval mode) let it be cut exactly."
    )
