"""By how much a predicted step may be off, from what it consists of.

    each part ──a share of it──► seconds, one standard deviation ──parts are independent──► 7.6 ± 0.9 s

What devices compute, wait for their hosts and idle in bubbles counts as one part, since the same figures make them. The shares are
rounded from a fit to published runs, of which two thirds are within their spread (``python -m benchmarks.published`` prints how many).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

COMPUTED = ("compute", "host", "turns", "bubble")
"""Parts of a step that follow from what devices compute."""
SHARES = {"compute": 0.1, "gradients": 0.4, "optimizer": 0.35, "dp_expert": 0.4, "ep": 0.4}
"""By which share of it each part is off, one standard deviation: the rows of an even router, sums that are hidden or not."""
INSIDE, BETWEEN = 0.3, 0.5
"""The same for exposed communication on other axes, inside of nodes and between them."""
ELSEWHERE = 0.5
"""The same for a step on a CPU whose figures are those of another machine: ``graphpar calibrate`` measures one's own."""


def spreads(parts_s: Mapping[str, float], crossed: Collection[str], elsewhere: bool = False) -> dict[str, float]:
    """Return by how many seconds each part of a step may be off.

    Args:
        parts_s: in seconds, as in :class:`~graphpar.cost_models.estimates.Estimate`.
        crossed: the axes whose ranks are on several nodes.
        elsewhere: whether the figures are those of another machine.
    """
    found = {"compute": SHARES["compute"] * math.fsum(parts_s.get(part, 0.0) for part in COMPUTED)}
    for part, seconds in parts_s.items():
        if part not in COMPUTED and seconds:
            known = SHARES.get(part, BETWEEN if part in crossed else INSIDE)
            found[part] = known * seconds
    if elsewhere:
        found["figures"] = ELSEWHERE * math.fsum(parts_s.values())
    return found


def together(spreads_s: Mapping[str, float]) -> float:
    """Return the seconds by which all parts together may be off."""
    return math.hypot(*spreads_s.values())


def of_difference(first: Mapping[str, float], second: Mapping[str, float]) -> float:
    """Return by how many seconds the difference of two steps may be off: what is off in a part is off in both."""
    return math.hypot(*(first.get(part, 0.0) - second.get(part, 0.0) for part in {*first, *second}))
