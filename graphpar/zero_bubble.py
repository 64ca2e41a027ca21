"""Zero-bubble schedules with one stage a rank, which torch's runtime lacks: to be priced, not run.

A backward is split into ``I`` (the gradient of the stage's input, which the rank before waits for) and ``W`` (the
gradients of its weights, which nobody waits for), so that W fills what would be bubble (Qi et al., Zero Bubble
Pipeline Parallelism, arXiv 2401.10241).

::

    ZB-H1, 3 ranks    rank 0   F0 F1 F2 .. .. I0 W0 F3 I1 W1 ...       rank r: 3 - r forwards ahead, W is r behind I
                      rank 2   .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 ...

H1 holds as many activations as 1F1B, H2 up to twice as many. :func:`automatic` places all actions by their costs
under a limit of memory; the paper's ZB-1p and ZB-2p are its results at 1 and 2 times the memory of 1F1B.
"""

from __future__ import annotations

from collections.abc import Iterator

from graphpar.schedule_table import Action, ActionTable, Cell, make_table


def handcrafted(pp: int, microbatches: int, lead: int) -> ActionTable:
    """ZB-H1 (``lead`` 1) and ZB-H2 (``lead`` 2): section 2.3 of the paper.

    Rank r runs ahead by 1 + lead (p - 1 - r) forwards; then an input backward and a forward take turns, and the W of
    a microbatch comes lead r input backwards after its own, so that every rank holds at most 1 + lead (p - 1)
    activations.
    """
    return make_table([list(_handcrafted_rank(rank, pp, microbatches, lead)) for rank in range(pp)])


def _handcrafted_rank(rank: int, pp: int, microbatches: int, lead: int) -> Iterator[Cell]:
    ahead = min(microbatches, 1 + lead * (pp - 1 - rank))
    behind = lead * rank
    for microbatch in range(ahead):
        yield Action(rank, "F", microbatch)
    for microbatch in range(microbatches + behind):
        if microbatch < microbatches:
            yield Action(rank, "I", microbatch)
        if 0 <= microbatch - behind < microbatches:
            yield Action(rank, "W", microbatch - behind)
        if microbatch + ahead < microbatches:
            yield Action(rank, "F", microbatch + ahead)
